"""Columns of data files by field id: what they are called in a file is its writer's choice.

Writers spell names that they take for odd in their own way, and files keep the names of their time. Most files use the
table's own names, and are read as they are; of the others each column is found by its id, inside structs too. One that
lacks a column with a default is one of the others for who wants that column: Parquet readers would take it for null.

Files without field ids, which other engines add, are read by the table's name mapping, as Iceberg's specification says
(Column Projection, Name Mapping Serialization): what a name means there stays what it meant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from lakehead.env.recently_used import RecentlyUsed
from lakehead.env.threads import WorkerPool
from lakehead.format.defaults import default_of
from lakehead.format.per_schema import digest_of_schema
from lakehead.format.read_as import Binding, same_inside
from lakehead.iceberg.contract import NAME_MAPPING
from lakehead.iceberg.data_files import lake_arrow_schema
from lakehead.iceberg.file_io import LOOKS_AT_ONCE, lake_files, locate_file
from lakehead.lake.lake_table import LakeFile
from lakehead.lake.marks import unreadable_property
from lakehead.predicate.literals import is_number
from lakehead.types import DEFAULT, TableDescriptor, children, field_id, with_children

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.table import Table
    from pyiceberg.table.name_mapping import MappedField, NameMapping

_Key: TypeAlias = tuple[str, str, "str | None"]
_File: TypeAlias = tuple[str, int, int]
"""A file's address, its bytes and its rows: a name may be used again, for another file."""
_lacking: RecentlyUsed[tuple[_File, _Key], frozenset[str] | None] = RecentlyUsed(1 << 16)
"""`FileColumns.lacking` of files, by what the columns are by."""


def with_defaults(lake: pa.Schema, desc: TableDescriptor) -> pa.Schema:
    """The lake's columns with the defaults of the table's."""
    defaults = {f.name: f.metadata[DEFAULT] for f in desc.schemas.current.fields if default_of(f) is not None}
    return pa.schema(
        f.with_metadata({**f.metadata, DEFAULT: defaults[f.name]}) if f.name in defaults else f for f in lake
    )


def column_name(physical: pa.Schema, number: int, name: str) -> str | None:
    """What a file calls the column with this field id; a file without ids calls it by its name."""
    if not has_ids(physical):
        return name if name in physical.names else None
    return next((f.name for f in physical if field_id(f) == number), None)


def name_mapping(table: Table) -> NameMapping | None:
    """What fields are called in files without ids; None where the lake table does not say.

    Raises:
        LakeStateError: it says it in a way that cannot be read.
    """
    try:
        return table.name_mapping()
    except ValueError as e:
        raise unreadable_property(".".join(table.name()), NAME_MAPPING, e) from e


class FileColumns:
    """Finds columns of one table in its data files.

    Args:
        lake: makes the Arrow form of the Iceberg schema, with field ids and the table's names, and `with_defaults`,
            which takes a while.
        known_by: what tells these columns from all others, and their defaults. Ids of schemas do not: a lake that was
            put back to what it was gives them to others.
        mapping: what fields are called in files without ids; None for what they are called now.
    """

    def __init__(
        self, lake: Callable[[], pa.Schema], known_by: tuple[str, str], mapping: NameMapping | None = None
    ) -> None:
        self._made = lake
        self._mapping = mapping
        self.key = (*known_by, None if mapping is None else mapping.model_dump_json())

    @classmethod
    def of(cls, table: Table, desc: TableDescriptor) -> FileColumns:
        """Those of a lake table.

        Raises:
            LakeStateError: see `name_mapping`.
        """
        lake = table.schema()
        known_by = hashlib.blake2b(str(lake).encode(), digest_size=16).hexdigest()
        of_table = digest_of_schema(desc.schemas.current.fields)
        return cls(lambda: with_defaults(lake_arrow_schema(lake), desc), (known_by, of_table), name_mapping(table))

    @cached_property
    def _lake(self) -> pa.Schema:
        return self._made()

    def field(self, name: str) -> pa.Field:
        """A column as the lake has it."""
        return self._lake.field(name)

    def lacking(self, physical: pa.Schema) -> frozenset[str] | None:
        """Of a file in which all columns are called as in the table, inside structs too, and of their kinds, those with
        a default that it lacks; None of another file."""
        if self._mapping is not None and not has_ids(physical):
            return None
        written = self.written(physical)
        if not _same(written, self._lake):
            return None
        there = {field_id(f) for f in written}
        return frozenset(f.name for f in self._lake if default_of(f) is not None and field_id(f) not in there)

    def written(self, physical: pa.Schema) -> list[pa.Field]:
        """The columns of a file with their field ids, which it may lack."""
        if has_ids(physical):
            return list(physical)
        return _named_like(physical, self._lake, None if self._mapping is None else self._mapping.root)

    def binding(self, physical: pa.Schema, names: Sequence[str]) -> Binding:
        """Where a file has these columns; it gives them their own names and the lake's types."""
        return Binding.of(self.written(physical), [self._lake.field(n) for n in names])


def has_ids(physical: Iterable[pa.Field]) -> bool:
    """Whether a file says which fields its columns are."""
    return any(field_id(f) is not None for f in physical)


_Mapped: TypeAlias = "Sequence[MappedField] | None"


def _named_like(fields: Iterable[pa.Field], lake: Iterable[pa.Field], mapped: _Mapped) -> list[pa.Field]:
    """The fields of a file without ids, with those of the fields that their names are mapped to, or that have them."""
    there: dict[str, tuple[pa.Field, _Mapped]]
    if mapped is None:
        there = {f.name: (f, None) for f in lake}
    else:
        ids = {field_id(f): f for f in lake}
        there = {name: (ids[m.field_id], m.fields) for m in mapped if m.field_id in ids for name in m.names}
    return [_like(f, *there[f.name]) if f.name in there else f for f in fields]


def _like(f: pa.Field, lake: pa.Field, mapped: _Mapped) -> pa.Field:
    within, wanted = children(f.type), children(lake.type)
    if pa.types.is_struct(f.type):
        within = _named_like(within, wanted, mapped)
    elif len(within) == len(wanted):  # writers call items, keys and values as they like
        parts = {m.field_id: m.fields for m in mapped or ()}
        within = [
            _like(a, b, None if mapped is None else parts.get(field_id(b), []))
            for a, b in zip(within, wanted, strict=True)
        ]
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
        elif (
            found.name != f.name
            or not _same_kind(found.type, f.type)
            or not same_inside(found.type, f.type)
            or _narrower_inside(found.type, f.type)
        ):
            return False
    return True


_KINDS = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_timestamp,
    pa.types.is_time,
    lambda t: pa.types.is_string(t) or pa.types.is_large_string(t),
    lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t),
    lambda t: pa.types.is_list(t) or pa.types.is_large_list(t),
    pa.types.is_struct,
    pa.types.is_map,
)


def _same_kind(written: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Parquet readers take conditions on the one for conditions on the other."""
    return written == wanted or any(is_one(written) and is_one(wanted) for is_one in _KINDS)


def _narrower_inside(written: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a number inside is narrower than it is to be; of types with the same fields inside."""
    pairs = [(a.type, b.type) for a, b in zip(children(written), children(wanted), strict=True)]
    return any(_narrower_inside(a, b) if pa.types.is_nested(b) else a != b and is_number(b) for a, b in pairs)


def plain_files(
    io: FileIO, files: Sequence[LakeFile], columns: FileColumns, names: Collection[str]
) -> tuple[list[LakeFile], list[LakeFile]]:
    """Files whose columns all have the table's names, and where these, if they are absent, are null; and the others.

    Raises:
        LakeFileMissingError: a file is gone.
    """
    now = columns.key
    known = {file: lacking for (file, _), lacking in _lacking.known((_file(f), now) for f in files).items()}
    if unknown := [f for f in files if _file(f) not in known]:
        with WorkerPool(LOOKS_AT_ONCE) as pool:
            found = dict(zip(map(_file, unknown), pool.map(partial(_lacking_in, io, columns), unknown), strict=True))
        known |= found
        _lacking.note_all({(file, now): lacking for file, lacking in found.items()})
    plain = {file[0] for file, lacking in known.items() if lacking is not None and lacking.isdisjoint(names)}
    return [f for f in files if f.path in plain], [f for f in files if f.path not in plain]


def _file(f: LakeFile) -> _File:
    return f.path, f.size, f.record_count


def _lacking_in(io: FileIO, columns: FileColumns, file: LakeFile) -> frozenset[str] | None:
    fs, path = locate_file(io, file.path)
    with lake_files(file.path):
        return columns.lacking(pq.read_schema(path, filesystem=fs))
