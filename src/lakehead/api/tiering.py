"""Tiering through a connection: the tables that a service reaches, and a service in the background of a program."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lakehead.api.lake import maintain_table, tier_table
from lakehead.api.table import Table, handle_of
from lakehead.client.table import TableHandle
from lakehead.env import Env
from lakehead.env.threads import Lock, Started, before_exit
from lakehead.env.usage import memory_bytes
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    FolderCopiedError,
    LakeheadError,
    TableNotFoundError,
    UnavailableError,
)
from lakehead.lake.formats import format_of
from lakehead.lake.marks import next_epoch
from lakehead.protocol import messages as m
from lakehead.protocol.table_choice import TableChoice
from lakehead.protocol.tiering import AskTieringWork, TieringWork
from lakehead.tiering.executor import Executor, here
from lakehead.tiering.queue import FoundTable, Looked, TieringQueue
from lakehead.tiering.service import RoundReport, TieringService
from lakehead.types import Epoch

if TYPE_CHECKING:
    from lakehead.lake.lake_table import LakeTable
    from lakehead.tiering.commit import CommitResult
    from lakehead.tiering.compaction import LakeSource
    from lakehead.tiering.round_plan import HotSource


class TieredConnection(Protocol):
    """What `lakehead.Connection` is to a tiering service."""

    @property
    def uri(self) -> str: ...

    def table(self, name: str) -> Table: ...

    def _ask(self, request: m.Request[m.R]) -> m.R: ...

    def close(self) -> None: ...


_TURNS_AT_ONCE_MAX = 4
C = TypeVar("C", bound=TieredConnection)
T = TypeVar("T")


class ConnectionTables(Generic[C]):
    """Tables of one server, whose rounds run in this process; implements `lakehead.tiering.service.TieredTables`.

    A server that is not there when this is made is connected to when it is first asked.

    Args:
        con: a connection, which stays its owner's, or how to make one, which is closed with this.
        chosen: names of the tables to tier or patterns, or one of them; see `TableChoice`.
        again: another connection to the same server, after it has refused what this one gives as its token.

    Raises:
        TableNotFoundError: a chosen table does not exist.
    """

    def __init__(
        self, con: C | Callable[[], C], chosen: Sequence[str] | None = None, *, again: Callable[[C], C] | None = None
    ) -> None:
        self._target = con
        self._again = again
        self._chosen = TableChoice.of(chosen)
        self._con: C | None = None
        self._own = callable(con)
        self._attached = False
        self._looked = False
        self._job_id = Env.system().randomness.uuid_hex()
        self._asked = 0
        self._names: dict[str, str] = {}
        self._handles: dict[str, TableHandle] = {}
        self._epochs: dict[str, int] = {}
        self._commit_locks: dict[str, Lock] = {}
        try:
            reached = self._connected()
        except UnavailableError:
            return
        for name in self._chosen.named:
            reached.table(name)

    # ---- for those that run rounds elsewhere --------------------------------------------------------------------

    def executor_of(self, records: int) -> Executor:
        """Where the tasks of a round of so many records run."""
        return here(records)

    def log(self, con: C, handle: TableHandle) -> HotSource:
        """The log of a table as tasks read it."""
        return handle.log

    def lake(self, con: C, handle: TableHandle, *, changelog: bool) -> LakeSource | None:
        """The lake of a table, or what it keeps of the changelog, as tasks read it; None: as it is read here."""
        return None

    def attach(self, con: C) -> None:
        """Called with each connection before it is used."""

    def open(self) -> None:
        """See `TieredTables.open`."""
        with contextlib.suppress(UnavailableError):
            self._reached()

    def close(self) -> None:
        """See `TieredTables.close`."""
        if self._con is not None and self._looked:
            with contextlib.suppress(LakeheadError):
                self._ask(self._con, leaving=True)
        if self._con is not None and self._own:
            self._con.close()
        self._con, self._attached = None, False

    # ---- the server ---------------------------------------------------------------------------------------------

    def _connected(self) -> C:
        if self._con is None:
            self._own = callable(self._target)
            self._con = self._target() if callable(self._target) else self._target
        return self._con

    def _reached(self) -> C:
        con = self._connected()
        if not self._attached:
            self.attach(con)
            self._attached = True
        return con

    def _reach_anew(self, refused: C, e: AuthenticationError) -> C:
        if self._again is None:
            raise e
        con = self._again(refused)
        if self._own:
            refused.close()
        self._con, self._own, self._attached = con, True, False
        # They go through the connection that is refused.
        self._handles.clear()
        return self._reached()

    # ---- tables -------------------------------------------------------------------------------------------------

    def look(self, has: frozenset[str], without: frozenset[str]) -> Looked:
        """See `TieredTables.look`."""
        con = self._reached()
        if not self._looked:
            for name in sorted(self._chosen.named):
                handle_of(con.table(name)).desc.require_lake()
        try:
            work = self._ask(con, has, without)
        except AuthenticationError as e:
            work = self._ask(self._reach_anew(con, e), has, without)
        self._looked = True
        self._names = {t.table_id: t.name for t in work.tables}
        for table_id in {*self._handles, *self._epochs} - self._names.keys():
            # Another job may have it: who gets it back begins with a higher epoch.
            self._handles.pop(table_id, None)
            self._epochs.pop(table_id, None)
        for table_id in self._commit_locks.keys() - self._names.keys() - has:
            del self._commit_locks[table_id]
        return Looked(
            tuple(
                FoundTable(t.table_id, t.name, t.freshness_ms / 1000, t.maintained, t.end, work.folder_id)
                for t in work.tables
            )
        )

    def _ask(
        self, con: C, has: Collection[str] = (), without: Collection[str] = (), *, leaving: bool = False
    ) -> TieringWork:
        self._asked += 1
        request = AskTieringWork(
            job_id=self._job_id,
            name=job_name(),
            number=self._asked,
            tables=self._chosen.texts,
            has=sorted(has),
            without=sorted(without),
            leaving=leaving,
            memory_bytes=memory_bytes(),
        )
        return con._ask(request)

    def _handle(self, table_id: str) -> TableHandle:
        """As the table is now.

        Raises:
            TableNotFoundError: it is gone, or not this service's any more.
        """
        handle = self._handles.get(table_id)
        if handle is not None:
            return handle.now()
        name = self._names.get(table_id)
        found = None if name is None else handle_of(self._connected().table(name))
        if found is None or found.desc.table_id != table_id:
            raise TableNotFoundError("another service has it, or another table its name: look again", table_id=table_id)
        return found

    def run_round(self, table_id: str, records_max: int) -> CommitResult:
        """See `TieredTables.run_round`."""

        def round(handle: TableHandle) -> CommitResult:
            lake, epoch = self._opened(handle)
            source = self.log(self._connected(), handle)
            return tier_table(
                handle,
                lake,
                source,
                executor_of=self.executor_of,
                epoch=epoch,
                records_max=records_max,
                commit_lock=self._commit_lock(handle),
                job=job_name(),
            )

        return self._current(table_id, round)

    def maintain(self, table_id: str) -> bool:
        """See `TieredTables.maintain`."""

        def turn(handle: TableHandle) -> bool:
            lake, epoch = self._opened(handle)
            con = self._connected()
            return maintain_table(
                handle,
                lake,
                epoch=epoch,
                commit_lock=self._commit_lock(handle),
                executor_of=self.executor_of,
                source_of=lambda changelog: self.lake(con, handle, changelog=changelog),
            )

        return self._current(table_id, turn)

    def _current(self, table_id: str, turn: Callable[[TableHandle], T]) -> T:
        """Take a turn of a table as it is now; one that is altered meanwhile, or whose folder was put back, has begun
        for nothing, not failed."""

        def know(now: TableHandle) -> TableHandle:
            self._handles[table_id] = now
            return now

        try:
            return know(self._handle(table_id)).current(turn, know)
        except FolderCopiedError as e:
            if "expected" not in e.context:  # another copy has its lake
                raise
            self._handles.pop(table_id, None)
            self._epochs.pop(table_id, None)
            return know(self._handle(table_id)).current(turn, know)
        except TableNotFoundError:
            raise
        except LakeheadError:
            self._require_there(table_id)
            raise

    def _require_there(self, table_id: str) -> None:
        """Return unless a table is known to be gone: one that is dropped meanwhile lacks a file here, a folder there.

        Raises:
            TableNotFoundError: it was dropped.
        """
        try:
            self._handle(table_id)
        except TableNotFoundError:
            raise
        except LakeheadError:  # what the turn failed of is told
            return

    def _commit_lock(self, handle: TableHandle) -> Lock:
        """Of the round and the maintenance of a table one commits at a time."""
        return self._commit_locks.setdefault(handle.desc.table_id, handle.env.threads.lock())

    def _opened(self, handle: TableHandle) -> tuple[LakeTable, Epoch]:
        table_id = handle.desc.table_id
        lake = format_of(handle.desc).open(handle.desc, handle.lake())
        if table_id not in self._epochs:
            # The first one counts: two turns of the table may ask at once, and one have committed.
            self._epochs.setdefault(table_id, next_epoch(lake.load()))
        return lake, self._epochs[table_id]


def job_name() -> str:
    """This process, for people: its host and number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def queue_for_cores() -> TieringQueue:
    """A queue that has as many tables worked on at once as there are cores, and not more than a few; no maintenance
    keeps a round from beginning."""
    return TieringQueue(turns_at_once=cores_for_turns(), maintenance_at_once=cores_for_turns() - 1)


def cores_for_turns() -> int:
    """So many tables are worked on at once by this process; two at least, or a long round would keep it from asking
    for news, by which others know that it lives."""
    return max(2, min(os.cpu_count() or 1, _TURNS_AT_ONCE_MAX))


class BackgroundTiering:
    """Keeps lake tables fresh in the background of a program, without Spark, between ``with`` and its end, or the
    program's. A forked child has none.

    Attributes:
        service: what runs.
    """

    def __init__(self, tables: ConnectionTables[C], env: Env, on_round: Callable[[RoundReport], None] | None) -> None:
        self.service = TieringService(tables, env, on_round=on_round, make_queue=queue_for_cores)
        self._threads = env.threads
        self._running: Started | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()

    def __enter__(self) -> BackgroundTiering:
        """Begin."""
        if self._running is None:
            _begun.add(self)
            self._running = self._threads.start(self._run, "lakehead-tiering")
        return self

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as e:
            self._error = e

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End once the round under way is committed.

        Raises:
            NoLakeError: a table was named that has no lake; nothing was tiered.
        """
        self.end()
        if self._error is not None and not isinstance(self._error, ClosedError) and error is None:
            raise self._error

    def end(self) -> None:
        """End once the round under way is committed; nothing happens when it has ended, or in a forked child."""
        if self._running is not None and self._pid == os.getpid():
            self.service.stop()
            self._running.join()
            self._running = None


_begun: weakref.WeakSet[BackgroundTiering] = weakref.WeakSet()


def _end_all() -> None:
    for tiering in list(_begun):
        tiering.end()


before_exit(_end_all)
