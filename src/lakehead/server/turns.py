"""Whose turn it is to publish rows that follow from what a table has: of two that have read a sum before either has
published the new one, the second would add nothing to what the first has added."""

from __future__ import annotations

from collections.abc import Callable

from lakehead.env import Threads
from lakehead.errors import TurnLostError, UnavailableError

_OF_A_START = 32
"""Bits of a turn's number that count within one start of the server."""


class Turns:
    """The number of each table's turn, which is another one after each publication of such rows, or that takes rows
    away, has begun and after it has ended, and after a restart. Who asks for it, then reads, then publishes under it
    has read what no other one has changed. Thread-safe.

    Args:
        start: number of this start of the server, greater than all before.
    """

    def __init__(self, start: int, threads: Threads) -> None:
        self._first = start << _OF_A_START
        self._lock = threads.lock()
        self._numbers: dict[str, int] = {}
        self._begun: dict[str, set[str]] = {}

    def number(self, table_id: str) -> int:
        with self._lock:
            return self._numbers.get(table_id, self._first)

    def begin(self, table_id: str, job: str) -> None:
        """What a job publishes to a table may be there in part from now on."""
        with self._lock:
            self._numbers[table_id] = self._numbers.get(table_id, self._first) + 1
            self._begun.setdefault(table_id, set()).add(job)

    def end(self, table_id: str, job: str) -> None:
        """All of that is there."""
        with self._lock:
            if job in (begun := self._begun.get(table_id, set())):
                self._numbers[table_id] += 1
                begun.remove(job)

    def forget(self, table_id: str) -> None:
        """Forget a table that is dropped."""
        with self._lock:
            self._numbers.pop(table_id, None)
            self._begun.pop(table_id, None)

    def require(self, table_id: str, number: int, unfinished: Callable[[str], bool]) -> None:
        """Refuse what follows from older rows than the table has.

        Args:
            unfinished: whether something of a job is decided and not all there.

        Raises:
            TurnLostError: the turn is another one by now.
            UnavailableError: what somebody else has published is not all there yet.
        """
        with self._lock:
            now = self._numbers.get(table_id, self._first)
            begun = list(self._begun.get(table_id, ()))
        if left := [job for job in begun if unfinished(job)]:
            raise UnavailableError(
                f"what {left[0]} has published is not all there yet, and rows that follow from it have to wait: the"
                " server goes on with it now and then",
                job=left[0],
            )
        if now != number:
            raise TurnLostError(
                "somebody else has published rows that follow from what the table had, since it was read:"
                " read it again",
                turn=now,
            )
