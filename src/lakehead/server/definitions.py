"""The tables of one server, as their definitions: created, found and dropped, with their lake tables."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

import msgspec

from lakehead.config import Limits, TableProperties
from lakehead.env import Env
from lakehead.errors import (
    InvalidPropertyError,
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    NoLakeError,
    StorageError,
    TableExistsError,
    TableNotFoundError,
)
from lakehead.format.defaults import first_schema
from lakehead.format.schema import require_small_schema, validate_definition
from lakehead.protocol import messages as m
from lakehead.protocol.privileges import Database, Privilege
from lakehead.protocol.table_choice import TableChoice
from lakehead.protocol.tiering import (
    AskTieringStatus,
    AskTieringWork,
    JobInfo,
    ReportTiered,
    TableRounds,
    TieredTable,
    TieringStatus,
    TieringWork,
)
from lakehead.server.access import Caller, authorize, may
from lakehead.server.alteration import altered
from lakehead.server.catalog import CreateTable
from lakehead.server.lake_state import LakeState
from lakehead.server.leases import Leases
from lakehead.server.maintenance import Maintenance
from lakehead.server.metadata import MetadataStore, require_tablets
from lakehead.server.quotas import Quotas
from lakehead.server.tables import LiveTables
from lakehead.server.tiering_jobs import TieringJobs
from lakehead.types import Schemas, TableDescriptor, TablePath

_log = logging.getLogger("lakehead.server")
_CALLED_MAX = 1000
_SQL_DATABASES = frozenset(("information_schema", "pg_catalog", "memory", "system", "temp"))


class Definitions:
    """Answers requests about tables and lake tables as such. Thread-safe."""

    def __init__(
        self,
        metadata: MetadataStore,
        tables: LiveTables,
        *,
        leases: Leases,
        maintenance: Maintenance,
        jobs: TieringJobs,
        lake: LakeState | None,
        env: Env,
        limits: Limits,
        fence: Callable[[], None],
        quotas: Quotas,
        forget: Sequence[Callable[[str], None]],
    ) -> None:
        """
        Args:
            forget: are told the id of each table that is dropped.
        """
        self._metadata = metadata
        self._tables = tables
        self._leases = leases
        self._maintenance = maintenance
        self._jobs = jobs
        self._lake = lake
        self._randomness = env.randomness
        self._limits = limits
        self._fence = fence
        self._quotas = quotas
        self._forget = (jobs.forget_rounds, maintenance.forget, *forget)
        self._create_lock = env.threads.lock()

    def create(self, request: m.CreateTable, caller: Caller) -> m.TableReply:
        """See `CreateTable`."""
        asked = request.info.descriptor()
        _require_own_database(asked.path)
        if asked.former:
            raise InvalidRequestError(f"table {asked.path} is new: it has had no other name")
        schema, primary_key, partition_by, bucket_key = validate_definition(
            asked.schema,
            primary_key=asked.primary_key,
            partition_by=asked.partition_by,
            buckets=asked.buckets,
            bucket_key=asked.bucket_key or None,
            limits=self._limits,
        )
        desc = dataclasses.replace(
            asked,
            table_id=self._randomness.uuid_hex(),
            schemas=Schemas((first_schema(asked.schema_id, schema, asked.schemas.current.fields),)),
            primary_key=primary_key,
            partition_by=partition_by,
            bucket_key=bucket_key,
            comments=(),
            properties=TableProperties.from_user(asked.properties.to_user()),
        )
        require_small_schema(desc.schemas.current.stored, self._limits.schema_bytes_max)
        if desc.properties.lake_changelog and (desc.lake is None or not desc.keyed):
            raise InvalidPropertyError(
                f"lake_changelog=True is for tables with a primary key and a lake: {desc.path} has no"
                f" {'lake' if desc.keyed else 'primary key, its lake keeps all that was appended'}"
            )
        if desc.lake is not None and desc.lake not in (kinds := self._lake_state().kinds):
            known = " or ".join(map(repr, sorted(kinds)))
            raise InvalidPropertyError(f"lake={desc.lake!r} is not supported: use {known}, or None")
        with self._create_lock:
            self._fence()
            try:
                existing = self._metadata.table(desc.path)
            except TableNotFoundError:
                pass
            else:
                if request.if_not_exists:
                    # By the name that was asked for, and before it is said whether the columns are these.
                    authorize(caller, Privilege.DESCRIBE, desc.path)
                self._require_same(existing, desc, if_not_exists=request.if_not_exists)
                if existing.lake is not None:
                    # Earlier versions left a table without its lake table, where they crashed between the two.
                    self._lake_state().create(existing)
                return self._reply(existing)
            self._require_room(desc)
            self._quotas.require_table(caller)
            lake = self._lake_state() if desc.lake is not None else None
            if lake is not None:
                self._vacate(desc.path)
            with self._tables.leaving(desc.table_id):
                self._create(desc, lake, caller)
        return self._reply(desc)

    def _create(self, desc: TableDescriptor, lake: LakeState | None, caller: Caller) -> None:
        """Make a table, then its lake table. What a crash leaves between the two, or a disk so full that nothing can be
        taken back, is made up for when the table is opened."""
        self._metadata.submit(msgspec.structs.replace(CreateTable.of(desc), maker=caller.principal))
        if lake is not None:
            try:
                lake.create(desc)
            except BaseException:
                # Its answer may have been lost: what was made would have the name of a table that never was.
                with contextlib.suppress(Exception):  # what failed first is told
                    lake.drop(desc, purge=True)
                self._tables.drop(desc)
                raise
            self._metadata.lake_made(desc.table_id)

    def _require_room(self, desc: TableDescriptor) -> None:
        """Return if the server may have one table more."""
        if self._metadata.table_count() >= self._limits.tables_max:
            raise LimitExceededError(
                f"{self._limits.tables_max:,} tables are the limit of a server: drop some, or keep rows of a kind in"
                " one table with a column that tells them apart",
                tables_max=self._limits.tables_max,
            )
        if not desc.partition_by:
            require_tablets(self._metadata, desc.path, desc.buckets, self._limits)

    def alter(self, request: m.AlterTable) -> m.TableReply:
        """See `AlterTable`."""
        with self._create_lock:
            self._fence()
            desc = self._metadata.table_by_id(request.table_id)
            desc.require_schema(request.schema_id)
            new = altered(desc, request.changes, self._limits)
            if new == desc:
                return self._reply(desc)
            if desc.lake is not None and (new.schemas, new.comments) != (desc.schemas, desc.comments):
                self._lake_state().require_alterable(new)
            self._tables.alter(new)
            if desc.lake is not None:
                self._follow(new)
        return self._reply(new)

    def rename(self, request: m.RenameTable, caller: Caller) -> m.TableReply:
        """See `RenameTable`."""
        to = request.to
        _require_own_database(to)
        with self._create_lock:
            self._fence()
            desc = self._named(request.path, caller, Privilege.MANAGE, request.only)
            if to == desc.path:
                return self._reply(desc)
            tables = [desc.renamed(to)]
            if request.swap:
                tables.append(self._named(to, caller, Privilege.MANAGE).renamed(desc.path))
            # Before the lake is asked, where a table of ours that has the name would look like someone else's.
            self._tables.require_renamable(tables)
            with_lake = [t for t in tables if t.lake is not None]
            for table in with_lake:
                self._vacate(table.path)
                self._lake_state().require_free(table, besides=[t.table_id for t in tables])
            self._tables.rename(tables)
            # The first may have to step aside for the second.
            for table in (*with_lake, *with_lake[:-1]):
                self._follow(table)
        return self._reply(tables[0])

    def _follow(self, desc: TableDescriptor) -> None:
        """Have the lake have the table's definition and name; what fails is done when the lake is asked for next."""
        try:
            for table in desc.lake_tables:
                self._lake_state().info(table)
        except LakeheadError as e:
            _log.warning("the lake of %s follows the change of its table when it is asked for next: %s", desc.path, e)

    def _vacate(self, path: TablePath) -> None:
        """Have lakes of tables that were called so follow to their names, where a crash kept them from it."""
        for table in self._metadata.tables(None):
            if table.lake is not None and path in table.former and path != table.path:
                self._follow(table)

    def truncate(self, request: m.Truncate) -> m.TruncateReply:
        """See `Truncate`."""
        with self._create_lock:
            self._fence()
            table = self._tables.get(request.table_id)
            if table.desc.lake is None or table.desc.keyed:
                ends = table.truncate()
            elif request.ends is None:
                ends = table.begin_truncation()
            else:
                ends = {r.key: r.end for r in request.ends}
                table.forget(ends, self._lake_state().proven_offsets(table.desc, table.to_keep()))
        ranges = [m.TabletRange(partition=k.partition, bucket=k.bucket, start=0, end=e) for k, e in ends.items()]
        return m.TruncateReply(ends=ranges)

    def now(self, request: m.TableNow) -> m.TableReply:
        """See `TableNow`."""
        if self._tables.is_leaving(request.table_id):
            with self._create_lock:  # its lake may be gone already: who asks because of that is told why
                pass
        return self._reply(self._tables.in_force(self._metadata.table_by_id(request.table_id)))

    def _reply(self, desc: TableDescriptor) -> m.TableReply:
        return m.TableReply(info=m.TableInfo.of(desc), folder_id=self._metadata.incarnation.folder_id)

    @staticmethod
    def _require_same(existing: TableDescriptor, asked: TableDescriptor, *, if_not_exists: bool) -> None:
        if not if_not_exists:
            raise TableExistsError(
                f"table {asked.path} exists already: pass if_not_exists=True or drop it first", table=str(asked.path)
            )
        if any(getattr(asked, name) != getattr(existing, name) for name in ("schema", "primary_key", "partition_by")):
            raise TableExistsError(
                f"table {asked.path} exists already with other columns or keys: see table.describe()",
                table=str(asked.path),
            )

    def _named(self, path: TablePath, caller: Caller, privilege: Privilege, only: str = "") -> TableDescriptor:
        """The table that has a name now, which may be another than had it when the request was let in.

        Raises:
            TableNotFoundError: there is none, or not the one of the id ``only``; a new name of it is said to those who
                may know that.
            PermissionDeniedError: the caller may not do this to it.
        """
        try:
            desc = self._metadata.table(path)
        except TableNotFoundError as e:
            now = e.context.get("now")
            if now is None or may(caller, Privilege.DESCRIBE, TablePath.parse(str(now))):
                raise
            raise TableNotFoundError(f"there is no table {path}", table=str(path)) from None
        authorize(caller, privilege, desc.table_id)
        if only not in ("", desc.table_id):
            raise TableNotFoundError(f"another table is called {path} now", table=str(path))
        return desc

    def get(self, request: m.GetTable, caller: Caller) -> m.TableReply:
        """See `GetTable`."""
        return self._reply(self._tables.in_force(self._named(request.path, caller, Privilege.DESCRIBE, request.only)))

    def list_tables(self, request: m.ListTables, caller: Caller) -> m.NamesReply:
        """See `ListTables`."""
        called, metadata = request.called, self._metadata
        all_of = called is None or len(called) > _CALLED_MAX
        paths = metadata.paths(request.database) if all_of else metadata.paths_called(called or ())
        return m.NamesReply(names=[str(p) for i, p in paths.items() if may(caller, Privilege.DESCRIBE, i)])

    def _known(self, caller: Caller, privilege: Privilege, database: str | None = None) -> list[TableDescriptor]:
        """The tables to which a caller may do this."""
        return [t for t in self._metadata.tables(database) if may(caller, privilege, t.table_id)]

    def list_databases(self, _: m.ListDatabases, caller: Caller) -> m.NamesReply:
        """See `ListDatabases`."""
        names = self._metadata.databases()
        return m.NamesReply(names=[name for name in names if may(caller, Privilege.USAGE, Database(name))])

    def drop(self, request: m.DropTable, caller: Caller) -> m.Done:
        """See `DropTable`."""
        with self._create_lock:
            self._fence()
            desc = self._named(request.path, caller, Privilege.MANAGE, request.only)
            with self._tables.leaving(desc.table_id):
                # The lake first: whatever a crash leaves, dropping again goes on from there.
                if desc.lake is not None:
                    self._lake_state().drop(desc, purge=request.purge)
                try:
                    self._tables.drop(desc)
                except StorageError as e:
                    if desc.lake is None:
                        raise
                    raise StorageError(
                        f"{e.message}. Its lake table is gone: drop {desc.path} again", **e.context
                    ) from e
                self._leases.end_all(desc.table_id)
                for forget in self._forget:
                    forget(desc.table_id)
        return m.Done()

    # ---- lake -------------------------------------------------------------------------------------------------

    def _lake_state(self) -> LakeState:
        if self._lake is None:
            raise NoLakeError("this server was started without a lake: configure one to use lake='iceberg'")
        return self._lake

    def _lake_table(self, table_id: str) -> TableDescriptor:
        desc = self._tables.get(table_id).desc
        desc.require_lake()
        return desc

    def report_tiered(self, request: ReportTiered) -> m.Done:
        """See `ReportTiered`."""
        table_id = self._lake_table(request.table_id).table_id
        if request.round is not None:
            self._jobs.note_round(table_id, request.round)
        self._maintenance.round_reported(table_id)
        return m.Done()

    def tiering_work(self, request: AskTieringWork, caller: Caller) -> TieringWork:
        """See `AskTieringWork`."""
        # Nobody speaks for a job of another principal.
        job_id = f"{caller.principal} {request.job_id}" if request.job_id and caller.principal else request.job_id
        if request.leaving:
            self._jobs.leave(job_id)
            return TieringWork(tables=[])
        self._fence()
        chosen = TableChoice.of(request.tables)
        allowed = self._known(caller, Privilege.TIER)
        wanted = {t.table_id: t for t in allowed if t.lake is not None and str(t.path) in chosen}
        for table_id in request.without:
            wanted.pop(table_id, None)
        own: Collection[str] = wanted.keys()
        if request.job_id:
            has = [t for t in request.has if may(caller, Privilege.TIER, t)]
            own = self._jobs.ask(
                job_id,
                request.name,
                number=request.number,
                wants=wanted.keys(),
                has=has,
                memory_bytes=request.memory_bytes,
            )
        ends = {live.desc.table_id: live.to_tier for live in self._tables.open_tables()}
        tables = [_tiered(t, ends.get(i)) for i, t in wanted.items() if i in own]
        return TieringWork(tables=tables, folder_id=self._metadata.incarnation.folder_id)

    def tiering_status(self, request: AskTieringStatus, caller: Caller) -> TieringStatus:
        """See `AskTieringStatus`."""
        jobs = [
            JobInfo(name=job.name, tables=n, silent_seconds=silent, memory_bytes=job.memory_bytes)
            for job, n, silent in self._jobs.listed()
        ]
        tables = [(str(t.path), self._jobs.rounds(t.table_id)) for t in self._known(caller, Privilege.DESCRIBE)]
        return TieringStatus(
            jobs=jobs,
            tables=[
                TableRounds(table=name, rounds=[r for r, _ in seen], ages=[age for _, age in seen])
                for name, seen in tables
                if seen
            ],
        )

    def lake_info(self, request: m.LakeInfo, *, reading: bool) -> m.LakeReply:
        """See `LakeInfo`; ``reading``: for who may do no more than that."""
        self._fence()
        desc = self._lake_table(request.table_id)
        desc.require_schema(request.schema_id)
        found = self._lake_state().info(desc.require_changelog() if request.changelog else desc, reading=reading)
        if desc.partition_by and not desc.log_decides:
            over = self._tables.get(desc.table_id).overwritten()
            ends = [m.TabletRange(partition=k.partition, bucket=k.bucket, start=0, end=e) for k, e in over.items()]
            found = msgspec.structs.replace(found, overwritten=tuple(ends))
        return found.for_reading() if reading else found

    def adopt_lake(self, request: m.AdoptLake) -> m.NamesReply:
        """See `AdoptLake`."""
        self._fence()
        table = self._tables.get(self._lake_table(request.table_id).table_id)
        ends = {key: tablet.sync() for key, tablet in table.tablets.items()}
        adopted = self._lake_state().adopt(table.desc, ends)
        return m.NamesReply(names=[str(table.desc.path)] if adopted else [])


def _tiered(desc: TableDescriptor, end: int | None) -> TieredTable:
    return TieredTable(
        table_id=desc.table_id,
        name=str(desc.path),
        freshness_ms=desc.properties.freshness_ms,
        maintained=desc.properties.auto_maintenance,
        end=end,
    )


def _require_own_database(path: TablePath) -> None:
    """Return when a new table may be called so: SQL has databases of its own."""
    if path.database.lower() in _SQL_DATABASES:
        raise InvalidRequestError(
            f"{path.database!r} is a name that SQL has for something of its own: call the database of {path.table!r}"
            " otherwise",
            table=str(path),
        )
