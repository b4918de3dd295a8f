"""Values as people type them and JSON holds them, made into values of a column's type."""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from lakehead.errors import InvalidRequestError, SchemaMismatchError

_DAY_AND_ZONE = re.compile(r"\d{4}-\d\d-\d\d[^\sTt]")
_INFINITE = re.compile("inf|nan", re.IGNORECASE)
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FAILURES = (ValueError, ArithmeticError, TypeError, AttributeError, RecursionError)


def parse_text(text: str, field: pa.Field) -> Any:
    """The value of a column that a command-line argument stands for.

    Times are ISO 8601, binary values hexadecimal, booleans ``true`` and ``false``, nested values JSON.

    Raises:
        SchemaMismatchError: the text is none of that type.
    """
    try:
        return _from_text(text, field.type)
    except _FAILURES as e:
        raise SchemaMismatchError(
            f"{text!r} is no value of column {field.name!r}, which has the type {field.type}: {example(field.type)}",
            column=field.name,
        ) from e


def _from_text(text: str, t: pa.DataType) -> Any:
    types = pa.types
    if types.is_string(t) or types.is_large_string(t):
        return text
    if types.is_boolean(t):
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _refuse(text)
    if types.is_integer(t):
        return int(text)
    if types.is_floating(t):
        return float(text) if _INFINITE.search(text) else _float(decimal.Decimal(text))
    if types.is_nested(t):
        return from_json(t)(json.loads(text, parse_float=decimal.Decimal))
    return from_json(t)(text)


def from_json(t: pa.DataType) -> Callable[[Any], Any]:
    """A function from a JSON value to a Python value that Arrow takes for the type; nulls stay. Numbers, texts and
    booleans that need no change pass through unchecked: writing checks them.

    Raises (the function):
        ValueError, TypeError, ArithmeticError: the value is none of that type.
    """
    inner = _converter(t)
    return lambda value: None if value is None else inner(value)


def passes_through(t: pa.DataType) -> bool:
    """True when JSON values of the type need no change."""
    types = pa.types
    return bool(types.is_boolean(t) or types.is_integer(t) or _is_text(t))


def _is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t))


@functools.lru_cache(maxsize=1024)
def _converter(t: pa.DataType) -> Callable[[Any], Any]:
    types = pa.types
    if types.is_floating(t):
        return _float
    if types.is_decimal(t):
        return _decimal
    if types.is_binary(t) or types.is_large_binary(t) or types.is_fixed_size_binary(t):
        return bytes.fromhex
    if types.is_date(t):
        return dt.date.fromisoformat
    if types.is_time(t):
        return dt.time.fromisoformat
    if types.is_timestamp(t):
        return functools.partial(_timestamp, zoned=t.tz is not None)
    if types.is_struct(t):
        children = {t.field(i).name: from_json(t.field(i).type) for i in range(t.num_fields)}
        return lambda value: {k: children.get(k, _same)(v) for k, v in value.items()}
    if types.is_map(t):
        return functools.partial(_entries, t=t)
    if types.is_list(t) or types.is_large_list(t):
        each = from_json(t.value_type)
        return lambda value: [each(v) for v in value] if isinstance(value, list) else _refuse(value)
    return _same


def _entries(value: Any, *, t: pa.DataType) -> list[tuple[Any, Any]]:
    """Of an object, whose keys are texts, or of pairs, as the command line writes them."""
    item = from_json(t.item_type)
    if isinstance(value, dict):
        return [(_from_text(k, t.key_type), item(v)) for k, v in value.items()]
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        _refuse(value)
    key = from_json(t.key_type)
    return [(key(k), item(v)) for k, v in value]


def _same(value: Any) -> Any:
    return value


def _refuse(value: object) -> Any:
    raise ValueError(f"{value!r} has another form")


def _float(value: Any) -> Any:
    """A number that was read as a decimal as the nearest float, and the texts for what JSON's numbers lack; what is no
    number is checked by writing."""
    if not isinstance(value, decimal.Decimal):
        return _NO_NUMBERS.get(value, value) if isinstance(value, str) else value
    found = float(value)
    return _refuse(value) if math.isinf(found) else found


def _decimal(value: Any) -> decimal.Decimal:
    if isinstance(value, bool | float):
        _refuse(value)
    return decimal.Decimal(value)


def _timestamp(text: str, *, zoned: bool) -> dt.datetime:
    time = _iso_time(text)
    if (time.tzinfo is not None) != zoned:
        raise ValueError("a zone is missing" if zoned else "there is a zone, but the column has none")
    return time


def example(t: pa.DataType) -> str:
    """How a value of the type is written, for errors."""
    types = pa.types
    if types.is_timestamp(t):
        return "write for example 2026-01-31T12:00:00" + ("Z" if t.tz else "")
    if types.is_date(t):
        return "write for example 2026-01-31"
    if types.is_time(t):
        return "write for example 12:00:00"
    if types.is_boolean(t):
        return "write true or false"
    if types.is_integer(t) or types.is_floating(t) or types.is_decimal(t):
        return "write a number"
    if types.is_nested(t):
        return "write JSON"
    return "write hexadecimal digits"


def _iso_time(text: str) -> dt.datetime:
    """A time in ISO 8601. Python takes any character for what stands between date and time, so that the zone after a
    date alone would be a time of day.

    Raises:
        ValueError: it is none.
    """
    if _DAY_AND_ZONE.match(text):
        raise ValueError("there is no time of day between the date and the zone")
    return dt.datetime.fromisoformat(text)


def parse_start(text: str) -> str | dt.datetime:
    """Where a subscription starts: ``latest``, ``earliest``, ``full``, or an ISO 8601 time (UTC when it has no zone).

    Raises:
        InvalidRequestError: the text is none of these.
    """
    if text in ("latest", "earliest", "full"):
        return text
    try:
        time = _iso_time(text)
    except ValueError as e:
        raise InvalidRequestError(
            f"--start {text!r}: use latest, earliest, full, or a time such as 2026-01-31T12:00:00Z"
        ) from e
    return time if time.tzinfo else time.replace(tzinfo=dt.UTC)
