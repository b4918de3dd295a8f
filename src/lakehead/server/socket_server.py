"""Calls and streams of this user's own processes, by a plain Unix socket: no thread stands between the two sides.

Each connection has a thread, which reads a request, answers it, and reads the next, or sends one stream; but for new
rows, which the thread that has written them sends (`lakehead.server.deliveries`). See
`lakehead.protocol.socket_messages`.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading

import msgspec

from lakehead.env.address import SocketAddress
from lakehead.env.clock import Clock
from lakehead.errors import AuthenticationError, CorruptionError, InvalidRequestError, LakeheadError
from lakehead.protocol.codec import encode
from lakehead.protocol.socket_messages import WINDOW_BYTES, Greeting, Incoming, Outgoing, read_greeting
from lakehead.server.access import Caller
from lakehead.server.admission import Bounded
from lakehead.server.answers import MESSAGE_BYTES_MAX, PROCESS_MAX, Answers, ClientGone, Streamed
from lakehead.server.deliveries import Deliveries, Resting, message_of, send_all
from lakehead.server.door import Door
from lakehead.server.streams import Pause

GREETING_SECONDS = 10.0
"""How long a client may take to say who it is."""
_PEER = "unix:"
_BUSY_SECONDS = 0.1
_REST_SECONDS = 1.0
_log = logging.getLogger("lakehead.server")


class SocketServer:
    """Gives answers at one Unix socket until `stop`."""

    def __init__(
        self, answers: Answers, *, address: SocketAddress, door: Door, exchanges: Bounded, clock: Clock
    ) -> None:
        """Listen.

        Raises:
            InvalidRequestError: the address cannot be listened on.
        """
        self._answers = answers
        self._door = door
        self._exchanges = exchanges
        self._clock = clock
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._streaming: set[socket.socket] = set()
        self._stopping = False
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._woken, self._wakes = socket.socketpair()
        try:
            self._listening.bind(address.path)
            self._listening.listen(1024)
            self._listening.setblocking(False)
        except OSError as e:
            self._close_own()
            raise InvalidRequestError(f"cannot listen on {address} ({e})") from e
        self._deliveries = Deliveries()
        self._accepting = threading.Thread(target=self._accept_all, name="lakehead-accept", daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        """Take no more connections, and end those there are when what they asked for is answered; the service that is
        closed ends streams."""
        with self._lock:
            self._stopping = True
            for connection in self._threads.values():
                if connection not in self._streaming:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
            self._end_deliveries()
        with contextlib.suppress(OSError):
            self._wakes.send(b".")

    def wait_stopped(self, seconds: float) -> bool:
        """Return when all that was asked is answered, or after that time; True in the first case."""
        end = self._clock.monotonic() + seconds
        with self._lock:
            threads = [*self._threads, self._accepting]
        for thread in [*threads, self._deliveries.thread]:
            thread.join(max(0.0, end - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _end_deliveries(self) -> None:
        """Once nobody has a stream any more; inside the lock."""
        if self._stopping and not self._threads:
            self._deliveries.stop()

    def forget(self) -> None:
        """In a forked child: the parent listens."""
        self._close_own()
        for connection in self._threads.values():
            connection.close()

    def _close_own(self) -> None:
        for own in (self._listening, self._woken, self._wakes):
            own.close()

    def _accept_all(self) -> None:
        waiting = select.poll()
        waiting.register(self._listening, select.POLLIN)
        waiting.register(self._woken, select.POLLIN)
        while not self._stopping:
            waiting.poll()
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                continue
            except OSError as e:
                _log.warning("no connection can be taken: %s", e)
                self._clock.sleep(_BUSY_SECONDS)  # until descriptors or memory come back
                continue
            self._begin(connection)
        self._close_own()

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="lakehead-calls", daemon=True)
        try:
            with self._lock:
                if self._stopping:
                    connection.close()
                    return
                self._threads[thread] = connection
                thread.start()
        except RuntimeError as e:  # there can be no more threads
            _log.warning("a connection was refused: %s", e)
            with self._lock:
                del self._threads[thread]
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_BYTES)
            connection.settimeout(GREETING_SECONDS)
            greeted = self._let_in(connection)
            if greeted is not None:
                greeting, caller = greeted
                if greeting.stream:
                    self._stream(connection, caller)
                else:
                    connection.settimeout(None)
                    self._answer_all(connection, caller)
        except OSError:
            pass  # the client is gone
        except (LakeheadError, MemoryError) as e:
            _log.warning("a connection was ended: %s", e)
            with contextlib.suppress(OSError):
                _send(connection, encode(self._answers.error(e)))
        finally:
            with self._lock:
                del self._threads[threading.current_thread()]
                self._end_deliveries()
            connection.close()

    def _let_in(self, connection: socket.socket) -> tuple[Greeting, Caller] | None:
        """Who greets; None if that is nobody who is let in, as it is told."""
        message = _read(connection)
        if message is None:
            return None
        try:
            greeting = read_greeting(message)
            return greeting, self._door.let_in(greeting.token, "", _PEER, greeting.process[:PROCESS_MAX])
        except msgspec.DecodeError as e:
            refused = self._answers.error(InvalidRequestError(f"not a greeting: {e}"))
        except AuthenticationError as e:
            refused = self._answers.error(e)
        except LakeheadError as e:  # of another version, which reads no error of this one
            _log.warning("a connection was refused: %s", e.message)
            _send(connection, encode(Greeting()))
            return None
        _send(connection, encode(refused))
        return None

    def _answer_all(self, connection: socket.socket, caller: Caller) -> None:
        try:
            held = self._exchanges.take(share=caller.share)
        except LakeheadError as e:
            return _send(connection, encode(self._answers.error(e)))
        try:
            _send(connection, encode(Greeting()))
            incoming = Incoming(bytes_max=MESSAGE_BYTES_MAX)
            while not self._stopping:
                count = connection.recv_into(incoming.room)
                if not count:
                    return None
                try:
                    request = incoming.received(count)
                except CorruptionError:
                    raise
                except LakeheadError as e:
                    _send(connection, encode(self._answers.error(e)))
                    continue
                if request is not None:
                    try:
                        answer, parts = self._answers.answer(*request, caller, writing=self._deliveries.promise)
                        outgoing = Outgoing(answer, parts)
                        del request, answer, parts
                        send_all(connection, outgoing)
                    finally:
                        self._deliveries.keep_promise()
        finally:
            self._exchanges.give_back(held)

    def _stream(self, connection: socket.socket, caller: Caller) -> None:
        _send(connection, encode(Greeting()))
        request = _read(connection)
        if request is None:
            return
        connection.settimeout(None)
        with self._lock:
            self._streaming.add(connection)
        ended = select.poll()
        ended.register(connection, select.POLLIN)  # it says nothing more: only that it has gone
        gone = lambda: bool(ended.poll(0))  # noqa: E731
        try:
            stream = self._answers.stream(request, caller, ClientGone(gone, self._clock), pauses=True)
            with contextlib.closing(stream.items):
                send_all(connection, Outgoing(b"", [stream.schema.serialize()]))
                self._send_items(connection, stream)
            if not gone():
                _send(connection, b"")
        except LakeheadError as e:
            _send(connection, encode(self._answers.error(e)))
        finally:
            with self._lock:
                self._streaming.discard(connection)

    def _send_items(self, connection: socket.socket, stream: Streamed) -> None:
        resting = Resting(self._deliveries, connection, stream.items)
        with contextlib.ExitStack() as stack:
            if stream.progress is not None:
                stack.callback(stream.progress.watch(resting.progressed))
            for item in stream.items:
                if item is Pause.NOTHING_NEW:
                    if not resting.rest(_REST_SECONDS):
                        return
                elif item is not Pause.LONG:
                    send_all(connection, message_of(item))


def _read(connection: socket.socket) -> bytes | None:
    """A message without attachments; None if the client ends before."""
    incoming = Incoming(bytes_max=0)
    message = None
    while message is None:
        count = connection.recv_into(incoming.room)
        if not count:
            return None
        message = incoming.received(count)
    return message[0]


def _send(connection: socket.socket, message: bytes) -> None:
    send_all(connection, Outgoing(message))
