"""What was asked of a server, by whom, and what came of it: one line of JSON for each request and each refused log-in.

Never tokens, rows, keys, filters or other values: names alone, of requests, tables, principals and errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from lakehead.env.clock import Clock
from lakehead.env.rotated_file import RotatedFile
from lakehead.errors import ERRORS_BY_CODE, LakeheadError
from lakehead.protocol.grants import CreateToken, Grant, Revoke, RevokeToken
from lakehead.protocol.messages import ErrorReply, Message, Request
from lakehead.protocol.quotas import SetQuota
from lakehead.server.access import Caller

FILES_KEPT = 10
_NAME_MAX = 300
_TABLES_MAX = 64
_COMPLAINT_SECONDS = 60.0
_TOLD: dict[type[Message], tuple[str, ...]] = {
    CreateToken: ("principal",),
    RevokeToken: ("id",),
    Grant: ("to", "on", "privileges"),
    Revoke: ("to", "on", "privileges"),
    SetQuota: ("principal",),
}
"""What is said of requests that change who may do what."""
_log = logging.getLogger("lakehead.server")


class Audit:
    """Writes it down. Thread-safe. When the file cannot be written, the server goes on and says so in its log.

    Args:
        name_of: what the table of an id is called.
    """

    def __init__(self, file: RotatedFile, clock: Clock, name_of: Callable[[str], str]) -> None:
        self._file = file
        self._clock = clock
        self._name_of = name_of
        self._complained = float("-inf")

    def about(self, request: Request[Any]) -> dict[str, Any]:
        """What a line says of a request; before it is carried out, as tables are called then."""
        tables = [t if isinstance(t, str) else str(t) for t in request.about[:_TABLES_MAX]]
        told = {name: getattr(request, name) for name in _TOLD.get(type(request), ())}
        named = {"tables": [self._name_of(t)[:_NAME_MAX] for t in tables]} if tables else {}
        return {"request": type(request).__name__, **named, **told}

    def answered(
        self, caller: Caller, about: dict[str, Any], error: ErrorReply | None, *, bytes_in: int, bytes_out: int
    ) -> None:
        """A request, or a stream at its beginning or end, came to this."""
        outcome = "done" if error is None else ERRORS_BY_CODE[error.code].__name__
        who = {"who": caller.name, "principal": caller.principal or None, "from": caller.peer}
        self._write({**who, **about, "outcome": outcome, "bytes_in": bytes_in, "bytes_out": bytes_out})

    def refused(self, peer: str, why: str, failures: int) -> None:
        """Somebody was not let in, for so many times of its host in the last minute."""
        self._write(
            {"who": None, "principal": None, "from": peer, "request": "log-in", "outcome": "AuthenticationError"}
            | {"why": why, "failures": failures}
        )

    def _write(self, line: dict[str, Any]) -> None:
        at = datetime.fromtimestamp(self._clock.now_us() / 1e6, UTC).isoformat(timespec="milliseconds")
        try:
            self._file.write(msgspec.json.encode({"at": at, **line}))
        except LakeheadError as e:
            now = self._clock.monotonic()
            if now - self._complained > _COMPLAINT_SECONDS:
                self._complained = now
                _log.error("what is asked of this server is not written down: %s", e)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def forget(self) -> None:
        """In a forked child: the parent goes on with it."""
        self._file.forget()
