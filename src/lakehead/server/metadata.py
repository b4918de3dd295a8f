"""The metadata store: databases, tables, schemas, partitions and named writers, in one SQLite file.

Each call is one transaction, durable when it returns. Thread-safe.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.place import Place
from lakehead.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    LimitExceededError,
    StorageError,
    TableNotFoundError,
    UnsupportedFormatError,
)
from lakehead.protocol.schemas import schema_from_text
from lakehead.protocol.table_info import TableInfo
from lakehead.server import catalog
from lakehead.server.incarnations import begin_incarnation, unfenced
from lakehead.server.table_totals import TableTotals
from lakehead.types import Epoch, Incarnation, TableDescriptor, TablePath, TabletKey

C = TypeVar("C", bound=catalog.Command)
FORMAT_VERSION = 6
"""Version of the data folder: layout, metadata tables, frames and checkpoints together. 1 had no checkpoints, and logs
began at offset 0; 2 had no incarnations, and its frames and checkpoints do not say what clients sent; 3 had one
schema a table; 4 had no defaults of columns; 5 no overwritten partitions of log tables with lakes. Such a folder is
opened as it is and marked as 6."""

_SCHEMA = """
create table if not exists meta(name text primary key, value text not null);
create table if not exists databases(name text primary key);
create table if not exists tables(
    table_id text primary key, database text not null references databases(name), name text not null,
    info blob not null, unique(database, name));
create index if not exists tables_in_any_case on tables(database collate nocase, name collate nocase);
create table if not exists schemas(
    table_id text not null, schema_id integer not null, schema text not null, primary key(table_id, schema_id));
create table if not exists partitions(
    id integer primary key autoincrement, table_id text not null, name text not null, unique(table_id, name));
create table if not exists writers(
    table_id text not null, writer_id blob not null, epoch integer not null,
    acked_through integer not null default -1, primary key(table_id, writer_id));
create table if not exists truncations(
    table_id text not null, tablet text not null, before integer not null, primary key(table_id, tablet));
create table if not exists overwritten(
    table_id text not null, tablet text not null, before integer not null, job text not null, batch integer not null,
    primary key(table_id, tablet));
create table if not exists publications(
    table_id text not null, job text not null, batch integer not null default -1, begun integer, parts blob,
    sequence integer not null default 0, lasting integer not null, at_us integer not null default 0,
    primary key(table_id, job));
create index if not exists publications_of_jobs on publications(job);
create table if not exists planned(
    table_id text not null, job text not null, batch integer not null, planned text not null,
    primary key(table_id, job, batch)) without rowid;
create table if not exists writer_owners(
    table_id text not null, writer_id blob not null, owner text not null, primary key(table_id, writer_id));
create table if not exists tokens(
    id text primary key, principal text not null, digest blob not null, created_us integer not null,
    expires_us integer);
create table if not exists grants(
    grantee text not null, database text not null, table_id text not null, privilege text not null,
    primary key(grantee, database, table_id, privilege));
create table if not exists roles(principal text not null, role text not null, primary key(principal, role));
create table if not exists quotas(principal text primary key, bounds blob not null);
create table if not exists makers(table_id text primary key, principal text not null);
create table if not exists lakes_to_make(table_id text primary key);
create table if not exists dropped(folder text primary key);
create table if not exists incarnations(id text primary key, own integer not null);
"""

_READ_MAX = 1 << 14


class Publication(msgspec.Struct, frozen=True):
    """What a job has published to a table: all up to ``batch``. ``begun`` is the batch that was decided and may not be
    carried out, of ``parts`` as of `catalog.BeginPublication`, with batches numbered from ``sequence`` on."""

    job: str
    batch: int = -1
    begun: int | None = None
    parts: list[catalog.Part] = []
    sequence: int = 0
    lasting: bool = False


class Token(msgspec.Struct, frozen=True):
    """By what a principal is known: its SHA-256; for ever, without ``expires_us``."""

    id: str
    principal: str
    digest: bytes
    created_us: int
    expires_us: int | None

    def __repr__(self) -> str:
        return f"Token({self.id!r}, {self.principal!r})"


class GrantRow(msgspec.Struct, frozen=True):
    """One privilege in a database, or in all (``*``), or with a table, whose id is then given."""

    grantee: str
    database: str
    table_id: str
    privilege: str


class MetadataStore:
    """The catalog of one data folder.

    Attributes:
        access_version: grows with each change of who may do what, before the call that makes it returns.
    """

    def __init__(
        self,
        path: str,
        env: Env,
        *,
        place: Callable[[], Place] | None = None,
        fence: Callable[[], None] = unfenced,
    ) -> None:
        """Open or create the store, and begin an incarnation: a later one makes this store refuse to write.

        Args:
            place: tells where the folder lies, once the store is there; None does not look whether it is a copy.
            fence: raises `FencedError` once the folder may have another owner; nothing is then written any more.

        Raises:
            UnsupportedFormatError: the folder was written by a newer version.
            StorageError: the file cannot be opened or written.
        """
        self._lock = env.threads.lock()
        self._path = path
        self._closed = False
        self.access_version = 0
        self.fence = fence
        self._number: int | None = None
        self._read: dict[bytes, TableDescriptor] = {}
        self._totals: TableTotals | None = None  # once they were asked for
        try:
            self._db = env.storage.open_database(path)
        except sqlite3.Error as e:
            raise self._unopened(e) from e
        try:
            self.incarnation = self._begun(env, place or (lambda: None))
        except BaseException:
            self._db.close()
            raise
        self._number = self.incarnation.number

    def _begun(self, env: Env, place: Callable[[], Place | None]) -> Incarnation:
        try:
            self._check_version()
            self._db.executescript("pragma journal_mode=wal;" + _SCHEMA)
        except sqlite3.Error as e:
            raise self._unopened(e) from e
        with self._transaction() as db:
            db.execute("insert or ignore into meta values ('format', ?)", (str(FORMAT_VERSION),))
            newer = "update meta set value = ? where name = 'format' and value != ?"
            db.execute(newer, (str(FORMAT_VERSION), str(FORMAT_VERSION)))
            db.execute("insert or ignore into databases values ('default')")
            return begin_incarnation(db, place(), env.randomness)

    def _unopened(self, e: sqlite3.Error) -> StorageError:
        why = f"cannot open the metadata in {self._path}: {e}: use a folder that this user may write"
        return StorageError(why, path=self._path)

    def _check_version(self) -> None:
        has = self._db.execute("select 1 from sqlite_master where name = 'meta'").fetchone()
        row = has and self._db.execute("select value from meta where name = 'format'").fetchone()
        if row and int(row[0]) > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{self._path} has data format {row[0]}, this version of Lakehead reads up to {FORMAT_VERSION}:"
                " upgrade Lakehead to open this folder",
                path=self._path,
                format=int(row[0]),
            )

    @contextmanager
    def _transaction(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._waiting_for_disk(synced):
            committing = False
            try:
                self._db.execute("begin immediate")
                self._require_newest()
                yield self._db
                committing = True
                self._db.execute("commit")
            except BaseException as e:
                self._roll_back()
                error = self._error(e, "write")
                if committing and isinstance(error, StorageError) and not self._settle():
                    raise StorageError(
                        f"{error.message}. Whether it is done shows when the server is started again, unless a change"
                        " succeeds before",
                        **error.context,
                    ) from e
                raise error from e

    @contextmanager
    def _waiting_for_disk(self, waiting: bool) -> Iterator[None]:
        """Whether a commit inside returns when the disk has it, or before."""
        if waiting or self._closed:
            yield
            return
        self._db.execute("pragma synchronous=normal")
        try:
            yield
        finally:
            self._db.execute("pragma synchronous=full")

    def _settle(self) -> bool:
        """After a commit that failed: write something else where it may lie, complete but for its sync, so that no
        restart finds it. Returns whether that is durable."""
        try:
            self._db.execute("begin immediate")
            self._db.execute(
                "insert into meta values ('settled', '1')"
                " on conflict(name) do update set value = cast(value as integer) + 1"
            )
            self._db.execute("commit")
        except sqlite3.Error:
            self._roll_back()
            return False
        return True

    def _require_newest(self) -> None:
        if self._number is None:
            return
        self.fence()
        newest = int(self._db.execute("select value from meta where name = 'incarnation'").fetchone()[0])
        if newest != self._number:
            raise FencedError(
                f"another process has become the owner of the folder of {self._path} (start {newest}, this one is"
                f" {self._number}): stop this one",
                path=self._path,
            )

    def _rows(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._db.execute(sql, args).fetchall()
            except sqlite3.Error as e:
                raise self._error(e, "read") from e

    def _roll_back(self) -> None:
        # Where "begin" itself failed, or the store is closed, there is nothing to take back.
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("rollback")

    def _error(self, e: BaseException, action: str) -> BaseException:
        if self._closed:
            return ClosedError("the server is closed: connect again")
        if isinstance(e, sqlite3.Error):
            return StorageError(f"cannot {action} the metadata in {self._path}: {e}", path=self._path)
        return e

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    @property
    def is_copy(self) -> bool:
        """Whether the folder is a copy of another, as far as anyone saw."""
        return bool(self._rows("select 1 from incarnations where not own limit 1"))

    def is_own(self, incarnation: str) -> bool:
        """Whether that text names a start of this very folder, not of one that it is a copy of."""
        return bool(self._rows("select 1 from incarnations where id = ? and own", incarnation))

    def is_ancestor(self, incarnation: str) -> bool:
        """Whether that text names a start of this folder, or one of the folder it is a copy of before it was copied."""
        return bool(self._rows("select 1 from incarnations where id = ?", incarnation))

    def databases(self) -> list[str]:
        return [str(r[0]) for r in self._rows("select name from databases order by name")]

    def tables(self, database: str | None) -> list[TableDescriptor]:
        """Tables of one database, or of all, by name."""
        where, args = ("where database = ?", (database,)) if database is not None else ("", ())
        rows = self._rows(f"select info from tables {where} order by database, name", *args)
        return [self._descriptor(r[0]) for r in rows]

    def has_lake_table(self, table_id: str) -> bool:
        """See `lakehead.server.lake_state.LakeOwner`."""
        with_lake = (t for t in self.tables(None) if t.lake is not None)
        return any(lake.table_id == table_id for t in with_lake for lake in t.lake_tables)

    def table_count(self) -> int:
        """How many tables there are."""
        return int(self._rows("select count(*) from tables")[0][0])

    def tablet_count(self) -> int:
        """How many tablets all tables have."""
        partitions = dict(self._rows("select table_id, count(*) from partitions group by table_id"))
        with self._told_totals() as totals:
            return totals.tablets(partitions)

    @contextmanager
    def _told_totals(self) -> Iterator[TableTotals]:
        with self._lock:
            totals = self._totals
            if totals is None:
                totals = TableTotals()
                try:
                    for table_id, info in self._db.execute("select table_id, info from tables"):
                        totals.tell(table_id, info)
                except sqlite3.Error as e:
                    raise self._error(e, "read") from e
                self._totals = totals
            yield totals

    def table(self, path: TablePath) -> TableDescriptor:
        """Raises: TableNotFoundError."""
        rows = self._rows("select info from tables where database = ? and name = ?", path.database, path.table)
        if not rows:
            with self._told_totals() as totals:
                now = totals.called_before(path)
            if now:
                raise TableNotFoundError(
                    f"there is no table {path} any more: it is called {' or '.join(now)} now",
                    table=str(path),
                    now=now[0],
                )
            raise TableNotFoundError(f"there is no table {path}: see con.tables() or create it", table=str(path))
        return self._descriptor(rows[0][0])

    def table_by_id(self, table_id: str) -> TableDescriptor:
        """Raises: TableNotFoundError."""
        rows = self._rows("select info from tables where table_id = ?", table_id)
        if not rows:
            raise TableNotFoundError("the table was dropped: open it again by name", table_id=table_id)
        return self._descriptor(rows[0][0])

    def _descriptor(self, data: bytes) -> TableDescriptor:
        # The bytes tell all: schemas that are added change them.
        known = self._read.get(data)
        if known is None:
            if len(self._read) >= _READ_MAX:
                self._read.clear()
            known = self._read[data] = self._read_descriptor(data)
        return known

    def _read_descriptor(self, data: bytes) -> TableDescriptor:
        info = msgspec.msgpack.decode(data, type=TableInfo)
        sql = "select schema_id, schema from schemas where table_id = ? and schema_id != ? order by schema_id"
        return info.descriptor([schema_from_text(*r) for r in self._rows(sql, info.table_id, info.schema_id)])

    def submit(self, command: C) -> C:
        """Plan a command and apply it; returns it as planned, durable.

        Raises:
            TableExistsError, LimitExceededError: see `catalog.plan`.
        """
        (planned,) = self.submit_all([command])
        return planned

    def submit_all(self, commands: Sequence[C], *, synced: bool = True) -> list[C]:
        """Plan commands and apply them, one after the other, all or none; errors as of `submit`.

        Args:
            synced: else a power cut may take them, unless others were submitted after them.
        """
        try:
            planned = []
            with self._transaction(synced=synced) as db:
                for command in commands:
                    planned.append(catalog.plan(db, command))
                    catalog.apply(db, catalog.position(db) + 1, planned[-1])
            return planned
        finally:
            for command in commands:
                self._note_change(command)

    def require_possible(self, command: catalog.Command) -> None:
        """Return where `submit` would take the command now; changes nothing. Errors as of `submit`."""
        with self._lock:
            try:
                catalog.plan(self._db, command)
            except sqlite3.Error as e:
                raise self._error(e, "read") from e

    def _note_change(self, command: catalog.Command) -> None:
        with self._lock:
            self.access_version += isinstance(command, catalog.CHANGES_ACCESS)
            if (totals := self._totals) is not None:
                self._totals = None  # to be made anew where this fails, which is no error of the change
                with contextlib.suppress(sqlite3.Error):
                    for table_id in catalog.changed_tables(command):
                        found = self._db.execute("select info from tables where table_id = ?", (table_id,)).fetchone()
                        totals.tell(table_id, found and found[0])
                    self._totals = totals

    def apply(self, position: int, command: catalog.Command) -> None:
        """Take a command that another catalog has planned: how a copy of it follows.

        Raises:
            CorruptionError: the command does not follow the last one.
        """
        with self._transaction() as db:
            if position != catalog.position(db) + 1:
                raise CorruptionError(
                    f"command {position} of the catalog was to follow command {catalog.position(db)} in {self._path}:"
                    " load it anew",
                    path=self._path,
                )
            catalog.apply(db, position, command)
        self._note_change(command)

    def make_up_lake(self, desc: TableDescriptor, make: Callable[[TableDescriptor], None]) -> None:
        """Have a lake table made where it is not known that it was: who made the table did not come to that."""
        if self._rows("select 1 from lakes_to_make where table_id = ?", desc.table_id):
            make(desc)
            self.lake_made(desc.table_id)

    def lake_made(self, table_id: str) -> None:
        """Note that the lake table of a table is there; without the note, it is only looked for again."""
        with contextlib.suppress(StorageError):
            self.submit_all([catalog.LakeMade(table_id)], synced=False)

    def dropped_folders(self) -> list[str]:
        """Folders of tables that were dropped, of which something may still be there."""
        return [str(r[0]) for r in self._rows("select folder from dropped order by folder")]

    def partitions(self, table_id: str) -> dict[str, int]:
        """Partition name -> its number in this folder."""
        rows = self._rows("select name, id from partitions where table_id = ?", table_id)
        return {str(name): int(number) for name, number in rows}

    def truncated(self, table_id: str) -> dict[TabletKey, int]:
        """Offsets below which tablets are to have no rows, where that is not known to be done."""
        rows = self._rows("select tablet, before from truncations where table_id = ?", table_id)
        return {TabletKey.parse(tablet): int(before) for tablet, before in rows}

    def overwritten(self, table_id: str, *, begun: bool) -> dict[TabletKey, int]:
        """Of tablets of a log table with a lake whose partition was overwritten, the offset below which its rows are
        gone; where ``begun``, of what is decided and not yet carried out, too."""
        sql = "select tablet, before from overwritten o where table_id = ?"
        if not begun:
            sql += " and not exists (select 1 from publications p where p.table_id = o.table_id and p.job = o.job"
            sql += " and p.begun = o.batch)"
        return {TabletKey.parse(tablet): int(before) for tablet, before in self._rows(sql, table_id)}

    def overwritten_by(self, table_id: str, begun: Publication) -> dict[TabletKey, int]:
        """The same of what one is to carry out."""
        sql = "select tablet, before from overwritten where table_id = ? and job = ? and batch = ?"
        return {TabletKey.parse(t): int(before) for t, before in self._rows(sql, table_id, begun.job, begun.begun)}

    def publication(self, table_id: str, job: str) -> Publication:
        """How far a job has come with a table."""
        found = self._publications("table_id = ? and job = ?", table_id, job)
        return found[0] if found else Publication(job)

    def tables_of(self, job: str) -> list[str]:
        """The ids of the tables that a job has written to, as far as it is remembered."""
        return [str(found[0]) for found in self._rows("select table_id from publications where job = ?", job)]

    def planned(self, table_id: str, job: str, batch: int) -> str | None:
        """What one of the last batches of a job was made of, of most of them `catalog.digest_of` that; empty where it
        is not known, None of one that had no rows for the table."""
        last = "where table_id = ? and job = ? and batch <= ? order by batch desc limit 1"
        sql = f"select batch, planned from planned {last}"
        found = self._rows(sql, table_id, job, batch)
        return "" if not found else str(found[0][1]) if found[0][0] == batch else None

    def oldest_planned(self, table_id: str, job: str) -> tuple[int, str] | None:
        """The first of the batches of which this is known in full, or else of which it is known, and the same of it;
        None where it is known of none."""
        known = "where table_id = ? and job = ? and planned <> ''"
        sql = f"select batch, planned from planned {known} order by planned glob ?, batch limit 1"
        found = self._rows(sql, table_id, job, f"{catalog.DIGEST}*")
        return (int(found[0][0]), str(found[0][1])) if found else None

    def unfinished_publications(self, table_id: str) -> list[Publication]:
        """Those of a table that were decided, and are not known to be carried out."""
        return self._publications("table_id = ? and begun is not null order by rowid", table_id)

    def _publications(self, where: str, *args: object) -> list[Publication]:
        sql = f"select job, batch, begun, parts, sequence, lasting from publications where {where}"
        return [
            Publication(
                str(job),
                int(batch),
                begun,
                [] if parts is None else msgspec.msgpack.decode(parts, type=list[catalog.Part]),
                int(sequence),
                bool(lasting),
            )
            for job, batch, begun, parts, sequence, lasting in self._rows(sql, *args)
        ]

    def writer_acked_through(self, table_id: str, writer_id: bytes) -> int:
        """What its last `EndWriter` said; -1 for nothing."""
        rows = self._rows("select acked_through from writers where table_id = ? and writer_id = ?", table_id, writer_id)
        return int(rows[0][0]) if rows else -1

    def writer_epoch(self, table_id: str, writer_id: bytes) -> Epoch:
        """The newest epoch of a named writer, 0 when it was never opened."""
        rows = self._rows("select epoch from writers where table_id = ? and writer_id = ?", table_id, writer_id)
        return int(rows[0][0]) if rows else 0

    def writer_owner(self, table_id: str, writer_id: bytes) -> str:
        """See `catalog.writer_owner`."""
        rows = self._rows("select owner from writer_owners where table_id = ? and writer_id = ?", table_id, writer_id)
        return str(rows[0][0]) if rows else ""

    def token(self, token_id: str) -> Token | None:
        """A token that was not revoked."""
        rows = self._rows("select id, principal, digest, created_us, expires_us from tokens where id = ?", token_id)
        return Token(*rows[0]) if rows else None

    def tokens(self) -> list[Token]:
        """Those that were not revoked, by principal and age."""
        sql = "select id, principal, digest, created_us, expires_us from tokens order by principal, created_us, id"
        return [Token(*row) for row in self._rows(sql)]

    def roles(self, principal: str) -> list[str]:
        """What roles a principal has."""
        rows = self._rows("select role from roles where principal = ? order by role", principal)
        return [str(role) for (role,) in rows]

    def role_members(self) -> list[tuple[str, str]]:
        """Every principal that has a role, and the role."""
        return [(str(p), str(r)) for p, r in self._rows("select principal, role from roles order by role, principal")]

    def grants(self, grantees: Sequence[str] | None = None) -> list[GrantRow]:
        """What some principals and roles were granted, or all."""
        some = "" if grantees is None else f"where grantee in ({','.join('?' * len(grantees))})"
        sql = f"select grantee, database, table_id, privilege from grants {some} order by 1, 2, 3, 4"
        return [GrantRow(*row) for row in self._rows(sql, *(grantees or ()))]

    def quotas(self) -> dict[str, dict[str, int]]:
        """What bounds principals, by name; see `catalog.SetQuota`."""
        rows = self._rows("select principal, bounds from quotas order by principal")
        return {str(name): msgspec.msgpack.decode(bounds, type=dict[str, int]) for name, bounds in rows}

    def makers(self) -> dict[str, str]:
        """Which principal has made a table, by its id; of those that no principal has made, nothing."""
        return {str(table_id): str(name) for table_id, name in self._rows("select table_id, principal from makers")}

    def paths(self, database: str | None = None) -> dict[str, TablePath]:
        """What every table, of a database or of all, is called, by its id; in the order of names."""
        where, args = ("where database = ?", (database,)) if database is not None else ("", ())
        found = self._rows(f"select table_id, database, name from tables {where} order by database, name", *args)
        return {str(i): TablePath(d, n) for i, d, n in found}

    def paths_called(self, names: Iterable[str]) -> dict[str, TablePath]:
        """The same of tables that have one of these names, ``database.table`` in any case."""
        where = "where database = ? collate nocase and name = ? collate nocase"
        asked = [name.split(".") for name in set(names) if name.count(".") == 1]
        sql = f"select database, name, table_id from tables {where}"
        found = sorted({row for name in asked for row in self._rows(sql, *name)})
        return {str(i): TablePath(d, n) for d, n, i in found}


def require_tablets(metadata: MetadataStore, table: TablePath, more: int, limits: Limits) -> None:
    """Return if a server may have so many more tablets.

    Raises:
        LimitExceededError: it would have too many.
    """
    count = metadata.tablet_count() + more
    if count > limits.tablets_max:
        raise LimitExceededError(
            f"with {more:,} more for {table} the server would have {count:,} tablets, over its limit of"
            f" {limits.tablets_max:,}: use fewer buckets or partitions, or let the server hold more files open"
            " (ulimit -n)",
            tablets_max=limits.tablets_max,
        )
