"""Requests and answers as bytes, whatever transport carries them: errors become replies, and all is written down."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from lakehead.errors import ClosedError, InvalidRequestError, LakeheadError, UnavailableError
from lakehead.protocol.codec import decode_call, encode
from lakehead.protocol.messages import ErrorReply, Request
from lakehead.server.access import Caller
from lakehead.server.audit import Audit
from lakehead.server.service import Service

UNREAD: dict[str, Any] = {"request": None}
MESSAGE_BYTES_MAX = 1 << 30
"""Attachments of one request, together; each is bounded by `Limits.batch_bytes_max` too."""
PROCESS_MAX = 200
"""Characters of the name that a process says it has."""
_log = logging.getLogger("lakehead.server")


class Answers:
    """Answers for a service. Thread-safe."""

    def __init__(self, service: Service, audit: Audit | None = None) -> None:
        self.service = service
        self.audit = audit

    def answer(
        self, data: bytes, attachments: Sequence[pa.Buffer], caller: Caller
    ) -> tuple[bytes, Sequence[pa.Buffer]]:
        """The answer to an encoded request, encoded, and its attachments; what fails is answered with an error."""
        told = UNREAD
        parts: list[pa.Buffer] = []
        error: ErrorReply | None = None
        try:
            request = decode_call(data)
            told = self.told(request)
            reply, parts = self.service.call(request, attachments, caller)
            answer = encode(reply)
        except Exception as e:
            error = self.error(e)
            answer = encode(error)
        if self.audit is not None:
            sizes = (len(data) + sum(a.size for a in attachments), len(answer) + sum(p.size for p in parts))
            self.audit.answered(caller, told, error, bytes_in=sizes[0], bytes_out=sizes[1])
        return answer, parts

    def told(self, request: Request[Any]) -> dict[str, Any]:
        """What is written down of a request."""
        return UNREAD if self.audit is None else self.audit.about(request)

    def error(self, e: BaseException) -> ErrorReply:
        """What a client is told of an error."""
        if isinstance(e, msgspec.DecodeError):
            e = InvalidRequestError(f"not a request of this version: {e}")
        if isinstance(e, ClosedError) and self.service.closing:
            # Whoever closed here was not this client: it may try again, the folder's next server will answer.
            e = UnavailableError("the server was stopped: connect again, or wait until it is back", gone=True)
        if not isinstance(e, LakeheadError):
            _log.exception("request failed", exc_info=e)
            e = UnavailableError(f"the server failed: {type(e).__name__}: {e}")
        context = {k: v for k, v in e.context.items() if isinstance(v, str | int | float | bool | None)}
        return ErrorReply(code=e.code, message=e.message, context=context)
