"""A `LakeTable` in PyIceberg: one commit call to the catalog per attempt, no retries of PyIceberg's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, UNSORTED_SORT_ORDER_ID
from pyiceberg.table.update import AddSortOrderUpdate

from lakehead.env.threads import WorkerPool
from lakehead.errors import (
    CommitConflictError,
    LakeFileMissingError,
    LakeStateError,
)
from lakehead.iceberg.contract import LakeContract, check_contract
from lakehead.iceberg.data_files import IcebergFile, IcebergWriter, LakeWriteSpec, discard_files
from lakehead.iceberg.expiry import expire_snapshots
from lakehead.iceberg.file_io import FILES_AT_ONCE, lake_files
from lakehead.iceberg.live_rows import count_rows
from lakehead.iceberg.manifests import manifests_of
from lakehead.iceberg.planner import FilePlan, all_files, plan_files
from lakehead.iceberg.positions import find_offsets
from lakehead.iceberg.proof import require_files
from lakehead.iceberg.pruning import rounded_columns
from lakehead.iceberg.reader import count_lake, read_lake
from lakehead.iceberg.rowdelta import RowDelta, to_data_file
from lakehead.iceberg.snapshots import snapshots_table
from lakehead.iceberg.staging import StagingTransaction, needless_deletes, write_deletes
from lakehead.iceberg.version import lake_version
from lakehead.lake.census import Census
from lakehead.lake.deleted_rows import find_deleted_rows
from lakehead.lake.lake_table import (
    CommitAnswer,
    Expired,
    LakeChange,
    LakeFile,
    LakeTable,
    Outcome,
    StagedCommit,
    Superseded,
    WrittenFile,
)
from lakehead.lake.marks import INCARNATION, OWNER, LakeMark, LakeVersion
from lakehead.log.netchange import Offsets
from lakehead.predicate import Bound
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeUse
from lakehead.types import OFFSET_COLUMN, SYSTEM_FIELDS, TableDescriptor


class IcebergLakeTable:
    """One Iceberg table; implements `lakehead.lake.lake_table.LakeTable`.

    Args:
        load_table: loads it anew from its catalog.
        desc: the table whose rows it holds.
        incarnation: whose log is tiered, which commits say; none for tables of no folder.
    """

    def __init__(self, load_table: Callable[[], Table], desc: TableDescriptor, incarnation: str = "") -> None:
        self._load = load_table
        self._desc = desc
        self._incarnation = incarnation
        self._loaded: Table | None = None
        self._planned: tuple[tuple[str, int | None], FilePlan] | None = None

    def load(self) -> LakeVersion:
        """See `LakeTable.load`."""
        self._loaded = self._load()
        check_contract(self._loaded, self._desc)
        return dataclasses.replace(lake_version(self._loaded), name=str(self._desc.path))

    @property
    def table(self) -> Table:
        """The table in PyIceberg, as it was last loaded."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    @property
    def lands_late(self) -> bool:
        """Not where the catalog is a file: no server can still be at work on it."""
        catalog = self.table.catalog
        return not (isinstance(catalog, SqlCatalog) and catalog.engine.dialect.name == "sqlite")

    def writer(self, version: LakeVersion, *, target_file_bytes: int) -> IcebergWriter:
        """See `LakeTable.writer`."""
        spec = LakeWriteSpec.of(_table(version), target_file_bytes=target_file_bytes)
        return IcebergWriter(spec, tuple(self._desc.partition_types))

    def plan(
        self, version: LakeVersion, bounds: Sequence[Bound] = (), *, snapshot_id: int | None = None
    ) -> Sequence[LakeFile]:
        """See `LakeTable.plan`."""
        if bounds:
            rounded = rounded_columns(_table(version).schema(), self._desc.schema)
            bounds = [bound for bound in bounds if bound.column not in rounded]
        return plan_files(_table(version), snapshot_id, bounds) if bounds else self._all(version, snapshot_id).files

    def _all(self, version: LakeVersion, snapshot_id: int | None = None) -> FilePlan:
        """All files of a snapshot; those that were asked for last are remembered."""
        table = _table(version)
        key = (table.metadata_location, version.current_id if snapshot_id is None else snapshot_id)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, all_files(table, snapshot_id)
        return self._planned[1]

    def read(
        self, files: Sequence[LakeFile], spec: ReadSpec, superseded: Superseded | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `LakeTable.read`."""
        return read_lake(
            self.table, self._desc, files, columns=spec.names, predicate=spec.predicate, superseded=superseded
        )

    def count(self, files: Sequence[LakeFile], superseded: Superseded | None = None) -> int:
        """See `LakeTable.count`."""
        return count_lake(self.table, self._desc, files, superseded=superseded)

    def snapshot_at(self, version: LakeVersion, time_us: int) -> int | None:
        """See `LakeTable.snapshot_at`."""
        listed, after, time_ms = version.snapshots, None, time_us // 1000
        for entry in reversed(_table(version).metadata.snapshot_log):
            found = listed.get(entry.snapshot_id)
            if entry.timestamp_ms > time_ms:
                after = found
                continue
            if found is None:
                return None
            # One whose parent has expired came after others, at times that nobody remembers.
            later = after is not None and found.sequence_number < after.sequence_number
            gap = after is not None and later and after.parent_id not in listed
            return None if gap and entry.timestamp_ms < time_ms else found.snapshot_id
        return None

    def snapshots(self) -> pa.Table:
        """See `LakeTable.snapshots`."""
        return snapshots_table(self.table)

    def census(self, version: LakeVersion, *, snapshot_id: int | None = None) -> Census:
        """See `LakeTable.census`."""
        return count_rows(_table(version), snapshot_id, lambda: self._all(version, snapshot_id).files)

    def foreign_columns(self, version: LakeVersion) -> tuple[str, ...]:
        """See `LakeTable.foreign_columns`."""
        own = {*self._desc.schema.names, *(f.name for f in SYSTEM_FIELDS)}
        return tuple(f.name for f in _table(version).schema().fields if f.name not in own)

    def stage(self, base: LakeVersion, change: LakeChange) -> StagedCommit:
        """See `LakeTable.stage`."""
        transaction = StagingTransaction(_table(base))
        table = transaction._table
        mark = LakeMark(
            0, change.table_id, change.epoch, change.round_id, change.offsets, None, change.rows, change.overwritten
        )
        who = {INCARNATION: self._incarnation} if self._incarnation else {}
        delta = RowDelta(transaction, mark.to_summary() | who)
        deletes = self._write_deletes(base, change)
        try:
            for file in (*(f.own for f in change.added), *deletes):
                (delta.append_data_file if not file.deletes else delta.add_deletes)(to_data_file(file))
            self._remove(delta, base, change.removed)
            with lake_files():
                delta.commit()
            number = table.metadata.next_sequence_number()
            mark = dataclasses.replace(mark, snapshot_id=delta.snapshot_id, sequence_number=number)
            contract = LakeContract.of(table, self._desc)
            owner = {OWNER: self._incarnation, **who} if who else {}
            transaction.set_properties({**mark.to_properties(), **contract.to_properties(), **owner})
            if table.metadata.sort_order_by_id(UNSORTED_SORT_ORDER_ID) is None:
                # A table that is created with an order lists that one alone, and Iceberg's own rewrites of such a
                # table in another order stop: they note the unsorted order for their files.
                transaction._apply((AddSortOrderUpdate.model_validate({"sort-order": UNSORTED_SORT_ORDER}),))
            _require_new_files(table.io, [*change.added, *deletes])
            staged = transaction.staged()
        except BaseException:
            delta.discard()
            discard_files(table.io, (f.path for f in deletes))
            raise
        written = (*(f.path for f in deletes), *delta.written_paths, *staged.written)
        return StagedCommit(base, delta.snapshot_id, written, staged)

    def publish(self, staged: StagedCommit) -> CommitAnswer:
        """See `LakeTable.publish`."""
        try:
            staged.own.publish()
        except Exception as e:
            return CommitAnswer(Outcome.REFUSED if isinstance(e, CommitFailedException) else Outcome.UNKNOWN, e)
        return CommitAnswer(Outcome.LANDED)

    def _write_deletes(self, base: LakeVersion, change: LakeChange) -> list[IcebergFile]:
        if not change.deleted and not change.stale:
            return []
        plan, gone = self._all(base), {f.path for f in change.removed}
        stay, added = [f for f in plan.files if f.path not in gone], [f.as_added() for f in change.added]
        hits = find_deleted_rows(stay, change.deleted, self._find_offsets, name=base.name)
        hits += find_deleted_rows(added, change.stale, self._find_offsets, name=base.name)
        own = {f.path: FileScanTask(to_data_file(f.own)) for f in change.added} if change.stale else {}
        return write_deletes(_table(base), {**plan.tasks, **own}, hits)

    def _find_offsets(self, wanted: Sequence[tuple[LakeFile, Offsets]]) -> list[tuple[Offsets, Offsets]]:
        io, field_id = self.table.io, self.table.schema().find_field(OFFSET_COLUMN).field_id
        with WorkerPool(FILES_AT_ONCE) as pool:
            return list(pool.map(lambda w: find_offsets(io, w[0].path, w[1], field_id), wanted))

    def _remove(self, delta: RowDelta, base: LakeVersion, files: Sequence[LakeFile]) -> None:
        if not files:
            return
        tasks = self._all(base).tasks
        for f in files:
            delta.delete_data_file(tasks[f.path].file)
        for needless in needless_deletes(tasks, [f.path for f in files]):
            delta.remove_deletes(needless)

    def added_paths(self, version: LakeVersion, snapshot_id: int) -> frozenset[str] | None:
        """See `LakeTable.added_paths`."""
        table = _table(version)
        snapshot = table.metadata.snapshot_by_id(snapshot_id)
        if snapshot is None:
            return None
        with lake_files():
            return frozenset(
                e.data_file.file_path
                for m in manifests_of(snapshot, table.io)
                if m.added_snapshot_id == snapshot_id
                for e in m.fetch_manifest_entry(table.io)
                if e.status == ManifestEntryStatus.ADDED
            )

    def expire(
        self, version: LakeVersion, snapshot_ids: Collection[int], in_use: Callable[[], Iterable[LakeUse]]
    ) -> Expired:
        """See `LakeTable.expire`."""
        with lake_files():
            return expire_snapshots(_table(version), snapshot_ids, in_use, self._load)

    def discard(self, paths: Iterable[str]) -> None:
        """See `LakeTable.discard`."""
        discard_files(self.table.io, paths)


def native_table(lake: LakeTable) -> Table:
    """PyIceberg's table of a lake table that is Iceberg's, for engines that read its files themselves.

    Raises:
        LakeStateError: it is of another format.
    """
    if not isinstance(lake, IcebergLakeTable):
        raise LakeStateError("this engine reads lakes of the format iceberg only")
    return lake.table


def _require_new_files(io: FileIO, files: Sequence[WrittenFile | IcebergFile]) -> None:
    try:
        require_files(io, [(f.path, f.size) for f in files])
    except LakeFileMissingError as e:
        raise CommitConflictError(
            f"{e.context['path']} was removed before the round that wrote it committed: run the round again",
            path=e.context["path"],
        ) from e


def _table(version: LakeVersion) -> Table:
    table: Table = version.handle
    return table
