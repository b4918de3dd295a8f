"""Manifest lists and manifests, as PyIceberg reads them; but how one is read is found out once.

Each of these files says its Avro schema, of which PyIceberg makes a reader whenever it opens one: four fifths of what a
small one takes. Until a table changes, its files say the same.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.file import META_SCHEMA, AvroFile, AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_reader, resolve_reader
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
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

_HEADER = construct_reader(META_SCHEMA, {-1: AvroFileHeader})


class _Manifest(ManifestFile):
    """A manifest as a list names it."""

    def fetch_manifest_entry(self, io: FileIO, discard_deleted: bool = True) -> list[ManifestEntry]:
        """As PyIceberg's."""
        with _ManifestAvro(io.new_input(self.manifest_path)) as entries:
            return [
                _inherit_from_manifest(entry, self)
                for entry in entries
                if not (discard_deleted and entry.status == ManifestEntryStatus.DELETED)
            ]


class _KnownAvro(AvroFile[Any]):
    """Both kinds say how their schema is read."""

    @classmethod
    def _reader_of(cls, schema: str) -> Reader:
        raise NotImplementedError

    def __enter__(self) -> AvroFile[Any]:
        with self.input_file.open() as file:
            self.decoder = new_decoder(file.read())
        self.header = _HEADER.read(self.decoder)
        schema = self.header.meta.get("avro.schema")
        if schema is None:
            raise ValueError("No schema found in Avro file headers")
        self.reader = self._reader_of(schema)
        return self


class _ListAvro(_KnownAvro):
    @classmethod
    @functools.lru_cache(maxsize=16)
    def _reader_of(cls, schema: str) -> Reader:
        return resolve_reader(
            AvroSchemaConversion().avro_to_iceberg(json.loads(schema)),
            MANIFEST_LIST_FILE_SCHEMAS[DEFAULT_READ_VERSION],
            {-1: _Manifest, 508: PartitionFieldSummary},
            {517: ManifestContent},
        )


class _ManifestAvro(_KnownAvro):
    @classmethod
    @functools.lru_cache(maxsize=256)
    def _reader_of(cls, schema: str) -> Reader:
        return resolve_reader(
            AvroSchemaConversion().avro_to_iceberg(json.loads(schema)),
            MANIFEST_ENTRY_SCHEMAS[DEFAULT_READ_VERSION],
            {-1: ManifestEntry, 2: DataFile},
            {0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
        )


def manifests_of(snapshot: Snapshot, io: FileIO) -> list[ManifestFile]:
    """`Snapshot.manifests`.

    Raises:
        OSError: the list cannot be read.
    """
    with _ListAvro(io.new_input(snapshot.manifest_list)) as manifests:
        return list(manifests)


class _Scan(DataScan):
    def _plan_files_local(self) -> list[FileScanTask]:
        snapshot = self.snapshot()
        return [] if snapshot is None else list(self._manifest_planner.plan_files(manifests_of(snapshot, self.io)))


def scan_of(table: Table, **options: Any) -> DataScan:
    """`Table.scan`."""
    return _Scan(table.metadata, table.io, catalog=table.catalog, table_identifier=table.name(), **options)
