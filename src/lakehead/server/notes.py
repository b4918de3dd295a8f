"""What keeps a tablet's log short, as values: decided by one tablet, done by it and by those that follow it."""

from __future__ import annotations

from dataclasses import dataclass

ROLL_US = 600_000_000
"""Age at which a segment is sealed at the earliest, so that it can be trimmed while writing goes on."""


@dataclass(frozen=True)
class Roll:
    """Begin a new segment."""


@dataclass(frozen=True)
class MakeCheckpoint:
    """Write a checkpoint at the log's end."""


@dataclass(frozen=True)
class Trim:
    """Forget whole segments that end at or below this offset."""

    before: int


Note = Roll | MakeCheckpoint | Trim
"""What keeps a log short: `Tablet.due` decides it, `Tablet.apply_note` does it."""
