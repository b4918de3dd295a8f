"""Push, over both transports: where subscriptions start, how they end, and that they do not hurt one another."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS, wait_until

import lakehead as lh
from lakehead import TabletId
from lakehead.api.embedded import serve
from lakehead.client import patience
from lakehead.config import ServerConfig
from lakehead.env import SystemThreads
from lakehead.server import streams
from lakehead.server.admission import Bounded
from lakehead.server.deliveries import Resting
from lakehead.server.progress import Progress
from lakehead.server.streams import ServerStream

KV = pa.schema([("k", pa.int64()), ("a", pa.string())])
ONE = TabletId((), 0)


def put(table: lh.Table, *numbers: int) -> None:
    rows = [{"k": n, "a": f"row {n}"} for n in numbers]
    (table.upsert if table.primary_key else table.append)(rows)


def take(feed: lh.Subscription, rows: int) -> list[dict[str, Any]]:
    """The next ``rows`` rows, or more when a batch holds more."""
    out: list[dict[str, Any]] = []
    while len(out) < rows:
        out += next(feed).rows.to_pylist()
    return out


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [r["k"] for r in rows]


def test_two_threads_do_not_wait_for_one(con: lh.Connection, name: str) -> None:
    """The second one is told so, and takes nothing from the first."""
    table = con.create_table(name, KV)
    with ThreadPoolExecutor(1) as pool, table.subscribe() as feed:
        first = pool.submit(next, feed)
        wait_until(lambda: feed._waits)
        with pytest.raises(lh.InvalidRequestError, match="another thread waits"):
            next(feed)
        put(table, 1)
        assert numbers(first.result(WAIT_SECONDS).rows.to_pylist()) == [1]
        put(table, 2)
        assert numbers(take(feed, 1)) == [2]


def test_latest_gets_what_comes(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV)
    put(table, 1, 2)
    with table.subscribe() as feed:
        put(table, 3)
        batch = next(feed)
        assert batch.rows.schema.names == ["k", "a", "__bucket", "__offset", "__timestamp"]
        [row] = batch.rows.to_pylist()
        assert (row["k"], row["a"], row["__bucket"], row["__offset"]) == (3, "row 3", 0, 2)
        assert (batch.tablet, batch.end_offset) == (ONE, 3)
        assert abs(row["__timestamp"] - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=5)
        put(table, 4)
        assert numbers(take(feed, 1)) == [4]


def test_rows_say_where_they_are_whatever_was_left_out(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, buckets=2, bucket_key="k")
    for n in range(0, 100, 10):
        put(table, *range(n, n + 10))
    feeds = {where: table.subscribe("earliest", where=where, stop="now") for where in (None, "k % 3 = 1", "k > 95")}
    places = {
        where: {r["k"]: (r["__bucket"], r["__offset"]) for b in feed for r in b.rows.to_pylist()}
        for where, feed in feeds.items()
    }
    of_all = places.pop(None)
    assert len(of_all) == 100 and {bucket for bucket, _ in of_all.values()} == {0, 1}
    assert places["k % 3 = 1"] == {k: at for k, at in of_all.items() if k % 3 == 1}
    assert places["k > 95"] == {k: at for k, at in of_all.items() if k > 95}
    scanned = table.scan(system_columns=True).to_arrow().to_pylist()
    assert {r["k"]: (r["__bucket"], r["__offset"]) for r in scanned} == of_all
    keyed = con.create_table(name + "_keyed", KV, primary_key="k")
    put(keyed, *range(10))
    put(keyed, *range(5))  # each logs what it replaces, too
    live = keyed.scan(system_columns=True).to_arrow().to_pylist()
    assert {r["k"]: r["__offset"] for r in live} == {k: 11 + 2 * k if k < 5 else k for k in range(10)}


def test_earliest_joins_what_was_and_what_comes(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, buckets=2, bucket_key="k")
    put(table, *range(100))
    with table.subscribe("earliest") as feed:
        assert sorted(numbers(take(feed, 100))) == list(range(100))
        put(table, 100)
        assert numbers(take(feed, 1)) == [100]


def test_full_gives_live_rows_then_changes(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k", buckets=3)
    put(table, *range(50))
    put(table, *range(10))
    table.delete(list(range(40, 50)))
    with table.subscribe("full") as feed:
        first = take(feed, 40)
        assert sorted(numbers(first)) == list(range(40)) and {r["__change_type"] for r in first} == {"+I"}
        assert all(r["__timestamp"] is None for r in first)
        put(table, 5)
        assert [(r["k"], r["__change_type"]) for r in take(feed, 2)] == [(5, "-U"), (5, "+U")]
        table.delete([6])
        assert [(r["k"], r["__change_type"]) for r in take(feed, 1)] == [(6, "-D")]
    ends = [b for b in table.subscribe("full", stop="now") if b.end_offset is not None]
    assert {b.tablet.bucket for b in ends} == {0, 1, 2}
    resumed = table.subscribe({b.tablet: b.end_offset for b in ends if b.end_offset is not None})
    put(table, 7)
    assert [r["__change_type"] for r in take(resumed, 2)] == ["-U", "+U"]
    resumed.close()


def test_full_of_an_empty_table_and_of_a_log_table(con: lh.Connection, name: str) -> None:
    keyed = con.create_table(name, KV, primary_key="k")
    batches = list(keyed.subscribe("full", stop="now"))
    assert sum(b.rows.num_rows for b in batches) == 0 and [b.end_offset for b in batches] == [0]
    log = con.create_table(name + "_log", KV)
    put(log, 1, 2)
    assert numbers([r for b in log.subscribe("full", stop="now") for r in b.rows.to_pylist()]) == [1, 2]


def test_from_a_time(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV)
    for n in range(5):
        put(table, n)
    rows = table.scan(system_columns=True).to_arrow().to_pylist()
    for row in rows:
        expected = [r["k"] for r in rows if r["__timestamp"] >= row["__timestamp"]]
        found = [r for b in table.subscribe(row["__timestamp"], stop="now") for r in b.rows.to_pylist()]
        assert numbers(found) == expected
    east = rows[2]["__timestamp"].astimezone(dt.timezone(dt.timedelta(hours=9)))
    assert len([r for b in table.subscribe(east, stop="now") for r in b.rows.to_pylist()]) >= 3
    future = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    assert list(table.subscribe(future, stop="now")) == []


def test_from_and_to_offsets(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV)
    put(table, *range(10))
    put(table, *range(10, 20))
    found = [r for b in table.subscribe({ONE: 7}, stop={ONE: 12}) for r in b.rows.to_pylist()]
    assert [r["__offset"] for r in found] == [7, 8, 9, 10, 11] == numbers(found)
    assert list(table.subscribe({ONE: 7}, stop={ONE: 7})) == []
    for wrong in (21, -1):
        with pytest.raises(lh.OffsetOutOfRangeError):
            table.subscribe({ONE: wrong})
    with pytest.raises(lh.InvalidRequestError):
        table.subscribe("earliest", stop={TabletId((), 5): 1})


def test_columns_and_filters(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, primary_key="k")
    put(table, *range(10))
    put(table, 3)
    found = [r for b in table.subscribe("earliest", ["a"], "k = 3", stop="now") for r in b.rows.to_pylist()]
    assert [(r["a"], r["__change_type"]) for r in found] == [("row 3", "+I"), ("row 3", "-U"), ("row 3", "+U")]
    assert set(found[0]) == {"a", "__change_type", "__bucket", "__offset", "__timestamp"}
    assert list(table.subscribe("earliest", where="k = 77", stop="now")) == []


@pytest.mark.parametrize("by", ["embedded", "own", "server"])
def test_history_of_which_no_row_is_wanted_is_read_without_waiting(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns, after each of which it waited for progress, though there was more to read: 4 seconds each."""
    waits: list[object] = []
    monkeypatch.setattr(streams, "_TURN_ROWS", 8)
    monkeypatch.setattr(streams, "ROWS_MAX", 4)
    for waiting in ((Progress, "wait"), (Resting, "rest")):
        original = getattr(*waiting)
        monkeypatch.setattr(*waiting, lambda *args, of=original: (waits.append(of), of(*args))[1])
    host = serve(tmp_path, ServerConfig(token="a token of the tests"))
    at = {"embedded": (tmp_path, None), "own": (host.uri, None), "server": (host.uri, "a token of the tests")}[by]
    with contextlib.closing(host), lh.connect(at[0], token=at[1]) as con:
        table = con.create_table("t", KV, buckets=2, bucket_key="k")
        put(table, *range(100))
        for where, wanted in (("k < 0", []), ("k = 99", [99])):
            found = [r for b in table.subscribe("earliest", where=where, stop="now") for r in b.rows.to_pylist()]
            assert numbers(found) == wanted
    assert not waits


def test_partitions_made_later_are_read_from_their_start(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, partition_by="a")
    with table.subscribe() as feed:
        put(table, 1)
        put(table, 2)
        assert sorted(numbers(take(feed, 2))) == [1, 2]


def test_many_subscribers_of_which_some_never_read(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, KV, durability="os")
    idle = [table.subscribe("earliest") for _ in range(4)]
    feeds = [table.subscribe("earliest") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(take, feed, 5000) for feed in feeds]
        for start in range(0, 5000, 500):
            put(table, *range(start, start + 500))
        assert all(numbers(f.result(WAIT_SECONDS)) == list(range(5000)) for f in reading)
    assert numbers(take(idle[0], 5000)) == list(range(5000)), "a slow one loses nothing"
    for feed in [*feeds, *idle]:
        feed.close()


def test_a_slow_reader_of_much_does_not_hold_up_writers(con: lh.Connection, name: str) -> None:
    table = con.create_table(name, pa.schema([("k", pa.int64()), ("a", pa.large_string())]), durability="os")
    slow = table.subscribe("earliest")
    data = pa.table({"k": range(200), "a": ["x" * 20_000] * 200}, schema=table.schema)
    for _ in range(10):
        table.append(data)
    assert table.scan().count() == 2000
    assert len(take(slow, 2000)) == 2000
    slow.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_close_from_another_thread_ends_the_iteration(con: lh.Connection, name: str, keyed: bool) -> None:
    table = con.create_table(name, KV, primary_key="k" if keyed else None)
    put(table, 1)
    feed = table.subscribe("earliest")
    got_one = threading.Event()

    def read() -> int:
        count = 0
        for batch in feed:
            count += batch.rows.num_rows
            got_one.set()
        return count

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert got_one.wait(WAIT_SECONDS)
        feed.close()
        assert reading.result(WAIT_SECONDS) == 1
    feed.close()


def test_more_subscriptions_than_allowed_are_refused(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t", KV)
        server: Any = con._server
        reads = server.service._reads
        reads._subscriptions = Bounded(SystemThreads(), "subscriptions_max", "subscriptions", 3)
        with lh.connect(con.uri) as remote:
            here, there = table.subscribe(), remote.table("t").subscribe()
            third = table.subscribe()
            with pytest.raises(lh.OverloadedError, match="or hold fewer"):
                remote.table("t").subscribe()
            here.close()
            here.close()
            there.close()
            del third
            wait_until(lambda: not reads._subscriptions._held)
            more = [table.subscribe() for _ in range(3)]
            assert len(reads._subscriptions._held) == 3
            for feed in more:
                feed.close()


def blocked(feed: lh.Subscription) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits for a row, and the error it ends with."""
    errors: list[BaseException] = []
    waiting = threading.Event()

    def read() -> None:
        waiting.set()
        try:
            next(feed)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    waiting.wait()
    return thread, errors


@pytest.mark.parametrize("remote", [False, True])
def test_closing_the_connection_ends_its_subscriptions_and_nobody_elses(tmp_path: Path, remote: bool) -> None:
    with lh.connect(tmp_path / "data") as owner:
        owner.create_table("t", KV)
        con = lh.connect(owner.uri) if remote else lh.connect(tmp_path / "data")
        table = con.table("t")
        thread, errors = blocked(table.subscribe())
        other = owner.table("t").subscribe()
        con.close()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive() and [type(e) for e in errors] == [lh.ClosedError]
        for call in (lambda: put(table, 1), lambda: table.scan(), lambda: table.subscribe(), lambda: con.tables()):
            with pytest.raises(lh.ClosedError):
                call()
        put(owner.table("t"), 1)
        assert numbers(take(other, 1)) == [1]
        other.close()


def test_the_last_close_ends_the_server_and_others_wait_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.1)
    owner = lh.connect(tmp_path / "data")
    owner.create_table("t", KV)
    attached = lh.connect(owner.uri)
    here, here_errors = blocked(owner.table("t").subscribe())
    there, there_errors = blocked(attached.table("t").subscribe())
    owner.close()
    here.join(WAIT_SECONDS)
    assert [type(e) for e in here_errors] == [lh.ClosedError]
    with pytest.raises(lh.UnavailableError):
        attached.tables()
    assert there.is_alive() and not there_errors
    attached.close()
    there.join(WAIT_SECONDS)
    assert [type(e) for e in there_errors] == [lh.ClosedError]


def test_a_stream_that_ended_holds_nothing(tmp_path: Path) -> None:
    """Segments that were trimmed since, that is: a server has Python's collector pass over what was in use for a while,
    for an hour, so what ended must go without it."""

    def read(table: lh.Table) -> None:
        assert table.scan().count() == table.scan(where="k > 0").to_arrow().num_rows == 3
        assert sum(b.rows.num_rows for b in table.subscribe("earliest", stop="now")) >= 3
        with table.subscribe("earliest", where="k > 1") as followed:
            assert numbers(take(followed, 2))

    def streams() -> int:
        return sum(type(o) is ServerStream for o in gc.get_objects())

    with lh.connect(tmp_path) as own, lh.connect(own.uri) as other:
        for key in ("k", None):
            put(own.create_table(f"a.{key}", KV, primary_key=key), 1, 2, 3)
            for con in (own, other):
                gc.collect()
                before = streams()
                gc.disable()
                try:
                    read(con.table(f"a.{key}"))
                    wait_until(lambda at_most=before: streams() <= at_most)  # type: ignore[misc]
                finally:
                    gc.enable()
