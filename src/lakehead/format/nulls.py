"""Nulls where a table's columns, or what is inside them, may not be null."""

from __future__ import annotations

import functools

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import NullKeyError
from lakehead.format.per_schema import once_per_schema


def check_nulls(table: pa.Table, schema: pa.Schema, what: str) -> None:
    """Refuse them.

    Args:
        table: it has the schema's columns.
        what: begins error messages.

    Raises:
        NullKeyError: ``context`` has the column, and the row where it is the column that is null.
    """
    for index, field, nested in _required(schema):
        _check_column(table.column(index), field, nested, what)


@functools.lru_cache(maxsize=1024)
def requires_inside(t: pa.DataType) -> bool:
    """True when a list, map value or struct field inside the type may not be null."""
    if not pa.types.is_nested(t):
        return False
    children = [t.item_field] if pa.types.is_map(t) else [t.field(i) for i in range(t.num_fields)]
    return any(not child.nullable or requires_inside(child.type) for child in children)


@once_per_schema
def _required(schema: pa.Schema) -> list[tuple[int, pa.Field, bool]]:
    """Columns that may not be null, or hold what may not be; the last says the latter."""
    columns = [(at, field, requires_inside(field.type)) for at, field in enumerate(schema)]
    return [(at, field, nested) for at, field, nested in columns if nested or not field.nullable]


@once_per_schema
def required_columns(schema: pa.Schema) -> list[str]:
    """Names of the columns that may not be null."""
    return [f.name for f in schema if not f.nullable]


def _check_column(column: pa.ChunkedArray, field: pa.Field, nested: bool, what: str) -> None:
    if not field.nullable and column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise NullKeyError(
            f"{what}: column {field.name!r} is null in row {row}: it must have a value in every row",
            column=field.name,
            row=row,
        )
    if nested and any(_null_inside(chunk, field.type) for chunk in column.chunks):
        raise NullKeyError(
            f"{what}: column {field.name!r} ({field.type}) holds a null inside that must not be null", column=field.name
        )


def _null_inside(array: pa.Array, t: pa.DataType) -> bool:
    """True when a child that may not be null is null under a parent that is not."""
    if not requires_inside(t):
        return False
    if array.null_count:
        array = array.filter(array.is_valid())
    if pa.types.is_struct(t):
        children = [(array.field(i), t.field(i)) for i in range(t.num_fields)]
    elif pa.types.is_map(t):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        children = [(array.items.slice(first, last - first), t.item_field)]
    else:
        children = [(array.flatten(), t.value_field)]
    return any((c.null_count > 0 and not f.nullable) or _null_inside(c, f.type) for c, f in children)
