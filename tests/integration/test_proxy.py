"""The configuration of a proxy in docs/guides/security.md: clients work through it, and it bounds what gRPC cannot."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.certificates import Authority
from tests.lake_servers import free_ports
from tests.waiting import WAIT_SECONDS, wait_until

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.client import flight
from lakehead.config import ServerConfig
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, send, unwrap, wrap
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import Hello

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
IDLE_SECONDS, STREAM_BYTES, STREAMS, CONNECTIONS = 2, 16 << 20, 40, 64
ROWS = pa.table({"k": list(range(50_000)), "s": ["some text"] * 50_000})
CALLS = fl.FlightCallOptions(headers=[(b"authorization", b"Bearer t")])
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def configured(port: int, server: int, certificate: tuple[Path, Path], folder: Path) -> str:
    """What the guide has, for these ports and files and with smaller bounds."""
    (text,) = re.findall(r"^```nginx\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    for pattern, becomes in (
        (r"listen 9123 ssl", f"listen 127.0.0.1:{port} ssl"),
        (r"127\.0\.0\.1:9124", f"127.0.0.1:{server}"),
        (r"/etc/lakehead/server\.pem", str(certificate[0])),
        (r"/etc/lakehead/server\.key", str(certificate[1])),
        (r"keepalive_timeout \w+;", f"keepalive_timeout {IDLE_SECONDS};"),
        (r"client_header_timeout \w+;", f"client_header_timeout {IDLE_SECONDS};"),
        (r"client_max_body_size \w+;", f"client_max_body_size {STREAM_BYTES};"),
        (r"limit_conn streams \w+;", f"limit_conn streams {STREAMS};"),
        (r"worker_connections \w+;", f"worker_connections {CONNECTIONS};"),
        (r"worker_processes \w+;", "worker_processes 1;"),
    ):
        text, found = re.subn(pattern, becomes, text)
        assert found == 1, f"the guide's configuration has {found} of {pattern}"
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"daemon off;\npid {folder}/pid;\n" + text.replace("http {\n", f"http {{\n{places}", 1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None, "nginx is not installed: make proxy"
    folder = tmp_path_factory.mktemp("proxy")
    host = serve(folder / "data", ServerConfig(token="t"))
    assert host.port is not None
    (port,) = free_ports(1)
    config = folder / "nginx.conf"
    config.write_text(configured(port, host.port, authority.signed("server", "DNS:localhost"), folder))
    said = folder / "error.log"
    proxy = subprocess.Popen([program, "-p", str(folder), "-c", str(config), "-e", str(said)])

    def listens() -> bool:
        assert proxy.poll() is None, said.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        wait_until(listens)
        yield port
    finally:
        proxy.terminate()
        proxy.wait(WAIT_SECONDS)
        host.close()
        host.wait_stopped(10)


@pytest.fixture
def connect(port: int, authority: Authority) -> Callable[[], lh.Connection]:
    return lambda: lh.connect(f"lakehead://localhost:{port}", token="t", tls_ca=authority.ca)


def raw(port: int, authority: Authority, **options: Any) -> fl.FlightClient:
    """A client that is not one of Lakehead's."""
    return fl.connect(f"grpc+tls://localhost:{port}", tls_root_certs=authority.ca.read_bytes(), **options)


def talk(port: int, authority: Authority) -> ssl.SSLSocket:
    """A connection that says no more than that it speaks HTTP/2."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    talking = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 10), server_hostname="localhost")
    talking.sendall(_HELLO)
    return talking


def is_open(talking: ssl.SSLSocket) -> bool:
    talking.setblocking(False)
    try:
        while talking.recv(4096):
            continue
        return False
    except ssl.SSLWantReadError:
        return True
    except OSError:
        return False


def test_clients_work_through_it(connect: Callable[[], lh.Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "STREAM_BYTES_MAX", STREAM_BYTES // 4)
    with connect() as con:
        log = con.create_table("a.log", ROWS.schema)
        for _ in range(40):  # many times what one stream may carry
            log.append(ROWS)
        assert log.scan().count() == 40 * ROWS.num_rows
        assert log.scan(where="k = 17").to_arrow().num_rows == 40
        keyed = con.create_table("a.keyed", ROWS.schema, primary_key="k")
        keyed.upsert(ROWS)
        assert keyed.get(3) == {"k": 3, "s": "some text"} and keyed.lookup([1, 2, 3]).num_rows == 3
        assert con.sql("select count(*) from a.log").fetchone() == (40 * ROWS.num_rows,)
        with log.writer() as writer:
            for _ in range(20):
                writer.append(ROWS)
        assert log.scan().count() == 60 * ROWS.num_rows


def test_a_subscription_outlives_the_time_of_an_idle_connection(connect: Callable[[], lh.Connection]) -> None:
    with connect() as con:
        table = con.create_table("a.quiet", [("k", "int64")])
        with table.subscribe("latest") as subscription:
            pause = threading.Event()
            pause.wait(2.5 * IDLE_SECONDS)  # what is tried is that nothing happens in this time
            with connect() as other:
                other.table("a.quiet").append([{"k": 1}])
            assert next(iter(subscription)).rows.to_pylist()[0]["k"] == 1
        table.append([{"k": 2}])  # on a connection that was closed in between, perhaps
        assert table.scan().count() == 2


def test_a_connection_that_asks_nothing_is_closed(port: int, authority: Authority) -> None:
    began = time.monotonic()
    with talk(port, authority) as talking:
        wait_until(lambda: not is_open(talking), 10 * IDLE_SECONDS)
    assert time.monotonic() - began >= IDLE_SECONDS / 2


def test_many_connections_leave_room_for_others(
    port: int, authority: Authority, connect: Callable[[], lh.Connection]
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * CONNECTIONS):
            with contextlib.suppress(OSError):
                stack.enter_context(talk(port, authority))
        with connect() as con:
            assert con.databases() is not None


def hello(client: fl.FlightClient, attached: int = 0) -> bool:
    """Whether the server answers a request with so many bytes attached."""
    try:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b"calls"), CALLS)
        writer.begin(ATTACHMENT_SCHEMA)
        send(writer, wrap(encode(Hello()), [pa.py_buffer(bytes(attached))]))
        unwrap(reader.read_chunk)
        writer.done_writing()
        return True
    except pa.ArrowException:
        return False


def test_a_message_of_any_size_is_cut(port: int, authority: Authority) -> None:
    with raw(port, authority) as client:
        assert hello(client, STREAM_BYTES // 2)
        assert not hello(client, 4 * STREAM_BYTES)
        assert hello(client)


def test_what_grpc_compresses_is_refused(port: int, authority: Authority) -> None:
    with raw(port, authority, generic_options=[("grpc.default_compression_algorithm", 2)]) as client:
        assert not hello(client, STREAM_BYTES // 2)
    with raw(port, authority) as client:
        assert hello(client, STREAM_BYTES // 2)


def test_other_methods_do_not_reach_the_server(port: int, authority: Authority) -> None:
    with raw(port, authority) as client, pytest.raises(pa.ArrowException, match=r"404|nimplemented"):
        list(client.list_flights(options=CALLS))


def test_streams_of_one_address_are_bounded(port: int, authority: Authority) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(raw(port, authority))
        held = []
        for _ in range(2 * STREAMS):
            with contextlib.suppress(pa.ArrowException):
                writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b"calls"), CALLS)
                stack.callback(reader.cancel)
                writer.begin(ATTACHMENT_SCHEMA)
                if reader.schema == ATTACHMENT_SCHEMA:
                    held.append((writer, reader))  # it ends with them
        assert len(held) == STREAMS
    with raw(port, authority) as client:
        wait_until(lambda: hello(client))
