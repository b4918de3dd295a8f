"""What a column is in rows that were written before it was there: its default, which goes where its field goes.

A default is a text in the metadata of a field, beside its id. The text is the same for a type, for all that it can be
widened to, and for the lake's type of it, so that none of these changes touches it::

    boolean                 true, false
    integers                digits
    floats                  the shortest text that is that float
    decimals                digits and point, with the type's scale
    texts, binaries         their bytes
    dates                   days since 1970-01-01
    times, timestamps       microseconds since midnight, since 1970-01-01 (UTC where the type has a zone)

A field without one is null where it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa

from lakehead.errors import InvalidSchemaError, SchemaMismatchError
from lakehead.format.decimals import near
from lakehead.format.per_schema import once_per_schema
from lakehead.format.rows import conform, to_arrow_table
from lakehead.format.statistics import encode_statistics, may_match
from lakehead.format.storable import check_storable
from lakehead.predicate import Bound
from lakehead.types import DEFAULT, TableSchema

DEFAULT_BYTES_MAX = 1024
"""Of a text or binary, which may be put into every row of a large batch."""

_MICROSECONDS = {"s": 10**6, "ms": 10**3, "us": 1}


def default_text(value: object, f: pa.Field) -> bytes | None:
    """The text of a default that a user gave for a column; None for null.

    Raises:
        InvalidSchemaError: it is no value of the column's type, or too long, or columns of this type have none.
    """
    try:
        given = value.as_py() if isinstance(value, pa.Scalar) else value
    except (ValueError, OverflowError) as e:
        raise InvalidSchemaError(
            f"column {f.name!r} cannot have a default that is no value of Python's, such as dates beyond the years 1 to"
            f" 9999: {e}",
            column=f.name,
        ) from e
    if given is None:
        return None
    if pa.types.is_nested(f.type):
        raise InvalidSchemaError(
            f"column {f.name!r} has the type {f.type}, of which there are no defaults: add it without, then write it",
            column=f.name,
        )
    plain = pa.schema([pa.field(f.name, f.type)])
    try:
        whole = conform(to_arrow_table([{f.name: given}], plain, what="the default"), plain, what="the default")
    except SchemaMismatchError as e:
        raise InvalidSchemaError(
            f"column {f.name!r} is {f.type} and cannot have default={given!r}: {e.__cause__ or e.message}",
            column=f.name,
        ) from e
    text = _text(whole.column(0)[0])
    if len(text) > DEFAULT_BYTES_MAX:
        raise InvalidSchemaError(
            f"the default of column {f.name!r} has {len(text):,} bytes, over the limit of {DEFAULT_BYTES_MAX:,}",
            column=f.name,
        )
    return text


def with_default(f: pa.Field, text: bytes | None) -> pa.Field:
    """The field with this default, and with the rest of its metadata; with None as it is.

    Raises:
        InvalidSchemaError: the text is none that `default_text` makes for this type.
    """
    if text is None:
        return f
    changed = f.with_metadata({**(f.metadata or {}), DEFAULT: text})
    try:
        value = default_of(changed)
        assert value is not None
        value.as_py()  # dates beyond the years 1 to 9999 are no literals
        row = pa.table([pa.array([value])], pa.schema([pa.field(f.name, f.type)]))
        check_storable(row, row.schema, "the default")
        sound = len(text) <= DEFAULT_BYTES_MAX and _text(value) == text
    except (pa.ArrowException, ArithmeticError, ValueError, KeyError, TypeError, SchemaMismatchError) as e:
        raise InvalidSchemaError(f"the default of column {f.name!r} is none of {f.type}: {e}", column=f.name) from e
    if not sound:
        raise InvalidSchemaError(f"the default of column {f.name!r} is none of {f.type}", column=f.name)
    return changed


def first_schema(schema_id: int, columns: pa.Schema, like: pa.Schema) -> TableSchema:
    """That of a new table with these columns, and the defaults of those that they are a copy of.

    Raises:
        InvalidSchemaError: see `with_default`.
    """
    defaults = [(f.metadata or {}).get(DEFAULT) for f in like]
    return TableSchema(schema_id, pa.schema(map(with_default, TableSchema.of(schema_id, columns).fields, defaults)))


def default_of(f: pa.Field) -> pa.Scalar | None:
    """The default of a field with its metadata; None for one that has none."""
    text = (f.metadata or {}).get(DEFAULT)
    return None if text is None else _value(f.type, text)


def defaults_of(fields: Iterable[pa.Field]) -> dict[str, pa.Scalar]:
    """The columns that have one, by their names."""
    return {f.name: value for f in fields if (value := default_of(f)) is not None}


@once_per_schema
def plain_defaults(fields: pa.Schema) -> dict[str, Any]:
    """`defaults_of` as Python values."""
    return {name: value.as_py() for name, value in defaults_of(fields).items()}


def default_bytes(fields: Iterable[pa.Field]) -> int:
    """About how many bytes their defaults add to a row."""
    return sum(len((f.metadata or {}).get(DEFAULT, b"")) for f in fields)


def absent(f: pa.Field, rows: int) -> pa.Array:
    """The column of so many rows that were written without it.

    Args:
        f: with its metadata.
    """
    value = default_of(f)
    return pa.nulls(rows, f.type) if value is None else pa.repeat(value, rows)


def filled(table: pa.Table, schema: TableSchema) -> pa.Table:
    """A conformed table with the columns that it lacks, which may be null, as they are in rows without them."""
    if table.num_columns == len(schema.fields):
        return table
    have = set(table.column_names)
    columns = [
        table.column(f.name) if f.name in have else pa.chunked_array([absent(f, table.num_rows)]) for f in schema.fields
    ]
    return pa.Table.from_arrays(columns, schema=schema.columns)


def absent_may_match(f: pa.Field, bound: Bound) -> bool:
    """False only when rows that were written without the column do not satisfy a bound on it."""
    value = default_of(f)
    if value is None:
        return bound.op == "is_null"
    row = pa.record_batch([pa.array([value])], [bound.column])
    return may_match(encode_statistics(row), row.schema, [bound])


# The text of a value


def _text(value: pa.Scalar) -> bytes:
    t, types = value.type, pa.types
    if types.is_date(t):
        return str(value.value).encode()
    if types.is_time(t) or types.is_timestamp(t):
        return str(value.value * _MICROSECONDS[t.unit]).encode()
    plain = value.as_py()
    if isinstance(plain, bytes):
        return plain
    if isinstance(plain, bool):
        return b"true" if plain else b"false"
    if isinstance(plain, float):
        return repr(plain).encode()
    return (format(plain, "f") if isinstance(plain, Decimal) else str(plain)).encode()


@lru_cache(maxsize=1024)
def _value(t: pa.DataType, text: bytes) -> pa.Scalar:
    types = pa.types
    if types.is_binary(t) or types.is_large_binary(t) or types.is_fixed_size_binary(t):
        return pa.scalar(text, t)
    if types.is_time(t) or types.is_timestamp(t):
        return pa.scalar(int(text) // _MICROSECONDS[t.unit], pa.int64()).cast(_whole(t)).cast(t)
    plain: Callable[[str], Any] = str
    if types.is_boolean(t):
        plain = {"true": True, "false": False}.__getitem__
    elif types.is_integer(t):
        plain = int
    elif types.is_date(t):
        return pa.scalar(int(text), pa.int32()).cast(t)
    elif types.is_floating(t):
        plain = float
    elif types.is_decimal(t):
        return pa.scalar(near(Decimal(text.decode())), t)
    return pa.scalar(plain(text.decode()), t)


def _whole(t: pa.DataType) -> pa.DataType:
    return pa.int32() if pa.types.is_time32(t) else pa.int64()
