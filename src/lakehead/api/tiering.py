"""The tables that a tiering service reaches through a connection."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lakehead.api.connection import Connection, connect, open_server
from lakehead.api.lake import tier_table
from lakehead.api.table import handle_of
from lakehead.client.patience import is_gone
from lakehead.client.table import TableHandle
from lakehead.errors import AuthenticationError, LakeheadError, UnavailableError
from lakehead.lake.formats import format_of
from lakehead.lake.marks import next_epoch
from lakehead.tiering.executor import Executor, LocalExecutor
from lakehead.tiering.queue import Listed, ListedTable
from lakehead.types import TablePath, TabletKey

if TYPE_CHECKING:
    from lakehead.tiering.commit import CommitResult
    from lakehead.tiering.round_plan import HotSource


class ConnectionTables:
    """Tables of one server, whose rounds run in this process; implements `lakehead.tiering.service.TieredTables`.

    A server that is not there when this is made is connected to when it is first asked. One that has another token
    than before is reached with the one in this user's files, where it stands on the server's machine.

    Args:
        con_or_uri: a connection, which stays its owner's, or what `lakehead.connect` takes.
        chosen: names of the tables to tier; None for all.

    Raises:
        TableNotFoundError: a chosen table does not exist.
    """

    def __init__(self, con_or_uri: Connection | str, chosen: Sequence[str] | None = None) -> None:
        self._target = con_or_uri
        self._chosen = None if chosen is None else frozenset(str(TablePath.parse(name)) for name in chosen)
        self._con: Connection | None = None
        self._own = False
        self._attached = False
        self._listed = False
        self._ids: dict[str, str] = {}
        self._handles: dict[str, TableHandle] = {}
        self._epochs: dict[str, int] = {}
        try:
            con = self._connected()
        except UnavailableError:
            return
        for name in self._chosen or ():
            con.table(name)

    # ---- for those that run rounds elsewhere --------------------------------------------------------------------

    @property
    def executor(self) -> Executor:
        """Where tasks run."""
        return LocalExecutor()

    def log(self, con: Connection, handle: TableHandle) -> HotSource:
        """The log of a table as tasks read it."""
        return handle.log

    def attach(self, con: Connection) -> None:
        """Called with each connection before it is used."""

    def open(self) -> None:
        """See `TieredTables.open`."""
        with contextlib.suppress(UnavailableError):
            self._reached()

    def close(self) -> None:
        """See `TieredTables.close`."""
        if self._con is not None and self._own:
            self._con.close()
        self._con, self._attached = None, False

    # ---- the server ---------------------------------------------------------------------------------------------

    def _connected(self) -> Connection:
        if self._con is None:
            self._own = not isinstance(self._target, Connection)
            self._con = self._target if isinstance(self._target, Connection) else connect(self._target)
        return self._con

    def _reached(self) -> Connection:
        con = self._connected()
        if not self._attached:
            self.attach(con)
            self._attached = True
        return con

    def _reach_anew(self, refused: Connection) -> Connection:
        con = open_server(refused.uri, token=None, tls_ca=refused._given[1])
        if self._own:
            refused.close()
        self._con, self._own, self._attached = con, True, False
        # They go through the connection that is refused.
        self._handles.clear()
        return self._reached()

    # ---- tables -------------------------------------------------------------------------------------------------

    def list(self, settled: frozenset[str]) -> Listed:
        """See `TieredTables.list`."""
        con = self._reached()
        try:
            names = frozenset(con.tables())
        except AuthenticationError:
            con = self._reach_anew(con)
            names = frozenset(con.tables())
        if self._chosen is not None:
            if not self._listed:
                for name in sorted(self._chosen - names):
                    con.table(name)
            names &= self._chosen
        for name in self._ids.keys() - names:
            self._forget(self._ids.pop(name))
        wanted = [n for n in sorted(names) if n not in settled or self._ids.get(n) not in self._handles]
        found = [table for name in wanted if (table := self._look_up(con, name)) is not None]
        self._listed = True
        return Listed(names, tuple(found))

    def _look_up(self, con: Connection, name: str) -> ListedTable | None:
        try:
            handle = handle_of(con.table(name))
        except LakeheadError as e:
            if is_gone(e) or isinstance(e, AuthenticationError):
                raise
            return None
        desc = handle.desc
        if self._chosen is not None and not self._listed:
            desc.require_lake()
        before = self._ids.get(name)
        if before not in (None, desc.table_id):
            self._forget(before)
        self._ids[name] = desc.table_id
        if desc.table_id not in self._handles:
            self._handles[desc.table_id] = handle
        freshness = desc.properties.freshness_ms / 1000
        return ListedTable(
            desc.table_id, name, freshness, desc.lake is not None, maintained=desc.properties.auto_maintenance
        )

    def _forget(self, table_id: str | None) -> None:
        if table_id is not None:
            self._handles.pop(table_id, None)
            self._epochs.pop(table_id, None)

    def _handle(self, table_id: str) -> TableHandle:
        try:
            return self._handles[table_id]
        except KeyError:
            raise UnavailableError(f"table {table_id} could not be looked up: it is with the next listing") from None

    def watermarks(self, table_id: str) -> Mapping[TabletKey, int]:
        """See `TieredTables.watermarks`."""
        return {t.key: t.high_watermark for t in self._handle(table_id).log.tablets()}

    def run_round(self, table_id: str) -> CommitResult:
        """See `TieredTables.run_round`."""
        handle = self._handle(table_id)
        lake = format_of(handle.desc).open(handle.desc, handle.lake())
        if table_id not in self._epochs:
            self._epochs[table_id] = next_epoch(lake.load())
        source = self.log(self._connected(), handle)
        return tier_table(handle, lake, source, executor=self.executor, epoch=self._epochs[table_id])
