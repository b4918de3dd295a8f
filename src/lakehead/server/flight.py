"""The Arrow Flight endpoint of a service.

Calls travel over long-lived ``DoExchange`` streams (one round trip each, 0.04 to 0.1 ms on loopback): see
`lakehead.protocol.attachments`. Streams are plain ``DoGet``: the ticket is a request, each batch carries a
`StreamHeader` as metadata.
Errors in calls are an `ErrorReply`; in streams they are a Flight error whose ``extra_info`` is one.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from lakehead.env.address import Address, TcpAddress
from lakehead.env.clock import Clock
from lakehead.env.forks import has_threads
from lakehead.env.tls import Tls
from lakehead.errors import AuthenticationError, InvalidRequestError, LakeheadError
from lakehead.protocol.alignment import StreamHeaders
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, PROCESS_HEADER, require_same_version, send, unwrap, wrap
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import ErrorReply
from lakehead.server.access import Caller
from lakehead.server.admission import Bounded
from lakehead.server.answers import MESSAGE_BYTES_MAX, PROCESS_MAX, Answers, ClientGone
from lakehead.server.door import Door

_ENDED = (StopIteration, fl.FlightError, pa.ArrowException)
TOKEN_HEADER = "authorization"
_ANSWERED = (fl.FlightMethod.DO_EXCHANGE, fl.FlightMethod.DO_GET)


class _Presented(fl.ServerMiddleware):
    def __init__(self, token: str | None, process: str) -> None:
        self.token = token
        self.process = process


class _Credentials(fl.ServerMiddlewareFactory):
    """Keeps what a call presents for `Door.let_in`, which knows from where it comes."""

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str]]) -> _Presented:
        if info.method not in _ANSWERED:
            raise fl.FlightUnauthenticatedError("this server answers DoExchange and DoGet alone")
        given = {k.lower(): str(v[0]) for k, v in headers.items() if v}
        token = given.get(TOKEN_HEADER)
        process = given.get(PROCESS_HEADER, "")[:PROCESS_MAX]
        return _Presented(None if token is None else token.removeprefix("Bearer "), process)


def _flight_error(reply: ErrorReply) -> fl.FlightServerError:
    return fl.FlightServerError(reply.message, encode(reply))


class FlightServer(fl.FlightServerBase):
    """Gives answers on one address until `stop`.

    Attributes:
        address: where it listens.
    """

    def __init__(
        self,
        answers: Answers,
        *,
        address: Address,
        door: Door,
        exchanges: Bounded,
        clock: Clock,
        tls: Tls | None = None,
    ) -> None:
        """Listen, with ``tls`` to those alone who speak it, and have a certificate where it names authorities.

        Args:
            address: port 0 takes a free one.

        Raises:
            InvalidRequestError: the address cannot be listened on.
        """
        self._answers = answers
        self._exchanges = exchanges
        self._clock = clock
        self._door = door
        how: dict[str, Any] = {}
        if tls is not None:
            how = {"tls_certificates": [(tls.chain, tls.key)], "verify_client": tls.authorities is not None}
            how |= {} if tls.authorities is None else {"root_certificates": tls.authorities}
        try:
            location = address.location(tls=tls is not None)
            if isinstance(address, TcpAddress):
                _require_free(address)
            has_threads()
            super().__init__(location, middleware={"credentials": _Credentials()}, **how)
        except (pa.ArrowException, OSError) as e:
            taken = isinstance(e, OSError) and e.errno == errno.EADDRINUSE
            hint = ": the port is in use, by a server perhaps that was started before" if taken else ""
            raise InvalidRequestError(f"cannot listen on {address}{hint} ({e})") from e
        self.address: Address = address
        if isinstance(address, TcpAddress):
            self.address = TcpAddress(address.host, self.port)
        # It listens from here on. `serve` would only wait, and take over the process's signal handlers.
        self._stopping: threading.Thread | None = None
        _end_with_process(self)

    def stop(self) -> None:
        """Take no more connections. Calls under way end when their clients let go, which `wait_stopped` waits for."""
        stopping = threading.Thread(target=self.shutdown, name="lakehead-flight-stop", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: then it ends with the process
            stopping.start()
            self._stopping = stopping

    def wait_stopped(self, seconds: float) -> bool:
        """Return when no client holds on to the stopped server any more, or after that time; True in the first case."""
        if self._stopping is None:
            return False
        self._stopping.join(seconds)
        return not self._stopping.is_alive()

    def do_exchange(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor, reader: Any, writer: Any
    ) -> None:
        try:
            caller = self._caller(context)
            held = self._exchanges.take(share=caller.share)
            try:
                writer.begin(ATTACHMENT_SCHEMA)
                self._answer_all(reader, writer, caller)
            finally:
                self._exchanges.give_back(held)
        except LakeheadError as e:
            raise _flight_error(self._answers.error(e)) from e

    def _caller(self, context: fl.ServerCallContext) -> Caller:
        presented = context.get_middleware("credentials")
        certificate = context.peer_identity().decode(errors="replace")
        try:
            return self._door.let_in(presented.token, certificate, context.peer(), presented.process)
        except AuthenticationError as e:
            raise fl.FlightUnauthenticatedError(e.message) from e

    def _answer_all(self, reader: Any, writer: Any, caller: Caller) -> None:
        for data, attachments in _requests(reader):
            send(writer, wrap(*self._answers.answer(data, attachments, caller)))

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        caller = self._caller(context)
        try:
            schema, items, _ = self._answers.stream(
                ticket.ticket, caller, ClientGone(context.is_cancelled, self._clock)
            )
        except LakeheadError as e:
            raise _flight_error(self._answers.error(e)) from e
        headers = StreamHeaders(schema)

        def batches() -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
            try:
                for header, batch in items:
                    yield batch, headers.encode(header, batch)
            except LakeheadError as e:
                raise _flight_error(self._answers.error(e)) from e
            finally:
                items.close()

        return fl.GeneratorStream(schema, batches())


def _require_free(address: TcpAddress) -> None:
    """Return if something that its host stands for can be listened on; of what cannot, gRPC tells in lines of its own
    log.

    Raises:
        OSError: nothing can.
    """
    failed: OSError | None = None
    found = socket.getaddrinfo(address.host.strip("[]"), address.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return
        except OSError as e:
            failed = failed or e
    if failed is not None:
        raise failed


def _end_with_process(server: FlightServer) -> None:
    """Keep pyarrow from shutting the server down at interpreter exit, where it would wait for ever for a client that
    holds an idle stream; `ServerHost.close` and `wait_stopped` do it in bounded time."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] is server:
            finalizer.atexit = False


def _requests(reader: Any) -> Iterator[tuple[bytes, list[pa.Buffer]]]:
    try:
        begun = reader.schema
    except _ENDED:
        return
    require_same_version(begun)
    while True:
        try:
            call = unwrap(reader.read_chunk, bytes_max=MESSAGE_BYTES_MAX)
        except _ENDED:
            return
        yield call
