"""One table as its servers offer it, for whatever is built on that: users' tables, Spark, tiering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lakehead.client.closable import ClosableEndpoint, Ending
from lakehead.client.leases import Leases
from lakehead.client.lookups import Lookups
from lakehead.client.patience import ask
from lakehead.client.received import told_table, told_tablets
from lakehead.client.remote_log import RemoteLog
from lakehead.client.routes import Routes
from lakehead.client.staging import Staging
from lakehead.client.writers import Writers
from lakehead.config import STORAGE_EXPIRES
from lakehead.env import Env
from lakehead.env.clock import Clock
from lakehead.errors import (
    ColumnNotFoundError,
    InvalidPredicateError,
    LakeStateError,
    SchemaChangedError,
    SchemaMismatchError,
)
from lakehead.protocol import messages as m
from lakehead.protocol.alterations import Alteration
from lakehead.protocol.tiering import ReportTiered, RoundInfo
from lakehead.types import Offset, TableDescriptor, TabletKey

T = TypeVar("T")
_CALLS_MAX = 20
_OF_ANOTHER_DEFINITION = (
    SchemaChangedError,
    SchemaMismatchError,
    ColumnNotFoundError,
    InvalidPredicateError,
    LakeStateError,
)
"""What a call may end with because the table was altered since it was opened."""


class RenewableLake(m.LakeReply, frozen=True, kw_only=True):
    """What the server says of a lake whose storage is read by credentials that end.

    ``renew`` asks it for the storage properties again, which have others; raises what a call does. ``clock`` tells when
    it is time.
    """

    renew: Callable[[], Mapping[str, str]]
    clock: Clock


class TableHandle:
    """Thread-safe.

    Attributes:
        writers, staging, lookups, log: what can be done with its rows.
        leases: of all tables of its connection: some do not live to let go of theirs.
    """

    def __init__(
        self, desc: TableDescriptor, routes: Routes, env: Env, leases: Leases | None = None, folder_id: str = ""
    ) -> None:
        """``folder_id`` is the folder that the table was opened in: a server of another copy refuses its rows."""
        self.desc = desc
        self.env = env
        self._routes = routes
        self._folder_id = folder_id
        self.writers = Writers(desc, routes, env, folder_id)
        self.lookups = Lookups(desc, routes, env.clock, folder_id)
        self.staging = Staging(desc, routes, env, folder_id)
        self.log = RemoteLog(desc, routes, env, folder_id)
        self.leases = Leases(routes, env, renewing=False) if leases is None else leases

    @property
    def _server(self) -> m.Endpoint:
        return self._routes.servers(self.desc.table_id)[0]

    @property
    def open(self) -> bool:
        """Whether calls may succeed: its connection is not closed."""
        return not getattr(self._server, "closed", False)

    def require_open(self) -> None:
        """Raises: ClosedError."""
        if isinstance(self._server, ClosableEndpoint):
            self._server.require_open()

    def ends(self, what: Ending) -> None:
        """Close it when the connection is closed."""
        for server in self._routes.servers(self.desc.table_id):
            if isinstance(server, ClosableEndpoint):
                server.ends(what)

    # ---- lake -------------------------------------------------------------------------------------------------

    def lake(self, *, changelog: bool = False) -> m.LakeReply:
        """Where the table's lake stands now, or what it keeps of the changelog."""
        desc = self.desc
        request = m.LakeInfo(
            table_id=desc.table_id, folder_id=self._folder_id, schema_id=desc.schema_id, changelog=changelog
        )
        found = ask(self._server, self.env.clock, request)[0]
        if STORAGE_EXPIRES not in found.storage_properties:
            return found
        told = {name: getattr(found, name) for name in found.__struct_fields__}
        return RenewableLake(
            **told, renew=lambda: self.now().lake(changelog=changelog).storage_properties, clock=self.env.clock
        )

    def leased(self, lake: m.LakeUse | None) -> m.LeasedTable:
        """The table as a read that is pinned under its definition names it."""
        desc = self.desc
        return m.LeasedTable(table_id=desc.table_id, lake=lake, folder_id=self._folder_id, schema_id=desc.schema_id)

    def adopt_lake(self) -> bool:
        """See `lakehead.api.lake.TableLake.adopt`."""
        request = m.AdoptLake(table_id=self.desc.table_id, folder_id=self._folder_id)
        return bool(ask(self._server, self.env.clock, request)[0].names)

    def report_tiered(self, round: RoundInfo | None = None) -> None:
        """Tell the servers of a commit to the lake, so that they may trim at once. A hint: they look at the lake."""
        request = ReportTiered(table_id=self.desc.table_id, folder_id=self._folder_id, round=round)
        for server in self._routes.servers(self.desc.table_id):
            ask(server, self.env.clock, request)

    # ---- definition -------------------------------------------------------------------------------------------

    def now(self) -> TableHandle:
        """The same table under the definition in force; this one when it is.

        Raises:
            TableNotFoundError: it was dropped.
            FolderCopiedError: the server has another copy of the folder now.
        """
        request = m.TableNow(table_id=self.desc.table_id, folder_id=self._folder_id)
        return self._of(ask(self._server, self.env.clock, request)[0])

    def current(
        self, call: Callable[[TableHandle], T], know: Callable[[TableHandle], TableHandle], *, repeat: bool = True
    ) -> T:
        """Call with this, and at once again with the table under the definition in force where it was altered since
        and that is what the call failed of; so often at most that only one who is altered without end still fails.

        Args:
            call: what it does is all by the definition that it is given, and does no harm when it is done again.
            know: told of each definition that was found to be in force; gives the one to go on with, which other
                threads may have found meanwhile.
            repeat: False when the call cannot be made again: what was found out is only told then.
        """
        handle = self
        for left in reversed(range(_CALLS_MAX)):
            try:
                return call(handle)
            except _OF_ANOTHER_DEFINITION:
                now = know(handle.now())
                if now is handle or not repeat or not left:
                    raise
                handle = now
        raise AssertionError

    def altered(self, changes: Sequence[Alteration]) -> TableHandle:
        """The same table once it has these changes.

        Raises:
            SchemaChangedError: another one altered it since this was opened.
            LakeheadError: see `lakehead.server.alteration.altered`; nothing was changed.
        """
        desc = self.desc
        request = m.AlterTable(
            table_id=desc.table_id, folder_id=self._folder_id, schema_id=desc.schema_id, changes=list(changes)
        )
        return self._of(ask(self._server, self.env.clock, request)[0])

    def truncate(self, ends: Mapping[TabletKey, Offset] | None = None) -> dict[TabletKey, Offset]:
        """See `lakehead.protocol.messages.Truncate`. A repeat does no harm: what is gone is gone."""
        parts = None
        if ends is not None:
            parts = [m.TabletRange(partition=k.partition, bucket=k.bucket, start=0, end=e) for k, e in ends.items()]
        request = m.Truncate(
            table_id=self.desc.table_id, folder_id=self._folder_id, schema_id=self.desc.schema_id, ends=parts
        )
        reply, _ = ask(self._server, self.env.clock, request)
        return {r.key: r.end for r in told_tablets(self.desc, reply.ends)}

    def _of(self, reply: m.TableReply) -> TableHandle:
        desc = told_table(reply.info)
        if desc == self.desc:
            return self
        return TableHandle(desc, self._routes, self.env, self.leases, self._folder_id)
