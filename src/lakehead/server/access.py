"""Who asks, and what they may do: the one place that every request passes, whatever transport it came by."""

from __future__ import annotations

from dataclasses import dataclass

from lakehead.errors import PermissionDeniedError
from lakehead.protocol.privileges import Privilege
from lakehead.types import TablePath


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        name: for messages and logs; never a secret.
        privileges: what they may do, on every table.
        peer: the connection that they came by, as far as it is known; of several, each has a share of the server.
    """

    name: str
    privileges: frozenset[Privilege]
    peer: str = ""


EMBEDDED_OWNER = Caller("the process that serves the folder", frozenset(Privilege))
TOKEN_HOLDER = Caller("a holder of the server's token", frozenset(Privilege))


def authorize(caller: Caller, privilege: Privilege, table: str | TablePath | None) -> None:
    """Return if the caller may do this to a table, by id or by path, or to none in particular.

    Raises:
        PermissionDeniedError: they may not.
    """
    if privilege not in caller.privileges:
        what = "this" if table is None else f"table {table}"
        raise PermissionDeniedError(
            f"{caller.name} has no privilege to {privilege.value} {what}: ask who runs the server for it",
            privilege=privilege.value,
            **({} if table is None else {"table": str(table)}),
        )
