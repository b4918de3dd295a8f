"""Names that a Spark statement defines itself (``with orders as (...)``), and where they mean that; pure.

Statements are given with their strings and comments blank.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lakehead.api.table_names import unquoted

NAME = r"(?P<name>`(?:[^`]|``)+`|[^\W\d]\w*)"
_WITH = re.compile(r"\bwith\b(?P<recursive>\s+recursive\b)?", re.IGNORECASE)
_DEFINES = re.compile(rf"\s*{NAME}\s*(?:\([^()]*\)\s*)?(?:as\s*)?\(", re.IGNORECASE)
_QUOTED = re.compile(r"`(?:[^`]|``)*`")


class DefinedName(NamedTuple):
    """A name, folded, that means what the statement says from one position to another."""

    name: str
    start: int
    end: int


def defined_names(text: str) -> list[DefinedName]:
    """Each name that a ``with`` defines: it means that in what follows, up to the end of the query that has the
    ``with``; in its own definition only where that is recursive."""
    plain, out = _without_quoted(text), []
    for clause in _WITH.finditer(plain):
        end = _closing(plain, clause.end())
        for name, start, body_end in _definitions(text, plain, clause.end()):
            out.append(DefinedName(name.casefold(), start if clause["recursive"] else body_end, end))
    return out


def main_start(text: str) -> int:
    """Where a statement begins, behind a ``with`` that it begins with."""
    plain = _without_quoted(text)
    clause = _WITH.match(plain, len(plain) - len(plain.lstrip()))
    return 0 if clause is None else max((end for *_, end in _definitions(text, plain, clause.end())), default=0)


def inserts(text: str) -> list[tuple[str, int]]:
    """Each ``insert`` of a statement, wherever it stands: its words, and where what they insert into begins."""
    found = re.finditer(
        r"\binsert\s+(?:into|overwrite)\b(?:\s+table\b)?\s*", _without_quoted(text), re.IGNORECASE | re.DOTALL
    )
    return [(one[0], one.end()) for one in found]


def _without_quoted(text: str) -> str:
    return _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)


def _definitions(text: str, plain: str, at: int) -> list[tuple[str, int, int]]:
    """Of each name after a ``with``, where its definition begins and ends."""
    out: list[tuple[str, int, int]] = []
    while (found := _DEFINES.match(text, at)) is not None:
        end = min(_closing(plain, found.end()) + 1, len(plain))
        out.append((unquoted(found["name"]), found.start(), end))
        at = end + len(plain[end:]) - len(plain[end:].lstrip())
        if plain[at : at + 1] != ",":
            break
        at += 1
    return out


def _closing(plain: str, at: int) -> int:
    """Where the parenthesis is closed inside which this position is; the end where there is none."""
    depth = 0
    for i in range(at, len(plain)):
        if plain[i] == "(":
            depth += 1
        elif plain[i] == ")":
            if depth == 0:
                return i
            depth -= 1
    return len(plain)
