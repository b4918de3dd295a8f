"""Servers that stop, are killed and come back; other processes that attach; forked children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.client import patience
from lakehead.client.batch_writer import BatchWriter, PreparedWrite

KV = pa.schema([("k", pa.int64()), ("a", pa.string()), ("b", pa.int64())])


def rows_of(table: lh.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in table.scan(system_columns=True).to_arrow().to_pylist())


@pytest.mark.parametrize("durability", ["sync", "os"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_reopening_finds_everything_as_it_was(tmp_path: Path, durability: str, compression: str) -> None:
    how: dict[str, Any] = {"durability": durability, "compression": compression, "buckets": 2}
    with lh.connect(tmp_path) as con:
        log = con.create_table("log", KV, partition_by="a", **how)
        keyed = con.create_table("keyed", KV, primary_key="k", **how)
        for i in range(20):
            log.append([{"k": i, "a": f"p{i % 3}", "b": None}])
            keyed.upsert([{"k": i % 7, "a": f"v{i}", "b": i}, {"k": 100 + i, "a": None, "b": None}])
            keyed.upsert([{"k": i % 5, "b": -i}])
            keyed.delete([100 + i - 3])
        before = rows_of(log), rows_of(keyed), keyed.lookup(list(range(200))), log.status()
        feed = [b.rows.to_pylist() for b in keyed.subscribe("earliest", stop="now")]
    with lh.connect(tmp_path) as con:
        log, keyed = con.table("log"), con.table("keyed")
        assert (rows_of(log), rows_of(keyed), keyed.lookup(list(range(200))), log.status()) == before
        again = [b.rows.to_pylist() for b in keyed.subscribe("earliest", stop="now")]
        assert [r for b in again for r in b] == [r for b in feed for r in b]
        keyed.upsert([{"k": 3, "a": "after", "b": 0}])
        assert keyed.get(3) == {"k": 3, "a": "after", "b": 0}


@pytest.mark.parametrize("durability", ["sync", "os"])
def test_writes_through_kills_land_exactly_once(server: Any, durability: str) -> None:
    con = server.connect()
    log = con.create_table("log", KV, durability=durability, buckets=2)
    keyed = con.create_table("keyed", KV, primary_key="k", durability=durability, buckets=2)
    enough, over = threading.Semaphore(0), threading.Event()

    def append(i: int) -> list[int]:
        acked = []
        while not over.is_set():
            number = i * 1_000_000 + len(acked)
            log.append([{"k": number, "a": None, "b": None}])
            acked.append(number)
            enough.release()
        return acked

    def upsert(i: int) -> list[int]:
        acked = []
        while not over.is_set():
            n = len(acked)
            keyed.upsert([{"k": i * 1000 + n % 10, "a": "x", "b": n}, {"k": -i, "a": None, "b": n}])
            acked.append(n)
            enough.release()
        return acked

    with ThreadPoolExecutor(4) as pool:
        appending = [pool.submit(append, i) for i in (1, 2)]
        upserting = [pool.submit(upsert, i) for i in (1, 2)]
        for _ in range(3):
            for _ in range(40):
                assert enough.acquire(timeout=WAIT_SECONDS)
            server.kill()
            server.start()
        for _ in range(40):
            assert enough.acquire(timeout=WAIT_SECONDS)
        over.set()
        acked = Counter(n for f in appending for n in f.result(WAIT_SECONDS))
        last = {i: f.result(WAIT_SECONDS)[-1] for i, f in zip((1, 2), upserting, strict=True)}
    assert Counter(log.scan().to_arrow()["k"].to_pylist()) == acked
    assert {i: keyed.get(-i)["b"] for i in (1, 2)} == last
    records = [r for b in keyed.subscribe("earliest", stop="now") for r in b.rows.to_pylist() if r["k"] == -1]
    assert [r["b"] for r in records if r["__change_type"] in ("+I", "+U")] == list(range(last[1] + 1))
    con.close()


def test_a_server_that_stops_and_comes_back_is_waited_for(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    con = server.connect()
    table = con.create_table("t", KV, primary_key="k")
    table.upsert([{"k": 1, "a": "x", "b": 1}])
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda _: table.get(1), range(8)))) == 8
    server.stop()
    with monkeypatch.context() as impatient, pytest.raises(lh.UnavailableError):
        impatient.setattr(patience, "PATIENCE_SECONDS", 0.1)
        table.get(1)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(table.upsert, [{"k": 2, "a": "y", "b": 2}])
        reading = pool.submit(con.tables)
        server.start()
        assert writing.result(WAIT_SECONDS).rows == 1 and reading.result(WAIT_SECONDS) == ["default.t"]
    assert table.get(1) == {"k": 1, "a": "x", "b": 1} and table.get(2) == {"k": 2, "a": "y", "b": 2}
    con.close()


def test_a_named_writer_goes_on_after_a_kill(server: Any) -> None:
    con = server.connect()
    table = con.create_table("t", KV)
    batches = [[{"k": i, "a": None, "b": i}] for i in range(30)]
    writer = table.writer("etl")
    for batch in batches[:10]:
        writer.append(batch)
    writer.flush()
    for batch in batches[10:20]:
        writer.append(batch)
    server.kill()
    server.start()
    writer.flush()
    resumed = table.writer("etl")
    for batch in batches[resumed.last_sequence + 1 :]:
        resumed.append(batch)
    resumed.close()
    with pytest.raises(lh.WriterFencedError):
        writer.append(batches[20])
        writer.flush()
    assert table.scan().to_arrow()["k"].to_pylist() == list(range(30))
    con.close()


def test_a_subscriber_goes_on_after_a_kill_by_itself_and_from_its_offsets(server: Any) -> None:
    con = server.connect()
    table = con.create_table("t", KV)
    table.append([{"k": i, "a": None, "b": None} for i in range(10)])
    feed = table.subscribe("earliest")
    batch = next(feed)
    server.kill()
    server.start()
    table.append([{"k": 10, "a": None, "b": None}])
    assert next(feed).rows["k"].to_pylist() == [10]
    with table.subscribe({batch.tablet: batch.end_offset}) as again:
        assert next(again).rows["k"].to_pylist() == [10]
    feed.close()
    con.close()


_OTHER = """
import sys, lakehead as lh
con = lh.connect(sys.argv[1])
t = con.table("t")
t.upsert([{"k": 2, "a": "from the other", "b": None}])
print(t.get(1)["a"], t.scan().count(), con._folder is None)
"""


def test_a_second_process_attaches_by_folder_and_by_uri(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", KV, primary_key="k")
        table.upsert([{"k": 1, "a": "mine", "b": None}])
        for target in (str(tmp_path), con.uri):
            out = subprocess.run([sys.executable, "-c", _OTHER, target], capture_output=True, text=True, check=True)
            assert out.stdout.split() == ["mine", "2", "True"]
        assert table.get(2) == {"k": 2, "a": "from the other", "b": None}


def test_connections_of_one_process_share_the_server(tmp_path: Path) -> None:
    first = lh.connect(tmp_path)
    second = lh.connect(str(tmp_path) + "/.")
    assert first.uri == second.uri
    first.create_table("t", KV)
    first.close()
    first.close()
    second.table("t").append([{"k": 1, "a": None, "b": None}])
    second.close()
    third = lh.connect(tmp_path)
    assert third.table("t").scan().count() == 1
    third.close()


def test_a_folder_whose_owner_was_killed_opens_again(server: Any) -> None:
    con = server.connect()
    con.create_table("t", KV).append([{"k": 1, "a": None, "b": None}])
    con.close()
    server.kill()
    with lh.connect(server.folder) as mine:
        assert mine.table("t").scan().count() == 1


@contextlib.contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Another thread holds a lock that is reentrant."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def all_refused_in_a_child(
    calls: Sequence[Callable[[], object]], then: Callable[[], object], wait_until: Callable[..., None]
) -> None:
    """In a forked child each of the calls is `ClosedError`, and the child ends after a last one."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            refused = 0
            for call in calls:
                try:
                    call()
                except lh.ClosedError as e:
                    refused += "forked" in str(e)
            then()
            status = 0 if refused == len(calls) else 2
        finally:
            os._exit(status)
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.append(status)
        return pid == child

    try:
        wait_until(has_ended)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(ended[-1]) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_connection(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with lh.connect(tmp_path) as con, lh.connect(con.uri) as remote:
        table = con.create_table("t", KV)
        far = remote.table("t")
        table.append([{"k": 1, "a": None, "b": None}])
        feed = table.subscribe("earliest")
        calls = [
            con.tables,
            table.scan,
            lambda: table.append([{"k": 2, "a": None, "b": None}]),
            lambda: next(feed),
            remote.tables,
            lambda: far.append([{"k": 2, "a": None, "b": None}]),
        ]
        all_refused_in_a_child(calls, con.close, wait_until)
        table.append([{"k": 3, "a": None, "b": None}])
        assert table.scan().to_arrow()["k"].to_pylist() == [1, 3]
        assert next(feed).rows.num_rows >= 1
        out = subprocess.run(
            [sys.executable, "-c", "import sys, lakehead as lh; print(lh.connect(sys.argv[1])._folder)", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == "None", "the parent still holds the folder"
        feed.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_forked_child_has_no_writer(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch, *, pending: bool, held: bool
) -> None:
    send, may_send = BatchWriter.send, threading.Event()

    def send_later(self: BatchWriter, write: PreparedWrite) -> object:
        may_send.wait()
        return send(self, write)

    monkeypatch.setattr(BatchWriter, "send", send_later)
    row = [{"k": 1, "a": None, "b": None}]
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", KV)
        writer = table.writer()
        if pending:
            writer.append(row)

        def block() -> None:
            with writer:
                pass

        calls = [lambda: writer.append(row), writer.flush, block, writer.close]
        # Another thread may hold the writer's lock at the moment of the fork: nobody gives it back in the child.
        with contextlib.ExitStack() as fork:
            if held:
                fork.enter_context(held_elsewhere(writer._sender._changed._lock))
            all_refused_in_a_child(calls, writer._sender.close, wait_until)
        may_send.set()
        writer.append(row)
        writer.close()
        assert table.scan().count() == 1 + pending
