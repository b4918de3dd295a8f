"""The Flight transport: an `Endpoint` whose server is in another process.

Each call borrows a long-lived exchange stream from a pool, so that concurrent callers do not wait for one another. A
broken stream is dropped and the call fails with `UnavailableError`; whoever retries gets a new one. Streams idle for a
second are closed, because a server cannot end while a client holds one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    LakeheadError,
    UnavailableError,
    error_from_code,
)
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, unwrap, wrap
from lakehead.protocol.messages import (
    AnyReply,
    ErrorReply,
    Request,
    StreamHeader,
    decode_reply,
    decode_stream_header,
    encode,
)

_IDLE_STREAMS_MAX = 16
_IDLE_SECONDS = 1.0
# gRPC waits up to two minutes between attempts to reconnect, and fails calls meanwhile: longer than writers retry. The
# least one is no wait, whatever its name says: an attempt that is not answered is given so much time.
_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class FlightEndpoint:
    """A server at an address. Thread-safe."""

    def __init__(self, host: str, port: int, *, token: str | None, tls_ca: bytes | None = None) -> None:
        self._address = f"{host}:{port}"
        scheme = "grpc" if tls_ca is None else "grpc+tls"
        options: dict[str, Any] = {} if tls_ca is None else {"tls_root_certs": tls_ca}
        self._client = fl.connect(f"{scheme}://{host}:{port}", generic_options=_RECONNECT, **options)
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._options = fl.FlightCallOptions(headers=headers)
        self._idle: list[_IdleStream] = []
        self._lock = threading.Lock()
        self._reaper: threading.Thread | None = None
        self._closed = False
        self._closing = threading.Event()

    def call(self, request: Request, attachments: Sequence[pa.Buffer] = ()) -> tuple[AnyReply, list[pa.Buffer]]:
        writer, reader = self._borrow()
        try:
            for batch, metadata in wrap(encode(request), attachments):
                writer.write_with_metadata(batch, metadata)
            data, out = unwrap(reader.read_chunk)
        except (fl.FlightError, pa.ArrowException, StopIteration, OSError) as e:
            with self._lock:
                # What broke this stream broke the others: whoever tries again must get a new one.
                self._idle.clear()
            raise self._failure(e) from e
        with self._lock:
            keep = not self._closed and len(self._idle) < _IDLE_STREAMS_MAX
            if keep:
                self._idle.append(_IdleStream(writer, reader, time.monotonic()))
                if self._reaper is None:
                    self._reaper = threading.Thread(target=self._reap, name="lakehead-idle", daemon=True)
                    self._reaper.start()
        if not keep:
            _finish(writer)
        reply = decode_reply(data)
        if isinstance(reply, ErrorReply):
            raise error_from_code(reply.code, reply.message, reply.context)
        return reply, out

    def _borrow(self) -> tuple[Any, Any]:
        with self._lock:
            if self._closed:
                raise ClosedError("the connection is closed: connect again")
            if self._idle:
                stream = self._idle.pop()
                return stream.writer, stream.reader
        try:
            writer, reader = self._client.do_exchange(fl.FlightDescriptor.for_command(b"calls"), self._options)
            writer.begin(ATTACHMENT_SCHEMA)
        except (fl.FlightError, pa.ArrowException, OSError) as e:
            raise self._failure(e) from e
        return writer, reader

    def _reap(self) -> None:
        while not self._closing.wait(_IDLE_SECONDS / 2):
            with self._lock:
                oldest = time.monotonic() - _IDLE_SECONDS
                stale = [s for s in self._idle if s.since < oldest]
                self._idle = [s for s in self._idle if s.since >= oldest]
                if not self._idle:
                    self._reaper = None
            for stream in stale:
                _finish(stream.writer)
            if self._reaper is not threading.current_thread():
                return

    def stream(self, request: Request) -> FlightStream:
        if self._closed:
            raise ClosedError("the connection is closed: connect again")
        try:
            reader = self._client.do_get(fl.Ticket(encode(request)), self._options)
            return FlightStream(self, reader)
        except (fl.FlightError, pa.ArrowException, OSError) as e:
            raise self._failure(e) from e

    def _failure(self, e: BaseException) -> LakeheadError:
        if isinstance(e, fl.FlightUnauthenticatedError):
            return AuthenticationError(
                f"the server at {self._address} refused the token: pass token= or run as the user that started it"
            )
        info = getattr(e, "extra_info", None)
        if info:
            try:
                reply = decode_reply(info)
            except ValueError:
                reply = None
            if isinstance(reply, ErrorReply):
                return error_from_code(reply.code, reply.message, reply.context)
        if self._closed:
            return ClosedError("the connection is closed: connect again")
        detail = (str(e).splitlines() or [type(e).__name__])[0][:200]
        return UnavailableError(
            f"no Lakehead server answers at {self._address}: is it running? ({detail})", address=self._address
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
        self._closing.set()
        for stream in idle:
            _finish(stream.writer)
        self._client.close()


@dataclass(frozen=True)
class _IdleStream:
    writer: Any
    reader: Any
    since: float


def _finish(writer: Any) -> None:
    try:
        writer.done_writing()
        writer.close()
    except (fl.FlightError, pa.ArrowException, OSError):
        return


class FlightStream:
    """A stream from a server in another process; see `lakehead.protocol.messages.Stream`."""

    def __init__(self, endpoint: FlightEndpoint, reader: Any) -> None:
        self._endpoint = endpoint
        self._reader = reader
        self._closed = False
        self.schema: pa.Schema = reader.schema

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        while True:
            try:
                chunk = self._reader.read_chunk()
            except StopIteration:
                return
            except (fl.FlightError, pa.ArrowException, OSError) as e:
                if self._closed:
                    return
                raise self._endpoint._failure(e) from e
            yield decode_stream_header(chunk.app_metadata.to_pybytes()), chunk.data

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._reader.cancel()
