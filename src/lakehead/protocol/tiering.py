"""What tiering jobs ask of a server, which tables are theirs now and which have news, and what they tell it."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from lakehead.protocol.messages import Done, Int64, Message, Reply, Request, TableRequest
from lakehead.protocol.privileges import Privilege

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
"""What servers keep of what jobs say of themselves."""


class TieredTable(Message, frozen=True, kw_only=True):
    """A lake table of a job.

    ``end`` is the sum of its tablets' high watermarks; None when the table was not used since the server began.
    ``maintained``: whether it gets compaction and expiry beside rounds.
    """

    table_id: str
    name: str
    freshness_ms: Int64
    maintained: bool
    end: Int64 | None


class TieringWork(Reply, frozen=True, kw_only=True):
    """The tables that the job has until it asks again, and the folder whose logs their ``end`` is of."""

    tables: list[TieredTable]
    folder_id: str = ""


class AskTieringWork(Request[TieringWork], frozen=True, kw_only=True):
    """A tiering job says that it lives, and asks what to work on. One that asks nothing for some seconds, or is
    ``leaving``, has nothing any more.

    ``tables`` are the names and patterns that it is for; `TableChoice` reads them. ``has`` are ids of tables that it
    may be working on, ``without`` of some that it leaves to others. ``number`` grows with each question: one that
    arrives late changes nothing. A ``job_id`` of no letters is nobody's, who is told of all tables. ``memory_bytes`` is
    what its process has in use.
    """

    privilege = Privilege.TIER
    job_id: Name
    name: Name
    number: Int64
    tables: list[str] | None
    has: list[str]
    without: list[str]
    leaving: bool = False
    memory_bytes: Int64 = 0

    @property
    def idempotent(self) -> bool:
        # Nobody waits for a server that is away to be told that it was left.
        return not self.leaving


class RoundInfo(Message, frozen=True, kw_only=True):
    """What a round did: records of the log that it moved, rows added to the lake, older ones deleted, data files added
    and their bytes, the seconds of its phases, in their order, and of CPU."""

    job: Name
    snapshot_id: Int64
    records: Int64
    rows: Int64
    deletes: Int64
    files: Int64
    bytes: Int64
    seconds: Annotated[dict[Name, float], msgspec.Meta(max_length=16)]
    cpu_seconds: float = 0.0


class ReportTiered(TableRequest[Done], frozen=True, kw_only=True):
    """A hint that the lake was committed to, by the round that is told, if it was one: the server reads from the lake
    what it holds now, and may trim."""

    privilege = Privilege.TIER
    round: RoundInfo | None = None


class JobInfo(Message, frozen=True, kw_only=True):
    """A tiering job that lives: the tables that it has, the seconds since it asked for work, and its memory."""

    name: str
    tables: Int64
    silent_seconds: float
    memory_bytes: Int64 = 0


class TableRounds(Message, frozen=True, kw_only=True):
    """The newest rounds of a table, the oldest first, and for each the seconds since it was reported."""

    table: str
    rounds: list[RoundInfo]
    ages: list[float]


class TieringStatus(Reply, frozen=True, kw_only=True):
    """What is known since the server began; tables without a round are left out."""

    jobs: list[JobInfo]
    tables: list[TableRounds]


class AskTieringStatus(Request[TieringStatus], frozen=True, kw_only=True):
    """Which jobs there are, and what rounds have lately done."""

    privilege = Privilege.DESCRIBE
