"""Wall clock and monotonic clock, as one injectable thing, and one that does not follow every leap."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Time, as tablets and services see it."""

    def now_us(self) -> int:
        """Microseconds since the epoch, UTC. May jump; whoever stores it keeps it monotonic."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after that time has passed on this clock."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


LEAP_US = 60_000_000
BELIEVED_AFTER_SECONDS = 60.0


class SteadyClock:
    """Another clock, whose leaps ahead are followed only once they have lasted a minute.

    A server cannot take back the times that it stamps rows with, and it deletes what its clock calls old. So a wall
    clock that is suddenly more than `LEAP_US` ahead of the monotonic clock is believed only after
    `BELIEVED_AFTER_SECONDS`; until then time goes on from before. A clock that goes back is believed at once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._from = (clock.now_us(), clock.monotonic())
        self._leap: tuple[int, float] | None = None

    def now_us(self) -> int:
        """Microseconds since the epoch, UTC."""
        with self._lock:
            wall, at = self._clock.now_us(), self._clock.monotonic()
            expected = _later(self._from, at)
            if wall <= expected + LEAP_US:
                self._from, self._leap = (wall, at), None
                return wall
            if self._leap is None or abs(wall - _later(self._leap, at)) > LEAP_US:
                self._leap = (wall, at)
            if at - self._leap[1] < BELIEVED_AFTER_SECONDS:
                return expected
            self._from, self._leap = (wall, at), None
            return wall

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after that time has passed on this clock."""
        self._clock.sleep(seconds)


def _later(start: tuple[int, float], at: float) -> int:
    return start[0] + int((at - start[1]) * 1_000_000)
