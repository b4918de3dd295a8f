"""Who is let in, and as whom: by the server's token, by a principal's, by a signed one, or by a certificate."""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import NoReturn

from lakehead.config import TOKEN_PREFIX, is_signed
from lakehead.env import Env
from lakehead.errors import AuthenticationError, InvalidRequestError
from lakehead.protocol.privileges import require_unsigned
from lakehead.server.access import TOKEN_HOLDER, Caller, host_of
from lakehead.server.audit import Audit
from lakehead.server.principals import Principals
from lakehead.server.signatures import Signatures

_FORGOTTEN_SECONDS = 60.0
_FIRST_WAIT_SECONDS = 0.01
_WAIT_SECONDS_MAX = 1.0
_WAITING_MAX = 16
_HOSTS_MAX = 1024
_log = logging.getLogger("lakehead.server")


class Door:
    """Lets callers in. Thread-safe.

    Who fails waits before it is told, the longer the more often anyone of its host has failed in the last minute. Only
    a few wait at a time, so that they take no threads from others; who has a secret that is right never does.
    """

    def __init__(
        self,
        token: str,
        principals: Principals,
        env: Env,
        audit: Audit | None = None,
        signatures: Signatures | None = None,
    ) -> None:
        """``signatures`` tells whose signed tokens are; None lets nobody in by one."""
        self._digest = _digest(token)
        self._principals = principals
        self._clock = env.clock
        self._audit = audit
        self._signatures = signatures
        self._lock = env.threads.lock()
        self._failed: dict[str, tuple[int, float]] = {}
        self._waiting = 0

    def let_in(self, token: str | None, certificate: str, peer: str, process: str = "") -> Caller:
        """Who comes.

        Args:
            token: what they present; it decides, where there is one.
            certificate: the name that their certificate gives them, which the connection has verified; no text
                without one.
            peer: from where.
            process: which one they say that they are.

        Raises:
            AuthenticationError: nobody who is known here.
        """
        try:
            caller = self._known(token, certificate)
        except AuthenticationError as e:
            self._refuse(peer, e)
        # Not `dataclasses.replace`: each stream comes here.
        return Caller(caller.name, caller.privileges, peer, caller.principal, caller.rights, process)

    def _known(self, token: str | None, certificate: str) -> Caller:
        if token is not None:
            if hmac.compare_digest(_digest(token), self._digest):
                return TOKEN_HOLDER
            if token.startswith(TOKEN_PREFIX):
                return self._principals.by_token(token)
            if self._signatures is not None and is_signed(token):
                return self._principals.by_signature(*self._signatures.signed(token))
            raise AuthenticationError("the token is unknown")
        if "://" in certificate:
            try:
                return self._principals.by_certificate(require_unsigned(certificate))
            except InvalidRequestError as e:
                raise AuthenticationError("the first name of the certificate is none that a principal can have") from e
        raise AuthenticationError("there is no token, and no certificate whose first name is a URI")

    def _refuse(self, peer: str, why: AuthenticationError) -> NoReturn:
        host = host_of(peer)
        with self._lock:
            now = self._clock.monotonic()
            count, last = self._failed.pop(host, (0, now))
            count = 1 if now - last > _FORGOTTEN_SECONDS else count + 1
            self._failed[host] = (count, now)
            if len(self._failed) > _HOSTS_MAX:
                del self._failed[next(iter(self._failed))]
            waits = self._waiting < _WAITING_MAX
            self._waiting += waits
        if count & (count - 1) == 0:  # 1, 2, 4, ...: who tries often does not fill the log
            _log.warning("refused who comes from %s, failure %d of its host: %s", peer, count, why.message)
            if self._audit is not None:
                self._audit.refused(peer, why.message, count)
        if waits:
            try:
                self._clock.sleep(min(_FIRST_WAIT_SECONDS * 2 ** min(count - 1, 10), _WAIT_SECONDS_MAX))
            finally:
                with self._lock:
                    self._waiting -= 1
        raise why


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
