"""The frames that came last, as they were handed in: who waits for them need not read them back from the file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lakehead.format.frame import Frame
from lakehead.types import Offset

_BYTES_MAX = 1 << 16
_FRAMES_MAX = 16


class Newest:
    """Frames without a gap up to the newest one. One thread adds, any may ask."""

    def __init__(self) -> None:
        # Each change leaves frames without a gap; `list` sees them at one moment.
        self._frames: deque[Frame] = deque()
        self._bytes = 0

    def add(self, frames: Sequence[Frame]) -> None:
        """Take what follows; what there is no room for goes, the oldest first."""
        if self._frames and self._frames[-1].end_offset != frames[0].base_offset:
            self.clear()
        kept = self._frames
        for frame in frames:
            kept.append(frame)
            self._bytes += frame.length
            while kept and (self._bytes > _BYTES_MAX or len(kept) > _FRAMES_MAX):
                self._bytes -= kept.popleft().length

    def between(self, start: Offset, end: Offset) -> Sequence[Frame] | None:
        """The frames that hold rows of ``[start, end)``, in offset order; None when not all of them are here."""
        frames = list(self._frames)
        if not frames or start < frames[0].base_offset or end > frames[-1].end_offset:
            return None
        return [f for f in frames if f.base_offset < end and f.base_offset + f.body.row_count > start]

    def clear(self) -> None:
        """Forget all: the log is read no more."""
        self._frames, self._bytes = deque(), 0
