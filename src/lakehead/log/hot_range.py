"""Which offsets the log of a tablet has, as those who follow it are told."""

from __future__ import annotations

from typing import NamedTuple

from lakehead.types import Offset


class HotRange(NamedTuple):
    """Offsets ``[log_start, high_watermark)`` of one tablet, as of one moment.

    Attributes:
        overwritten: rows that a lake has from below are gone.
    """

    log_start: Offset
    high_watermark: Offset
    overwritten: Offset = 0
