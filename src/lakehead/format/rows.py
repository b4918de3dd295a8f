"""What users hand over, made into exactly a table's columns, or refused with the column and the value that do not fit.

Two steps: `to_arrow_table` turns any accepted input into an Arrow table with whatever columns it has, `conform` brings
that to the table's schema. No value changes on the way: casts stay within a family of types and fail rather than lose
something. Input that has the schema already passes with a look at the null counts.

    family                      accepted for a column of the table
    integers                    any integer type, when the values fit
    float32, float64            narrower or equal floats; integers that the float holds exactly
    decimal                     any decimal, when the values fit
    string, binary              any string type; any binary type, fixed when all lengths fit
    date, time                  date32, date64; any unit when nothing is cut off
    timestamp                   any unit when nothing is cut off; zoned for zoned, zoneless for zoneless
    list, map, struct           any list type; maps; structs with the same field names: children by the same rules
    all                         dictionaries of an accepted type; the null type
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import ColumnNotFoundError, SchemaMismatchError
from lakehead.format.arrays import to_arrow
from lakehead.format.decimals import near
from lakehead.format.nulls import check_nulls, requires_inside
from lakehead.format.per_schema import once_per_schema
from lakehead.format.plain import is_text
from lakehead.format.schema import map_children, nearest_name
from lakehead.format.storable import check_storable
from lakehead.types import RESERVED_PREFIX

_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
_ZERO = dt.timedelta()
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def to_arrow_table(data: object, schema: pa.Schema, *, what: str, fill: Mapping[str, Any] | None = None) -> pa.Table:
    """An Arrow table of the data, with its own columns and order; `conform` must follow.

    Takes a pa.Table, RecordBatch, RecordBatchReader or dataset, a pandas DataFrame (its index is dropped, NaN counts
    as missing), anything with ``__arrow_c_stream__`` or ``__arrow_c_array__``, a list of dicts, one dict as one row, a
    list of tables, batches or lists of these, or an iterator of any of these, which is read to its end. Python values
    get the schema's types. Arrow data shares its buffers.

    Args:
        data: the input.
        schema: the table's schema; used for the types of Python values.
        what: begins error messages, for example ``"append to shop.orders"``.
        fill: what is in rows that lack a column, where it is not null; with None dicts must have the same keys.

    Raises:
        SchemaMismatchError: the data has another form, or a Python value does not fit its column.
        ColumnNotFoundError: a dict or DataFrame has a column that the schema lacks.
    """
    table = _to_table(data, schema, what, allow_extra=False, fill=fill)
    if table.num_columns:
        return table
    if rows := len(data) if _is_pandas(data, "DataFrame") else table.num_rows:  # type: ignore[arg-type]
        raise SchemaMismatchError(f"{what}: there are {rows:,} rows, and no column: give one at least")
    return schema.empty_table()


def conform(
    table: pa.Table, schema: pa.Schema, *, columns_required: Sequence[str] | None = None, what: str = "data"
) -> pa.Table:
    """The table with exactly the schema's fields, in schema order, values unchanged.

    Args:
        table: columns in any order, of the schema's types or ones that fit (see the module).
        schema: canonical schema of the table (`normalize_schema`).
        columns_required: columns that must be there; None means all. The result has those that are there.
        what: begins error messages.

    Raises:
        ColumnNotFoundError: a column that the schema lacks.
        SchemaMismatchError: a column is missing, there twice or reserved, or has a type or value that does not fit, or
            that no lake holds (`lakehead.format.storable`).
        NullKeyError: a null in a non-nullable column; ``context`` has its column and row.
    """
    if not table.schema.equals(schema, check_metadata=True):
        table = _fit(table, schema, schema.names if columns_required is None else columns_required, what)
        if table.num_columns < len(schema):
            schema = table.schema
    check_nulls(table, schema, what)
    check_storable(table, schema, what)
    return table


def to_key_table(keys: object, schema: pa.Schema, *, what: str, allow_extra: bool = False) -> pa.Table:
    """The keys of a lookup or delete, with exactly the columns of ``schema``, in the order given.

    Args:
        keys: as `to_arrow_table`, or a list of tuples in key order; for a key of one column also one value, or a list,
            array or series of values. An iterator counts as a list.
        schema: the key columns.
        what: begins error messages.
        allow_extra: drop other columns instead of refusing them.

    Raises:
        ColumnNotFoundError, SchemaMismatchError, NullKeyError: as `conform`.
    """
    if _is_iterator(keys):
        keys = list(keys)
    values = _key_values(keys)
    if isinstance(values, list | tuple) and values and all(isinstance(v, tuple) for v in values):
        keys, values = _from_tuples(values, schema, what), None
    if values is None:
        table = _to_table(keys, schema, what, allow_extra=allow_extra)
    elif len(schema) == 1:
        table = pa.table([_array_of(values, schema.field(0), what)], names=schema.names)
    else:
        raise SchemaMismatchError(
            f"{what}: the key has {len(schema)} columns ({', '.join(schema.names)}): give tuples in that order, dicts"
            " or a table with all"
        )
    if allow_extra:
        known = set(schema.names)
        table = table.select([i for i, name in enumerate(table.column_names) if name in known])
    return conform(table, schema, what=what)


# Any input to Arrow


def _to_table(
    data: Any, schema: pa.Schema, what: str, *, allow_extra: bool, fill: Mapping[str, Any] | None = None
) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    data = [data] if isinstance(data, dict) else list(data) if _is_iterator(data) else data
    if isinstance(data, list | tuple):
        rows = data if isinstance(next(iter(data), None), dict) else _rows_of(data)
        if any(map(_is_tabular, rows[:1])) and all(map(_is_tabular, rows)):
            parts = [_to_table(part, schema, what, allow_extra=allow_extra) for part in rows]
            return _joined([_with_what_lacks(part, schema, what, fill) for part in parts] if fill else parts, what)
        return _from_dicts(rows, schema, what, allow_extra=allow_extra, fill=fill)
    if _is_pandas(data, "DataFrame"):
        return _from_pandas(data, schema, what, allow_extra=allow_extra)
    try:
        if isinstance(data, pa.RecordBatchReader):
            return data.read_all()
        if _is_dataset(data):
            return data.to_table()
        if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            return pa.table(data)
    except _CONVERSION_ERRORS as e:
        raise SchemaMismatchError(f"{what}: the {type(data).__name__} cannot be read as a table: {e}") from e
    raise SchemaMismatchError(
        f"{what}: a {type(data).__name__} is not a table: give an Arrow table, a DataFrame or a list of dicts"
        + (" (its collect() makes one)" if hasattr(data, "collect") else "")
    )


def _is_iterator(data: object) -> TypeGuard[Iterator[Any]]:
    return isinstance(data, Iterator) and not hasattr(data, "__arrow_c_stream__")


def _is_tabular(data: object) -> bool:
    arrow = any(hasattr(data, f"__arrow_c_{kind}__") for kind in ("stream", "array"))
    return not isinstance(data, pa.Scalar) and (arrow or _is_pandas(data, "DataFrame") or _is_dataset(data))


def _rows_of(parts: Sequence[Any]) -> Sequence[Any]:
    """What lists of dicts, or of tables, hold; all else as it is, which may be refused."""
    pages = [p for p in parts if isinstance(p, list) and all(isinstance(row, dict) or _is_tabular(row) for row in p)]
    if len(pages) + sum(map(_is_tabular, parts)) < len(parts):
        return parts
    return [row for part in parts for row in (part if isinstance(part, list) else [part])]


def _is_dataset(data: object) -> bool:
    return any(c.__name__ == "Dataset" and c.__module__ == "pyarrow._dataset" for c in type(data).__mro__)


def _joined(parts: list[pa.Table], what: str) -> pa.Table:
    try:
        return pa.concat_tables(parts, promote_options="default")
    except _CONVERSION_ERRORS as e:
        raise SchemaMismatchError(f"{what}: its parts have columns of different types: {e}") from e


def _with_what_lacks(part: pa.Table, schema: pa.Schema, what: str, fill: Mapping[str, Any]) -> pa.Table:
    """The part with the values that it has where it lacks a column: another part may have it."""
    part = _fit(part, schema, (), what)
    for name, value in fill.items():
        if name not in part.column_names:
            part = part.append_column(name, pa.repeat(pa.scalar(value, schema.field(name).type), part.num_rows))
    return part


def _is_pandas(data: object, name: str) -> bool:
    # Looks at names, so that pandas is never imported for those who do not use it; subclasses count.
    return any(c.__name__ == name and c.__module__.split(".")[0] == "pandas" for c in type(data).__mro__)


def _from_dicts(
    rows: Sequence[Any], schema: pa.Schema, what: str, *, allow_extra: bool, fill: Mapping[str, Any] | None = None
) -> pa.Table:
    if not rows:
        return schema.empty_table()
    first = rows[0]
    known: dict[str, None] = {}
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise SchemaMismatchError(
                f"{what}: row {i} is a {type(row).__name__}, not a dict of column to value", row=i
            )
        if fill is not None:
            known.update(dict.fromkeys(row))
        elif row.keys() != first.keys():
            differing = ", ".join(sorted(repr(name) for name in row.keys() ^ first.keys()))
            raise SchemaMismatchError(
                f"{what}: row {i} and row 0 differ in {differing}: give all dicts of a call the same keys", row=i
            )
    given: Mapping[str, Any] = first
    if fill is not None:
        given = {**known, **fill}
        rows = [{**fill, **row} for row in rows] if fill else rows
    if not allow_extra:
        _check_known(list(given), schema, what)
    if not all(name in given for name in schema.names):
        # A table without a column has no rows.
        one = [schema.field(0)] if fill is not None else []
        schema = pa.schema([f for f in schema if f.name in given] or one)
    if len(schema):
        with contextlib.suppress(*_CONVERSION_ERRORS):
            return pa.Table.from_arrays(_together(rows, schema), schema=schema)
    # One after the other, which says where it fails.
    return _table_of([_array_of([row.get(f.name) for row in rows], f, what) for f in schema], list(schema))


def _together(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> list[pa.Array]:
    """All columns by one conversion: a few rows take it no longer than a column alone."""
    struct, loose = _as_struct(schema)
    for f in loose:
        _check_values([row.get(f.name) for row in rows], f.type)
    columns = pa.array(rows, struct).flatten()
    return [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]


@once_per_schema
def _as_struct(schema: pa.Schema) -> tuple[pa.DataType, list[pa.Field]]:
    """The type of a row whose values are converted, and the columns whose values are looked at before."""
    fields = [pa.field(f.name, _in_microseconds(f.type)) for f in schema]
    return pa.struct(fields), [f for f in schema if _is_loose(f.type)]


def _from_tuples(rows: Sequence[tuple[Any, ...]], schema: pa.Schema, what: str) -> pa.Table:
    for i, row in enumerate(rows):
        if len(row) != len(schema):
            raise SchemaMismatchError(
                f"{what}: row {i} is a tuple of {len(row)}, the key has {len(schema)}: {', '.join(schema.names)}",
                row=i,
            )
    return _table_of([_array_of([row[i] for row in rows], f, what) for i, f in enumerate(schema)], list(schema))


def _from_pandas(frame: Any, schema: pa.Schema, what: str, *, allow_extra: bool) -> pa.Table:
    names = list(frame.columns)
    _check_unique(names, what)
    if hidden := [name for name in frame.index.names if name in schema.names and name not in names]:
        raise SchemaMismatchError(
            f"{what}: {hidden[0]!r} is the frame's index, and no column of it: give frame.reset_index()",
            column=hidden[0],
        )
    if not allow_extra:
        _check_known(names, schema, what)
    fields = [f for f in schema if f.name in names]
    return _table_of([_array_of(frame[f.name], f, what) for f in fields], fields)


def _table_of(arrays: list[pa.Array], fields: list[pa.Field]) -> pa.Table:
    return pa.Table.from_arrays(arrays, names=[f.name for f in fields])


def _key_values(keys: Any) -> Any:
    """The values when the keys are bare values of one column; None when they are tabular."""
    if isinstance(keys, pa.Array | pa.ChunkedArray) or _is_pandas(keys, "Series"):
        return keys
    if isinstance(keys, set | frozenset | range):
        return list(keys)
    if isinstance(keys, list | tuple):
        tabular = not keys or _is_tabular(keys[0]) or any(isinstance(key, dict) for key in keys)
        return None if tabular else keys
    if hasattr(keys, "tolist") or hasattr(keys, "to_list"):  # numpy arrays and scalars, Polars series
        values = keys.tolist() if hasattr(keys, "tolist") else keys.to_list()
        return values if isinstance(values, list) else [values]
    if isinstance(keys, dict) or any(hasattr(keys, f"__arrow_c_{kind}__") for kind in ("stream", "array")):
        return None
    return None if _is_pandas(keys, "DataFrame") else [keys]


def _array_of(values: Any, field: pa.Field, what: str) -> pa.Array | pa.ChunkedArray:
    """One column of Arrow data (as it is), of a pandas series, or of Python values (of the field's type)."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if _is_pandas(values, "Series"):
        if str(values.dtype) != "object":
            # pandas holds integers with missing values as floats: to an integer column they are integers.
            whole = pa.types.is_integer(field.type) and values.dtype.kind == "f"
            try:
                return pa.array(values, type=field.type if whole else None, from_pandas=True)
            except _CONVERSION_ERRORS as e:
                raise _mismatch(f"the series of {values.dtype} cannot be converted: {e}", field, what) from e
        values = values.where(values.notna(), None).tolist()
    try:
        return _convert(values, field.type)
    except _CONVERSION_ERRORS:
        row, error = _first_failure(values, field.type)
        found = repr(values[row])
        shown = found if len(found) <= 60 else found[:57] + "..."
        why = error if isinstance(values[row], str | bytes) or not is_text(field.type) else "it is no text; give a str"
        problem = f"row {row} holds {shown} ({type(values[row]).__name__}): {why}"
        raise _mismatch(problem, field, what, row=row) from error


def _first_failure(values: Sequence[Any], t: pa.DataType) -> tuple[int, Exception]:
    """The first row that cannot be converted, by bisection, and why."""
    good, bad = 0, len(values)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            _convert(values[good:middle], t)
        except _CONVERSION_ERRORS:
            bad = middle
        else:
            good = middle
    try:
        _convert(values[good:bad], t)
    except _CONVERSION_ERRORS as e:
        return good, e
    raise AssertionError(f"values of {t} fail together but not alone")


def _convert(values: Sequence[Any], t: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if _is_loose(t):
        _check_values(values, t)
    # By way of microseconds, as Arrow silently cuts Python values to a coarser unit, but never Arrow values.
    fine = _in_microseconds(t)
    array = pa.array(values, fine)
    return array if fine == t else array.cast(t)


def _in_microseconds(t: pa.DataType) -> pa.DataType:
    if pa.types.is_time(t):
        return pa.time64("us")
    if pa.types.is_timestamp(t):
        return pa.timestamp("us", t.tz)
    return map_children(t, lambda child, _: _in_microseconds(child))


@functools.lru_cache(maxsize=1024)
def _is_loose(t: pa.DataType) -> bool:
    """True when Arrow would take a Python value for the type, or for one inside it, and lose part of it."""
    types = pa.types
    if types.is_temporal(t) or types.is_integer(t) or types.is_float32(t) or types.is_decimal(t) or types.is_struct(t):
        return True
    return pa.types.is_nested(t) and any(_is_loose(t.field(i).type) for i in range(t.num_fields))


def _check_values(values: Sequence[Any], t: pa.DataType) -> None:
    if not (pa.types.is_integer(t) and {int, type(None)}.issuperset(map(type, values))):
        for value in values:
            _check_value(value, t)


def _check_value(value: Any, t: pa.DataType) -> None:
    """Raise ValueError for a Python value that Arrow would convert with a loss or a guess."""
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if value is None:
        return
    if pa.types.is_temporal(t):
        if isinstance(value, int | float | str):
            kind = "text" if isinstance(value, str) else "number"
            raise ValueError(f"a {kind} is not a point in time; give a date, time or datetime")
        if value != value:  # as NaT
            raise ValueError("it is no point in time: give None where there is none")
        if pa.types.is_date(t) and isinstance(value, dt.datetime):
            raise ValueError("a datetime has a time of day; give a date")
        if pa.types.is_timestamp(t) and isinstance(value, dt.date) and not isinstance(value, dt.datetime):
            raise ValueError("a date has no time of day; give a datetime")
        if pa.types.is_timestamp(t) and isinstance(value, dt.datetime) and (value.tzinfo is None) != (t.tz is None):
            raise ValueError("the column has a zone, give the datetime one" if t.tz else "the column has no zone")
        if isinstance(value, dt.time) and value.tzinfo is not None:
            raise ValueError("the column has no zone: give the time of day without one")
        if getattr(value, "nanosecond", 0):  # of pandas
            raise ValueError("it has nanoseconds, and the column microseconds at most: round it")
        if isinstance(value, dt.datetime) and value.tzinfo is not None and (value.utcoffset() or _ZERO).microseconds:
            raise ValueError("its zone is off UTC by a part of a second: give it in UTC")
    elif pa.types.is_integer(t):
        if isinstance(value, str | bytes):
            raise ValueError("a text is not a number; give an int")
        if not isinstance(value, int) and int(value) != value:
            raise ValueError("it is not a whole number")
    elif pa.types.is_float32(t):
        if isinstance(value, float) and math.isfinite(value) and abs(value) > _FLOAT32_MAX:
            raise ValueError("the value is out of the range of float32")
    elif pa.types.is_decimal(t):
        if isinstance(value, decimal.Decimal):
            near(value)
    elif pa.types.is_struct(t):
        if isinstance(value, dict):
            names = [t.field(i).name for i in range(t.num_fields)]
            if unknown := [name for name in value if name not in names]:
                raise ValueError(f"the struct has no field {unknown[0]!r}; fields: {', '.join(names)}")
            for name, child in value.items():
                _check_value(child, t.field(name).type)
    elif pa.types.is_map(t):
        for key, item in value.items() if isinstance(value, dict) else value:
            _check_value(key, t.key_type)
            _check_value(item, t.item_type)
    elif _is_any_list(t) and _is_loose(t):
        for item in value:
            _check_value(item, t.value_type)


# Arrow to the schema


def _fit(table: pa.Table, schema: pa.Schema, required: Sequence[str], what: str) -> pa.Table:
    names = table.column_names
    _check_unique(names, what)
    _check_known(names, schema, what)
    if missing := [name for name in required if name not in names]:
        listed = ", ".join(repr(name) for name in missing)
        raise SchemaMismatchError(f"{what}: lacks {listed}: add the missing columns", column=missing[0])
    fields = [f for f in schema if f.name in names]
    columns = [_cast(table.column(f.name), f, what) for f in fields]
    return pa.Table.from_arrays(columns, schema=schema if len(fields) == len(schema) else pa.schema(fields))


def _check_unique(names: list[Any], what: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaMismatchError(f"{what}: column {twice!r} is there twice: rename or drop one", column=str(twice))


def _check_known(names: list[Any], schema: pa.Schema, what: str) -> None:
    known = set(schema.names)
    for name in names:
        if name in known:
            continue
        if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
            raise SchemaMismatchError(f"{what}: {name!r} is reserved for a system column: drop it", column=name)
        hint = nearest_name(str(name), schema.names)
        raise ColumnNotFoundError(f"{what}: there is no column {name!r}; {hint}", column=str(name))


def _mismatch(problem: str, field: pa.Field, what: str, **context: object) -> SchemaMismatchError:
    message = f"{what}: column {field.name!r} is {field.type}: {problem}"
    return SchemaMismatchError(message, column=field.name, expected=str(field.type), **context)


def _cast(column: pa.ChunkedArray, field: pa.Field, what: str) -> pa.ChunkedArray:
    source, target = column.type, field.type
    if source == target:
        return column
    if not _fits(source, target):
        raise _mismatch(f"{source} does not fit; {_remedy(source, target)}", field, what, actual=str(source))
    try:
        if _is_encoded(source):
            chunks = [_decode(chunk).cast(_nullable_inside(target)) for chunk in column.chunks]
        elif requires_inside(target):
            chunks = column.cast(_nullable_inside(target)).chunks
        else:
            return column.cast(target)
        return pa.chunked_array([pa.array(_Relabelled(chunk, target)) for chunk in chunks], target)
    except _CONVERSION_ERRORS as e:
        raise _mismatch(f"a value of {source} does not fit: {e}", field, what, actual=str(source)) from e


class _Relabelled:
    """An array's buffers under a type that differs in the nullability of children only.

    Arrow's cast refuses a null child of a null parent, which is no null at all; `check_nulls` looks properly.
    """

    def __init__(self, array: pa.Array, t: pa.DataType) -> None:
        self._array, self._type = array, t

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self._type.__arrow_c_schema__(), self._array.__arrow_c_array__()[1]


def _nullable_inside(t: pa.DataType) -> pa.DataType:
    """The type with every list item, map value and struct field nullable."""
    if pa.types.is_struct(t):
        return pa.struct([(t.field(i).name, _nullable_inside(t.field(i).type)) for i in range(t.num_fields)])
    if pa.types.is_map(t):
        return pa.map_(_nullable_inside(t.key_type), _nullable_inside(t.item_type))
    if pa.types.is_list(t):
        return pa.list_(_nullable_inside(t.value_type))
    return pa.large_list(_nullable_inside(t.value_type)) if pa.types.is_large_list(t) else t


def _remedy(source: pa.DataType, target: pa.DataType) -> str:
    if pa.types.is_timestamp(source) and pa.types.is_timestamp(target):
        return "give the timestamps a zone" if target.tz else "cast the timestamps to ones without a zone"
    if pa.types.is_floating(source) and pa.types.is_floating(target):
        return "round by casting, if that is meant"
    return "cast the column first"


def _fits(source: pa.DataType, target: pa.DataType) -> bool:
    """True when the types are of one family, so that a safe cast decides by the values."""
    types = pa.types
    if types.is_dictionary(source):
        return _fits(source.value_type, target)
    if source == target or types.is_null(source):
        return True
    if types.is_struct(source) and types.is_struct(target):
        theirs = [source.field(i).name for i in range(source.num_fields)]
        ours = [target.field(i).name for i in range(target.num_fields)]
        return sorted(theirs) == sorted(ours) and all(_fits(source.field(n).type, target.field(n).type) for n in ours)
    if types.is_map(source) and types.is_map(target):
        return _fits(source.key_type, target.key_type) and _fits(source.item_type, target.item_type)
    if _is_any_list(source) and _is_any_list(target):
        return _fits(source.value_type, target.value_type)
    if types.is_timestamp(source) and types.is_timestamp(target):
        return (source.tz is None) == (target.tz is None)
    if types.is_floating(target):
        return types.is_integer(source) or (types.is_floating(source) and source.bit_width <= target.bit_width)
    families = (types.is_integer, types.is_decimal, types.is_date, types.is_time, _is_any_string, _is_any_binary)
    return any(family(source) and family(target) for family in families)


def _is_any_string(t: pa.DataType) -> bool:
    return pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t)


def _is_any_binary(t: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(t) or types.is_large_binary(t) or types.is_binary_view(t) or types.is_fixed_size_binary(t)


def _is_any_list(t: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(t) or types.is_large_list(t) or types.is_fixed_size_list(t) or _is_any_view_list(t)


def _is_any_view_list(t: pa.DataType) -> bool:
    return pa.types.is_list_view(t) or pa.types.is_large_list_view(t)


@functools.lru_cache(maxsize=1024)
def _is_encoded(t: pa.DataType) -> bool:
    """True for dictionaries and list views, at any level."""
    if pa.types.is_dictionary(t) or _is_any_view_list(t):
        return True
    return pa.types.is_nested(t) and any(_is_encoded(t.field(i).type) for i in range(t.num_fields))


def _decode(array: pa.Array) -> pa.Array:
    """The same values without dictionaries and list views.

    By hand, as Arrow 26 cannot cast a dictionary of string views (Polars' categoricals) and makes invalid arrays of
    list views that hold nulls.
    """
    t = array.type
    if not _is_encoded(t):
        return array
    if pa.types.is_dictionary(t):
        values = _decode(array.dictionary)
        if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
            values = values.cast(pa.large_string() if pa.types.is_string_view(values.type) else pa.large_binary())
        return values.take(array.indices)
    missing = array.is_null()
    if pa.types.is_struct(t):
        children = [_decode(array.field(i)) for i in range(t.num_fields)]
        fields = [pa.field(t.field(i).name, child.type) for i, child in enumerate(children)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=missing)
    if pa.types.is_map(t):
        pairs = array.filter(array.is_valid())
        first, last = pairs.offsets[0].as_py(), pairs.offsets[-1].as_py()
        keys, items = (_decode(part.slice(first, last - first)) for part in (pairs.keys, pairs.items))
        lengths = np.zeros(len(array), np.int64)
        lengths[array.is_valid().to_numpy(zero_copy_only=False)] = np.diff(pairs.offsets.to_numpy())
        return pa.MapArray.from_arrays(_offsets(lengths).cast(pa.int32()), keys, items, mask=missing)
    # Every list type: flatten leaves out what null lists hold.
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return pa.LargeListArray.from_arrays(_offsets(lengths), _decode(array.flatten()), mask=missing)


def _offsets(lengths: npt.NDArray[Any]) -> pa.Array:
    return to_arrow(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))
