"""Requests and answers as bytes, whatever transport carries them: errors become replies, and all is written down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from lakehead.env.clock import Clock
from lakehead.errors import ClosedError, InvalidRequestError, LakeheadError, UnavailableError, error_from_code
from lakehead.protocol.codec import decode_call, decode_stream_request, encode
from lakehead.protocol.messages import ErrorReply, Request, Write
from lakehead.server.access import Caller
from lakehead.server.audit import Audit
from lakehead.server.progress import Progress
from lakehead.server.service import Service
from lakehead.server.streams import Pause

_UNREAD: dict[str, Any] = {"request": None}
MESSAGE_BYTES_MAX = 1 << 30
"""Attachments of one request, together; each is bounded by `Limits.batch_bytes_max` too."""
PROCESS_MAX = 200
"""Characters of the name that a process says it has."""
ASK_SECONDS = 0.1
_log = logging.getLogger("lakehead.server")


class ClientGone:
    """Whether the client of a call has gone, as of at most `ASK_SECONDS` ago.

    To ask the system lets other threads take Python's lock, and gRPC takes a tenth of a millisecond to answer, in which
    no other thread's Python runs: asked for each of many small batches it was half of what a server with subscribers
    did.
    """

    def __init__(self, asks: Callable[[], bool], clock: Clock) -> None:
        self._asks = asks
        self._clock = clock
        self._next_at = clock.monotonic()
        self._gone = False

    def __call__(self) -> bool:
        if not self._gone and (now := self._clock.monotonic()) >= self._next_at:
            self._gone = self._asks()
            self._next_at = now + ASK_SECONDS
        return self._gone


class Streamed(NamedTuple):
    """A stream, for a transport.

    Attributes:
        schema: of its rows.
        items: header and rows of each, and a `Pause` where there is a ``progress``; they close it when they are closed.
        progress: what it waits for where it pauses; None for one that waits itself.
    """

    schema: pa.Schema
    items: Generator[Any]
    progress: Progress | None


class Answers:
    """Answers for a service. Thread-safe."""

    def __init__(self, service: Service, audit: Audit | None = None) -> None:
        self.service = service
        self._audit = audit

    def answer(
        self,
        data: bytes,
        attachments: Sequence[pa.Buffer],
        caller: Caller,
        *,
        writing: Callable[[], None] = lambda: None,
    ) -> tuple[bytes, Sequence[pa.Buffer]]:
        """The answer to an encoded request, encoded, and its attachments; what fails is answered with an error.

        Args:
            writing: called before a write, whose answer is short.
        """
        told = _UNREAD
        parts: list[pa.Buffer] = []
        error: ErrorReply | None = None
        try:
            request = decode_call(data)
            told = self._told(request)
            if isinstance(request, Write):
                writing()
            reply, parts = self.service.call(request, attachments, caller)
            answer = encode(reply)
        except Exception as e:
            error = self.error(e)
            answer = encode(error)
        if self._audit is not None:
            sizes = (len(data) + sum(a.size for a in attachments), len(answer) + sum(p.size for p in parts))
            self._note(caller, told, error, bytes_in=sizes[0], bytes_out=sizes[1])
        return answer, parts

    def stream(self, data: bytes, caller: Caller, gone: Callable[[], bool], *, pauses: bool = False) -> Streamed:
        """An encoded request's stream.

        Args:
            gone: tells that nobody waits for items any more; they end then.
            pauses: whether items may say that there is nothing new, where the stream can.

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

        progress = stream.progress if pauses else None

        def items() -> Generator[Any]:
            sent, failed = 0, False
            try:
                for item in stream.items(gone) if progress is None else stream.pausing(gone):
                    if self._audit is not None and not isinstance(item, Pause):
                        sent += item[1].nbytes
                    yield item
            except Exception as e:
                failed = True
                raise self._failed(e, caller, {**told, "stream": "ends"}, bytes_out=sent) from e
            finally:
                stream.close()
                if not failed:
                    self._note(caller, {**told, "stream": "ends"}, None, bytes_out=sent)

        return Streamed(stream.schema, items(), progress)

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
