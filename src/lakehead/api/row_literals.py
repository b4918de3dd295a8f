"""Few rows as text of SQL. To have a statement read them from Arrow takes DuckDB several times as long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from lakehead.format.per_schema import once_per_schema
from lakehead.format.plain import is_text

VALUES_MAX = 128
"""Of so many Arrow takes no longer."""
_BYTES_MAX = 1 << 14
"""What a parser should not have to read more than."""
_INTEGERS = {pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "integer", pa.int64(): "bigint"}
_MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1}
_DAY_MICROS = 86_400_000_000
_YEARS_MICROS = 7_000 * 365 * _DAY_MICROS
"""Nearer to 1970 than this no moment is beyond what DuckDB has, or one of its infinities."""
_Literal = Callable[[Any], str | None]


def are_texts(schema: pa.Schema) -> bool:
    """Whether rows of these columns are texts, but for some values."""
    return _columns(schema) is not None


def rows_as_query(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> str | None:
    """A query whose rows are these plain rows (`lakehead.format.plain`), with DuckDB's types of the columns; None where
    a value is no text, or a long one.

    Args:
        schema: of the columns, which `are_texts`.
        rows: of `VALUES_MAX` values in all, unless it is one.
    """
    columns = _columns(schema) or ()
    queries, size = [], 0
    for row in rows or [[None] * len(columns)]:
        texts = []
        for (name, duckdb_type, literal), value in zip(columns, row, strict=True):
            text = "null" if value is None else literal(value)
            if text is None or (size := size + len(text)) > _BYTES_MAX:
                return None
            texts.append(f"({text})::{duckdb_type} as {name}")
        queries.append(f"select {', '.join(texts)}{'' if rows else ' where false'}")
    return " union all ".join(queries)


@once_per_schema
def _columns(schema: pa.Schema) -> list[tuple[str, str, _Literal]] | None:
    columns = []
    for field in schema:
        told = _type(field.type)
        if told is None:
            return None
        columns.append(('"{}"'.format(field.name.replace('"', '""')), *told))
    return columns


def _type(t: pa.DataType) -> tuple[str, _Literal] | None:
    if t in _INTEGERS:
        return _INTEGERS[t], str
    if pa.types.is_boolean(t):
        return "boolean", str
    if pa.types.is_float32(t) or pa.types.is_float64(t):
        return "float" if pa.types.is_float32(t) else "double", _number
    if is_text(t):
        return "varchar", _quoted
    if pa.types.is_binary(t) or pa.types.is_large_binary(t):
        return "blob", _bytes
    if pa.types.is_date32(t):
        return "date", _day
    if pa.types.is_timestamp(t) and t.unit in _MICROS:
        name = {"s": "timestamp_s", "ms": "timestamp_ms", "us": "timestamp"}[t.unit]
        return name if t.tz is None else "timestamptz", _moment(_MICROS[t.unit])
    return None


def _number(value: float) -> str:
    return f"'{float(value)!r}'" if not math.isnan(value) else "'nan'"


def _quoted(value: str) -> str | None:
    return None if "\0" in value else "'{}'".format(value.replace("'", "''"))


def _bytes(value: bytes) -> str | None:
    return f"from_hex('{value.hex()}')" if len(value) < _BYTES_MAX else None


def _day(value: int) -> str | None:
    return f"date '1970-01-01' + {value}" if abs(value) * _DAY_MICROS < _YEARS_MICROS else None


def _moment(micros: int) -> _Literal:
    def literal(value: int) -> str | None:
        at = value * micros
        return f"make_timestamp({at})" if abs(at) < _YEARS_MICROS else None

    return literal
