"""What callers may do, and on what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from lakehead.errors import InvalidRequestError
from lakehead.types import TablePath


class Privilege(Enum):
    """What a request needs from whoever sends it, on what it names. Who is granted one has `INCLUDES` of it, too."""

    USAGE = "usage"
    """Know that a database is there; of no database in particular, ask who one is."""
    DESCRIBE = "describe"
    """Learn which tables there are, and their definitions."""
    READ = "read"
    """Rows, and how far log and lake reach."""
    WRITE = "write"
    """Rows, and the names of writers."""
    CREATE = "create"
    """Make tables; who has made one may do all with it but grant it to others."""
    MANAGE = "manage"
    """Change, rename, empty and drop tables."""
    TIER = "tier"
    """Commit to the lake, and clean it up."""
    ADMIN = "admin"
    """Decide who may do what, and whose a lake is."""


_KNOWS = frozenset({Privilege.DESCRIBE, Privilege.USAGE})
INCLUDES: Mapping[Privilege, frozenset[Privilege]] = {
    Privilege.USAGE: frozenset(),
    Privilege.DESCRIBE: frozenset({Privilege.USAGE}),
    Privilege.READ: _KNOWS,
    Privilege.WRITE: _KNOWS,
    Privilege.CREATE: frozenset({Privilege.USAGE}),
    Privilege.MANAGE: _KNOWS,
    Privilege.TIER: _KNOWS | {Privilege.READ},
    Privilege.ADMIN: frozenset(Privilege) - {Privilege.ADMIN},
}
OF_MAKER = (Privilege.READ, Privilege.WRITE, Privilege.MANAGE, Privilege.TIER)
"""What who makes a table may do with it."""
OF_DATABASES = frozenset({Privilege.USAGE, Privilege.CREATE})
"""What means nothing on a table."""


def with_included(privileges: Iterable[Privilege]) -> frozenset[Privilege]:
    """These, and what each includes."""
    given = frozenset(privileges)
    return given.union(*(INCLUDES[p] for p in given))


@dataclass(frozen=True)
class Database:
    """All tables of a database, those too that are made later; of every one, where its name is ``*``."""

    name: str

    def __str__(self) -> str:
        return self.name


EVERYTHING = Database("*")
Target: TypeAlias = str | TablePath | Database | None
"""A table, by id or by path, a database, or, where it is None, anything at all."""

ROLE = "role:"
SIGNED = "oidc:"
"""With which names begin that a signed token says, and no others."""
_DATABASE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PRINCIPAL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/:+|-]{0,254}")


def parse_scope(text: str) -> Database | TablePath:
    """What ``*``, ``database`` or ``database.table`` means.

    Raises:
        InvalidRequestError: it is none of them.
    """
    if text == EVERYTHING.name or _DATABASE.fullmatch(text):
        return Database(text)
    if "." not in text:
        raise InvalidRequestError(f"{text!r} is nothing to grant: write *, a database, or database.table")
    return TablePath.parse(text)


def require_principal(name: str) -> str:
    """The name, if it is one that a principal can have.

    Raises:
        InvalidRequestError: it is not.
    """
    if name.startswith(ROLE) or not _PRINCIPAL.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} is no name of a principal: use up to 255 letters, digits and _.@/:+|-, not beginning with {ROLE}"
        )
    return name


def require_unsigned(name: str) -> str:
    """The name, if it is one that a principal can have without a signed token; raises as `require_principal`."""
    if name.startswith(SIGNED):
        raise InvalidRequestError(f"{name!r} is who has a signed token that says so, and has no other: grant to it")
    return require_principal(name)


def require_role(name: str) -> str:
    """The name, if it is one of a role: ``role:`` and a name; raises as `require_principal`."""
    require_principal(name.removeprefix(ROLE))
    if not name.startswith(ROLE):
        raise InvalidRequestError(f"{name!r} is no role: write {ROLE}{name}")
    return name


def require_grantee(name: str) -> str:
    """The name, if it is one of a principal or of a role; raises as `require_principal`."""
    return require_role(name) if name.startswith(ROLE) else require_principal(name)
