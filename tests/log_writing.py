"""Writing to a bare log, as a tablet does it."""

from __future__ import annotations

from collections.abc import Sequence

from lakehead.format.frame import Content, FrameBody
from lakehead.log import LogTablet


def write(
    log: LogTablet, bodies: Sequence[FrameBody], timestamp_us: int, contents: Sequence[Content] | None = None
) -> list[tuple[int, int]]:
    """Encode, append, unsynced, and apply batches; offsets ``[start, end)`` of each."""
    frames = log.encode(bodies, timestamp_us, contents)
    log.append_frames(frames)
    log.apply(frames)
    return [(f.base_offset, f.end_offset) for f in frames]
