"""What tiering jobs ask of a server: which tables are theirs now, and which of those have news."""

from __future__ import annotations

from lakehead.protocol.messages import Int64, Message, Reply, Request
from lakehead.protocol.privileges import Privilege


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
    """The tables that the job has until it asks again."""

    tables: list[TieredTable]


class AskTieringWork(Request[TieringWork], frozen=True, kw_only=True):
    """A tiering job says that it lives, and asks what to work on. One that asks nothing for some seconds, or is
    ``leaving``, has nothing any more.

    ``tables`` are the names and patterns that it is for; `TableChoice` reads them. ``has`` are ids of tables that it
    may be working on, ``without`` of some that it leaves to others. ``number`` grows with each question: one that
    arrives late changes nothing. A ``job_id`` of no letters is nobody's, who is told of all tables.
    """

    privilege = Privilege.TIER
    job_id: str
    name: str
    number: Int64
    tables: list[str] | None
    has: list[str]
    without: list[str]
    leaving: bool = False

    @property
    def idempotent(self) -> bool:
        # Nobody waits for a server that is away to be told that it was left.
        return not self.leaving
