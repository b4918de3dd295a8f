"""A `LakeTable` in PyIceberg: one commit call to the catalog per attempt, no retries of PyIceberg's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import AssertCurrentSchemaId, AssertDefaultSpecId, AssertTableUUID, TableRequirement

from lakehead.env.randomness import SystemRandomness
from lakehead.errors import (
    CommitConflictError,
    FolderCopiedError,
    LakeFileMissingError,
    LakeheadError,
    UnavailableError,
)
from lakehead.iceberg.catalog import LakeCatalog
from lakehead.iceberg.contract import LakeContract, check_contract
from lakehead.iceberg.data_files import IcebergWriter, LakeWriteSpec, discard_files, write_position_deletes
from lakehead.iceberg.file_io import FILES_AT_ONCE, lake_files
from lakehead.iceberg.live_rows import count_rows
from lakehead.iceberg.planner import plan_files
from lakehead.iceberg.positions import find_offsets
from lakehead.iceberg.proof import require_files
from lakehead.iceberg.rowdelta import RowDelta, to_data_file
from lakehead.iceberg.version import lake_version
from lakehead.lake.census import Census
from lakehead.lake.lake_table import CommitAnswer, Hit, LakeChange, LakeFile, Outcome, WrittenFile
from lakehead.lake.marks import CLEANUP, INCARNATION, OWNER, LakeMark, LakeVersion
from lakehead.log.netchange import Offsets
from lakehead.protocol.messages import LakeReply
from lakehead.types import OFFSET_COLUMN, TableDescriptor

_ANNOUNCEMENTS_MAX = 5


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

    def load(self) -> LakeVersion:
        """See `LakeTable.load`."""
        self._loaded = self._load()
        check_contract(self._loaded, self._desc)
        return lake_version(self._loaded)

    @property
    def table(self) -> Table:
        """The table in PyIceberg, as it was last loaded."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    @property
    def lands_late(self) -> bool:
        """Not where the catalog is a file: no server can still be at work on it."""
        from pyiceberg.catalog.sql import SqlCatalog

        catalog = self.table.catalog
        return not (isinstance(catalog, SqlCatalog) and catalog.engine.dialect.name == "sqlite")

    def writer(self, version: LakeVersion, *, target_file_bytes: int) -> IcebergWriter:
        """See `LakeTable.writer`."""
        spec = LakeWriteSpec.of(_table(version), target_file_bytes=target_file_bytes)
        return IcebergWriter(spec, tuple(self._desc.partition_types))

    def files(self, version: LakeVersion) -> list[LakeFile]:
        """See `LakeTable.files`."""
        return plan_files(_table(version))

    def census(self, version: LakeVersion) -> Census:
        """See `LakeTable.census`."""
        return count_rows(_table(version))

    def find_offsets(self, wanted: Sequence[tuple[LakeFile, Offsets]]) -> list[tuple[Offsets, Offsets]]:
        """See `LakeTable.find_offsets`."""
        io, field_id = self.table.io, self.table.schema().find_field(OFFSET_COLUMN).field_id
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            return list(pool.map(lambda w: find_offsets(io, w[0].path, w[1], field_id), wanted))

    def write_deletes(self, version: LakeVersion, hits: Sequence[Hit]) -> list[WrittenFile]:
        """See `LakeTable.write_deletes`."""
        table = _table(version)
        # A file keeps the partition spec that it was written with, and so must what deletes its rows.
        with lake_files():
            specs = {t.file.file_path: t.file.spec_id for t in table.scan().plan_files()}
        spec = LakeWriteSpec.of(table, target_file_bytes=0)

        def write(hit: Hit) -> WrittenFile:
            path = hit.file.path
            return write_position_deletes(spec, path, hit.positions, spec_id=specs[path], partition=hit.file.partition)

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            futures = [pool.submit(write, h) for h in hits]
            try:
                return [f.result() for f in futures]
            except Exception:
                done = [f.result() for f in futures if f.exception() is None]
                discard_files(table.io, (f.path for f in done))
                raise

    def commit(self, base: LakeVersion, change: LakeChange) -> CommitAnswer:
        """See `LakeTable.commit`."""
        # One of its own, because a commit moves it.
        loaded = _table(base)
        table = Table(loaded.name(), loaded.metadata, loaded.metadata_location, loaded.io, loaded.catalog)
        transaction = _Transaction(table)
        mark = LakeMark(0, change.table_id, change.epoch, change.round_id, change.offsets, rows=change.rows)
        who = {INCARNATION: self._incarnation} if self._incarnation else {}
        delta = RowDelta(transaction, mark.to_summary() | who)
        try:
            for file in change.data:
                delta.append_data_file(to_data_file(file))
            for file in change.deletes:
                delta.add_deletes(to_data_file(file))
            with lake_files():
                delta.commit()
            number = table.metadata.next_sequence_number()
            mark = dataclasses.replace(mark, snapshot_id=delta.snapshot_id, sequence_number=number)
            contract = LakeContract.of(table, self._desc)
            owner = {OWNER: self._incarnation, **who} if who else {}
            transaction.set_properties({**mark.to_properties(), **contract.to_properties(), **owner})
        except BaseException:
            delta.discard()
            raise
        # Not `commit_transaction`: it tries again by itself, and removes files when it is told of a conflict, though a
        # catalog that got the request twice says so of the table's own commit.
        try:
            require_files(table.io, [(f.path, f.size) for f in (*change.data, *change.deletes)])
        except LakeFileMissingError as e:
            delta.discard()
            raise CommitConflictError(
                f"{e.context['path']} was removed before the round that wrote it committed: run the round again",
                path=e.context["path"],
            ) from e
        try:
            table._do_commit(updates=transaction._updates, requirements=_requirements(transaction))
        except Exception as e:
            outcome = Outcome.REFUSED if isinstance(e, CommitFailedException) else Outcome.UNKNOWN
            return CommitAnswer(outcome, delta.snapshot_id, delta.written_paths, e)
        return CommitAnswer(Outcome.LANDED, delta.snapshot_id, delta.written_paths)

    def added_paths(self, version: LakeVersion, snapshot_id: int) -> frozenset[str] | None:
        """See `LakeTable.added_paths`."""
        table = _table(version)
        snapshot = table.metadata.snapshot_by_id(snapshot_id)
        if snapshot is None:
            return None
        with lake_files():
            return frozenset(
                e.data_file.file_path
                for m in snapshot.manifests(table.io)
                if m.added_snapshot_id == snapshot_id
                for e in m.fetch_manifest_entry(table.io)
                if e.status == ManifestEntryStatus.ADDED
            )

    def discard(self, paths: Iterable[str]) -> None:
        """See `LakeTable.discard`."""
        discard_files(self.table.io, paths)


def open_lake_table(desc: TableDescriptor, info: LakeReply) -> IcebergLakeTable:
    """The lake table of a table, through a catalog that is opened when it is first loaded.

    Its methods raise `UnavailableError` where the catalog cannot be opened from this process.
    """
    catalog = LakeCatalog.open(info.catalog_name, info.catalog_properties)

    def load() -> Table:
        try:
            table = catalog.load(desc)
        except LakeheadError:
            raise
        except Exception as e:
            raise UnavailableError(
                f"the lake's catalog cannot be opened from this process ({type(e).__name__}: {e}): run the round where"
                " it can be, or configure a catalog that both reach",
                table=str(desc.path),
            ) from e
        _require_owner(table, info)
        return table

    return IcebergLakeTable(load, desc, info.incarnation)


def announce_cleanup(load_table: Callable[[], Table]) -> None:
    """Commit a snapshot without files that says that orphans will be removed: rounds that were planned before are
    refused from then on, and what landed before is in the version that it was made from.

    Raises:
        CommitConflictError: others keep changing the table.
        UnavailableError: the catalog does not answer; it may be announced.
    """
    for _ in range(_ANNOUNCEMENTS_MAX):
        table = load_table()
        transaction = _Transaction(table)
        values = {CLEANUP: SystemRandomness().uuid_hex()}
        delta = RowDelta(transaction, values)
        with lake_files():
            delta.commit()
        transaction.set_properties(values)
        try:
            table._do_commit(updates=transaction._updates, requirements=_requirements(transaction))
            return
        except CommitFailedException:
            delta.discard()
        except Exception as e:
            raise UnavailableError(f"the lake's catalog did not take the announcement of a clean-up: {e}") from e
    raise CommitConflictError("others keep changing the lake table while orphans are to be removed: try again")


def _require_owner(table: Table, info: LakeReply) -> None:
    """That nobody else has taken the lake table over since the server knew it for its own."""
    found = table.properties.get(OWNER, "")
    if found in (info.owner, info.incarnation):
        return
    name = ".".join(table.name())
    if found.split("/")[0] == info.incarnation.split("/")[0]:
        raise CommitConflictError(f"the server of lake table {name} was started anew: run the round again", table=name)
    raise FolderCopiedError(
        f"lake table {name} was taken over by another copy of the data folder ({found}): stop writing here", table=name
    )


class _Transaction(Transaction):
    """Looks at the metadata it is built on, where PyIceberg copies all of it at each look."""

    @property
    def table_metadata(self) -> TableMetadata:
        return super().table_metadata if self._updates else self._table.metadata


def _requirements(transaction: Transaction) -> tuple[TableRequirement, ...]:
    """What must hold for a transaction to land: beside its snapshot, the very table, columns and partition spec."""
    metadata = transaction._table.metadata
    return (
        *transaction._requirements,
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
        AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
    )


def _table(version: LakeVersion) -> Table:
    table: Table = version.handle
    return table
