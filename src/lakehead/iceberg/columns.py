"""Columns of data files by field id: what they are called in a file is its writer's choice.

Writers spell names that they take for odd in their own way, and files keep the names of their time. Most files use the
table's own names, and are read as they are; of the others each column is found by its id, inside structs too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from lakehead.format.read_as import Binding, same_inside
from lakehead.iceberg.file_io import LOOKS_AT_ONCE, lake_files, locate_file
from lakehead.lake.lake_table import LakeFile
from lakehead.types import children, field_id, with_children

if TYPE_CHECKING:
    from pyiceberg.io import FileIO

_PLAIN_MAX = 1 << 16
_plain: dict[tuple[str, int], bool] = {}
"""Whether files are plain, by path and the lake's schema, which do not change."""
_plain_lock = threading.Lock()


def column_name(physical: pa.Schema, number: int, name: str) -> str | None:
    """What a file calls the column with this field id; a file without ids calls it by its name."""
    if not _has_ids(physical):
        return name if name in physical.names else None
    return next((f.name for f in physical if field_id(f) == number), None)


class FileColumns:
    """Finds columns of one table in its data files.

    Args:
        lake: Arrow form of the Iceberg schema, with field ids and the table's names.
        schema_id: of that Iceberg schema.
    """

    def __init__(self, lake: pa.Schema, schema_id: int) -> None:
        self._lake = lake
        self.schema_id = schema_id

    def are_plain(self, physical: pa.Schema) -> bool:
        """Whether all columns in a file are called as in the table, inside structs too."""
        return not _has_ids(physical) or _same(physical, self._lake)

    def binding(self, physical: pa.Schema, names: Sequence[str]) -> Binding:
        """Where a file has these columns; it gives them their own names and the lake's types."""
        written = physical if _has_ids(physical) else _named_like(physical, self._lake)
        return Binding.of(written, [self._lake.field(n) for n in names])


def _has_ids(physical: Iterable[pa.Field]) -> bool:
    return any(field_id(f) is not None for f in physical)


def _named_like(fields: Iterable[pa.Field], lake: Iterable[pa.Field]) -> list[pa.Field]:
    """The fields of a file without ids, with those of the same names."""
    there = {f.name: f for f in lake}
    return [_like(f, there[f.name]) if f.name in there else f for f in fields]


def _like(f: pa.Field, lake: pa.Field) -> pa.Field:
    within, wanted = children(f.type), children(lake.type)
    if pa.types.is_struct(f.type):
        within = _named_like(within, wanted)
    elif len(within) == len(wanted):  # writers call items, keys and values as they like
        within = [_like(a, b) for a, b in zip(within, wanted, strict=True)]
    return pa.field(f.name, with_children(f.type, within), f.nullable, lake.metadata)


def _same(physical: Iterable[pa.Field], lake: Iterable[pa.Field]) -> bool:
    there = list(physical)
    ids = {field_id(f): f for f in there}
    names = {f.name for f in there}
    for f in lake:
        found = ids.get(field_id(f))
        if found is None:
            if f.name in names:
                return False
        elif found.name != f.name or not same_inside(found.type, f.type):
            return False
    return True


def plain_files(io: FileIO, files: Sequence[LakeFile], columns: FileColumns) -> tuple[list[LakeFile], list[LakeFile]]:
    """Files whose columns all have the table's names, and the others.

    Raises:
        LakeFileMissingError: a file is gone.
    """
    now = columns.schema_id
    with _plain_lock:
        known = {f.path: _plain[f.path, now] for f in files if (f.path, now) in _plain}
    if unknown := [f for f in files if f.path not in known]:
        with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
            found = dict(
                zip((f.path for f in unknown), pool.map(partial(_is_plain, io, columns), unknown), strict=True)
            )
        known |= found
        with _plain_lock:
            if len(_plain) + len(found) > _PLAIN_MAX:
                _plain.clear()
            _plain.update({(path, now): plain for path, plain in found.items()})
    return [f for f in files if known[f.path]], [f for f in files if not known[f.path]]


def _is_plain(io: FileIO, columns: FileColumns, file: LakeFile) -> bool:
    fs, path = locate_file(io, file.path)
    with lake_files(file.path):
        return columns.are_plain(pq.read_schema(path, filesystem=fs))
