"""Metadata files that were read or written last, parsed: one is never changed, and they grow with a table's snapshots.

Rounds load their table twice and commit once; with hundreds of snapshots, parsing and copying all of them is most of
what a small round takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    TableUpdate,
    _apply_table_update,
    _TableMetadataUpdateContext,
    _update_table_metadata_log,
)
from pyiceberg.typedef import Identifier
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

_KNOWN_MAX = 32
_known: OrderedDict[str, tuple[int, TableMetadata]] = OrderedDict()
_lock = threading.Lock()


def load_table(catalog: Catalog, name: Identifier) -> Table:
    """`Catalog.load_table`, which parses what is not known yet.

    Raises:
        NoSuchTableError: the catalog has no such table.
        OSError: its metadata file cannot be read.
    """
    if not isinstance(catalog, SqlCatalog):
        return catalog.load_table(name)
    with Session(catalog.engine) as session:
        location = session.scalar(select(IcebergTables.metadata_location).where(*row_of(catalog, name)))
    if not location:
        raise NoSuchTableError(f"Table does not exist: {'.'.join(name)}")
    io = load_file_io(properties=catalog.properties, location=location)
    metadata = read_metadata(io, location)
    return Table(name, metadata, location, catalog._load_file_io(metadata.properties, location), catalog)


def row_of(catalog: SqlCatalog, name: Identifier) -> Sequence[ColumnElement[bool]]:
    """Where an SQL catalog has a table."""
    return (
        IcebergTables.catalog_name == catalog.name,
        IcebergTables.table_namespace == Catalog.namespace_to_string(Catalog.namespace_from(name)),
        IcebergTables.table_name == Catalog.table_name_from(name),
    )


def read_metadata(io: FileIO, location: str) -> TableMetadata:
    """What a metadata file says.

    Raises:
        OSError: it cannot be read; also of one that is known.
    """
    file = io.new_input(location)
    size = len(file)
    with _lock:
        known = _known.get(location)
    if known is None or known[0] != size:
        known = size, FromInputFile.table_metadata(file)
        _remember(location, *known)
    return known[1]


def note_written(io: FileIO, location: str, metadata: TableMetadata) -> None:
    """A metadata file that was written is known, too."""
    _remember(location, len(io.new_input(location)), metadata)


def _remember(location: str, size: int, metadata: TableMetadata) -> None:
    with _lock:
        _known[location] = size, metadata
        _known.move_to_end(location)
        while len(_known) > _KNOWN_MAX:
            _known.popitem(last=False)


def updated(base: TableMetadata, updates: Sequence[TableUpdate], location: str) -> TableMetadata:
    """PyIceberg's ``update_table_metadata`` of metadata that stands at a location; what stays as it was is shared with
    the base instead of copied, as neither is ever changed."""
    context = _TableMetadataUpdateContext()
    metadata = base
    for update in updates:
        metadata = _apply_table_update(update, metadata, context)
    metadata = _update_table_metadata_log(metadata, location, base.last_updated_ms)
    metadata.spec().check_compatible(metadata.schema())
    metadata.sort_order().check_compatible(metadata.schema())
    return metadata
