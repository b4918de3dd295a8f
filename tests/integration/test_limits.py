"""Every queue and request is bounded: what is beyond gets a typed error, or waits, and nothing is half done."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.client import patience
from lakehead.env import SystemThreads
from lakehead.kv.tablet import KvTablet
from lakehead.server.access import Share
from lakehead.server.admission import Bounded

KV = pa.schema([("k", pa.int64()), ("p", pa.string())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def service(con: lh.Connection, **limits: Any) -> Any:
    found: Any = con._server
    for part in (found.service._writes, found.service._reads):
        part._limits = dataclasses.replace(part._limits, **limits)
    return found.service


def test_partitions(con: lh.Connection) -> None:
    service(con, partitions_max=3)
    table = con.create_table("a.t", KV, partition_by="p", buckets=2)
    table.append([{"k": 1, "p": "a"}, {"k": 2, "p": "b"}])
    with pytest.raises(lh.LimitExceededError, match="4 partitions"):
        table.append([{"k": 3, "p": "a"}, {"k": 4, "p": "c"}, {"k": 5, "p": "d"}])
    assert table.scan().count() == 2 and table.status().num_rows == 4, "the batch was refused whole"
    table.append([{"k": 3, "p": "a"}, {"k": 4, "p": "c"}])
    assert table.scan().count() == 4


def test_memory(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none for a plan, nothing is written, and the client asks again; rows that were changed by half are
    not told, and the log below is."""
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 1.0)
    table = con.create_table("a.t", KV, primary_key="k", buckets=1)
    table.upsert([{"k": 1, "p": "a"}])
    refused: list[str] = []

    def lacks(name: str) -> None:
        has = getattr(KvTablet, name)

        def once(*args: Any) -> Any:
            if name in refused:
                return has(*args)
            refused.append(name)
            raise MemoryError("no memory for this test")

        monkeypatch.setattr(KvTablet, name, once)

    lacks("plan_upsert")
    table.upsert([{"k": 2, "p": "b"}])
    assert refused and table.lookup([1, 2]).num_rows == 2
    lacks("_put")
    with pytest.raises(lh.OutcomeUnknownError, match="restart the server"):
        table.upsert([{"k": 1, "p": "new"}])
    reads: list[Callable[[], Any]] = [lambda: table.get(1), lambda: table.lookup([1]), lambda: table.lookup([9])]
    for read in (*reads, lambda: table.upsert([{"k": 3, "p": "c"}])):
        with pytest.raises(lh.StorageError, match="restart the server"):
            read()
    assert con.sql("select count(*) from a.t$changelog").fetchone() == (2,)


def test_named_writers(con: lh.Connection) -> None:
    service(con, named_writers_max=2)
    table = con.create_table("a.t", KV)
    for name in ("one", "two", "one"):
        table.writer(name).close()
    with pytest.raises(lh.LimitExceededError, match="each job"):
        table.writer("three")
    table.writer("two").close()


def test_lookups_are_cut_by_the_client_and_refused_by_the_server(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    service(con, lookup_keys_max=100)
    table = con.create_table("a.t", KV, primary_key="k", buckets=2)
    table.upsert([{"k": n, "p": str(n)} for n in range(500)])
    with pytest.raises(lh.LimitExceededError, match="in parts"):
        table.lookup(list(range(500)))
    monkeypatch.setattr("lakehead.client.lookups._LOOKUP_KEYS", 100)
    keys = [*range(499, -1, -1), 777, 3, 3]
    assert table.lookup(keys)["k"].to_pylist() == [k for k in keys if k < 500]
    assert table.lookup([]).num_rows == 0 and table.lookup([]).schema == table.schema


def test_writes_beyond_what_a_server_works_on_wait_their_turn(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV)
    server = service(con)
    server._writes._bytes = Bounded(SystemThreads(), "write_bytes_max", "bytes of writes", 1000)
    held = server._writes._bytes.take(900)
    done = threading.Event()
    refused = threading.Event()
    take = server._writes._bytes.take

    def counted(amount: int, share: Share) -> int:
        try:
            return take(amount, share)
        except lh.OverloadedError:
            refused.set()
            raise

    server._writes._bytes.take = counted

    def write() -> None:
        table.append([{"k": n, "p": "x"} for n in range(50)])
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert refused.wait(WAIT_SECONDS) and not done.is_set()
    server._writes._bytes.give_back(held)
    assert done.wait(WAIT_SECONDS), "the client tries again"
    thread.join()
    assert table.scan().count() == 50 and not server._writes._bytes._held


def test_reads(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV)
    table.append([{"k": 1, "p": "x"}])
    server = service(con)
    server._reads._reads = Bounded(SystemThreads(), "reads_max", "reads", 2)
    open_reads = [table.scan().to_batches() for _ in range(2)]
    for reading in open_reads:
        next(iter(reading))
    with pytest.raises(lh.OverloadedError, match="reads_max=2"):
        table.scan().to_arrow()
    del open_reads, reading
    assert table.scan().to_arrow().num_rows == 1


def test_leases(con: lh.Connection) -> None:
    table = con.create_table("a.t", KV)
    server = service(con)
    server._leases._limits = dataclasses.replace(server._leases._limits, leases_max=2)
    scans = [table.scan(), table.scan()]
    with pytest.raises(lh.OverloadedError, match="pinned reads"):
        table.scan()
    scans.clear()
    for _ in range(5):
        assert con.table("a.t").scan().count() == 0, "scans of tables that are not held leave no leases"


def test_an_idle_writer_that_was_forgotten_goes_on(con: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehead.log.writers.ANONYMOUS_WRITERS_MAX", 3)
    con.create_table("a.t", KV, buckets=2, bucket_key="k")
    tables = [con.table("a.t") for _ in range(5)]
    for turn in range(3):
        for i, table in enumerate(tables):
            table.append([{"k": 1000 * turn + 100 * i + n, "p": ""} for n in range(20)])
    keys = tables[0].scan().to_arrow()["k"].to_pylist()
    assert len(keys) == len(set(keys)) == 300
