"""One file of a log: frames one after the other, with a sparse index from offset to position.

A segment is named by its base offset, ``00000000000000012345.log``. The index has one entry for each 4 KiB of log or
more; it lives in memory and is rebuilt by scanning headers when a segment is opened.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import pyarrow as pa

from lakehead.env.storage import LogFile, Storage
from lakehead.errors import CorruptionError
from lakehead.format.frame import ALIGNMENT, HEADER_BYTES, MAGIC, Frame, decode_frame, decode_header

SUFFIX = ".log"
INDEX_INTERVAL_BYTES = 4096


def segment_name(base_offset: int) -> str:
    """File name of the segment that starts at this offset."""
    return f"{base_offset:020d}{SUFFIX}"


class Segment:
    """Frames of offsets ``[base_offset, end_offset)``. One appender; any number of readers at once."""

    def __init__(self, storage: Storage, folder: str, base_offset: int) -> None:
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.path = f"{folder}/{segment_name(base_offset)}"
        self.first_timestamp_us: int | None = None
        self.last_timestamp_us = 0
        self._file: LogFile = storage.open_log(self.path)
        self._offsets: list[int] = []
        self._positions: list[int] = []
        self._indexed_until = -INDEX_INTERVAL_BYTES

    @property
    def size_bytes(self) -> int:
        return self._file.size

    def append(self, frames: Sequence[tuple[bytes, pa.Buffer, int, int]]) -> None:
        """Write frames, given as (header, body, row count, timestamp), all or none, unsynced.

        Raises:
            StorageError: the disk refused; the segment is as before.
        """
        position = self._file.size
        self._file.append([part for header, body, _, _ in frames for part in (header, body)])
        for header, body, rows, timestamp in frames:
            self._note(position, rows, timestamp)
            position += len(header) + body.size

    def _note(self, position: int, rows: int, timestamp: int) -> None:
        if position - self._indexed_until >= INDEX_INTERVAL_BYTES:
            # Positions first: a reader that sees the offset must find its position.
            self._positions.append(position)
            self._offsets.append(self.end_offset)
            self._indexed_until = position
        if self.first_timestamp_us is None:
            self.first_timestamp_us = timestamp
        self.last_timestamp_us = timestamp
        self.end_offset += rows

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def frames(self, start: int, end: int, *, check: bool = False) -> Iterator[Frame]:
        """Frames that hold rows of ``[start, end)``, in order; ``check`` verifies body checksums again."""
        at = max(bisect.bisect_right(self._offsets, start) - 1, 0)
        # Frames without rows share their offset with the next one; any of them is a right place to begin.
        position = self._positions[at] if self._positions else 0
        size = self._file.size
        while position < size:
            frame = self._frame_at(position, size, check=check)
            if frame.base_offset >= end:
                return
            if frame.end_offset > start:
                yield frame
            position += frame.length

    def scan(self, *, check: bool) -> Iterator[tuple[int, Frame]]:
        """All (position, frame) from the start of the file, building the index on the way.

        Raises:
            CorruptionError: at the first frame that is not whole; what came before has been yielded.
        """
        position, size = 0, self._file.size
        while position < size:
            frame = self._frame_at(position, size, check=check)
            if frame.base_offset != self.end_offset:
                raise CorruptionError(
                    f"{self.path} at byte {position}: a frame starts at offset {frame.base_offset},"
                    f" expected {self.end_offset}",
                    path=self.path,
                    position=position,
                )
            self._note(position, frame.body.row_count, frame.timestamp_us)
            yield position, frame
            position += frame.length

    def _frame_at(self, position: int, size: int, *, check: bool) -> Frame:
        try:
            header = decode_header(self._file.read(position, min(HEADER_BYTES, size - position)))
            if position + header.length > size:
                raise CorruptionError("a batch frame is cut off")
            return decode_frame(self._file.read(position, header.length), check=check)
        except CorruptionError as e:
            raise type(e)(f"{self.path} at byte {position}: {e}", path=self.path, position=position) from e

    def synced_end_after(self, position: int) -> int:
        """Highest synced end that a frame header at or after this byte carries; 0 for none.

        What damaged one frame does not tell where the next one starts, so every aligned place is looked at.
        """
        data = self._file.read(position, self._file.size - position)
        text, found, at = data.to_pybytes(), 0, 0
        while (at := text.find(MAGIC, at)) >= 0:
            if at % ALIGNMENT == 0:
                try:
                    header = decode_header(data.slice(at))
                except CorruptionError:
                    pass
                else:
                    if self.end_offset <= header.base_offset and header.synced_end <= header.base_offset:
                        found = max(found, header.synced_end)
            at += 1
        return found

    def cut(self, position: int) -> None:
        """Drop everything from this byte on (an unacknowledged torn tail) and sync."""
        self._file.truncate(position)
        self._file.sync()
