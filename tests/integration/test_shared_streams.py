"""Subscriptions of one connection that share a stream get what each would get alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead import TabletId
from lakehead.client import tails

SCHEMA = pa.schema([("k", pa.int64()), ("p", pa.string()), ("a", pa.string())])


class Deployment:
    """A server in this process, and a connection to it through the network."""

    def __init__(self, folder: Path) -> None:
        self.owner = lh.connect(folder)
        self.con = lh.connect(self.owner.uri)
        server: Any = self.owner._server
        self._held = server.service._reads._subscriptions

    @property
    def streams(self) -> int:
        """Subscriptions that the server serves."""
        return len(self._held._held)

    def close(self) -> None:
        self.con.close()
        self.owner.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path / "data")
    yield deployment
    deployment.close()


def rows(*numbers: int) -> list[dict[str, object]]:
    return [{"k": n, "p": f"p{n % 3}", "a": f"row {n}"} for n in numbers]


def take(feed: lh.Subscription, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += next(feed).rows.column("k").to_pylist()
    return found


def test_those_who_come_equally_far_share_one_stream(served: Deployment, wait_until: Callable[..., None]) -> None:
    table = served.con.create_table("t", SCHEMA)
    table.append(rows(*range(10)))
    feeds = [table.subscribe("earliest" if n % 2 else "latest") for n in range(6)]
    for n, feed in enumerate(feeds):
        assert n % 2 == 0 or take(feed, 10) == list(range(10))
    wait_until(lambda: served.streams == 1)
    table.append(rows(10))
    assert [take(feed, 1) for feed in feeds] == [[10]] * 6
    for feed in feeds[1:]:
        feed.close()
    table.append(rows(11))
    assert take(feeds[0], 1) == [11] and served.streams == 1
    del feeds[0]
    wait_until(lambda: served.streams == 0)


def test_other_columns_filters_and_connections_are_other_streams(
    served: Deployment, wait_until: Callable[..., None]
) -> None:
    table = served.con.create_table("t", SCHEMA)
    with lh.connect(served.owner.uri) as other:
        feeds = [
            table.subscribe(),
            table.subscribe(columns=["k"]),
            table.subscribe(where="k > 5"),
            other.table("t").subscribe(),
            table.subscribe(),
        ]
        wait_until(lambda: served.streams == 4)
        table.append(rows(*range(10)))
        found = [take(feed, 4 if n == 2 else 10) for n, feed in enumerate(feeds)]
        assert found == [list(range(6, 10)) if n == 2 else list(range(10)) for n in range(5)]
        assert served.streams == 4
        for feed in feeds:
            feed.close()


def test_live_rows_are_for_one_reader_alone(served: Deployment, wait_until: Callable[..., None]) -> None:
    table = served.con.create_table("t", SCHEMA, primary_key=["k"], buckets=2)
    table.upsert(rows(*range(100)))
    first = table.subscribe("full")
    assert sorted(take(first, 100)) == list(range(100))
    table.upsert(rows(5))
    assert take(first, 2) == [5, 5]
    second = table.subscribe("full")
    assert sorted(take(second, 100)) == list(range(100))
    wait_until(lambda: served.streams == 1)
    table.upsert(rows(6))
    assert take(first, 2) == take(second, 2) == [6, 6]


def test_who_does_not_read_loses_its_seat_and_no_row(
    served: Deployment, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_QUEUED_ITEMS_MAX", 8)
    table = served.con.create_table("t", SCHEMA, durability="os")
    quick, slow = table.subscribe(), table.subscribe()
    wait_until(lambda: served.streams == 1)
    for n in range(200):
        table.append(rows(n))
        assert take(quick, 1) == [n]
    held: Any = slow
    assert held._stream._stream._stream._inner._seat.items.qsize() <= 10, "what nobody takes is bounded"
    assert take(slow, 200) == list(range(200))
    table.append(rows(200))
    assert take(quick, 1) == take(slow, 1) == [200]
    wait_until(lambda: served.streams == 1)


def test_a_change_of_definition_and_the_end_reach_all(served: Deployment, wait_until: Callable[..., None]) -> None:
    table = served.con.create_table("t", SCHEMA)
    feeds = [table.subscribe() for _ in range(3)]
    wait_until(lambda: served.streams == 1)
    with table.alter() as alter:
        alter.add_column("b", pa.int64())
    table = served.con.table("t")
    table.append([{"k": 1, "p": "x", "a": "y", "b": 2}])
    assert [next(feed).rows.column("b").to_pylist() for feed in feeds] == [[2]] * 3
    wait_until(lambda: served.streams == 1)
    served.con.drop_table("t")
    for feed in feeds:
        with pytest.raises(lh.ClosedError, match="was dropped"):
            next(feed)
    wait_until(lambda: served.streams == 0)


@pytest.mark.parametrize("seed", range(4))
def test_shared_streams_bring_what_reads_bring(served: Deployment, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers come and go, rest, and begin anywhere, while rows and partitions are written; a read of what each was
    sent, by a stream of its own, finds the same rows at the same offsets."""
    monkeypatch.setattr(tails, "_QUEUED_ITEMS_MAX", 16)
    monkeypatch.setattr(tails, "_RECENT_ITEMS_MAX", 8)
    r = random.Random(seed)
    table = served.con.create_table("t", SCHEMA, partition_by="p", buckets=2, bucket_key=["k"], durability="os")
    table.append(rows(*range(50)))
    stop = threading.Event()

    def read(at: int) -> tuple[dict[TabletId, list[tuple[int, int]]], dict[TabletId, int]]:
        mine = random.Random(seed * 100 + at)
        starts = mine.choice(["earliest", "latest"])
        found: dict[TabletId, list[tuple[int, int]]] = {}
        count = mine.choice([100, 1000, 5000])
        feed = table.subscribe(starts, where="k % 7 != 3" if at % 2 else None)
        for batch in feed:
            some = batch.rows
            count = count - some.num_rows
            numbers, offsets = some.column("k").to_pylist(), some.column("__offset").to_pylist()
            found.setdefault(batch.tablet, []).extend(zip(offsets, numbers, strict=True))
            if mine.random() < 0.05:
                stop.wait(mine.random() / 8)
            if count <= 0:
                break
        feed.close()
        return found, {tablet: pairs[0][0] for tablet, pairs in found.items()}

    def write() -> None:
        n = 50
        while not stop.is_set():
            more = r.choice([1, 1, 1, 5, 300])
            table.append([{**row, "p": f"p{r.randrange(2 + n // 2000)}"} for row in rows(*range(n, n + more))])
            n += more
            stop.wait(r.random() / 200)

    with ThreadPoolExecutor(9) as pool:
        writing = pool.submit(write)
        reading = [pool.submit(read, at) for at in range(8)]
        results = [f.result(WAIT_SECONDS) for f in reading]
        stop.set()
        writing.result(WAIT_SECONDS)
    for at, (found, starts) in enumerate(results):
        assert found
        alone: dict[TabletId, list[tuple[int, int]]] = {}
        for batch in table.subscribe(starts, stop="now", where="k % 7 != 3" if at % 2 else None):
            some = batch.rows
            pairs = zip(some.column("__offset").to_pylist(), some.column("k").to_pylist(), strict=True)
            alone.setdefault(batch.tablet, []).extend(pairs)
        for tablet, pairs in found.items():
            assert pairs == alone[tablet][: len(pairs)], (at, tablet)
