"""Principals of one server: by what they are known, and what they may do, as the catalog has it now."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from lakehead.config import TOKEN_PREFIX
from lakehead.env.clock import Clock
from lakehead.errors import AuthenticationError
from lakehead.protocol.privileges import EVERYTHING, Database, Privilege, Target, with_included
from lakehead.server.access import Caller
from lakehead.server.metadata import GrantRow, MetadataStore, Token
from lakehead.types import TablePath

_REMEMBERED_MAX = 10_000
_NOBODY = Token("", "", hashlib.sha256(b"").digest(), 0, None)


class GrantedRights:
    """What was granted to a principal and its roles, as of one version of the catalog's grants and tables."""

    def __init__(self, rows: list[GrantRow], paths: dict[str, TablePath]) -> None:
        self._paths = paths
        self._ids = {path: table_id for table_id, path in paths.items()}
        self._databases: dict[str, frozenset[Privilege]] = {}
        self._tables: dict[str, frozenset[Privilege]] = {}
        for row in rows:
            given = with_included([Privilege(row.privilege)])
            of, name = (self._tables, row.table_id) if row.table_id else (self._databases, row.database)
            of[name] = of.get(name, frozenset()) | given
        self._everywhere = self._databases.pop(EVERYTHING.name, frozenset())
        every = (*self._databases.values(), *self._tables.values())
        # Who is somebody may ask as whom it is known.
        self._somewhere = self._everywhere.union({Privilege.USAGE}, *every)
        self._known: dict[tuple[Privilege, Target], bool] = {}

    def allow(self, privilege: Privilege, target: Target) -> bool:
        if privilege in self._everywhere:
            return True
        key = (privilege, target)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            found = self._known[key] = self._look_up(privilege, target)
        return found

    def _look_up(self, privilege: Privilege, target: Target) -> bool:
        if target is None:
            return privilege in self._somewhere
        if isinstance(target, Database):
            # Of a table that one knows, one knows the database.
            tables = (t for t in self._tables if t in self._paths and self._paths[t].database == target.name)
            through = privilege is Privilege.USAGE and any(tables)
            return through or privilege in self._databases.get(target.name, ())
        path = target if isinstance(target, TablePath) else self._paths.get(target)
        if path is None:
            # No such table is there, and whoever asks had to know its id: that it is gone is no secret.
            return privilege in self._somewhere
        table_id = self._ids.get(path, "")
        return privilege in self._databases.get(path.database, ()) or privilege in self._tables.get(table_id, ())


@dataclass
class _Seen:
    """What was read of one version of the catalog."""

    version: int
    paths: dict[str, TablePath] | None = None
    rights: dict[str, GrantedRights] = field(default_factory=dict)
    tokens: dict[str, Token | None] = field(default_factory=dict)


class Principals:
    """Thread-safe."""

    def __init__(self, metadata: MetadataStore, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._seen = _Seen(-1)

    def _now(self) -> _Seen:
        # The version first: what is read after it is of that version or newer, never older.
        version = self._metadata.access_version
        seen = self._seen
        if seen.version != version:
            seen = self._seen = _Seen(version)
        return seen

    def by_token(self, text: str) -> Caller:
        """Whose a token is.

        Raises:
            AuthenticationError: nobody's: it is unknown, revoked or expired.
        """
        token_id, _, secret = text.removeprefix(TOKEN_PREFIX).partition("_")
        token = self._metadata.token(token_id) or _NOBODY
        same = hmac.compare_digest(hashlib.sha256(secret.encode()).digest(), token.digest)
        if token is _NOBODY or not same:
            raise AuthenticationError("the token is unknown or revoked")
        self._require_young(token)
        return self._caller(token.principal, token.id)

    def by_certificate(self, name: str) -> Caller:
        """Who has a certificate of this name, which an authority that the server trusts has signed."""
        return self._caller(name, None)

    def by_signature(self, name: str, until_us: int) -> Caller:
        """Who has a token with this name, which an issuer that the server trusts has signed; until then."""
        return self._caller(name, None, until_us)

    def _caller(self, name: str, token_id: str | None, until_us: int | None = None) -> Caller:
        return Caller(name, frozenset(), principal=name, rights=_OfPrincipal(self, name, token_id, until_us))

    def rights(self, name: str) -> GrantedRights:
        """What a principal may do now."""
        seen = self._now()
        found = seen.rights.get(name)
        if found is None:
            rows = self._metadata.grants([name, *self._metadata.roles(name)])
            found = seen.rights[name] = GrantedRights(rows, self._paths(seen))
        return found

    def _paths(self, seen: _Seen) -> dict[str, TablePath]:
        found = seen.paths
        if found is None:
            found = seen.paths = self._metadata.paths()
        return found

    def table_name(self, table: str) -> str:
        """What the table of an id is called now; what is no id is given back."""
        return str(self._paths(self._now()).get(table, table))

    def require_valid(self, token_id: str) -> None:
        """Return if a token is worth something still.

        Raises:
            AuthenticationError: it was revoked, or has expired.
        """
        seen = self._now()
        if token_id not in seen.tokens:
            seen.tokens[token_id] = self._metadata.token(token_id)
        token = seen.tokens[token_id]
        if token is None:
            raise AuthenticationError("the token was revoked: ask who runs the server for another")
        self._require_young(token)

    def _require_young(self, token: Token) -> None:
        if token.expires_us is not None:
            self.require_before(token.expires_us)

    def require_before(self, until_us: int) -> None:
        """Return if it is not yet that moment; raises as `require_valid`."""
        if self._clock.now_us() >= until_us:
            raise AuthenticationError("the token has expired: ask who gave it to you for another")


class _OfPrincipal:
    """What somebody may do who came by a token, as long as that is worth something, or by a certificate."""

    def __init__(self, principals: Principals, name: str, token_id: str | None, until_us: int | None) -> None:
        self._principals = principals
        self._name = name
        self._token_id = token_id
        self._until_us = until_us

    def allow(self, privilege: Privilege, target: Target) -> bool:
        if self._token_id is not None:
            self._principals.require_valid(self._token_id)
        if self._until_us is not None:
            self._principals.require_before(self._until_us)
        return self._principals.rights(self._name).allow(privilege, target)

    def table_name(self, table: str) -> str:
        return self._principals.table_name(table)
