"""Calls to a server of this user's own, by a plain Unix socket: whoever asks sends, and waits for the answer, itself.

See `lakehead.protocol.socket_messages`.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from lakehead.client import channel as ch
from lakehead.env.address import SocketAddress
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import Request
from lakehead.protocol.socket_messages import Greeting, Incoming, Outgoing


class SocketExchange:
    """A connection that asks one thing at a time; see `lakehead.client.channel.Exchange`, which this stands in for.

    Attributes:
        idle_since: when its last answer was taken.
        sent_bytes: nothing; nobody between the two sides counts them.
    """

    sent_bytes = 0

    def __init__(self, channel: ch.Channel, address: SocketAddress) -> None:
        """Connect, and greet; the server's answer to that is the first to come.

        Raises:
            OSError: no such socket is listened on.
        """
        self._channel = channel
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._inside = self._closed = False
        self.cancelled = False
        self.idle_since = 0.0
        self._incoming = Incoming()
        try:
            # The kernel waits so long: Python's own timeouts ask it for readiness first, each time.
            silence = struct.pack("@ll", *divmod(int(ch.SILENCE_SECONDS * 1e6), 1_000_000))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, silence)
            self._socket.connect(address.path)
        except OSError:
            self._socket.close()
            raise
        channel.add(self)
        self._outgoing = Outgoing(encode(Greeting(token=channel.token, process=ch.process_name())))

    def ask(self, request: Request[object], attachments: Sequence[pa.Buffer] = ()) -> None:
        """Have a request sent by who waits for its answer."""
        self._outgoing = Outgoing(encode(request), attachments)

    def next_item(self, seconds: float) -> Any:
        """The next answer, ``(message, attachments)``.

        Args:
            seconds: not asked for: it waits as long as each of its steps may.

        Raises:
            queue.Empty: nothing came, or could be sent, in so many seconds as silence lasts; it may be called again.
            OSError: the connection broke.
        """
        with self._lock:
            if self.cancelled:
                raise ConnectionAbortedError("this side ended the connection")
            self._inside = True
        try:
            while parts := self._outgoing.parts:
                self._outgoing.sent(self._socket.sendmsg(parts))
            while True:
                count = self._socket.recv_into(self._incoming.room)
                if not count:
                    raise ConnectionResetError("Socket closed")
                answer = self._incoming.received(count)
                if answer is not None:
                    self._channel.heard_at = time.monotonic()
                    return answer
        except BlockingIOError:
            raise queue.Empty from None
        finally:
            with self._lock:
                self._inside = False
                if self.cancelled:
                    self._close()

    def cancel(self) -> None:
        """End it at once, at both ends; whoever waits for its answer gets an `OSError`. Never waits."""
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

    def join(self, deadline: float) -> None:
        """It has no thread of its own."""

    @property
    def broken(self) -> bool:
        """True when it ended while nobody waited for an answer."""
        looked = select.poll()
        looked.register(self._socket, select.POLLIN)
        return bool(looked.poll(0))

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.cancel()
