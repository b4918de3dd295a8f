"""Statements that ask one table for rows by primary key, whole or its leading columns: its key index has them, and
DuckDB is given these rows alone.

What else the statement says of them is DuckDB's to answer, as ever: that the key has one of these values is a condition
that no row outside the key index's answer meets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from lakehead.api.table_names import find_names
from lakehead.client.lookups import KEYS_MAX
from lakehead.format.per_schema import once_per_schema
from lakehead.format.plain import PlainKey, plain_key
from lakehead.format.schema import twin_names

_AS_THEY_ARE = ("INTEGER", "BIGINT", "VARCHAR")
"""Types of constants whose values the parser tells as they are: of 3.0 it tells 30."""
_PLACES = ("current_schema", "current_schemas", "current_database", "current_catalog", "in_search_path")


@dataclass(frozen=True)
class Given:
    """A value that a statement has, or the parameter that has it."""

    value: object = None
    parameter: str = ""


@dataclass(frozen=True)
class PointQuery:
    """A statement whose only table is asked for rows whose columns have some of a few values.

    Attributes:
        before: the text of the statement before the table's name.
        after: and behind it; the table has a name there, or takes it from there.
        called: what the statement calls the table, in lower case, where it names columns by that; a column of this
            name would have such fields. Else "".
        values: of columns, in lower case, what each is to equal one of; a column may come again.
    """

    before: str
    after: str
    called: str
    values: tuple[tuple[str, tuple[Given, ...]], ...]

    def keys(self, schema: pa.Schema, columns: pa.Schema, params: object) -> list[PlainKey]:
        """The values that rows may have in these columns of a table, each once; none where the statement does not tell,
        or tells as DuckDB alone understands it."""
        names = _names(schema)
        if not len(columns) or names is None or self.called in names:
            return []
        given: dict[str, Sequence[Given]] = {}
        for column, some in self.values:
            given.setdefault(column, some)
        values = [[_of(params, g) for g in given.get(c.lower(), ())] for c in columns.names]
        if math.prod(map(len, values)) > KEYS_MAX:
            return []
        keys = [plain_key(key, columns) for key in itertools.product(*values)]
        return list(dict.fromkeys(key for key in keys if key is not None)) if None not in keys else []


@once_per_schema
def _names(schema: pa.Schema) -> frozenset[str] | None:
    """Names of columns, in lower case; None where SQL cannot tell some apart."""
    return frozenset(name.lower() for name in schema.names) if twin_names(schema) is None else None


def _of(params: object, given: Given) -> object:
    """The value that is given; None where the parameter is not."""
    name = given.parameter
    if not name:
        return given.value
    if isinstance(params, Mapping):
        return params.get(name)
    if isinstance(params, list | tuple) and name.isdecimal() and 0 < int(name) <= len(params):
        return params[int(name) - 1]
    return None


# ---- what a statement says ------------------------------------------------------------------------------------------


def point_query(text: str, tree: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> PointQuery | None:
    """What a statement asks by columns' values; None where it reads anything but one table, or asks for none.

    Args:
        tree: what DuckDB's parser says of it.
        nodes: all that are in there.
    """
    (top,) = tree["statements"]
    node = top["node"]
    source = node.get("from_table") or {}
    if node.get("type") != "SELECT_NODE" or source.get("type") != "BASE_TABLE" or not node.get("where_clause"):
        return None
    if sum("from_table" in n for n in nodes) > 1:
        return None
    if source["catalog_name"] or source["at_clause"] or source["column_name_alias"] or "$" in source["table_name"]:
        return None
    if source["sample"] or node["sample"] or any(_is_of_more(n) for n in nodes):
        return None
    start = len(text.encode()[: source["query_location"]].decode())
    name = next((n for n in find_names(text) if n.start == start), None)
    if name is None or name.suffix or name.path != tuple(filter(None, (source["schema_name"], source["table_name"]))):
        return None
    called = str(source["alias"] or source["table_name"])
    alias = "" if source["alias"] else ' as "{}"'.format(called.replace('"', '""'))
    values = tuple(_valued(node["where_clause"], called.lower()))
    if not values:
        return None
    by_table = any(len(n.get("column_names", ())) > 1 for n in nodes)
    return PointQuery(
        before=text[: name.start],
        after=f"{alias}{text[name.end :]}",
        called=called.lower() if by_table else "",
        values=values,
    )


def _is_of_more(node: Mapping[str, Any]) -> bool:
    """Whether it asks for other rows, or for the place where the table is."""
    names = (node.get("function_name"), *node.get("column_names", ()))
    return node.get("class") == "SUBQUERY" or any(str(name).lower() in _PLACES for name in names)


def _valued(condition: Mapping[str, Any], called: str) -> Iterator[tuple[str, tuple[Given, ...]]]:
    """Columns that have some of a few values in each row for which this is true."""
    kind = condition["type"]
    if kind == "CONJUNCTION_AND":
        for part in condition["children"]:
            yield from _valued(part, called)
    elif kind == "COMPARE_EQUAL":
        left, right = condition["left"], condition["right"]
        for side, other in ((left, right), (right, left)):
            yield from _equal(side, [other], called)
    elif kind == "COMPARE_IN":
        side, *others = condition["children"]
        yield from _equal(side, others, called)


def _equal(
    side: Mapping[str, Any], others: Sequence[Mapping[str, Any]], called: str
) -> Iterator[tuple[str, tuple[Given, ...]]]:
    if side["class"] != "COLUMN_REF":
        return
    *of, column = side["column_names"]
    given = [_given(other) for other in others]
    if (not of or [name.lower() for name in of] == [called]) and None not in given:
        yield column.lower(), tuple(g for g in given if g is not None)


def _given(node: Mapping[str, Any]) -> Given | None:
    if node["class"] == "PARAMETER":
        return Given(parameter=str(node["identifier"]))
    if node["class"] == "CONSTANT" and not node["value"]["is_null"] and node["value"]["type"]["id"] in _AS_THEY_ARE:
        return Given(node["value"]["value"])
    return None
