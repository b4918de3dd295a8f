"""What a reader holds of a log while it is appended to and trimmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lakehead.errors import OffsetOutOfRangeError
from lakehead.format.frame import Frame
from lakehead.log.checkpoint import Checkpoint
from lakehead.log.records import FrameRecords, Records
from lakehead.log.segment import Segment
from lakehead.types import Offset

T = TypeVar("T")
_ITEMS_HELD = 32


@dataclass(frozen=True, eq=False)
class LogView:
    """What a reader holds: segments and checkpoint as of one moment, readable also after they were trimmed. The last
    segment may grow."""

    segments: tuple[Segment, ...]
    checkpoint: Checkpoint | None

    def released(self, items: Iterable[T]) -> Iterator[T]:
        """The same, read from here once: the memory that this brings in is given back now and then, and in the end."""
        for number, item in enumerate(items):
            if number % _ITEMS_HELD == 0:
                self._release()
            yield item
        self._release()

    def _release(self) -> None:
        for segment in self.segments:
            segment.release()

    @property
    def log_start_offset(self) -> Offset:
        """First offset in the log."""
        return self.segments[0].base_offset

    @property
    def log_end_offset(self) -> Offset:
        """Offset after the last row, readable or not."""
        return self.segments[-1].end_offset

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """Frames that hold rows of ``[start, end)``, in offset order; the first and last may hold rows outside it.

        Raises:
            OffsetOutOfRangeError: ``start`` lies below the log start. At the call, as the next:
            CorruptionError: a segment that no one has read since the start is damaged; while iterating.
        """
        self.require(start)
        return self._frames(start, end)

    def records(self, start: int, end: int) -> Iterator[Records]:
        """The same, as what it holds; none is joined."""
        return map(FrameRecords, self.frames(start, end))

    def require(self, start: int) -> None:
        """Raises: OffsetOutOfRangeError: ``start`` lies below the log start."""
        if start < (low := self.log_start_offset):
            raise OffsetOutOfRangeError(
                f"offset {start} is no longer in the log, which begins at {low}: subscribe from 'earliest' or 'full',"
                " or make the scan anew",
                offset=start,
                log_start_offset=low,
                high_watermark=self.segments[-1].end_offset,
            )

    def _frames(self, start: int, end: int) -> Iterator[Frame]:
        for segment in self.segments:
            if segment.base_offset >= end:
                return
            if segment.end_offset > start:
                yield from segment.frames(start, end)
