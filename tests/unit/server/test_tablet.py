"""The live tablet: group commit, and what a failing disk leaves behind."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.config import TableProperties
from lakehead.env import Env, SystemRandomness, SystemThreads
from lakehead.env.clock import SystemClock
from lakehead.env.interrupts import Latch
from lakehead.errors import (
    ClosedError,
    LimitExceededError,
    OutcomeUnknownError,
    SequenceGapError,
    StorageError,
    WriterFencedError,
)
from lakehead.format import frame as frames
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.kv.growing import GrowingArray
from lakehead.server.group_commit import PendingWrite
from lakehead.server.notes import MakeCheckpoint, Roll, Trim
from lakehead.server.tablet import Tablet
from lakehead.testing.storage import FaultyStorage, MemoryLogFile
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey, WriteKind

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
KEY = TabletKey("", 0)
DONE = ClosedError("the test is over")


class Opened:
    """A tablet over a faulty storage, with the threads a service gives it."""

    def __init__(self, *, keyed: bool, storage: FaultyStorage | None = None, **properties: Any) -> None:
        self.storage = storage or FaultyStorage()
        self.pool = ThreadPoolExecutor(2)
        self.desc = TableDescriptor(
            "t1", TablePath("a", "t"), Schemas.only(SCHEMA), ("k",) if keyed else (), (), ("k",) if keyed else (), 1,
            None, TableProperties(**properties),
        )  # fmt: skip
        self.progress = 0
        self.tablet = self.open()

    def open(self) -> Tablet:
        return Tablet(
            self.desc,
            KEY,
            moment=threading.Lock(),
            env=Env(SystemClock(), self.storage, SystemRandomness(), SystemThreads()),
            folder="/t",
            on_progress=self._moved,
            run_in_background=self.pool.submit,
            seed=7,
        )

    def _moved(self) -> None:
        self.progress += 1

    def crash(self, **how: Any) -> None:
        self.storage.crash(**how)
        self.tablet = self.open()

    def write(self, *rows: tuple[int, str | None], **how: Any) -> tuple[int, int]:
        return put(self.tablet, pending(list(rows), kind="upsert" if self.desc.keyed else "append", **how))

    def delete(self, *keys: int, **how: Any) -> tuple[int, int]:
        return put(self.tablet, pending([(k, None) for k in keys], kind="delete", columns=["k"], **how))

    def rows(self) -> list[tuple[Any, ...]]:
        end = self.tablet.high_watermark
        return [tuple(r.values()) for f in self.tablet.frames(0, end) for r in f.body.rows(SCHEMA).to_pylist()]

    def get(self, *keys: int) -> dict[int, str | None]:
        asked = pa.RecordBatch.from_pydict({"k": list(keys)}, schema=pa.schema([SCHEMA.field("k")]))
        return {r["k"]: r["v"] for r in self.tablet.lookup(self.tablet.encode(asked))[0].to_pylist()}


_writers = iter(range(10**9))


def pending(
    rows: list[tuple[int, str | None]],
    *,
    kind: WriteKind = "append",
    columns: list[str] | None = None,
    writer: int | None = None,
    sequence: int = 0,
    previous: int = -1,
    epoch: int = 0,
) -> PendingWrite:
    number = next(_writers) if writer is None else 10**9 + writer
    names = columns or SCHEMA.names
    schema = pa.schema([SCHEMA.field(c) for c in names])
    made = [dict(zip(SCHEMA.names, r, strict=True)) for r in rows]
    batch = pa.RecordBatch.from_pylist([{c: r[c] for c in names} for r in made], schema=schema)
    stamp = WriterStamp(number.to_bytes(16, "little"), sequence, previous, epoch=epoch)
    body = encode_body(batch, schema_id=0, stamp=stamp)
    return PendingWrite(kind, body, None if kind == "append" else batch, Latch())


def put(tablet: Tablet, write: PendingWrite) -> tuple[int, int]:
    if tablet.submit(write):
        tablet.drive()
    return write.wait()


def on_threads(count: int, call: Any) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [f.result(WAIT_SECONDS) for f in [pool.submit(call, i) for i in range(count)]]


def test_a_lone_write_is_synced_and_readable_when_it_returns() -> None:
    t = Opened(keyed=False)
    assert t.write((1, "a"), (2, None)) == (0, 2)
    assert t.write((3, "c")) == (2, 3)
    assert t.rows() == [(1, "a"), (2, None), (3, "c")] and t.progress == 2
    assert t.storage.unsynced_bytes() == 0
    t.crash()
    assert t.rows() == [(1, "a"), (2, None), (3, "c")]


def test_os_durability_does_not_sync_until_asked() -> None:
    t = Opened(keyed=True, durability="os")
    before = t.storage.syncs
    t.write((1, "a"))
    assert t.storage.syncs == before and t.storage.unsynced_bytes() > 0
    assert t.tablet.sync() == 1 and t.storage.unsynced_bytes() == 0
    assert t.tablet.sync() == 1 and t.storage.syncs == before + 1


@pytest.mark.parametrize("keyed", [False, True])
def test_what_queues_up_during_a_sync_shares_the_next_one(keyed: bool) -> None:
    t = Opened(keyed=keyed)
    syncing, go_on = threading.Event(), threading.Event()

    def wait_in_first_sync(action: str, path: str) -> None:
        if action == "sync":
            syncing.set()
            go_on.wait(WAIT_SECONDS)

    t.storage.before = wait_in_first_sync
    before = t.storage.syncs
    queued = [pending([(i, str(i))], kind="upsert" if keyed else "append") for i in range(1, 21)]
    with ThreadPoolExecutor(1) as pool:
        lone = pool.submit(t.write, (0, "0"))
        assert syncing.wait(WAIT_SECONDS)
        assert not any([t.tablet.submit(w) for w in queued]), "the tablet is busy"
        assert t.tablet.high_watermark == 0
        go_on.set()
        assert lone.result(WAIT_SECONDS) == (0, 1)
    assert [w.wait() for w in queued] == [(i, i + 1) for i in range(1, 21)]
    assert t.storage.syncs == before + 2
    assert t.rows() == [(i, str(i)) for i in range(21)]


@pytest.mark.parametrize("keyed", [False, True])
def test_many_threads(keyed: bool) -> None:
    t = Opened(keyed=keyed, segment_bytes=20_000)

    def write(i: int) -> list[tuple[int, int]]:
        ends = []
        for n in range(25):
            ends.append(t.write((i * 100 + n, f"{i}-{n}"), (-1, str(i)), writer=i, sequence=n, previous=n - 1))
        return ends

    ranges = sorted(r for ends in on_threads(8, write) for r in ends)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)) and ranges[0][0] == 0
    if keyed:
        expected = {i * 100 + n: f"{i}-{n}" for i in range(8) for n in range(25)}
        assert {k: v for k, v in t.get(*expected).items()} == expected
        assert t.tablet.row_count == 201
    else:
        assert Counter(t.rows()) == Counter(
            [(i * 100 + n, f"{i}-{n}") for i in range(8) for n in range(25)] + [(-1, str(i)) for i in range(8)] * 25
        )
    state = t.rows(), t.tablet.row_count
    t.crash()
    assert (t.rows(), t.tablet.row_count) == state


def test_repeats_gaps_and_fencing() -> None:
    t = Opened(keyed=True)
    assert t.write((1, "a"), writer=1, sequence=0) == (0, 1)
    assert t.write((1, "a"), writer=1, sequence=0) == (0, 1)
    assert t.write((1, "b"), writer=1, sequence=1, previous=0) == (1, 3)
    t.crash()
    assert t.write((1, "b"), writer=1, sequence=1, previous=0) == (1, 3)
    with pytest.raises(SequenceGapError):
        t.write((1, "d"), writer=1, sequence=3, previous=2)
    assert t.write((1, "c"), writer=1, sequence=2, previous=1, epoch=2) == (3, 5)
    with pytest.raises(WriterFencedError):
        t.write((1, "d"), writer=1, sequence=3, previous=2, epoch=1)
    assert t.get(1) == {1: "c"}
    assert t.tablet.writers.last_sequence((10**9 + 1).to_bytes(16, "little"), 9) == 2


def test_a_refused_write_does_not_refuse_its_group() -> None:
    t = Opened(keyed=True)
    t.write((1, "a"), writer=1, sequence=0)
    good, gap = pending([(2, "b")], kind="upsert"), pending([(3, "c")], kind="upsert", writer=1, sequence=9, previous=8)
    assert t.tablet.submit(good) and not t.tablet.submit(gap)
    t.tablet.drive()
    assert good.wait() == (1, 2)
    with pytest.raises(SequenceGapError):
        gap.wait()
    assert t.get(1, 2, 3) == {1: "a", 2: "b"}


def test_kinds_and_columns_of_one_group_are_applied_in_order() -> None:
    t = Opened(keyed=True)
    writes = [
        pending([(1, "a"), (2, "b")], kind="upsert"),
        pending([(1, None)], kind="delete", columns=["k"]),
        pending([(1, None), (2, None)], kind="upsert", columns=["k"]),
        pending([(3, "c")], kind="upsert"),
    ]
    assert [t.tablet.submit(w) for w in writes] == [True, False, False, False]
    t.tablet.drive()
    assert [w.wait() for w in writes] == [(0, 2), (2, 3), (3, 6), (6, 7)]
    assert t.get(1, 2, 3) == {1: None, 2: "b", 3: "c"}


def test_a_batch_that_changes_nothing_is_remembered() -> None:
    t = Opened(keyed=True)
    assert t.delete(5, writer=1, sequence=0) == (0, 0)
    t.crash()
    assert t.delete(5, writer=1, sequence=0) == (0, 0)
    assert t.delete(5, writer=1, sequence=1, previous=0) == (0, 0)


@pytest.mark.parametrize("keyed", [False, True])
def test_a_full_disk_refuses_and_the_tablet_goes_on(keyed: bool) -> None:
    t = Opened(keyed=keyed)
    t.write((1, "a"))
    t.storage.full = True
    for _ in range(2):
        with pytest.raises(StorageError, match="disk is full"):
            t.write((2, "b"), writer=1, sequence=0)
    assert t.rows() == [(1, "a")] and t.tablet.high_watermark == 1
    t.storage.full = False
    assert t.write((2, "b"), writer=1, sequence=0) == (1, 2)
    assert t.rows() == [(1, "a"), (2, "b")]
    if keyed:
        assert t.get(1, 2) == {1: "a", 2: "b"}
    t.crash()
    assert t.rows() == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("rolling", [False, True])
def test_after_a_failed_sync_nothing_is_written_and_what_was_readable_stays(keyed: bool, rolling: bool) -> None:
    t = Opened(keyed=keyed, **({"segment_bytes": 1} if rolling else {}))
    t.write((1, "a"))
    t.storage.sync_fails = True
    # A new segment begins with a sync of the last one: what comes after was not written yet.
    with pytest.raises(StorageError if rolling else OutcomeUnknownError, match="restart"):
        t.write((2, "b"))
    t.storage.sync_fails = False
    with pytest.raises(StorageError, match="restart"):
        t.write((3, "c"))
    assert t.rows() == [(1, "a")] and t.tablet.high_watermark == 1
    if keyed:
        assert t.get(1, 2) == {1: "a"}
    t.tablet.close(DONE)
    t.crash()
    assert t.rows() == [(1, "a")]
    assert t.write((4, "d")) == (1, 2)


def test_after_a_failed_sync_of_its_deletes_a_truncation_does_not_go_on() -> None:
    """Its deletes would be in the log twice, for rows that were there once."""
    t = Opened(keyed=True)
    t.write((1, "a"))
    t.write((2, "b"), writer=1)
    end = t.tablet.high_watermark
    t.storage.sync_fails = True
    with t.tablet.paused(), pytest.raises(OutcomeUnknownError):
        t.tablet.truncate(end)
    t.storage.sync_fails = False
    written = t.tablet._log.log_end_offset
    with t.tablet.paused(), pytest.raises(StorageError, match="restart"):
        t.tablet.truncate(end)
    assert t.tablet._log.log_end_offset == written
    t.tablet.close(DONE)
    t.tablet = t.open()
    with t.tablet.paused():
        t.tablet.truncate(end)
    assert t.get(1, 2) == {} and t.tablet.high_watermark == written


@pytest.mark.parametrize("keyed", [False, True])
def test_of_a_write_whose_sync_failed_the_outcome_is_unknown_also_when_it_changes_nothing(keyed: bool) -> None:
    t = Opened(keyed=keyed)
    t.write((1, "a"))
    t.storage.sync_fails = True
    with pytest.raises(OutcomeUnknownError) as unknown:
        t.delete(7, writer=1) if keyed else t.write((2, "b"), writer=1)
    assert not unknown.value.retryable and unknown.value.code == 2004
    with pytest.raises(StorageError, match="restart"):
        t.delete(7, writer=1) if keyed else t.write((2, "b"), writer=1)
    t.storage.sync_fails = False
    t.tablet.close(DONE)
    t.tablet = t.open()  # the bytes were there after all
    before = t.tablet.high_watermark
    assert (t.delete(7, writer=1) if keyed else t.write((2, "b"), writer=1)) == ((1, 1) if keyed else (1, 2))
    assert t.tablet.high_watermark == before


def test_a_failed_sync_of_a_reader_closes_the_tablet_too() -> None:
    t = Opened(keyed=False, durability="os")
    t.write((1, "a"))
    t.storage.sync_fails = True
    with pytest.raises(StorageError):
        t.tablet.sync()
    t.storage.sync_fails = False
    with pytest.raises(StorageError, match="restart"):
        t.tablet.sync()
    with pytest.raises(StorageError, match="restart"):
        t.write((2, "b"))


@pytest.mark.parametrize("where", ["append", "sync"])
def test_an_interrupt_inside_a_commit_closes_the_tablet_rather_than_let_log_and_rows_differ(where: str) -> None:
    t = Opened(keyed=True)
    t.write((1, "a"))

    def interrupt(action: str, path: str) -> None:
        if action == where:
            raise KeyboardInterrupt

    t.storage.before = interrupt
    with pytest.raises(OutcomeUnknownError):
        t.write((1, "b"))
    t.storage.before = None
    with pytest.raises(StorageError, match="restart"):
        t.write((1, "c"))
    with t.tablet.paused(), pytest.raises(StorageError, match="restart"):
        t.tablet.truncate(1)
    assert t.get(1) == {1: "a"}


def test_one_batch_too_large_for_a_frame_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    t = Opened(keyed=True)
    t.write((1, "x" * 3000))
    small, wide = pending([(2, "b")], kind="upsert"), pending([(1, "y" * 3000)], kind="upsert")
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 5000)
    assert [t.tablet.submit(w) for w in (wide, small)] == [True, False]
    t.tablet.drive()
    with pytest.raises(LimitExceededError):
        wide.wait()
    assert small.wait() == (1, 2)
    assert t.get(1, 2) == {1: "x" * 3000, 2: "b"}


def test_close_finishes_what_is_under_way_and_refuses_what_comes() -> None:
    t = Opened(keyed=False)
    syncing, go_on = threading.Event(), threading.Event()

    def wait_in_sync(action: str, path: str) -> None:
        if action == "sync":
            syncing.set()
            go_on.wait(WAIT_SECONDS)

    t.storage.before = wait_in_sync
    with ThreadPoolExecutor(2) as pool:
        under_way = pool.submit(t.write, (1, "a"))
        assert syncing.wait(WAIT_SECONDS)
        late = pending([(2, "b")])
        assert not t.tablet.submit(late)
        closing = pool.submit(t.tablet.close, DONE)
        while t.tablet._closed is None:
            threading.Event().wait(0.001)
        go_on.set()
        assert under_way.result(WAIT_SECONDS) == (0, 1)
        closing.result(WAIT_SECONDS)
    with pytest.raises(ClosedError):
        late.wait()
    with pytest.raises(ClosedError):
        t.write((3, "c"))
    with pytest.raises(ClosedError, match="the test is over"):
        t.rows()
    t.pool.shutdown()
    more = [pending([(4, "d")]), pending([(5, "e")])]
    assert [t.tablet.submit(w) for w in more] == [True, False]
    t.tablet.drive()
    for write in more:
        with pytest.raises(ClosedError):
            write.wait()
    t.pool = ThreadPoolExecutor(2)
    t.crash()
    assert t.rows() == [(1, "a")]


def test_a_closed_tablet_keeps_no_rows_whoever_keeps_it() -> None:
    """What refers to one that was dropped may go much later: subscriptions that ended, cycles that nobody looks at."""
    t = Opened(keyed=True)
    before = {id(o) for o in gc.get_objects()}
    t.tablet = t.open()
    t.write(*((n, f"{n}") for n in range(1000)))
    arrays = [weakref.ref(o) for o in gc.get_objects() if type(o) is GrowingArray and id(o) not in before]
    keys = pa.record_batch([pa.array([7])], names=["k"])
    encoded = t.tablet.encode(keys)
    gc.disable()
    try:
        assert t.tablet.lookup(encoded) is not None
        t.tablet.close(DONE)
        assert sum(array.nbytes for a in arrays if (array := a()) is not None) < 1000
    finally:
        gc.enable()
    reads = (lambda: t.tablet.lookup(encoded), lambda: t.tablet.row([7]), lambda: t.tablet.prefix_lookup(keys),
             lambda: t.tablet.live_rows([0]))  # fmt: skip
    for read in reads:
        with pytest.raises(ClosedError, match="the test is over"):
            read()


def test_a_failed_last_sync_is_told_by_close() -> None:
    t = Opened(keyed=False, durability="os")
    t.write((1, "a"))
    t.storage.sync_fails = True
    with pytest.raises(StorageError):
        t.tablet.close(DONE)
    assert not any(handle._open for handle in t.storage._handles)


def test_lookups_beside_writes_see_whole_writes() -> None:
    t = Opened(keyed=True)
    t.write(*((k, "0") for k in range(50)))
    over = threading.Event()

    def write(_: int) -> None:
        for n in range(60):
            t.write(*((k, str(n)) for k in range(50)), *((1000 + n * 50 + k, "new") for k in range(50)))
        over.set()

    def read(_: int) -> None:
        while not over.is_set():
            assert len(set(t.get(*range(50)).values())) == 1
            _, live = t.tablet.live_rows([1])
            values = [v for _, rows in live for v in rows.column(0).to_pylist() if v != "new"]
            assert len(values) == 50 and len(set(values)) == 1

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(write, 0), pool.submit(read, 1), pool.submit(read, 2)]:
            future.result(WAIT_SECONDS)


def test_a_checkpoint_waits_for_readers_to_see_what_it_holds() -> None:
    t = Opened(keyed=True)
    t.write((1, "a"))
    synced = threading.Event()
    t.storage.before = lambda action, path: synced.set() if action == "sync" else None
    with ThreadPoolExecutor(2) as pool:
        with t.tablet._moment:
            writing = pool.submit(t.write, (1, "b"))
            assert synced.wait(WAIT_SECONDS)
            t.storage.before = None
            checkpoint = pool.submit(t.tablet.apply_note, MakeCheckpoint())
            assert t.tablet.high_watermark == 1 and t.tablet.view().checkpoint is None
            live = list(t.tablet.live_at(1, [0, 1]))
            assert [row["v"] for batch in live for row in batch.rows.to_pylist()] == ["a"]
        assert writing.result(WAIT_SECONDS) == (1, 3)
        checkpoint.result(WAIT_SECONDS)
    made = t.tablet.view().checkpoint
    assert made is not None and made.offset == 3
    assert [row["v"] for batch in t.tablet.live_at(3, [0, 1]) for row in batch.rows.to_pylist()] == ["b"]


def test_a_checkpoint_gives_back_the_memory_of_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(MemoryLogFile, "release", lambda file: given_back.append(file._path))
    t = Opened(keyed=True)
    t.write((1, "a"))
    assert not given_back
    t.tablet.apply_note(MakeCheckpoint())
    view = t.tablet.view()
    assert view.checkpoint is not None and view.checkpoint.offset == 1
    assert {segment.path for segment in view.segments} <= set(given_back)


def test_a_checkpoint_is_made_while_rows_change() -> None:
    t = Opened(keyed=True)
    t.write((1, "a"))
    vars(t.tablet)["_kv"].torn = True  # as while a change is applied
    t.tablet.apply_note(MakeCheckpoint())


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_trimmed_is_let_go_of_with_its_last_reader(keyed: bool, reopened: bool) -> None:
    """And not when the collector of reference cycles finds it: a server has that pass over what is in use for a while,
    for an hour, and files that are open keep their place on the disk."""
    t = Opened(keyed=keyed)
    gc.disable()
    try:
        for n in range(2):
            t.write((1, f"{n}"), (2, None))
            t.tablet.apply_note(Roll())
            t.write((3, f"{n}"))
            t.tablet.apply_note(MakeCheckpoint())
            if reopened:
                t.crash()
            held = t.tablet.view()
            start, end = held.log_start_offset, t.tablet.high_watermark
            list(t.tablet.scrub()), list(t.tablet.frames(start, end))
            files = [weakref.ref(file) for file in (*held.segments, held.checkpoint)]
            t.write((4, f"{n}"))
            t.tablet.apply_note(MakeCheckpoint())
            t.tablet.apply_note(Roll())
            t.tablet.apply_note(Trim(t.tablet.high_watermark))
            assert all(f() is not None for f in files) and list(held.records(start, end)), "who holds it reads it"
            del held
            assert [f() for f in files] == [None] * len(files)
    finally:
        gc.enable()


class LooksAt:
    """A lock that looks, whenever it is taken, whether another one is held."""

    def __init__(self, other: Any) -> None:
        self._other = other
        self.held: list[bool] = []

    def __enter__(self) -> None:
        self.held.append(self._other.locked())

    def __exit__(self, *_: object) -> None:
        return


@pytest.mark.parametrize("keyed", [False, True])
def test_nobody_sees_the_end_of_a_log_that_is_not_applied(keyed: bool) -> None:
    t = Opened(keyed=keyed)
    moment = LooksAt(t.tablet._log_lock)
    t.tablet._moment = moment  # type: ignore[assignment]
    t.write((1, "a"))
    assert moment.held == [True]


class ThenWrites:
    """A lock; when it is let go for the first time, something happens at once."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._then: Callable[[], object] | None = then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        then, self._then = self._then, None
        if then is not None:
            then()


def test_live_rows_are_those_of_the_watermark_that_comes_with_them() -> None:
    t = Opened(keyed=True)
    t.write((1, "a"))
    t.tablet._state_lock = ThenWrites(lambda: t.write((2, "b")))  # type: ignore[assignment]
    end, live = t.tablet.live_rows([0])
    assert (end, [o for offsets, _ in live for o in offsets.tolist()]) == (1, [0])
    assert t.tablet.high_watermark == 2


def test_a_view_of_an_empty_log_is_a_view() -> None:
    t = Opened(keyed=True)
    view = t.tablet.view()
    t.write((1, "a"))
    t.tablet.apply_note(MakeCheckpoint())
    assert list(t.tablet.live_at(0, [0], view)) == []


def test_what_queues_up_while_a_server_ends_is_committed_by_who_is_there() -> None:
    t = Opened(keyed=False)
    t.pool.shutdown()
    first, second = pending([(1, "a")]), pending([(2, "b")])
    submitted: list[bool] = []

    def queue_up(action: str, path: str) -> None:
        t.storage.before = None
        submitted.append(t.tablet.submit(second))

    t.storage.before = queue_up
    assert put(t.tablet, first) == (0, 1)
    assert submitted == [False] and second.result == (1, 2)
