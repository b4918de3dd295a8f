"""The tables of one server: their open tablets, and who waits for progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from lakehead.env import Env
from lakehead.env.clock import Clock
from lakehead.env.threads import Event, Lock, Threads
from lakehead.errors import (
    ClosedError,
    CorruptionError,
    InvalidRequestError,
    LakeheadError,
    LakeStateError,
    NotLeaderError,
    SchemaMismatchError,
    StorageError,
    TableNotFoundError,
    UnavailableError,
)
from lakehead.log.checkpoint import CheckpointPolicy
from lakehead.log.joined import JoinedRoom
from lakehead.protocol.table_info import TableInfo
from lakehead.server import catalog
from lakehead.server.committer import Committers
from lakehead.server.lake_state import LakeState
from lakehead.server.metadata import MetadataStore
from lakehead.server.placement import Home, everything_here
from lakehead.server.progress import Progress
from lakehead.server.shared_turns import SharedTurns
from lakehead.server.tablet import Tablet
from lakehead.types import UNPARTITIONED, Offset, TableDescriptor, TabletKey

_OPEN_AT_ONCE = 4


class LiveTable:
    """One table: its tablets, opened when the table is first used and when partitions are first written.

    Attributes:
        progress: of its tablets.
    """

    def __init__(
        self, desc: TableDescriptor, *, metadata: MetadataStore, env: Env, folder: str,
        lake: LakeState | None, run_in_background: Callable[[Callable[[], None]], object], seed: int,
        moment: Lock, checkpoint_policy: CheckpointPolicy, committers: Committers, home: Home, room: JoinedRoom,
    ) -> None:  # fmt: skip
        self.desc = desc
        self._home = home
        self._room = room
        self._moment = moment
        self._seed = seed
        self._run_in_background = run_in_background
        self._metadata = metadata
        self._env = env
        self._checkpoint_policy = checkpoint_policy
        self._committers = committers
        self.folder = folder
        self._open_lock = env.threads.lock()
        self._altering = env.threads.lock()
        self._tablets: dict[TabletKey, Tablet] = {}
        self._elsewhere: set[TabletKey] = set()
        self.truncating: Mapping[TabletKey, Offset] = metadata.truncated(desc.table_id)
        self._overwritten = metadata.overwritten(desc.table_id, begun=False)
        self.progress = Progress(env)
        self.turns = SharedTurns(env.threads)
        self._closed: LakeheadError | None = None
        try:
            partitions = metadata.partitions(desc.table_id) if desc.partition_by else {UNPARTITIONED: 0}
            self._open_partitions(partitions)
            if lake is not None and desc.lake:
                self._check_tiered(lake)
            self._complete_truncation(lake)
        except BaseException:
            self.close(ClosedError("the table could not be opened"))
            raise

    def _check_tiered(self, lake: LakeState) -> None:
        for key, tiered in lake.tiered_offsets(self.desc).items():
            if key in self._elsewhere:
                continue
            tablet = self._tablets.get(key)
            if tablet is None or tablet.high_watermark < tiered:
                end = tablet.high_watermark if tablet else 0
                raise LakeStateError(
                    f"the log of {self.desc.path} tablet {key} ends at {end}, but its lake holds rows up to {tiered}:"
                    " restore the log, or drop the table and read the lake alone",
                    table=str(self.desc.path),
                    tablet=str(key),
                )

    def _open_partitions(self, numbers: Mapping[str, int]) -> None:
        """Open the tablets of these partitions that live here, side by side: to recover a large one takes a while."""
        every = [(TabletKey(name, bucket), n) for name, n in numbers.items() for bucket in range(self.desc.buckets)]
        keys = [(key, n) for key, n in every if self._home(self.desc.table_id, key) is None]
        self._elsewhere |= {key for key, _ in every} - {key for key, _ in keys}
        opened: dict[TabletKey, Tablet] = {}
        errors: list[BaseException] = []
        left = iter(keys)
        next_lock = self._env.threads.lock()

        def open_some() -> None:
            while not errors:
                with next_lock:
                    key, number = next(left, (None, 0))
                if key is None:
                    return
                try:
                    opened[key] = self._open_tablet(key, number)
                except BaseException as e:
                    errors.append(e)

        run_beside(self._env.threads, self._run_in_background, open_some, min(len(keys), _OPEN_AT_ONCE) - 1)
        if errors:
            reason = ClosedError("the table could not be opened")
            _close_all(partial(tablet.close, reason) for tablet in opened.values())
            raise errors[0]
        self._tablets = {**self._tablets, **{key: opened[key] for key, _ in keys}}
        self.progress.notify()

    def _open_tablet(self, key: TabletKey, partition_number: int) -> Tablet:
        tablet = Tablet(
            self.desc,
            key,
            env=self._env,
            folder=f"{self.folder}/partition-{partition_number}/bucket-{key.bucket}",
            on_progress=self.progress.notify,
            moment=self._moment,
            run_in_background=self._run_in_background,
            seed=self._seed,
            checkpoint_policy=self._checkpoint_policy,
            committers=self._committers,
            incarnation=self._metadata.incarnation.number,
            fence=self._metadata.fence,
            room=self._room,
        )
        tablet.overwritten = self._overwritten.get(key, 0)
        return tablet

    @property
    def clock(self) -> Clock:
        """The server's."""
        return self._env.clock

    @property
    def tablets(self) -> dict[TabletKey, Tablet]:
        """Those that live here; a snapshot that is never changed in place."""
        return self._tablets

    def answering(self) -> dict[TabletKey, Tablet]:
        """The same, for who asks for all of them.

        Raises:
            NotLeaderError: the table has some, and none lives here.
        """
        if not self._tablets and self._elsewhere:
            self.require_here(min(self._elsewhere))
        return self._tablets

    def tablet(self, key: TabletKey, *, create: bool = False) -> Tablet | None:
        """The tablet of this key; with ``create`` its partition is made when it is new, else None: it holds nothing.

        Raises:
            NotLeaderError: it lives on another server, which alone knows what it holds.
            InvalidRequestError: the key does not fit the table.
            ClosedError: the server is closing.
        """
        found = self._tablets.get(key)
        if found is not None:
            return found
        self.require_here(key)
        if not create:
            return None
        with self._open_lock:
            if self._closed is not None:
                raise self._closed
            if key not in self._tablets:
                number = self._metadata.submit(catalog.CreatePartition(self.desc.table_id, key.partition)).number
                self._open_partitions({key.partition: number})
        return self._tablets[key]

    def require_here(self, key: TabletKey) -> None:
        """Return if this server answers for a tablet, whether it was written yet or not; raises as `tablet`."""
        self._check_key(key)
        home = self._home(self.desc.table_id, key)
        if home is not None:
            raise NotLeaderError(
                f"tablet {key} of {self.desc.path} does not live on this server: ask {home or 'another one'}",
                table=str(self.desc.path),
                tablet=str(key),
                server=home,
            )

    def _check_key(self, key: TabletKey) -> None:
        if not self.desc.may_have(key):
            raise InvalidRequestError(f"{key} is no tablet of {self.desc.path}", tablet=str(key))

    def alter(self, desc: TableDescriptor) -> None:
        """Take another definition, all tablets at one moment: who is told the old one has seen no row of the new.
        Writes that were checked under the old one are bound to the new."""
        with self._open_lock, self._altering, contextlib.ExitStack() as paused:
            for tablet in self._tablets.values():
                paused.enter_context(tablet.paused())
            for tablet in self._tablets.values():
                tablet.alter(desc)
            self.desc = desc
        self.progress.notify()

    @property
    def in_force(self) -> TableDescriptor:
        """The definition, once all tablets have it: who was told by one of them that there is another finds it."""
        with self._altering:
            return self.desc

    @property
    def to_tier(self) -> int:
        """How far a lake can follow: grows with each row, and with each partition that is overwritten."""
        return sum(tablet.high_watermark + tablet.overwritten for tablet in self.tablets.values())

    def overwritten(self) -> dict[TabletKey, Offset]:
        """Of tablets whose partition was overwritten, the offset below which its rows are gone."""
        with self._moment:
            return {key: tablet.overwritten for key, tablet in self.tablets.items() if tablet.overwritten}

    def to_keep(self) -> Mapping[TabletKey, Offset]:
        """Offsets from which on the log has what a lake may lose when it follows partitions that are overwritten."""
        if self.desc.log_decides or not self.desc.partition_by:
            return {}
        return self._metadata.overwritten(self.desc.table_id, begun=True)

    def truncate(self) -> dict[TabletKey, Offset]:
        """Have no row any more; returns where each log ended. What a crash leaves, whoever opens the table completes.

        Raises:
            NotLeaderError: some tablets live elsewhere; nothing was changed.
            StorageError: the disk refused; nothing was changed, or it is completed when the table is opened again.
        """
        with self._open_lock, self._truncating() as ends:
            self._truncate(ends)
        self.progress.notify()
        return ends

    def begin_truncation(self) -> dict[TabletKey, Offset]:
        """Where each log ends, at one moment; it can be cut there by `forget` once the lake has moved on. Errors as
        `truncate`."""
        with self._open_lock, self._truncating() as ends:
            return ends

    def ends_of(self, partitions: Collection[str]) -> dict[TabletKey, Offset]:
        """Where each log of these partitions ends: none of what comes later is below. Errors as `truncate`."""
        with self._open_lock, self._sealed(lambda key: key.partition in partitions) as ends:
            return ends

    @contextlib.contextmanager
    def _truncating(self) -> Iterator[dict[TabletKey, Offset]]:
        with self._sealed() as ends:
            self._metadata.submit(catalog.TruncateTable(self.desc.table_id, {str(k): end for k, end in ends.items()}))
            self.truncating = ends
            yield ends

    @contextlib.contextmanager
    def _sealed(self, wanted: Callable[[TabletKey], bool] = lambda _: True) -> Iterator[dict[TabletKey, Offset]]:
        if self._elsewhere:
            self.require_here(min(self._elsewhere))
        with contextlib.ExitStack() as paused:
            tablets = {key: tablet for key, tablet in self._tablets.items() if wanted(key)}
            for tablet in tablets.values():
                paused.enter_context(tablet.paused())
            yield {key: tablet.seal() for key, tablet in tablets.items()}

    def forget(self, ends: Mapping[TabletKey, Offset], held: Mapping[TabletKey, Offset]) -> None:
        """Cut the logs of a log table below these offsets, as far as the lake holds all that is to be read of there."""
        if all(held.get(key, 0) >= end for key, end in ends.items()):
            self._truncate(ends)

    def _truncate(self, ends: Mapping[TabletKey, Offset]) -> None:
        for key, end in ends.items():
            if key in self._tablets:
                self._tablets[key].truncate(end)
        self.end_truncation()

    def end_truncation(self) -> None:  # what was to be truncated is
        self._metadata.submit(catalog.EndTruncation(self.desc.table_id))
        self.truncating = {}

    def _complete_truncation(self, lake: LakeState | None) -> None:
        """Truncate as was decided before a crash. Where the lake decides, it may not have: rows that it holds, or held
        until they were taken away, may leave the log in any case."""
        if self.truncating and self.desc.log_decides:
            self._truncate(self.truncating)
        elif self.truncating and lake is not None:
            with contextlib.suppress(LakeheadError):
                self.forget(self.truncating, lake.proven_offsets(self.desc, self.to_keep()))

    def as_of(self, schema_id: int) -> TableDescriptor:
        """The definition under which a request knows the table.

        Raises:
            SchemaMismatchError: it never had it.
            FencedError: nor can it have it: another process owns the folder, and may have altered the table.
        """
        desc = self.desc
        if schema_id in (-1, desc.schema_id):
            return desc
        try:
            return desc.as_of(schema_id)
        except CorruptionError:
            self._metadata.fence()
            raise SchemaMismatchError(f"{desc.path} has no schema {schema_id}: open the table again") from None

    def close(self, reason: LakeheadError) -> None:
        """End subscriptions with ``reason`` and close all tablets.

        Raises:
            StorageError: the last sync of one failed; all are closed.
        """
        with self._open_lock:
            if self._closed is not None:
                return
            self._closed = reason
        self.progress.end(reason)
        _close_all(partial(tablet.close, reason) for tablet in self._tablets.values())


class LiveTables:
    """All tables of a data folder, opened when they are first used."""

    def __init__(
        self,
        *,
        metadata: MetadataStore,
        env: Env,
        folder: str,
        lake: LakeState | None,
        run_in_background: Callable[[Callable[[], None]], object],
        seed: int,
        checkpoint_policy: CheckpointPolicy,
        home: Home = everything_here,
        committers: Committers,
        room: JoinedRoom,
        complete: Callable[[LiveTable], None] = lambda _: None,
    ) -> None:
        """``seed`` is 64 secret bits that keys are hashed with in memory; ``home`` tells where tablets live;
        ``room`` is what their tablets keep joined; ``complete`` is called with each table that was opened, before it is
        used."""
        self._complete = complete
        self._home = home
        self._room = room
        self._seed = seed
        self._run_in_background = run_in_background
        self._metadata = metadata
        self._env = env
        self._checkpoint_policy = checkpoint_policy
        self._committers = committers
        self._folder = folder
        self._lake = lake
        self._lock = env.threads.lock()
        self._opening: dict[str, Lock] = {}
        self._live: dict[str, LiveTable] = {}
        self._dropped: set[str] = set()
        self._leaving: set[str] = set()
        self._closed = False
        self.moment = env.threads.lock()
        """Held while watermarks move: who holds it sees those of all tables as they are at one moment."""

    def get(self, table_id: str) -> LiveTable:
        """The table of this id.

        Raises:
            TableNotFoundError: it does not exist (any more).
            ClosedError: the server is closing.
        """
        found = self._live.get(table_id)
        if found is not None:
            return found
        # Each table has its own lock: one that has much to recover, or whose lake is silent, keeps no other waiting.
        with self._opening_lock(table_id):
            found = self._live.get(table_id)
            if found is not None:
                return found
            self._opening_lock(table_id)  # it may be gone by now
            self._metadata.fence()  # opening makes folders and files
            table = self._open(self._metadata.table_by_id(table_id))
            try:
                self._complete(table)
            except BaseException:
                table.close(ClosedError("the table could not be opened"))
                raise
            with self._lock:
                gone = self._gone(table_id)
                if gone is None:
                    self._live[table_id] = table
                    return table
            table.close(ClosedError(gone.message))
            raise gone

    def _opening_lock(self, table_id: str) -> Lock:
        """Held while a table is opened.

        Raises:
            TableNotFoundError, ClosedError: as `get`.
        """
        with self._lock:
            gone = self._gone(table_id)
            if gone is not None:
                raise gone
            return self._opening.setdefault(table_id, self._env.threads.lock())

    def _gone(self, table_id: str) -> LakeheadError | None:
        """Why a table may not be opened."""
        if self._closed:
            return ClosedError("the server is closed: connect again")
        if table_id in self._dropped:
            return TableNotFoundError("the table was dropped: open it again by name", table_id=table_id)
        return None

    def _wait_opened(self, tables: Iterable[str]) -> None:
        """Return once none of them is being opened; whoever opened it has then seen that it is gone."""
        for table_id in tables:
            with self._lock:
                opening = self._opening.pop(table_id, None)
            if opening is not None:
                with opening:
                    continue

    def is_open(self, table_id: str) -> bool:
        """Whether `get` has nothing to open."""
        return table_id in self._live

    def open_tables(self) -> list[LiveTable]:
        """The tables that were used since the start."""
        with self._lock:
            return [live for table_id, live in self._live.items() if table_id not in self._leaving]

    def _open(self, desc: TableDescriptor) -> LiveTable:
        if self._lake is not None and desc.table_id not in self._leaving:
            self._metadata.make_up_lake(desc, self._lake.create)
        return LiveTable(
            desc,
            metadata=self._metadata,
            env=self._env,
            folder=f"{self._folder}/{self._folder_name(desc)}",
            lake=self._lake,
            run_in_background=self._run_in_background,
            seed=self._seed,
            moment=self.moment,
            checkpoint_policy=self._checkpoint_policy,
            home=self._home,
            committers=self._committers,
            room=self._room,
        )

    @staticmethod
    def _folder_name(desc: TableDescriptor) -> str:
        return f"{desc.origin}-{desc.table_id[:8]}"

    def stored_bytes(self, desc: TableDescriptor) -> int:
        """What the files of a table here take: its log, checkpoints and what is staged for it."""
        return self._env.storage.folder_bytes(f"{self._folder}/{self._folder_name(desc)}")

    def drop(self, desc: TableDescriptor) -> None:
        """Close the table, forget it, and delete its log; what a crash leaves of that, `remove_dropped` removes.

        Raises:
            StorageError: the metadata could not be written; the table is as before.
        """
        with self._lock:
            self._dropped.add(desc.table_id)
            live = self._live.pop(desc.table_id, None)
        self._wait_opened([desc.table_id])
        # A table that does not open, damaged or at odds with its lake, can be dropped all the same.
        if live is not None:
            with contextlib.suppress(StorageError):
                live.close(ClosedError(f"table {desc.path} was dropped"))
        try:
            self._metadata.submit(catalog.DropTable(desc.table_id, self._folder_name(desc)))
        except BaseException:
            self._dropped.discard(desc.table_id)
            raise
        self.remove_dropped()

    def in_force(self, desc: TableDescriptor) -> TableDescriptor:
        """A definition of the catalog, which has a new one a moment before it is in force, as it is in force now."""
        live = self._live.get(desc.table_id)
        return desc if live is None else live.in_force

    def alter(self, desc: TableDescriptor) -> None:
        """Give a table another definition, for good, and have it in force when this returns.

        Raises:
            StorageError: the metadata could not be written; the table is as before.
        """
        with self._opening_lock(desc.table_id):
            self._metadata.submit(catalog.AlterTable.of(desc))
            self._put_in_force(desc)

    def require_renamable(self, tables: Sequence[TableDescriptor]) -> None:
        """Raises: TableExistsError: another one has such a name."""
        self._metadata.require_possible(_renaming(tables))

    def rename(self, tables: Sequence[TableDescriptor]) -> None:
        """Give tables other names, for good and all at once.

        Raises:
            TableExistsError: another one has such a name; nothing was changed.
            StorageError: the metadata could not be written; nothing was changed.
        """
        with contextlib.ExitStack() as opening:
            for desc in tables:
                opening.enter_context(self._opening_lock(desc.table_id))
            self._metadata.submit(_renaming(tables))
            for desc in tables:
                self._put_in_force(desc)

    def _put_in_force(self, desc: TableDescriptor) -> None:
        live = self._live.get(desc.table_id)
        if live is None:
            return
        try:
            live.alter(desc)
        except BaseException:
            # Some of its tablets may have the new definition: opened anew, all have.
            with self._lock:
                self._live.pop(desc.table_id, None)
            live.close(UnavailableError(f"table {desc.path} is opened anew: call again", gone=True))
            raise

    @contextlib.contextmanager
    def leaving(self, table_id: str) -> Iterator[None]:
        """While a table is dropped: nobody looks after it any more, whose lake may be gone already."""
        self._leaving.add(table_id)
        try:
            yield
        finally:
            self._leaving.discard(table_id)

    def is_leaving(self, table_id: str) -> bool:
        """Whether somebody is about to drop the table."""
        return table_id in self._leaving

    def is_kept(self, table_id: str) -> bool:
        """Whether the table is open, and nobody is about to drop it."""
        return self.is_open(table_id) and not self.is_leaving(table_id)

    def remove_dropped(self) -> None:
        """Delete the logs of tables that were dropped; those that cannot be now, at the next call."""
        for folder in self._metadata.dropped_folders():
            with contextlib.suppress(StorageError):
                self._env.storage.remove_tree(f"{self._folder}/{folder}")
                self._metadata.submit(catalog.ForgetFolder(folder))

    def close(self) -> None:
        with self._lock:
            self._closed, live, opening = True, list(self._live.values()), list(self._opening)
            self._live.clear()
        self._wait_opened(opening)
        reason = ClosedError("the server was closed: connect again")
        _close_all(partial(table.close, reason) for table in live)


def run_beside(
    threads: Threads,
    run_in_background: Callable[[Callable[[], None]], object],
    work: Callable[[], None],
    others: int,
) -> None:
    """Call ``work`` here and in up to so many background threads; return when all that began have ended."""
    begun: list[Event] = []

    def run(done: Event) -> None:
        try:
            work()
        finally:
            done.set()

    for _ in range(others):
        done = threads.event()
        try:
            run_in_background(partial(run, done))
        except RuntimeError:  # the server is closing, its background threads have ended
            break
        begun.append(done)
    work()
    for done in begun:
        done.wait()


def _close_all(closes: Iterable[Callable[[], None]]) -> None:
    """Call them all, whatever some raise; then raise the last error."""
    with contextlib.ExitStack() as stack:
        for close in closes:
            stack.callback(close)


def _renaming(tables: Sequence[TableDescriptor]) -> catalog.RenameTables:
    return catalog.RenameTables([TableInfo.of(desc) for desc in tables])
