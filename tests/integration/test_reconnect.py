"""Servers that go away at any moment: reads and subscriptions go on where they were, without gap or repeat."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.subscription import subscribe
from lakehead.client import patience
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.env import Env
from lakehead.errors import UnavailableError
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol import messages as m
from lakehead.types import TabletId

KV = pa.schema([("k", pa.int64()), ("a", pa.string())])


class Breaking:
    """An endpoint whose streams break after so many batches, one number a stream, then not any more."""

    def __init__(self, inner: m.Endpoint, breaks: Sequence[int], meanwhile: Callable[[], object]) -> None:
        self._inner = inner
        self._breaks = list(breaks)
        self._meanwhile = meanwhile

    def call(self, request: m.Request[Any], attachments: Sequence[pa.Buffer] = ()) -> tuple[Any, list[pa.Buffer]]:
        return self._inner.call(request, attachments)

    def stream(self, request: m.Request[m.Stream]) -> m.Stream:
        return _BreakingStream(self._inner.stream(request), self._after)

    def _after(self, batches: int) -> None:
        if self._breaks and batches >= self._breaks[0]:
            del self._breaks[0]
            self._meanwhile()
            raise UnavailableError("broken by the test", gone=True)

    def close(self) -> None:
        return


class _BreakingStream:
    def __init__(self, inner: m.Stream, after: Callable[[int], None]) -> None:
        self._inner = inner
        self._after = after
        self.schema = inner.schema

    def __iter__(self) -> Iterator[tuple[m.StreamHeader, pa.RecordBatch]]:
        self._after(0)
        for i, item in enumerate(self._inner, 1):
            yield item
            self._after(i)

    def close(self) -> None:
        self._inner.close()


def over(con: lh.Connection, name: str, breaks: Sequence[int], meanwhile: Callable[[], object]) -> TableHandle:
    endpoint = Breaking(con._server, breaks, meanwhile)
    return TableHandle(con.table(name)._desc, OneServer(endpoint), Env.system())


BREAKS = [[0], [1], [2], [1, 1, 0, 2], [5, 0, 0, 1]]


@pytest.mark.parametrize("breaks", BREAKS, ids=str)
@pytest.mark.parametrize("start", ["latest", "earliest", "time", "offsets"])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_subscription_goes_on_at_its_position(tmp_path: Path, breaks: list[int], start: str, keyed: bool) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table(
            "t", KV, buckets=2, primary_key="k" if keyed else None, bucket_key="k", durability="os"
        )
        put = table.upsert if keyed else table.append
        done = iter(range(1000))

        def write() -> None:
            for _ in range(3):
                put([{"k": (n := next(done)), "a": None}, {"k": n % 7, "a": "again"}])

        write()
        ends = {TabletId((), b): e for b, e in zip([0, 1], table.status()["high_watermark"].to_pylist(), strict=True)}
        origin: Any = {"time": dt.datetime.now(dt.UTC), "offsets": {TabletId((), 0): 1}}.get(start, start)
        feed = subscribe(over(con, "t", breaks, write), start=origin, columns=None, where=None, stop=None)
        write()
        got: dict[TabletId, list[int]] = {TabletId((), 0): [], TabletId((), 1): []}
        begin = {t: e if start in ("latest", "time") else 0 for t, e in ends.items()}
        begin[TabletId((), 0)] = 1 if start == "offsets" else begin[TabletId((), 0)]
        while True:
            now = {
                TabletId((), b): e for b, e in zip([0, 1], table.status()["high_watermark"].to_pylist(), strict=True)
            }
            left = sum(now[t] - begin[t] - len(got[t]) for t in got)
            if not left and not feed._stream._handle._routes.servers()[0]._breaks:  # type: ignore[attr-defined]
                break
            if not left:
                write()
            batch = next(feed)
            got[batch.tablet] += batch.rows["__offset"].to_pylist()
        assert got == {t: list(range(begin[t], now[t])) for t in got}
        feed.close()


@pytest.mark.parametrize("breaks", [[0], [1], [2], [3], [1, 1, 1, 1], [2, 0, 1, 0, 3]], ids=str)
@pytest.mark.parametrize("where", [None, "k % 3 <> 1"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_current_rows_are_sent_once_and_the_changes_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: list[int], where: str | None, trimmed: bool
) -> None:
    from lakehead.kv import tablet
    from lakehead.server import streams

    monkeypatch.setattr(tablet, "_GATHER_ROWS", 16)
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.02)
    with lh.connect(tmp_path) as con:
        lake: Any = {"lake": "iceberg", "hot_retention": "0s"} if trimmed else {}
        table = con.create_table("t", KV, buckets=2, primary_key="k", durability="os", **lake)
        table.upsert([{"k": n, "a": "x"} for n in range(100)])
        table.delete(list(range(50, 70)))
        if trimmed:
            con.tier("t")
            con._server.service.maintain()  # type: ignore[attr-defined]
            assert min(table.status()["start_offset"].to_pylist()) > 0
        versions = iter(range(100))

        def write() -> None:
            v = next(versions)
            table.upsert([{"k": n, "a": f"v{v}"} for n in range(0, 100, 9)])
            table.delete([v])

        client = over(con, "t", breaks, write)
        feed = subscribe(client, start="earliest" if trimmed else "full", columns=None, where=where, stop=None)
        state: dict[int, str | None] = {}
        ends: dict[TabletId, int] = {}
        write()
        want = {r["k"]: r["a"] for r in table.scan(where=where).to_arrow().to_pylist()}
        while len(ends) < 2 or client._routes.servers()[0]._breaks or state != want:  # type: ignore[attr-defined]
            batch = next(feed)
            for row in batch.rows.to_pylist():
                k, kind = row["k"], row["__change_type"]
                if batch.tablet not in ends or kind == "+I":
                    assert kind == "+I" and k not in state, f"{row} comes twice"
                if kind in ("-U", "-D"):
                    assert state.pop(k) == row["a"], f"{row} was never sent"
                else:
                    state[k] = row["a"]
            if batch.end_offset is not None:
                assert batch.end_offset >= ends.get(batch.tablet, 0)
                ends[batch.tablet] = batch.end_offset
            want = {r["k"]: r["a"] for r in table.scan(where=where).to_arrow().to_pylist()}
        feed.close()


@pytest.mark.parametrize("breaks", BREAKS, ids=str)
@pytest.mark.parametrize("keyed", [False, True])
def test_a_scan_under_way_goes_on(tmp_path: Path, breaks: list[int], keyed: bool) -> None:
    from lakehead.lake.union_read import UnionRead, pin

    with lh.connect(tmp_path) as con:
        table = con.create_table(
            "t", KV, buckets=2, primary_key="k" if keyed else None, bucket_key="k", durability="os"
        )
        put = table.upsert if keyed else table.append
        for start in range(0, 60_000, 10_000):
            put(pa.table({"k": range(start, start + 10_000), "a": ["x"] * 10_000}, schema=KV))
        client = over(con, "t", breaks, lambda: put([{"k": -1, "a": "later"}]))
        for columns in (["k"], ["k", "a"]):
            read = UnionRead(client, pin(client), ReadSpec(tuple(columns)))
            assert sorted(k for b in read.batches() for k in b.column(0).to_pylist() if k >= 0) == list(range(60_000))


def test_a_scan_that_nothing_holds_any_more_asks_to_be_made_again(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", KV, lake="iceberg", hot_retention="0s")
        table.append([{"k": 1, "a": "x"}])
        scan = table.scan()
        server: Any = con._server
        service = server.service
        service._leases.end_all()
        con.tier("t")
        service.maintain()
        with pytest.raises(lh.UnavailableError, match="read again") as raised:
            scan.to_arrow()
        assert raised.value.retryable and table.scan().count() == 1


def test_reads_wait_for_a_server_that_is_started_again(server: Any) -> None:
    con = server.connect()
    keyed = con.create_table("keyed", KV, primary_key="k")
    keyed.upsert([{"k": 1, "a": "x"}])
    log = con.create_table("log", KV, buckets=2, bucket_key="k")
    for n in range(10):
        log.append([{"k": 100 * n + i, "a": "y" * 1000} for i in range(100)])
    scan = log.scan()
    batches = scan.to_batches()
    seen = [next(batches)]
    feeds = [log.subscribe("earliest"), keyed.subscribe("full")]
    first = [next(f) for f in feeds]
    calls: list[Callable[[], object]] = [
        lambda: keyed.get(1),
        lambda: log.scan().count(),
        con.tables,
        log.status,
        lambda: con.table("log").name,
        lambda: sum(b.rows.num_rows for b in log.subscribe("earliest", stop="now")),
        lambda: con.create_table("log", KV, buckets=2, bucket_key="k", if_not_exists=True).name,
    ]
    server.kill()
    with ThreadPoolExecutor(len(calls)) as pool:
        pending = [pool.submit(call) for call in calls]
        server.start()
        answers = [f.result(WAIT_SECONDS) for f in pending]
    assert answers[:3] == [{"k": 1, "a": "x"}, 1000, ["default.keyed", "default.log"]] and answers[5] == 1000
    seen += batches
    assert sorted(k for b in seen for k in b["k"].to_pylist()) == list(range(1000))
    assert scan.count() == 1000, "what it was pinned to is still there"
    keyed.upsert([{"k": 2, "a": "z"}])
    assert next(feeds[1]).rows["k"].to_pylist() == [2]
    got = first[0].rows["k"].to_pylist()
    while len(got) < 1000:
        got += next(feeds[0]).rows["k"].to_pylist()
    assert sorted(got) == list(range(1000))
    for feed in feeds:
        feed.close()
    con.close()


def test_a_server_that_stays_away_is_an_error_for_reads_and_none_for_subscriptions(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    con = server.connect()
    table = con.create_table("t", KV)
    table.append([{"k": 1, "a": "x"}])
    feed = table.subscribe()
    with monkeypatch.context() as impatient:
        impatient.setattr(patience, "PATIENCE_SECONDS", 0.1)
        bounded = table.subscribe("earliest", stop={TabletId((), 0): 5})
        assert next(bounded).rows.num_rows == 1
        server.stop()
        for call in (con.tables, table.scan, table.status, table.subscribe, lambda: next(bounded)):
            with pytest.raises(lh.UnavailableError) as raised:
                call()
            assert "gRPC" not in str(raised.value) and "Flight" not in str(raised.value), "what users know nothing of"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, feed)
        server.start()
        table.append([{"k": 2, "a": "y"}])
        assert waiting.result(WAIT_SECONDS).rows["k"].to_pylist() == [2]
        server.stop()
        waiting = pool.submit(next, feed)
        con.close()
        assert isinstance(waiting.exception(WAIT_SECONDS), lh.ClosedError)


def test_a_silent_connection_is_left_for_a_new_one(
    server: Any, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    from lakehead.client import channel

    monkeypatch.setattr(channel, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(channel, "PROBE_SECONDS", 0.5)
    with Door(server.port) as door:
        con = lh.connect(f"lakehead://127.0.0.1:{door.port}", token=server.token)
        table = con.create_table("t", KV)
        feed = table.subscribe()
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(next, feed)
            door.shut.set()
            assert table.append([{"k": 1, "a": "x"}]).rows == 1, "sent again on a new connection"
            assert waiting.result(WAIT_SECONDS).rows["k"].to_pylist() == [1]
        assert table.scan().count() == 1
        feed.close()
        con.close()


class Door:
    """Passes connections on to a port; those made before ``shut`` is set stay open after it, and lead nowhere."""

    def __init__(self, port: int) -> None:
        import socket

        self._to = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.shut = threading.Event()
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        import socket

        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._kept += [near, far]
            before = not self.shut.is_set()
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(*pair, before), daemon=True).start()

    def _pump(self, source: Any, sink: Any, before: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if not (before and self.shut.is_set()):
                    sink.sendall(data)
        except OSError:
            return

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        import socket

        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for kept in self._kept:
            kept.close()
