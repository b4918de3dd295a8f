"""Servers on Unix sockets: found, left, killed and started again; and where there can be none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import ServerProcess

import lakehead as lh
from lakehead.env.address import SocketAddress, parse_uri

ROWS = [{"k": 1}, {"k": 2}]

_OWNER = """
import sys
import lakehead as lh
for line in sys.stdin:
    if line.strip() == "open":
        con = lh.connect(sys.argv[1])
        print(con.uri, flush=True)
    else:
        con.close()
        print("closed", flush=True)
"""


def socket_of(uri: str) -> Path:
    address = parse_uri(uri)
    assert isinstance(address, SocketAddress)
    return Path(address.path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path / "data", unix=True)
    yield made
    made.kill()


def test_a_folder_has_one_address_and_two_have_two(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "a") as con, lh.connect(tmp_path / "b") as other:
        con.create_table("a.t", [("k", "int64")]).append(ROWS)
        uri = con.uri
        assert other.uri != uri and uri.startswith("lakehead:///")
        with lh.connect(uri) as again:
            assert again.uri == uri and again.table("a.t").scan().count() == 2
            subscription = again.table("a.t").subscribe("earliest")
            assert next(subscription).rows.num_rows == 2
            large = [{"k": k} for k in range(300_000)]
            again.table("a.t").append(large)
            assert sum(b.rows.num_rows for b in again.table("a.t").subscribe("earliest", stop="now")) == 300_002
    with lh.connect(tmp_path / "a") as con:
        assert con.uri == uri


def test_who_is_connected_goes_on_when_a_killed_server_is_back(server: ServerProcess) -> None:
    with lh.connect(server.uri) as con, lh.connect(server.uri, token=server.token) as other:
        table = con.create_table("a.t", [("k", "int64")])
        feed = table.subscribe("earliest")
        table.append(ROWS)
        assert next(feed).rows.num_rows == 2
        uri = server.uri
        server.kill()
        server.start()
        assert server.uri == uri
        table.append(ROWS)
        assert next(feed).rows.num_rows == 2 and other.table("a.t").scan().count() == 4


def test_who_is_attached_goes_on_when_the_owner_closes_and_opens_again(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    command = [sys.executable, "-c", _OWNER, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:

            def tell(word: str) -> str:
                assert owner.stdin is not None and owner.stdout is not None
                print(word, file=owner.stdin, flush=True)
                return owner.stdout.readline().strip()

            uri = tell("open")
            with lh.connect(uri) as con:
                con.create_table("a.t", [("k", "int64")]).append(ROWS)
                assert tell("close") == "closed" and not socket_of(uri).exists()
                assert tell("open") == uri, "the same process has it, at the same address, with another token"
                assert con.table("a.t").scan().count() == 2
            with lh.connect(tmp_path / "data") as attached:
                assert attached.uri == uri and not attached._server.serves
                for _ in range(2):
                    tell("close")
                    tell("open")
                    wait_until(lambda: attached.table("a.t").scan().count() == 2)
        finally:
            owner.kill()


def test_a_connection_does_not_need_the_socket_to_keep_its_name(server: ServerProcess) -> None:
    with lh.connect(server.uri) as con:
        con.create_table("a.t", [("k", "int64")]).append(ROWS)
        socket_of(server.uri).unlink()
        assert con.table("a.t").scan().count() == 2
        with pytest.raises(lh.UnavailableError, match="--listen HOST:PORT"):
            lh.connect(server.uri)


def test_proxies_are_not_asked(server: ServerProcess) -> None:
    code = f"import lakehead as lh; print(lh.connect({server.uri!r}).tables())"
    environ = {**os.environ, "http_proxy": "http://127.0.0.1:1", "grpc_proxy": "http://127.0.0.1:1"}
    assert subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True).stdout == b"[]\n"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one, which `place` makes."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setattr("tempfile.tempdir", made)
        yield Path(made)


def place(made: Path, monkeypatch: pytest.MonkeyPatch, variable: str = "HOME") -> Path:
    made.mkdir(parents=True)
    monkeypatch.setenv(variable, str(made))
    return made


def test_a_home_of_any_name(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = place(home / "Jörg's [home] 100;", monkeypatch)
    with lh.connect(tmp_path / "data") as con:
        assert socket_of(con.uri).parent == at / ".lakehead" / "sockets"
        with lh.connect(con.uri) as again:
            assert again.tables() == []


def test_where_the_home_is_no_place_there_are_others(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(home / "100% mine?", monkeypatch)
    with lh.connect(tmp_path / "data") as con, lh.connect(con.uri) as again:
        assert again.tables() == []
        assert socket_of(con.uri).is_relative_to(home / f"lakehead-{os.getuid()}")
    at = place(home / "run", monkeypatch, "XDG_RUNTIME_DIR")
    with lh.connect(tmp_path / "data") as con:
        assert socket_of(con.uri).is_relative_to(at)


def test_without_any_place_tcp_is_listened_on_as_before(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place(home / ("x" * 100), monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", os.environ["HOME"])
    with caplog.at_level(logging.WARNING, "lakehead.server"), lh.connect(tmp_path / "data") as con:
        assert con.uri.startswith("lakehead://127.0.0.1:")
        assert (
            "too long" in caplog.text and f"listening on {con.uri.removeprefix('lakehead://')} instead" in caplog.text
        )
        with lh.connect(con.uri) as again:
            assert again.tables() == []
        with pytest.raises(lh.AuthenticationError):
            lh.connect(con.uri, token="guess")
