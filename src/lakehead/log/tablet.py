"""A log tablet: batch frames with dense offsets, in segments, on one storage.

Pure core: synchronous, no threads, no clock. Its owner (the server) serialises `append_frames`, `sync`, `apply`,
`take_checkpoint`, `install` and `trim`; reads may run at any time beside them. Readers see what lies below
`high_watermark`, which the owner moves once a batch is as durable as the table promises.

A batch comes in by three steps: `encode` gives it its place and changes nothing, `append_frames` puts the frames into
the log, `apply` changes the `TabletState` as they say.

The log begins where it was trimmed to, never above the newest checkpoint, which holds what the part before it made of
the writers and, for keyed tables, of the rows. Recovery loads that checkpoint and scans the segments that reach above
it. Frames carry the synced end that was known when they were written; a clean stop and each checkpoint record it too: a
bad frame below the highest such mark is corruption, at or above it it is the torn tail of a crash and is cut. What is
kept is synced before the tablet serves.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence

import pyarrow as pa

from lakehead.env.storage import Storage
from lakehead.errors import CorruptionError, StorageError, UnsupportedFormatError
from lakehead.format.frame import HEADER_BYTES, UNKNOWN_CONTENT, Content, Frame, FrameBody
from lakehead.format.joins import ROWS_MAX, gathered
from lakehead.log import checkpoint as checkpoints
from lakehead.log.checkpoint import (
    USUAL_CHECKPOINTS,
    Checkpoint,
    CheckpointPolicy,
    Footer,
    checkpoint_name,
    named_by_offset,
    open_checkpoint,
)
from lakehead.log.committed_by import CommittedBy
from lakehead.log.joined import NO_ROOM, JoinedRoom, JoinedRows
from lakehead.log.newest import Newest
from lakehead.log.records import FrameRecords, Records
from lakehead.log.segment import Segment, SegmentId
from lakehead.log.tablet_state import TabletState
from lakehead.log.view import LogView
from lakehead.log.writers import WriterTable
from lakehead.types import Epoch, Offset, Schemas

_STOP_FILE = "stopped.json"
_START_SUFFIX = ".start"
_STEP_US = 60_000_000
"""By so much clocks are set now and then, without anyone's noticing."""
_SEGMENTS_PER_SIZE = 64
"""After so many segments the next are twice as large: each is an open file, so their number grows as a logarithm."""


class LogTablet:
    """Frames of offsets ``[log_start_offset, log_end_offset)`` of one tablet."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        *,
        segment_bytes: int,
        epoch: Epoch = 0,
        checkpoint_policy: CheckpointPolicy = USUAL_CHECKPOINTS,
        state: TabletState | None = None,
        room: JoinedRoom = NO_ROOM,
    ) -> None:
        """Open the tablet's folder, creating it when it is missing, and recover.

        Args:
            state: one to which nothing was applied; it becomes what the log comes to. None makes that of a log table.
            epoch: which start of the owner this is; it grows with each, and frames say which wrote them.
            checkpoint_policy: what `wants_checkpoint` goes by.
            room: for the rows of small frames.

        Raises:
            CorruptionError: a synced frame or the checkpoint is damaged, or a later start of the owner has written
                here; ``context`` names file and position.
            StorageError: the disk refused.
        """
        self._storage = storage
        self._folder = folder
        self.segment_bytes = segment_bytes
        self._epoch = epoch
        self._checkpoint_policy = checkpoint_policy
        self._last_epoch = 0
        self.state = state or TabletState()
        self.last_timestamp_us = 0
        self._committed_by = CommittedBy()
        self.sync_failed = False
        self.frames_written = 0
        self._newest = Newest()
        self._joined = JoinedRows(room)
        self.checkpoint: Checkpoint | None = None
        storage.make_folder(folder)
        self._segments: list[Segment] = []
        try:
            self._recover()
        except BaseException:
            self.abandon()
            raise
        self.synced_end = self.log_end_offset
        self.advance_high_watermark()

    @property
    def log_start_offset(self) -> Offset:
        """First offset that is still in the log."""
        return self._segments[0].base_offset

    @property
    def log_end_offset(self) -> Offset:
        """Offset that the next row gets."""
        return self._segments[-1].end_offset

    @property
    def writers(self) -> WriterTable:
        """What each writer was answered."""
        return self.state.writers

    @property
    def size_bytes(self) -> int:
        return sum(s.size_bytes for s in self._segments)

    @property
    def _uncovered(self) -> SegmentId:
        """The first segment that the newest checkpoint does not cover."""
        if self.checkpoint is None:
            return SegmentId(0)
        return SegmentId(self.checkpoint.offset, self.checkpoint.footer.segment)

    @property
    def checkpoint_offset(self) -> Offset:
        """The log below it is covered by the newest checkpoint; 0 when there is none."""
        return self.checkpoint.offset if self.checkpoint is not None else 0

    # ---- write ------------------------------------------------------------------------------------------------

    def encode(
        self, bodies: Sequence[FrameBody], timestamp_us: int, contents: Sequence[Content] | None = None
    ) -> list[Frame]:
        """The frames that these batches are when they are appended next; changes nothing.

        The commit timestamp never goes back within a tablet, whatever the caller's clock does; see `observe`.

        Args:
            contents: what the clients sent, one for each body.
        """
        timestamp = max(timestamp_us, self.last_timestamp_us)
        at = self.log_end_offset
        frames = []
        for body, content in zip(bodies, contents or [UNKNOWN_CONTENT] * len(bodies), strict=True):
            length = HEADER_BYTES + body.buffer.size
            frames.append(Frame(at, timestamp, self.synced_end, self._epoch, body, length, content))
            at += body.row_count
        return frames

    def append_frames(self, frames: Sequence[Frame]) -> None:
        """Write frames at the end as they are, all or none, unsynced.

        Raises:
            CorruptionError: they do not follow one another, or not the end of the log; it is as before.
            StorageError: the disk refused, or a sync failed before: the log is as it was.
        """
        self._require_synced()
        at = self.log_end_offset
        for frame in frames:
            if frame.base_offset != at:
                wrong = (
                    f"{self._folder} ends at offset {at}, and a frame of offset {frame.base_offset} was to be appended"
                )
                raise CorruptionError(
                    f"{wrong}: frames are missing, or come twice", path=self._folder, base_offset=frame.base_offset
                )
            at = frame.end_offset
        if self._segments[-1].size_bytes >= self.segment_bytes << len(self._segments) // _SEGMENTS_PER_SIZE:
            self.roll()
        self._segments[-1].append([(f.header, f.body.buffer, f.body.row_count, f.timestamp_us) for f in frames])
        self.frames_written += len(frames)
        self.last_timestamp_us = max([self.last_timestamp_us, *[f.timestamp_us for f in frames]])

    def apply(self, frames: Sequence[Frame], rows: pa.RecordBatch | None = None) -> None:
        """See `TabletState.apply`; the frames are in the log."""
        self.state.apply(frames, rows)
        self._newest.add(frames)
        if rows is not None:
            self._joined.add(frames, rows)

    def observe(self, now_us: int, steady_us: int) -> None:
        """Tell the log what time it is, by the wall clock and by one that never leaps. Where timestamps lie in the
        future, because the wall clock was ahead once, ages and positions in time go by what was observed."""
        start, end = self.log_start_offset, self.log_end_offset
        self._committed_by.observe(start, end, self.last_timestamp_us, now_us, steady_us)

    def roll(self) -> None:
        """Begin a new segment, unless the last one is empty.

        Raises:
            StorageError: the disk refused; see `sync`.
        """
        last = self._segments[-1]
        if last.size_bytes:
            self.sync()
            following = Segment(self._storage, self._folder, last.id.after(last.end_offset))
            last.seal()
            self._segments = [*self._segments, following]

    def sync(self) -> None:
        """Return once everything appended so far survives a power cut.

        Raises:
            StorageError: it may not; the tablet must not be used for writing any more.
        """
        self._require_synced()
        end = self.log_end_offset
        try:
            self._segments[-1].sync()
        except BaseException:
            self.sync_failed = True  # the kernel may have dropped the pages and report success next time
            raise
        self.synced_end = max(self.synced_end, end)

    def _require_synced(self) -> None:
        if self.sync_failed:
            raise StorageError(f"an earlier sync of {self._folder} failed: restart the server", path=self._folder)

    def advance_high_watermark(self) -> None:
        """Let readers see everything that was applied."""
        self.high_watermark, self.live_rows = self.state.offset, self.state.live_rows

    # ---- read -------------------------------------------------------------------------------------------------

    def view(self) -> LogView:
        """What there is to read now."""
        while True:
            checkpoint, segments = self.checkpoint, self._segments
            # Unless a new checkpoint came between, the segments reach back to this one.
            if checkpoint is self.checkpoint:
                return LogView(tuple(segments), checkpoint)

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """`LogView.frames` of what there is now."""
        return self.view().frames(start, end)

    def records(self, start: int, end: int, schemas: Schemas, view: LogView | None = None) -> Iterator[Records]:
        """What holds the rows of ``[start, end)``, in offset order: whole frames, or what is joined of them.

        Args:
            view: read this; None reads what there is now, and frames that came last not from the file.

        Raises:
            OffsetOutOfRangeError, CorruptionError: as `LogView.frames`.
        """
        found = self._newest.between(start, end) if view is None and start >= self.log_start_offset else None
        if found is not None:
            return map(FrameRecords, found)
        (view := view or self.view()).require(start)
        return self._joined.read(start, end, view.frames, schemas)

    def offset_at(self, timestamp_us: int, now_us: int) -> int | None:
        """First offset of a frame committed at or after this time, the log end when there is none; None when that frame
        may be one that was trimmed. Where a clock was ahead, a little more than that, never less: a frame is found by
        its own timestamp until that has passed, and for good where the clock was ahead by no more than `_STEP_US`."""
        view = self.view()

        def is_after(end: Offset, stamped_us: int) -> bool:
            known_us = self._committed_by.time_us(end, stamped_us) if timestamp_us <= now_us else stamped_us
            return (stamped_us if stamped_us - known_us <= _STEP_US else known_us) >= timestamp_us

        def or_trimmed(found: Offset) -> Offset | None:
            start, checkpoint = self.log_start_offset, self.checkpoint
            trimmed = start > 0 and checkpoint is not None and is_after(start, checkpoint.footer.timestamp_us)
            return None if trimmed else found

        for segment in view.segments:
            times = segment.timestamps_us
            if times is not None and is_after(segment.end_offset, times[1]):
                for frame in segment.frames(segment.base_offset, segment.end_offset):
                    if is_after(frame.end_offset, frame.timestamp_us):
                        at = frame.base_offset
                        return or_trimmed(at) if at == view.log_start_offset else at
        empty = view.log_start_offset == view.log_end_offset
        return or_trimmed(view.log_end_offset) if empty else view.log_end_offset

    def timestamp_at(self, offset: Offset) -> int | None:
        """When, in microseconds, the row at this offset, or the first row in the log when that was trimmed, had been
        committed at the latest; None at or above the log end."""
        view = self.view()
        offset = max(offset, view.log_start_offset)
        for frame in view.frames(offset, offset + 1):
            return self._committed_by.time_us(frame.end_offset, frame.timestamp_us)
        return None

    def old_until(self, timestamp_us: int) -> int:
        """Offset below which all was committed at or before this time, as far as whole segments tell."""
        segments = self._segments
        for segment, following in itertools.pairwise(segments):
            first = following.first_timestamp_us()
            latest = self.last_timestamp_us if first is None else first
            if self._committed_by.time_us(segment.end_offset, latest) > timestamp_us:
                return segment.base_offset
        end = self.log_end_offset
        return (
            end if self._committed_by.time_us(end, self.last_timestamp_us) <= timestamp_us else segments[-1].base_offset
        )

    # ---- checkpoint and trim ----------------------------------------------------------------------------------

    def began_until(self, timestamp_us: int) -> bool:
        """Whether the last segment began at or before this time, so that a `roll` lets it be trimmed under load."""
        last = self._segments[-1]
        first = last.first_timestamp_us()
        return first is not None and self._committed_by.time_us(last.base_offset, first) <= timestamp_us

    def wants_checkpoint(self, keep: int) -> bool:
        """Whether a restart would have much to replay, or what lies below ``keep`` could be trimmed after one."""
        size = self.checkpoint.size_bytes if self.checkpoint is not None else 0
        fresh = [s for s in self._segments if s.id >= self._uncovered]
        if sum(s.size_bytes for s in fresh) >= max(self._checkpoint_policy.log_bytes, size):
            return True
        # A checkpoint holds all rows of a keyed tablet: a large one is not written for a little, and none for frames
        # without rows that are still coming.
        last = self._segments[-1]
        to_trim = sum(
            s.size_bytes for s in fresh if s.end_offset <= keep and (s is not last or s.end_offset > s.base_offset)
        )
        policy = self._checkpoint_policy
        return to_trim > 0 and (size <= policy.small_bytes or to_trim >= min(policy.log_bytes, size // 4))

    def take_checkpoint(self, schema_id: int) -> Footer:
        """Sync, and say what a checkpoint at the log's end must say; its rows are `live_at` that offset.

        What comes after goes to a new segment, so that no frame, not even one without rows, lies both in a segment
        that may be trimmed and beyond what the checkpoint knows of the writers.

        Raises:
            StorageError: see `sync`.
        """
        self.sync()
        self.roll()
        number = self._segments[-1].id.number
        return Footer(self.log_end_offset, self.last_timestamp_us, schema_id, 0, self.state.writers.state(), number)

    def install(self, checkpoint: Checkpoint) -> None:
        """Make a checkpoint that is on disk the one that recovery begins with, and remove those before it.

        Raises:
            StorageError: an older one could not be removed; a later one will.
        """
        self.checkpoint = checkpoint
        for name in named_by_offset(self._storage, self._folder, checkpoints.SUFFIX):
            if name < checkpoint_name(checkpoint.offset):
                self._storage.remove(f"{self._folder}/{name}")

    def trim(self, before: int) -> int:
        """Forget whole segments that end at or below this offset and the checkpoint's; readers keep what they hold.
        Returns the log start.

        Raises:
            StorageError: the disk refused; what was not removed is when the log is trimmed or opened again.
        """
        gone = self._trimmable(before)
        kept = self._segments[len(gone) :]
        if kept[0].base_offset > self.log_start_offset:
            self._mark_start(kept[0].base_offset)
        self._segments = kept
        self._joined.trim(self.log_start_offset)
        for segment in gone:
            # Not closed: readers may hold it, the last of them lets it go.
            self._storage.remove(segment.path)
        return self.log_start_offset

    def can_trim(self, before: int) -> bool:
        """Whether `trim` to this offset would forget anything."""
        return bool(self._trimmable(before))

    def _trimmable(self, before: int) -> list[Segment]:
        covered = itertools.takewhile(lambda s: s.id < self._uncovered and s.end_offset <= before, self._segments[:-1])
        return list(covered)

    def _mark_start(self, start: int) -> None:
        """Note durably where the log begins from now on, so that a segment that is missing is told from a trimmed one.
        The note is a file's name: it can be changed when the disk is full."""
        old = named_by_offset(self._storage, self._folder, _START_SUFFIX)
        at = f"{self._folder}/{start:020d}{_START_SUFFIX}"
        if old:
            self._storage.rename(f"{self._folder}/{old[-1]}", at)
        else:
            self._storage.open_log(at).close()

    # ---- scrub ------------------------------------------------------------------------------------------------

    def scrub(self) -> Iterator[int]:
        """Look at every byte of sealed segments and of the checkpoint, so that damage is found before it is read;
        yields bytes looked at, now and then. What is found is in `damages`, and whoever reads there gets it.

        Raises:
            StorageError: a file could not be opened.
        """
        for segment in self._segments[:-1]:
            yield from segment.verify()
        if self.checkpoint is not None:
            yield from self.checkpoint.verify()

    def damages(self) -> list[CorruptionError]:
        """What is known to be wrong with this tablet's files."""
        files = (*self._segments, self.checkpoint)
        return [f.damage for f in files if f is not None and f.damage is not None]

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Sync, record the synced end, release the files.

        Raises:
            StorageError: the disk refused the sync; the files are released, what was acknowledged as synced is.
        """
        try:
            self.sync()
            stopped = {"synced_end": self.log_end_offset, "committed_by": self._committed_by.state()}
            record = json.dumps(stopped).encode()
            # All is synced: a full disk that takes no note of it makes recovery trust the end a little less.
            with contextlib.suppress(StorageError):
                self._storage.write_atomic(f"{self._folder}/{_STOP_FILE}", record)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the files without syncing: after a failed sync, or to play a crash in tests."""
        self._newest.clear()
        self._joined.clear()
        for segment in self._segments:
            segment.close()

    # ---- recovery ---------------------------------------------------------------------------------------------

    def _files(self, suffix: str) -> list[str]:
        return [n for n in self._storage.list_files(self._folder) if n.endswith(suffix)]

    def _recover(self) -> None:
        if self._storage.list_files(self._folder):
            # Whoever made these files may have died before their names were safe.
            self._storage.sync_folder(self._folder)
        for name in self._files(".tmp"):
            self._storage.remove(f"{self._folder}/{name}")
        self._open_checkpoint()
        ids = self._segment_ids()
        mark = max(self._stop_record(), self.checkpoint_offset)
        for id, following in zip(ids, [*ids[1:], None], strict=True):
            if self._segments and id != (due := self._segments[-1].id.after(self._segments[-1].end_offset)):
                raise self._missing(due, f"{id.name} follows where")
            sealed = following.base_offset if following is not None and following <= self._uncovered else None
            self._segments.append(Segment(self._storage, self._folder, id, sealed))
            if sealed is None:
                mark = self._recover_segment(self._segments[-1], mark, last=following is None)
                if following is not None:
                    self._segments[-1].seal()
        if self.log_end_offset < mark:
            raise CorruptionError(
                f"{self._folder}: the log ends at {self.log_end_offset}, but {mark} was synced: restore the segment",
                path=self._folder,
            )
        if self._last_epoch > self._epoch:
            raise CorruptionError(
                f"{self._folder} was written by start {self._last_epoch} of its server, this is start {self._epoch}:"
                " the folder is not the one that this log belongs to; restore them together",
                path=self._folder,
            )
        self._segments[-1].sync()

    def _stop_record(self) -> int:
        """The synced end that a clean stop recorded; 0 without one."""
        path = f"{self._folder}/{_STOP_FILE}"
        record = self._storage.read_file(path)
        if record is None:
            return 0
        try:
            found = json.loads(record)
            self._committed_by.restore([[int(end), int(time)] for end, time in found.get("committed_by", [])])
            return int(found["synced_end"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            raise CorruptionError(f"{path} is damaged ({e}): restore or remove it", path=path, position=0) from e

    def _open_checkpoint(self) -> None:
        names = named_by_offset(self._storage, self._folder, checkpoints.SUFFIX)
        if not names:
            return
        self.checkpoint = open_checkpoint(self._storage, f"{self._folder}/{names[-1]}")
        self.state.restore(self.checkpoint)
        self.last_timestamp_us = self.checkpoint.footer.timestamp_us
        for name in names[:-1]:
            self._storage.remove(f"{self._folder}/{name}")

    def _segment_ids(self) -> list[SegmentId]:
        """The segments, once what a trim has left is removed."""
        starts = [
            int(n.removesuffix(_START_SUFFIX)) for n in named_by_offset(self._storage, self._folder, _START_SUFFIX)
        ]
        start = SegmentId(max(starts, default=0))
        ids = []
        for id in sorted(filter(None, map(SegmentId.of_name, self._storage.list_files(self._folder)))):
            if id < start:
                self._storage.remove(f"{self._folder}/{id.name}")
            else:
                ids.append(id)
        covered = self._uncovered
        if start > covered:
            raise self._missing(covered, f"the log starts at {start.base_offset} where a checkpoint or")
        if not ids and not covered.base_offset:
            return [start]
        # Those that begin at the start and hold no rows go, once they are covered, without a note.
        if not ids or ids[0].base_offset != start.base_offset or (ids[0].number and ids[0] > covered):
            raise self._missing(start, f"{ids[0].name} is the first segment where" if ids else "")
        return ids

    def _missing(self, id: SegmentId, what: str) -> CorruptionError:
        text = f"{what} segment {id.name} must be: restore the missing file".strip()
        return CorruptionError(f"{self._folder}: {text}", path=self._folder)

    def _recover_segment(self, segment: Segment, mark: int, *, last: bool) -> int:
        position, failure = 0, None

        def whole() -> Iterator[Frame]:
            nonlocal mark, position, failure
            try:
                for at, frame in segment.scan(self._last_epoch):
                    mark = max(mark, frame.synced_end)
                    self.last_timestamp_us = max(self.last_timestamp_us, frame.timestamp_us)
                    self._last_epoch = frame.epoch
                    position = at + frame.length
                    yield frame
            except UnsupportedFormatError:
                raise
            except CorruptionError as e:
                failure = e

        for some in gathered(whole(), _measure, rows_max=ROWS_MAX, rows_enough=ROWS_MAX // 4):
            self.apply(some)
        if failure is not None:
            # A whole frame that may not be here is no torn tail.
            was_written = not last or segment.is_whole_at(position)
            if was_written or segment.end_offset < max(mark, segment.synced_end_after(position)):
                raise failure
            segment.cut(position)
        return mark


def _measure(frame: Frame) -> tuple[int, int]:
    return frame.body.row_count, frame.length
