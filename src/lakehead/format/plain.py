"""One row as plain values beside Arrow: where a call is about one row, to build and to read Arrow arrays takes longer
than all the rest of it.

A *plain key* is a tuple of integers, texts and binaries. A *plain row* holds, in the order of the columns, None or what
MessagePack has: numbers, booleans, texts, binaries; dates, times and timestamps are the numbers that they are stored
as. Tables with columns of other types have no plain rows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from lakehead.format.per_schema import once_per_schema

PlainKey: TypeAlias = tuple[int | str | bytes, ...]
_EPOCH = dt.datetime(1970, 1, 1)
_DAY = _EPOCH.date()
_STORED = {32: pa.int32(), 64: pa.int64()}
_TICKS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def has_plain_rows(schema: pa.Schema) -> bool:
    """Whether all columns have plain values."""
    return _conversions(schema) is not None


class PlainRow(NamedTuple):
    """What was found by a key: the plain values of these columns; None: nothing."""

    schema: pa.Schema
    values: Sequence[Any] | None

    def to_pylist(self) -> list[dict[str, Any]]:
        """As that of a `pyarrow.Table` that holds the row, or none.

        Raises:
            OverflowError, ValueError: it holds a moment that is no Python date or datetime.
        """
        if self.values is None:
            return []
        row = dict(zip(_names(self.schema), self.values, strict=True))
        for name, convert in _conversions(self.schema) or ():
            if row[name] is not None:
                row[name] = convert(row[name])
        return [row]


def plain_rows(rows: pa.Table) -> list[tuple[Any, ...]]:
    """The plain rows of a table that has them."""
    columns = [c.cast(_STORED[c.type.bit_width]) if pa.types.is_temporal(c.type) else c for c in rows.columns]
    return list(zip(*(c.to_pylist() for c in columns), strict=True))


def are_plain(values: Sequence[Any], schema: pa.Schema) -> bool:
    """Whether these are the values of a plain row of the schema, as far as their kinds tell."""
    kinds = _kinds(schema)
    return len(values) == len(kinds) and all(
        value is None or type(value) in kind for value, kind in zip(values, kinds, strict=True)
    )


@once_per_schema
def _kinds(schema: pa.Schema) -> list[tuple[type, ...]]:
    return [
        (str,) if is_text(t)
        else (bytes,) if _is_binary(t)
        else (bool,) if pa.types.is_boolean(t)
        else (float, int) if pa.types.is_floating(t)
        else (int,)
        for t in schema.types
    ]  # fmt: skip


@once_per_schema
def _names(schema: pa.Schema) -> list[str]:
    return list(schema.names)


@once_per_schema
def _conversions(schema: pa.Schema) -> list[tuple[str, Callable[[int], object]]] | None:
    """Columns whose plain values are not the values themselves; None: some have none."""
    conversions = []
    for name, t in zip(schema.names, schema.types, strict=True):
        if pa.types.is_temporal(t):
            conversions.append((name, _moment(t)))
        elif not (
            pa.types.is_integer(t)
            or pa.types.is_float32(t)
            or pa.types.is_float64(t)
            or pa.types.is_boolean(t)
            or is_text(t)
            or _is_binary(t)
        ):
            return None
    return conversions


def _moment(t: pa.DataType) -> Callable[[int], object]:
    if pa.types.is_date32(t):
        return lambda days: _DAY + dt.timedelta(days=days)
    if not pa.types.is_timestamp(t):
        return lambda number: pa.scalar(number, t).as_py()
    ticks = _TICKS[t.unit]
    if t.tz is None:
        return lambda number: _EPOCH + dt.timedelta(microseconds=number * ticks)
    zone, epoch = pa.lib.string_to_tzinfo(t.tz), _EPOCH.replace(tzinfo=dt.UTC)
    return lambda number: (epoch + dt.timedelta(microseconds=number * ticks)).astimezone(zone)


def plain_key(key: object, schema: pa.Schema) -> PlainKey | None:
    """A key as users give it, a value, a tuple or a dict, in the order of the key columns, of which ``schema`` is made;
    None when it is no plain key of theirs."""
    if type(key) is dict:
        names = _names(schema)
        if len(key) != len(names) or not all(name in key for name in names):
            return None
        key = tuple(key[name] for name in names)
    elif type(key) is not tuple:
        key = (key,)
    fits = _fits(schema)
    if fits is None or len(fits) != len(key) or not all(fit(value) for fit, value in zip(fits, key, strict=True)):
        return None
    return key


@once_per_schema
def _fits(schema: pa.Schema) -> list[Callable[[Any], bool]] | None:
    fits: list[Callable[[Any], bool]] = []
    for t in schema.types:
        if pa.types.is_signed_integer(t):
            limit = 1 << (t.bit_width - 1)
            fits.append(lambda value, limit=limit: type(value) is int and -limit <= value < limit)  # type: ignore[misc]
        elif is_text(t):
            fits.append(_encodes)
        elif _is_binary(t):
            fits.append(lambda value: type(value) is bytes)
        else:
            return None
    return fits


def _encodes(value: object) -> bool:
    if type(value) is not str:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def is_text(t: pa.DataType) -> bool:
    """Whether values of the type are texts."""
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t))


def _is_binary(t: pa.DataType) -> bool:
    return bool(pa.types.is_binary(t) or pa.types.is_large_binary(t))
