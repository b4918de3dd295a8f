"""A filter as the condition by which Arrow skips row groups of lake files, and rows on its way.

Arrow reads a condition against the bounds in a file's footer as if every row lay within them. NaN lies in no bounds, so
``not (x <= 40)`` or ``x <> 1`` would lose it. So Arrow is never given a filter as it is, but one that it cannot read
otherwise than we do: comparisons of single fields with values, joined by and and or, which no matching row fails.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.format.schema import lake_type
from lakehead.predicate import Predicate
from lakehead.predicate.bounds import members_of, value_for
from lakehead.predicate.literals import COMPARE, FLIPPED
from lakehead.predicate.nodes import COMPARISONS, Call, Field, Node, Scalar

_Condition: TypeAlias = pc.Expression | bool
"""What no matching row fails; True where nothing is known, False where nothing matches."""

_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def row_group_filter(
    predicate: Predicate, schema: pa.Schema, *, without_nan: Collection[str] = (), rounded: Collection[str] = ()
) -> pc.Expression | None:
    """A condition over the lake's types that every matching row meets; None where there is none.

    Args:
        schema: the table's own types.
        without_nan: columns that hold no NaN in the files to read.
        rounded: columns whose floats may be others in the files than are read.
    """
    condition = _Necessary(schema, without_nan, rounded).of(predicate.tree, true=True)
    return None if condition is True else pc.scalar(False) if condition is False else condition


class _Necessary:
    def __init__(self, schema: pa.Schema, without_nan: Collection[str], rounded: Collection[str]) -> None:
        self._schema = schema
        self._without_nan = without_nan
        self._rounded = rounded

    def of(self, node: Node, *, true: bool) -> _Condition:
        """What holds wherever the node is true, or wherever it is false."""
        if isinstance(node, Scalar):
            return bool(node.value.is_valid and pa.types.is_boolean(node.value.type) and node.value.as_py() is true)
        if isinstance(node, Field):
            return (
                COMPARE["=="](pc.field(*node.path), pc.scalar(true)) if pa.types.is_boolean(self._type(node)) else True
            )
        name, arguments = node.function, node.arguments
        if name in ("and_kleene", "and", "or_kleene", "or"):
            return _join([self.of(a, true=true) for a in arguments], every=name.startswith("and") is true)
        if name == "invert":
            return self.of(arguments[0], true=not true)
        if name == "coalesce" and true and _is_false(arguments[-1]) and len(arguments) == 2:
            return self.of(arguments[0], true=True)
        if name in COMPARISONS:
            return self._comparison(COMPARISONS[name], arguments[0], arguments[1], true)
        field = arguments[0] if arguments else None
        return self._test(node, field, true) if isinstance(field, Field) else True

    def _type(self, field: Field) -> pa.DataType:
        t = self._schema.field(field.path[0]).type
        for part in field.path[1:]:
            t = t.field(part).type
        return t

    def _comparison(self, op: str, left: Node, right: Node, true: bool) -> _Condition:
        if isinstance(left, Scalar):
            left, right, op = right, left, FLIPPED[op]
        if not isinstance(left, Field) or not isinstance(right, Scalar):
            return True
        if not right.value.is_valid:
            return False
        t = self._type(left)
        value = value_for(right.value, t)
        # Of floats only what is true of no NaN, in Arrow's order, has the same meaning within bounds.
        nan_matches = pa.types.is_floating(t) and (op == "!=" if true else op != "!=")
        if value is None or (nan_matches and not self._has_no_nan(left)):
            return True
        return self._compare(op if true else _OPPOSITE[op], left, value, t)

    def _compare(self, op: str, field: Field, value: object, t: pa.DataType) -> _Condition:
        if field.path[0] in self._rounded and pa.types.is_floating(t):
            return True
        try:
            scalar = pa.scalar(value, lake_type(t))
        except (pa.ArrowException, OverflowError):
            return True  # beyond the type's range: the exact filter will tell
        if pa.types.is_floating(t) and scalar.as_py() != value:
            return True
        return COMPARE[op](pc.field(*field.path), pc.scalar(scalar))

    def _has_no_nan(self, field: Field) -> bool:
        return len(field.path) == 1 and field.path[0] in self._without_nan

    def _test(self, call: Call, field: Field, true: bool) -> _Condition:
        """What a function of one field says."""
        x, t = pc.field(*field.path), self._type(field)
        match call.function:
            case "is_nan":
                return not (true and self._has_no_nan(field))
            case "is_valid":
                return x.is_valid() if true else x.is_null()
            case "is_null" if call.option("nan_is_null") is False:
                return x.is_null() if true else x.is_valid()
            case "is_in" if true and call.options is not None:
                return self._membership(field, members_of(call.options, t), t)
        return True

    def _membership(self, field: Field, members: tuple[object, ...] | None, t: pa.DataType) -> _Condition:
        if members is None:
            return True
        if not members:
            return False
        if pa.types.is_floating(t):
            # By their ends, because Arrow tells one zero from the other in lists.
            low, high = min(members), max(members)  # type: ignore[type-var]
            return _join([self._compare(">=", field, low, t), self._compare("<=", field, high, t)], every=True)
        try:
            values = pa.array(members, lake_type(t))
        except (pa.ArrowException, OverflowError):
            return True
        return pc.field(*field.path).isin(values)


def _is_false(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value.as_py() is False


def _join(parts: list[_Condition], *, every: bool) -> _Condition:
    """All of the parts, or any of them."""
    left = [p for p in parts if not isinstance(p, bool)]
    if any(p is (not every) for p in parts):
        return not every
    if not left:
        return every
    whole = left[0]
    for part in left[1:]:
        whole = whole & part if every else whole | part
    return whole
