"""One commit to an Iceberg table, up to the catalog: position deletes, manifests, and the updates of its metadata.

What is staged lands on the version that it was made for, by its requirements, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    AssertCurrentSchemaId,
    AssertDefaultSpecId,
    AssertTableUUID,
    TableRequirement,
    TableUpdate,
)

from lakehead.iceberg.data_files import IcebergFile, LakeWriteSpec, discard_files, write_position_deletes
from lakehead.iceberg.file_io import FILES_AT_ONCE
from lakehead.lake.deleted_rows import Hit


class StagingTransaction(Transaction):
    """Gathers updates, and looks at the metadata it is built on, where PyIceberg copies all of it at each look."""

    def __init__(self, table: Table) -> None:
        # A table of its own, because a commit moves it.
        super().__init__(Table(table.name(), table.metadata, table.metadata_location, table.io, table.catalog))

    @property
    def table_metadata(self) -> TableMetadata:
        return super().table_metadata if self._updates else self._table.metadata

    def staged(self) -> MetadataChange:
        """What was gathered."""
        metadata = self._table.metadata
        requirements = (
            *self._requirements,
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
            AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
        )
        return MetadataChange(self._table, self._updates, requirements)


@dataclass(frozen=True, eq=False)
class MetadataChange:
    """What a catalog is asked to make of a table's metadata.

    Attributes:
        requirements: what must hold for it to land: beside its snapshot, the very table, columns and partition spec.
    """

    table: Table
    updates: tuple[TableUpdate, ...]
    requirements: tuple[TableRequirement, ...]

    def publish(self) -> None:
        """Ask the catalog, once.

        Not `commit_transaction`: it tries again by itself, and removes files when it is told of a conflict, though a
        catalog that got the request twice says so of the table's own commit.
        """
        self.table._do_commit(updates=self.updates, requirements=self.requirements)


def write_deletes(table: Table, tasks: Mapping[str, FileScanTask], hits: Sequence[Hit]) -> list[IcebergFile]:
    """Write one position-delete file per data file; after an error none remains."""
    spec = LakeWriteSpec.of(table, target_file_bytes=0)

    def write(hit: Hit) -> IcebergFile:
        # A file keeps the partition spec that it was written with, and so must what deletes its rows.
        f = tasks[hit.file.path].file
        partition = tuple(f.partition[i] for i in range(len(f.partition)))
        return write_position_deletes(spec, f.file_path, hit.positions, spec_id=f.spec_id, partition=partition)

    if not hits:
        return []
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        futures = [pool.submit(write, h) for h in hits]
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
