"""Types of SQL filters: which type two values meet in, how they get there, and what CAST does."""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import InvalidPredicateError
from lakehead.predicate import literals as lit
from lakehead.predicate.literals import Literal

CAST_TYPES = {
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMPNTZ": pa.timestamp("us"),
    "TIMESTAMPTZ": pa.timestamp("us", "UTC"),
    "TEXT": pa.string(),
    "VARCHAR": pa.string(),
    "VARBINARY": pa.binary(),
}


def in_utc(x: pc.Expression, t: pa.DataType) -> pc.Expression:
    return x.cast(pa.timestamp(t.unit, "UTC")) if pa.types.is_timestamp(t) and t.tz else x


def as_decimal(t: pa.DataType) -> pa.DataType:
    return pa.decimal128(min(38, len(str(1 << t.bit_width))), 0) if pa.types.is_integer(t) else t


def decimal_result(kind: str, s: pa.DataType, t: pa.DataType) -> pa.DataType | None:
    scale = s.scale + t.scale if kind == "Mul" else max(s.scale, t.scale)
    whole = s.precision - s.scale, t.precision - t.scale
    precision = s.precision + t.precision + 1 if kind == "Mul" else max(whole) + scale + 1
    return pa.decimal128(precision, scale) if precision <= 38 else None


def common_type(s: pa.DataType, t: pa.DataType) -> pa.DataType | None:
    """The type in which SQL compares values of two types, or None where they do not compare."""
    types = pa.types
    if types.is_null(s) or types.is_null(t) or s == t:
        common = t if types.is_null(s) else s
        return None if types.is_nested(common) or types.is_dictionary(common) else common
    if lit.is_number(s) and lit.is_number(t):
        if types.is_floating(s) or types.is_floating(t):
            both = [u for u in (s, t) if types.is_floating(u)]
            return pa.float64() if any(types.is_float64(u) for u in both) else pa.float32()
        if types.is_integer(s) and types.is_integer(t) and pa.uint64() not in (s, t):
            return pa.int64()
        a, b = as_decimal(s), as_decimal(t)
        scale = max(a.scale, b.scale)
        precision = max(a.precision - a.scale, b.precision - b.scale) + scale
        return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)
    if lit.is_text(s) and lit.is_text(t):
        return pa.large_string()
    if lit.is_bytes(s) and lit.is_bytes(t):
        return pa.large_binary()
    if types.is_time(s) and types.is_time(t):
        return pa.time64("ns")
    if (types.is_date(s) or types.is_timestamp(s)) and (types.is_date(t) or types.is_timestamp(t)):
        stamps = [u for u in (s, t) if types.is_timestamp(u)]
        unit = max((u.unit for u in stamps), key=["s", "ms", "us", "ns"].index, default="ms")
        return pa.timestamp(unit, "UTC" if any(u.tz for u in stamps) else None)
    return None


def convert(x: pc.Expression, s: pa.DataType, t: pa.DataType) -> pc.Expression:
    """Widen x from s to the common type t."""
    if s == t:
        return x
    if pa.types.is_timestamp(t) and t.tz and not (pa.types.is_timestamp(s) and s.tz):
        return pc.assume_timezone(x.cast(pa.timestamp(t.unit)), "UTC")
    return x.cast(t, safe=not pa.types.is_floating(t))


def fold(kind: str, a: Literal, b: Literal) -> Literal:
    """Sum, difference or product of two literal numbers, exactly; None where it is not that."""
    for x in (a, b):
        if isinstance(x, bool) or not isinstance(x, int | float | Decimal):
            return None
    assert isinstance(a, int | float | Decimal) and isinstance(b, int | float | Decimal)
    if isinstance(a, float) or isinstance(b, float):
        a, b = float(a), float(b)
        return {"Add": a + b, "Sub": a - b, "Mul": a * b}.get(kind)
    if len(str(a)) + len(str(b)) > 27:
        return None
    x, y = Decimal(a), Decimal(b)
    result = {"Add": x + y, "Sub": x - y, "Mul": x * y}.get(kind)
    return int(result) if result is not None and isinstance(a, int) and isinstance(b, int) else result


def cast_literal(literal: Literal, target: pa.DataType) -> Literal:
    """The literal as one of the target type where nothing is lost; None leaves the cast to Arrow."""
    types = pa.types
    if isinstance(literal, str):
        if types.is_date(target):
            return lit.parse_date(literal)
        if types.is_timestamp(target):
            stamp = lit.parse_timestamp(literal)
            if stamp.zoned and not target.tz:
                raise InvalidPredicateError(f"a filter holds timestamp {literal!r} with a zone: write timestamptz")
            return lit.TimestampLiteral(stamp.ns, zoned=target.tz is not None)
        if types.is_time(target):
            return lit.parse_time(literal)
        if types.is_binary(target):
            return lit.parse_blob(literal)
        if lit.is_text(target):
            return literal
        if types.is_floating(target):
            try:
                number = float(literal)
            except ValueError as e:
                raise InvalidPredicateError(f"a filter casts {literal!r} to a number, which it is not") from e
            if types.is_float64(target) or not math.isfinite(number):
                return number
        if not lit.is_number(target):
            return None
        literal = lit.parse_number(literal)
    if isinstance(literal, bool):
        return literal if types.is_boolean(target) else None
    if isinstance(literal, int | Decimal):
        if types.is_float64(target):
            return float(literal)
        if types.is_integer(target) and literal == int(literal) and abs(literal) < 1 << target.bit_width - 1:
            return int(literal)
        if types.is_decimal(target):
            scaled = Decimal(literal).as_tuple()
            whole = len(scaled.digits) + int(scaled.exponent)
            if -int(scaled.exponent) <= target.scale and whole <= target.precision - target.scale:
                return Decimal(literal)
    return None


def _rounded(x: pc.Expression, s: pa.Decimal128Type, digits: int) -> pc.Expression:
    """A decimal of type ``s`` with so many digits behind the point, and room for one more before it: where 9.9 would
    be 10, Arrow fails, or says 0 where the column has nulls."""
    wide = pa.decimal128(s.precision + 1, s.scale) if s.precision < 38 else pa.decimal256(s.precision + 1, s.scale)
    return pc.round(x.cast(wide), ndigits=digits, round_mode="half_towards_infinity")


def cast_expression(x: pc.Expression, s: pa.DataType, target: pa.DataType) -> pc.Expression:
    """SQL's CAST: numbers round, timestamps truncate to dates.

    Raises:
        InvalidPredicateError: there is no such cast.
    """
    types = pa.types
    if s == target or types.is_null(s):
        return x.cast(target)
    if lit.is_number(s) and lit.is_number(target):
        if types.is_integer(target) and not types.is_integer(s):
            x = pc.round(x, round_mode="half_to_even") if types.is_floating(s) else _rounded(x, s, 0)
        if types.is_decimal(target) and types.is_decimal(s) and target.scale < s.scale:
            x = _rounded(x, s, target.scale)
        if types.is_decimal(target) and types.is_integer(s):
            return x.cast(as_decimal(s)).cast(target)
        return x.cast(target, safe=not types.is_floating(target))
    if lit.is_text(target) and (types.is_integer(s) or types.is_boolean(s) or types.is_date(s) or lit.is_text(s)):
        return x.cast(target)
    if lit.is_text(s) and (types.is_integer(target) or types.is_floating(target) or types.is_date(target)):
        return x.cast(target)
    if types.is_timestamp(s) and types.is_date(target):
        return in_utc(x, s).cast(target)
    if types.is_date(s) and types.is_timestamp(target):
        return convert(x, s, target)
    if types.is_timestamp(s) and types.is_timestamp(target):
        if s.tz and not target.tz:
            return in_utc(x, s).cast(target, safe=False)
        return convert(x.cast(pa.timestamp(target.unit, s.tz), safe=False), pa.timestamp(target.unit, s.tz), target)
    if types.is_boolean(s) and types.is_integer(target):
        return x.cast(target)
    raise InvalidPredicateError(f"a filter casts a value of type {s} to {target}, which is not supported")
