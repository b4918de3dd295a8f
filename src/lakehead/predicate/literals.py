"""SQL literals of filters, and their exact comparison with a column or expression of a known Arrow type.

A literal stays an exact Python value (`Literal`) until it meets what it is compared with. Then the *literal* is moved
into that side's type, never the column: ``amount > 1.005`` on a decimal(12, 2) becomes ``amount > 1.00``, ``small <
100000`` on an int8 becomes "true unless null". So no column is cast, comparisons are exact, and bounds for skipping
data can be read off the result.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import InvalidPredicateError


@dataclass(frozen=True)
class DateLiteral:
    days: int


@dataclass(frozen=True)
class TimestampLiteral:
    ns: int
    zoned: bool


@dataclass(frozen=True)
class TimeLiteral:
    ns: int


Literal: TypeAlias = bool | int | Decimal | float | str | bytes | DateLiteral | TimestampLiteral | TimeLiteral | None

COMPARE: dict[str, Callable[[pc.Expression, pc.Expression], pc.Expression]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
# Not pa.scalar(None): the first conversion of a Python value makes Arrow import pandas, which an import must not do.
NULL_BOOLEAN = pc.scalar(pa.nulls(1, pa.bool_())[0])
DOUBLE_EXACT_MAX = 1 << 53

_DAY_NS = 86_400 * 10**9
_UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_CLOCK = r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,9}))?)?"
_TIMESTAMP = re.compile(rf"(\d{{4}}-\d{{2}}-\d{{2}})(?:[ T]{_CLOCK})?\s*(Z|UTC|[+-]\d{{2}}(?::?\d{{2}})?)?", re.ASCII)
_TIME = re.compile(_CLOCK, re.ASCII)
_DECIMAL_DIGITS = 38
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_BLOB = re.compile(rb"\\x([0-9a-fA-F]{2})|([^\\])", re.DOTALL)


def is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t))


def is_bytes(t: pa.DataType) -> bool:
    return bool(pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t))


def is_number(t: pa.DataType) -> bool:
    return bool(pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t))


def parse_number(text: str) -> int | Decimal | float:
    """A SQL number: digits are an int, with a point a Decimal, with an exponent a float.

    Raises:
        InvalidPredicateError: it is not a number, or one of more than 76 digits.
    """
    text = text.strip()
    if not _NUMBER.fullmatch(text) or (len(text) > 78 and "e" not in text.lower()):
        raise InvalidPredicateError(f"a filter holds {text[:80]!r} where a number is needed: correct the literal")
    if "e" in text.lower():
        return float(text)
    return Decimal(text) if "." in text else int(text)


def number_of(text: str) -> int | Decimal | float:
    """A number as a SQL text has it: with more digits than a decimal, or an integer of 128 bits, a double.

    Raises:
        InvalidPredicateError: as `parse_number`.
    """
    number = parse_number(text)
    long = sum(map(str.isdigit, text)) > _DECIMAL_DIGITS if isinstance(number, Decimal) else abs(number) >= 1 << 128
    return float(number) if long else number


def parse_date(text: str) -> DateLiteral:
    """``YYYY-MM-DD``, and perhaps a time, which is cut off."""
    stamp = parse_timestamp(text, "date like '2026-01-31'")
    if stamp.zoned:
        raise InvalidPredicateError(f"a filter holds {text!r} where a date like '2026-01-31' is needed")
    return DateLiteral(stamp.ns // _DAY_NS)


def parse_timestamp(text: str, wanted: str = "timestamp like '2026-01-31 10:00:00'") -> TimestampLiteral:
    """ISO date with an optional time and an optional zone offset, 'Z' or 'UTC'; cut to microseconds, as in DuckDB."""
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError("not ISO 8601")
        days = dt.date.fromisoformat(match[1]).toordinal() - dt.date(1970, 1, 1).toordinal()
        clock = _clock_ns(match[2], match[3], match[4], match[5]) if match[2] else 0
    except ValueError as e:
        raise InvalidPredicateError(f"a filter holds {text!r} where a {wanted} is needed: {e}") from e
    zone = match[6]
    shift = 0
    if zone and zone[0] in "+-":
        minutes = int(zone[1:3]) * 60 + int(zone[3:].lstrip(":") or 0)
        shift = (-minutes if zone[0] == "-" else minutes) * 60 * 10**9
    return TimestampLiteral(days * _DAY_NS + clock - shift, zone is not None)


def rounded(stamp: TimestampLiteral, unit: str) -> TimestampLiteral:
    """The moment that a text means in a column of this unit without a zone: the nearest, of two the one further from
    1970, as in DuckDB."""
    step = _UNIT_NS[unit]
    whole = (abs(stamp.ns) + step // 2) // step * step
    return TimestampLiteral(-whole if stamp.ns < 0 else whole, stamp.zoned)


def parse_time(text: str) -> TimeLiteral:
    """``HH:MM[:SS[.fraction]]``; cut to microseconds."""
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError("not a time")
        return TimeLiteral(_clock_ns(match[1], match[2], match[3], match[4]))
    except ValueError as e:
        raise InvalidPredicateError(f"a filter holds {text!r} where a time like '10:30:00' is needed: {e}") from e


def _clock_ns(hour: str, minute: str, second: str | None, fraction: str | None) -> int:
    t = dt.time(int(hour), int(minute), int(second or 0))
    return (t.hour * 3600 + t.minute * 60 + t.second) * 10**9 + int((fraction or "")[:6].ljust(6, "0")) * 1000


def parse_blob(text: str) -> bytes:
    r"""ASCII text in which ``\xHH`` stands for one byte."""
    try:
        raw = text.encode("ascii")
    except UnicodeEncodeError as e:
        raise InvalidPredicateError(f"a filter holds the binary literal {text!r}: write such bytes as \\xHH") from e
    parts = [m for m in _BLOB.finditer(raw)]
    if sum(len(m[0]) for m in parts) != len(raw):
        raise InvalidPredicateError(f"a filter holds the binary literal {text!r}: after a backslash comes xHH")
    return b"".join(bytes.fromhex(m[1].decode()) if m[1] else m[2] for m in parts)


def materialize(literal: Literal) -> tuple[pc.Expression, pa.DataType]:
    """The literal on its own, with the type SQL gives it."""
    scalar: pa.Scalar
    match literal:
        case None:
            scalar = pa.scalar(None)
        case bool() | str() | bytes():
            scalar = pa.scalar(literal)
        case float():
            scalar = pa.scalar(literal, pa.float64())
        case int() if -(1 << 63) <= literal < 1 << 63:
            scalar = pa.scalar(literal, pa.int64())
        case int() | Decimal():
            try:
                scalar = pa.scalar(Decimal(literal))
            except pa.ArrowException as e:
                raise InvalidPredicateError(f"a filter holds {literal}, which has too many digits") from e
        case DateLiteral():
            scalar = _storage(literal.days, pa.date32())
        case TimestampLiteral():
            unit = "ns" if literal.ns % 1000 else "us"
            scalar = _storage(literal.ns // _UNIT_NS[unit], pa.timestamp(unit, "UTC" if literal.zoned else None))
        case TimeLiteral():
            scalar = _storage(literal.ns, pa.time64("ns"))
    return pc.scalar(scalar), scalar.type


def _storage(value: int, t: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(value, pa.int32() if t.bit_width == 32 else pa.int64()).cast(t)
    except (pa.ArrowException, OverflowError) as e:
        raise InvalidPredicateError(f"a filter holds a literal beyond the range of {t}: {e}") from e


def _mismatch(literal: Literal, t: pa.DataType) -> InvalidPredicateError:
    shown = type(literal).__name__.removesuffix("Literal").lower() if not isinstance(literal, str) else "text"
    return InvalidPredicateError(
        f"a filter compares a value of type {t} with a {shown} literal: write a literal of that type, or use CAST"
    )


# -- types with a smallest step: integers, decimals, dates, times ---------------------------------


def is_discrete(t: pa.DataType) -> bool:
    """True for types whose values are integers of some step: their comparisons with any number can be made exact."""
    return bool(
        pa.types.is_integer(t)
        or pa.types.is_decimal(t)
        or pa.types.is_date(t)
        or pa.types.is_time(t)
        or pa.types.is_timestamp(t)
    )


def is_small(literal: Literal) -> bool:
    """Whether an integer compares with it exactly also as a double, or it is no number."""
    number = literal if isinstance(literal, int | float | Decimal) else 0
    return -DOUBLE_EXACT_MAX < number < DOUBLE_EXACT_MAX


def _compares_as_double(literal: Literal, t: pa.DataType) -> bool:
    """Whether SQL compares this type with the literal as doubles and gets another answer than the exact one."""
    return isinstance(literal, float) and (pa.types.is_decimal(t) or (pa.types.is_integer(t) and not is_small(literal)))


def _discrete_position(literal: Literal, t: pa.DataType) -> Fraction:
    """Where the literal lies on the axis of t's storage integers."""
    if pa.types.is_integer(t) or pa.types.is_decimal(t):
        if isinstance(literal, str):
            literal = parse_number(literal)
        if isinstance(literal, bool) or not isinstance(literal, int | float | Decimal):
            raise _mismatch(literal, t)
        if isinstance(literal, float) and not math.isfinite(literal):
            return Fraction(10**80 if literal > 0 else -(10**80))
        return Fraction(literal) * (Fraction(10) ** t.scale if pa.types.is_decimal(t) else 1)
    if pa.types.is_time(t):
        clock = parse_time(literal) if isinstance(literal, str) else literal
        if not isinstance(clock, TimeLiteral):
            raise _mismatch(literal, t)
        return Fraction(clock.ns, _UNIT_NS[t.unit])
    zone = t.tz if pa.types.is_timestamp(t) else None
    if isinstance(literal, str):
        stamp = parse_timestamp(literal) if pa.types.is_timestamp(t) else parse_date(literal)
        if isinstance(stamp, TimestampLiteral) and stamp.zoned and zone is None:
            raise InvalidPredicateError(
                f"a filter compares a value of type {t}, which has no time zone, with {literal!r}, a text that has one:"
                " write timestamptz before it for the moment in UTC, or leave the zone out"
            )
        literal = rounded(stamp, t.unit) if isinstance(stamp, TimestampLiteral) and zone is None else stamp
    if isinstance(literal, DateLiteral):
        literal = TimestampLiteral(literal.days * _DAY_NS, zoned=False)
    if not isinstance(literal, TimestampLiteral):
        raise _mismatch(literal, t)
    step = _UNIT_NS[t.unit] if pa.types.is_timestamp(t) else _DAY_NS if t == pa.date32() else 10**6
    return Fraction(literal.ns, step)


def _discrete_range(t: pa.DataType) -> tuple[int, int]:
    if pa.types.is_decimal(t):
        return 1 - 10**t.precision, 10**t.precision - 1
    if pa.types.is_unsigned_integer(t):
        return 0, (1 << t.bit_width) - 1
    return -(1 << t.bit_width - 1), (1 << t.bit_width - 1) - 1


def _discrete_scalar(value: int, t: pa.DataType) -> pa.Scalar:
    if pa.types.is_decimal(t):
        digits = tuple(int(d) for d in str(abs(value)))
        return pa.scalar(Decimal((value < 0, digits, -t.scale)), t)
    return pa.scalar(value, t) if pa.types.is_integer(t) else _storage(value, t)


def when_valid(x: pc.Expression, value: bool, truth: bool) -> pc.Expression:
    """``value`` where x is not null, else null; with ``truth``, null and false may stand for each other."""
    if truth:
        return x.is_valid() if value else pc.scalar(False)
    return pc.if_else(x.is_valid(), pc.scalar(value), NULL_BOOLEAN)


def _compare_discrete(op: str, x: pc.Expression, t: pa.DataType, literal: Literal, truth: bool) -> pc.Expression:
    at = _discrete_position(literal, t)
    floor = math.floor(at)
    exact = at == floor
    low, high = _discrete_range(t)
    if op in ("==", "!=") and not (exact and low <= floor <= high):
        return when_valid(x, op == "!=", truth)
    if floor < low:
        return when_valid(x, op in (">", ">="), truth)
    if floor > high:
        return when_valid(x, op in ("<", "<="), truth)
    if not exact:
        op = {"<": "<=", ">=": ">"}.get(op, op)
    return COMPARE[op](x, pc.scalar(_discrete_scalar(floor, t)))


# -- floats ---------------------------------------------------------------------------------------


def _as_double(literal: Literal, t: pa.DataType) -> float:
    if isinstance(literal, str):
        try:
            return float(literal)
        except ValueError as e:
            raise InvalidPredicateError(f"a filter compares a value of type {t} with {literal!r}: not a number") from e
    if isinstance(literal, bool) or not isinstance(literal, int | float | Decimal):
        raise _mismatch(literal, t)
    return float(literal)


def _float_scalar(literal: Literal, t: pa.DataType) -> pa.Scalar:
    """In t where SQL compares in t (plain numbers, text), else as a double (numbers with an exponent)."""
    value = _as_double(literal, t)
    if pa.types.is_float64(t) or isinstance(literal, float):
        return pa.scalar(value, pa.float64())
    with np.errstate(over="ignore"):
        narrow = np.float32(value) if pa.types.is_float32(t) else np.float16(value)
    if np.isinf(narrow) and not math.isinf(value):
        return pa.scalar(value, pa.float64())
    return pa.scalar(narrow, t)


def compare_floats(op: str, a: pc.Expression, b: pc.Expression, *, nan_right: bool | None = None) -> pc.Expression:
    """SQL's order of floats, in which NaN equals itself and is greater than every number.

    Args:
        nan_right: whether ``b`` is NaN, where that is known.
    """
    plain = COMPARE[op](a, b)
    if nan_right is False and op not in (">", ">="):
        return plain
    a_nan = pc.is_nan(a)
    b_nan = pc.is_nan(b) if nan_right is None else pc.scalar(nan_right)
    # ``plain`` is null exactly when a or b is; then no other part may be true, nor false beside "and".
    match op:
        case "==":
            return pc.or_kleene(plain, pc.and_kleene(a_nan, b_nan))
        case "!=":
            return pc.and_kleene(plain, pc.invert(pc.and_kleene(a_nan, b_nan)))
        case "<":
            return pc.or_kleene(plain, pc.and_kleene(pc.invert(a_nan), b_nan))
        case "<=":
            return pc.or_kleene(plain, pc.and_kleene(b_nan, a.is_valid()))
        case ">":
            return pc.or_kleene(plain, a_nan if nan_right is False else pc.and_kleene(a_nan, pc.invert(b_nan)))
        case _:
            return pc.or_kleene(plain, a_nan if nan_right is False else pc.and_kleene(a_nan, b.is_valid()))


# -- the two entry points -------------------------------------------------------------------------


def compare_literal(op: str, x: pc.Expression, t: pa.DataType, literal: Literal, *, truth: bool) -> pc.Expression:
    """``x op literal`` in SQL's logic, for x of type t.

    Args:
        op: a key of `COMPARE`.
        truth: the result is only asked whether it is true, so null and false may stand for each other.

    Raises:
        InvalidPredicateError: the literal cannot be compared with that type.
    """
    if literal is None:
        return NULL_BOOLEAN
    if _compares_as_double(literal, t):
        return compare_literal(op, x.cast(pa.float64(), safe=False), pa.float64(), literal, truth=truth)
    if is_discrete(t):
        return _compare_discrete(op, x, t, literal, truth)
    if pa.types.is_floating(t):
        scalar = _float_scalar(literal, t)
        if scalar.type != t:
            x = x.cast(scalar.type)
        return compare_floats(op, x, pc.scalar(scalar), nan_right=math.isnan(scalar.as_py()))
    scalar = _exact_scalar(literal, t)
    return COMPARE[op](x if scalar.type == t else x.cast(scalar.type), pc.scalar(scalar))


def _exact_scalar(literal: Literal, t: pa.DataType) -> pa.Scalar:
    if pa.types.is_boolean(t):
        if isinstance(literal, str) and literal.lower() in ("true", "false"):
            literal = literal.lower() == "true"
        if isinstance(literal, bool):
            return pa.scalar(literal)
    elif is_text(t) and isinstance(literal, str):
        return pa.scalar(literal, t)
    elif is_bytes(t) and isinstance(literal, str | bytes):
        raw = parse_blob(literal) if isinstance(literal, str) else literal
        fits = not pa.types.is_fixed_size_binary(t) or len(raw) == t.byte_width
        return pa.scalar(raw, t if fits else pa.binary())
    raise _mismatch(literal, t)


def in_literals(x: pc.Expression, t: pa.DataType, literals: Sequence[Literal], *, truth: bool) -> pc.Expression | None:
    """``x in (literals)`` in SQL's logic, or None where only a chain of comparisons is exact."""
    scalars: list[pa.Scalar] = []
    low, high = _discrete_range(t) if is_discrete(t) else (0, 0)
    for literal in literals:
        if literal is None:
            continue
        if is_discrete(t):
            if _compares_as_double(literal, t):
                return None
            at = _discrete_position(literal, t)
            if at.denominator == 1 and low <= at <= high:
                scalars.append(_discrete_scalar(int(at), t))
        elif pa.types.is_floating(t):
            scalar = _float_scalar(literal, t)
            if scalar.type != t:
                return None
            zero = scalar.as_py() == 0
            scalars += [pa.scalar(t.to_pandas_dtype()(z), t) for z in (0.0, -0.0)] if zero else [scalar]
        else:
            scalar = _exact_scalar(literal, t)
            if scalar.type != t:
                return None
            scalars.append(scalar)
    found = pc.is_in(x, value_set=pa.array(scalars, t), skip_nulls=True)
    if truth:
        return found
    if None in literals:
        return pc.if_else(found, pc.scalar(True), NULL_BOOLEAN)
    return pc.if_else(x.is_valid(), found, NULL_BOOLEAN)
