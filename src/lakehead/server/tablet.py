"""The live tablet: a log (and for keyed tables a kv) core with the threads around it.

Writes are group-committed: whatever queued up while one group was being written is the next group, and one `fdatasync`
serves all of it. There is no timer: a lone write goes at once, in its caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from lakehead.env import Env
from lakehead.env.threads import Event, Lock
from lakehead.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    LakeheadError,
    LimitExceededError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    StorageError,
)
from lakehead.format.frame import UNKNOWN_CONTENT, Content, Frame, FrameBody, encode_body
from lakehead.format.joins import join
from lakehead.kv import Change, KvTablet
from lakehead.log import LogTablet, LogView
from lakehead.log.checkpoint import USUAL_CHECKPOINTS, CheckpointPolicy, LiveBatch, live_at, write_checkpoint
from lakehead.log.writers import WriterTable
from lakehead.server.incarnations import unfenced
from lakehead.types import TableDescriptor, TabletKey, WriteKind

_GROUP_WRITES_MAX = 256
_PLAN_BYTES_MAX = 64 << 20
_ROLL_US = 600_000_000
"""Age at which a segment is sealed at the earliest, so that it can be trimmed while writing goes on."""
T = TypeVar("T")


@dataclass(eq=False)
class PendingWrite:
    """One batch on its way into a tablet. ``rows`` is decoded for keyed tables only."""

    kind: WriteKind
    body: FrameBody
    rows: pa.RecordBatch | None
    done: Event
    content: Content = UNKNOWN_CONTENT
    result: tuple[int, int] | None = None
    error: BaseException | None = None

    def wait(self) -> tuple[int, int]:
        """Offsets ``[start, end)`` of the write, once it is durable as the table promises.

        Raises:
            OutcomeUnknownError: it may have been applied.
            LakeheadError: the write was refused; nothing of it was applied.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Tablet:
    """One tablet of a table, open for reading and writing. All methods may be called from any thread."""

    def __init__(
        self,
        desc: TableDescriptor,
        key: TabletKey,
        *,
        env: Env,
        folder: str,
        on_progress: Callable[[], None],
        run_in_background: Callable[[Callable[[], None]], object],
        seed: int,
        moment: Lock,
        checkpoint_policy: CheckpointPolicy = USUAL_CHECKPOINTS,
        incarnation: int = 0,
        fence: Callable[[], None] = unfenced,
    ) -> None:
        """Open and recover the tablet.

        Args:
            seed: 64 secret bits that keys are hashed with.
            moment: held around each move of the high watermark.
            checkpoint_policy: when one is due.
            incarnation: number of this start of the folder's owner, which frames carry.
            fence: raises `FencedError` once the folder may have another owner.
        """
        self._fence = fence
        self.key = key
        self._seed = seed
        self._env = env
        self._folder = folder
        self._desc = desc
        self._clock = env.clock
        self._on_progress = on_progress
        self._moment = moment
        self._run_in_background = run_in_background
        self._queue: list[PendingWrite] = []
        self._queue_lock = env.threads.lock()
        self._busy = False
        self._idle: Event | None = None
        self._broken: LakeheadError | None = None
        self._closed: LakeheadError | None = None
        self._state_lock = env.threads.lock()
        self._log = LogTablet(
            env.storage,
            folder,
            segment_bytes=desc.properties.segment_bytes,
            epoch=incarnation,
            checkpoint_policy=checkpoint_policy,
        )
        self._kv: KvTablet | None = None
        # Held around what moves the log's end or syncs it: of two syncs at once the kernel tells only one of a failure.
        self._log_lock = env.threads.lock()
        # Held around checkpoints and trims, of which one runs at a time.
        self._maintenance_lock = env.threads.lock()
        if desc.keyed:
            try:
                self._kv = self._restored()
            except BaseException:
                self._log.abandon()
                raise

    def _restored(self) -> KvTablet:
        kv = KvTablet(self._desc.schemas, self._desc.tablet_key_columns, self._desc.prefix_key, seed=self._seed)
        if self._log.checkpoint is not None:
            kv.reserve(self._log.checkpoint.footer.rows)
            for batch in self._log.checkpoint.batches(self._desc.schemas):
                kv.load(batch.offsets, batch.rows)
        self._log.replay(kv.apply_frame)
        return kv

    # ---- write ------------------------------------------------------------------------------------------------

    def submit(self, write: PendingWrite) -> bool:
        """Queue a write. True when the tablet was idle: the caller must then see to it that `drive` runs."""
        with self._queue_lock:
            self._queue.append(write)
            drives, self._busy = not self._busy, True
            return drives

    def drive(self) -> None:
        """Commit the next group. What queued up meanwhile is committed by a background thread, never by a thread that
        may wait for another tablet, so that no two callers can wait for each other; one group at a time, so that a
        tablet under load leaves the background threads to others in between."""
        while self._commit_next():
            try:
                self._run_in_background(self.drive)
            except RuntimeError:  # the server is closing, its background threads have ended: refuse the rest here
                continue
            return

    def _commit_next(self) -> bool:
        with self._queue_lock:
            group = self._queue[:_GROUP_WRITES_MAX]
            del self._queue[: len(group)]
        while group:
            run = self._same_plan(group)
            group = group[len(run) :]
            error: LakeheadError | None = None
            try:
                self._commit_run(run)
            except LakeheadError as e:
                error = e
            except BaseException as e:
                # Not the exception itself: the callers of a group are many, an interrupt was meant for one of them.
                error = LakeheadError(f"a write to tablet {self.key} failed inside the server: {type(e).__name__}: {e}")
                error.__cause__ = e
            for write in run:
                if write.result is None and write.error is None:
                    write.error = error
                write.done.set()
        with self._queue_lock:
            self._busy = bool(self._queue)
            if not self._busy and self._idle is not None:
                self._idle.set()
            return self._busy

    def _commit_run(self, run: list[PendingWrite]) -> None:
        if self._broken is not None:
            raise self._broken
        fresh = [w for w in run if not self._answered(w)]
        if fresh and self._kv is None:
            self._commit_appends(fresh)
        elif fresh and self._kv is not None:
            self._commit_changes(self._kv, fresh)

    @staticmethod
    def _same_plan(group: list[PendingWrite]) -> list[PendingWrite]:
        """The longest start of the group that can be planned as one batch: one kind, one set of columns, each writer
        once (a writer's next batch must see the answer of the one before), and not more than one batch can hold."""
        first, writers, size = group[0], set(), 0
        run: list[PendingWrite] = []
        for w in group:
            same = w.kind == first.kind and (w.rows is None or first.rows is None or w.rows.schema == first.rows.schema)
            size += w.body.buffer.size
            if not same or w.body.stamp.writer_id in writers or (run and size > _PLAN_BYTES_MAX):
                break
            writers.add(w.body.stamp.writer_id)
            run.append(w)
        return run

    def _answered(self, write: PendingWrite) -> bool:
        try:
            write.result = self._log.writers.answer(write.body.stamp, write.content)
        except LakeheadError as e:
            write.error = e
        return write.result is not None or write.error is not None

    def _commit_appends(self, writes: list[PendingWrite]) -> None:
        with self._broken_by_failure():
            results = self._append([w.body for w in writes], writes)
            self._advance_high_watermark()
        for w, result in zip(writes, results, strict=True):
            w.result = result
        self._on_progress()

    def _commit_changes(self, kv: KvTablet, writes: list[PendingWrite]) -> None:
        base = self._log.log_end_offset
        rows = [w.rows for w in writes if w.rows is not None]
        batch, deleted = join(rows), writes[0].kind == "delete"
        try:
            with self._state_lock:
                kv.require_change(batch, deleted=deleted)
                change = kv.plan_delete(batch) if deleted else kv.plan_upsert(batch, base)
            bodies = self._changelog(writes, change)
        except LimitExceededError as e:
            if len(writes) == 1:
                writes[0].error = e
            else:
                for w in writes:
                    self._commit_changes(kv, [w])
            return
        with self._broken_by_failure():
            results = self._append(bodies, writes)
            with self._state_lock:
                kv.apply(base, change.change_types, change.rows)
                self._advance_high_watermark()
        for w, result in zip(writes, results, strict=True):
            w.result = result
        self._on_progress()

    def _changelog(self, writes: Sequence[PendingWrite], change: Change) -> list[FrameBody]:
        """One frame per client batch, with that batch's share of the records."""
        bodies, row, start = [], 0, 0
        for w in writes:
            row += w.body.row_count
            end = int(change.ends[row - 1]) if row else 0
            part = change.part(start, end)
            bodies.append(
                encode_body(
                    part.rows,
                    schema_id=self._desc.schema_id,
                    stamp=w.body.stamp,
                    compression=self._desc.properties.compression,
                    change_types=part.change_types,
                    prev_offsets=part.prev_offsets,
                )
            )
            start = end
        return bodies

    def _advance_high_watermark(self) -> None:
        with self._moment:
            self._log.advance_high_watermark()

    def _append(self, bodies: list[FrameBody], writes: Sequence[PendingWrite]) -> list[tuple[int, int]]:
        with self._log_lock:
            self._require_owned()
            now = self._clock.now_us()
            results = self._log.append(bodies, now, [w.content for w in writes])
            if now < self._log.last_timestamp_us:
                self._log.observe(now, self._steady_us())
            if self._desc.properties.durability == "sync":
                self._log.sync()
            # Once more: what another owner may have written over is not acknowledged.
            self._require_owned()
            return results

    def _is_owned(self) -> bool:
        try:
            self._fence()
        except FencedError:
            return False
        return True

    def _require_owned(self) -> None:
        """Raises: FencedError: the folder may have another owner; from now on nothing is written here."""
        try:
            self._fence()
        except FencedError as e:
            self._broken = e
            raise

    def _steady_us(self) -> int:
        return int(self._clock.monotonic() * 1_000_000)

    @contextmanager
    def _broken_by_failure(self) -> Iterator[None]:
        """Close the tablet for writing when what is in the log could not be made durable and visible: after a failed
        fdatasync the kernel may have dropped the pages, and only a restart can tell what is on disk. A disk that
        refused an append has changed nothing.

        Raises:
            StorageError: nothing of what was to be written is in the log.
            OutcomeUnknownError: it may be.
        """
        written = self._log.frames_written
        try:
            yield
        except BaseException as e:
            refused = isinstance(e, StorageError) and self._log.frames_written == written
            if isinstance(e, FencedError) or (refused and not self._log.sync_failed):
                raise
            reason = f"tablet {self.key} takes no more writes after a failure; restart the server: {e}"
            self._broken = StorageError(reason, tablet=str(self.key))
            if refused:
                raise self._broken from e
            raise OutcomeUnknownError(
                f"{reason}. Whether this write is on the disk is known after that: sent again through the same writer"
                " it lands once, else look for its rows first",
                tablet=str(self.key),
            ) from e

    # ---- read -------------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self._log.log_start_offset

    @property
    def high_watermark(self) -> int:
        return self._log.high_watermark

    @property
    def row_count(self) -> int:
        """Live rows of a keyed tablet; readable rows of a log tablet."""
        return len(self._kv) if self._kv is not None else self.high_watermark - self.log_start_offset

    def sync(self) -> int:
        """Make everything readable durable and return the high watermark."""
        end = self.high_watermark
        if self._log.synced_end < end:
            with self._log_lock:
                if self._broken is not None:
                    raise self._broken
                with self._broken_by_failure():
                    self._log.sync()
        return end

    def view(self) -> LogView:
        """What a pinned read holds, up to the lower of its own end and the high watermark read after it."""
        return self._log.view()

    def frames(self, start: int, end: int, view: LogView | None = None) -> Iterator[Frame]:
        """Readable frames that overlap ``[start, end)``, of a view or of what there is now; see `LogView.frames`.

        Raises:
            OffsetOutOfRangeError: ``start`` was trimmed; at the call.
            ClosedError: the tablet was closed meanwhile; while iterating.
        """
        return self._while_open((view or self._log.view()).frames(start, min(end, self.high_watermark)))

    def live_at(self, end: int, columns: list[int], view: LogView | None = None) -> Iterator[LiveBatch]:
        """Rows of a keyed tablet that are live at exactly ``end``, the end of a batch, in offset order.

        Raises:
            OffsetOutOfRangeError: the log no longer reaches back to ``end``; while iterating, as the next:
            ClosedError: the tablet was closed meanwhile.
        """
        view = view or self._log.view()
        covered = view.checkpoint.offset if view.checkpoint is not None else 0
        if end < covered:
            raise OffsetOutOfRangeError(
                f"which rows of tablet {self.key} were live at offset {end} is no longer known, only from {covered} on:"
                " make the scan anew",
                offset=end,
                log_start_offset=covered,
                high_watermark=self.high_watermark,
            )
        return self._while_open(live_at(view.checkpoint, view.frames, end, self._desc.schemas, columns))

    def _while_open(self, items: Iterator[T]) -> Iterator[T]:
        try:
            yield from items
        except ClosedError as e:
            raise self._closed or e from e

    def offset_at(self, timestamp_us: int) -> int | None:
        """See `LogTablet.offset_at`."""
        at = self._log.offset_at(timestamp_us, self._clock.now_us())
        return None if at is None else min(at, self.high_watermark)

    def timestamp_at(self, offset: int) -> int | None:
        """See `LogTablet.timestamp_at`."""
        return self._log.timestamp_at(offset) if offset < self.high_watermark else None

    @property
    def writers(self) -> WriterTable:
        """Which batches of which writers the tablet holds.

        Raises:
            LakeheadError: it takes no more writes, after a failure perhaps, which left open what is on disk.
        """
        if self._broken is not None:
            raise self._broken
        return self._log.writers

    def require_change(self, write: PendingWrite) -> None:
        """See `KvTablet.require_change`; the tablet says so again when the write's turn comes. What it has already, and
        will answer as before, passes."""
        if self._kv is not None and write.rows is not None:
            with suppress(LakeheadError):
                if self._log.writers.answer(write.body.stamp, write.content) is not None:
                    return
            with self._state_lock:
                self._kv.require_change(write.rows, deleted=write.kind == "delete")

    def lookup(self, keys: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Rows of the keys that exist, and each one's position in ``keys``.

        Raises:
            LimitExceededError: they are too many bytes; see `KvTablet.require_answer`.
        """
        assert self._kv is not None
        with self._state_lock:
            slots = self._kv.find(keys)
            self._kv.require_answer(slots)
            if (slots >= 0).all():
                return self._kv.gather(slots), np.arange(len(slots))
            at = np.flatnonzero(slots >= 0)
            return self._kv.gather(slots[at]), at

    def prefix_lookup(self, prefixes: pa.RecordBatch) -> pa.RecordBatch:
        """Rows whose leading key columns equal one of these.

        Raises:
            LimitExceededError: as `lookup`.
        """
        assert self._kv is not None
        with self._state_lock:
            slots = self._kv.prefix_find(prefixes)
            self._kv.require_answer(slots)
            return self._kv.gather(slots)

    def live_rows(
        self, columns: list[int]
    ) -> tuple[int, list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], pa.RecordBatch]]]:
        """High watermark, and the live rows at exactly it as (offsets, rows) batches in offset order."""
        assert self._kv is not None
        with self._state_lock:
            return self._log.high_watermark, self._kv.live_rows(columns)

    # ---- maintenance ------------------------------------------------------------------------------------------

    def maintain(self, now_us: int, retention_us: int | None, tiered: int | None) -> None:
        """Checkpoint when a restart would have much to replay, and trim what retention allows.

        Args:
            retention_us: age at which rows may leave the log; None keeps them.
            tiered: only rows below this offset may; None for tables without a lake.

        Raises:
            StorageError: the disk refused; nothing was lost.
            CorruptionError: a file is damaged; what does not need it was done.
            ClosedError: the tablet was closed meanwhile.
        """
        with self._maintenance_lock:
            if self._broken is not None:
                return
            self._require_owned()
            with self._log_lock:
                self._log.observe(now_us, self._steady_us())
            keep, damage = self._log.log_start_offset, None
            if retention_us is not None:
                with self._log_lock:
                    self._log.roll_if_older(now_us - max(retention_us, _ROLL_US))
                try:
                    keep = self._log.old_until(now_us - retention_us)
                except CorruptionError as e:
                    damage = e  # keeps the log from being trimmed, and nothing else from being done
                keep = keep if tiered is None else min(keep, tiered)
            if self._log.wants_checkpoint(keep):
                self._checkpoint()
            with self._log_lock:
                self._log.trim(keep)
            if damage is not None:
                raise damage

    def scrub(self) -> Iterator[int]:
        """See `LogTablet.scrub`."""
        return self._while_open(self._log.scrub())

    def damages(self) -> list[CorruptionError]:
        """See `LogTablet.damages`."""
        return self._log.damages()

    def old_until(self, timestamp_us: int) -> int:
        """See `LogTablet.old_until`."""
        return self._log.old_until(timestamp_us)

    def checkpoint(self) -> None:
        """Write a checkpoint at the log's end, beside the write path.

        Raises:
            StorageError, ClosedError: as `maintain`.
        """
        with self._maintenance_lock:
            self._checkpoint()

    def _checkpoint(self) -> None:
        with self._log_lock:
            if self._broken is not None:
                raise self._broken
            with self._broken_by_failure():
                footer = self._log.take_checkpoint(self._desc.schema_id)
            view = self._log.view()
        rows: Iterable[LiveBatch] = ()
        if self._kv is not None:
            rows = self._until_closed(live_at(view.checkpoint, view.frames, footer.offset, self._desc.schemas))
        made = write_checkpoint(self._env.storage, self._folder, footer, self._desc.schema, rows)
        with self._log_lock:
            self._require_owned()
            # What was synced but is not applied yet, readers may not see: then the next one is installed.
            if self._broken is None and self.high_watermark >= footer.offset:
                self._log.install(made)

    def _until_closed(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            if self._closed is not None:
                raise self._closed
            yield item

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self, reason: LakeheadError) -> None:
        """Refuse further calls with ``reason``, finish the group under way, sync and release the files.

        Raises:
            StorageError: the last sync failed.
        """
        with self._queue_lock:
            broken, self._closed = self._broken, reason
            self._broken = broken or reason
            idle = self._idle = self._env.threads.event()
            if not self._busy:
                idle.set()
        idle.wait()
        with self._maintenance_lock, self._log_lock:
            if broken is None and self._is_owned():
                self._log.close()
            else:
                self._log.abandon()
