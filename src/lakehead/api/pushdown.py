"""Filters that DuckDB pushes into a scan, in DuckDB's own meaning.

DuckDB hands over an Arrow expression and does not filter again. But it writes its ``f > 7`` as Arrow's, which NaN does
not meet, and its ``f in (0.0)`` as Arrow's, which ``-0.0`` does not; and its instants are microseconds, whatever the
column's are. Where such columns are compared, the expression is built again as DuckDB means it.

What it writes for ``f <= 'nan'`` is just true, which rows without an ``f`` meet as well, and which no longer names the
column: such a statement runs once more, with nothing pushed down (`lakehead.api.relation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import InvalidPredicateError, SqlError
from lakehead.predicate import tree_of
from lakehead.predicate.literals import (
    COMPARE,
    FLIPPED,
    Literal,
    TimestampLiteral,
    compare_floats,
    compare_literal,
    in_literals,
)
from lakehead.predicate.nodes import COMPARISONS, Call, Field, Node, Scalar, walk

MEANT_OTHERWISE = "meant otherwise"
"""Of a filter that says something else than the statement, or nothing that can be read."""


def as_duckdb_means(where: pc.Expression, schema: pa.Schema) -> pc.Expression:
    """The expression that is true for exactly the rows for which DuckDB finds its filter true.

    Raises:
        SqlError: DuckDB pushed a filter of a form that is not known here; with ``pushed=MEANT_OTHERWISE``, one
            that the statement is better off without: a condition ``f <= 'nan'``, a list of nanoseconds or structs.
    """
    try:
        tree = tree_of(where)
    except InvalidPredicateError as e:  # a list of structs, say
        raise SqlError(f"DuckDB pushed a filter that rows are not read by: {e}", pushed=MEANT_OTHERWISE) from e
    if any(_is_true(part) for part in _parts(tree)):
        raise SqlError(
            "DuckDB does not tell which column it compares with NaN: write that the column is not null instead of"
            " <= NaN, which is the same",
            pushed=MEANT_OTHERWISE,
        )
    if any(isinstance(n, Call) and _is_list_of_others(n, schema) for n in walk(tree)):
        raise SqlError(
            "DuckDB rounds nanoseconds of a list, and has texts for days and instants that Python has none for: compare"
            " them one by one",
            pushed=MEANT_OTHERWISE,
        )
    types = (_type(node, schema) for node in walk(tree) if isinstance(node, Field))
    return _build(tree, schema) if any(pa.types.is_floating(t) or _is_coarse(t) for t in types) else where


def _parts(node: Node) -> Iterator[Node]:
    """The conditions that a filter is made of."""
    if isinstance(node, Call) and node.function in ("and_kleene", "or_kleene", "invert"):
        for argument in node.arguments:
            yield from _parts(argument)
    else:
        yield node


def _is_true(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value.as_py() is True


def _type(field: Node, schema: pa.Schema) -> pa.DataType:
    if not isinstance(field, Field):
        return pa.null()
    t = schema.field(field.path[0]).type
    for part in field.path[1:]:
        t = t.field(part).type
    return t


def _is_coarse(t: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(t) and t.tz is not None and t.unit != "us")


def _is_list_of_others(call: Call, schema: pa.Schema) -> bool:
    if call.function != "is_in" or call.options is None or not isinstance(call.arguments[0], Field):
        return False
    t, members = _type(call.arguments[0], schema), call.options["value_set"].values
    finer = pa.types.is_timestamp(t) and t.unit == "ns"
    return finer or (pa.types.is_temporal(t) and members is not None and pa.types.is_string(members.type))


def _build(node: Node, schema: pa.Schema) -> pc.Expression:
    if isinstance(node, Scalar):
        return pc.scalar(node.value)
    if isinstance(node, Field):
        return pc.field(*node.path)
    name, arguments = node.function, [_build(a, schema) for a in node.arguments]
    if name in ("and_kleene", "or_kleene"):
        return reduce(pc.and_kleene if name == "and_kleene" else pc.or_kleene, arguments)
    if name in COMPARISONS:
        return _compare(COMPARISONS[name], node.arguments, arguments, schema)
    if name == "is_in" and node.options is not None and isinstance(node.arguments[0], Field):
        return _is_in(node, node.options, arguments[0], schema)
    if name == "is_null" and node.option("nan_is_null") is False:
        return arguments[0].is_null()
    simple = {"is_valid": pc.is_valid, "is_nan": pc.is_nan, "invert": pc.invert}.get(name)
    if simple is None or len(arguments) != 1:
        raise SqlError(f"DuckDB pushed down {name!r}, which this version does not know: use table.scan(where=...)")
    return simple(arguments[0])


def _compare(op: str, nodes: list[Node], sides: list[pc.Expression], schema: pa.Schema) -> pc.Expression:
    if isinstance(nodes[0], Scalar):
        nodes, sides, op = nodes[::-1], sides[::-1], FLIPPED[op]
    t, literal = _type(nodes[0], schema), nodes[1]
    if _is_coarse(t) and isinstance(literal, Scalar) and literal.value.is_valid:
        return compare_literal(op, sides[0], t, _instant(literal.value), truth=False)
    if not pa.types.is_floating(t):
        return COMPARE[op](*sides)
    known = isinstance(literal, Scalar) and literal.value.is_valid
    nan = literal.value.as_py() != literal.value.as_py() if known and isinstance(literal, Scalar) else None
    return compare_floats(op, *sides, nan_right=nan)


def _is_in(call: Call, options: pa.Scalar, x: pc.Expression, schema: pa.Schema) -> pc.Expression:
    members, t = options["value_set"].values, _type(call.arguments[0], schema)
    if members is None:
        raise SqlError("DuckDB pushed down a list that this version cannot read: use table.scan(where=...)")
    if _is_coarse(t):
        found = in_literals(x, t, [_instant(m) for m in members if m.is_valid], truth=True)
        assert found is not None, "instants compare exactly"
        return found
    if pa.types.is_floating(t) and pc.any(pc.equal(members, pa.scalar(0.0, members.type))).as_py():
        members = pa.concat_arrays([members, pa.array([0.0, -0.0], members.type)])
    return pc.is_in(x, value_set=members, skip_nulls=True)


def _instant(scalar: pa.Scalar) -> Literal:
    microseconds = scalar.cast(pa.timestamp("us", scalar.type.tz)).value
    return TimestampLiteral(microseconds * 1000, zoned=True)
