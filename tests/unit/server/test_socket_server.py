"""Calls by a plain socket: who is let in, what is refused, and how a server ends with clients that hold on."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS, wait_until

from lakehead.env import Env
from lakehead.env.address import SocketAddress
from lakehead.errors import (
    AuthenticationError,
    CorruptionError,
    InvalidRequestError,
    LimitExceededError,
    OffsetOutOfRangeError,
    OverloadedError,
    TableNotFoundError,
)
from lakehead.protocol import messages as m
from lakehead.protocol.codec import decode_stream_header, encode
from lakehead.protocol.socket_messages import Greeting, Incoming, Outgoing, read_welcome
from lakehead.server import socket_server
from lakehead.server.access import Caller
from lakehead.server.admission import Bounded
from lakehead.server.answers import Answers
from lakehead.server.door import Door
from lakehead.server.socket_server import SocketServer

TOKEN = "secret"


ROWS = pa.record_batch({"k": pa.array(range(50_000), pa.int64()), "s": ["text"] * 50_000})


class Stream:
    """The same rows again and again, as often as the request has columns; then it waits until it may end or fail."""

    schema = ROWS.schema
    progress = None

    def __init__(self, request: Any, go: threading.Event, gone: Callable[[], bool]) -> None:
        self.request, self.go, self.gone = request, go, gone
        self.closed = threading.Event()

    def items(self, gone: Callable[[], bool]) -> Iterator[tuple[m.StreamHeader, pa.RecordBatch]]:
        for n in range(len(self.request.columns)):
            yield m.StreamHeader(partition="", bucket=0, end_offset=n), ROWS
        while not self.go.wait(0.01):
            if gone():
                return
        if "fails" in self.request.columns:
            raise OffsetOutOfRangeError("it was trimmed", log_start_offset=7)

    def close(self) -> None:
        self.closed.set()


class Service:
    """Answers with what it was given, once it may."""

    closing = False

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Event()
        self.callers: list[Caller] = []
        self.streams: list[Stream] = []

    def stream(self, request: Any, caller: Caller, gone: Callable[[], bool]) -> Stream:
        if request.table_id == "none":
            raise TableNotFoundError("no such table")
        self.streams.append(Stream(request, self.go, gone))
        return self.streams[-1]

    def call(self, request: Any, attachments: list[pa.Buffer], caller: Caller) -> tuple[m.Reply, list[pa.Buffer]]:
        self.callers.append(caller)
        self.asked.set()
        assert self.go.wait(WAIT_SECONDS)
        return m.NamesReply(names=[type(request).__name__]), list(attachments)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def at(tmp_path: Path) -> SocketAddress:
    return SocketAddress(str(tmp_path / "s.plain"))


@pytest.fixture
def server(service: Service, at: SocketAddress) -> Iterator[SocketServer]:
    env = Env.system()
    door = Door(TOKEN, None, env)  # type: ignore[arg-type]
    exchanges = Bounded(env.threads, "exchanges_max", "conversations", 2)
    answers = Answers(service)  # type: ignore[arg-type]
    made = SocketServer(answers, address=at, door=door, exchanges=exchanges, clock=env.clock)
    yield made
    while Client.opened:
        Client.opened.pop().close()
    service.go.set()
    made.stop()
    assert made.wait_stopped(30)


GREETING = encode(Greeting(token=TOKEN, process="p"))


class Client:
    """One connection."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, at: SocketAddress, greeting: bytes | None = GREETING, *, ahead: bool = False) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.opened.append(self.socket)
        self.socket.settimeout(30)
        self.socket.connect(at.path)
        self.incoming = Incoming(ahead=ahead)
        if greeting is not None:
            self.send(Outgoing(greeting))

    def send(self, outgoing: Outgoing) -> None:
        while parts := outgoing.parts:
            outgoing.sent(self.socket.sendmsg(parts))

    def ask(self, request: m.Request[Any], attachments: list[pa.Buffer] | None = None) -> None:
        self.send(Outgoing(encode(request), attachments or []))

    def heard(self) -> tuple[bytes, list[pa.Buffer]] | None:
        """The next message; None at the end."""
        if (there := self.incoming.received(0)) is not None:
            return there
        while True:
            count = self.socket.recv_into(self.incoming.room)
            if not count:
                return None
            if (message := self.incoming.received(count)) is not None:
                return message

    def error(self) -> m.ErrorReply:
        message = self.heard()
        assert message is not None
        refused = read_welcome(message[0])
        assert isinstance(refused, m.ErrorReply)
        return refused

    def let_in(self) -> Client:
        message = self.heard()
        assert message is not None and read_welcome(message[0]) == Greeting()
        return self

    def names(self) -> tuple[list[str], list[pa.Buffer]]:
        message = self.heard()
        assert message is not None
        return msgspec.msgpack.decode(message[0])["names"], message[1]


def test_who_greets_rightly_is_answered(server: SocketServer, service: Service, at: SocketAddress) -> None:
    client = Client(at).let_in()
    large = pa.py_buffer(os.urandom(3 << 20))
    for given in ([], [pa.py_buffer(b"x")], [large, pa.py_buffer(b""), large]):
        client.ask(m.ListDatabases(), given)
        assert client.names() == (["ListDatabases"], given)
    assert {(c.peer, c.process) for c in service.callers} == {("unix:", "p")}
    client.socket.close()


def test_who_is_nobody_is_told(server: SocketServer, service: Service, at: SocketAddress) -> None:
    for token in (None, "wrong"):
        client = Client(at, encode(Greeting(token=token)))
        assert client.error().code == AuthenticationError.code
        assert client.heard() is None
    other = Client(at, encode(Greeting(version=m.PROTOCOL_VERSION + 1, token=TOKEN)))
    other.let_in()  # it says which version it speaks
    assert other.heard() is None
    odd = Client(at, b"\xc1")
    assert odd.error().code == InvalidRequestError.code
    assert odd.heard() is None
    assert not service.callers


def test_what_is_no_message_ends_that_connection_alone(server: SocketServer, at: SocketAddress) -> None:
    good = Client(at).let_in()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100):
        bad = Client(at, None)
        bad.socket.sendall(garbage)
        assert bad.error().code == CorruptionError.code
        assert bad.heard() is None
    silent = Client(at, None)
    silent.socket.close()
    good.socket.sendall(b"\xff" * 8)
    assert good.error().code == CorruptionError.code
    again = Client(at).let_in()
    again.send(Outgoing(b"no request"))
    assert again.error().code == InvalidRequestError.code
    again.ask(m.Hello())
    assert again.names() == (["Hello"], []), "a request that is none ends nothing"


def test_who_says_nothing_is_not_waited_for(
    server: SocketServer, at: SocketAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "GREETING_SECONDS", 0.05)
    assert Client(at, None).heard() is None


def test_what_is_too_large_is_refused_and_the_next_is_answered(
    server: SocketServer, at: SocketAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "MESSAGE_BYTES_MAX", 1 << 20)
    client = Client(at).let_in()
    half = pa.py_buffer(bytes(600_000))
    for _ in range(2):
        client.ask(m.Hello(), [half, half])
        assert client.error().code == LimitExceededError.code
        client.ask(m.Hello(), [half])
        assert client.names()[0] == ["Hello"]


def test_conversations_are_bounded(server: SocketServer, at: SocketAddress) -> None:
    first = Client(at).let_in()
    gone = Client(at).let_in()
    gone.socket.close()
    second = None

    def has_room() -> bool:
        nonlocal second
        second = Client(at)
        message = second.heard()
        return message is not None and not isinstance(read_welcome(message[0]), m.ErrorReply)

    wait_until(has_room)
    assert Client(at).error().code == OverloadedError.code
    first.socket.close()
    wait_until(has_room)


def test_what_was_asked_is_answered_before_it_ends(server: SocketServer, service: Service, at: SocketAddress) -> None:
    idle, busy = Client(at).let_in(), Client(at).let_in()
    service.go.clear()
    busy.ask(m.Hello())
    assert service.asked.wait(WAIT_SECONDS)
    server.stop()
    assert idle.heard() is None
    assert not server.wait_stopped(0)
    service.go.set()
    assert busy.names()[0] == ["Hello"]
    assert busy.heard() is None
    assert server.wait_stopped(30)
    with pytest.raises(ConnectionRefusedError):
        Client(at)


def reading(at: SocketAddress, *columns: str, table: str = "t") -> Client:
    """A client that has asked for a stream."""
    client = Client(at, encode(Greeting(token=TOKEN, stream=True)), ahead=True).let_in()
    client.ask(m.Read(table_id=table, ranges=[], columns=list(columns), predicate=None))
    return client


def test_a_stream_is_sent_to_its_end(server: SocketServer, service: Service, at: SocketAddress) -> None:
    client = reading(at, *"abc")
    begun = client.heard()
    assert begun is not None and pa.ipc.read_schema(begun[1][0]) == ROWS.schema
    for n in range(3):
        item = client.heard()
        assert item is not None and decode_stream_header(item[0]).end_offset == n
        assert pa.ipc.read_record_batch(item[1][0], ROWS.schema) == ROWS
    assert client.heard() == (b"", [])
    assert client.heard() is None
    assert service.streams[0].closed.wait(WAIT_SECONDS)


def test_a_stream_that_is_refused_or_fails_says_why(server: SocketServer, at: SocketAddress) -> None:
    assert reading(at, table="none").error().code == TableNotFoundError.code
    client = reading(at, "a", "fails")
    for _ in range(3):
        message = client.heard()
        assert message is not None and message[1]
    error = client.error()
    assert (error.code, error.context["log_start_offset"]) == (OffsetOutOfRangeError.code, 7)
    odd = Client(at, encode(Greeting(token=TOKEN, stream=True))).let_in()
    odd.send(Outgoing(b"no request"))
    assert odd.error().code == InvalidRequestError.code


def test_a_stream_whose_client_goes_is_closed(server: SocketServer, service: Service, at: SocketAddress) -> None:
    service.go.clear()
    waits = reading(at)
    assert waits.heard() is not None
    waits.socket.close()
    assert service.streams[0].closed.wait(WAIT_SECONDS)
    full = reading(at, *("a" * 200))  # more than fits into the socket
    assert full.heard() is not None
    full.socket.close()
    assert service.streams[1].closed.wait(WAIT_SECONDS)


def test_a_stream_ends_with_its_service_and_not_as_if_that_was_all(
    server: SocketServer, service: Service, at: SocketAddress
) -> None:
    service.go.clear()
    client = reading(at, "a", "fails")
    assert [client.heard() is not None for _ in range(3)] == [True] * 3
    server.stop()
    assert not service.streams[0].closed.wait(0.1), "the service ends it"
    service.go.set()
    assert client.error().code == OffsetOutOfRangeError.code
    assert server.wait_stopped(30)


def test_an_address_that_is_taken(server: SocketServer, at: SocketAddress) -> None:
    env = Env.system()
    exchanges = Bounded(env.threads, "exchanges_max", "conversations", 2)
    with pytest.raises(InvalidRequestError, match="cannot listen"):
        SocketServer(None, address=at, door=None, exchanges=exchanges, clock=env.clock)  # type: ignore[arg-type]
