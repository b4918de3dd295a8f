"""The frames that came last, as they were handed in: who waits for them need not read them back from the file."""

from __future__ import annotations

from collections.abc import Sequence

from lakehead.format.frame import Frame
from lakehead.types import Offset

_BYTES_MAX = 1 << 16
_FRAMES_MAX = 16


class Newest:
    """Frames without a gap up to the newest one. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._frames: tuple[Frame, ...] = ()

    def add(self, frames: Sequence[Frame]) -> None:
        """Take what follows; what there is no room for goes, the oldest first."""
        before = self._frames
        if before and before[-1].end_offset != frames[0].base_offset:
            before = ()
        kept = (*before, *frames)[-_FRAMES_MAX:]
        size = sum([frame.length for frame in kept])
        while size > _BYTES_MAX:
            size -= kept[0].length
            kept = kept[1:]
        self._frames = kept

    def between(self, start: Offset, end: Offset) -> Sequence[Frame] | None:
        """The frames that hold rows of ``[start, end)``, in offset order; None when not all of them are here."""
        frames = self._frames
        if not frames or start < frames[0].base_offset or end > frames[-1].end_offset:
            return None
        return [f for f in frames if f.base_offset < end and f.base_offset + f.body.row_count > start]

    def clear(self) -> None:
        """Forget all: the log is read no more."""
        self._frames = ()
