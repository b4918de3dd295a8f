"""The doors to the world: clock, storage and randomness, as protocols with their real implementations.

Everything below ``server`` reaches the outside only through these, so that tests can hand in a manual clock, a storage
that loses unsynced writes, or a seeded source of ids.
"""

from lakehead.env.clock import Clock, SystemClock
from lakehead.env.randomness import Randomness, SystemRandomness
from lakehead.env.storage import LocalStorage, LogFile, Storage

__all__ = ["Clock", "LocalStorage", "LogFile", "Randomness", "Storage", "SystemClock", "SystemRandomness"]
