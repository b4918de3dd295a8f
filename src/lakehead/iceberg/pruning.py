"""Bounds of a filter as the row filter by which PyIceberg skips partitions and files.

Skipping is all it is for: a bound that Iceberg cannot express, or would read otherwise than we do, is left out.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyiceberg.expressions as ice
from pyiceberg.expressions.literals import BinaryLiteral, DecimalLiteral, DoubleLiteral, LongLiteral, literal
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

from lakehead.predicate import Bound
from lakehead.types import children

# PyIceberg's own type hints describe the models' fields, not their constructors.
_COMPARE: dict[str, Any] = {
    "==": ice.EqualTo,
    "<": ice.LessThan,
    "<=": ice.LessThanOrEqual,
    ">": ice.GreaterThan,
    ">=": ice.GreaterThanOrEqual,
}
_IN: Any = ice.In
_MEMBERS_MAX = 200
"""With more members of a list PyIceberg compares no bounds of files, but takes each of them into account, many times
over: their ends tell more, and at once."""
_IS_NAN: Any = ice.IsNaN
_NULL_TESTS: dict[str, Any] = {"is_null": ice.IsNull, "not_null": ice.NotNull}
_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


def row_filter(bounds: Sequence[Bound], schema: Schema, *, parted: Collection[str] = ()) -> ice.BooleanExpression:
    """A necessary condition for rows to satisfy all bounds, over the columns of an Iceberg schema.

    Args:
        parted: columns of which a file has one value: lists of them are compared with that, however long.
    """
    whole: ice.BooleanExpression = ice.AlwaysTrue()
    for bound in (part for b in bounds for part in (_ends(b) if b.column not in parted else [b])):
        part = _condition(bound, schema)
        if part is not None:
            whole = ice.And(whole, part)
    return whole


def _ends(bound: Bound) -> Sequence[Bound]:
    """The bound; of a long list its least and its greatest member."""
    if bound.op != "in" or not bound.ordered or len(bound.ordered) <= _MEMBERS_MAX:
        return [bound]
    return [Bound(bound.column, ">=", bound.ordered[0]), Bound(bound.column, "<=", bound.ordered[-1])]


def rounded_columns(schema: Schema, own: pa.Schema) -> frozenset[str]:
    """Columns with floats that another engine has made doubles in the lake.

    A double that it writes there is read as the float beside it, so neither bounds nor comparisons of what is stored
    tell which rows match.
    """
    floats = {f.name: f.type for f in own if _count(f.type, pa.float32())}
    lake = {f.name: f.field_type for f in schema.fields if f.name in floats} if floats else {}
    return frozenset(name for name, t in lake.items() if _doubles(t) > _count(floats[name], pa.float64()))


def _count(t: pa.DataType, wanted: pa.DataType) -> int:
    return int(t == wanted) + sum(_count(f.type, wanted) for f in children(t))


def _doubles(t: IcebergType) -> int:
    if isinstance(t, StructType):
        return sum(_doubles(f.field_type) for f in t.fields)
    if isinstance(t, ListType):
        return _doubles(t.element_type)
    if isinstance(t, MapType):
        return _doubles(t.key_type) + _doubles(t.value_type)
    return int(isinstance(t, DoubleType))


def _condition(bound: Bound, schema: Schema) -> ice.BooleanExpression | None:
    # A dotted name would lead PyIceberg into a struct.
    if "." in bound.column or bound.column not in schema.column_names:
        return None
    if bound.op in _NULL_TESTS:
        test: ice.BooleanExpression = _NULL_TESTS[bound.op](bound.column)
        return test
    t = schema.find_type(bound.column)
    if bound.op == "in":
        assert isinstance(bound.value, tuple), bound
        values = [_literal(v, t) for v in bound.value]
        if any(v is None for v in values):
            return None
        member: ice.BooleanExpression = _IN(bound.column, set(values))
        return member
    value = _literal(bound.value, t)
    op: str = bound.op
    if value is None:
        return None
    if isinstance(t, FloatType | DoubleType):
        # A double rounded to a float may be a value that the other is still less, or greater, than.
        op = {"<": "<=", ">": ">="}.get(op, op)
    condition: ice.BooleanExpression = _COMPARE[op](bound.column, value)
    if isinstance(t, FloatType | DoubleType) and op == ">=":
        # NaN is greater than every number here, and lies in no bounds: files count it.
        condition = ice.Or(condition, _IS_NAN(bound.column))
    return condition


def _literal(value: object, t: IcebergType) -> Any:
    """The value as Iceberg compares it with a column of this type, or None."""
    if isinstance(value, bool):
        return literal(value) if isinstance(t, BooleanType) else None
    if isinstance(value, dt.datetime):
        naive = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        micros = (naive - _EPOCH) // _MICROSECOND
        return LongLiteral(micros) if isinstance(t, TimestampType | TimestamptzType) else None
    if isinstance(value, dt.date):
        return LongLiteral((value - _EPOCH.date()).days) if isinstance(t, DateType) else None
    if isinstance(value, dt.time):
        micros = (dt.datetime.combine(_EPOCH, value) - _EPOCH) // _MICROSECOND
        return LongLiteral(micros) if isinstance(t, TimeType) else None
    if isinstance(t, DecimalType):
        return _decimal(Decimal(value), t) if isinstance(value, int | Decimal) else None
    if isinstance(t, IntegerType | LongType):
        return LongLiteral(value) if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None
    if isinstance(t, FloatType | DoubleType):
        # PyIceberg takes infinity for a value that no float reaches.
        fits = isinstance(value, int | float) and (isinstance(t, DoubleType) or abs(value) <= FloatType.max)
        return DoubleLiteral(float(value)) if fits and value == value else None  # type: ignore[arg-type]
    if isinstance(t, StringType):
        return literal(value) if isinstance(value, str) else None
    if isinstance(t, BinaryType) or (isinstance(t, FixedType) and isinstance(value, bytes) and len(value) == len(t)):
        return BinaryLiteral(value) if isinstance(value, bytes) else None
    return None


def _decimal(value: Decimal, t: DecimalType) -> Any:
    if not value.is_finite():
        return None
    # By digits: arithmetic of decimals rounds to the thread's context.
    scaled = Fraction(value) * 10**t.scale
    if scaled.denominator != 1 or abs(scaled) >= 10**t.precision:
        return None
    sign, digits, _ = Decimal(scaled.numerator).as_tuple()
    return DecimalLiteral(Decimal((sign, digits, -t.scale)))
