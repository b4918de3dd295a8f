"""Filters that DuckDB pushes into a scan, in DuckDB's own meaning.

DuckDB hands over an Arrow expression and does not filter again. But it writes its ``f > 7`` as Arrow's, which NaN does
not meet, and its ``f in (0.0)`` as Arrow's, which ``-0.0`` does not; and its instants are microseconds, whatever the
column's are. Where such columns are compared, the expression is built again as DuckDB means it.

What it writes for ``f <= 'nan'`` is just true, which rows without an ``f`` meet as well, and which no longer names the
column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import SqlError
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


def as_duckdb_means(where: pc.Expression, schema: pa.Schema, read: Sequence[str] | None = None) -> pc.Expression:
    """The expression that is true for exactly the rows for which DuckDB finds its filter true.

    Args:
        read: columns that DuckDB reads, those of its filter among them; None for all.

    Raises:
        SqlError: DuckDB pushed a filter of a form that is not known here, or one that does not tell which of several
            columns it compares with NaN.
    """
    tree = tree_of(where)
    fields = [node for node in walk(tree) if isinstance(node, Field)]
    other = any(pa.types.is_floating(t) or _is_coarse(t) for t in (_type(field, schema) for field in fields))
    meant = _build(tree, schema) if other else where
    return reduce(
        pc.and_kleene, (pc.field(*f.path).is_valid() for f in _at_most_nan(tree, schema, fields, read)), meant
    )


def _at_most_nan(tree: Node, schema: pa.Schema, compared: Sequence[Field], read: Sequence[str] | None) -> list[Field]:
    """The columns of conditions ``f <= 'nan'``, as far as these say more than the others do."""
    parts = list(_conjuncts(tree))
    some = sum(_is_true(p) and not (n and _is_from(parts[n - 1], schema)) for n, p in enumerate(parts))
    if not some:
        return []
    names = schema.names if read is None else read
    floats = [f for name in names for f in _floats(schema.field(name), (name,)) if f not in compared]
    if len(floats) > some:
        raise SqlError(
            f"DuckDB does not tell which of the columns {', '.join('.'.join(f.path) for f in floats)} it compares with"
            " NaN: write that the column is not null instead of <= NaN, which is the same"
        )
    return floats


def _conjuncts(node: Node) -> Iterator[Node]:
    if isinstance(node, Call) and node.function == "and_kleene":
        for argument in node.arguments:
            yield from _conjuncts(argument)
    else:
        yield node


def _is_true(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value.as_py() is True


def _is_from(node: Node, schema: pa.Schema) -> bool:
    """Whether a condition is where a range of floats begins: the next one is then its end, as of BETWEEN, and of what
    DuckDB found out about the other side of a join."""
    if not isinstance(node, Call) or COMPARISONS.get(node.function) not in (">", ">="):
        return False
    return pa.types.is_floating(_type(node.arguments[0], schema))


def _floats(field: pa.Field, path: tuple[str, ...], null: bool = False) -> Iterator[Field]:
    """The numbers in a column that may be null, and that DuckDB can compare."""
    null |= field.nullable
    if pa.types.is_floating(field.type) and null:
        yield Field(path)
    elif pa.types.is_struct(field.type):
        for f in field.type:
            yield from _floats(f, (*path, f.name), null)


def _type(field: Node, schema: pa.Schema) -> pa.DataType:
    if not isinstance(field, Field):
        return pa.null()
    t = schema.field(field.path[0]).type
    for part in field.path[1:]:
        t = t.field(part).type
    return t


def _is_coarse(t: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(t) and t.tz is not None and t.unit != "us")


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
