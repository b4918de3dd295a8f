"""Bounds of a filter: conditions on single columns that every matching row meets, by which data can be skipped."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeAlias, cast

import pyarrow as pa

from lakehead.predicate.literals import DOUBLE_EXACT_MAX, is_bytes, is_text
from lakehead.predicate.nodes import Call, Field, Node, Scalar

KEYS_MAX = 10_000
BoundOp: TypeAlias = Literal["==", "<", "<=", ">", ">=", "in", "is_null", "not_null"]

_BOUND_OPS: dict[str, BoundOp] = {
    "equal": "==",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_FLIPPED: dict[BoundOp, BoundOp] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}


@dataclass(frozen=True)
class Bound:
    """A condition on one top-level column that every matching row satisfies.

    ``value`` is a Python value of the column's type, a tuple of them for "in", None for the two null tests. A time with
    a zone is in UTC: in others Python compares those of an hour that comes twice by the clock, or not at all. Among
    floats NaN is greater than every number: ``>`` and ``>=`` may not skip data that can hold NaN.
    """

    column: str
    op: BoundOp
    value: object

    @functools.cached_property
    def ordered(self) -> Sequence[Any] | None:
        """The values of "in", each once and in order; None where they have none. Found once, as lists may be long and
        what is to be skipped is much."""
        try:
            return sorted(set(cast("tuple[Any, ...]", self.value)))
        except TypeError:
            return None


_MEETS: dict[BoundOp, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "is_null": lambda value, _: False,
    "not_null": lambda value, _: True,
}


def may_meet(bounds: Iterable[Bound], values: Mapping[str, object]) -> bool:
    """False only when no row with these values, none of them null, meets all bounds."""
    for bound in bounds:
        if bound.column in values:
            try:
                if not _MEETS[bound.op](values[bound.column], bound.value):
                    return False
            except TypeError:  # a time with a zone and one without, say
                continue
    return True


def bounds_of(tree: Node, schema: pa.Schema) -> tuple[Bound, ...]:
    """What a condition demands of single columns, as far as it is plain to see."""
    return tuple(bound for part in _conjuncts(tree) for bound in _bounds_of(part, schema))


def keys_of(bounds: Iterable[Bound], key_columns: pa.Schema) -> pa.RecordBatch | None:
    """The keys that alone can match, each once; None when that is not plain to see, or there are more than
    `KEYS_MAX`."""
    values: dict[str, set[object]] = {}
    for bound in bounds:
        if bound.op in ("==", "in") and bound.column in key_columns.names:
            given = {bound.value} if bound.op == "==" else set(cast("tuple[object, ...]", bound.value))
            values[bound.column] = values.get(bound.column, given) & given
    if set(values) != set(key_columns.names) or math.prod(map(len, values.values())) > KEYS_MAX:
        return None
    rows = list(itertools.product(*(values[name] for name in key_columns.names)))
    try:
        columns = [_exactly([row[i] for row in rows], f.type) for i, f in enumerate(key_columns)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return pa.RecordBatch.from_arrays(columns, schema=key_columns)


def _exactly(values: list[object], t: pa.DataType) -> pa.Array:
    """An array of these; of times finer than the type has, which no row holds, Arrow would make others.

    Raises:
        pa.ArrowInvalid: there is such a time.
    """
    if pa.types.is_timestamp(t):
        return pa.array(values, pa.timestamp("us", t.tz)).cast(t)
    if pa.types.is_time(t):
        return pa.array(values, pa.time64("us")).cast(t)
    return pa.array(values, pa.duration("us")).cast(t) if pa.types.is_duration(t) else pa.array(values, t)


def _conjuncts(tree: Node) -> Iterator[Node]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Call) and node.function in ("and_kleene", "and"):
            pending += reversed(node.arguments)
        else:
            yield node


def _bounds_of(node: Node, schema: pa.Schema) -> Iterator[Bound]:
    """What a conjunct demands of one column; nothing where that is not plain to see."""
    if isinstance(node, Field):
        yield from _bound(node, "==", True, schema)
    if not isinstance(node, Call) or not node.arguments:
        return
    name, first = node.function, node.arguments[0]
    second = node.arguments[1] if len(node.arguments) == 2 else None
    if name in _BOUND_OPS and second is not None:
        op = _BOUND_OPS[name]
        if isinstance(first, Scalar):
            first, second, op = second, first, _FLIPPED[op]
        if isinstance(first, Field) and isinstance(second, Scalar):
            yield from _bound(first, op, value_for(second.value, _column_type(first, schema)), schema)
    elif name in ("or", "or_kleene") and isinstance(second, Call) and second.function == "is_nan":
        # "x > 3 or x is NaN" is SQL's x > 3; NaN is above every number for bounds too.
        for bound in _bounds_of(first, schema):
            if bound.op in (">", ">=") and second.arguments == [Field((bound.column,))]:
                yield bound
    elif name == "is_valid" or (name == "invert" and isinstance(first, Call) and first.function == "is_null"):
        field = first if name == "is_valid" else first.arguments[0] if isinstance(first, Call) else first
        if isinstance(field, Field):
            yield from _bound(field, "not_null", None, schema)
    elif name == "is_null" and isinstance(first, Field) and node.option("nan_is_null") is False:
        yield from _bound(first, "is_null", None, schema)
    elif name == "invert" and isinstance(first, Field):
        yield from _bound(first, "==", False, schema)
    elif name == "is_in" and isinstance(first, Field) and node.options is not None:
        yield from _bound(first, "in", members_of(node.options, _column_type(first, schema)), schema)
    elif name in ("starts_with", "match_like") and isinstance(first, Field):
        prefix = _prefix(node)
        if prefix and is_text(_column_type(first, schema)):
            yield from _bound(first, ">=", prefix, schema)
            yield from _bound(first, "<", after_prefix(prefix), schema)


def _bound(field: Field, op: BoundOp, value: object, schema: pa.Schema) -> Iterator[Bound]:
    known = len(field.path) == 1 and schema.get_field_index(field.path[0]) >= 0
    if known and (value is not None or op in ("is_null", "not_null")):
        yield Bound(field.path[0], op, value)


def _column_type(field: Field, schema: pa.Schema) -> pa.DataType:
    index = schema.get_field_index(field.path[0])
    return schema.field(index).type if index >= 0 and len(field.path) == 1 else pa.null()


def value_for(scalar: pa.Scalar, column: pa.DataType) -> object:
    """The scalar as a Python value of a column's type; None where the two do not compare exactly as those."""
    own = scalar.type
    types = pa.types
    if not scalar.is_valid or "ns" in (getattr(column, "unit", None), getattr(own, "unit", None)):
        return None
    try:
        if types.is_timestamp(own) and own.tz is not None:
            scalar = scalar.cast(pa.timestamp(own.unit, "UTC"))
        value: object = scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return None
    if isinstance(value, float) and value != value:
        return None
    if own == column or (is_text(own) and is_text(column)) or (is_bytes(own) and is_bytes(column)):
        return None if types.is_nested(column) or types.is_dictionary(column) else value
    if types.is_timestamp(own) and types.is_timestamp(column) and (own.tz is None) is (column.tz is None):
        return value
    if types.is_integer(own) and types.is_integer(column):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < DOUBLE_EXACT_MAX:
        if types.is_floating(column):
            return float(value)
        if types.is_integer(column) and value == int(value):
            return int(value)
    if types.is_decimal(column) and isinstance(value, int | Decimal) and not isinstance(value, bool):
        return Decimal(value)
    return None


def members_of(options: pa.Scalar, column: pa.DataType) -> tuple[object, ...] | None:
    """Values of ``is_in``, as `value_for` has them; None where one is not comparable, or null is a member."""
    members = options["value_set"].values
    matches_null = options["null_matching_behavior"].as_py() == 0
    if members is None or (members.null_count and matches_null):
        return None
    values: Sequence[object]
    if _are_values_of(members.type, column):
        # Together, as lists may be long: one by one takes fifty times as long.
        try:
            values = members.drop_null().to_pylist()
        except ValueError:
            return None
        return None if any(v != v for v in values) else tuple(values)
    values = [value_for(member, column) for member in members if member.is_valid]
    return None if any(v is None for v in values) else tuple(values)


def _are_values_of(own: pa.DataType, column: pa.DataType) -> bool:
    """Whether `value_for` of each value of a type is that in Python, but for NaN."""
    types = pa.types
    for kind in (types.is_integer, is_text, is_bytes):
        if kind(own) and kind(column):
            return True
    return bool(own == column and (types.is_floating(own) or types.is_decimal(own) or types.is_boolean(own)))


def _prefix(call: Call) -> str | None:
    """Text with which every match of a LIKE or starts_with begins."""
    pattern = call.option("pattern")
    if isinstance(pattern, bytes):
        pattern = pattern.decode(errors="replace")
    if not isinstance(pattern, str) or call.option("ignore_case") is not False or "\ufffd" in pattern:
        return None
    if call.function == "starts_with":
        return pattern
    for i, c in enumerate(pattern):
        if c in "%_\\":
            return pattern[:i]
    return pattern


def after_prefix(prefix: str) -> str | None:
    """The least text, in code point order, above everything that starts with the prefix."""
    while prefix:
        following = ord(prefix[-1]) + 1
        if following <= 0x10FFFF:
            return prefix[:-1] + chr(0xE000 if 0xD800 <= following <= 0xDFFF else following)
        prefix = prefix[:-1]
    return None
