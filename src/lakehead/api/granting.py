"""What a connection says of who may do what: tokens, grants and roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lakehead.config import parse_duration_ms, parse_size_bytes
from lakehead.errors import InvalidRequestError
from lakehead.protocol import messages as m
from lakehead.protocol.grants import (
    CreateToken,
    Grant,
    Granted,
    ListGrants,
    ListTokens,
    Revoke,
    RevokeToken,
    TokenInfo,
    TokenReply,
    WhoAmI,
    WhoAmIReply,
)
from lakehead.protocol.privileges import ROLE, Privilege
from lakehead.protocol.quotas import RATE_MIN, ListQuotas, Quota, QuotaInfo, SetQuota


class Granting:
    """The part of a `Connection` that is about callers and not about tables."""

    def _ask(self, request: m.Request[m.R]) -> m.R:
        raise NotImplementedError

    def whoami(self) -> WhoAmIReply:
        """As whom the server knows this connection, with its roles and what was granted to it and to them."""
        return self._ask(WhoAmI())

    def grants(self) -> list[Granted]:
        """What was granted to this connection's principal and its roles, and to anybody on that of which it is admin.

        Who has a role is listed, too: ``on`` is then the role, and there are no privileges.
        """
        return self._ask(ListGrants()).grants

    def grant(self, privileges: str | Sequence[str], on: str | None = None, *, to: str) -> None:
        """Let a principal, or all that have a role, do something; of calls that were let in before, too.

        Args:
            privileges: of usage, describe, read, write, create, manage, tier, admin: ``"read"``, ``"read, write"`` or a
                list; or a role, ``"role:analysts"``, which the principal then has.
            on: ``"*"``, a database, or a table, which keeps its grants when it is renamed; nothing for a role.
            to: a principal, which need not have a token yet, or a role.

        Raises:
            PermissionDeniedError: this connection's principal is no admin of that.
            TableNotFoundError: there is no such table.
            InvalidRequestError: a name is none, or the privilege means nothing there.
        """
        where, wanted = _what(privileges, on)
        self._ask(Grant(to=to, on=where, privileges=wanted))

    def revoke(self, privileges: str | Sequence[str], on: str | None = None, *, from_: str) -> None:
        """Take back what `grant` gave, with the same words. Streams of theirs end within seconds.

        What was granted more widely, on a database or to a role, stays.

        Raises: as `grant`.
        """
        where, wanted = _what(privileges, on)
        self._ask(Revoke(to=from_, on=where, privileges=wanted))

    def create_token(self, principal: str, *, expires: str | float | None = None) -> TokenReply:
        """Make a token for a principal, who may do what it was granted, and nothing until then.

        The token is in the answer and nowhere else: the server keeps a digest of it. Several of one principal are worth
        the same, so that one can follow another.

        Args:
            expires: after how long it is worth nothing: ``"90d"``, or seconds; None for never.

        Raises:
            PermissionDeniedError: this connection's principal is no admin of everything.
            InvalidRequestError: no principal can have this name.
        """
        seconds = None if expires is None else parse_duration_ms(expires, "expires") / 1000
        if seconds == 0:
            raise InvalidRequestError("a token that expires at once is worth nothing: give a longer time")
        return self._ask(CreateToken(principal=principal, seconds=seconds))

    def tokens(self) -> list[TokenInfo]:
        """Tokens that were not revoked, by principal; never the tokens themselves.

        Raises:
            PermissionDeniedError: this connection's principal is no admin of everything.
        """
        return self._ask(ListTokens()).tokens

    def quotas(self) -> list[QuotaInfo]:
        """What bounds this connection's principal, and what it takes; all quotas, where it is admin of everything."""
        return self._ask(ListQuotas()).quotas

    def set_quota(
        self,
        principal: str,
        *,
        bytes_in: str | int | None = None,
        bytes_out: str | int | None = None,
        streams: int | None = None,
        leases: int | None = None,
        tables: int | None = None,
        stored_bytes: str | int | None = None,
    ) -> None:
        """Bound what a principal takes of the server by this and nothing else, at once; without bounds it has no quota.

        Who sends or is sent more than a second's worth of bytes waits, up to half a minute a call, then gets
        `QuotaExceededError`, as whoever opens too many streams or pinned reads does; all of it passes. Too many tables,
        or too much in them, is `LimitExceededError`. Who may do all, by the server's own token, has no quota.

        Args:
            principal: its name, or ``"*"``: each that has no quota of its own.
            bytes_in: of rows and keys that it sends, a second; ``"10MiB"``, or a number of at least 1024.
            bytes_out: of rows that it is sent, a second; what it reads of lake files passes no server.
            streams: reads and subscriptions that it has open.
            leases: pinned reads that it holds; a scan holds one for each of its tables.
            tables: tables that it has made and that are still there.
            stored_bytes: what the files of these take in the server's folder, whoever writes; of a lake if it is there.

        Raises:
            PermissionDeniedError: this connection's principal is no admin of everything.
            InvalidRequestError: a bound is too small, or no principal can have this name.
        """
        sizes = {"bytes_in": bytes_in, "bytes_out": bytes_out, "stored_bytes": stored_bytes}
        bounds: dict[str, Any] = {"streams": streams, "leases": leases, "tables": tables}
        bounds |= {k: 0 if v in (0, "0") else parse_size_bytes(v, k) for k, v in sizes.items() if v is not None}
        try:
            quota = msgspec.convert(bounds, Quota)
        except msgspec.ValidationError as e:
            name = next((name for name in bounds if str(e).endswith(f"`$.{name}`")), "")
            least = RATE_MIN if name in ("bytes_in", "bytes_out") else 0
            raise InvalidRequestError(
                f"{name}={bounds.get(name)!r} is no bound: write a whole number, {least:,} or more, or None"
            ) from e
        self._ask(SetQuota(principal=principal, quota=quota))

    def revoke_token(self, id: str) -> None:
        """Make a token worthless, for calls and streams that were let in by it, too.

        Raises:
            PermissionDeniedError: this connection's principal is no admin of everything.
            InvalidRequestError: there is no such token.
        """
        self._ask(RevokeToken(id=id))


def _what(privileges: str | Sequence[str], on: str | None) -> tuple[str, list[Privilege]]:
    """On what, and which; without privileges it is a role."""
    names = privileges.split(",") if isinstance(privileges, str) else list(privileges)
    names = [name.strip() for name in names]
    if len(names) == 1 and names[0].startswith(ROLE):
        if on is not None:
            raise InvalidRequestError(f"{names[0]} is a role, which is given as it is: leave {on!r} out")
        return names[0], []
    if on is None:
        raise InvalidRequestError("say on what: *, a database, or a table")
    known = {p.value: p for p in Privilege}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InvalidRequestError(f"{unknown or names} are no privileges: use some of {', '.join(known)}")
    return on, [known[name] for name in names]
