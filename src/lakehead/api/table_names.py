"""Lakehead's table names in SQL text: ``orders``, ``shop.orders``, ``shop.orders$lake$snapshots``.

Names with ``$`` are no SQL, and parsers disagree on what they make of them, so they are found in the text itself, token
by token, before any parser sees it. Strings, comments and quoted identifiers are skipped or taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lakehead.errors import SqlError

_TOKEN = re.compile(
    r"""
    (?P<skip> '(?:[^']|'')*' | --[^\n]* | /\*.*?\*/ | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$ | \d[\w.]* )
  | (?P<name>
      (?: "(?:[^"]|"")+" | `(?:[^`]|``)+` | [^\W\d]\w* )
      (?: \s*\.\s* (?: "(?:[^"]|"")+" | `(?:[^`]|``)+` | [^\W\d]\w* ) )*
      (?: \$ [^\W\d]\w* )*
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_FROM_A_VALUE = frozenset(("extract", "trim", "substring", "substr", "overlay"))
"""Functions in whose parentheses a FROM is followed by a value."""
_STARTS_TABLES = frozenset(("from", "join", "into", "table", "describe", "summarize"))
_ENDS_TABLES = frozenset(
    ("where", "group", "order", "having", "limit", "select", "on", "using", "union", "window", "qualify")
)
_FOLLOWS_TABLES = frozenset(("sort", "distribute", "cluster", "view"))
"""Of Spark's, which tables may have for names."""
_BEFORE_TABLES = frozenset(("lateral", "only", "extended", "formatted"))
_PART = re.compile(r'"(?:[^"]|"")+"|`(?:[^`]|``)+`|[^\W\d]\w*')


class Suffix(StrEnum):
    """What may follow a table's name after a ``$``, in any case."""

    LAKE = "lake"
    SNAPSHOTS = "lake$snapshots"
    FILES = "lake$files"
    CHANGELOG = "changelog"


def suffix_of(path: str, text: str) -> Suffix | None:
    """What a name says after its ``$``; None for nothing.

    Raises:
        SqlError: there is no such suffix.
    """
    if not text:
        return None
    try:
        return Suffix(text.lower())
    except ValueError:
        known = ", ".join(f"${s}" for s in Suffix)
        raise SqlError(f"{path}${text}: there is no such suffix; use one of {known}") from None


@dataclass(frozen=True)
class TableName:
    """A dotted name in a statement that may be a table's.

    ``path`` holds its parts, unquoted, without the suffix; ``suffix`` is what follows the first ``$``, or "".
    ``start`` and ``end`` are positions in the statement.
    """

    start: int
    end: int
    text: str
    path: tuple[str, ...]
    suffix: str

    @property
    def table(self) -> str:
        """``database.table``; a bare name lives in ``default``."""
        return ".".join(self.path) if len(self.path) > 1 else f"default.{self.path[0]}"


def find_names(sql: str) -> Iterator[TableName]:
    """Every identifier or dotted name outside strings and comments, in order; keywords among them."""
    for match in _TOKEN.finditer(sql):
        text = match["name"]
        if text is None:
            continue
        parts = _PART.findall(text)
        plain = [unquoted(p) for p in parts]
        dollars = _outer_dollar(text)
        if dollars is not None:
            count = text[dollars:].count("$")
            yield TableName(
                match.start(), match.end(), text, tuple(plain[: len(plain) - count]), "$".join(plain[-count:])
            )
            continue
        last, dollar, suffix = plain[-1].partition("$")
        path = (*plain[:-1], last) if dollar else tuple(plain)
        yield TableName(match.start(), match.end(), text, path, suffix)


def _outer_dollar(text: str) -> int | None:
    """Position of the first ``$`` outside quotes."""
    quote = ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in '"`':
            quote = c
        elif c == "$":
            return i
    return None


def unquoted(part: str) -> str:
    """What a part of a name, which may stand in quotes of either kind, is called."""
    if part[0] in '"`':
        return part[1:-1].replace(part[0] * 2, part[0])
    return part


def find_tables(sql: str, tables: Sequence[str]) -> list[TableName]:
    """Of `table_places` those that are one of ``tables`` (``database.table``), by the names that those have; a name
    with a suffix is taken as a table's whether or not it exists."""
    found = []
    for name in table_places(sql):
        own = spelt(name, tables)
        if own is not None or name.suffix:
            found.append(own or name)
    return found


def table_places(sql: str) -> list[TableName]:
    """Names in a statement that stand where tables do, and those with a suffix.

    A bare name stands for ``default.name``. Names after FROM, JOIN, a comma in FROM, INTO or TABLE count; column
    references such as ``orders.price`` do not.
    """
    found = []
    expecting, in_from, of_value, outer, cursor = False, False, False, [], 0
    words: list[str] = []
    for name in find_names(sql):
        between = _code_between(sql, cursor, name.start)
        for at, c in enumerate(between):
            if c == "(":
                outer.append((in_from, of_value))
                called = words[-1:] if not between[:at].strip() else []
                in_from, of_value = expecting, not _FROM_A_VALUE.isdisjoint(called)
            elif c == ")":
                in_from, of_value = outer.pop() if outer else (False, False)
                expecting = False
            elif c == ",":
                expecting = in_from
            elif between[at : at + 2] == "|>":  # what follows is applied to all before it
                expecting, in_from = False, False
        cursor = name.end
        word = name.text.lower()
        if between.endswith(":"):  # a parameter, a field or a type
            word = f":{word}"
        words.append(word)
        if word == "from" and (of_value or _is_comparison(words)):
            expecting = False
        elif word in _STARTS_TABLES or _shows(words):
            expecting, in_from = True, in_from or word in ("from", "join")
        elif word in _ENDS_TABLES or (word in _FOLLOWS_TABLES and not expecting):
            expecting, in_from = False, in_from and word in ("on", "using")
        elif word not in _BEFORE_TABLES:
            if expecting or name.suffix:
                found.append(name)
            expecting = False
    return found


def _is_comparison(words: Sequence[str]) -> bool:
    """Whether a FROM, the last of the words, is that of IS [NOT] DISTINCT FROM."""
    return words[-2:-1] == ["distinct"] and words[-3:-2] in (["is"], ["not"])


def _shows(words: Sequence[str]) -> bool:
    """Whether these words, all of a statement so far, are followed by the table that it describes."""
    return words == ["desc"] or words == ["show", "columns", "in"]


def spelt(name: TableName, tables: Sequence[str]) -> TableName | None:
    """A name as the table is called that it means: exactly, else the only one but for case; None for no table."""
    if name.table in tables:
        return name
    folded = name.table.casefold()
    alike = [t for t in tables if t.casefold() == folded]
    if len(alike) != 1:
        return None
    database, _, table = alike[0].partition(".")
    return replace(name, path=(database, table) if len(name.path) > 1 else (table,))


def _code_between(sql: str, start: int, end: int) -> str:
    """Characters between two names, without strings and comments."""
    return re.sub(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", " ", sql[start:end], flags=re.DOTALL)


def replace_names(sql: str, mapping: Mapping[TableName, str]) -> str:
    """The statement with each name replaced by an identifier, which is inserted as it is; what stood beside a quoted
    one, such as an alias, stays a word of its own."""
    out, at = [], 0
    for name in sorted(mapping, key=lambda n: n.start):
        found, after = mapping[name], sql[name.end : name.end + 1]
        joined = found and after and _is_word(found[-1]) and _is_word(after)
        out += [sql[at : name.start], f"{found} " if joined else found]
        at = name.end
    return "".join([*out, sql[at:]])


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
