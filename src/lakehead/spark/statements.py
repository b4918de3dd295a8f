"""What a Spark statement does beside reading, told from its first words; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lakehead.api.table_names import TableName, find_names, unquoted
from lakehead.errors import SqlError
from lakehead.spark.defined_names import NAME, inserts, main_start

_FLAGS = re.IGNORECASE | re.DOTALL
_VIEW = re.compile(
    rf"\s*create\s+(?P<replace>or\s+replace\s+)?(?P<everywhere>global\s+)?temp(?:orary)?\s+view\s+{NAME}"
    # What a comment says is blank.
    r"\s*(?:\((?P<columns>[^()]*)\)\s*)?(?:comment\s+)?as\b",
    _FLAGS,
)
_COLUMN = re.compile(r"\s*(?P<name>`(?:[^`]|``)+`|[^\s`]+)(?:\s+comment)?\s*", _FLAGS)
_KEEPS = re.compile(
    r"\s*(?:create\s+(?:or\s+replace\s+)?(?:global\s+)?(?:temp(?:orary)?\s+)?(?:view|function)|set(?!\s+var))\b", _FLAGS
)
_CACHED = re.compile(
    rf"\s*cache\s+(?P<lazy>lazy\s+)?table\s+{NAME}\s*(?:options\s*\([^()]*\)\s*)?"
    r"(?:as\b|(?=select\b|with\b|from\b|values\b|\())",
    _FLAGS,
)
_IF = r"(?:\s+if\s+(?:not\s+)?exists)?"
# What statements do that read no table, and what does the same for one of Lakehead's.
_CHANGES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"\s*{verb}\s+", _FLAGS), remedy)
    for verb, remedy in (
        (r"merge\s+into", "upsert into it: lhs.write(df, '{name}')"),
        (r"update", "upsert the rows that change: lhs.write(df, '{name}', columns=[...])"),
        (r"delete\s+from", "write the keys: lhs.write(df, '{name}', operation='delete')"),
        (r"truncate\s+table", "con.table('{name}').truncate()"),
        (rf"drop\s+(?:table|view){_IF}", "con.drop_table('{name}')"),
        (r"alter\s+table", "con.sql(\"alter table {name} ...\"), or con.table('{name}').alter()"),
        (r"(?:analyze|repair|msck\s+repair)\s+table", "there is nothing to do"),
        (r"show\s+create\s+table", "describe {name}, or con.table('{name}').schema"),
        (r"show\s+tblproperties", "con.table('{name}').properties"),
        (r"show\s+partitions", "con.table('{name}').status()"),
        (
            rf"(?:un)?cache\s+(?:lazy\s+)?table{_IF}",
            "lhs.table(spark, '{name}').cache(), or cache table some_name as select * from {name}",
        ),
    )
)
_INSERTS = "write a DataFrame to it: lhs.write(df, '{name}')"
_CREATES = re.compile(rf"\s*(?:create(?:\s+or\s+replace)?|replace)\s+table{_IF}\s+", _FLAGS)


_SHOW = re.compile(rf"\s*show\s+tables\s+(?:in|from)\s+{NAME}", _FLAGS)
_SHOW_DATABASES = re.compile(r"\s*show\s+(?:databases|schemas|namespaces)\b", _FLAGS)
_LIKE = re.compile(r"\s*(?:like\s*)?;?\s*", _FLAGS)
_STRINGS = re.compile(r"""--[^\n]*|/\*.*?\*/|(?P<quote>['"])(?P<text>.*?)(?P=quote)""", _FLAGS)


@dataclass(frozen=True)
class ShownDatabases:
    """Databases that a statement wants listed.

    Attributes:
        like: a name, with ``*`` for any text, or some of them with ``|`` between; None for all.
    """

    like: str | None

    @classmethod
    def of(cls, query: str, text: str) -> ShownDatabases | None:
        """What a statement, which is ``text`` with its strings and comments blanked, wants listed; None for another
        one."""
        found = _SHOW_DATABASES.match(text)
        return None if found is None or not _ends(text, found.end()) else cls(_pattern(query, found.end()))

    def has(self, name: str) -> bool:
        """Whether it is one of these, as Spark tells it."""
        return self.like is None or any(_is_like(name, part.strip()) for part in self.like.split("|"))


@dataclass(frozen=True)
class ShownTables(ShownDatabases):
    """A database whose tables a statement wants listed; ``like`` as of databases."""

    database: str

    @classmethod
    def of(cls, query: str, text: str) -> ShownTables | None:
        """As of databases."""
        found = _SHOW.match(text)
        if found is None or not _ends(text, found.end()):
            return None
        return cls(_pattern(query, found.end()), unquoted(found["name"]))


def _ends(text: str, at: int) -> bool:
    """Whether no more follows there than a pattern."""
    return _LIKE.fullmatch(text, at) is not None


def _pattern(query: str, at: int) -> str | None:
    return next((s["text"] for s in _STRINGS.finditer(query, at) if s["quote"]), None)


def _is_like(name: str, pattern: str) -> bool:
    try:
        return re.fullmatch(pattern.replace("*", ".*"), name, re.IGNORECASE) is not None
    except re.error:
        return False


@dataclass(frozen=True)
class NamedQuery:
    """A query that a statement gives a name in the session: a temporary view, or a table that is cached.

    Attributes:
        name: of the view.
        columns: of the view, None for those of the query.
        start: where the query begins in the statement.
        replace: whether a view of that name may be there.
        everywhere: whether it is a view of all sessions, in ``global_temp``.
        cached: whether its rows are kept; None for no, False for as soon as they are read.
    """

    name: str
    columns: tuple[str, ...] | None
    start: int
    replace: bool
    everywhere: bool
    cached: bool | None

    @classmethod
    def of(cls, text: str) -> NamedQuery | None:
        """What a statement, whose strings and comments are blank, names; None if it does not."""
        if (view := _VIEW.match(text)) is not None:
            given = view["columns"]
            columns = None if given is None else tuple(_column(c) for c in given.split(","))
            replace, everywhere = bool(view["replace"]), bool(view["everywhere"])
            return cls(unquoted(view["name"]), columns, view.end(), replace, everywhere, None)
        if (table := _CACHED.match(text)) is not None:
            return cls(unquoted(table["name"]), None, table.end(), False, False, not table["lazy"])
        return None


def _column(text: str) -> str:
    """A column of a view, whose comment is blank."""
    found = _COLUMN.fullmatch(text)
    return unquoted(found["name"] if found is not None else text.strip() or " ")


def keeps_text(text: str) -> bool:
    """Whether Spark keeps a statement, whose strings and comments are blank, as text: what a name stands for in it goes
    with the statement."""
    return _KEEPS.match(text) is not None


def require_read(text: str, table: Callable[[TableName], TableName | None], databases: Collection[str]) -> None:
    """Return unless a statement, whose strings and comments are blank, changes a Lakehead table.

    Args:
        table: what the table is called that a name means, None for no such table.
        databases: in which Lakehead's tables are, and no other.

    Raises:
        SqlError: it does; the message says what does the same.
    """
    for words, at in inserts(text):
        target = _name_at(text, at)
        if target is not None and (meant := table(target)) is not None:
            raise _refused(words, meant, _INSERTS)
    start = main_start(text)
    for changes, remedy in _CHANGES:
        if (verb := changes.match(text, start)) is not None:
            target = _name_at(text, verb.end())
            if target is not None and (meant := table(target)) is not None:
                raise _refused(verb[0], meant, remedy)
            return
    own = {name.casefold() for name in databases}
    if (verb := _CREATES.match(text)) is not None:
        target = _name_at(text, verb.end())
        if target is not None and len(target.path) == 2 and target.path[0].casefold() in own:
            raise _refused(
                verb[0], target, "make it of a DataFrame: lhs.write(df, '{name}', primary_key=...), or con.create_table"
            )


def _refused(verb: str, target: TableName, remedy: str) -> SqlError:
    words = " ".join(verb.lower().split())
    return SqlError(f"lhs.sql reads {target.table}, it does not {words}: {remedy.format(name=target.table)}")


def _name_at(text: str, at: int) -> TableName | None:
    found = next(find_names(text[at:]), None)
    return found if found is not None and not text[at : at + found.start].strip() else None
