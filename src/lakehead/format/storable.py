"""Which values a table may hold: those that its log, its lake and all readers represent alike.

Almost every value that Arrow holds is one of them. The exceptions are refused before anything is written, in tables
without a lake too, so that a value means the same wherever it lies:

- timestamps in seconds or milliseconds that do not fit into 64 bits of microseconds, which is what the lake stores;
- dates and timestamps of a partition column outside of the years 1 to 9999: partitions are named in ISO 8601;
- what is no value of its type at all: times outside of a day, decimals of more digits, text that is not UTF-8.

What a null struct or list holds underneath is no value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import SchemaMismatchError
from lakehead.format.per_schema import once_per_schema

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6}
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799  # years 1 to 9999
_FIRST_DAY, _LAST_DAY = _FIRST_SECOND // 86_400, _LAST_SECOND // 86_400

Column: TypeAlias = pa.Array | pa.ChunkedArray


def check_storable(rows: pa.Table | pa.RecordBatch, schema: pa.Schema, what: str) -> None:
    """Refuse timestamps that the lake cannot hold; costs nothing for columns without seconds or milliseconds.

    Raises:
        SchemaMismatchError: ``context`` has the column and the row.
    """
    for at, field in _coarse(schema):
        _check(rows.column(at), field, _beyond_microseconds, "is beyond what 64 bits of microseconds hold", what)


def check_partition_values(columns: Sequence[Column], fields: Iterable[pa.Field], what: str) -> None:
    """Refuse dates and timestamps that cannot name a partition.

    Raises:
        SchemaMismatchError: ``context`` has the column and the row.
    """
    for column, field in zip(columns, fields, strict=True):
        if pa.types.is_date(field.type) or pa.types.is_timestamp(field.type):
            _check(column, field, _beyond_iso_years, "cannot name a partition: it is not in the years 1 to 9999", what)


def check_valid(columns: Sequence[Column], fields: Iterable[pa.Field], what: str) -> None:
    """Refuse what is no value of its column's type; costs about 3 ns for each text and decimal.

    Raises:
        SchemaMismatchError: ``context`` has the column and the row.
    """
    for column, field in zip(columns, fields, strict=True):
        _check(column, field, _is_invalid, f"is no value of {field.type}", what)


def _check(column: Column, field: pa.Field, bad: Callable[[pa.Array], bool], problem: str, what: str) -> None:
    row = 0
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if bad(chunk):
            at = _first(chunk, bad)
            found = _shown(chunk.slice(at, 1))
            raise SchemaMismatchError(
                f"{what}: column {field.name!r} is {field.type}: row {row + at} holds {found}, which {problem}",
                column=field.name,
                row=row + at,
                expected=str(field.type),
            )
        row += len(chunk)


def _first(array: pa.Array, bad: Callable[[pa.Array], bool]) -> int:
    """The first bad row of an array that has one, by bisection."""
    start, end = 0, len(array)
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (start, middle) if bad(array.slice(start, middle - start)) else (middle, end)
    return start


def _shown(one: pa.Array) -> str:
    """The value of an array of one, whatever it holds: moments as the number that they are stored as."""
    t = one.type
    if pa.types.is_temporal(t):
        text = f"the number {one.view(pa.int32() if t.bit_width == 32 else pa.int64())[0]}"
    elif pa.types.is_nested(t):
        text = "a value"
    else:
        text = repr(one[0].as_buffer().to_pybytes() if hasattr(one[0], "as_buffer") else one[0].as_py())
    return text if len(text) <= 60 else text[:57] + "..."


def _is_invalid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except (pa.ArrowException, UnicodeDecodeError):
        return True
    return False


@functools.lru_cache(maxsize=1024)
def is_coarse(t: pa.DataType) -> bool:
    """Whether the type is, or holds, a timestamp in seconds or milliseconds."""
    if pa.types.is_timestamp(t):
        return bool(t.unit in ("s", "ms"))
    return pa.types.is_nested(t) and any(is_coarse(t.field(i).type) for i in range(t.num_fields))


@once_per_schema
def _coarse(schema: pa.Schema) -> list[tuple[int, pa.Field]]:
    return [(at, field) for at, field in enumerate(schema) if is_coarse(field.type)]


def _beyond_microseconds(array: pa.Array) -> bool:
    for leaf in visible_leaves(array, is_coarse):
        factor = 10**6 // _PER_SECOND[leaf.type.unit]
        low, high = _limits(leaf)
        if low * factor < -(1 << 63) or high * factor >= 1 << 63:
            return True
    return False


def _beyond_iso_years(array: pa.Array) -> bool:
    low, high = _limits(array)
    if pa.types.is_date(array.type):
        return low < _FIRST_DAY or high > _LAST_DAY
    per_second = _PER_SECOND[array.type.unit]
    return low < _FIRST_SECOND * per_second or high >= (_LAST_SECOND + 1) * per_second


def _limits(array: pa.Array) -> tuple[int, int]:
    """Least and greatest number that stands for a value; zeros when there is none."""
    found = pc.min_max(array.view(pa.int32() if array.type.bit_width == 32 else pa.int64()))
    low, high = found["min"].as_py(), found["max"].as_py()
    return (0, 0) if low is None else (low, high)


def visible_leaves(array: pa.Array, wanted: Callable[[pa.DataType], bool]) -> Iterator[pa.Array]:
    """The arrays inside of an array whose types are wanted, without what lies under nulls."""
    t = array.type
    if not wanted(t):
        return
    if not pa.types.is_nested(t):
        yield array
        return
    if pa.types.is_struct(t):
        children = array.flatten()
    elif pa.types.is_map(t):
        array = array.filter(array.is_valid())
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        children = [part.slice(first, last - first) for part in (array.keys, array.items)]
    else:
        children = [array.flatten()]
    for child in children:
        yield from visible_leaves(child, wanted)
