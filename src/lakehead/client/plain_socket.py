"""Calls and streams of a server of this user's own, by a plain Unix socket: whoever asks sends, and waits, itself.

See `lakehead.protocol.socket_messages`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from lakehead.env.address import SocketAddress
from lakehead.errors import AuthenticationError, CorruptionError, error_from_code
from lakehead.format.ipc_message import UNREADABLE
from lakehead.protocol.codec import decode_error, encode
from lakehead.protocol.messages import ErrorReply, Request, Stream
from lakehead.protocol.socket_messages import WINDOW_BYTES, Greeting, Incoming, Outgoing, read_welcome

Answer = tuple[bytes, list[pa.Buffer]]


class Channel(Protocol):
    """What a connection is part of; see `lakehead.client.channel.Channel`.

    Attributes:
        process: which process this is.
        heard_at: when the server was heard last.
    """

    token: str | None
    process: str
    heard_at: float

    def add(self, wait: Any) -> None: ...


class PlainSocket:
    """A connection that is ended from any thread."""

    def __init__(self, channel: Channel, address: SocketAddress, *, stream: bool, silence: float) -> None:
        """Connect, and have a greeting sent before all else.

        Args:
            stream: asks for one stream, for whose items it waits as long as they take.
            silence: how long the system waits for any other step.

        Raises:
            OSError: no such socket is listened on.
        """
        self._channel = channel
        self._pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Reentrant, as the garbage collector may end a forgotten stream at any point of any thread.
        self._lock = threading.RLock()
        self._inside = self._closed = False
        self.cancelled = False
        self._incoming = Incoming(ahead=stream)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_BYTES)
            # The kernel waits so long: Python's own timeouts ask it for readiness first, each time.
            value = struct.pack("@ll", *divmod(int(silence * 1e6), 1_000_000))
            for option in (socket.SO_SNDTIMEO,) if stream else (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, value)
            self._socket.connect(address.path)
        except OSError:
            self._socket.close()
            raise
        self._outgoing = Outgoing(encode(Greeting(token=channel.token, process=channel.process, stream=stream)))

    def _next(self) -> Answer:
        """Send what is to be sent, and wait for what comes then.

        Raises:
            BlockingIOError: a step took longer than it may; it may be called again.
            OSError: the connection broke, or this side ended it.
        """
        with self._lock:
            if self.cancelled:
                raise ConnectionAbortedError("this side ended the connection")
            self._inside = True
        try:
            while parts := self._outgoing.parts:
                self._outgoing.sent(self._socket.sendmsg(parts))
            answer = self._incoming.received(0)
            while answer is None:
                # All that is to come at once, where that is known: each return is a turn at Python's lock.
                how = socket.MSG_WAITALL if self._incoming.whole else 0
                count = self._socket.recv_into(self._incoming.room, 0, how)
                if not count:
                    raise ConnectionResetError("Socket closed")
                answer = self._incoming.received(count)
            self._channel.heard_at = time.monotonic()
            return answer
        finally:
            with self._lock:
                self._inside = False
                if self.cancelled:
                    self._close()

    def cancel(self) -> None:
        """End it at once, at both ends; whoever waits for what comes gets an `OSError`. Never waits. In a forked child
        this end alone: the parent goes on with it."""
        if self._pid != os.getpid():
            self._close()
            return
        with self._lock:
            if self.cancelled:
                return
            self.cancelled = True
            with contextlib.suppress(OSError):  # a forked child may have it open, too
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._inside:
                self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        if hasattr(self, "_outgoing"):
            self.cancel()


class SocketExchange(PlainSocket):
    """A connection that asks one thing at a time; see `lakehead.client.channel.Exchange`, which this stands in for. The
    first answer is the server's to the greeting.

    Attributes:
        idle_since: when its last answer was taken.
        sent_bytes: nothing; nobody between the two sides counts them.
    """

    sent_bytes = 0

    def __init__(self, channel: Channel, address: SocketAddress, *, silence: float) -> None:
        """Connect; see `PlainSocket`."""
        super().__init__(channel, address, stream=False, silence=silence)
        self.idle_since = 0.0
        channel.add(self)

    def ask(self, request: Request[object], attachments: Sequence[pa.Buffer] = ()) -> None:
        """Have a request sent by who waits for its answer."""
        self._outgoing = Outgoing(encode(request), attachments)

    def next_item(self, seconds: float) -> Answer:
        """The next answer.

        Args:
            seconds: not asked for: each step waits as long as silence may last.

        Raises:
            queue.Empty: nothing came, or could be sent, in that time; it may be called again.
            OSError: the connection broke.
        """
        try:
            return self._next()
        except BlockingIOError:
            raise queue.Empty from None

    def join(self, deadline: float) -> None:
        """It has no thread of its own."""

    @property
    def broken(self) -> bool:
        """True when it ended while nobody waited for an answer."""
        with self._lock:
            if self._closed:
                return True
            looked = select.poll()
            looked.register(self._socket, select.POLLIN)
            return bool(looked.poll(0))


class Chunk(NamedTuple):
    """An item of a stream of this user's own server, as Flight gives those of others."""

    app_metadata: pa.Buffer
    data: pa.RecordBatch


class SocketReader(PlainSocket):
    """A stream, read as one of Flight's is.

    Attributes:
        schema: of its rows.
    """

    def __init__(self, channel: Channel, address: SocketAddress, request: Request[Stream], *, silence: float) -> None:
        """Connect; see `PlainSocket`. What waits for the server is `begin`."""
        super().__init__(channel, address, stream=True, silence=silence)
        self._request = request

    def begin(self) -> None:
        """Wait until the stream begins.

        Raises:
            OSError: the connection broke.
            LakeheadError: the server refused.
        """
        require_welcome(self._next()[0])
        self._outgoing = Outgoing(encode(self._request))
        message, parts = self._next()
        self._require_no_error(message, parts)
        try:
            self.schema = pa.ipc.read_schema(parts[0])
        except (IndexError, *UNREADABLE) as e:
            raise CorruptionError(f"a stream without a schema: {e}") from e

    def read_chunk(self) -> Chunk:
        """The next item.

        Raises:
            StopIteration: there is none.
            OSError: the connection broke.
            LakeheadError: what the server ended it with.
        """
        message, parts = self._next()
        if not message and not parts:
            raise StopIteration
        self._require_no_error(message, parts)
        try:
            return Chunk(pa.py_buffer(message), pa.ipc.read_record_batch(parts[0], self.schema))
        except UNREADABLE as e:
            raise CorruptionError(f"the server sent what is no part of a stream: {e}") from e

    @staticmethod
    def _require_no_error(message: bytes, parts: list[pa.Buffer]) -> None:
        if not parts:
            reply = decode_error(message)
            raise error_from_code(reply.code, reply.message, reply.context)


def require_welcome(data: bytes) -> None:
    """Return if a server's answer to a greeting lets this side in.

    Raises:
        PermissionError: it does not know who this is.
        LakeheadError: it refused for another reason, or speaks another version.
        ValueError: it is no answer.
    """
    welcome = read_welcome(data)
    if isinstance(welcome, ErrorReply):
        refused = error_from_code(welcome.code, welcome.message, welcome.context)
        raise PermissionError(welcome.message) if isinstance(refused, AuthenticationError) else refused
