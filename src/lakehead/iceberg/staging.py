"""One commit to an Iceberg table, up to the catalog: position deletes, manifests, and the metadata.

What is staged lands on the version that it was made for or not at all. An SQL catalog says where the newest metadata
file is, so staging writes that file, and one UPDATE publishes it. Other catalogs write it themselves, and are sent the
updates with what they require.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    AssertCurrentSchemaId,
    AssertDefaultSpecId,
    AssertTableUUID,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.typedef import Identifier
from sqlalchemy import bindparam, update

from lakehead.env.threads import WorkerPool
from lakehead.iceberg.data_files import IcebergFile, LakeWriteSpec, discard_files, is_small, write_position_deletes
from lakehead.iceberg.file_io import FILES_AT_ONCE
from lakehead.iceberg.known_metadata import COLUMNS, ROW, row_of, updated, write_metadata
from lakehead.iceberg.settings import require_settings
from lakehead.lake.deleted_rows import Hit
from lakehead.log.netchange import Offsets

_SWAP = (
    update(IcebergTables)
    .where(*ROW, COLUMNS.metadata_location == bindparam("old"))
    .values(metadata_location=bindparam("new"), previous_metadata_location=bindparam("old"))
)


class StagingTransaction(Transaction):
    """Gathers updates, and looks at the metadata it is built on, where PyIceberg copies all of it at each look.

    Raises:
        LakeStateError: the table says in ways that cannot be read how it is written.
    """

    def __init__(self, table: Table) -> None:
        require_settings(table)
        # A table of its own, because a commit moves it.
        super().__init__(Table(table.name(), table.metadata, table.metadata_location, table.io, table.catalog))

    @property
    def table_metadata(self) -> TableMetadata:
        return super().table_metadata if self._updates else self._table.metadata

    def staged(self) -> MetadataFile | MetadataUpdates:
        """What was gathered; for an SQL catalog as a metadata file that is written."""
        catalog = self._table.catalog
        if isinstance(catalog, SqlCatalog) and catalog.engine.dialect.supports_sane_rowcount:
            return _write_metadata(catalog, self._table, self._updates)
        metadata = self._table.metadata
        requirements = (
            *self._requirements,
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
            AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
        )
        return MetadataUpdates(self._table, self._updates, requirements)


@dataclass(frozen=True, eq=False)
class MetadataFile:
    """A table's next metadata, in its file.

    Attributes:
        base: the table as it is before.
        written: the file.
    """

    catalog: SqlCatalog
    base: Table
    metadata: TableMetadata
    written: tuple[str]

    def publish(self) -> None:
        """Make it the table's, if that is still where it was.

        Raises:
            CommitFailedException: it has moved on.
        """
        swap_metadata(self.catalog, self.base.name(), self.base.metadata_location, *self.written)
        with contextlib.suppress(Exception):  # what stays is litter, which orphan clean-up finds
            self.catalog._delete_old_metadata(self.base.io, self.base.metadata, self.metadata)


@dataclass(frozen=True, eq=False)
class MetadataUpdates:
    """What a catalog is asked to make of a table's metadata.

    Attributes:
        requirements: what must hold for it to land: beside its snapshot, the very table, columns and partition spec.
        written: no file.
    """

    base: Table
    updates: tuple[TableUpdate, ...]
    requirements: tuple[TableRequirement, ...]
    written: tuple[str, ...] = ()

    def publish(self) -> None:
        """Ask the catalog, once.

        Not `commit_transaction`: it tries again by itself, and removes files when it is told of a conflict, though a
        catalog that got the request twice says so of the table's own commit.
        """
        self.base._do_commit(updates=self.updates, requirements=self.requirements)


def _write_metadata(catalog: SqlCatalog, base: Table, updates: tuple[TableUpdate, ...]) -> MetadataFile:
    location = base.metadata_location
    metadata = updated(base.metadata, updates, location)
    places = load_location_provider(metadata.location, metadata.properties)
    path = places.new_table_metadata_file_location(catalog._parse_metadata_version(location) + 1)
    write_metadata(base.io, path, metadata)
    return MetadataFile(catalog, base, metadata, (path,))


def swap_metadata(catalog: SqlCatalog, name: Identifier, old: str, new: str) -> None:
    """Have a catalog name another metadata file, if it still names the old one.

    Raises:
        CommitFailedException: it does not.
    """
    values = {**row_of(catalog, name), "old": old, "new": new}
    with catalog.engine.begin() as connection:
        if connection.execute(_SWAP, values).rowcount < 1:
            raise CommitFailedException(f"lake table {'.'.join(name)} has moved on from {old}")


def write_deletes(table: Table, tasks: Mapping[str, FileScanTask], hits: Sequence[Hit]) -> list[IcebergFile]:
    """Write position deletes: one file for the small data files of a partition, one for each other data file.

    After an error none remains.
    """
    spec = LakeWriteSpec.of(table, target_file_bytes=0)
    groups: dict[tuple[object, ...], dict[str, Offsets]] = {}
    for hit in hits:
        # A file keeps the partition spec that it was written with, and so must what deletes its rows.
        f = tasks[hit.file.path].file
        partition = tuple(f.partition[i] for i in range(len(f.partition)))
        alone = None if is_small(f.file_path) else f.file_path
        groups.setdefault((f.spec_id, partition, alone), {})[f.file_path] = hit.positions

    def write(group: tuple[Any, ...]) -> IcebergFile:
        spec_id, partition, _ = group
        return write_position_deletes(spec, groups[group], spec_id=spec_id, partition=partition)

    if not groups:
        return []
    with WorkerPool(FILES_AT_ONCE) as pool:
        futures = [pool.submit(write, g) for g in groups]
        try:
            return [f.result() for f in futures]
        except Exception:
            done = [f.result() for f in futures if f.exception() is None]
            discard_files(table.io, (f.path for f in done))
            raise


def needless_deletes(tasks: Mapping[str, FileScanTask], removed: Sequence[str]) -> set[DataFile]:
    """Delete files that apply to no data file once these are removed."""
    gone = set(removed)
    theirs = {d for path in gone for d in tasks[path].delete_files}
    return theirs - {d for path, t in tasks.items() if path not in gone for d in t.delete_files}
