"""Rows that wait on a server until their job says that they count: what a batch job or a streaming query writes from
many tasks, of which some fail and some run twice, becomes part of the table once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from lakehead.protocol.messages import Done, Int64, Message, Reply, Request, TableRequest, Write
from lakehead.protocol.privileges import Privilege, Target
from lakehead.types import TablePath

Job: TypeAlias = Annotated[str, msgspec.Meta(max_length=256, min_length=1)]
"""Who writes: a streaming query by its id, which stays the same over restarts, or one run of a batch job."""
Attempt: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
"""One try of a task: 32 random hexadecimal digits."""
GIVEN_BYTES_MAX = 1 << 20
"""Rows of so many bytes need not be staged: they come with the request that publishes them."""
PLANNED_BYTES_MAX = 512
Planned: TypeAlias = Annotated[str, msgspec.Meta(max_length=PLANNED_BYTES_MAX)]
"""What a batch is made of, in its job's words; empty where nobody knows."""
PLANNED_KEPT = 64
"""Of so many batches of a job the server remembers what they were made of."""
PLANNED_KNOWN = 10_000
"""Of so many it knows that again when it sees it."""
BATCH_MAX = 2**62
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=BATCH_MAX)]


class Stage(TableRequest[Done], frozen=True, kw_only=True):
    """Keep one piece of what a task writes, durably, without making it part of the table. The same piece sent again
    replaces itself.

    ``write`` and the attachments are what `Write` takes, and are checked as there; stamps in the bodies mean nothing.
    """

    privilege = Privilege.WRITE
    job: Job
    batch: Natural
    attempt: Attempt
    number: Natural
    write: Write


class StagedPart(Message, frozen=True, kw_only=True):
    """What one task has staged: pieces ``0 .. pieces - 1`` of an attempt."""

    attempt: Attempt
    pieces: Natural


class StagedTable(Message, frozen=True, kw_only=True):
    """What a batch has for one table: what its tasks have staged, then ``writes``, which come with the request and are
    checked as `Write` is. ``overwrite`` names partitions that lose all other rows, also where none come, and rows of
    any partition beside them are refused; where it names none, it is those that have rows here. Readers see each of
    their tablets change at once, whatever the lake of a log table still holds of them; the lake itself follows with its
    next round. A table without partitions has no such thing.

    ``turn`` says that the rows follow from what the table had: they were made after it was asked for (`AskTurn`), and
    are refused if somebody else has published such rows, or overwritten partitions, since then (`TurnLostError`).

    With ``name`` nothing is published unless this table is called so (``database.table``), and ``schema_id`` is the
    definition in force: a job that keeps its tables open learns there that one was altered or renamed since."""

    table_id: str
    parts: list[StagedPart]
    writes: tuple[Write, ...] = ()
    overwrite: tuple[str, ...] | None = None
    name: str = ""
    schema_id: Int64 = -1
    turn: Int64 | None = None


class Published(Reply, frozen=True, kw_only=True):
    """The rows that were given; ``before`` says that the batch was part of the table already, and they were let go."""

    rows: Int64
    before: bool


class Publish(Request[Published], frozen=True, kw_only=True):
    """Make a batch part of its tables, of all or of none: for each the parts in this order, the rows of each tablet in
    the order of their pieces. A server of another folder than ``folder_id``, if one is given, refuses it. The
    attachments are the bodies of all ``writes``, in their order, `GIVEN_BYTES_MAX` bytes together at most.

    Batches of a job are published in ascending order: one that is not above the last published one of each table is
    there already. Once this is decided it is carried out, also by a server that is started again; a batch that was
    decided stays as it was decided. ``lasting`` jobs are remembered for as long as the table lives, others for a day.

    A batch that is ``whole`` has all that its job writes of it, to whatever tables: it is there already if any table
    has it that the job has written to. A step that runs again may come to rows for other tables.

    ``planned`` says what a batch of a ``lasting`` job is made of. One of the last `PLANNED_KNOWN` that is there
    already, and was made of something else, is `SequenceConflictError`, and so is one before them that does not end
    within the oldest of the last `PLANNED_KEPT` (`lakehead.server.planned`): a query that goes on from an older copy
    of its checkpoint gives the numbers that follow to whatever has come since, and none of that may be let go.
    """

    privilege = Privilege.WRITE
    folder_id: str = ""
    job: Job
    batch: Natural
    tables: Annotated[list[StagedTable], msgspec.Meta(min_length=1, max_length=64)]
    lasting: bool
    planned: Planned = ""
    whole: bool = False

    @property
    def about(self) -> Sequence[str | TablePath]:
        return [t.table_id for t in self.tables]

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        over = [(Privilege.MANAGE, t.table_id) for t in self.tables if t.overwrite is not None]
        return [*super().needs, *over]


class Turn(Reply, frozen=True, kw_only=True):
    number: Int64


class AskTurn(TableRequest[Turn], frozen=True, kw_only=True):
    """The number under which rows may be published that follow from what the table has from now on."""

    privilege = Privilege.WRITE


class Unstage(TableRequest[Done], frozen=True, kw_only=True):
    """Forget what a job has staged for a batch; nothing happens to one that is decided."""

    privilege = Privilege.WRITE
    job: Job
    batch: Natural
