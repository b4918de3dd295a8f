"""`connect` and `Connection`: embedded, attached to the process that serves a folder, or to a server by address."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lakehead.api.copying import TableCopy, copy_table
from lakehead.api.definition import definition_of, is_text
from lakehead.api.display import Handle
from lakehead.api.folder import AttachedEndpoint, forget_folders, open_folder, release_folder, wait_stopped
from lakehead.api.granting import Granting
from lakehead.api.lake import TieringResult
from lakehead.api.table import Table
from lakehead.client.closable import ClosableEndpoint
from lakehead.client.leases import Leases
from lakehead.client.patience import ask
from lakehead.client.received import told_table
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.config import LakeConfig, names_principal, require_token
from lakehead.env import Env
from lakehead.env.address import Address, SocketAddress, TcpAddress, parse_uri
from lakehead.env.credentials import FoundToken, local_host, server_place
from lakehead.env.descriptors import fill_standard_descriptors
from lakehead.env.forks import require_threads
from lakehead.env.interrupts import shielded
from lakehead.env.late_imports import load
from lakehead.env.own_sockets import require_own
from lakehead.env.place import real_path
from lakehead.env.storage import storage_errors
from lakehead.env.tls import Tls, read_tls, renewed
from lakehead.errors import (
    InvalidPropertyError,
    InvalidRequestError,
    InvalidUriError,
    LakeheadError,
    OverloadedError,
    TableNotFoundError,
)
from lakehead.format.defaults import first_schema
from lakehead.protocol import messages as m
from lakehead.protocol.tiering import AskTieringStatus, TieringStatus
from lakehead.types import Schemas, TableDescriptor, TablePath

if TYPE_CHECKING:
    import duckdb

    from lakehead.api.sql_engine import SqlEngine
    from lakehead.api.tiering import BackgroundTiering
    from lakehead.tiering.service import RoundReport

_EXIT_SECONDS = 2.0

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def connect(
    target: str | os.PathLike[str],
    *,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    lake: LakeConfig | None = None,
) -> Connection:
    """Open a data folder or a server.

    Args:
        target: a folder, served by this process unless a live process serves it already, to which the connection then
            attaches: when that process ends, this one serves the folder, or attaches to the one that does; or
            ``"lakehead://host:port"``, or what `Connection.uri` says.
        token: what the server asks for, its own or a principal's; a folder asks for none. On one machine a client takes
            the server's from the files of this user.
        tls_ca: PEM file of the authority that signed the server's certificate; makes the connection use TLS.
        tls_cert: PEM file of a certificate of one's own, where the server asks for one; without a token it says who
            one is, by the URI that is its first name.
        tls_key: PEM file of that certificate's key, which this user alone can read.
        lake: where a folder's lake tables live; read when this process becomes the folder's server, which it does after
            another one only where that one had the same catalog.

    Raises:
        InvalidUriError: the target is neither a path nor such a URI.
        InvalidRequestError: a token or a certificate was given for a folder.
        InvalidPropertyError: ``lake`` is no `LakeConfig`, a certificate or key cannot be read, or the token is none.
        StorageError: the folder cannot be created or written.
        OverloadedError: this process can start no more threads.
        UnsupportedFormatError: a newer version wrote the folder.
        UnavailableError: no server answers.
        InvalidRequestError: this process was forked from one that had connected.
    """
    text = os.fspath(target) if isinstance(target, str | os.PathLike) else None
    if text == ":memory:":
        raise InvalidUriError("':memory:' is no folder, and rows are kept in one: give tempfile.mkdtemp()")
    if not isinstance(text, str) or not text:
        raise InvalidUriError(f"cannot connect to {target!r}: give a folder or 'lakehead://host:port'")
    if re.fullmatch(r"lakehead:/?[^/].*|[\w.-]+:\d+", text):
        raise InvalidUriError(f"{text!r} looks like a server's address: write 'lakehead://host:port' (or ./{text})")
    if lake is not None and not isinstance(lake, LakeConfig):
        raise InvalidPropertyError(
            "lake= takes a lakehead.LakeConfig, for example LakeConfig(catalog={'type': 'rest'})"
        )
    require_threads()
    fill_standard_descriptors()
    if "://" in text:
        with _enough_threads():
            return open_server(text, token=token, tls=_tls(tls_ca, tls_cert, tls_key))
    given = {"token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    if names := [f"{name}=" for name, value in given.items() if value is not None]:
        raise InvalidRequestError(
            f"{', '.join(names)} are for the address of a server, and {text!r} is a folder, of which its user may do"
            " all: leave them out, or connect to 'lakehead://host:port', or to what Connection.uri says"
        )
    folder, how = real_path(text), lake or LakeConfig()
    with _enough_threads():
        return shielded(lambda: _connect_folder(folder, how), undo=Connection.close)


def presented(uri: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What `connect` is to be given for an address, by the environment: for that of ``LAKEHEAD_URI``, and for no other,
    where whoever named it would get the token."""
    own = environ.get("LAKEHEAD_URI", "")
    if "://" not in uri or "://" not in own or server_place(uri) != server_place(own):
        return {}
    names = ("token", "tls_ca", "tls_cert", "tls_key")
    return {name: given for name in names if (given := environ.get(f"LAKEHEAD_{name.upper()}"))}


@contextlib.contextmanager
def _enough_threads() -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:
        if "new thread" not in str(e):
            raise
        raise OverloadedError(
            "this process can start no more threads: raise the limit (ulimit -u, ulimit -v), or end other threads, and"
            " connect again"
        ) from e


def _connect_folder(folder: str, lake: LakeConfig) -> Connection:
    reached = open_folder(folder, lake)
    if reached.owner is None:
        return Connection(reached.endpoint, reached.uri, folder)
    return Connection(AttachedEndpoint(folder, lake, reached), reached.uri, None)


def _tls(
    ca: str | os.PathLike[str] | None, cert: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
) -> Tls | None:
    if ca is None and cert is None and key is None:
        return None
    if ca is None:
        raise InvalidPropertyError("a certificate of one's own needs TLS: give the server's authority with tls_ca")
    return read_tls(authorities=ca, chain=cert, key=key)


def open_server(uri: str, *, token: str | None, tls: Tls | None = None) -> Connection:
    """See `connect`; ``tls`` is what the PEM files hold."""
    if token is not None:
        require_token(token)
    address = parse_uri(uri)
    if isinstance(address, SocketAddress):
        if tls is not None:
            raise InvalidPropertyError(f"a Unix socket speaks no TLS: leave out tls_ca, tls_cert and tls_key for {uri}")
        require_own(address)
    elif token is None and tls is None:  # a certificate is for a name
        address = TcpAddress(local_host(address.host), address.port)
    # Who shows a certificate is who that says, unless they say otherwise.
    found = None if tls is not None and tls.chain is not None else FoundToken(address)
    endpoint = _flight(address, token=found if token is None else token, tls=tls)
    try:
        endpoint.call(m.Hello())
    except LakeheadError:
        endpoint.close()
        raise
    con = Connection(endpoint, uri, None)
    con._given = (token, tls)
    return con


def reopened(con: Connection) -> Connection:
    """Another connection to a server that was started again, with another token: the one in this user's files.

    A principal's token is worth as much as before, and nobody takes another for it: that may be one of who may do all.
    """
    token, tls = con._given
    return open_server(con.uri, token=token if token and names_principal(token) else None, tls=tls and renewed(tls))


def _flight(address: Address, *, token: str | FoundToken | None, tls: Tls | None) -> m.Endpoint:
    from lakehead.client.flight import FlightEndpoint

    return FlightEndpoint(address, token=token, tls=tls)


class Connection(Handle, Granting):
    """A connection to Lakehead. Thread-safe; also a context manager."""

    def __init__(self, endpoint: m.Endpoint, uri: str, folder: str | None) -> None:
        self._server = endpoint
        self._door = ClosableEndpoint(endpoint)
        self._uri = uri
        self._folder = folder
        # Token and certificates that `connect` was given: other processes of this job may need them.
        self._given: tuple[str | None, Tls | None] = (None, None)
        self._env = Env.system()
        self._routes = OneServer(self._door)
        self._leases = Leases(self._routes, self._env, renewing=True)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._sql: dict[bool, SqlEngine] = {}  # by whether it is unrestricted
        _connections.add(self)

    def _facts(self) -> Mapping[str, object]:
        forked = self._pid != os.getpid()
        return {
            "uri": repr(self.uri),
            "serves": None if self._folder is None else repr(self._folder),
            "state": "closed by a fork" if forked else "closed" if self._door.closed else "open",
        }

    @property
    def uri(self) -> str:
        """Where the server behind it is reached, ``lakehead://host:port``, or ``lakehead:///path`` of a Unix socket.

        That of an embedded connection is for this user's processes and Spark executors on this machine. It may be
        another one after the owner of a folder has changed.
        """
        return self._server.uri if isinstance(self._server, AttachedEndpoint) else self._uri

    def _require_open(self) -> None:
        """Raises: ClosedError: this connection is closed."""
        self._door.require_open()

    @property
    def _endpoint(self) -> m.Endpoint:
        self._require_open()
        return self._door

    def _ask(self, request: m.Request[m.R]) -> m.R:
        return ask(self._endpoint, self._env.clock, request)[0]

    # ---- tables -----------------------------------------------------------------------------------------------

    def create_table(
        self,
        name: str,
        schema: object,
        *,
        primary_key: list[str] | tuple[str, ...] | str | None = None,
        partition_by: list[str] | tuple[str, ...] | str | None = None,
        buckets: int = 1,
        bucket_key: list[str] | tuple[str, ...] | str | None = None,
        lake: str | None = None,
        freshness: str | float = "30s",
        if_not_exists: bool = False,
        **properties: Any,
    ) -> Table:
        """Create a table, and with ``lake="iceberg"`` its Iceberg table.

        Args:
            name: ``"database.table"``; the database is made when missing; a bare name lives in ``default``.
            schema: a `pyarrow.Schema`, or anything with an Arrow schema.
            primary_key: makes a primary-key table; key columns become non-null. Without it: a log table.
            partition_by: identity partitions; part of the primary key of a keyed table.
            buckets: unit of order and parallelism, per partition.
            bucket_key: default the primary key without partition columns; log tables: none (round robin).
            lake: ``"iceberg"`` or None. Nothing moves to the lake until a round or a tiering service runs.
            freshness: how old a row may get before it is in the lake, while a service runs.
            if_not_exists: return an existing table of the same columns and keys, as it is.
            **properties: see `lakehead.config.TableProperties`; unknown names are errors.

        Raises:
            TableExistsError: a table of that name exists.
            InvalidRequestError: it cannot be called so.
            InvalidSchemaError: the definition is not possible; the message names the column and the remedy.
            InvalidPropertyError: a property is unknown or cannot be read.
        """
        desc = definition_of(
            name,
            schema,
            primary_key=primary_key,
            partition_by=partition_by,
            buckets=buckets,
            bucket_key=bucket_key,
            lake=lake,
            freshness=freshness,
            **properties,
        )
        return self._created(desc, if_not_exists=if_not_exists)

    def _created(self, desc: TableDescriptor, *, if_not_exists: bool = False) -> Table:
        """A table of this definition, with no other schemas and names than those in force, and no comments."""
        only = first_schema(0, desc.schema, desc.schemas.current.fields)
        new = dataclasses.replace(desc, schemas=Schemas((only,)), former=(), comments=())
        return self._opened(self._ask(m.CreateTable(info=m.TableInfo.of(new), if_not_exists=if_not_exists)))

    def table(self, name: str) -> Table:
        """Open a table.

        Raises:
            TableNotFoundError: there is none of that name.
        """
        path = TablePath.parse(name)
        try:
            return self._opened(self._ask(m.GetTable(database=path.database, table=path.table)))
        except TableNotFoundError as e:
            raise self._with_near_name(e, path) from None

    def _with_near_name(self, e: TableNotFoundError, path: TablePath) -> TableNotFoundError:
        if "now" in e.context:
            return e
        near = difflib.get_close_matches(str(path), self.tables(), 1)
        if not near or near[0] == str(path):  # another one has the name
            return e
        return TableNotFoundError(f"there is no table {path}; did you mean {near[0]!r}?", table=str(path))

    def _opened(self, reply: m.TableReply) -> Table:
        desc = told_table(reply.info)
        handle = TableHandle(desc, self._routes, self._env, self._leases, reply.folder_id)
        return Table(handle)

    def tables(self, database: str | None = None) -> list[str]:
        """Names ``database.table`` of one database or of all, sorted.

        Raises:
            InvalidRequestError: the database is no text.
        """
        if not (database is None or is_text(database)):
            raise InvalidRequestError(
                f"{database!r} is no name of a database: give a text that can be written as UTF-8"
            )
        return self._ask(m.ListTables(database=database)).names

    def _tables_called(self, names: Iterable[str]) -> list[str]:
        """Those of `tables` that have one of these names, in any case; others may be among them."""
        return self._ask(m.ListTables(database=None, called=list(names))).names

    def databases(self) -> list[str]:
        """Names of the databases, sorted."""
        return self._ask(m.ListDatabases()).names

    def rename_table(self, old: str, new: str, *, swap: bool = False) -> Table:
        """Call a table something else, its lake table too; nothing else about it changes.

        Whoever has the table open goes on. Nobody finds it under the old name any more.

        Args:
            new: as for `create_table`; the database is made when missing.
            swap: the table that is called ``new`` gets the name ``old``, in the same moment.

        Raises:
            TableNotFoundError: there is no table ``old``, or with ``swap`` none ``new``.
            TableExistsError: there is a table ``new``, without ``swap``.
            LakeStateError: the lake's catalog has a table ``new`` of someone else's; nothing was changed.
            UnavailableError: the lake's catalog cannot be reached; nothing was changed.
        """
        return self._rename(old, new, swap=swap)

    def _rename(self, old: str, new: str, *, swap: bool = False, only: str = "") -> Table:
        path, to = TablePath.parse(old), TablePath.parse(new)
        request = m.RenameTable(
            database=path.database, table=path.table, only=only, to_database=to.database, to_table=to.table, swap=swap
        )
        try:
            return self._opened(self._ask(request))
        except TableNotFoundError as e:
            raise self._with_near_name(e, TablePath.parse(str(e.context.get("table", path)))) from None

    def copy_table(self, old: str, new: str, *, buckets: int | None = None) -> TableCopy:
        """Make a table of another one's definition and rows, as of one moment; what is written later is not in it.

        The rows pass through this process. The copy gets its name when it is complete, in one step; what is left of one
        that died is removed when it is made again, and so is what another call makes at the same time, which fails.
        Offsets, writers and lake snapshots are its own.

        Args:
            new: as for `create_table`; there is no such table.
            buckets: of the copy; None for as many as the old one has.

        Raises:
            TableNotFoundError: there is no table ``old``.
            TableExistsError: there is a table ``new``, or another call makes a copy of that name.
            InvalidSchemaError: it cannot have so many buckets.
        """
        return copy_table(self, old, new, buckets)

    def drop_table(self, name: str, *, purge: bool = False) -> None:
        """Drop a table: its log, and its lake table from the catalog; with ``purge`` the lake's files too.

        Raises:
            TableNotFoundError: there is none of that name.
        """
        self._drop(name, purge=purge)

    def _drop(self, name: str, *, purge: bool = False, only: str = "") -> None:
        path = TablePath.parse(name)
        try:
            self._ask(m.DropTable(database=path.database, table=path.table, only=only, purge=purge))
        except TableNotFoundError as e:
            raise self._with_near_name(e, path) from None

    # ---- lake and SQL -----------------------------------------------------------------------------------------

    def tier(self, name: str) -> TieringResult:
        """Move to the lake what is not there yet: one round, now, in this process, without Spark.

        Raises:
            NoLakeError: the table has no lake.
            UnavailableError: the lake's catalog cannot be reached; nothing was written.
            CommitError: the lake refused the commit; nothing was moved.
        """
        return self.table(name)._tier()

    def tiering(
        self, tables: Sequence[str] | None = None, *, on_round: Callable[[RoundReport], None] | None = None
    ) -> BackgroundTiering:
        """The tiering service in the background of this process, without Spark, as long as a ``with`` block lasts.

        Every lake table stays within its freshness; what fails is tried again. The block's end waits for the round
        under way. Rounds run beside this program's own work, of as many tables at once as there are cores, four at
        most: for much data run `lakehead tier run`, which has Spark do it.

        Args:
            tables: names, or patterns such as ``shop.*``; None for all tables with a lake, those created later too.
            on_round: called after each round that moved rows, in the service's thread.

        Raises:
            TableNotFoundError: a table was named that does not exist.
            NoLakeError: at the end of the block: a table was named that has no lake.
        """
        from lakehead.api.tiering import BackgroundTiering, ConnectionTables

        self._require_open()
        return BackgroundTiering(ConnectionTables(self, tables, again=reopened), self._env, on_round)

    def tiering_status(self) -> TieringStatus:
        """Which tiering jobs ask this server, and what its tables' newest rounds did."""
        return self._ask(AskTieringStatus())

    def sql(
        self,
        query: str,
        params: object = None,
        frames: Mapping[str, object] | None = None,
        *,
        unrestricted: bool = False,
    ) -> duckdb.DuckDBPyRelation:
        """Run SQL (DuckDB) over union reads; also ``t$lake``, ``t$changelog``, ``t$lake$snapshots``, ``t$lake$files``.

        One statement that reads: SELECT, DESCRIBE, SUMMARIZE, SHOW TABLES or EXPLAIN of them; or ALTER TABLE or COMMENT
        ON, which is answered without rows once the table is changed (see `Table.alter`). All tables that a statement
        names are read as of one moment, that of this call; columns and filters are pushed into both tiers. The relation
        is lazy: fetch it before the connection is closed. Its methods raise `SqlError` for what DuckDB finds while it
        runs.

        The text is data: it reads tables and frames, whoever wrote it, and no file, address or extension.

        Args:
            query: names are as in DuckDB, without regard to case; a bare table name lives in ``default``.
            params: a list for ``?`` or ``$1``, a dict for ``$name``; the statement then runs at once.
            frames: tables of this statement by name: Arrow data, pandas, Polars, relations, scans or lists of dicts,
                of which each has all columns that any has. A stream, which can be read once, is read here, whole.
            unrestricted: the text is code: it may read and write files and addresses with the rights of this process,
                COPY, ATTACH, LOAD and SET included. What it attaches, loads and sets stays for other such statements of
                this connection.

        Raises:
            SqlError: the statement cannot be parsed or executed, is not one, or does something else than that; nothing
                of it had an effect.
            ColumnNotFoundError, InvalidSchemaError, SchemaChangedError, LakeStateError: a table cannot be altered so;
                nothing was changed.
            TableNotFoundError: it names a Lakehead table that does not exist.
            InvalidRequestError: a frame has no rows, or the name of a table or of another frame.
        """
        with storage_errors("lakehead.api.sql", "load"):
            load("lakehead.api.sql")
            from lakehead.api.sql import run_sql

        engine = self._sql.get(unrestricted)
        if engine is None:
            engine = shielded(lambda: self._sql_engine(unrestricted=unrestricted))
        return run_sql(self, engine, query, params, frames)

    def _sql_engine(self, *, unrestricted: bool) -> SqlEngine:
        """The one that there is, or a new one, for which DuckDB runs statements of its own."""
        from lakehead.api.sql_engine import SqlEngine

        with self._lock:
            if unrestricted not in self._sql:
                self._sql[unrestricted] = SqlEngine(unrestricted=unrestricted)
            return self._sql[unrestricted]

    # ---- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close: calls through this connection and its tables are refused, its subscriptions and writers end with
        `ClosedError`. The last connection to an embedded folder stops serving it.

        Raises:
            StorageError: a last sync failed (``durability="os"``); all is closed.
        """
        shielded(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._door.closed or self._pid != os.getpid():
                return
            self._door.close()
            self._leases.close()
            engines = list(self._sql.values())
        try:
            for engine in engines:  # others may still ask
                engine.close()
        finally:
            if self._folder is None:
                self._server.close()
            else:
                release_folder(self._folder)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_all() -> None:
    for connection in list(_connections):
        with contextlib.suppress(LakeheadError, KeyboardInterrupt):
            connection.close()
    with contextlib.suppress(KeyboardInterrupt):
        wait_stopped(_EXIT_SECONDS)


def _after_fork() -> None:
    """A child shares nothing: its inherited connections are closed and hold no lock. Most children run another program
    at once and never get to it."""
    for connection in list(_connections):
        connection._door.forget()
    forget_folders()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
