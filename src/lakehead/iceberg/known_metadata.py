"""Metadata files that were read or written last, parsed: one is never changed, and they grow with a table's snapshots.

Rounds load their table twice and commit once; with hundreds of snapshots, parsing and copying all of them is most of
what a small round takes.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pydantic
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import ICEBERG_TABLE_TYPE, IcebergTables, SqlCatalog
from pyiceberg.exceptions import NoSuchTableError, ValidationError
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.serializers import NOOP_COMPRESSOR, Compressor, FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataV1, TableMetadataV2, TableMetadataV3
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    TableUpdate,
    _apply_table_update,
    _TableMetadataUpdateContext,
    _update_table_metadata_log,
)
from pyiceberg.typedef import Identifier
from sqlalchemy import bindparam, select

from lakehead.env.clock import SystemClock
from lakehead.env.recently_used import RecentlyUsed
from lakehead.iceberg.file_io import damaged_file
from lakehead.iceberg.metadata_json import metadata_json

_UNREADABLE = (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile)
"""How PyIceberg says that a metadata file is none."""
_VERSIONS_MAX = 3
"""Of a table: each has all of its schemas, and one that was altered many times has many."""


class _Version(NamedTuple):
    """A metadata file."""

    location: str
    size: int
    metadata: TableMetadata


_known: RecentlyUsed[str, tuple[_Version, ...]] = RecentlyUsed(128, len)
"""By the folder of a table's metadata files, those that were read or written last."""


def _note(version: _Version) -> None:
    folder = _folder(version.location)
    others = (other for other in _known.get(folder) or () if other.location != version.location)
    _known.note(folder, (version, *others)[:_VERSIONS_MAX])


def _folder(location: str) -> str:
    return location.rpartition("/")[0]


COLUMNS = IcebergTables.__table__.c
"""Of the table in which an SQL catalog has its tables."""
ROW = (
    COLUMNS.catalog_name == bindparam("of_catalog"),
    COLUMNS.table_namespace == bindparam("of_namespace"),
    COLUMNS.table_name == bindparam("of_table"),
)
"""Which of its rows is a table's; statements are made once, as SQLAlchemy takes longer to make one than to run it."""
_FIND = select(COLUMNS.metadata_location).where(*ROW)
_FIND_TABLE = _FIND.where((COLUMNS.iceberg_type == ICEBERG_TABLE_TYPE) | COLUMNS.iceberg_type.is_(None))


class _NewestFirst:
    """PyIceberg looks for a snapshot from the oldest on, some ten times a commit, and wants the newest."""

    def snapshot_by_id(self: Any, snapshot_id: int) -> Snapshot | None:
        return next((s for s in reversed(self.snapshots) if s.snapshot_id == snapshot_id), None)


class _MetadataV1(_NewestFirst, TableMetadataV1): ...


class _MetadataV2(_NewestFirst, TableMetadataV2): ...


class _MetadataV3(_NewestFirst, TableMetadataV3): ...


_KINDS: dict[type, type[Any]] = {
    TableMetadataV1: _MetadataV1,
    TableMetadataV2: _MetadataV2,
    TableMetadataV3: _MetadataV3,
}


def _newest_first(metadata: TableMetadata) -> TableMetadata:
    made: TableMetadata = _KINDS[type(metadata)].model_construct(**dict(metadata))
    return made


def load_table(catalog: Catalog, name: Identifier) -> Table:
    """`Catalog.load_table`, which parses what is not known yet.

    Raises:
        NoSuchTableError: the catalog has no such table.
        OSError: its metadata file cannot be read.
    """
    if not isinstance(catalog, SqlCatalog):
        return catalog.load_table(name)
    typed = catalog._iceberg_type_filter() is not None  # a view of that name is none
    with catalog.engine.connect() as connection:
        location = connection.scalar(_FIND_TABLE if typed else _FIND, row_of(catalog, name))
    if not location:
        raise NoSuchTableError(f"Table does not exist: {'.'.join(name)}")
    io = load_file_io(properties=catalog.properties, location=location)
    metadata = read_metadata(io, location)
    return Table(name, metadata, location, catalog._load_file_io(metadata.properties, location), catalog)


def row_of(catalog: SqlCatalog, name: Identifier) -> dict[str, str]:
    """What the parameters of `ROW` are for a table."""
    return {
        "of_catalog": catalog.name,
        "of_namespace": Catalog.namespace_to_string(Catalog.namespace_from(name)),
        "of_table": Catalog.table_name_from(name),
    }


def read_metadata(io: FileIO, location: str) -> TableMetadata:
    """What a metadata file says.

    Raises:
        CorruptionError: it is damaged.
        OSError: it cannot be read; also of one that is known.
    """
    file = io.new_input(location)
    size = len(file)
    versions = _known.get(_folder(location)) or ()
    known = next((v for v in versions if (v.location, v.size) == (location, size)), None)
    if known is None:
        try:
            known = _Version(location, size, _newest_first(FromInputFile.table_metadata(file)))
        except (ValidationError, pydantic.ValidationError) as e:  # which tell of Pydantic, in many lines
            raise damaged_file(location, ValueError("it is not the metadata of a table")) from e
        except _UNREADABLE as e:
            raise damaged_file(location, e) from e
        _note(known)
    return known.metadata


def write_metadata(io: FileIO, location: str, metadata: TableMetadata) -> None:
    """Write a metadata file that was not there; it is known, too.

    Raises:
        StorageError, OSError: it cannot be written, or there is one.
    """
    pieces = metadata_json(metadata)
    if (compressor := Compressor.get_compressor(location)) is not NOOP_COMPRESSOR:
        pieces = [compressor.bytes_compressor()(b"".join(pieces))]
    with io.new_output(location).create(overwrite=False) as stream:
        for piece in pieces:
            stream.write(piece)
    _note(_Version(location, sum(map(len, pieces)), metadata))


def updated(base: TableMetadata, updates: Sequence[TableUpdate], location: str) -> TableMetadata:
    """PyIceberg's ``update_table_metadata`` of metadata that stands at a location; what stays as it was is shared with
    the base instead of copied, as neither is ever changed."""
    context = _TableMetadataUpdateContext()
    metadata = base
    for update in updates:
        metadata = _apply_table_update(update, metadata, context)
    metadata = _update_table_metadata_log(metadata, location, base.last_updated_ms)
    if metadata.last_updated_ms == base.last_updated_ms:  # those of PyIceberg that note it take the wall clock, too
        metadata = metadata.model_copy(update={"last_updated_ms": SystemClock().now_us() // 1000})
    metadata.spec().check_compatible(metadata.schema())
    metadata.sort_order().check_compatible(metadata.schema())
    return in_order(metadata)


def in_order(metadata: TableMetadata) -> TableMetadata:
    """Metadata that was not updated before the last of what it says was: other libraries than PyIceberg refuse to read
    a table that went back in time by more than a minute, with the clock, for as long as its log of versions says so."""
    said = [e.timestamp_ms for e in metadata.snapshot_log[-1:]] + [e.timestamp_ms for e in metadata.metadata_log[-1:]]
    newest = max(said, default=0)
    if metadata.last_updated_ms >= newest:
        return metadata
    return metadata.model_copy(update={"last_updated_ms": newest})
