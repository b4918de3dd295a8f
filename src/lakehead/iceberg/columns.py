"""Columns of data files by field id: what they are called in a file is its writer's choice.

Writers spell names that they take for odd in their own way, and files keep the names of their time. Most files use the
table's own names, and are read as they are; of the others each column is found by its id, inside structs too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakehead.iceberg.file_io import LOOKS_AT_ONCE, lake_files, locate_file
from lakehead.lake.lake_table import LakeFile

if TYPE_CHECKING:
    from pyiceberg.io import FileIO

_ID = b"PARQUET:field_id"
_PLAIN_MAX = 1 << 16
_plain: dict[str, bool] = {}
"""Whether files are plain: neither they nor what tiering relies on change."""
_plain_lock = threading.Lock()


def column_name(physical: pa.Schema, field_id: int, name: str) -> str | None:
    """What a file calls the column with this id; a file without ids calls it by its name."""
    ids = _ids(physical)
    if not ids:
        return name if name in physical.names else None
    found = ids.get(field_id)
    return None if found is None else str(physical.field(found).name)


class FileColumns:
    """Finds columns of one table in its data files.

    Args:
        lake: Arrow form of the Iceberg schema, with field ids and the table's names.
    """

    def __init__(self, lake: pa.Schema) -> None:
        self._lake = lake

    def are_plain(self, physical: pa.Schema) -> bool:
        """Whether all columns in a file are called as in the table, inside structs too."""
        return not _ids(physical) or _same(physical, self._lake)

    def names_in(self, physical: pa.Schema, names: Sequence[str]) -> list[str]:
        """What the file calls those of the columns that it has; any of its columns when it has none of them."""
        found = (column_name(physical, _id_of(self._lake.field(n)), n) for n in names)
        return [n for n in found if n is not None] or list(physical.names[:1])

    def bind(self, batch: pa.RecordBatch, physical: pa.Schema, names: Sequence[str]) -> pa.RecordBatch:
        """The columns, with their own names, of a batch that has `names_in`; those that the file lacks are null."""
        if not names:
            return batch.select([])
        columns: list[pa.Array] = []
        for name in names:
            wanted = self._lake.field(name)
            there = column_name(physical, _id_of(wanted), name)
            if there is None:
                columns.append(pa.nulls(batch.num_rows, wanted.type))
            else:
                columns.append(_pick(batch.column(there), physical.field(there).type, wanted.type))
        return pa.RecordBatch.from_arrays(columns, names=list(names))


def _id_of(f: pa.Field) -> int:
    return int((f.metadata or {}).get(_ID, -1))


def _ids(fields: Iterable[pa.Field]) -> Mapping[int, int]:
    """Place of each field that has an id."""
    return {i: at for at, f in enumerate(fields) if (i := _id_of(f)) >= 0}


def _same(physical: Iterable[pa.Field], lake: Iterable[pa.Field]) -> bool:
    there = list(physical)
    ids = _ids(there)
    names = {f.name: f for f in there}
    for f in lake:
        at = ids.get(_id_of(f))
        if at is None:
            if f.name in names:
                return False
        elif there[at].name != f.name or not _same_inside(there[at].type, f.type):
            return False
    return True


def _same_inside(physical: pa.DataType, lake: pa.DataType) -> bool:
    if pa.types.is_struct(lake):
        same = pa.types.is_struct(physical) and physical.num_fields == lake.num_fields
        return same and _same(_fields(physical), _fields(lake))
    if pa.types.is_map(lake):
        return _same_inside(physical.key_type, lake.key_type) and _same_inside(physical.item_type, lake.item_type)
    if pa.types.is_list(lake):
        return _same_inside(physical.value_type, lake.value_type)
    return True


def _fields(t: pa.DataType) -> list[pa.Field]:
    return [t.field(i) for i in range(t.num_fields)]


def _pick(array: pa.Array, physical: pa.DataType, lake: pa.DataType) -> Any:
    """The array with the parts and names that the lake's type has."""
    if not pa.types.is_nested(lake) or _same_inside(physical, lake):
        return array
    array = pc.take(array, pa.array(range(len(array)), pa.int64()))  # parts of a slice begin elsewhere
    if pa.types.is_struct(lake):
        there, ids = _fields(physical), _ids(_fields(physical))
        parts, fields = [], []
        for f in _fields(lake):
            at = ids.get(_id_of(f))
            part = pa.nulls(len(array), f.type) if at is None else _pick(array.field(at), there[at].type, f.type)
            parts.append(part)
            fields.append(pa.field(f.name, part.type))
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    mask = array.is_null()
    if pa.types.is_map(lake):
        keys = _pick(array.keys, physical.key_type, lake.key_type)
        items = _pick(array.items, physical.item_type, lake.item_type)
        return pa.MapArray.from_arrays(array.offsets, keys, items, mask=mask)
    return pa.ListArray.from_arrays(array.offsets, _pick(array.values, physical.value_type, lake.value_type), mask=mask)


def plain_files(io: FileIO, files: Sequence[LakeFile], columns: FileColumns) -> tuple[list[LakeFile], list[LakeFile]]:
    """Files whose columns all have the table's names, and the others.

    Raises:
        LakeFileMissingError: a file is gone.
    """
    with _plain_lock:
        known = {f.path: _plain[f.path] for f in files if f.path in _plain}
    if unknown := [f for f in files if f.path not in known]:
        with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
            found = dict(
                zip((f.path for f in unknown), pool.map(partial(_is_plain, io, columns), unknown), strict=True)
            )
        known |= found
        with _plain_lock:
            if len(_plain) + len(found) > _PLAIN_MAX:
                _plain.clear()
            _plain.update(found)
    return [f for f in files if known[f.path]], [f for f in files if not known[f.path]]


def _is_plain(io: FileIO, columns: FileColumns, file: LakeFile) -> bool:
    fs, path = locate_file(io, file.path)
    with lake_files(file.path):
        return columns.are_plain(pq.read_schema(path, filesystem=fs))
