"""Spark's pushed filters as our predicates: exactly, or not at all."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource as sd

_ORDERED = {
    sd.GreaterThan: pc.greater,
    sd.GreaterThanOrEqual: pc.greater_equal,
    sd.LessThan: pc.less,
    sd.LessThanOrEqual: pc.less_equal,
}


def translate_filters(filters: Sequence[sd.Filter], schema: pa.Schema) -> tuple[pc.Expression | None, list[sd.Filter]]:
    """One Arrow condition for all filters that mean the same in both, and the others.

    Left to Spark: comparisons of floats (Spark takes NaN for equal to itself and greatest, Arrow does not), nested
    columns, and literals that are no value of the column's type.
    """
    taken, left = [], []
    for f in filters:
        condition = _translate(f, schema)
        if condition is None:
            left.append(f)
        else:
            taken.append(condition)
    return (reduce(lambda a, b: a & b, taken) if taken else None), left


def _translate(f: sd.Filter, schema: pa.Schema) -> pc.Expression | None:
    negated = isinstance(f, sd.Not)
    inner = f.child if isinstance(f, sd.Not) else f
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if len(path) != 1 or schema.get_field_index(path[0]) < 0:
        return None
    column, t = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(inner, sd.IsNull | sd.IsNotNull):
        return column.is_null() if isinstance(inner, sd.IsNull) != negated else column.is_valid()
    if pa.types.is_floating(t) or pa.types.is_nested(t):
        return None
    if isinstance(inner, sd.In):
        return _in(column, t, inner.value, negated=negated)
    if isinstance(inner, sd.StringStartsWith | sd.StringEndsWith | sd.StringContains):
        condition = _matches(column, t, inner)
    else:
        condition = _compares(column, t, inner)
    if condition is None:
        return None
    # Both sides drop rows for which a condition is null, negated or not.
    return ~condition if negated else condition


def _in(column: pc.Expression, t: pa.DataType, values: Sequence[Any], *, negated: bool) -> pc.Expression | None:
    wanted = [v for v in values if v is not None]
    if any(_literal(v, t) is None for v in wanted):
        return None
    members = pa.array(wanted, t)
    if not negated:
        return column.is_valid() & column.isin(members)
    # x NOT IN (1, NULL) is never true.
    return pc.scalar(False) if any(v is None for v in values) else column.is_valid() & ~column.isin(members)


def _matches(column: pc.Expression, t: pa.DataType, f: Any) -> pc.Expression | None:
    if not (pa.types.is_string(t) or pa.types.is_large_string(t)):
        return None
    match = {
        sd.StringStartsWith: pc.starts_with,
        sd.StringEndsWith: pc.ends_with,
        sd.StringContains: pc.match_substring,
    }[type(f)]
    return match(column, pattern=f.value)


def _compares(column: pc.Expression, t: pa.DataType, f: Any) -> pc.Expression | None:
    if isinstance(f, sd.EqualNullSafe) and f.value is None:
        return column.is_null()
    literal = _literal(getattr(f, "value", None), t)
    if literal is None:
        return None
    if isinstance(f, sd.EqualNullSafe):
        return column.is_valid() & (column == literal)
    if isinstance(f, sd.EqualTo):
        return column == literal
    if type(f) in _ORDERED and not pa.types.is_boolean(t):
        return _ORDERED[type(f)](column, pc.scalar(literal))
    return None


def _literal(value: Any, t: pa.DataType) -> pa.Scalar | None:
    """The value as one of the column's type; None when it is not exactly one."""
    if value is None or isinstance(value, float):
        return None
    if pa.types.is_timestamp(t) and isinstance(value, dt.datetime):
        value = value.astimezone(dt.UTC) if t.tz and value.tzinfo else value
        if (t.tz is None) != (value.tzinfo is None):
            return None
    try:
        scalar = pa.scalar(value, t)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return scalar if scalar.as_py() == value else None
