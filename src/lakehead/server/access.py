"""Who asks, and what they may do: the one place that every request passes, whatever transport it came by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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

    def table_name(self, table: str) -> str:
        """What the table of an id is called now, whether or not they may know; what is no id is given back."""
        ...


class Share(NamedTuple):
    """Who has one share of the server.

    Attributes:
        of: a principal, or all who hold the server's token; no text for the process that serves the folder.
        process: which process of those, as it says and as far as its host bears it out; principals have one share.
    """

    of: str
    process: str


NOBODY = Share("", "")
_TOKEN = "the server's token"


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        name: for messages and logs; never a secret.
        privileges: what they may do, on everything, whatever was granted.
        peer: the connection that they came by, as far as it is known.
        principal: whose leases and writers theirs are; no text of those who may do all.
        rights: what was granted to that one.
        process: which one it says that it is.
    """

    name: str
    privileges: frozenset[Privilege]
    peer: str = ""
    principal: str = ""
    rights: Rights | None = None
    process: str = ""

    @property
    def share(self) -> Share:
        if self.principal:
            return Share(self.principal, "")
        return Share(_TOKEN, f"{host_of(self.peer)} {self.process}") if self.peer else NOBODY


def host_of(peer: str) -> str:
    """From where a connection comes, without its port: a client has as many ports as it likes."""
    return peer.rpartition(":")[0] or peer


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
        PermissionDeniedError: they may not; what is not there is as what they may not know of. Who knows a table by its
            id is told its name only if they may describe it.
        AuthenticationError: they are nobody any more.
    """
    if not may(caller, privilege, target):
        if isinstance(target, str) and caller.rights is not None and may(caller, Privilege.DESCRIBE, target):
            target = caller.rights.table_name(target)
        what = "this" if target is None else f"{'in' if isinstance(target, Database) else 'table'} {target}"
        raise PermissionDeniedError(
            f"{caller.name} has no privilege to {privilege.value} {what}: ask who runs the server for it",
            privilege=privilege.value,
            **({} if target is None or isinstance(target, Database) else {"table": str(target)}),
        )
