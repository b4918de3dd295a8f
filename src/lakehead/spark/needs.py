"""What a statement needs of the tables that it reads, as Spark's optimiser says before anything is read of them.

The statement is planned over stand-ins, which have the tables' columns and no rows. What the optimised plan asks of
them is a necessary condition and all columns that have a say in the result: the statement itself still filters and
projects what it is given. What is not understood is not left out.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException

from lakehead.env.randomness import SystemRandomness
from lakehead.errors import InvalidPredicateError
from lakehead.predicate import Predicate, parse_predicate
from lakehead.predicate.literals import COMPARE, FLIPPED
from lakehead.spark.frame_steps import without_rows
from lakehead.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Json: TypeAlias = Mapping[str, Any]
_Names: TypeAlias = tuple[str, ...]

_QUERY = re.compile(r"[\s(]*(?:select|with|from)\b", re.IGNORECASE)
_WRITES = re.compile(r"\b(?:insert|into)\b", re.IGNORECASE)
_LEAF = "LogicalRDD"
_COMPARISONS = {
    "EqualTo": "==", "EqualNullSafe": "==", "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}  # fmt: skip
_JAVA_CALENDAR_YEAR = 1582
_PLANS = ("Subquery", "Exists", "ListQuery")
"""What the classes of expressions end with that have a plan within them."""


@dataclass(frozen=True)
class Needs:
    """What is read of a table.

    Attributes:
        columns: those that have a say in the result.
        where: met by every row that has one; None where there is no such condition.
        alone: nothing else of Lakehead's is read beside it, which would have to be of the same moment.
    """

    columns: frozenset[str]
    where: Predicate | None
    alone: bool = False


def needs_of(spark: SparkSession, text: str, query: str, args: Any, views: Mapping[str, pa.Schema]) -> dict[str, Needs]:
    """What a query needs of the views that it names; none of those that are not found.

    Args:
        text: the query with its strings and comments blanked.
        views: the columns of each table by the name of the view that stands for it, which is made, and remains.

    Raises:
        PySparkException: the query cannot be planned.
    """
    if _QUERY.match(text) is None or _WRITES.search(text) is not None:
        return {}
    for view, schema in views.items():
        # All columns may be null: count(c) is count(1) where c may not, which needs no c.
        stand_in = without_rows(spark, spark_schema(pa.schema([f.with_nullable(True) for f in schema])))
        stand_in.createOrReplaceTempView(view)
    statement = spark.sql(query, args)
    found: dict[_Names, list[_Leaf]] = {}
    try:
        plan = statement._jdf.queryExecution().optimizedPlan()
        for leaf in _leaves(json.loads(plan.toJSON())):
            found.setdefault(leaf.names, []).append(leaf)
    except (_UnknownPlanError, PySparkException, RecursionError):
        return {}
    # Tables with the same columns cannot be told apart: they get what is needed of any of them.
    return {
        view: Needs(frozenset().union(*(leaf.columns for leaf in leaves)), _where(plan, leaves, schema))
        for view, schema in views.items()
        if (leaves := found.get(tuple(schema.names)))
    }


# ---- plans ----------------------------------------------------------------------------------------------------------


class _UnknownPlanError(Exception):
    """A plan whose parts are not all to be seen."""


@dataclass(frozen=True)
class _Filter:
    """A condition, in the order in which a tree is walked, and where it is in the plan; None within a subquery."""

    condition: Sequence[_Json]
    at: tuple[int, ...] | None


@dataclass(frozen=True)
class _Leaf:
    """A stand-in where a plan reads it, with what is asked of it there."""

    names: _Names
    ids: Mapping[int, str]
    columns: frozenset[str]
    filters: tuple[_Filter, ...]


@dataclass
class _Plan:
    node: _Json
    children: list[_Plan] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return _kind(self.node)


def _kind(node: _Json) -> str:
    return str(node["class"]).rpartition(".")[2]


def _leaves(nodes: Sequence[_Json]) -> Iterator[_Leaf]:
    """The stand-ins that a plan reads, with those of the plans within its expressions."""
    yield from _of_plan(_tree(nodes), None, (), ())
    for inner in _inner_plans(nodes):
        yield from _of_plan(_tree(inner), None, (), None)


def _of_plan(
    plan: _Plan, needed: frozenset[int] | None, filters: tuple[_Filter, ...], at: tuple[int, ...] | None
) -> Iterator[_Leaf]:
    """The stand-ins of a plan of whose rows these attributes are needed, None for all, after these filters."""
    if plan.kind == _LEAF:
        output = {a["exprId"]["id"]: a["name"] for (a,) in plan.node["output"]}
        columns = frozenset(name for number, name in output.items() if needed is None or number in needed)
        yield _Leaf(tuple(output.values()), output, columns, filters)
        return
    if plan.kind == "Filter":
        condition = plan.node["condition"]
        needed = None if needed is None else needed | _attributes(condition)
        filters = (*filters, _Filter(condition, at))
    elif plan.kind in ("Project", "Aggregate"):
        needed, filters = _attributes([v for k, v in plan.node.items() if k != "child"]), ()
    else:
        needed, filters = None, ()
    for i, child in enumerate(plan.children):
        yield from _of_plan(child, needed, filters, None if at is None else (*at, i))


def _tree(nodes: Sequence[_Json]) -> _Plan:
    """A plan from its nodes in the order of a walk."""
    rest = iter(nodes)

    def plan() -> _Plan:
        node = next(rest)
        return _Plan(node, [plan() for _ in range(node["num-children"])])

    return plan()


def _inner_plans(value: Any) -> Iterator[Sequence[_Json]]:
    """The plans within expressions, and within those plans."""
    if isinstance(value, Mapping):
        inner = value.get("plan")
        if isinstance(inner, list):
            yield inner
        elif "class" in value and _kind(value).endswith(_PLANS):
            raise _UnknownPlanError(_kind(value))
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _inner_plans(part)


def _attributes(value: Any) -> frozenset[int]:
    """The ids of all columns that expressions name."""
    found: set[int] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            if "class" in part and _kind(part) == "AttributeReference":
                found.add(part["exprId"]["id"])
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return frozenset(found)


# ---- conditions -----------------------------------------------------------------------------------------------------


def _where(plan: Any, leaves: Sequence[_Leaf], schema: pa.Schema) -> Predicate | None:
    """A condition that is met by the rows which any of these needs."""
    conditions: list[pc.Expression] = []
    for leaf in leaves:
        parts = [_Condition(plan, leaf, schema, f).arrow() for f in leaf.filters]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        condition = reduce(pc.and_kleene, known)
        if not any(condition.equals(other) for other in conditions):  # of a table that is joined with itself
            conditions.append(condition)
    try:
        return parse_predicate(reduce(pc.or_kleene, conditions), schema)
    except InvalidPredicateError:  # too much of it
        return None


class _Condition:
    """A filter of Spark's as Arrow's, as far as both mean the same by it: of whole numbers, texts and dates."""

    def __init__(self, plan: Any, leaf: _Leaf, schema: pa.Schema, found: _Filter) -> None:
        self._plan = plan
        self._ids = leaf.ids
        self._schema = schema
        self._filter = found

    def arrow(self) -> pc.Expression | None:
        """Necessary for the filter; None where nothing is."""
        return self._of(_tree(self._filter.condition), ())

    def _of(self, tree: _Plan, at: tuple[int, ...]) -> pc.Expression | None:
        if tree.kind in ("And", "Or"):
            parts = [self._of(child, (*at, i)) for i, child in enumerate(tree.children)]
            known = [part for part in parts if part is not None]
            if not known or (tree.kind == "Or" and len(known) < len(parts)):
                return None
            return reduce(pc.and_kleene if tree.kind == "And" else pc.or_kleene, known)
        if tree.kind in _COMPARISONS:
            return self._compared(_COMPARISONS[tree.kind], *tree.children)
        if tree.kind == "In":
            column, *members = tree.children
            return self._among(column, [m.node.get("value") for m in members if m.kind == "Literal"], len(members))
        if tree.kind == "InSet":
            longer = self._members(at)
            return self._among(tree.children[0], longer, len(longer))
        return None

    def _compared(self, op: str, left: _Plan, right: _Plan) -> pc.Expression | None:
        if left.kind == "Literal":
            left, right, op = right, left, FLIPPED[op]
        if (f := self._column(left)) is None or right.kind != "Literal":
            return None
        value = _scalar(right.node.get("value"), f.type)
        return None if value is None else COMPARE[op](pc.field(f.name), value)

    def _among(self, column: _Plan, members: Sequence[str | None], count: int) -> pc.Expression | None:
        if (f := self._column(column)) is None:
            return None
        values = [v for m in members if (v := _scalar(m, f.type)) is not None]
        if not values or len(values) < count:
            return None
        return pc.field(f.name).isin(pa.array([v.as_py() for v in values], f.type))

    def _column(self, tree: _Plan) -> pa.Field | None:
        """The column, of a type of which both mean the same, that an expression is."""
        if tree.kind != "AttributeReference" or (name := self._ids.get(tree.node["exprId"]["id"])) is None:
            return None
        f = self._schema.field(name)
        collated = pa.types.is_string(f.type) and tree.node["dataType"] != "string"
        return None if collated else f

    def _members(self, at: Sequence[int]) -> list[str | None]:
        """Those of a longer list, which Spark does not write down with its plan."""
        if self._filter.at is None:
            return []
        found = self._plan
        for i in self._filter.at:
            found = found.children().apply(i)
        found = found.condition()
        for i in at:
            found = found.children().apply(i)
        between = SystemRandomness().uuid_hex()
        return [None if m == "null" else m for m in str(found.hset().mkString(between)).split(between)]


def _scalar(text: str | None, t: pa.DataType) -> pa.Scalar | None:
    """A value of a type, as Spark writes it; None for null, and for types that it writes otherwise."""
    if text is None:
        return None
    try:
        if pa.types.is_integer(t):
            return pa.scalar(int(text), t)
        if pa.types.is_string(t):
            return pa.scalar(text, t)
        if pa.types.is_decimal(t):
            return pa.scalar(Decimal(text), t)
        if pa.types.is_date32(t):
            day = dt.date.fromisoformat(text)
            # Spark writes an earlier one by way of Java's calendar, which lacks some days of October 1582.
            return pa.scalar(day, t) if day.year > _JAVA_CALENDAR_YEAR else None
    except (ValueError, ArithmeticError, pa.ArrowException):
        return None
    return None
