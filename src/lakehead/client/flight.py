"""An `Endpoint` whose server is in another process, by Flight, or by the plain socket of this user's own server.

Each call borrows a long-lived conversation from a pool, so that concurrent callers do not wait for one another. It
always ends: with an answer, with `UnavailableError` when the connection broke, with `RequestTimeoutError` when the
server is silent. Whoever tries again after that gets a new stream, after silence a new connection. Streams idle for a
second are closed, because a server cannot end while a client holds one.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from lakehead.client import channel as ch
from lakehead.client.plain_socket import SocketExchange, require_welcome
from lakehead.client.received import require_answers, streamed
from lakehead.client.tails import SharedStream, Tails, may_share
from lakehead.env.address import Address, SocketAddress
from lakehead.env.credentials import FoundToken
from lakehead.env.tls import Tls, renewed
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    CorruptionError,
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    RequestTimeoutError,
    UnavailableError,
    error_from_code,
)
from lakehead.protocol.codec import decode_error, decode_reply
from lakehead.protocol.messages import ErrorReply, R, Request, Stream, StreamHeader, Subscribe

STREAM_BYTES_MAX = ch.STREAM_BYTES_MAX
CALL_SECONDS = 120.0
"""How long one answer is waited for while the server lives."""

_DETAIL_CHARS = 200
_AROUND = re.compile(r"^Flight returned \w+ error, with message: |\.? gRPC client debug context: .*")
_IDLE_STREAMS_MAX = 16
_IDLE_SECONDS = 1.0
_CLOSE_SECONDS = 0.5


class FlightEndpoint:
    """A server at an address. Thread-safe.

    Args:
        address: of a Unix socket, one that `require_own` has let pass.
        token: what the server asks for; one that is found is looked for again for each connection, as a server that was
            restarted may have another one, and is sent while the server lives that it is of.
        tls: who signs the server's certificate, and this side's own; None, or a Unix socket, speaks no TLS.
    """

    def __init__(self, address: Address, *, token: str | FoundToken | None, tls: Tls | None = None) -> None:
        self._address = str(address)
        self._location = address.location(tls=tls is not None)
        self._is_own = isinstance(address, SocketAddress)
        # What this user's own server says of itself; who is given a token for a host goes where it was told to.
        self._note = token if isinstance(token, FoundToken) else FoundToken(address) if self._is_own else None
        self._token = token
        self._tls = tls
        self._idle: list[ch.Conversation] = []
        self._lock = threading.Lock()
        self._reaper: threading.Thread | None = None
        self._closed = False
        self._closing = threading.Event()
        self._tails = Tails()
        self._channels: weakref.WeakSet[ch.Channel] = weakref.WeakSet()
        self._channel = self._connected()

    def _connected(self) -> ch.Channel:
        token = self._token() if isinstance(self._token, FoundToken) else self._token
        me = weakref.ref(self)  # an endpoint goes with its last user, no cycle with its channels keeps it

        def plain() -> SocketAddress | None:
            return None if (endpoint := me()) is None else endpoint._plain()

        channel = ch.Channel(self._location, token=token, tls=self._tls, is_own=self._is_own, plain=plain)
        self._channels.add(channel)
        return channel

    def call(self, request: Request[R], attachments: Sequence[pa.Buffer] = ()) -> tuple[R, list[pa.Buffer]]:
        channel, exchange = self._borrow()
        try:
            exchange.ask(request, attachments)
            answer = self.next_of(channel, exchange, CALL_SECONDS)
        except BaseException as e:
            exchange.cancel()
            if isinstance(e, ch.BROKEN):
                # What broke this stream broke the others: whoever tries again must get a new one.
                self._drop_idle()
                raise self.failure(e, channel) from e
            if isinstance(e, CorruptionError | LimitExceededError):
                raise type(e)(e.message, **e.context, unread=True) from e
            if not isinstance(e, LakeheadError):
                # What was sent may still wait for room in this connection's window: others must not wait behind it.
                self._leave(channel)
            raise
        if not self._give_back(channel, exchange):
            exchange.cancel()
        data, out = answer
        try:
            reply = decode_reply(data, request)
        except ValueError as e:
            raise InvalidRequestError(
                f"the server at {self._address} does not speak this protocol: {e}", unread=True
            ) from e
        if isinstance(reply, ErrorReply):
            raise error_from_code(reply.code, reply.message, reply.context)
        try:
            require_answers(request, reply)
        except CorruptionError as e:
            raise CorruptionError(e.message, address=self._address, unread=True) from e
        return reply, out

    def next_of(self, channel: ch.Channel, wait: ch.Queued, seconds: float | None) -> Any:
        """The next item of a stream; what it ended with is raised.

        Args:
            seconds: how long it is waited for at most; None as long as the server lives.

        Raises:
            RequestTimeoutError: nothing came in time.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                item = wait.next_item(ch.SILENCE_SECONDS)
            except queue.Empty:
                if not channel.lives():
                    self._leave(channel)
                    channel.cancel()
                    raise self._timeout(
                        "does not answer any more: it is stopped, or the connection leads nowhere"
                    ) from None
                if end is not None and time.monotonic() > end:
                    raise self._timeout(f"lives, but gave no answer within {seconds:g} s") from None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _timeout(self, why: str) -> LakeheadError:
        if self._closed:
            return ClosedError("the connection is closed: connect again")
        return RequestTimeoutError(
            f"the server at {self._address} {why}; what was asked may or may not have been done",
            address=self._address,
            gone=True,
        )

    def _leave(self, channel: ch.Channel) -> None:
        """Let those who call from now on have another connection."""
        with self._lock:
            if self._channel is not channel or self._closed:
                return
            self._channel = self._connected()
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for exchange in idle:
            exchange.cancel()

    def _require_owner(self) -> None:
        """Return if whoever has the address is the server whose token was found, as far as one was.

        Raises:
            UnavailableError: that server is gone, and no other of this user's is there.
        """
        if not isinstance(self._token, FoundToken) or not self._token.was_found or self._token.lives():
            return
        self._leave(self._channel)
        if self._channel.token is None:
            raise UnavailableError(
                f"the server at {self._address} is gone: is it running?", address=self._address, gone=True, unsent=True
            )

    def _borrow(self) -> tuple[ch.Channel, ch.Conversation]:
        self._require_owner()
        with self._lock:
            if self._closed:
                raise ClosedError("the connection is closed: connect again")
            while self._idle:
                exchange = self._idle.pop()
                if not exchange.broken:
                    return self._channel, exchange
                exchange.cancel()
            channel = self._channel
        return channel, self._begun(channel)

    def _plain(self) -> SocketAddress | None:
        """The plain socket of this user's own server, as far as that lives and has one."""
        note = self._note
        if note is None or self._tls is not None:
            return None
        if note is not self._token and not note.lives():
            note()  # another one may have its address by now
        return note.plain if note.lives() else None

    def _begun(self, channel: ch.Channel) -> ch.Conversation:
        exchange = channel.conversation()
        if isinstance(exchange, SocketExchange):
            try:
                require_welcome(self.next_of(channel, exchange, CALL_SECONDS)[0])
            except BaseException as e:
                exchange.cancel()
                if isinstance(e, ch.BROKEN):
                    raise self.failure(e, channel) from e
                if isinstance(e, ValueError):
                    raise InvalidRequestError(f"the server at {self._address} does not speak this protocol: {e}") from e
                raise
        return exchange

    def _give_back(self, channel: ch.Channel, exchange: ch.Conversation) -> bool:
        if exchange.sent_bytes > STREAM_BYTES_MAX:
            return False
        with self._lock:
            if self._closed or channel is not self._channel or len(self._idle) >= _IDLE_STREAMS_MAX:
                return False
            exchange.idle_since = time.monotonic()
            self._idle.append(exchange)
            if self._reaper is None:
                given = weakref.ref(self), self._closing, self._idle
                self._reaper = threading.Thread(target=_reap, args=given, name="lakehead-idle", daemon=True)
                self._reaper.start()
            return True

    def _drop_stale(self) -> bool:
        """Let go of what nobody has asked for lately; returns whether there is more to look after."""
        with self._lock:
            oldest = time.monotonic() - _IDLE_SECONDS
            stale = [s for s in self._idle if s.idle_since < oldest]
            self._idle[:] = [s for s in self._idle if s.idle_since >= oldest]
            if not self._idle:
                self._reaper = None
        for exchange in stale:
            exchange.cancel()
        return self._reaper is threading.current_thread()

    def stream(self, request: Request[Stream]) -> FlightStream | SharedStream:
        self._require_owner()
        with self._lock:
            if self._closed:
                raise ClosedError("the connection is closed: connect again")
            channel = self._channel
        if isinstance(request, Subscribe) and may_share(request):
            return SharedStream(self, self._tails, channel, request)
        return FlightStream(self, channel, ch.Inflow(channel, request))

    def failure(self, e: BaseException, channel: ch.Channel) -> LakeheadError:
        """What it means to a caller that a stream of this channel ended with ``e``, one of `BROKEN`."""
        if isinstance(e, fl.FlightUnauthenticatedError | PermissionError):
            return self._refused(channel)
        info = getattr(e, "extra_info", None)
        if info:
            with contextlib.suppress(ValueError):
                reply = decode_error(info)
                return error_from_code(reply.code, reply.message, reply.context)
        if self._closed:
            return ClosedError("the connection is closed: connect again")
        self._renew(channel)
        detail = _detail(e)
        return UnavailableError(
            f"no Lakehead server answers at {self._address}: is it running{self._hint(detail)}? ({detail})",
            address=self._address,
            gone=True,
            unsent="failed to connect" in detail,
        )

    def _renew(self, channel: ch.Channel) -> None:
        """Let whoever tries again after a connection broke come with the certificates that there are now, as far as
        they are others: those of before may have expired, or be of an authority that the server has left."""
        if channel.tls is not None and (now := renewed(channel.tls)) != channel.tls:
            self._tls = now
            self._leave(channel)

    def _hint(self, detail: str) -> str:
        """What else may be wrong where one side speaks TLS."""
        if self._is_own:
            return ""
        if self._tls is None:
            return ", and without TLS (else pass tls_ca=)" if "Socket closed" in detail else ""
        if "has expired" in detail:
            return ", with TLS and a certificate that has not expired"
        if "andshake failed" in detail or "Peer name" in detail:
            return ", with TLS and a certificate for this name that tls_ca= signed"
        if "Socket closed" not in detail:
            return ""
        if self._tls.chain is None:
            return ", and does it ask for a certificate (tls_cert=, tls_key=)"
        return ", and is tls_cert= signed by an authority that it trusts (tls_client_ca), and has not expired"

    def _refused(self, channel: ch.Channel) -> LakeheadError:
        if isinstance(self._token, FoundToken) and self._token() != channel.token:
            self._leave(channel)
            return UnavailableError(
                f"the server at {self._address} was started anew, with another token: call again",
                address=self._address,
                gone=True,
            )
        return AuthenticationError(
            f"the server at {self._address} refused the token, which is missing, wrong, revoked or expired: pass"
            " token=, or run as the user that started it"
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._idle.clear()
            channels = list(self._channels)
        self._closing.set()
        for channel in channels:
            channel.cancel()
        for channel in channels:
            channel.join(_CLOSE_SECONDS)


def _reap(of: weakref.ref[FlightEndpoint], closing: threading.Event, idle: list[ch.Conversation]) -> None:
    """Look after idle streams, until there are none, or nobody has their endpoint any more, which was not closed."""
    while not closing.wait(_IDLE_SECONDS / 2):
        endpoint = of()
        if endpoint is None:
            for exchange in idle:
                exchange.cancel()
            return
        if not endpoint._drop_stale():
            return
        del endpoint


def _detail(e: BaseException) -> str:
    """What an error of a connection says, in short: of a handshake why it failed, which comes last."""
    first = (str(e).splitlines() or [type(e).__name__])[0]
    what, found, why = first.partition("SSL routines::")
    if not found:
        return _AROUND.sub("", first)[:_DETAIL_CHARS]
    return f"{what[:_DETAIL_CHARS].partition(': SSL_ERROR')[0]}: {why.partition('. gRPC')[0][:_DETAIL_CHARS]}"


class FlightStream:
    """A stream from a server in another process; see `lakehead.protocol.messages.Stream`."""

    def __init__(self, endpoint: FlightEndpoint, channel: ch.Channel, inflow: ch.Inflow) -> None:
        """Open it.

        Raises:
            LakeheadError: the server refused, or does not answer.
        """
        self._endpoint = endpoint
        self._channel = channel
        self._inflow = inflow
        self._closed = False
        try:
            self.schema: pa.Schema = self._next(CALL_SECONDS)
        except BaseException as e:
            inflow.cancel()
            if isinstance(e, ch.BROKEN):
                raise endpoint.failure(e, channel) from e
            raise

    def _next(self, seconds: float | None) -> Any:
        return self._endpoint.next_of(self._channel, self._inflow, seconds)

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        while True:
            try:
                chunk = self._next(None)
            except ch.BROKEN as e:
                if self._closed or (isinstance(e, StopIteration) and not self._inflow.cancelled):
                    return
                raise self._endpoint.failure(e, self._channel) from e
            self._inflow.taken()
            yield streamed(chunk, from_own=self._channel.is_from_own(chunk))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._inflow.cancel()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        inflow: ch.Inflow | None = getattr(self, "_inflow", None)
        if inflow is not None:
            inflow.cancel()
