"""Whether a client has gone is asked of gRPC now and then, not for each batch: it is slow, and holds all others up."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.config import ServerConfig
from lakehead.env.clock import SystemClock
from lakehead.server import flight
from lakehead.server.answers import ASK_SECONDS, ClientGone


class Clock(SystemClock):
    """A clock that stands until it is moved."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_it_is_asked_now_and_then_and_not_again_once_it_has_gone() -> None:
    asked, gone, clock = [], False, Clock()

    def asks() -> bool:
        asked.append(clock.now)
        return gone

    client = ClientGone(asks, clock)
    assert [client() for _ in range(5)] == [False] * 5
    assert len(asked) == 1  # one that went before its call began is noticed at once
    gone = True
    assert not client()
    clock.now += ASK_SECONDS
    assert [client() for _ in range(5)] == [True] * 5
    clock.now += ASK_SECONDS
    assert client()
    assert len(asked) == 2


def test_many_small_batches_ask_no_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Counting(ClientGone):
        def __init__(self, asks: object, clock: object) -> None:
            super().__init__(lambda: asked.append(self) is not None, Clock())

    monkeypatch.setattr(flight, "ClientGone", Counting)
    with lh.connect(tmp_path / "data") as con, lh.connect(con.uri) as other:
        table = con.create_table("t", pa.schema([("n", pa.int64())]))
        with other.table("t").subscribe() as feed:
            for n in range(50):
                table.append([{"n": n}])
                assert next(feed).rows["n"].to_pylist() == [n]
        streams = {id(client) for client in asked}
        assert len(asked) == len(streams)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_it_listens_on_each_spelling_of_this_machine(tmp_path: Path, host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with (
        contextlib.closing(serve(tmp_path / "data", ServerConfig(host=host, token="t"))) as served,
        lh.connect(served.uri, token="t") as con,
    ):
        assert con.tables() == []


def test_a_port_that_is_taken_is_told_and_by_us_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(serve(tmp_path / "data", ServerConfig(token="t"))) as host:
        for port, why in ((host.port, "the port is in use"), (1 << 15, "cannot listen on 203.0.113.7")):
            on = "127.0.0.1" if port == host.port else "203.0.113.7"  # of no machine
            with pytest.raises(lh.InvalidRequestError, match=why):
                serve(tmp_path / f"on {on}", ServerConfig(host=on, port=port, token="t"))
    assert capfd.readouterr().err == ""
