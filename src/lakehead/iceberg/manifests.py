"""Manifest lists and manifests, as PyIceberg reads them; but damage is an error, and how to read them is found once.

Each of these files says its Avro schema, of which PyIceberg makes a reader whenever it opens one: most of what a small
one takes. Until a table changes, its files say the same.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.expressions import BooleanExpression
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldSummary,
    _inherit_from_manifest,
)
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import KeyDefaultDict
from pyiceberg.utils.concurrent import ExecutorFactory
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from lakehead.env.threads import WorkerPool, before_exit
from lakehead.iceberg.avro import read_avro
from lakehead.iceberg.file_io import FILES_AT_ONCE, damaged_file


def _plan_on() -> None:
    """PyIceberg plans by a pool that takes no work once the main thread has ended; see `WorkerPool`."""
    ExecutorFactory._instance = WorkerPool(FILES_AT_ONCE, "lakehead-lake-plan")
    ExecutorFactory._instance_pid = os.getpid()


before_exit(_plan_on)


class _Manifest(ManifestFile):
    """As a list names it."""

    def fetch_manifest_entry(self, io: FileIO, discard_deleted: bool = True) -> list[ManifestEntry]:
        """As PyIceberg's.

        Raises:
            CorruptionError: it is damaged.
            OSError: it cannot be read.
        """
        entries = read_avro(self.manifest_path, _read(io, self.manifest_path), _entry_reader)
        counts = (self.added_files_count, self.existing_files_count, self.deleted_files_count)
        said = [count for count in counts if count is not None]
        if len(said) == len(counts) and len(entries) != sum(said):
            # Nothing in a file that ends with a block tells that there was another one.
            other = ValueError(f"it has {len(entries)} entries, and its list says {sum(said)}")
            raise damaged_file(self.manifest_path, other)
        _require_addresses(self.manifest_path, (entry.data_file.file_path for entry in entries))
        return [
            _inherit_from_manifest(entry, self)
            for entry in entries
            if not (discard_deleted and entry.status == ManifestEntryStatus.DELETED)
        ]


def manifests_of(snapshot: Snapshot, io: FileIO) -> list[ManifestFile]:
    """`Snapshot.manifests`.

    Raises:
        CorruptionError: the list, or later a manifest, is damaged.
        OSError: the list cannot be read.
    """
    manifests = read_avro(snapshot.manifest_list, _read(io, snapshot.manifest_list), _list_reader)
    _require_addresses(snapshot.manifest_list, (manifest.manifest_path for manifest in manifests))
    return manifests


def _require_addresses(path: str, named: Iterable[str]) -> None:
    """Raise what a file of this path is that names files by what cannot be an address: it is damaged, not they."""
    for address in named:
        if "\0" in address:
            raise damaged_file(path, ValueError(f"it names {address!r}"))


def _read(io: FileIO, path: str) -> bytes:
    with io.new_input(path).open() as file:
        return file.read()


@functools.lru_cache(maxsize=16)
def _list_reader(schema: str) -> Reader:
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(schema)),
        MANIFEST_LIST_FILE_SCHEMAS[DEFAULT_READ_VERSION],
        {-1: _Manifest, 508: PartitionFieldSummary},
        {517: ManifestContent},
    )


@functools.lru_cache(maxsize=256)
def _entry_reader(schema: str) -> Reader:
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(schema)),
        MANIFEST_ENTRY_SCHEMAS[DEFAULT_READ_VERSION],
        {-1: ManifestEntry, 2: DataFile},
        {0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    )


class _Scan(DataScan):
    def _plan_files_local(self) -> list[FileScanTask]:
        snapshot = self.snapshot()
        return [] if snapshot is None else list(self._manifest_planner.plan_files(manifests_of(snapshot, self.io)))


def scan_of(table: Table, **options: Any) -> DataScan:
    """`Table.scan`."""
    return _Scan(table.metadata, table.io, catalog=table.catalog, table_identifier=table.name(), **options)


def file_filter(table: Table, row_filter: BooleanExpression, columns: Collection[str]) -> Callable[[DataFile], bool]:
    """Whether a data file of a table may hold rows of a filter, as `scan_of` asks of each that a manifest names.

    Args:
        columns: top-level ones that the filter reads.
    """
    schema, specs = table.schema(), table.specs()
    planner = scan_of(table, row_filter=row_filter)._manifest_planner
    of_partition = KeyDefaultDict(planner._build_partition_evaluator)
    of_metrics = planner._build_metrics_evaluator()
    read = {schema.find_field(c).field_id for c in columns if c in schema.column_names}
    telling = {i for i, spec in specs.items() if any(f.source_id in read for f in spec.fields)}
    return lambda file: of_metrics(file) and (file.spec_id not in telling or of_partition[file.spec_id](file))
