"""Appends of few rows by many threads: sent together, answered each for its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.api.table import handle_of
from lakehead.client.small_appends import SentPart, SmallAppends, _Widths
from lakehead.config import ServerConfig
from lakehead.env.threads import Done, SystemThreads
from lakehead.errors import ChecksumError, LakeheadError, LimitExceededError, OutcomeUnknownError, UnavailableError
from lakehead.types import UNPARTITIONED, TabletKey

KEY = TabletKey(UNPARTITIONED, 0)


def rows(*values: int) -> pa.Table:
    return pa.table({"v": pa.array(values, pa.int64())})


class Log:
    """Takes batches once `open` is set, and keeps them; the first has `begun` when it is asked to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.open = threading.Event(), threading.Event()
        self.refuse: Callable[[list[int]], BaseException | None] = lambda values: None

    def send(self, given: pa.Table) -> Sequence[SentPart]:
        values = given.column("v").to_pylist()
        start = sum(map(len, self.batches))
        self.batches.append(values)
        self.begun.set()
        assert self.open.wait(WAIT_SECONDS)
        if (error := self.refuse(values)) is not None:
            raise error
        return [SentPart(KEY, None, (start, start + len(values)))]


class Callers:
    """Threads that append, each known to be in the queue before the next begins."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.appends = SmallAppends(SystemThreads(), log.send)
        self.pool = ThreadPoolExecutor(16)

    def begin(self, *groups: Sequence[int]) -> list[Future[list[tuple[TabletKey, tuple[int, int]]]]]:
        """The first is under way, and the others wait for it."""
        begun = [self.pool.submit(self.appends.append, rows(*groups[0]))]
        assert self.log.begun.wait(WAIT_SECONDS)
        for n, values in enumerate(groups[1:], 1):
            begun.append(self.pool.submit(self.appends.append, rows(*values)))
            while len(self.appends._queue) < n:
                continue
        return begun


@pytest.fixture
def log() -> Log:
    return Log()


def test_what_came_meanwhile_is_one_batch_in_the_order_in_which_it_came(log: Log) -> None:
    begun = Callers(log).begin([1], [2, 3], [4], [5, 6, 7])
    log.open.set()
    assert [one.result(WAIT_SECONDS) for one in begun] == [[(KEY, ends)] for ends in [(0, 1), (1, 3), (3, 4), (4, 7)]]
    assert log.batches == [[1], [2, 3, 4, 5, 6, 7]]


def test_a_batch_has_a_bound(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehead.client.small_appends._CALLS_MAX", 2)
    begun = Callers(log).begin([1], [2], [3], [4], [5], [6])
    log.open.set()
    assert [one.result(WAIT_SECONDS)[0][1][0] for one in begun] == list(range(6))
    assert log.batches == [[1], [2, 3], [4, 5], [6]]


def test_rows_that_are_refused_refuse_no_others(log: Log) -> None:
    log.refuse = lambda values: LimitExceededError("too many", limit=3) if 3 in values else None
    first, second, third, fourth = Callers(log).begin([1], [2], [3], [4])
    log.open.set()
    assert [len(one.result(WAIT_SECONDS)) for one in (first, second, fourth)] == [1, 1, 1]
    with pytest.raises(LimitExceededError, match="too many"):
        third.result(WAIT_SECONDS)
    assert log.batches == [[1], [2, 3, 4], [2], [3], [4]]


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("nobody answers", gone=True),
        ChecksumError("the log is damaged", path="1.log"),
        OutcomeUnknownError("it may have landed", sequence=7),
        LimitExceededError("a part is there", acknowledged="0: (0, 1)"),
    ],
)
def test_what_failed_for_all_is_not_sent_again_for_each(log: Log, error: LakeheadError) -> None:
    log.refuse = lambda values: error if 2 in values else None
    begun = Callers(log).begin([1], [2], [3], [4])
    log.open.set()
    assert begun[0].result(WAIT_SECONDS) == [(KEY, (0, 1))]
    errors = [one.exception(60) for one in begun[1:]]
    assert len({id(e) for e in errors}) == 3, "an error is raised in one thread"
    for e in errors:
        assert type(e) is type(error)
        assert isinstance(e, LakeheadError)
        assert (e.message, e.context) == (error.message, error.context)
    assert log.batches == [[1], [2, 3, 4]]


def test_a_thread_that_fails_leaves_nobody_waiting(log: Log) -> None:
    log.refuse = lambda values: MemoryError() if 2 in values else None
    callers = Callers(log)
    begun = callers.begin([1], [2], [3])
    log.open.set()
    begun[0].result(WAIT_SECONDS)
    with pytest.raises(MemoryError):
        begun[1].result(WAIT_SECONDS)
    with pytest.raises(OutcomeUnknownError, match="look for them"):
        begun[2].result(WAIT_SECONDS)
    assert callers.appends.append(rows(4)) == [(KEY, (3, 4))]


@pytest.mark.parametrize("leads", [False, True])
def test_who_no_longer_waits_keeps_nobody_waiting(log: Log, leads: bool) -> None:
    """What another thread raises in one that waits may come before its turn, or with it."""

    class Leaving(SystemThreads):
        made = 0

        def done(self) -> Done:
            self.made += 1
            return Left() if self.made == 2 else super().done()

    told = threading.Event()

    class Left:
        def open(self) -> None:
            told.set()

        def wait(self) -> bool:
            if leads:
                assert told.wait(WAIT_SECONDS)
            raise SystemExit

    callers = Callers(log)
    callers.appends = SmallAppends(Leaving(), log.send)
    first = callers.pool.submit(callers.appends.append, rows(1))
    assert log.begun.wait(WAIT_SECONDS)
    second = callers.pool.submit(callers.appends.append, rows(2))
    if leads:
        while not callers.appends._queue:
            continue
    else:
        with pytest.raises(SystemExit):
            second.result(WAIT_SECONDS)
    third = callers.pool.submit(callers.appends.append, rows(3))
    while len(callers.appends._queue) < 1 + leads:
        continue
    log.open.set()
    with pytest.raises(SystemExit):
        second.result(WAIT_SECONDS)
    assert first.result(WAIT_SECONDS) == [(KEY, (0, 1))]
    assert third.result(WAIT_SECONDS) == [(KEY, (1, 2))]
    assert log.batches == [[1], [3]]


def test_rows_of_the_main_thread_and_many_rows_go_alone(log: Log) -> None:
    appends = SmallAppends(SystemThreads(), log.send)
    assert not appends.takes(rows(1))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(appends.takes, rows(1)).result()
        assert not other.submit(appends.takes, rows(*range(1000))).result()
        large = pa.table({"v": ["x" * 100_000]})
        assert not other.submit(appends.takes, large).result()


def test_small_is_what_has_few_bytes_wherever_they_lie() -> None:
    """Slices of large batches, and several chunks; texts at both sides of the bound."""
    types = [pa.bool_(), pa.int16(), pa.date32(), pa.timestamp("us", "UTC"), pa.decimal128(20, 3), pa.binary(5)]
    fixed = pa.schema([(f"f{n}", t) for n, t in enumerate(types)])
    schema = pa.schema([*fixed, ("s", pa.string()), ("b", pa.binary()), ("ls", pa.large_string())])
    widths = _Widths.of(schema)
    assert widths is not None and _Widths.of(pa.schema([*schema, ("nested", pa.list_(pa.int8()))])) is None
    texts = [None if n % 7 == 0 else "ä" * (n % 50) for n in range(1000)]
    blobs = [None if t is None else t.encode() for t in texts]
    whole = pa.table({**{f.name: pa.nulls(1000, f.type) for f in fixed}, "s": texts, "b": blobs, "ls": texts})
    whole = whole.cast(schema).combine_chunks()
    for start, rows in ((0, 1), (7, 1), (333, 64), (999, 1), (1000, 0)):
        some = whole.slice(start, rows)
        held = sum(len(v) for v in blobs[start : start + rows] if v is not None)
        assert widths.bytes_of(some) == rows * (len(schema) + 1 + 2 + 4 + 8 + 16 + 5 + 4 + 4 + 8) + 3 * held
        assert widths.bytes_of(pa.concat_tables([some, some])) == 2 * widths.bytes_of(some)
    appends = SmallAppends(SystemThreads(), lambda rows: [], pa.schema([("v", pa.string())]))
    with ThreadPoolExecutor(1) as other:
        for size, takes in ((16_000, True), (16_500, False)):
            large = pa.table({"v": ["x", "y" * size, "z"]}).slice(1, 1)
            assert other.submit(appends.takes, large).result() is takes
            nested = pa.table({"v": [["x"], ["y" * size], ["z"]]}).slice(1, 1)
            assert (
                other.submit(SmallAppends(SystemThreads(), lambda rows: [], nested.schema).takes, nested).result()
                is takes
            )


def test_rows_that_are_appended_while_rows_are_sent_do_not_wait_for_them(tmp_path: Path) -> None:
    """As a logging handler may that appends to a table."""
    with lh.connect(tmp_path / "data") as con:
        table = con.create_table("t.log", pa.schema([("v", pa.int64())]), durability="os")
        small = handle_of(table).writers._small
        send, inside = small._send, threading.Event()

        def telling(given: pa.Table) -> Sequence[SentPart]:
            if not inside.is_set():
                inside.set()
                table.append([{"v": 2}])
            return send(given)

        small._send = telling
        with ThreadPoolExecutor(1) as pool:
            pool.submit(table.append, [{"v": 1}]).result(WAIT_SECONDS)
            pool.submit(table.append, [{"v": 3}]).result(WAIT_SECONDS)
        assert table.scan().to_arrow().column("v").to_pylist() == [2, 1, 3]


@pytest.mark.parametrize(
    "how",
    [{}, {"buckets": 3}, {"buckets": 3, "bucket_key": ["n"]}, {"partition_by": ["p"], "buckets": 2}],
    ids=["plain", "buckets", "bucket key", "partitions"],
)
@pytest.mark.parametrize("served", [False, True], ids=["embedded", "served"])
def test_offsets_are_those_of_the_callers_own_rows(tmp_path: Path, how: dict[str, Any], served: bool) -> None:
    """Whatever tablets a batch of many callers' rows went to."""
    schema = pa.schema([("writer", pa.int64()), ("n", pa.int64()), ("p", pa.string())])
    with ExitStack() as ends:
        if served:
            host = serve(tmp_path / "folder", ServerConfig(port=0, token="t"))
            ends.callback(host.close)
            con = ends.enter_context(lh.connect(host.uri, token="t"))
        else:
            con = ends.enter_context(lh.connect(tmp_path / "folder"))
        table = con.create_table("t.rows", schema, durability="os", **how)
        small = handle_of(table).writers._small
        send, batches = small._send, []

        def counting(given: pa.Table) -> Sequence[SentPart]:
            batches.append(given.num_rows)
            return send(given)

        small._send = counting

        def write(writer: int) -> list[tuple[set[tuple[int, int]], lh.WriteResult]]:
            given = [{"writer": writer, "n": n, "p": "ab"[(writer + n) % 2]} for n in range(40)]
            calls = [given[low:high] for low, high in pairwise([0, *range(1, 37, 3), 40])]
            return [({(writer, row["n"]) for row in rows}, table.append(rows)) for rows in calls]

        with ThreadPoolExecutor(16) as pool:
            told = [call for calls in pool.map(write, range(16)) for call in calls]
        assert len(batches) < len(told)
        found = {
            ((row["p"],) if "partition_by" in how else (), row["__bucket"], row["__offset"]): (row["writer"], row["n"])
            for row in table.scan(system_columns=True).to_arrow().to_pylist()
        }
        assert len(found) == 16 * 40
        for given, result in told:
            ranges = result.offsets.items()
            there = [found[t.partition, t.bucket, n] for t, (start, end) in ranges for n in range(start, end)]
            assert len(there) == result.rows == len(given)
            assert set(there) == given
            assert len(ranges) == 1 or "bucket_key" in how or "partition_by" in how
