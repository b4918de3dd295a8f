"""Requests and answers as bytes, whatever transport carries them: errors become replies, and all is written down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from lakehead.errors import ClosedError, InvalidRequestError, LakeheadError, UnavailableError, error_from_code
from lakehead.protocol.codec import decode_call, decode_stream_request, encode
from lakehead.protocol.messages import ErrorReply, Request, StreamHeader
from lakehead.server.access import Caller
from lakehead.server.audit import Audit
from lakehead.server.service import Service

_UNREAD: dict[str, Any] = {"request": None}
MESSAGE_BYTES_MAX = 1 << 30
"""Attachments of one request, together; each is bounded by `Limits.batch_bytes_max` too."""
PROCESS_MAX = 200
"""Characters of the name that a process says it has."""
_log = logging.getLogger("lakehead.server")


class Answers:
    """Answers for a service. Thread-safe."""

    def __init__(self, service: Service, audit: Audit | None = None) -> None:
        self.service = service
        self._audit = audit

    def answer(
        self, data: bytes, attachments: Sequence[pa.Buffer], caller: Caller
    ) -> tuple[bytes, Sequence[pa.Buffer]]:
        """The answer to an encoded request, encoded, and its attachments; what fails is answered with an error."""
        told = _UNREAD
        parts: list[pa.Buffer] = []
        error: ErrorReply | None = None
        try:
            request = decode_call(data)
            told = self._told(request)
            reply, parts = self.service.call(request, attachments, caller)
            answer = encode(reply)
        except Exception as e:
            error = self.error(e)
            answer = encode(error)
        if self._audit is not None:
            sizes = (len(data) + sum(a.size for a in attachments), len(answer) + sum(p.size for p in parts))
            self._note(caller, told, error, bytes_in=sizes[0], bytes_out=sizes[1])
        return answer, parts

    def stream(
        self, data: bytes, caller: Caller, gone: Callable[[], bool]
    ) -> tuple[pa.Schema, Generator[tuple[StreamHeader, pa.RecordBatch]]]:
        """The schema of an encoded request's stream, and its items, which close it when they are closed.

        Args:
            gone: tells that nobody waits for items any more; they end then.

        Raises:
            LakeheadError: the request was refused, or, from the items, failed later; as the client is to be told.
        """
        told = _UNREAD
        try:
            request = decode_stream_request(data)
            told = self._told(request)
            stream = self.service.stream(request, caller, gone)
        except Exception as e:
            raise self._failed(e, caller, told, bytes_in=len(data)) from e
        self._note(caller, {**told, "stream": "begins"}, None, bytes_in=len(data))

        def items() -> Generator[tuple[StreamHeader, pa.RecordBatch]]:
            sent, failed = 0, False
            try:
                for header, batch in stream.items(gone):
                    sent += 0 if self._audit is None else batch.nbytes
                    yield header, batch
            except Exception as e:
                failed = True
                raise self._failed(e, caller, {**told, "stream": "ends"}, bytes_out=sent) from e
            finally:
                stream.close()
                if not failed:
                    self._note(caller, {**told, "stream": "ends"}, None, bytes_out=sent)

        return stream.schema, items()

    def _failed(
        self, e: Exception, caller: Caller, told: dict[str, Any], *, bytes_in: int = 0, bytes_out: int = 0
    ) -> LakeheadError:
        error = self.error(e)
        self._note(caller, told, error, bytes_in=bytes_in, bytes_out=bytes_out)
        return error_from_code(error.code, error.message, error.context)

    def _told(self, request: Request[Any]) -> dict[str, Any]:
        """What is written down of a request."""
        return _UNREAD if self._audit is None else self._audit.about(request)

    def _note(
        self, caller: Caller, told: dict[str, Any], error: ErrorReply | None, *, bytes_in: int = 0, bytes_out: int = 0
    ) -> None:
        if self._audit is not None:
            self._audit.answered(caller, told, error, bytes_in=bytes_in, bytes_out=bytes_out)

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
