"""Columns that a plan of Spark makes of a table's, computed in Arrow where that gives the same.

So that a micro-batch of few rows needs no Spark job: those of a feed of changes are mostly columns as they are, and
something like ``op = 'd'``. It takes what has the same result in both on every value: columns, their names, literals,
comparisons of equal types (text, whole numbers, booleans), ``in``, ``and``, ``or``, ``not``, ``is null``, ``coalesce``
and casts to wider whole numbers, which Spark puts around literals. None of it fails on a row, so it does not matter
what is computed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

Values: TypeAlias = "pa.Array | pa.Scalar"
Compute: TypeAlias = Callable[[pa.RecordBatch], Values]
_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
}
_WHOLE_NUMBERS = ("tinyint", "smallint", "int", "bigint")
"""Each holds all values of those before it."""
_LEAVES_MAX = 64
"""An expression of more columns and literals is left to Spark, which is asked for each when a query begins."""
_STEPS_MAX = 256
"""As is one of more steps, with those of the columns that it is made of: each is done for each column that uses it."""
_COMPARISONS: Mapping[str, Any] = {
    "EqualTo": pc.equal,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
}


class _NotPlainError(Exception):
    """An expression that is left to Spark."""


@dataclass(frozen=True)
class PlainColumn:
    """One column of a result.

    Attributes:
        reads: the columns of the table that it is computed from.
        of: gives its values for rows that have these columns, in Spark's Arrow types.
        steps: how much that computes.
    """

    reads: frozenset[str]
    of: Compute
    steps: int = 1


@dataclass(frozen=True)
class PlainRows:
    """What a plan makes of a table's rows: some of them, and columns.

    Attributes:
        columns: those of the result, in order.
        conditions: a row is left out where one of these is not true.
    """

    columns: tuple[PlainColumn, ...]
    conditions: tuple[PlainColumn, ...]

    @property
    def reads(self) -> frozenset[str]:
        """The columns of the table that it is computed from."""
        return frozenset().union(*(c.reads for c in (*self.columns, *self.conditions)))

    def of(self, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The result, with the columns of ``schema``."""
        for condition in self.conditions:
            rows = rows.filter(_whole(condition.of(rows), pa.bool_(), rows.num_rows))
        made = [_whole(c.of(rows), f.type, rows.num_rows) for c, f in zip(self.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(made, schema=schema)


def rows_of(plan: Any) -> tuple[Any, PlainRows] | None:
    """The relation at the bottom of an analyzed plan, and what the plan makes of its rows; None where that is more."""
    try:
        return _rows_of(plan)
    except (_NotPlainError, RecursionError):
        return None


def _rows_of(plan: Any) -> tuple[Any, PlainRows]:
    kind = kind_of(plan)
    if kind not in ("Project", "Filter"):
        columns = tuple(_table_column(str(a.name())) for a in each(plan.output()))
        return plan, PlainRows(columns, ())
    relation, below = _rows_of(plan.child())
    known = dict(zip((_id(a) for a in each(plan.child().output())), below.columns, strict=True))
    if kind == "Filter":
        return relation, PlainRows(below.columns, (*below.conditions, _small(plan.condition(), known)))
    return relation, PlainRows(tuple(_small(e, known) for e in each(plan.projectList())), below.conditions)


def kind_of(node: Any) -> str:
    """What a node of a plan, or an expression, is."""
    return str(node.getClass().getSimpleName())


def each(found: Any) -> Iterator[Any]:
    """What is in a collection of Scala's."""
    at = found.iterator()
    while at.hasNext():
        yield at.next()


def _table_column(name: str) -> PlainColumn:
    return PlainColumn(frozenset([name]), lambda rows: rows.column(name))


def _small(node: Any, known: Mapping[str, PlainColumn]) -> PlainColumn:
    if node.collectLeaves().size() > _LEAVES_MAX:
        raise _NotPlainError
    return _column(node, known)


def _column(node: Any, known: Mapping[str, PlainColumn]) -> PlainColumn:
    kind = kind_of(node)
    if kind == "AttributeReference":
        if _id(node) not in known:
            raise _NotPlainError
        return known[_id(node)]
    if kind == "Alias":
        return _column(node.child(), known)
    made = str(node.dataType().simpleString())
    if made not in _TYPES:
        raise _NotPlainError
    if kind == "Literal":
        return _literal(node.value(), made)
    children = list(each(node.children()))
    if kind == "Cast":
        return _cast(children[0], made, known)
    types = {str(c.dataType().simpleString()) for c in children}
    if len(types) != 1 or not types <= _TYPES.keys():
        raise _NotPlainError
    of = [_column(child, known) for child in children]
    steps = sum(c.steps for c in of) + 1
    if steps > _STEPS_MAX:
        raise _NotPlainError
    return PlainColumn(frozenset().union(*(c.reads for c in of)), _computed(kind, [c.of for c in of]), steps)


def _literal(value: Any, kind: str) -> PlainColumn:
    plain = value if value is None or isinstance(value, bool | int) else str(value.toString())
    literal = pa.scalar(plain, _TYPES[kind])
    return PlainColumn(frozenset(), lambda _: literal)


def _cast(child: Any, to: str, known: Mapping[str, PlainColumn]) -> PlainColumn:
    if kind_of(child) == "Literal" and child.value() is None:
        return _literal(None, to)
    given, column = str(child.dataType().simpleString()), _column(child, known)
    if given == to:
        return column
    if to not in _WHOLE_NUMBERS or given not in _WHOLE_NUMBERS[: _WHOLE_NUMBERS.index(to)]:
        raise _NotPlainError
    return PlainColumn(column.reads, lambda rows: column.of(rows).cast(_TYPES[to]), column.steps + 1)


def _computed(kind: str, of: list[Compute]) -> Compute:
    """What an expression computes from its children, which are of one type."""
    first = of[0]
    if kind in _COMPARISONS:
        compare = _COMPARISONS[kind]
        return lambda rows: compare(first(rows), of[1](rows))
    if kind in ("And", "Or"):
        combine = pc.and_kleene if kind == "And" else pc.or_kleene
        return lambda rows: combine(first(rows), of[1](rows))
    if kind == "Not":
        return lambda rows: pc.invert(first(rows))
    if kind == "In" and len(of) > 1:
        return lambda rows: reduce(pc.or_kleene, [pc.equal(first(rows), other(rows)) for other in of[1:]])
    if kind == "IsNull":
        return lambda rows: pc.is_null(first(rows))
    if kind == "IsNotNull":
        return lambda rows: pc.is_valid(first(rows))
    if kind == "Coalesce":
        return lambda rows: pc.coalesce(*(other(rows) for other in of))
    raise _NotPlainError


def _whole(values: Values, kind: pa.DataType, rows: int) -> pa.Array:
    """Values of so many rows; what reads no column is one value for all."""
    if isinstance(values, pa.Scalar):
        return pa.repeat(values.cast(kind), rows)
    return values if values.type == kind else values.cast(kind)


def _id(attribute: Any) -> str:
    return str(attribute.exprId().toString())
