"""What executors have looked up, remembered while it is fresh enough: bounded, one for each join and process."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lakehead.env.clock import Clock

KEYS_MAX = 1 << 17
BYTES_MAX = 32 << 20
"""Of one join; what was asked first goes first."""
JOINS_MAX = 8
"""Joins of which a process remembers something; the one that was used longest ago goes first."""

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
Ask = Callable[[pa.Table], tuple[Positions, pa.Table]]
"""For keys, which may repeat, the position of each one's row, -1 for none, and the rows."""


@dataclass(frozen=True, eq=False)
class _Answer:
    """The rows that were there for some keys, a moment after ``at``."""

    at: float
    keys: Sequence[Hashable]
    rows: pa.Table


class Remembered:
    """Answers for the keys of one table, absent ones included. One thread at a time.

    Args:
        seconds: how long an answer holds, from before it was asked for.
        clock: whose monotonic time that is.
    """

    def __init__(self, seconds: float, clock: Clock, *, keys_max: int = KEYS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._seconds = seconds
        self._clock = clock
        self._keys_max = keys_max
        self._bytes_max = bytes_max
        self._answers: deque[_Answer] = deque()
        self._places: dict[Hashable, tuple[_Answer, int]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._places)

    def places(self, keys: pa.Table, ask: Ask) -> tuple[Positions, pa.Table]:
        """What ``ask`` would say of keys, which it is asked of those that are not remembered."""
        now = self._clock.monotonic()
        while self._answers and now - self._answers[0].at >= self._seconds:
            self._forget_oldest()
        wanted = list(zip(*map(_plain, keys.columns), strict=True))
        known = [self._places.get(key) for key in wanted]
        unknown = [n for n, place in enumerate(known) if place is None]
        used: dict[_Answer, int] = {}  # where its rows begin in what is returned
        rows: list[pa.Table] = []
        at = np.full(len(wanted), -1, np.int64)
        total = 0
        if unknown or not wanted:
            found, fresh = ask(keys.take(pa.array(unknown, pa.int64())))
            at[unknown] = found
            rows.append(fresh)
            total = fresh.num_rows
            self._remember(_Answer(now, [wanted[n] for n in unknown], fresh), found)
        for n, place in enumerate(known):
            if place is not None and place[1] >= 0:
                answer, row = place
                if answer not in used:
                    used[answer] = total
                    rows.append(answer.rows)
                    total += answer.rows.num_rows
                at[n] = used[answer] + row
        return at, pa.concat_tables(rows) if rows else self._answers[-1].rows

    def _remember(self, answer: _Answer, found: Positions) -> None:
        if not answer.keys or len(answer.keys) > self._keys_max or answer.rows.nbytes > self._bytes_max:
            return
        self._answers.append(answer)
        self.nbytes += answer.rows.nbytes
        for key, row in zip(answer.keys, found.tolist(), strict=True):
            self._places[key] = answer, row
        while len(self._places) > self._keys_max or self.nbytes > self._bytes_max:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._answers.popleft()
        self.nbytes -= oldest.rows.nbytes
        for key in oldest.keys:
            place = self._places.get(key)
            if place is not None and place[0] is oldest:
                del self._places[key]


def _plain(column: pa.ChunkedArray) -> list[Hashable]:
    """Values that are equal where those of the column are; moments as numbers, which Python's have no room for."""
    t = column.type
    if pa.types.is_temporal(t):
        column = column.cast(pa.int32() if t.bit_width == 32 else pa.int64())
    plain: list[Hashable] = column.to_pylist()
    return plain


class RememberedJoins:
    """What a process remembers of its joins, by what they ask for. One thread at a time."""

    def __init__(self) -> None:
        self._joins: OrderedDict[Hashable, Remembered] = OrderedDict()

    def of(self, join: Hashable, seconds: float, clock: Clock) -> Remembered:
        """What is remembered for a join."""
        found = self._joins.pop(join, None)
        found = self._joins[join] = Remembered(seconds, clock) if found is None else found
        while len(self._joins) > JOINS_MAX:
            self._joins.popitem(last=False)
        return found
