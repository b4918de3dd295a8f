"""The doors to the world: clock, storage, randomness and threads, as protocols with their real implementations.

`Env` is all of them as one value. Whoever composes a server or a connection makes it once and hands it down, so that
tests can hand in a manual clock, a storage that loses unsynced writes, a seeded source of ids, or simulated threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakehead.env.clock import Clock, SystemClock
from lakehead.env.randomness import Randomness, SystemRandomness
from lakehead.env.storage import LocalStorage, LogFile, Storage
from lakehead.env.threads import SystemThreads, Threads

__all__ = [
    "Clock",
    "Env",
    "LocalStorage",
    "LogFile",
    "Randomness",
    "Storage",
    "SystemClock",
    "SystemRandomness",
    "SystemThreads",
    "Threads",
]


@dataclass(frozen=True)
class Env:
    """The world as one part of the program sees it."""

    clock: Clock
    storage: Storage
    randomness: Randomness
    threads: Threads

    @classmethod
    def system(cls) -> Env:
        """The real one, for whoever composes a process."""
        return cls(SystemClock(), LocalStorage(), SystemRandomness(), SystemThreads())
