"""Tables that a Spark statement names by ``identifier(...)``, whose expression Spark computes before it reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from lakehead.api.table_names import TableName, find_names, spelt, table_places
from lakehead.spark.as_of import masked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IDENTIFIER = re.compile(r"\bidentifier\s*\(", re.IGNORECASE)
_NAMED = re.compile(r"\s*(?:'([^'\\]*)'|\"([^\"\\]*)\"|:([^\W\d]\w*))\s*")
_PARENTHESIS = re.compile(r"[()]")


def called(query: str, texts: Callable[[str], str | None]) -> set[str]:
    """What tables would be called that a statement reads, ``database.table``; others are among them.

    Args:
        texts: what an expression of text is, None for no such.
    """
    by_text = (name for _, _, name in _identifiers(query, texts))
    return {name.table for name in (*table_places(masked(query)), *by_text)}


def with_identifiers(query: str, tables: Sequence[str], texts: Callable[[str], str | None]) -> str:
    """The statement with each of ``tables`` that it names by ``identifier('shop.orders')``, or by an expression in
    that, named plainly; what else it says so is left to Spark."""
    out, at = [], 0
    for start, end, name in _identifiers(query, texts):
        if spelt(name, tables) is not None:
            out += [query[at:start], name.text, " "]
            at = end
    return "".join([*out, query[at:]])


def _identifiers(query: str, texts: Callable[[str], str | None]) -> Iterator[tuple[int, int, TableName]]:
    """Where a statement names something by ``identifier``, and what."""
    text = masked(query)
    for clause in _IDENTIFIER.finditer(text):
        end = _closed(text, clause.end())
        named = texts(query[clause.end() : end - 1]) if end else None
        names = list(find_names(named)) if named is not None else []
        if len(names) == 1 and names[0].text == named:
            yield clause.start(), end, names[0]


def _closed(text: str, start: int) -> int:
    """Where the parenthesis that is open at ``start`` is closed, behind it; 0 for nowhere."""
    depth = 1
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    return 0


class Texts:
    """What expressions of text in a statement are, each asked for once: a literal, a parameter, or what Spark makes
    of them."""

    def __init__(self, spark: SparkSession, args: Mapping[str, Any] | Sequence[Any] | None) -> None:
        self._spark = spark
        self._args = args if isinstance(args, Mapping) else {}
        self._known: dict[str, str | None] = {}

    def __call__(self, expression: str) -> str | None:
        if expression not in self._known:
            self._known[expression] = self._found(expression)
        return self._known[expression]

    def _found(self, expression: str) -> str | None:
        value: Any = None
        if (given := _NAMED.fullmatch(expression)) is not None:
            value = self._args.get(given[3]) if given[3] is not None else given[1] or given[2]
        else:
            with contextlib.suppress(PySparkException):
                row = self._spark.sql(f"select {expression}", dict(self._args)).first()
                value = row[0] if row is not None and len(row) == 1 else None
        return value if isinstance(value, str) else None
