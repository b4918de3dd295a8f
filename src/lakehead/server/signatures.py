"""Signed tokens (JSON Web Tokens of OpenID Connect and OAuth 2): whose they are, as an issuer's keys prove.

What a token says of how it is to be checked is not believed: which algorithms there are is known here, which keys comes
from the configured address, and a key is for the one algorithm of its kind.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lakehead.config import OidcConfig
from lakehead.env import Env
from lakehead.errors import AuthenticationError, InvalidRequestError, MissingDependencyError, UnavailableError
from lakehead.protocol.privileges import SIGNED, require_principal

TOKEN_BYTES_MAX = 8192
KEYS_BYTES_MAX = 256 << 10
FETCH_SECONDS_MAX = 5.0
LEEWAY_SECONDS = 30
FRESH_SECONDS = 300.0
"""After which keys are fetched again, so that one that was taken back is worth nothing."""
KEPT_SECONDS = 3600.0
"""For how long keys are believed while there are no newer ones to be had."""
RETRY_SECONDS = 30.0
"""How often keys are fetched at most: who sends unknown ones makes no more requests of them."""
_KEYS_MAX = 64
_RSA_BITS_MIN = 2048
_WAITING_MAX = 16
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")
_log = logging.getLogger("lakehead.server")


class Fetch(Protocol):
    """See `lakehead.env.https.fetch`."""

    def __call__(self, address: str, *, bytes_max: int, seconds_max: float) -> bytes: ...


@dataclass(frozen=True)
class _Key:
    algorithm: str
    key: Any


@dataclass
class _Keys:
    by_id: dict[str | None, _Key] = field(default_factory=dict)
    fetched: float = float("-inf")
    tried: float = float("-inf")


class Signatures:
    """Checks the tokens of one issuer. Thread-safe."""

    def __init__(self, config: OidcConfig, env: Env, fetch: Fetch) -> None:
        """Raises: MissingDependencyError: PyJWT, or what it needs, is not installed."""
        try:
            import jwt
        except ImportError as e:
            raise MissingDependencyError("signed tokens need PyJWT: pip install 'lakehead[oidc]'") from e
        if not jwt.algorithms.has_crypto:
            raise MissingDependencyError("signed tokens need cryptography: pip install 'lakehead[oidc]'")
        self._jwt = jwt
        self._config = config
        self._clock = env.clock
        self._fetch = fetch
        self._lock = env.threads.lock()
        self._counting = env.threads.lock()
        self._waiting = 0
        self._keys = _Keys()

    def signed(self, token: str) -> tuple[str, int]:
        """The principal that a token names, and until when, in microseconds since the epoch.

        Raises:
            AuthenticationError: it is forged, expired, not yet valid, from or for somebody else, or names nobody; or
                the issuer's keys are not to be had.
        """
        if len(token) > TOKEN_BYTES_MAX:
            raise AuthenticationError(f"a signed token has at most {TOKEN_BYTES_MAX:,} characters")
        claims = self._claims(token)
        return self._named(claims), self._until_us(claims)

    def _claims(self, token: str) -> dict[str, Any]:
        jwt = self._jwt
        try:
            header = jwt.get_unverified_header(token)
            key = self._key(header)
            found: dict[str, Any] = jwt.decode(
                token,
                key=key.key,
                algorithms=[key.algorithm],
                audience=self._config.audience,
                issuer=self._config.issuer,
                # Times are looked at below, by the server's clock.
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                    "verify_sub": False,
                    "verify_jti": False,
                },
            )
        except AuthenticationError:
            raise
        except jwt.InvalidAudienceError as e:
            raise AuthenticationError("the signed token is for another audience than this server") from e
        except jwt.InvalidIssuerError as e:
            raise AuthenticationError("the signed token is from another issuer than this server trusts") from e
        except jwt.MissingRequiredClaimError as e:
            raise AuthenticationError(f"the signed token lacks a claim: {e}") from e
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as e:
            raise AuthenticationError("the signed token is none, or its signature is not the issuer's") from e
        if found["iss"] != self._config.issuer:
            raise AuthenticationError("the signed token is from another issuer than this server trusts")
        return found

    def _named(self, claims: Mapping[str, Any]) -> str:
        claim = self._config.claim
        value = claims.get(claim)
        if not isinstance(value, str) or not value:
            raise AuthenticationError(f"the signed token has no text as {claim}, which is to name its principal")
        if claim == "email" and claims.get("email_verified") is not True:
            raise AuthenticationError("the email of the signed token is not verified")
        try:
            return require_principal(SIGNED + value)
        except InvalidRequestError as e:
            raise AuthenticationError(f"what the signed token has as {claim} is no name of a principal") from e

    def _until_us(self, claims: Mapping[str, Any]) -> int:
        now = self._clock.now_us() / 1e6
        expires, begins = _seconds(claims, "exp"), max(_seconds(claims, "nbf", 0.0), _seconds(claims, "iat", 0.0))
        if now >= expires + LEEWAY_SECONDS:
            raise AuthenticationError("the signed token has expired: get another from its issuer")
        if now < begins - LEEWAY_SECONDS:
            raise AuthenticationError("the signed token is not valid yet: look at the clocks of issuer and server")
        return int((expires + LEEWAY_SECONDS) * 1e6)

    # ---- keys -------------------------------------------------------------------------------------------------

    def _key(self, header: Mapping[str, Any]) -> _Key:
        """The issuer's key that a token names, if it is for the algorithm that it names."""
        kid, algorithm, kind = header.get("kid"), header.get("alg"), header.get("typ")
        if "crit" in header or not (kid is None or (isinstance(kid, str) and kid)):
            raise AuthenticationError("the signed token asks for what this server does not know")
        if (kind.lower() if isinstance(kind, str) else kind) not in _TYPES:
            raise AuthenticationError("the signed token is of another type than those that let somebody in")
        found = self._known(kid)
        if found is None:
            raise AuthenticationError("the signed token has none of the keys of its issuer")
        if algorithm != found.algorithm:
            raise AuthenticationError(f"the signed token is not signed by {found.algorithm}, which its key is for")
        return found

    def _known(self, kid: str | None) -> _Key | None:
        found = self._of(self._keys, kid)
        if found is not None and self._clock.monotonic() - self._keys.fetched < FRESH_SECONDS:
            return found
        with self._counting:
            waits = self._waiting < _WAITING_MAX  # as at the door: unknown keys take no threads from others
            self._waiting += waits
        if not waits:
            raise AuthenticationError("the keys of the issuer are being fetched: try again")
        try:
            with self._lock:
                return self._refreshed(kid)
        finally:
            with self._counting:
                self._waiting -= 1

    def _refreshed(self, kid: str | None) -> _Key | None:
        keys, now = self._keys, self._clock.monotonic()
        found = self._of(keys, kid)
        fresh = found is not None and now - keys.fetched < FRESH_SECONDS
        if not fresh and now - keys.tried >= RETRY_SECONDS:
            keys.tried = now
            try:
                data = self._fetch(self._config.jwks, bytes_max=KEYS_BYTES_MAX, seconds_max=FETCH_SECONDS_MAX)
                keys.by_id, keys.fetched = self._read(data), self._clock.monotonic()
            except (UnavailableError, ValueError, RecursionError) as e:
                _log.warning("the keys of %s are not to be had: %s", self._config.issuer, e)
            now = self._clock.monotonic()
        if now - keys.fetched >= KEPT_SECONDS:
            raise AuthenticationError("the keys of the issuer are not to be had: try again in half a minute")
        return self._of(keys, kid)

    @staticmethod
    def _of(keys: _Keys, kid: str | None) -> _Key | None:
        if kid is None:  # of an issuer that has one key alone
            return next(iter(keys.by_id.values())) if len(keys.by_id) == 1 else None
        return keys.by_id.get(kid)

    def _read(self, data: bytes) -> dict[str | None, _Key]:
        listed = json.loads(data)
        if not isinstance(listed, dict) or not isinstance(listed.get("keys"), list):
            raise ValueError("there is no list of keys")
        found: dict[str | None, _Key] = {}
        for jwk in listed["keys"][:_KEYS_MAX]:
            key = self._usable(jwk) if isinstance(jwk, dict) else None
            if key is not None and (jwk.get("kid") is None or isinstance(jwk["kid"], str)):
                found.setdefault(jwk.get("kid"), key)
        return found

    def _usable(self, jwk: Mapping[str, Any]) -> _Key | None:
        """A public key for signatures of a kind that is known here."""
        algorithm = {"RSA": "RS256", "EC": "ES256"}.get(str(jwk.get("kty")))
        operations = jwk.get("key_ops", ["verify"])
        if (
            algorithm is None
            or "d" in jwk
            or jwk.get("use", "sig") != "sig"
            or jwk.get("alg", algorithm) != algorithm
            or (algorithm == "ES256" and jwk.get("crv") != "P-256")
            or not (isinstance(operations, list) and "verify" in operations)
        ):
            return None
        try:
            key = self._jwt.PyJWK(dict(jwk), algorithm).key
        except (self._jwt.PyJWTError, ValueError, TypeError):
            return None
        if algorithm == "RS256" and key.key_size < _RSA_BITS_MIN:
            return None
        return _Key(algorithm, key)


def _seconds(claims: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = claims.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AuthenticationError(f"the signed token has no time as {name}")
    if not 0 <= value < 1e11:
        raise AuthenticationError(f"the signed token has no time as {name}")
    return float(value)
