"""The live tablet: a log and what it comes to, with the locks around them.

Writes come in groups (`lakehead.server.group_commit`). A group is planned, its frames are encoded, a `Committer` makes
them durable, and `apply` changes the state as they say: the only way it changes, here as in a restart and in a standby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

# Before there are threads: one that comes to numba here while another opens a lake, and so comes to pandas, would meet
# it in this package, whose parts import each other, and an import that Python gives up leaves numba broken for good.
import numpy.random  # isort: skip
import numpy as np
import pyarrow as pa

from lakehead.env import Env
from lakehead.env.threads import Lock
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
from lakehead.format.frame import Frame, FrameBody
from lakehead.format.joins import join
from lakehead.format.read_as import given_as
from lakehead.log import LogTablet, LogView
from lakehead.log.checkpoint import USUAL_CHECKPOINTS, CheckpointPolicy, LiveBatch, live_at, write_checkpoint
from lakehead.log.joined import NO_ROOM, JoinedRoom
from lakehead.log.records import Records
from lakehead.log.tablet_state import TabletState
from lakehead.log.writers import WriterTable
from lakehead.server.changelog import changelog
from lakehead.server.committer import Committers, local_committer
from lakehead.server.group_commit import End, GroupCommit, PendingWrite, rows_if_small
from lakehead.server.incarnations import unfenced
from lakehead.server.notes import ROLL_US, MakeCheckpoint, Note, Roll, Trim
from lakehead.server.unseen import Unseen
from lakehead.types import Offset, Schemas, TableDescriptor, TabletKey

if TYPE_CHECKING:
    from lakehead.kv import KvTablet
    from lakehead.kv.keys import KeyBatch

T = TypeVar("T")


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
        committers: Committers = local_committer,
        room: JoinedRoom = NO_ROOM,
    ) -> None:
        """Open and recover the tablet.

        Args:
            seed: 64 secret bits that keys are hashed with.
            moment: held around each move of the high watermark.
            checkpoint_policy: when one is due.
            incarnation: number of this start of the folder's owner, which frames carry.
            fence: raises `FencedError` once the folder may have another owner.
            committers: makes what makes writes durable.
        """
        self._fence = fence
        self.key = key
        self.overwritten: Offset = 0  # none of the lake's rows below is there any more
        self._seed = seed
        self._env = env
        self._folder = folder
        self._desc = desc
        self._clock = env.clock
        self._on_progress = on_progress
        self._moment = moment
        self._committers = committers
        self.committer = committers(desc, key, fence)
        self._group = GroupCommit(
            env.threads, f"tablet {key}", commit=self._commit_run, run_in_background=run_in_background
        )
        self._end: End | None = None
        self._kv: KvTablet | None = None
        if desc.keyed:
            from lakehead.kv import KvTablet  # the door to numba, which takes half a second

            self._kv = KvTablet(desc.schemas, desc.tablet_key_columns, desc.prefix_key, seed=seed)
        # Held from the plan of a group of writes until it is applied: the definition stays the same meanwhile.
        self._plan_lock = env.threads.lock()
        # Held around what changes the state and how the tablet ends, and around reads of the rows.
        self._state_lock = env.threads.lock()
        # Held around what moves the log's end or syncs it: of two syncs at once the kernel tells only one of a failure.
        self._log_lock = env.threads.lock()
        self._maintenance_lock = env.threads.lock()  # around checkpoints and trims, of which one runs at a time
        self._log = LogTablet(
            env.storage,
            folder,
            segment_bytes=desc.properties.segment_bytes,
            epoch=incarnation,
            checkpoint_policy=checkpoint_policy,
            state=TabletState(self._kv),
            room=room,
        )

    # ---- write ------------------------------------------------------------------------------------------------

    def submit(self, write: PendingWrite) -> bool:
        """See `GroupCommit.submit`."""
        return self._group.submit(write)

    def drive(self) -> None:
        """See `GroupCommit.drive`."""
        self._group.drive()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No group of writes is under way inside; those that come wait."""
        with self._plan_lock:
            yield

    def alter(self, desc: TableDescriptor) -> None:
        """Take another definition of the table; inside `paused`."""
        with self._log_lock, self._state_lock:
            if self._kv is not None:
                self._kv.alter(desc.schemas)
            self._desc = desc
            self.committer = self._committers(desc, self.key, self._fence)
            self._log.segment_bytes = desc.properties.segment_bytes

    def _commit_run(self, run: list[PendingWrite]) -> None:
        with self._plan_lock:
            self._plan_run(run)

    def _plan_run(self, run: list[PendingWrite]) -> None:
        self._require_writable()
        fresh = [w for w in run if not self._answered(w)]
        if fresh and self._kv is None:
            self._commit([w.body for w in fresh], fresh, rows_if_small(fresh))
        elif fresh and self._kv is not None:
            self._commit_changes(self._kv, fresh)

    def _answered(self, write: PendingWrite) -> bool:
        try:
            write.result = self._log.writers.answer(write.body.stamp, write.content)
        except LakeheadError as e:
            write.error = e
        return write.result is not None or write.error is not None

    def _commit_changes(self, kv: KvTablet, writes: list[PendingWrite]) -> None:
        base = self._log.log_end_offset
        schemas = self._desc.schemas
        given = [(w.rows, w.body.schema_id) for w in writes if w.rows is not None]
        rows = [r if i == schemas.current.id else given_as(r, i, schemas) for r, i in given]
        batch, deleted = join(rows), writes[0].kind == "delete"
        try:
            with self._state_lock:
                kv.require_change(batch, deleted=deleted)
                change = kv.plan_delete(batch) if deleted else kv.plan_upsert(batch, base)
            bodies = changelog(self._desc, writes, change)
        except LimitExceededError as e:
            if len(writes) == 1:
                writes[0].error = e
            else:
                for w in writes:
                    self._commit_changes(kv, [w])
            return
        self._commit(bodies, writes, change.rows)

    def _commit(
        self, bodies: Sequence[FrameBody], writes: Sequence[PendingWrite], rows: pa.RecordBatch | None = None
    ) -> None:
        """Make planned batches durable, apply them and answer; ``rows`` as in `TabletState.apply`."""
        with self._broken_by_failure(), self._log_lock:
            now = self._clock.now_us()
            frames = self._log.encode(bodies, now, [w.content for w in writes])
            self.committer.commit(self._log, frames)
            if now < self._log.last_timestamp_us:
                self._log.observe(now, self._steady_us())
            self._apply(frames, rows)
        for w, frame in zip(writes, frames, strict=True):
            w.result = (frame.base_offset, frame.end_offset)
        self._on_progress()

    def seal(self) -> Offset:
        """Begin a new segment at the log's end, so that what is below can be forgotten; inside `paused`."""
        with self._broken_by_failure(), self._log_lock:
            self._require_writable()
            self._log.roll()
        return self.high_watermark

    def truncate(self, before: Offset, writes: Iterable[PendingWrite] = (), *, lake_follows: bool = False) -> None:
        """Have no row that was written below this offset, in a lake either if that ``lake_follows``, and these writes,
        which it does not have, instead; readers see it at once. A log tablet, sealed there, forgets rows, a keyed one
        logs that they are deleted. Each write is asked for when the one before it is in the log. Inside `paused`, or
        before anyone writes. Doing it again goes on; errors as of writes."""
        with self._maintenance_lock:
            if self._kv is None and self.log_start_offset < min(before, self.high_watermark):
                self._checkpoint()  # what one covers can be forgotten
            refused: StorageError | None = None
            with self._broken_by_failure(), self._log_lock, self._state_lock:
                self._require_writable()
                unseen = Unseen(self._desc, self._log, self._kv, self.committer, self._env)
                unseen.delete_below(before)
                for write in writes:
                    unseen.write(write)
                with self._moment:
                    self._log.advance_high_watermark()
                    self.overwritten = max(self.overwritten, before if lake_follows else 0)
                    if self._kv is None:
                        try:
                            self._log.trim(before)
                        except StorageError as e:  # nothing is lost, and the tablet may go on
                            refused = e
            if refused is not None:
                raise refused

    def apply(self, frames: Sequence[Frame]) -> None:
        """Take frames that another tablet has committed: how a standby follows. They are written, not synced.

        Raises:
            CorruptionError: they do not follow the log's end, or were written under a schema that this tablet's catalog
                does not have yet: nothing is written.
            StorageError, OutcomeUnknownError: the disk refused; open the tablet again.
        """
        with self._broken_by_failure(), self._log_lock:
            self._require_writable()
            for schema_id in {f.body.schema_id for f in frames}:
                self._desc.schemas.of(schema_id)
            self._log.append_frames(frames)
            self._apply(frames)
        self._on_progress()

    def _apply(self, frames: Sequence[Frame], rows: pa.RecordBatch | None = None) -> None:
        """Change the state and let readers see it, at once."""
        with self._state_lock:
            self._log.apply(frames, rows)
            with self._moment:
                self._log.advance_high_watermark()

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
            self._ends(End("broken", e))
            raise

    def _require_writable(self) -> None:
        if self._end is not None:
            raise self._end.reason

    def _ends(self, end: End) -> End:
        """Take no more writes; whoever came first says why, but for the closer, who always does."""
        with self._state_lock:
            if self._end is None or end.how == "closed":
                self._end = end
            return self._end

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
            if isinstance(e, FencedError):
                self._ends(End("broken", e))
                raise
            unwritten = self._log.frames_written == written
            refused = unwritten and isinstance(e, StorageError)
            if unwritten and (isinstance(e, CorruptionError | ClosedError) or (refused and not self._log.sync_failed)):
                raise
            reason = f"tablet {self.key} takes no more writes after a failure; restart the server: {e}"
            broken = StorageError(reason, tablet=str(self.key))
            self._ends(End("broken", broken))
            if refused:
                raise broken from e
            raise OutcomeUnknownError(
                f"{reason}. Whether this write is on the disk is known after that: sent again through the same writer"
                " it lands once, else look for its rows first",
                tablet=str(self.key),
            ) from e

    # ---- read -------------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> Offset:
        return self._log.log_start_offset

    @property
    def high_watermark(self) -> Offset:
        return self._log.high_watermark

    @property
    def row_count(self) -> int:
        """Rows of a keyed tablet that are live at the high watermark; readable rows of a log tablet."""
        return self._log.live_rows if self._kv is not None else self.high_watermark - self.log_start_offset

    def sync(self) -> int:
        """Make everything readable durable and return the high watermark."""
        end = self.high_watermark
        if self._log.synced_end < end:
            with self._log_lock:
                self._require_writable()
                with self._broken_by_failure():
                    self._log.sync()
        return end

    def view(self) -> LogView:
        """What a pinned read holds, up to the lower of its own end and the high watermark read after it."""
        return self._log.view()

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """Readable frames that overlap ``[start, end)``; raises as `records`."""
        return self._while_open(self._log.frames(start, min(end, self.high_watermark)))

    def records(self, start: int, end: int, schemas: Schemas, view: LogView | None = None) -> Iterator[Records]:
        """Readable records that overlap ``[start, end)``, of a view or of what there is now; see `LogTablet.records`.

        Raises:
            OffsetOutOfRangeError: ``start`` was trimmed; at the call. While iterating:
            ClosedError: the tablet was closed meanwhile.
        """
        return self._while_open(self._log.records(start, min(end, self.high_watermark), schemas, view))

    def live_at(
        self, end: int, columns: list[int], view: LogView | None = None, schemas: Schemas | None = None
    ) -> Iterator[LiveBatch]:
        """Rows of a keyed tablet that are live at exactly ``end``, the end of a batch, in offset order, with columns at
        these positions of the current of these schemas, None for the table's.

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
        schemas = schemas or self._desc.schemas
        records = partial(self._log.records, schemas=schemas, view=view)
        return self._while_open(live_at(view.checkpoint, records, end, schemas, columns))

    def _while_open(self, items: Iterator[T]) -> Iterator[T]:
        try:
            yield from items
        except ClosedError as e:
            raise (self._closed() or e) from e

    def _require_readable(self, schema_id: int) -> None:  # under the state's lock: what changes is torn meanwhile
        if (reason := self._closed()) is not None:
            raise reason  # its rows are gone
        if self._kv is not None and self._kv.torn:
            raise StorageError(f"tablet {self.key} does not know its rows after a failure: restart the server")
        self._desc.require_schema(schema_id)

    def _closed(self) -> LakeheadError | None:
        return self._end.reason if self._end is not None and self._end.how == "closed" else None

    def offset_at(self, timestamp_us: int) -> int | None:
        """See `LogTablet.offset_at`."""
        at = self._log.offset_at(timestamp_us, self._clock.now_us())
        return None if at is None else min(at, self.high_watermark)

    def timestamp_at(self, offset: Offset) -> int | None:
        """See `LogTablet.timestamp_at`."""
        return self._log.timestamp_at(offset) if offset < self.high_watermark else None

    @property
    def writers(self) -> WriterTable:
        """Which batches of which writers the tablet holds.

        Raises:
            LakeheadError: it takes no more writes, after a failure perhaps, which left open what is on disk.
        """
        self._require_writable()
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

    def encode(self, keys: pa.RecordBatch) -> KeyBatch:
        """Keys as `lookup` of any tablet of the table takes them."""
        assert self._kv is not None
        return self._kv.encode(keys)

    def lookup(
        self, keys: KeyBatch, schema_id: int = -1, *, as_of: Offset | None = None, bytes_max: int | None = None
    ) -> tuple[pa.RecordBatch, np.ndarray[tuple[int], np.dtype[np.int64]]] | None:
        """Rows of the keys that exist, and each one's position in ``keys``; with ``as_of`` those that were live at that
        end of the log, or None when one of them may have changed since.

        Raises:
            LimitExceededError: they are too many bytes; see `KvTablet.require_answer`.
            SchemaChangedError: the schema is not in force any more.
            LakeheadError: the tablet was closed, for this reason.
        """
        assert self._kv is not None
        with self._state_lock:
            self._require_readable(schema_id)
            slots = self._kv.probe(keys)
            if as_of is not None and self.high_watermark != as_of and not self._kv.is_older(slots, as_of):
                return None
            return self._kv.answer(slots, bytes_max), np.flatnonzero(slots >= 0)

    def row(self, key: Sequence[int | str | bytes], schema_id: int = -1) -> list[Any] | None:
        """See `KvTablet.row`; errors of closed tablets and schemas as of `lookup`."""
        assert self._kv is not None
        with self._state_lock:
            self._require_readable(schema_id)
            return self._kv.row(key)

    def prefix_lookup(
        self, prefixes: pa.RecordBatch, schema_id: int = -1, *, bytes_max: int | None = None
    ) -> pa.RecordBatch:
        """Rows whose leading key columns equal one of these; errors as of `lookup`."""
        assert self._kv is not None
        with self._state_lock:
            self._require_readable(schema_id)
            return self._kv.prefix_answer(prefixes, bytes_max)

    def live_rows(
        self, columns: list[int], schema_id: int = -1
    ) -> tuple[int, list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], pa.RecordBatch]]]:
        """High watermark, and the live rows at exactly it as (offsets, rows) batches in offset order; errors as of
        `lookup`."""
        assert self._kv is not None
        with self._state_lock:
            self._require_readable(schema_id)
            return self._log.high_watermark, self._kv.live_rows(columns)

    # ---- maintenance ------------------------------------------------------------------------------------------

    def maintain(self, now_us: int, retention_us: int | None, tiered: int | None) -> None:
        """Do what is `due`, each kind of it once.

        Raises:
            StorageError: the disk refused; nothing was lost.
            CorruptionError: a file is damaged; what does not need it was done.
            ClosedError: the tablet was closed meanwhile.
        """
        with self._maintenance_lock:
            if self._end is not None:
                return
            self._require_owned()
            with self._log_lock:
                self._log.observe(self._clock.now_us(), self._steady_us())  # rows may have come since the turn began
            done: set[type[Note]] = set()
            while (note := self.due(now_us, retention_us, tiered)) is not None and type(note) not in done:
                done.add(type(note))
                self._do(note)

    def due(self, now_us: int, retention_us: int | None, tiered: int | None) -> Note | None:
        """What is to be done next: a checkpoint when a restart would have much to replay, and a trim of what retention
        allows. Changes nothing.

        Args:
            retention_us: age at which rows may leave the log; None keeps them.
            tiered: only rows below this offset may; None for tables without a lake.

        Raises:
            CorruptionError: a file is damaged, and nothing is due that does not need it.
        """
        keep, damage = self._log.log_start_offset, None
        if retention_us is not None:
            if self._log.began_until(now_us - max(retention_us, ROLL_US)):
                return Roll()
            try:
                keep = self._log.old_until(now_us - retention_us)
            except CorruptionError as e:
                damage = e  # keeps the log from being trimmed, and nothing else from being done
            keep = keep if tiered is None else min(keep, tiered)
        if self._log.wants_checkpoint(keep):
            return MakeCheckpoint()
        if self._log.can_trim(keep):
            return Trim(keep)
        if damage is not None:
            raise damage
        return None

    def apply_note(self, note: Note) -> None:
        """Do what was decided, here or by the tablet that this one follows; the state stays as it is.

        Raises:
            StorageError, ClosedError: as `maintain`.
        """
        with self._maintenance_lock:
            self._do(note)

    def _do(self, note: Note) -> None:
        if isinstance(note, MakeCheckpoint):
            return self._checkpoint()
        with self._log_lock:
            if isinstance(note, Roll):
                self._log.roll()
            else:
                self._log.trim(note.before)

    def scrub(self) -> Iterator[int]:
        """See `LogTablet.scrub`."""
        return self._while_open(self._log.scrub())

    def damages(self) -> list[CorruptionError]:
        """See `LogTablet.damages`."""
        return self._log.damages()

    def old_until(self, timestamp_us: int) -> int:
        """See `LogTablet.old_until`."""
        return self._log.old_until(timestamp_us)

    def _checkpoint(self) -> None:
        with self._log_lock:
            self._require_writable()
            with self._broken_by_failure():
                desc, footer = self._desc, self._log.take_checkpoint(self._desc.schema_id)
            view = self._log.view()
        rows: Iterable[LiveBatch] = ()
        if self._kv is not None:
            live = live_at(view.checkpoint, view.records, footer.offset, desc.schemas)
            rows = self._until_closed(view.released(live))
        made = write_checkpoint(self._env.storage, self._folder, footer, desc.schema, rows)
        with self._log_lock:
            self._require_owned()
            if self._end is None:
                self._log.install(made)

    def _until_closed(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            if (reason := self._closed()) is not None:
                raise reason
            yield item

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self, reason: LakeheadError) -> None:
        """Refuse further calls with ``reason``, finish the group under way, sync, release the files and the rows.

        Raises:
            StorageError: the last sync failed.
        """
        broken = self._end is not None
        self._ends(End("closed", reason))
        self._group.finish()
        with self._state_lock:
            if self._kv is not None:
                self._kv.clear()
        with self._maintenance_lock, self._log_lock:
            if not broken and self._is_owned():
                self._log.close()
            else:
                self._log.abandon()
