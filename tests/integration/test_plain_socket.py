"""Calls to this user's own servers go by a plain socket, as long as there is one; all else by Flight."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.conftest import ServerProcess
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api import folder
from lakehead.client import channel
from lakehead.client.plain_socket import SocketExchange, SocketReader
from lakehead.server.deliveries import Resting

KV = pa.schema([("k", pa.int64()), ("a", pa.string())])


@pytest.fixture
def by_flight(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each conversation that begins by Flight from now on."""
    begun: list[object] = []
    start = channel.Exchange.__init__

    def begin(self: Any, *how: Any) -> None:
        begun.append(self)
        start(self, *how)

    monkeypatch.setattr(channel.Exchange, "__init__", begin)
    return begun


def use(con: lh.Connection, name: str) -> None:
    """Call in each way."""
    keyed = con.create_table(name, KV, primary_key="k")
    much = pa.table({"k": range(5000), "a": ["x" * 500] * 5000}, schema=KV)
    assert keyed.upsert(much).rows == 5000
    assert keyed.get(7) == {"k": 7, "a": "x" * 500} and keyed.get(-1) is None
    assert keyed.lookup(much.select(["k"])).num_rows == 5000
    with keyed.subscribe("full", stop="now") as feed:
        assert sum(batch.rows.num_rows for batch in feed) == 5000
    with pytest.raises(lh.TableExistsError):
        con.create_table(name, KV)


def path_of(con: lh.Connection) -> Path:
    endpoint: Any = con._server
    calls = endpoint._plain()
    assert calls is not None
    return Path(calls.path)


@pytest.mark.parametrize("unix", [True, False])
def test_own_servers_are_called_by_it(tmp_path: Path, by_flight: list[object], unix: bool) -> None:
    process = ServerProcess(tmp_path / "data", unix=unix)
    try:
        with lh.connect(process.uri) as con:
            use(con, "t")
            assert not by_flight
            path = path_of(con)
            assert path.is_socket() and path.parent.stat().st_mode & 0o077 == 0
            with lh.connect(process.uri, token=process.token) as other:
                use(other, "u")
                assert bool(by_flight) is not unix, "who is given a token for a host goes where it was told to"
    finally:
        process.stop()
    assert not path.exists()


def test_where_there_is_none_calls_go_by_flight(tmp_path: Path, by_flight: list[object]) -> None:
    with lh.connect(tmp_path / "data") as owner, lh.connect(owner.uri) as con:
        use(con, "t")
        assert not by_flight
        path_of(con).unlink()
        con._server._drop_idle()  # type: ignore[attr-defined]
        use(con, "u")
        assert by_flight


def test_a_server_that_is_started_anew_is_called_by_it_again(tmp_path: Path, by_flight: list[object]) -> None:
    process = ServerProcess(tmp_path / "data", unix=True)
    con = lh.connect(process.uri)
    use(con, "t")
    process.kill()
    process = ServerProcess(tmp_path / "data", unix=True)
    try:
        assert con.table("t").get(7) is not None
        del by_flight[:]
        use(con, "u")
        assert not by_flight
    finally:
        con.close()
        process.kill()


def test_what_ended_in_the_meantime_is_not_used(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as owner, lh.connect(owner.uri) as con:
        table = con.create_table("t", KV, primary_key="k")
        endpoint: Any = con._server
        (idle,) = endpoint._idle
        assert isinstance(idle, SocketExchange) and not idle.broken
        (serving,) = (s for s in _host(owner)._servers if hasattr(s, "_threads"))
        for connection in list(serving._threads.values()):
            connection.shutdown(2)
        idle._socket.settimeout(30)
        assert idle._socket.recv(1, 2) == b"" and idle.broken
        assert table.get(1) is None
        assert idle.cancelled and idle._socket.fileno() == -1 and idle.broken


def test_the_garbage_collector_may_end_a_stream_at_any_point(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as owner, lh.connect(owner.uri) as con:
        feed = con.create_table("t", KV).subscribe()
        endpoint: Any = con._server
        (reader,) = (
            w._reader for w in endpoint._channel._waits if isinstance(getattr(w, "_reader", None), SocketReader)
        )

        with reader._lock:  # inside of which Python may run a destructor, in this thread
            assert reader._lock.acquire(blocking=False)
            reader._lock.release()
            reader.cancel()
        assert reader.cancelled
        feed.close()


def taken(feed: lh.Subscription, rows: int) -> list[int]:
    """The keys of so many rows that come."""
    keys: list[int] = []
    while len(keys) < rows:
        keys += next(feed).rows["k"].to_pylist()
    return keys


def test_writers_send_what_is_new_to_those_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for who has promised nothing to take: who does not read is left to the server's own thread for it."""
    senders: list[str] = []
    send = Resting._send_new

    def noted(self: Resting) -> bool:
        senders.append(threading.current_thread().name)
        return send(self)

    monkeypatch.setattr(Resting, "_send_new", noted)
    rows = pa.table({"k": range(4000), "a": ["x" * 500] * 4000}, schema=KV)
    with lh.connect(tmp_path / "data") as con, lh.connect(con.uri) as reader, lh.connect(con.uri) as stalled:
        table = lh.connect(con.uri).table(str(con.create_table("t", KV).name))
        feed, other = reader.table("t").subscribe(), stalled.table("t").subscribe()
        for n in range(5):
            table.append([{"k": n, "a": "y"}])
            assert next(feed).rows["k"].to_pylist() == [n]
        assert "lakehead-calls" in senders
        for _ in range(20):  # more than the system and the client hold for who does not take it
            table.append(rows)
        assert taken(feed, 80_000) == [*range(4000)] * 20
        assert taken(other, 80_005) == [*range(5), *[*range(4000)] * 20]
        table.append([{"k": 7, "a": "z"}])
        assert next(feed).rows["k"].to_pylist() == next(other).rows["k"].to_pylist() == [7]


def test_a_table_that_is_dropped_ends_subscriptions_that_rest(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con, lh.connect(con.uri) as reader:
        table = con.create_table("t", KV)
        feed = reader.table("t").subscribe()
        table.append([{"k": 1, "a": ""}])
        assert next(feed).rows.num_rows == 1
        con.drop_table("t")
        with pytest.raises(lh.ClosedError):
            next(feed)


def test_who_closes_while_a_call_waits_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = threading.Event(), threading.Event()
    with lh.connect(tmp_path / "data") as owner:
        table = owner.create_table("t", KV, primary_key="k")
        con = lh.connect(owner.uri)
        other = con.table("t")
        service = _host(owner).service
        handled = service._handled

        def slow(*how: Any) -> Any:
            asked.set()
            assert go.wait(WAIT_SECONDS)
            return handled(*how)

        monkeypatch.setattr(service, "_handled", slow)
        errors: list[BaseException] = []

        def get() -> None:
            try:
                other.get(1)
            except lh.LakeheadError as e:
                errors.append(e)

        getting = threading.Thread(target=get)
        getting.start()
        assert asked.wait(WAIT_SECONDS)
        con.close()
        getting.join(WAIT_SECONDS)
        assert [type(e) for e in errors] == [lh.ClosedError]
        go.set()
        assert table.get(1) is None


_SERVE_AND_FORK = """
import os, sys
import lakehead as lh
con = lh.connect(sys.argv[1])
with lh.connect(con.uri) as other:
    other.tables()
    child = os.fork()
    if child:
        print(con.uri, child, flush=True)
    sys.stdin.read()
os._exit(0)
"""


def test_a_forked_child_does_not_listen(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SERVE_AND_FORK, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        uri, child = process.stdout.readline().split()
        try:
            with lh.connect(uri) as con:
                assert con.tables() == []
                path = path_of(con)
            process.kill()
            assert process.wait(WAIT_SECONDS) and Path(f"/proc/{child}").exists()
            with socket.socket(socket.AF_UNIX) as asking, pytest.raises(ConnectionRefusedError):
                asking.connect(str(path))
        finally:
            os.kill(int(child), signal.SIGKILL)


def _host(con: lh.Connection) -> Any:
    assert con._folder is not None
    return folder._hosts[con._folder][0]
