"""Filters that DuckDB pushes into a scan, in the order that DuckDB gives to floats.

DuckDB hands over an Arrow expression and does not filter again. But it writes its ``f > 7`` as Arrow's, which NaN does
not meet, and its ``f in (0.0)`` as Arrow's, which ``-0.0`` does not. So where floats are compared the expression is
built again as DuckDB means it.
"""

from __future__ import annotations

from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import SqlError
from lakehead.format.predicate import parse_predicate
from lakehead.format.predicate_literals import COMPARE, compare_floats
from lakehead.format.predicate_tree import COMPARISONS, Call, Field, Node, Scalar, walk


def as_duckdb_means(where: pc.Expression, schema: pa.Schema) -> pc.Expression:
    """The expression that is true for the rows for which DuckDB says that its filter is.

    Raises:
        SqlError: DuckDB pushed a filter of a form that is not known here.
    """
    tree = parse_predicate(where, schema).tree
    fields = [node for node in walk(tree) if isinstance(node, Field)]
    if not any(pa.types.is_floating(_type(field, schema)) for field in fields):
        return where
    return _build(tree, schema)


def _type(field: Field, schema: pa.Schema) -> pa.DataType:
    t = schema.field(field.path[0]).type
    for part in field.path[1:]:
        t = t.field(part).type
    return t


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
    first = node.arguments[0] if node.arguments else None
    if name == "is_in" and isinstance(first, Field):
        return _is_in(node, arguments[0], pa.types.is_floating(_type(first, schema)))
    if name == "is_null" and node.option("nan_is_null") is False:
        return arguments[0].is_null()
    simple = {"is_valid": pc.is_valid, "is_nan": pc.is_nan, "invert": pc.invert}.get(name)
    if simple is None or len(arguments) != 1:
        raise SqlError(f"DuckDB pushed down {name!r}, which this version does not know: use table.scan(where=...)")
    return simple(arguments[0])


def _compare(op: str, nodes: list[Node], sides: list[pc.Expression], schema: pa.Schema) -> pc.Expression:
    left, right = nodes
    if not any(isinstance(n, Field) and pa.types.is_floating(_type(n, schema)) for n in nodes):
        return COMPARE[op](*sides)
    known = isinstance(left, Field) and isinstance(right, Scalar) and right.value.is_valid
    nan = right.value.as_py() != right.value.as_py() if known and isinstance(right, Scalar) else None
    return compare_floats(op, *sides, nan_right=nan)


def _is_in(call: Call, x: pc.Expression, floats: bool) -> pc.Expression:
    if call.options is None or call.options["value_set"].values is None:
        raise SqlError("DuckDB pushed down a list that this version cannot read: use table.scan(where=...)")
    members = call.options["value_set"].values
    if floats and pc.any(pc.equal(members, pa.scalar(0.0, members.type))).as_py():
        members = pa.concat_arrays([members, pa.array([0.0, -0.0], members.type)])
    return pc.is_in(x, value_set=members, skip_nulls=True)
