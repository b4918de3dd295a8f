"""Who asks, and what they may do: the one place that every request passes, whatever transport it came by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lakehead.errors import PermissionDeniedError
from lakehead.protocol.privileges import Database, Privilege, Target


class Rights(Protocol):
    """What a principal was granted, as of now."""

    def allow(self, privilege: Privilege, target: Target) -> bool:
        """Whether they may do this.

        Raises:
            AuthenticationError: they are nobody any more.
        """
        ...


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        name: for messages and logs; never a secret.
        privileges: what they may do, on everything, whatever was granted.
        peer: the connection that they came by, as far as it is known.
        principal: whose leases and writers theirs are; no text of those who may do all.
        rights: what was granted to that one.
    """

    name: str
    privileges: frozenset[Privilege]
    peer: str = ""
    principal: str = ""
    rights: Rights | None = None

    @property
    def share(self) -> str:
        """Who has one share of the server: a principal, or one connection of others."""
        return self.principal or self.peer


EMBEDDED_OWNER = Caller("the process that serves the folder", frozenset(Privilege))
TOKEN_HOLDER = Caller("a holder of the server's token", frozenset(Privilege))


def may(caller: Caller, privilege: Privilege, target: Target) -> bool:
    """Whether the caller may do this to a table, by id or by path, to a database, or to anything at all.

    Raises:
        AuthenticationError: they are nobody any more.
    """
    return privilege in caller.privileges or (caller.rights is not None and caller.rights.allow(privilege, target))


def authorize(caller: Caller, privilege: Privilege, target: Target) -> None:
    """Return if the caller may do this; see `may`.

    Raises:
        PermissionDeniedError: they may not; what is not there is as what they may not know of.
        AuthenticationError: they are nobody any more.
    """
    if not may(caller, privilege, target):
        what = "this" if target is None else f"{'in' if isinstance(target, Database) else 'table'} {target}"
        raise PermissionDeniedError(
            f"{caller.name} has no privilege to {privilege.value} {what}: ask who runs the server for it",
            privilege=privilege.value,
            **({} if target is None or isinstance(target, Database) else {"table": str(target)}),
        )
