"""Rows that wait on the server until their job publishes them; see `lakehead.protocol.staging`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import pyarrow as pa

from lakehead.client.batch_writer import encoded_write
from lakehead.client.patience import ask
from lakehead.client.routes import Routes
from lakehead.client.row_routing import clustered, halves, route, slices
from lakehead.env import Env
from lakehead.errors import (
    InvalidRequestError,
    LimitExceededError,
    SchemaChangedError,
    SequenceConflictError,
    TurnLostError,
)
from lakehead.format.frame import WRITER_ID_BYTES, WriterStamp
from lakehead.format.storable import check_valid
from lakehead.protocol import messages as m
from lakehead.protocol.staging import (
    GIVEN_BYTES_MAX,
    AskTurn,
    Publish,
    Published,
    Stage,
    StagedPart,
    StagedTable,
    Unstage,
)
from lakehead.types import TableDescriptor, WriteKind

_NOBODY = WriterStamp(bytes(WRITER_ID_BYTES), 0)


@dataclass(frozen=True)
class JobBatch:
    """What is published at once: a batch of a job, which is a streaming query by its id or one run of a batch job.

    Attributes:
        planned: what it is made of, as of `Publish`; nothing that tells it from others.
    """

    job: str
    number: int = 0
    planned: str = field(default="", compare=False)


class StagedRows:
    """What one attempt at a task stages. One thread at a time.

    Args:
        attempt: 32 random hexadecimal digits.
        share: spreads the tasks of a batch over the buckets of a table without a bucket key.
    """

    def __init__(self, staging: Staging, batch: JobBatch, attempt: str, share: int = 0) -> None:
        self._staging = staging
        self._batch = batch
        self._attempt = attempt
        self._share = share
        self._pieces = 0

    def add(self, kind: WriteKind, rows: pa.Table) -> None:
        """Keep rows, which were conformed to the table's schema, on the server, durably; errors as of a write.

        More rows at once make frames of more rows, where they spread over many tablets.
        """
        parts = list(slices(clustered(self._staging.desc, rows)))
        while parts:
            batch = parts.pop(0)
            try:
                self._staging.send(self._batch, self._attempt, self._pieces, kind, batch, self._share)
            except LimitExceededError as e:
                if batch.num_rows == 1 or "batch_bytes_max" not in e.context:
                    raise
                parts = [*halves(batch), *parts]
                continue
            except InvalidRequestError:
                check_valid(batch.columns, batch.schema, "rows that are staged")  # names the row
                raise
            self._pieces += 1

    def done(self) -> StagedPart:
        """What `Staging.publish` makes part of the table."""
        return StagedPart(attempt=self._attempt, pieces=self._pieces)


class HeldRows:
    """What this process has for a batch: goes with the request that publishes it, or is staged then where it is much.
    One thread at a time.

    Args:
        share: as of `StagedRows`.
    """

    def __init__(self, staging: Staging, share: int = 0) -> None:
        self._staging = staging
        self._share = share
        self._held: list[tuple[WriteKind, pa.Table]] = []

    def add(self, kind: WriteKind, rows: pa.Table) -> None:
        """Hold rows, which were conformed to the table's schema."""
        self._held.append((kind, rows))

    @property
    def nbytes(self) -> int:
        """About how many bytes the rows have."""
        return sum(rows.nbytes for _, rows in self._held)

    def done(self) -> HeldRows:
        """What `Staging.publish` makes part of the table."""
        return self

    def encoded(self) -> list[tuple[m.Write, list[pa.Buffer]]]:
        """The writes that these are, with their bodies."""
        pieces = ((kind, batch) for kind, rows in self._held for batch in slices(rows))
        return [self._staging.encoded(kind, batch, self._share + n) for n, (kind, batch) in enumerate(pieces)]

    def staged(self, batch: JobBatch) -> StagedPart:
        """Stage them after all; errors as of `StagedRows.add`."""
        staged = self._staging.rows(batch, self._share)
        for kind, rows in self._held:
            staged.add(kind, rows)
        return staged.done()


Part: TypeAlias = StagedPart | HeldRows
"""What one attempt has for a batch."""


class Staging:
    """The staged rows of one table, as it was defined when this was made. Thread-safe."""

    def __init__(self, desc: TableDescriptor, routes: Routes, env: Env, folder_id: str = "") -> None:
        self.desc = desc
        self._routes = routes
        self._env = env
        self._folder_id = folder_id

    @property
    def _server(self) -> m.Endpoint:
        servers = self._routes.servers(self.desc.table_id)
        if len(servers) > 1:
            raise InvalidRequestError(
                f"{self.desc.path} lives on several servers, of which none can publish what the others have staged:"
                " write with append or upsert"
            )
        return servers[0]

    def rows(self, batch: JobBatch, share: int = 0) -> StagedRows:
        """A new attempt at a task."""
        return StagedRows(self, batch, self._env.randomness.uuid_hex(), share)

    def held(self, share: int = 0) -> HeldRows:
        """Rows that this process keeps until they are published."""
        return HeldRows(self, share)

    def encoded(self, kind: WriteKind, rows: pa.RecordBatch, share: int) -> tuple[m.Write, list[pa.Buffer]]:
        """One piece, of at most what a write holds."""
        desc = self.desc
        parts = list(route(desc, rows, unkeyed_bucket=share % desc.buckets))
        return encoded_write(desc, kind, rows, parts, lambda _: _NOBODY, folder_id=self._folder_id)

    def send(
        self, batch: JobBatch, attempt: str, number: int, kind: WriteKind, rows: pa.RecordBatch, share: int
    ) -> None:
        """Stage one piece."""
        write, bodies = self.encoded(kind, rows, share + number)
        request = Stage(
            table_id=self.desc.table_id,
            folder_id=self._folder_id,
            job=batch.job,
            batch=batch.number,
            attempt=attempt,
            number=number,
            write=write,
        )
        ask(self._server, self._env.clock, request, bodies)

    def publish(
        self, batch: JobBatch, parts: Sequence[Part], *, lasting: bool, overwrite: Sequence[str] | None = None
    ) -> Published:
        """Make parts of a batch part of the table, in this order; see `Publish`, also of ``overwrite``.

        Raises:
            InvalidRequestError: some of it is not there any more, or has rows beside the partitions that are
                overwritten; nothing was decided.
            OutcomeUnknownError: it was decided, and is there in part; the server goes on with it.
            LakeheadError: it is open whether the batch is there: the same call again makes it whole.
        """
        return publish_together(batch, [(self, parts)], lasting=lasting, overwrite=overwrite)

    def turn(self) -> int:
        """The turn under which rows may be published that follow from what is read after this; see `AskTurn`."""
        request = AskTurn(table_id=self.desc.table_id, folder_id=self._folder_id)
        return ask(self._server, self._env.clock, request)[0].number

    def _as_opened(self, table: StagedTable) -> StagedTable:
        return msgspec.structs.replace(table, name=str(self.desc.path), schema_id=self.desc.schema_id)

    def discard(self, batch: JobBatch) -> None:
        """Forget what is staged for a batch, unless it is decided."""
        request = Unstage(table_id=self.desc.table_id, folder_id=self._folder_id, job=batch.job, batch=batch.number)
        ask(self._server, self._env.clock, request)


def publish_together(
    batch: JobBatch,
    parts: Sequence[tuple[Staging, Sequence[Part]]],
    *,
    lasting: bool,
    overwrite: Sequence[str] | None = None,
    as_opened: bool = False,
    turns: Mapping[str, int] | None = None,
    whole: bool = False,
) -> Published:
    """Make a batch part of several tables, of all or of none; errors as of `Staging.publish`. What no task has staged
    goes along with that request, if all of it is little.

    Args:
        as_opened: refuse it if one of the tables was altered or renamed since it was opened.
        turns: by the ids of tables, of rows that follow from what these tables had; see `Staging.turn`.
        whole: it is all that the job writes of the batch, to whatever tables; see `Publish`.

    Raises:
        TurnLostError: somebody else has published such rows since then; nothing was decided.
        SchemaChangedError: one was; nothing was decided.
        SequenceConflictError: the batch is there, and was planned otherwise.
        InvalidRequestError: the tables live on several servers.
    """
    first = parts[0][0]
    if any(staging._server is not first._server for staging, _ in parts):
        raise InvalidRequestError(
            f"{', '.join(str(s.desc.path) for s, _ in parts)} live on several servers, of which none can publish what"
            " the others have staged: write them one by one"
        )

    def published(tables: Sequence[StagedTable], bodies: Sequence[pa.Buffer]) -> Published:
        if as_opened:
            tables = [staging._as_opened(table) for (staging, _), table in zip(parts, tables, strict=True)]
        if turns:
            tables = [msgspec.structs.replace(table, turn=turns.get(table.table_id)) for table in tables]
        request = Publish(
            folder_id=first._folder_id,
            job=batch.job,
            batch=batch.number,
            tables=list(tables),
            lasting=lasting,
            planned=batch.planned if lasting else "",
            whole=whole,
        )
        return ask(first._server, first._env.clock, request, bodies)[0]

    over = None if overwrite is None else tuple(overwrite)
    if given := _given(parts, overwrite=over):
        try:
            return published(*given)
        except (SchemaChangedError, SequenceConflictError, TurnLostError):
            raise
        except (InvalidRequestError, LimitExceededError):
            pass  # staging them says what is wrong with which row, and cuts what is too large for a write
    tables = []
    for staging, of_table in parts:
        staged = [part.staged(batch) if isinstance(part, HeldRows) else part for part in of_table]
        tables.append(StagedTable(table_id=staging.desc.table_id, parts=staged, overwrite=over))
    return published(tables, [])


def _given(
    parts: Sequence[tuple[Staging, Sequence[Part]]], *, overwrite: tuple[str, ...] | None
) -> tuple[list[StagedTable], list[pa.Buffer]] | None:
    """What publishes rows that no task has staged, with their bodies, if that is all and not much."""
    held = [(staging, [part for part in of_table if isinstance(part, HeldRows)]) for staging, of_table in parts]
    if sum(len(h) for _, h in held) < sum(len(p) for _, p in parts):
        return None
    if sum(part.nbytes for _, of_table in held for part in of_table) > GIVEN_BYTES_MAX:
        return None
    tables: list[StagedTable] = []
    bodies: list[pa.Buffer] = []
    for staging, of_table in held:
        encoded = [piece for part in of_table for piece in part.encoded()]
        writes = tuple(write for write, _ in encoded)
        tables.append(StagedTable(table_id=staging.desc.table_id, parts=[], writes=writes, overwrite=overwrite))
        bodies += [body for _, of_write in encoded for body in of_write]
    return (tables, bodies) if sum(body.size for body in bodies) <= GIVEN_BYTES_MAX else None
