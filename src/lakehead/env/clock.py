"""Wall clock and monotonic clock, as one injectable thing."""

from __future__ import annotations

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
