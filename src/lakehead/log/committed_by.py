"""When rows had been committed, where their timestamps do not tell.

Commit timestamps never go back within a tablet. A wall clock that was once ahead therefore leaves timestamps that lie
in the future until it gets there: maybe in a year. Of what was in the log at a known moment it is known that it was
committed by then, and of what came since, that it was committed after it. These notes keep that, in steady time, which
no leap of the wall clock changes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

NOTES_MAX = 1000
_APART_US = 1_000_000


class CommittedBy:
    """Log ends and the moments at which they were seen; both grow from note to note. One writer, any readers."""

    def __init__(self) -> None:
        # Replaced at once, as readers run beside: ends, moments in steady time, and what makes wall time of those.
        self._notes: tuple[list[int], list[int], int] = ([], [], 0)
        self._restored: Sequence[Sequence[int]] = ()
        self._apart_us = _APART_US

    def observe(self, start: int, end: int, timestamp_us: int, now_us: int, steady_us: int) -> None:
        """Remember, when the last timestamp of the log ``[start, end)`` lies in the future, that all of it is committed
        by now.

        Args:
            now_us: the wall clock, which may leap.
            steady_us: a clock that never does, from an arbitrary start.
        """
        shift = now_us - steady_us
        ends, moments, _ = self._notes
        if self._restored and timestamp_us > now_us:  # else the clock was behind when they were written: they tell less
            ends = [e for e, time in self._restored if time <= now_us]
            moments = [time - shift for _, time in self._restored if time <= now_us]
        self._restored = ()
        if timestamp_us > now_us and (not ends or (end > ends[-1] and steady_us - moments[-1] >= self._apart_us)):
            ends, moments = [*ends, end], [*moments, steady_us]
        trimmed = bisect.bisect_right(ends, start) - 1
        if trimmed > 0:
            ends, moments = ends[trimmed:], moments[trimmed:]
        if len(ends) > NOTES_MAX:  # of two neighbours the later one holds for both
            first = (len(ends) - 1) % 2
            ends, moments = ends[first::2], moments[first::2]
            self._apart_us = 2 * (moments[-1] - moments[0]) // len(moments)
        self._notes = ends, moments, shift

    def time_us(self, end: int, timestamp_us: int) -> int:
        """When the last row below ``end``, whose commit timestamp is given, was committed: at the latest, but no later
        than a note's distance."""
        ends, moments, shift = self._notes
        at = bisect.bisect_left(ends, end)
        if at == len(ends):
            return timestamp_us
        return moments[at] + shift if at else min(timestamp_us, moments[at] + shift)

    def state(self) -> list[list[int]]:
        """All notes, as [end, wall time] each."""
        ends, moments, shift = self._notes
        return [[end, moment + shift] for end, moment in zip(ends, moments, strict=True)]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Become what `state` was taken from, from the next `observe` on."""
        self._restored = state
