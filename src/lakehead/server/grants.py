"""Tokens, grants and roles of one server, as requests make and list them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from lakehead.config import TOKEN_PREFIX, Limits
from lakehead.env import Env
from lakehead.errors import InvalidRequestError
from lakehead.protocol.grants import (
    CreateToken,
    Grant,
    Granted,
    GrantsReply,
    ListGrants,
    ListTokens,
    Revoke,
    RevokeToken,
    TokenInfo,
    TokenReply,
    TokensReply,
    WhoAmI,
    WhoAmIReply,
)
from lakehead.protocol.messages import Done
from lakehead.protocol.privileges import (
    EVERYTHING,
    OF_DATABASES,
    Database,
    Privilege,
    Target,
    parse_scope,
    require_grantee,
    require_principal,
    require_role,
    require_unsigned,
)
from lakehead.server.access import Caller, may
from lakehead.server.catalog import AddToken, GiveRole, GrantPrivileges, RemoveToken, RevokePrivileges, TakeRole
from lakehead.server.metadata import GrantRow, MetadataStore
from lakehead.server.quotas import Quotas

_ID_DIGITS = 16
_ORDER = [p.value for p in Privilege]


class Grants:
    """Answers requests about who may do what. Thread-safe."""

    def __init__(self, metadata: MetadataStore, env: Env, limits: Limits, quotas: Quotas) -> None:
        self._metadata = metadata
        self._clock = env.clock
        self._randomness = env.randomness
        self._limits = limits
        self._quotas = quotas

    def create_token(self, request: CreateToken) -> TokenReply:
        """See `CreateToken`."""
        principal = require_unsigned(request.principal)
        token_id, secret = self._randomness.uuid_hex()[:_ID_DIGITS], self._randomness.token()
        now = self._clock.now_us()
        expires = None if request.seconds is None else now + int(request.seconds * 1_000_000)
        digest = hashlib.sha256(secret.encode()).digest()
        self._metadata.submit(AddToken(token_id, principal, digest, now, expires, self._limits.tokens_max))
        return TokenReply(id=token_id, token=f"{TOKEN_PREFIX}{token_id}_{secret}")

    def list_tokens(self, _: ListTokens) -> TokensReply:
        """See `ListTokens`."""
        now = self._clock.now_us()
        return TokensReply(
            tokens=[
                TokenInfo(
                    id=t.id,
                    principal=t.principal,
                    created_us=t.created_us,
                    expires_us=t.expires_us,
                    expired=t.expires_us is not None and t.expires_us <= now,
                )
                for t in self._metadata.tokens()
            ]
        )

    def revoke_token(self, request: RevokeToken) -> Done:
        """See `RevokeToken`."""
        if self._metadata.token(request.id) is None:
            raise InvalidRequestError(f"there is no token {request.id!r}: see the list of tokens")
        self._metadata.submit(RemoveToken(request.id))
        return Done()

    def grant(self, request: Grant) -> Done:
        """See `Grant`."""
        if not request.privileges:
            role, who = require_role(request.on), require_principal(request.to)
            self._metadata.submit(GiveRole(who, role, self._limits.grants_max))
            return Done()
        to, (database, table_id) = require_grantee(request.to), self._scope(request.on)
        senseless = OF_DATABASES.intersection(request.privileges) if table_id else ()
        if senseless:
            name = min(p.value for p in senseless)
            raise InvalidRequestError(f"{name} is granted on a database, or on *: {request.on} is a table")
        values = sorted({p.value for p in request.privileges})
        self._metadata.submit(GrantPrivileges(to, database, table_id, values, self._limits.grants_max))
        return Done()

    def revoke(self, request: Revoke) -> Done:
        """See `Revoke`."""
        if not request.privileges:
            self._metadata.submit(TakeRole(require_principal(request.to), require_role(request.on)))
            return Done()
        database, table_id = self._scope(request.on)
        values = sorted({p.value for p in request.privileges})
        self._metadata.submit(RevokePrivileges(require_grantee(request.to), database, table_id, values))
        return Done()

    def _scope(self, on: str) -> tuple[str, str]:
        """A database, or the id of a table, which keeps its grants when it is renamed."""
        scope = parse_scope(on)
        return (scope.name, "") if isinstance(scope, Database) else ("", self._metadata.table(scope).table_id)

    def who_am_i(self, _: WhoAmI, caller: Caller) -> WhoAmIReply:
        """See `WhoAmI`."""
        if not caller.principal:
            return WhoAmIReply(name=caller.name, principal=None, roles=[], grants=[])
        roles = self._metadata.roles(caller.principal)
        rows = self._metadata.grants([caller.principal, *roles])
        return WhoAmIReply(
            name=caller.name,
            principal=caller.principal,
            roles=roles,
            grants=self._told(rows),
            quota=self._quotas.of(caller.principal),
        )

    def list_grants(self, _: ListGrants, caller: Caller) -> GrantsReply:
        """See `ListGrants`."""
        own = {caller.principal, *self._metadata.roles(caller.principal)} if caller.principal else set()

        def visible(row: GrantRow) -> bool:
            on: Target = row.table_id or Database(row.database)
            return row.grantee in own or may(caller, Privilege.ADMIN, on)

        rows = self._metadata.grants(None if may(caller, Privilege.ADMIN, None) else sorted(own))
        told = self._told(row for row in rows if visible(row))
        every = may(caller, Privilege.ADMIN, EVERYTHING)
        roles = [(p, r) for p, r in self._metadata.role_members() if every or p == caller.principal]
        return GrantsReply(grants=told + [Granted(to=p, on=r, privileges=[]) for p, r in roles])

    def _told(self, rows: Iterable[GrantRow]) -> list[Granted]:
        paths = self._metadata.paths()
        found: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            on = str(paths.get(row.table_id, "")) if row.table_id else row.database
            if on:  # else the table was dropped this moment
                found.setdefault((row.grantee, on), []).append(row.privilege)
        return [
            Granted(to=to, on=on, privileges=sorted(given, key=_ORDER.index))
            for (to, on), given in sorted(found.items())
        ]
