"""What a table is called in a Spark statement whose name for it is replaced: its columns are named as they were."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from lakehead.api.table_names import TableName, find_names, table_places
from lakehead.errors import SqlError
from lakehead.spark.as_of import NO_ALIAS, masked
from lakehead.spark.floats import quoted

_ALIAS = re.compile(r"\s*(as\b\s*)?([^\W\d]\w*|`)", re.IGNORECASE)
_ALL_OF = re.compile(r"\s*\.\s*\*")
_SHOW = re.compile(r"\s*show\b", re.IGNORECASE)
_SAMPLE = re.compile(r"\s*tablesample\s*\(", re.IGNORECASE)
_REPEATABLE = re.compile(r"\s*repeatable\s*\(\s*\d+\s*\)", re.IGNORECASE)
_TAKESNO_ALIAS = frozenset(["describe", "desc", "extended", "formatted", "table", "into", "cache", "refresh", "in"])


def alias_place(query: str, name: TableName) -> int:
    """Where the alias of a table stands: after its name, or after what takes a sample of it."""
    text = masked(query)
    sample = _SAMPLE.match(text, name.end)
    if sample is None:
        return name.end
    at, depth = sample.end(), 1
    while depth and at < len(text):
        depth += (text[at] == "(") - (text[at] == ")")
        at += 1
    again = _REPEATABLE.match(text, at)
    return at if again is None else again.end()


def alias_for(query: str, name: TableName) -> str:
    """What stands at the `alias_place` of a replaced name, so that ``orders.price`` still means its column."""
    text = masked(query)
    before = [n.text.lower() for n in find_names(text[: name.start])][-1:]
    if (before and before[0] in _TAKESNO_ALIAS) or _SHOW.match(text) is not None:
        return ""
    after = _ALIAS.match(text, alias_place(query, name))
    if after is not None and (after[1] is not None or after[2].lower() not in NO_ALIAS):
        return ""
    last = name.path[-1] + (f"${name.suffix}" if name.suffix else "")
    return " as `" + last.replace("`", "``") + "`"


class Unnamed:
    """Tables to which a statement gives no name: their columns are ``orders.price`` or ``shop.orders.price``, or bare.

    Spark has one name for the view that stands for a table: ``orders``. Where something else is called so as well,
    ``shop.orders.price`` would be a column of that, in a subquery of its own.
    """

    def __init__(self, text: str, tables: Sequence[TableName]) -> None:
        """``text``: the statement with its strings and comments blanked, in which tables stand there.

        Raises:
            SqlError: columns are named with and without the database of tables that have one name.
        """
        self._text = text
        self._names: dict[tuple[str, ...], str] = {_path(t): quoted(t.path[-1]) for t in tables}
        starts = {t.start for t in tables}
        names = list(find_names(text))
        others = [n for n in names if n.start not in starts]
        given = {n.path[0].casefold() for n in self._given(names, starts)}
        for table in {_path(t)[-1]: t for t in tables}.values():
            last = _path(table)[-1]
            alike = [path for path in self._names if path[-1] == last]
            if (len(alike) == 1 and last not in given) or not any(self._of(n) in alike for n in others):
                continue
            if any(_path(n)[0] == last and (len(n.path) > 1 or self._all_of(n)) for n in others):
                raise SqlError(
                    f"{table.path[-1]} is the name of more than one thing in this statement: give {table.table} another"
                    " one, as in 'from shop.orders o', and name its columns by that"
                )
            self._names |= {path: quoted(".".join(path)) for path in alike}

    def _given(self, names: Sequence[TableName], starts: Collection[int]) -> Iterator[TableName]:
        """What the statement calls something: views and its own queries, and names that it gives."""
        places = {n.start for n in table_places(self._text)}
        for before, name in pairwise((None, *names)):
            if name is None or len(name.path) > 1 or name.start in starts:
                continue
            between = self._text[before.end if before else 0 : name.start].strip()
            follows = before is not None and not between and (before.text.lower() == "as" or before.start in places)
            if name.start in places or follows or between.endswith(")"):
                yield name

    def called(self, table: TableName) -> str:
        """The name of one of these tables."""
        return self._names[_path(table)]

    def column(self, name: TableName) -> str | None:
        """``shop.orders.price``, or ``shop.orders`` before ``.*``, by the name that the table has; None for what is no
        such column."""
        table = self._of(name)
        return None if table is None else ".".join([self._names[table], *map(quoted, name.path[2:])])

    def _of(self, name: TableName) -> tuple[str, ...] | None:
        """The table that a column is named with, and its database."""
        path = _path(name)
        return path if path in self._names and (len(name.path) > 2 or self._all_of(name)) else None

    def _all_of(self, name: TableName) -> bool:
        return _ALL_OF.match(self._text, name.end) is not None


def _path(name: TableName) -> tuple[str, ...]:
    """Database and table without regard to case, as Spark takes names."""
    return tuple(part.casefold() for part in name.path[:2])
