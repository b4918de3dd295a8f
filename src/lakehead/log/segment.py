"""One file of a log: frames one after the other, with a sparse index from offset to position.

A segment is named by its base offset, ``00000000000000012345.log``. Frames without rows may fill one; the next begins
at the same offset, with a number: ``00000000000000012345-1.log``. The index has one entry for each 4 KiB of log or
more; it lives in memory and is rebuilt by scanning headers: when a segment is recovered, or, of a sealed one that a
checkpoint covers, when it is first read.
"""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from lakehead.env.storage import LogFile, Storage
from lakehead.errors import CorruptionError
from lakehead.format.frame import ALIGNMENT, HEADER_BYTES, MAGIC, Frame, decode_frame, decode_header
from lakehead.log.verified import ReadAhead, Watch, copied
from lakehead.types import Epoch, Offset

SUFFIX = ".log"
INDEX_INTERVAL_BYTES = 4096
_Read: TypeAlias = Callable[[int, int], pa.Buffer]


_NAME = re.compile(r"(\d{20})(?:-([1-9]\d*))?\.log")


class SegmentId(NamedTuple):
    """Which segment of a log; they are in the order of their ids.

    Attributes:
        base_offset: offset of the first row.
        number: how many segments before it begin at the same offset: they hold frames without rows alone.
    """

    base_offset: Offset
    number: int = 0

    @property
    def name(self) -> str:
        """Of the file."""
        number = f"-{self.number}" if self.number else ""
        return f"{self.base_offset:020d}{number}{SUFFIX}"

    @classmethod
    def of_name(cls, name: str) -> SegmentId | None:
        """The segment whose file has this name; None when it is no segment's."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2] or 0)) if found else None

    def after(self, end_offset: Offset) -> SegmentId:
        """The segment that follows this one, which ends at that offset."""
        return SegmentId(end_offset, self.number + 1 if end_offset == self.base_offset else 0)


class _Index:
    """Where frames lie, from the start of a segment up to ``end_offset``."""

    def __init__(self, base_offset: Offset, epoch: Epoch = 0) -> None:
        self.end_offset = base_offset
        self.epoch = epoch
        self.timestamps_us: tuple[int, int] | None = None
        self._offsets: list[int] = []
        self._positions: list[int] = []
        self._indexed_until = -INDEX_INTERVAL_BYTES

    def note(self, position: int, rows: int, timestamp: int) -> None:
        if position - self._indexed_until >= INDEX_INTERVAL_BYTES:
            # Positions first: a reader that sees the offset must find its position.
            self._positions.append(position)
            self._offsets.append(self.end_offset)
            self._indexed_until = position
        first, _ = self.timestamps_us or (timestamp, timestamp)
        self.timestamps_us = (first, timestamp)
        self.end_offset += rows

    def position_before(self, offset: Offset) -> int:
        # Frames without rows share their offset with the next one; any of them is a right place to begin.
        at = max(bisect.bisect_right(self._offsets, offset) - 1, 0)
        return self._positions[at] if self._positions else 0


def _check_of(segment: weakref.ref[Segment]) -> Callable[[], Iterator[int]]:
    """What looks at a segment, and does not hold it: its file is to be closed with its last reader, and not when Python
    finds the cycle, before which the place of what was trimmed is not free."""

    def check() -> Iterator[int]:
        looked_at = segment()
        assert looked_at is not None, "its own watch asks"
        return looked_at._check()

    return check


class Segment:
    """Frames of offsets ``[base_offset, end_offset)``. One appender; any number of readers at once."""

    def __init__(self, storage: Storage, folder: str, id: SegmentId, sealed_end: int | None = None) -> None:
        """Open a segment's file; ``sealed_end`` is where it ends, None when only `scan` can tell."""
        self.id = id
        self.base_offset = id.base_offset
        self.path = f"{folder}/{id.name}"
        self._file: LogFile = storage.open_log(self.path)
        self._storage = storage
        self._watch = Watch(storage, self.path, _check_of(weakref.ref(self)))
        self._sealed_end = sealed_end
        self._first_us: int | None = None
        self._index = _Index(id.base_offset) if sealed_end is None else None

    @property
    def end_offset(self) -> Offset:
        """Offset after the last row."""
        return self._index.end_offset if self._index is not None else self._sealed_end or 0

    @property
    def timestamps_us(self) -> tuple[int, int] | None:
        """Commit timestamps of the first and the last frame; None while there is none."""
        return self._indexed().timestamps_us

    def first_timestamp_us(self) -> int | None:
        """Commit timestamp of the first frame, read alone; None while there is none."""
        if self._index is not None:
            return self._index.timestamps_us[0] if self._index.timestamps_us is not None else None
        if self._first_us is None:
            header = self._storage.read_range(self.path, 0, HEADER_BYTES)
            self._first_us = decode_header(
                header if header is not None else self._file.read(0, HEADER_BYTES)
            ).timestamp_us
        return self._first_us

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
        index = self._indexed()
        for header, body, rows, timestamp in frames:
            index.note(position, rows, timestamp)
            position += len(header) + body.size

    def seal(self) -> None:
        """Nothing is appended any more: whoever writes the file from now on damages it."""
        self._watch.trust()
        self._sealed_end = self.end_offset

    @property
    def damage(self) -> CorruptionError | None:
        """What was found when the file was last looked at."""
        return self._watch.damage

    def verify(self) -> Iterator[int]:
        """Look at all bytes of a sealed segment, copied, and remember what is wrong with them in `damage`; yields how
        many it has looked at, now and then."""
        return self._watch.check()

    def _check(self) -> Iterator[int]:
        index = _Index(self.base_offset)
        for _, frame in self._scan(index, copied(self._storage, self.path).read):
            yield frame.length
        self._take(index)

    def _indexed(self) -> _Index:
        """The index, which a sealed segment gets when it is first read; two threads may build it at once."""
        if self._index is None:
            self._watch.require_whole()
        if self._index is None:  # the file was trimmed before anyone had read it: what is open is there
            index = _Index(self.base_offset)
            for _ in self._scan(index, self._file.read):
                pass
            self._take(index)
        assert self._index is not None
        return self._index

    def _take(self, index: _Index) -> None:
        if index.end_offset != self._sealed_end:
            raise CorruptionError(
                f"{self.path} ends at offset {index.end_offset}, but the next segment starts at"
                f" {self._sealed_end}: restore it",
                path=self.path,
                position=self._file.size,
            )
        self._index = self._index or index

    def sync(self) -> None:
        self._file.sync()

    def release(self) -> None:
        """See `LogFile.release`."""
        self._file.release()

    def close(self) -> None:
        self._file.close()

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """Frames that hold rows of ``[start, end)``, in order. What was here when this process opened the file was
        checked then, or is at the first read; a sealed file that was touched since is checked anew.

        Raises:
            CorruptionError: the file is not as it was written.
        """
        if self._sealed_end is not None:
            self._watch.require_whole()
        position = self._indexed().position_before(start)
        size = self._file.size
        # A chunk at a time is asked for, which asks the file for its size: to touch what was cut kills the process.
        read = ReadAhead(lambda start, length: self._file.read(start, min(length, size - start))).read
        while position < size:
            frame = self._frame_at(position, size, read, check=False)
            if frame.base_offset >= end:
                return
            if frame.end_offset > start:
                yield frame
            position += frame.length

    def scan(self, epoch: Epoch = 0) -> Iterator[tuple[int, Frame]]:
        """All (position, frame) from the start of the file, checksums verified, building the index on the way.

        Args:
            epoch: which start of the owner wrote what lies before this segment.

        Raises:
            CorruptionError: at the first frame that is not whole or may not be here; what came before has been
                yielded.
        """
        self._index = _Index(self.base_offset, epoch)
        yield from self._scan(self._index, copied(self._storage, self.path).read)

    def _scan(self, index: _Index, read: _Read) -> Iterator[tuple[int, Frame]]:
        position, size = 0, self._file.size
        while position < size:
            frame = self._frame_at(position, size, read, check=True)
            if frame.base_offset != index.end_offset:
                raise self._foreign(position, f"starts at offset {frame.base_offset}, expected {index.end_offset}")
            if frame.epoch < index.epoch:
                raise self._foreign(
                    position, f"was written by start {frame.epoch} of a server, after start {index.epoch}"
                )
            index.epoch = frame.epoch
            index.note(position, frame.body.row_count, frame.timestamp_us)
            yield position, frame
            position += frame.length

    def _foreign(self, position: int, what: str) -> CorruptionError:
        """A frame that is whole and may not be here. No crash leaves such a thing."""
        return CorruptionError(
            f"{self.path} at byte {position}: a frame {what}: two servers wrote this log, or the file is of another."
            " Look at it with `lakehead inspect segment`, and restore the log",
            path=self.path,
            position=position,
        )

    def is_whole_at(self, position: int) -> bool:
        """Whether a frame that is as it was written begins at this byte."""
        try:
            self._frame_at(position, self._file.size, self._file.read, check=True)
        except CorruptionError:
            return False
        return True

    def _frame_at(self, position: int, size: int, read: _Read, *, check: bool) -> Frame:
        try:
            header = decode_header(read(position, min(HEADER_BYTES, size - position)))
            if position + header.length > size:
                raise CorruptionError("a batch frame is cut off")
            return decode_frame(read(position, header.length), check=check, header=header)
        except CorruptionError as e:
            if e.context.get("path") == self.path:
                raise
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
