"""Types of SQL filters: which type two values meet in, how they get there, and what CAST does."""

from __future__ import annotations

from collections.abc import Callable
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
_CALENDAR_DAYS = 146_097
"""In 400 years, after which the calendar repeats itself."""
_TEXT_DAYS = (-719_162, 11_248_737)
"""Years 1 to 32767."""


def in_utc(x: pc.Expression, t: pa.DataType) -> pc.Expression:
    return x.cast(pa.timestamp(t.unit, "UTC")) if pa.types.is_timestamp(t) and t.tz else x


def calendar_part(part: Callable[..., pc.Expression], x: pc.Expression, t: pa.DataType) -> pc.Expression:
    """The year, month or day of a date or timestamp, as int64; null of an infinite one.

    Args:
        part: Arrow's function for it, which goes wrong some thirty thousand years from now: it is asked of the day's
            like within 400 years of 1970, as the calendar repeats itself after so many.
    """
    number = x.cast(_integer_of(t))
    number = number if pa.types.is_timestamp(t) else number.cast(pa.int64())
    if pa.types.is_timestamp(t) and t.unit == "ns":  # in which there are not so many years
        found = part(number.cast(pa.timestamp("ns"))).cast(pa.int64())
    else:
        span = pc.scalar(_CALENDAR_DAYS * _per_day(t))
        spans = pc.divide(number, span)
        like = pc.subtract(number, pc.multiply(spans, span)).cast(_integer_of(t))
        found = part(like.cast(pa.timestamp(t.unit) if pa.types.is_timestamp(t) else t)).cast(pa.int64())
        found = pc.add(found, pc.multiply(spans, pc.scalar(400))) if part is pc.year else found
    return pc.if_else(_is_infinite(number, t), pc.scalar(pa.scalar(None, pa.int64())), found)


def _integer_of(t: pa.DataType) -> pa.DataType:
    return pa.int32() if pa.types.is_date32(t) else pa.int64()


def _per_day(t: pa.DataType) -> int:
    return 1 if pa.types.is_date(t) else {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}[t.unit]


def _infinity(t: pa.DataType) -> int:
    """What DuckDB reads as the infinite date or timestamp; negated, as the one before all others."""
    return (1 << _integer_of(t).bit_width - 1) - 1


def _is_infinite(number: pc.Expression, t: pa.DataType) -> pc.Expression:
    end = _infinity(t)
    return pc.or_kleene(pc.equal(number, pc.scalar(end)), pc.equal(number, pc.scalar(-end)))


def _date_of(x: pc.Expression, t: pa.DataType) -> pc.Expression:
    """The day of a timestamp, in UTC; that of an infinite one is infinite.

    Arrow's own cast of seconds and milliseconds goes on from the other end where there is no such date.
    """
    number, days = x.cast(pa.int64()), pa.date32()
    finite = pc.if_else(_is_infinite(number, t), pc.scalar(pa.scalar(None, pa.int64())), number)
    stamp = finite.cast(pa.timestamp(t.unit))
    ends = [pc.scalar(pa.scalar(sign * _infinity(days), pa.int32())) for sign in (1, -1)]
    infinite = pc.if_else(pc.equal(number, pc.scalar(_infinity(t))), *ends)
    day = (stamp.cast(pa.timestamp("us")) if t.unit in ("s", "ms") else stamp).cast(days).cast(pa.int32())
    return pc.if_else(_is_infinite(number, t), infinite, day).cast(days)


def _date_text(x: pc.Expression) -> pc.Expression:
    """A date as text; fails for one that SQL writes otherwise than Arrow: before year 1, after 32767."""
    number = x.cast(pa.int32()).cast(pa.int64())
    first, last = map(pc.scalar, _TEXT_DAYS)
    inside = pc.and_kleene(pc.greater_equal(number, first), pc.less_equal(number, last))
    return pc.if_else(inside, number, pc.scalar(1 << 62)).cast(pa.int32()).cast(pa.date32()).cast(pa.string())


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
        if types.is_float64(target):
            try:
                return float(literal)
            except ValueError as e:
                raise InvalidPredicateError(f"a filter casts {literal!r} to a number, which it is not") from e
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
            x = pc.round(x, round_mode="half_to_even" if types.is_floating(s) else "half_towards_infinity")
        if types.is_decimal(target) and types.is_decimal(s) and target.scale < s.scale:
            x = pc.round(x, ndigits=target.scale, round_mode="half_towards_infinity")
        if types.is_decimal(target) and types.is_integer(s):
            return x.cast(as_decimal(s)).cast(target)
        return x.cast(target, safe=not types.is_floating(target))
    if lit.is_text(target) and types.is_date32(s):
        return _date_text(x)
    if lit.is_text(target) and (types.is_integer(s) or types.is_boolean(s) or lit.is_text(s)):
        return x.cast(target)
    if lit.is_text(s) and (types.is_integer(target) or types.is_floating(target) or types.is_date(target)):
        return x.cast(target)
    if types.is_timestamp(s) and types.is_date(target):
        return _date_of(x, s)
    if types.is_date(s) and types.is_timestamp(target):
        return convert(x, s, target)
    if types.is_timestamp(s) and types.is_timestamp(target):
        if s.tz and not target.tz:
            return pc.cast(in_utc(x, s), target, safe=False)
        return convert(x.cast(pa.timestamp(target.unit, s.tz), safe=False), pa.timestamp(target.unit, s.tz), target)
    if types.is_boolean(s) and types.is_integer(target):
        return x.cast(target)
    raise InvalidPredicateError(f"a filter casts a value of type {s} to {target}, which is not supported")
