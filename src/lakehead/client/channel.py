"""One gRPC connection to a server, and the streams on it, each with a thread of its own that waits inside gRPC. Calls
and streams of this user's own server go by its plain socket instead (`lakehead.client.plain_socket`).

Whoever asks by gRPC waits on a queue: a wait that Ctrl-C ends and that has a deadline, which waits inside gRPC do not
have. A server that is silent is asked on the same connection whether it lives: a slow answer is waited for, a stopped
server or a connection that leads nowhere is not.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as fl

from lakehead.client.plain_socket import Chunk, SocketExchange, SocketReader
from lakehead.env.address import SocketAddress
from lakehead.env.forks import has_threads, keep_in_children
from lakehead.env.tls import Tls
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, PROCESS_HEADER, require_same_version, send, unwrap, wrap
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import Hello, Request, Stream

SILENCE_SECONDS = 5.0
"""After so long without a word on a connection, the server is asked whether it lives."""
PROBE_SECONDS = 10.0
"""How long it may take to say so."""
BROKEN = (fl.FlightError, pa.ArrowException, StopIteration, OSError)
"""What a stream that broke, or was ended by the server, raises."""

STREAM_BYTES_MAX = 1 << 30
"""After so many bytes of requests a conversation is not used again: a proxy bounds what one may carry."""

_Message = tuple[pa.RecordBatch | None, pa.Buffer]
_INLINE_BYTES = 1 << 15
_AHEAD_BATCHES = 2
_CALLS = b"calls"
# gRPC hands out bytes wherever they lie in its messages. Arrow's engine warns on the terminal of columns that are not
# aligned to their type, and others refuse them, so those are copied. An attachment is bytes, in which columns may be.
_STREAMED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
_ATTACHED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
# gRPC waits up to two minutes between attempts to reconnect, and fails calls meanwhile: longer than writers retry. The
# least one is no wait, whatever its name says: an attempt that is not answered is given so much time.
_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Each channel has a connection of its own: a new one is made because the old one leads nowhere.
    ("grpc.use_local_subchannel_pool", 1),
    # Servers refuse pings that come more often than every five minutes, so that these only end what nobody waits for
    # any more. The timeout is the kernel's as well, for bytes that the other side does not acknowledge.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


def process_name() -> str:
    """Tells this process from others that call a server."""
    return f"{os.uname().nodename}:{os.getpid()}"


class Channel:
    """A connection to one address, made when it is first used. Thread-safe.

    Attributes:
        is_own: whether nobody but this user can listen there.
        tls: the certificates that it was made with.
    """

    def __init__(
        self,
        location: str,
        *,
        token: str | None,
        tls: Tls | None,
        is_own: bool = False,
        plain: Callable[[], SocketAddress | None] = lambda: None,
    ) -> None:
        """Connect to it when it is first used.

        Args:
            plain: tells the plain socket at which the same server answers, as far as it has one.
        """
        self.is_own = is_own
        self.tls = tls
        self._plain = plain
        self.process = process_name()
        options: dict[str, Any] = {} if tls is None else {"tls_root_certs": tls.authorities}
        if tls is not None and tls.chain is not None:
            options |= {"cert_chain": tls.chain, "private_key": tls.key}
        self.token = token
        has_threads()
        keep_in_children(self)
        self.client = fl.connect(location, generic_options=_RECONNECT, **options)
        headers = [(PROCESS_HEADER.encode(), self.process.encode("ascii", "replace"))]
        headers += [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self.calls = fl.FlightCallOptions(headers=headers, read_options=_ATTACHED)
        self.streams = fl.FlightCallOptions(headers=headers, read_options=_STREAMED)
        self.heard_at = time.monotonic()
        self._probing = threading.Lock()
        self._waits: weakref.WeakSet[Waited] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._cancelled = False

    def conversation(self) -> Conversation:
        """A new one: at the server's plain socket, where the first answer is to the greeting; else by Flight."""
        if (plain := self._plain()) is not None:
            with contextlib.suppress(OSError):
                return SocketExchange(self, plain, silence=SILENCE_SECONDS)
        return Exchange(self)

    def reader(self, request: Request[Stream], began: Callable[[Any], None]) -> Any:
        """Reads a stream, as `pyarrow.flight.FlightStreamReader` does; ``began`` is given it as early as it can be
        cancelled. Waits for the server; raises what its methods raise."""
        if (plain := self._plain()) is not None:
            reader = None
            with contextlib.suppress(OSError):
                reader = SocketReader(self, plain, request, silence=SILENCE_SECONDS)
            if reader is not None:
                began(reader)
                reader.begin()
                return reader
        flight = self.client.do_get(fl.Ticket(encode(request)), self.streams)
        began(flight)
        return flight

    def is_from_own(self, chunk: Any) -> bool:
        """Whether nobody but this user can have sent what a reader of this channel has read."""
        return self.is_own or isinstance(chunk, Chunk)

    def add(self, wait: Waited) -> None:
        """Have a wait cancelled with the channel."""
        with self._lock:
            self._waits.add(wait)
            cancelled = self._cancelled
        if cancelled:
            wait.cancel()

    def cancel(self) -> None:
        """End everything that waits on this connection."""
        with self._lock:
            self._cancelled = True
            waits = list(self._waits)
        for wait in waits:
            wait.cancel()

    def join(self, seconds: float) -> None:
        """Wait until what was cancelled has ended: the threads of a process that ends must not be inside gRPC."""
        deadline = time.monotonic() + seconds
        with self._lock:
            waits = list(self._waits)
        for wait in waits:
            wait.join(deadline)

    def lives(self) -> bool:
        """Whether anything was heard from the server lately, or it answers when it is asked."""
        with self._probing:
            if time.monotonic() - self.heard_at < SILENCE_SECONDS:
                return True
            probe = Exchange(self)
            try:
                probe.ask(Hello())
                return _is_answer(probe.items.get(timeout=PROBE_SECONDS))
            except queue.Empty:
                return False
            finally:
                probe.cancel()


def _is_answer(item: object) -> bool:
    """Whether a server said this, if only that it lets nobody in, or not so many: it answers what waits, too."""
    refused = isinstance(item, fl.FlightUnauthenticatedError) or bool(getattr(item, "extra_info", None))
    return refused or not isinstance(item, BaseException)


class Queued(Protocol):
    """Whose items somebody waits for; see `Wait`."""

    def next_item(self, seconds: float) -> Any:
        """The next item; an exception, as a rule one of `BROKEN`, is the last, and is raised or given.

        Raises:
            queue.Empty: nothing came in about that time.
        """
        ...


class Waited(Protocol):
    """What a channel ends; see `Wait`."""

    def cancel(self) -> None: ...

    def join(self, deadline: float) -> None: ...


class Conversation(Queued, Waited, Protocol):
    """What asks one thing at a time; see `Exchange`."""

    idle_since: float

    @property
    def sent_bytes(self) -> int: ...

    @property
    def broken(self) -> bool: ...

    def ask(self, request: Request[object], attachments: Sequence[pa.Buffer] = ()) -> None: ...


class Wait:
    """A stream whose thread waits inside gRPC.

    Attributes:
        items: what came, in order; an exception, one of `BROKEN` as a rule, is the last.
        cancelled: whether this side ended it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader: Any = None
        self.cancelled = False
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        keep_in_children(self)
        channel.add(self)

    def _start(self, run: Callable[[], None], name: str) -> None:
        def report() -> None:
            try:
                run()
            except BaseException as e:
                if self.cancelled:  # nobody looks at it, and its frames would keep this, and the channel
                    e = e.with_traceback(None)
                self._put(e)

        thread = threading.Thread(target=report, name=name, daemon=True)
        with self._lock:  # who closes joins none that is not started yet
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def next_item(self, seconds: float) -> Any:
        """See `Queued`."""
        return self.items.get(timeout=seconds)

    def join(self, deadline: float) -> None:
        """Wait until the stream's threads have ended, up to a time of the monotonic clock."""
        with self._lock:
            threads = self._threads
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _began(self, reader: Any) -> None:
        with self._lock:
            self._reader = reader
            cancelled = self.cancelled
        if cancelled:
            reader.cancel()

    def _heard(self, item: Any) -> None:
        self._channel.heard_at = time.monotonic()
        self._put(item)

    def _put(self, item: Any) -> None:
        self.items.put(item)

    def cancel(self) -> None:
        """End the stream at once, at both ends; whoever waits for its items gets `StopIteration`. Never waits."""
        with self._lock:
            if self.cancelled:
                return
            self.cancelled = True
            reader = self._reader
        self._put(StopIteration())
        if reader is not None:
            reader.cancel()


class Exchange(Wait):
    """An exchange stream: asks one thing at a time; the answers, ``(message, attachments)``, are its items.

    Attributes:
        idle_since: when its last answer was taken.
        sent_bytes: of attachments of its requests.
    """

    def __init__(self, channel: Channel) -> None:
        self._writer: Any = None
        self._large: queue.SimpleQueue[list[_Message] | None] | None = None
        # An answer may come before the write of its request has returned, and gRPC aborts the process over a second
        # write, or an end of writing, beside the first. Where a server is gone, Arrow's reader ends the writing itself,
        # whoever does so beside it; so a stream is ended by cancelling it, which is allowed at any time.
        self._writing = threading.Lock()
        self.idle_since = 0.0
        self.sent_bytes = 0
        super().__init__(channel)  # which cancels it at once when the channel is cancelled

    def ask(self, request: Request[object], attachments: Sequence[pa.Buffer] = ()) -> None:
        """Send a request. What does not fit into gRPC's windows is sent by a thread, as sending it may wait, too."""
        messages = wrap(encode(request), attachments)
        size = sum(a.size for a in attachments)
        self.sent_bytes += size
        if self._writer is None:
            self._start(lambda: self._converse(messages), "lakehead-calls")
        elif size > _INLINE_BYTES:
            if self._large is None:
                large = self._large = queue.SimpleQueue()
                self._start(lambda: self._send_all(large), "lakehead-send")
            self._large.put(messages)
        else:
            self._send(messages)

    def _converse(self, messages: list[_Message]) -> None:
        writer, reader = self._channel.client.do_exchange(fl.FlightDescriptor.for_command(_CALLS), self._channel.calls)
        self._began(reader)
        try:
            writer.begin(ATTACHMENT_SCHEMA)
            self._writer = writer
            self._send(messages)
            require_same_version(reader.schema)
            while True:
                self._heard(unwrap(reader.read_chunk))
        finally:
            self._end_sending()
            with self._writing, contextlib.suppress(*BROKEN):
                writer.close()

    def _send(self, messages: list[_Message]) -> None:
        with self._writing:
            send(self._writer, messages)

    def _send_all(self, large: queue.SimpleQueue[list[_Message] | None]) -> None:
        while (messages := large.get()) is not None:
            self._send(messages)

    def _end_sending(self) -> None:
        if self._large is not None:
            self._large.put(None)

    def cancel(self) -> None:
        super().cancel()
        self._end_sending()

    @property
    def broken(self) -> bool:
        """True when it ended while nobody waited for an answer."""
        return not self.items.empty()


class Inflow(Wait):
    """A stream of batches: its items are the schema, then a few chunks ahead of who takes them with `take`."""

    def __init__(self, channel: Channel, request: Request[Stream]) -> None:
        self._room = threading.Semaphore(_AHEAD_BATCHES)
        super().__init__(channel)
        self._start(lambda: self._receive(request), "lakehead-stream")

    def _receive(self, request: Request[Stream]) -> None:
        reader = self._channel.reader(request, self._began)
        self._heard(reader.schema)
        while not self.cancelled:
            self._heard(reader.read_chunk())
            self._room.acquire()

    def taken(self) -> None:
        """Make room for one more chunk."""
        self._room.release()

    def cancel(self) -> None:
        super().cancel()
        self._room.release()
