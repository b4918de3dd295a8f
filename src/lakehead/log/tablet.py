"""A log tablet: batch frames with dense offsets, in segments, on one storage.

Pure core: synchronous, no threads, no clock. Its owner (the server) serialises `append`, `sync` and `trim`; reads may
run at any time beside them. Readers see what lies below `high_watermark`, which the owner moves once a batch is as
durable as the table promises.

Recovery scans the last segment. Frames carry the synced end that was known when they were written, and a clean stop
records it too: a bad frame below the highest such mark is corruption, at or above it it is the torn tail of a crash
and is cut. What is kept is synced before the tablet serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from lakehead.env.storage import Storage
from lakehead.errors import CorruptionError, OffsetOutOfRangeError, StorageError, UnsupportedFormatError
from lakehead.format.frame import Frame, FrameBody, encode_header
from lakehead.log.segment import SUFFIX, Segment
from lakehead.log.writers import WriterTable

_STOP_FILE = "stopped.json"


class LogTablet:
    """Frames of offsets ``[log_start_offset, log_end_offset)`` of one tablet."""

    def __init__(self, storage: Storage, folder: str, *, segment_bytes: int, epoch: int = 0) -> None:
        """Open the tablet's folder, creating it when it is missing, and recover.

        Raises:
            CorruptionError: a synced frame is damaged; ``context`` names file and position.
            StorageError: the disk refused.
        """
        self._storage = storage
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._epoch = epoch
        self.writers = WriterTable()
        self.last_timestamp_us = 0
        self.sync_failed = False
        storage.make_folder(folder)
        self._segments: list[Segment] = []
        try:
            self._recover()
        except BaseException:
            self.abandon()
            raise
        self.synced_end = self.log_end_offset
        self.high_watermark = self.log_end_offset

    @property
    def log_start_offset(self) -> int:
        """First offset that is still in the log."""
        return self._segments[0].base_offset

    @property
    def log_end_offset(self) -> int:
        """Offset that the next row gets."""
        return self._segments[-1].end_offset

    @property
    def size_bytes(self) -> int:
        return sum(s.size_bytes for s in self._segments)

    def append(self, bodies: Sequence[FrameBody], timestamp_us: int) -> list[tuple[int, int]]:
        """Write batches at the end, all or none, unsynced; returns ``[start, end)`` of each.

        The commit timestamp never goes back within a tablet, whatever the caller's clock does.

        Raises:
            StorageError: the disk refused; the log is as before. After a failed sync (`sync_failed`) nothing may be
                written any more.
        """
        self._roll_when_full()
        segment = self._segments[-1]
        timestamp = max(timestamp_us, self.last_timestamp_us)
        at = self.log_end_offset
        frames, results = [], []
        for body in bodies:
            header = encode_header(
                body, base_offset=at, timestamp_us=timestamp, synced_end=self.synced_end, epoch=self._epoch
            )
            frames.append((header, body.buffer, body.row_count, timestamp))
            results.append((at, at + body.row_count))
            at += body.row_count
        segment.append(frames)
        self.last_timestamp_us = timestamp
        for body, (start, end) in zip(bodies, results, strict=True):
            self.writers.note(body.stamp, start, end)
        return results

    def _roll_when_full(self) -> None:
        last = self._segments[-1]
        if last.size_bytes >= self._segment_bytes and last.end_offset > last.base_offset:
            self.sync()
            self._segments.append(Segment(self._storage, self._folder, last.end_offset))

    def sync(self) -> None:
        """Return once everything appended so far survives a power cut.

        Raises:
            StorageError: it may not; the tablet must not be used for writing any more.
        """
        if self.sync_failed:
            raise StorageError(f"an earlier sync of {self._folder} failed: restart the server", path=self._folder)
        end = self.log_end_offset
        try:
            self._segments[-1].sync()
        except BaseException:
            # The kernel may have dropped the pages and report success next time.
            self.sync_failed = True
            raise
        self.synced_end = max(self.synced_end, end)

    def advance_high_watermark(self) -> None:
        """Let readers see everything appended so far."""
        self.high_watermark = self.log_end_offset

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """Frames that hold rows of ``[start, end)``, in offset order; the first and last may hold rows outside it.
        Body checksums are not checked again.

        Raises:
            OffsetOutOfRangeError: ``start`` lies below the log start.
        """
        segments = list(self._segments)
        if start < segments[0].base_offset:
            raise OffsetOutOfRangeError(
                f"offset {start} is no longer in the log, which begins at {segments[0].base_offset}",
                offset=start,
                log_start_offset=segments[0].base_offset,
                high_watermark=self.high_watermark,
            )
        for segment in segments:
            if segment.base_offset >= end:
                return
            if segment.end_offset > start:
                yield from segment.frames(start, end)

    def offset_at(self, timestamp_us: int) -> int:
        """First offset of a frame committed at or after this time; the log end when there is none."""
        for segment in self._segments:
            if segment.first_timestamp_us is not None and segment.last_timestamp_us >= timestamp_us:
                for frame in segment.frames(segment.base_offset, segment.end_offset):
                    if frame.timestamp_us >= timestamp_us:
                        return frame.base_offset
        return self.log_end_offset

    def timestamp_at(self, offset: int) -> int | None:
        """Commit timestamp, in microseconds, of the row at this offset; None at or above the log end."""
        for frame in self.frames(offset, offset + 1):
            return frame.timestamp_us
        return None

    def replay(self, apply: Callable[[Frame], None]) -> None:
        """Call ``apply`` with every frame that has rows, in offset order: how state is rebuilt after a restart.

        Raises:
            CorruptionError: a frame is damaged.
        """
        for segment in self._segments:
            # Recovery has checked the bodies of the last segment only.
            check = segment is not self._segments[-1]
            for frame in segment.frames(segment.base_offset, segment.end_offset, check=check):
                apply(frame)

    def close(self) -> None:
        """Sync, record the synced end, release the files.

        Raises:
            StorageError: the disk refused; the files are released, what was acknowledged as synced is.
        """
        try:
            self.sync()
            record = json.dumps({"synced_end": self.log_end_offset}).encode()
            self._storage.write_atomic(f"{self._folder}/{_STOP_FILE}", record)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the files without syncing: after a failed sync, or to play a crash in tests."""
        for segment in self._segments:
            segment.close()

    def _recover(self) -> None:
        names = [n for n in self._storage.list_files(self._folder) if n.endswith(SUFFIX)]
        bases = [int(n.removesuffix(SUFFIX)) for n in names] or [0]
        record = self._storage.read_file(f"{self._folder}/{_STOP_FILE}")
        mark = int(json.loads(record)["synced_end"]) if record else 0
        for i, base in enumerate(bases):
            # Nothing trims a log yet, so the first segment starts at 0.
            expected = self._segments[-1].end_offset if self._segments else 0
            if base != expected:
                raise CorruptionError(
                    f"{self._folder}: a segment starts at offset {base} where one at {expected} must follow: restore"
                    " the missing segment",
                    path=self._folder,
                )
            segment = Segment(self._storage, self._folder, base)
            self._segments.append(segment)
            last = i == len(bases) - 1
            mark = self._recover_segment(segment, mark, last=last)
        if self.log_end_offset < mark:
            raise CorruptionError(
                f"{self._folder}: the log ends at {self.log_end_offset}, but {mark} was synced: restore the segment",
                path=self._folder,
            )
        self._segments[-1].sync()

    def _recover_segment(self, segment: Segment, mark: int, *, last: bool) -> int:
        position = 0
        try:
            for at, frame in segment.scan(check=last):
                mark = max(mark, frame.synced_end)
                self.writers.apply(frame)
                self.last_timestamp_us = max(self.last_timestamp_us, frame.timestamp_us)
                position = at + frame.length
        except UnsupportedFormatError:
            raise
        except CorruptionError:
            if not last or segment.end_offset < max(mark, segment.synced_end_after(position)):
                raise
            segment.cut(position)
        return mark
