"""Every call ends: on servers that are stopped, on connections that lead nowhere, and on Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS, wait_until

import lakehead as lh
from lakehead.client import channel, flight, patience
from lakehead.client.flight import FlightEndpoint
from lakehead.env import Env, SystemThreads
from lakehead.env.address import TcpAddress
from lakehead.env.clock import SystemClock
from lakehead.protocol import messages as m
from lakehead.server.admission import Bounded
from lakehead.server.answers import Answers
from lakehead.server.door import Door
from lakehead.server.flight import FlightServer

KV = pa.schema([("k", pa.int64()), ("a", pa.string())])
MUCH = pa.table({"k": range(2000), "a": ["x" * 5000] * 2000}, schema=KV)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short deadlines."""
    monkeypatch.setattr(channel, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(channel, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 1.0)


@pytest.fixture(params=["flight", "plain socket"])
def token(server: Any, request: pytest.FixtureRequest) -> str | None:
    """What a client is given: one that finds it itself calls by the plain socket of this user's own server."""
    return str(server.token) if request.param == "flight" else None


def _state(process: Path) -> str:
    """``S``: sleeps, ``T``: is stopped; see proc(5). ``X``: has ended."""
    try:
        return (process / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    # Until a thread has taken it, which waits for a core, all others go on and answer.
    tasks = Path(f"/proc/{process.pid}/task")
    wait_until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_stopped_server_holds_nobody(server: Any, soon: None, token: str | None) -> None:
    con = lh.connect(server.uri, token=token)
    log = con.create_table("log", KV)
    keyed = con.create_table("keyed", KV, primary_key="k")
    keyed.upsert([{"k": 1, "a": "x"}])
    log.append(MUCH)
    scan, feed = log.scan(), log.subscribe()
    reading = scan.to_batches()
    next(reading)
    rest = (b.num_rows for b in reading)

    def piped() -> None:
        with log.writer() as writer:
            writer.append([{"k": -3, "a": None}])

    calls: dict[str, Callable[[], object]] = {
        "append": lambda: log.append([{"k": -1, "a": None}]),
        "append much": lambda: log.append(MUCH),
        "upsert": lambda: keyed.upsert([{"k": 2, "a": "y"}]),
        "writer": piped,
        "get": lambda: keyed.get(1),
        "scan": lambda: log.scan(),
        "scan made before": lambda: scan.to_arrow(),
        "scan half read": lambda: sum(rest),
        "subscribe": lambda: log.subscribe("earliest"),
        "tables": con.tables,
        "create": lambda: con.create_table("new", KV),
        "drop": lambda: con.drop_table("keyed"),
        "status": log.status,
        "connect": lambda: lh.connect(server.uri, token=token),
    }
    with ThreadPoolExecutor(len(calls)) as pool, stopped(server.process):
        pending = {name: pool.submit(call) for name, call in calls.items()}
        errors = {name: type(f.exception(60)) for name, f in pending.items() if name != "scan half read"}
        # What was under way before may have been received already.
        assert isinstance(pending["scan half read"].exception(60), lh.UnavailableError | None)
    writes = {"append", "append much", "upsert", "writer"}
    assert {errors[n] for n in writes} == {lh.OutcomeUnknownError}
    assert {n for n, e in errors.items() if not issubclass(e, lh.UnavailableError)} == writes
    assert errors["get"] is errors["scan"] is lh.RequestTimeoutError
    assert con.tables(), "it goes on where the server goes on"
    feed.close()
    con.close()


class Slow:
    """A service that answers greetings at once and everything else when it is told to."""

    closing = False

    def __init__(self) -> None:
        self.go = threading.Event()

    def call(self, request: m.Request[m.Reply], *_: object) -> tuple[m.Reply, list[pa.Buffer]]:
        if isinstance(request, m.Hello):
            return m.HelloReply(folder_id="f", version=1, pid=1), []
        self.go.wait(WAIT_SECONDS)
        return m.NamesReply(names=["late"]), []


@pytest.mark.parametrize("exchanges_max", [100, 1])
def test_a_server_that_lives_is_waited_for_up_to_a_bound(
    soon: None, monkeypatch: pytest.MonkeyPatch, exchanges_max: int
) -> None:
    """Also one that refuses the conversation in which it is asked whether it lives."""
    service = Slow()
    exchanges = Bounded(SystemThreads(), "exchanges_max", "conversations", exchanges_max)
    door = Door("t", None, Env.system())  # type: ignore[arg-type]
    at = TcpAddress("127.0.0.1", 0)
    answers = Answers(service)  # type: ignore[arg-type]
    serving = FlightServer(answers, address=at, door=door, exchanges=exchanges, clock=SystemClock())
    endpoint = FlightEndpoint(TcpAddress("127.0.0.1", serving.port), token="t")
    probes = []
    lives = channel.Channel.lives
    monkeypatch.setattr(channel.Channel, "lives", lambda self: probes.append(lives(self)) or probes[-1])
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(endpoint.call, m.ListDatabases())
        wait_until(lambda: len(probes) >= 3)
        assert all(probes)
        service.go.set()
        assert asking.result(WAIT_SECONDS)[0] == m.NamesReply(names=["late"])
        service.go.clear()
        monkeypatch.setattr(flight, "CALL_SECONDS", 0.3)
        with pytest.raises(lh.RequestTimeoutError, match="lives"):
            endpoint.call(m.ListDatabases())
        service.go.set()
    endpoint.close()
    with pytest.raises(lh.ClosedError):
        endpoint.call(m.Hello())
    serving.stop()
    assert serving.wait_stopped(30)


def test_closing_ends_calls_under_way(server: Any, token: str | None) -> None:
    con = lh.connect(server.uri, token=token)
    log = con.create_table("log", KV)
    with ThreadPoolExecutor(2) as pool, stopped(server.process):
        pending = [pool.submit(log.scan), pool.submit(log.subscribe)]
        wait_until(lambda: len(con._server._channel._waits) >= 2)
        con.close()
        assert all(isinstance(f.exception(30), lh.ClosedError) for f in pending)


_CHILD = """
import signal, sys
import pyarrow as pa, lakehead as lh
from lakehead.client import channel
channel.SILENCE_SECONDS = 600.0
signal.signal(signal.SIGINT, signal.default_int_handler)
con = lh.connect(sys.argv[1], token=sys.argv[2] or None)
log, keyed = con.table("log"), con.table("keyed")
much = pa.table({"k": range(2000), "a": ["x" * 5000] * 2000}, schema=log.schema)
feed, writer, scan = log.subscribe(), log.writer(), log.scan()
writer.flush()

def flush():
    writer.append([{"k": 1, "a": None}])
    writer.flush()

calls = {
    "subscription": lambda: next(feed), "append": lambda: log.append([{"k": 1, "a": None}]),
    "append much": lambda: log.append(much), "get after much": lambda: keyed.get(1), "flush": flush,
    "scan": log.scan, "rows": scan.to_arrow, "reader": lambda: scan.to_reader().read_all(), "subscribe": log.subscribe,
    "tables": con.tables, "create": lambda: con.create_table("new", log.schema), "status": log.status,
}
for name, call in calls.items():
    try:
        print(name, flush=True)
        call()
        print("returned", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_every_wait(server: Any, token: str | None) -> None:
    with server.connect() as con:
        con.create_table("log", KV).append([{"k": 0, "a": "x"}])
        con.create_table("keyed", KV, primary_key="k")
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, server.uri, token or ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stderr is not None

    def sleeps() -> bool:
        return _state(Path(f"/proc/{child.pid}")) == "S"

    try:
        name = child.stdout.readline().strip()
        assert name == "subscription", child.stderr.read()
        # An idle subscription first, then everything else on a server that does not answer.
        with stopped(server.process):
            count = 0
            while name:
                # Asleep again and again: not in the middle of something, but in the wait.
                for _ in range(3):
                    wait_until(sleeps)
                child.send_signal(signal.SIGINT)
                said = child.stdout.readline().strip()
                assert said == "interrupted", f"{name}: {said} {child.stderr.read() if not said else ''}"
                count += 1
                name = child.stdout.readline().strip()
        assert count == 12 and child.wait(WAIT_SECONDS) == 0, child.stderr.read()
    finally:
        child.kill()
        child.communicate()
