"""The rows of small frames, kept in memory as the large batches that they would have been.

A write adds its rows; sixteen neighbours of a size become one, so that a row is copied three or four times and a reader
meets few batches, and fifteen frames that are not joined yet. What is not here, because it was written before the start
or there was no room, whoever reads it next adds. An offset's row never changes, so nothing here can be stale; the log's
files stay what counts.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from lakehead.env.threads import Lock
from lakehead.errors import SchemaChangedError
from lakehead.format.frame import COMPRESSED, Frame
from lakehead.format.joins import ROWS_MAX, fits, gathered, join
from lakehead.log.records import FrameRecords, JoinedRecords, Records
from lakehead.types import Offset, Schemas

SMALL_BYTES = 1 << 16
_SMALL_ROWS = 1 << 12
"""A frame of as many rows, or of more bytes, is read from the file as soon."""
_PART_BYTES_MAX = 8 << 20
_FAN = 16
_READ_TOGETHER_MIN = 16
_PARTS_MAX = 512
_READ_LEVEL = 99
"""What was joined by a reader is not joined with what comes after it."""

Frames = Callable[[Offset, Offset], Iterator[Frame]]
"""Frames that hold rows of ``[start, end)``, in offset order."""


class JoinedRoom:
    """What the joined rows of all tablets of a process hold together. Thread-safe."""

    def __init__(self, bytes_max: int, lock: Lock) -> None:
        self.bytes_max = bytes_max
        self.lock = lock
        self._used: OrderedDict[JoinedRows, int] = OrderedDict()
        self.bytes_held = 0

    def hold(self, rows: JoinedRows, size: int) -> None:
        """Note what one tablet's rows take now; whatever was not used for longest goes first. Inside `lock`."""
        self.bytes_held += size - self._used.pop(rows, 0)
        if size:
            self._used[rows] = size
        while self.bytes_held > self.bytes_max:
            rows, size = next(iter(self._used.items()))
            gone = rows.forget_oldest()
            self.bytes_held -= gone
            self._used[rows] = size - gone
            if not rows.parts:
                del self._used[rows]

    def touch(self, rows: JoinedRows) -> None:
        """Note that a tablet's rows are read."""
        with self.lock:
            if rows in self._used:
                self._used.move_to_end(rows)


NO_ROOM = JoinedRoom(0, contextlib.nullcontext(True))


class JoinedRows:
    """Those of one tablet. One thread adds what is written, any may read.

    Attributes:
        parts: in offset order, without overlap, perhaps with gaps; replaced at once.
    """

    def __init__(self, room: JoinedRoom) -> None:
        self._room = room
        self._start: Offset = 0
        self._size = 0
        # What was written last and is not joined yet; read by the adding thread alone.
        self._fresh_frames: list[Frame] = []
        self._fresh_rows: list[pa.RecordBatch] = []
        self._fresh_bytes = 0
        self._last: Frame | None = None
        self.parts: tuple[JoinedRecords, ...] = ()

    def add(self, frames: Sequence[Frame], rows: pa.RecordBatch) -> None:
        """Take frames that follow one another, which were appended and applied just now, if they are small."""
        n, first, last = len(frames), frames[0], self._last
        size = first.length if n == 1 else sum(f.length for f in frames)
        if first.body.flags & COMPRESSED:
            size = max(size, rows.nbytes)
        if rows.num_rows >= n * _SMALL_ROWS or size > n * SMALL_BYTES or not fits(size) or not self._room.bytes_max:
            return
        follows = last is None or (last.end_offset, last.body.schema_id) == (first.base_offset, first.body.schema_id)
        if not follows or not fits(self._fresh_bytes + size):
            self._join_fresh()
        self._fresh_frames += frames
        self._fresh_rows.append(rows)
        self._fresh_bytes += size
        self._last = frames[-1]
        if len(self._fresh_frames) >= _FAN or self._fresh_bytes > SMALL_BYTES:
            self._join_fresh()

    def _join_fresh(self) -> None:
        frames, rows = self._fresh_frames, self._fresh_rows
        if not frames:
            return
        self._fresh_frames, self._fresh_rows, self._fresh_bytes, self._last = [], [], 0, None
        part = JoinedRecords.of_frames(frames, join(rows))
        if part.end_offset > part.base_offset:
            self._put(part)
        while joined := self._neighbours():
            self._put(JoinedRecords.joined(joined), joined)

    def _neighbours(self) -> tuple[JoinedRecords, ...]:
        """The last parts, if they are to be joined."""
        last = self.parts[-_FAN:]
        if len(last) < _FAN or last[0].level != last[-1].level:
            return ()
        together = all(
            a.end_offset == b.base_offset and (a.level, a.schema_id) == (b.level, b.schema_id)
            for a, b in itertools.pairwise(last)
        )
        small = last[-1].end_offset - last[0].base_offset <= ROWS_MAX
        size = sum(p.size_bytes for p in last)
        return last if together and small and size <= _PART_BYTES_MAX and fits(size) else ()

    def _put(self, part: JoinedRecords, instead: tuple[JoinedRecords, ...] = ()) -> None:
        with self._room.lock:
            parts = self.parts
            at = bisect.bisect_right(parts, part.base_offset, key=lambda p: p.base_offset)
            if instead:
                # Some may have gone meanwhile, for want of room.
                first = at - 1
                if parts[first : first + len(instead)] != instead:
                    return
                kept = (*parts[:first], part, *parts[first + len(instead) :])
            else:
                before = parts[at - 1].end_offset if at else self._start
                after = parts[at].base_offset if at < len(parts) else part.end_offset
                if part.base_offset < before or part.end_offset > after:
                    return
                kept = (*parts[:at], part, *parts[at:])
            gone = (*instead, *kept[:-_PARTS_MAX])
            self._replace(kept[-_PARTS_MAX:], self._size + part.size_bytes - sum(p.size_bytes for p in gone))

    def _replace(self, parts: tuple[JoinedRecords, ...], size: int) -> None:
        self.parts, self._size = parts, size
        self._room.hold(self, size)

    def forget_oldest(self) -> int:
        """Give room back; returns how many bytes. Inside the room's lock."""
        oldest, self.parts = self.parts[0], self.parts[1:]
        self._size -= oldest.size_bytes
        return oldest.size_bytes

    def trim(self, start: Offset) -> None:
        """Forget what lies below the log's start."""
        with self._room.lock:
            self._start = start
            kept = tuple(p for p in self.parts if p.base_offset >= start)
            self._replace(kept, sum(p.size_bytes for p in kept))

    def clear(self) -> None:
        """Forget all: the log is read no more."""
        with self._room.lock:
            self._start = 1 << 63
            self._fresh_frames, self._fresh_rows, self._fresh_bytes, self._last = [], [], 0, None
            self._replace((), 0)

    def read(self, start: Offset, end: Offset, frames: Frames, schemas: Schemas) -> Iterator[Records]:
        """What holds the rows of ``[start, end)``, in offset order; the first and the last frame may hold rows outside.

        Args:
            frames: reads the log.
            schemas: by which frames of it are decoded, to be kept here too.
        """
        self._room.touch(self)
        at = start
        parts = self.parts
        first = max(bisect.bisect_right(parts, start, key=lambda p: p.base_offset) - 1, 0)
        for part in parts[first:]:
            if part.end_offset <= at:
                continue
            if part.base_offset >= end:
                break
            if part.base_offset > at:
                yield from self._from_file(frames(at, part.base_offset), schemas)
            yield part.within(start, end)
            at = part.end_offset
        if at < end:
            yield from self._from_file(frames(at, end), schemas)

    def _from_file(self, frames: Iterator[Frame], schemas: Schemas) -> Iterator[Records]:
        room = self._room.bytes_max // 2
        for some in gathered(frames, _measure, rows_max=ROWS_MAX, rows_enough=_SMALL_ROWS):
            if len(some) < _READ_TOGETHER_MIN:
                yield from (FrameRecords(f) for f in some if f.body.row_count)
                continue
            for _, group in itertools.groupby((f for f in some if f.body.row_count), lambda f: f.body.schema_id):
                same = list(group)
                if len(same) < _READ_TOGETHER_MIN or room <= 0:
                    yield from map(FrameRecords, same)
                    continue
                for records in self._decoded(same, schemas):
                    if isinstance(records, JoinedRecords) and records.size_bytes <= _PART_BYTES_MAX:
                        room -= records.size_bytes
                        self._put(records)
                    yield records

    @staticmethod
    def _decoded(frames: Sequence[Frame], schemas: Schemas) -> Iterator[Records]:
        """The frames joined, as far as their rows fit together; as they are when they have a schema that is newer than
        the reader."""
        try:
            schema = schemas.written(frames[0].body.schema_id).columns
        except SchemaChangedError:
            yield from map(FrameRecords, frames)
            return
        decoded = ((f, f.body.rows(schema)) for f in frames)
        # What they take is known now: a compressed frame is not as long as its rows are.
        sizes = lambda one: (one[1].num_rows, one[1].nbytes)  # noqa: E731
        for some in gathered(decoded, sizes, rows_max=ROWS_MAX, rows_enough=_SMALL_ROWS):
            of, rows = zip(*some, strict=True)
            yield JoinedRecords.of_frames(of, join(rows), level=_READ_LEVEL)


def _measure(frame: Frame) -> tuple[int, int]:
    return frame.body.row_count, frame.length
