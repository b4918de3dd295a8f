"""Who callers are and what they were granted: tokens, grants and roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, TypeAlias

import msgspec

from lakehead.protocol.messages import A_co, Done, Int64, Message, Reply, Request
from lakehead.protocol.privileges import EVERYTHING, Privilege, Target, parse_scope
from lakehead.protocol.quotas import QuotaInfo

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=300)]


class Granted(Message, frozen=True, kw_only=True):
    """What a principal or role was granted. ``on`` is ``*``, a database or a table; or a role that the principal has,
    and then there are no privileges."""

    to: str
    on: str
    privileges: list[str]


class GrantsReply(Reply, frozen=True, kw_only=True):
    grants: list[Granted]


class ListGrants(Request[GrantsReply], frozen=True, kw_only=True):
    """What the sender was granted, itself and by its roles, and what others were on that of which it is admin."""

    privilege = Privilege.USAGE


class WhoAmIReply(Reply, frozen=True, kw_only=True):
    """``principal`` is None of who holds the server's own token, or serves the folder: they may do all. ``quota`` is
    None of who has none."""

    name: str
    principal: str | None
    roles: list[str]
    grants: list[Granted]
    quota: QuotaInfo | None = None


class WhoAmI(Request[WhoAmIReply], frozen=True, kw_only=True):
    """As whom the sender is known, and what that one was granted, roles included."""

    privilege = Privilege.USAGE


class TokenReply(Reply, frozen=True, kw_only=True):
    """The only time that the token is told: the server keeps a digest of it."""

    id: str
    token: str

    def __repr__(self) -> str:
        return f"TokenReply(id={self.id!r})"


class _TokenRequest(Request[A_co], Generic[A_co], frozen=True, kw_only=True):
    """Base of requests about tokens, which may be anybody's."""

    privilege = Privilege.ADMIN

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        return [(Privilege.ADMIN, EVERYTHING)]


class CreateToken(_TokenRequest[TokenReply], frozen=True, kw_only=True):
    """Give a principal one token more; after ``seconds``, where they are given, it is worth nothing."""

    principal: Name
    seconds: Annotated[float, msgspec.Meta(gt=0, le=100 * 366 * 86_400)] | None = None

    @property
    def idempotent(self) -> bool:
        return False


class TokenInfo(Message, frozen=True, kw_only=True):
    """A token that was not revoked; times are UTC, in microseconds since the epoch."""

    id: str
    principal: str
    created_us: Int64
    expires_us: Int64 | None
    expired: bool


class TokensReply(Reply, frozen=True, kw_only=True):
    tokens: list[TokenInfo]


class ListTokens(_TokenRequest[TokensReply], frozen=True, kw_only=True): ...


class RevokeToken(_TokenRequest[Done], frozen=True, kw_only=True):
    """Whoever holds it is nobody from now on; streams of theirs end within seconds."""

    id: Name

    @property
    def idempotent(self) -> bool:
        return False


class _GrantRequest(Request[Done], frozen=True, kw_only=True):
    """Base of requests that change what a principal, or who has a role, may do ``on`` ``*``, a database or a table.
    Without privileges ``on`` is a role of the principal."""

    privilege = Privilege.ADMIN
    to: Name
    on: Name
    privileges: list[Privilege]

    @property
    def needs(self) -> Sequence[tuple[Privilege, Target]]:
        return [(Privilege.ADMIN, parse_scope(self.on) if self.privileges else EVERYTHING)]


class Grant(_GrantRequest, frozen=True, kw_only=True):
    """Let them do it, or have the role."""


class Revoke(_GrantRequest, frozen=True, kw_only=True):
    """Take back what `Grant` gave, as far as it was given; what others were granted, or a wider grant, stays."""
