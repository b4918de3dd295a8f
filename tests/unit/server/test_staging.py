"""Staged rows become part of a table once, whatever fails, and whoever asks again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest
from tests.unit.server.faulty_service import SCHEMA, Deployment
from tests.waiting import WAIT_SECONDS

from lakehead.client.batch_writer import encoded_write
from lakehead.client.row_routing import route
from lakehead.client.staging import JobBatch, Part, publish_together
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.errors import (
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    NullKeyError,
    OutcomeUnknownError,
    SchemaMismatchError,
    SequenceConflictError,
    TableNotFoundError,
    WrongTableKindError,
)
from lakehead.format.frame import WriterStamp
from lakehead.protocol import messages as m
from lakehead.server import staging
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.tablet import Tablet
from lakehead.types import WriteKind


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    made = Deployment(getattr(request, "param", Limits()))
    yield made
    made.storage.before = None
    made.service.close()


def table_of(*keys: int, v: str | None = "x") -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "v": v} for k in keys], schema=SCHEMA)


goes_along = False


@pytest.fixture(params=["staged", "held"], autouse=True)
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What a job writes waits on the server, or goes along when it is published."""
    monkeypatch.setitem(globals(), "goes_along", request.param == "held")
    return goes_along


only_staged = pytest.mark.parametrize("held", ["staged"], indirect=True)


def staged(handle: TableHandle, batch: JobBatch, *tasks: Sequence[pa.Table], kind: WriteKind = "append") -> list[Part]:
    parts = []
    for task in tasks:
        rows = handle.staging.held() if goes_along else handle.staging.rows(batch)
        for piece in task:
            rows.add(kind, piece)
        parts.append(rows.done())
    return parts


@only_staged
def test_only_what_is_published_counts(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("job", 0)
    staged(table, batch, [table_of(7)])  # a task that failed, or was slower than another try
    parts = staged(table, batch, [table_of(1, 2), table_of(3)], [], [table_of(4)])
    assert deployment.rows(table) == [] and deployment.staged_files()
    answer = table.staging.publish(batch, parts, lasting=False)
    assert (answer.rows, answer.before) == (4, False)
    assert deployment.rows(table) == [(k, "x") for k in (1, 2, 3, 4)]
    assert not deployment.staged_files()


def test_pieces_are_joined_in_their_order(deployment: Deployment) -> None:
    table = deployment.table(buckets=1)
    batch = JobBatch("job", 0)
    parts = staged(table, batch, *([table_of(k)] for k in range(20)))
    table.staging.publish(batch, parts[::-1], lasting=False)
    (frame,) = deployment.frames(table)
    assert [r["k"] for r in frame] == list(reversed(range(20)))


@pytest.mark.parametrize("rows_max", [1, 7, 64, 1 << 16])
def test_many_pieces_for_many_tablets_are_a_few_batches_of_each(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, rows_max: int
) -> None:
    monkeypatch.setattr(staging, "ROWS_MAX", rows_max)
    table = deployment.table(buckets=16)
    keys = [range(n, n + 3 * (n % 40 + 1), 3) for n in range(60)]
    batch = JobBatch("job", 0)
    parts = staged(table, batch, *([table_of(*some)] for some in keys))
    table.staging.publish(batch, parts, lasting=False)
    written = [[r["k"] for r in frame] for frame in deployment.frames(table)]
    tablets = deployment.service._tables.get(table.desc.table_id).tablets
    of_tablet = [[r["k"] for f in t.frames(0, t.high_watermark) for r in f.body.rows(SCHEMA).to_pylist()]
                 for t in tablets.values()]  # fmt: skip
    place = {k: n for n, of in enumerate(of_tablet) for k in of}
    assert [[k for some in keys for k in some if place[k] == n] for n in range(len(of_tablet))] == of_tablet
    assert len(tablets) == 16
    if rows_max == 1 << 16:
        assert len(written) == 16
    else:
        # A piece is not cut, and what fits is joined.
        assert all(len(frame) <= max(rows_max, 40) for frame in written)
        assert len(written) < sum(len(some) for some in keys)


@pytest.mark.parametrize("restart", ["no", "restart", "power cut"])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_batch_is_published_once(deployment: Deployment, lasting: bool, restart: str) -> None:
    table = deployment.table()
    for number in range(4):
        batch = JobBatch("query", number)
        table.staging.publish(batch, staged(table, batch, [table_of(number)]), lasting=lasting)
        if restart != "no":
            deployment.restart(power_cut=restart == "power cut")
            table = deployment.handle(table.desc)
        for again in range(number + 1):
            batch = JobBatch("query", again)
            answer = table.staging.publish(batch, staged(table, batch, [table_of(99)]), lasting=lasting)
            assert (answer.rows, answer.before) == (0, True)
    assert deployment.rows(table) == [(k, "x") for k in range(4)]
    assert not deployment.staged_files()


@pytest.mark.parametrize("restart", [False, True])
def test_a_job_that_lasted_may_say_that_it_does_not(deployment: Deployment, restart: bool) -> None:
    table = deployment.table(buckets=1)
    for number, lasting in enumerate((False, True, False, False, True)):
        batch = JobBatch("job", number)
        table.staging.publish(batch, staged(table, batch, [table_of(number)]), lasting=lasting)
        if restart:
            deployment.restart()
            table = deployment.handle(table.desc)
    assert deployment.rows(table) == [(n, "x") for n in range(5)]
    assert deployment.staged_files() == []


@pytest.mark.parametrize("again", [False, True], ids=["", "restart"])
def test_a_batch_that_is_there_is_known_by_what_it_was_made_of(deployment: Deployment, again: bool) -> None:
    """A query that goes on from an older checkpoint makes other batches under the same numbers."""

    def publish(number: int, planned: str, *rows: pa.Table) -> bool:
        table = deployment.table()
        batch = JobBatch("query", number, planned)
        return table.staging.publish(batch, staged(table, batch, list(rows)), lasting=True).before

    for number, planned in ((0, "a"), (1, ""), (2, "c"), (4, "e")):
        assert not publish(number, planned, table_of(number))
    if again:
        deployment.restart()
    for number, planned in ((0, "a"), (1, "b"), (2, "c"), (4, "e"), (4, "")):
        assert publish(number, planned, table_of(number))
    for number, planned in ((0, "b"), (2, "e"), (3, "d"), (4, "f")):
        with pytest.raises(SequenceConflictError, match=r"behind batch 4.* up to e$"):
            publish(number, planned, table_of(number, 7))
    assert not publish(5, "f", table_of(5))
    assert deployment.rows(deployment.table()) == [(k, "x") for k in (0, 1, 2, 4, 5)]
    assert not deployment.staged_files()


def test_a_batch_is_known_by_the_tables_that_got_it(deployment: Deployment) -> None:
    """A step may come to rows for other tables too, the second time."""
    one, two = deployment.table(name="one"), deployment.table(name="two")

    def publish(number: int, planned: str, *tables: TableHandle) -> bool:
        batch = JobBatch("query", number, planned)
        parts = [(t.staging, staged(t, batch, [table_of(number)])) for t in tables]
        return publish_together(batch, parts, lasting=True).before

    assert not publish(0, "a", one) and not publish(0, "a", two)
    assert not publish(1, "b", one)
    for tables in ((one,), (one, two), (two, one)):
        assert publish(1, "b", *tables)
        with pytest.raises(SequenceConflictError, match=r"part of a\.one already, up to b, and"):
            publish(1, "c", *tables)
    assert not publish(2, "c", one, two) and publish(1, "b", two, one)
    with pytest.raises(SequenceConflictError, match="already, without rows"):
        publish(1, "b", two)
    assert deployment.rows(two) == [(0, "x"), (2, "x")]


def test_jobs_are_apart(deployment: Deployment) -> None:
    one, two = deployment.table(name="one"), deployment.table(name="two")
    for table in (one, two):
        for job in ("a", "b"):
            batch = JobBatch(job, 0)
            table.staging.publish(batch, staged(table, batch, [table_of(1)]), lasting=True)
    assert deployment.rows(one) == deployment.rows(two) == [(1, "x"), (1, "x")]


class Steps:
    """Steps of a disk, of which so many are let through."""

    def __init__(self, cut: int) -> None:
        self.cut = cut
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, action: str, path: str) -> None:
        with self._lock:
            self.taken += 1
            if self.taken > self.cut:
                raise OSError(errno.EIO, "the power is cut", path)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("again", ["the same tasks", "other tasks"])
def test_it_lands_once_wherever_the_power_is_cut(keyed: bool, again: str) -> None:
    """At each step of the disk while a batch is published; then its job asks again, with what it staged or anew."""
    kind: WriteKind = "upsert" if keyed else "append"
    tasks = [[table_of(*range(0, 9)), table_of(*range(20, 29))], [table_of(*range(40, 55))]]
    for cut in range(200):
        deployment = Deployment(Limits())
        table = deployment.table(keyed=keyed)
        first = JobBatch("query", 3)
        table.staging.publish(first, staged(table, first, [table_of(100, 101)], kind=kind), lasting=True)
        batch = JobBatch("query", 4)
        parts = staged(table, batch, *tasks, kind=kind)
        steps = Steps(cut)
        deployment.storage.before = steps.take
        completed = None
        with contextlib.suppress(LakeheadError):
            completed = table.staging.publish(batch, parts, lasting=True)
        ended = steps.taken <= cut
        deployment.restart(power_cut=True)
        table = deployment.handle(table.desc)
        if again == "other tasks":
            parts = staged(table, batch, *tasks[::-1], kind=kind)
        table.staging.publish(batch, parts, lasting=True) if not ended else None
        keys = [*range(0, 9), *range(20, 29), *range(40, 55), 100, 101]
        assert deployment.rows(table) == [(k, "x") for k in keys], f"cut at step {cut}"
        deployment.service.close()
        if ended:
            assert completed is not None
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("power_cut", [True, False])
def test_tables_that_are_published_together_have_all_of_it_or_none(power_cut: bool) -> None:
    """Also when the step that made the rows comes to others the second time, as it reads what it wrote."""
    ended = False
    for cut in range(200):
        deployment = Deployment(Limits())
        log, keyed = deployment.table(name="log"), deployment.table(name="keyed", keyed=True)
        batch = JobBatch("query", 4)

        def publish(
            rows: pa.Table, batch: JobBatch = batch, log: TableHandle = log, keyed: TableHandle = keyed
        ) -> None:
            parts = staged(log, batch, [rows], [rows]), staged(keyed, batch, [rows], kind="upsert")
            together = [(log.staging, parts[0]), (keyed.staging, parts[1])]
            publish_together(batch, together, lasting=True)

        steps = Steps(cut)
        parts = [(log.staging, staged(log, batch, [table_of(*range(9))])),
                 (keyed.staging, staged(keyed, batch, [table_of(*range(9))], kind="upsert"))]  # fmt: skip
        deployment.storage.before = steps.take
        with contextlib.suppress(LakeheadError):
            publish_together(batch, parts, lasting=True)
            ended = True
        deployment.storage.before = None
        deployment.restart(power_cut=power_cut)
        log, keyed = deployment.handle(log.desc), deployment.handle(keyed.desc)
        publish(table_of(*range(50, 60)), log=log, keyed=keyed)
        there = deployment.rows(keyed)
        assert there in ([(k, "x") for k in range(9)], [(k, "x") for k in range(50, 60)]), f"cut at step {cut}"
        assert sorted(set(deployment.rows(log))) == there, f"cut at step {cut}"
        assert len(deployment.rows(log)) == (9 if there[0] == (0, "x") else 20)
        assert not deployment.staged_files()
        deployment.service.close()
        if ended:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("keyed", [False, True])
def test_the_disk_is_waited_for_by_all_tables_together(deployment: Deployment, keyed: bool) -> None:
    kind: WriteKind = "upsert" if keyed else "append"
    tables = [deployment.table(name=f"t{n}", keyed=keyed, buckets=1) for n in range(3)]
    syncs = threading.Barrier(3, timeout=WAIT_SECONDS)
    for batch in (JobBatch("job", 0), JobBatch("job", 1)):
        rows = table_of(2 * batch.number, 2 * batch.number + 1)
        parts = [(t.staging, staged(t, batch, [rows], kind=kind)) for t in tables]
        publish_together(batch, parts, lasting=False)
        deployment.storage.before = lambda action, path: meet(syncs, action, path)
    assert [deployment.rows(t) for t in tables] == [[(k, "x") for k in range(4)]] * 3


@pytest.mark.parametrize("keyed", [False, True])
def test_the_catalog_waits_for_the_disk_once_for_rows_that_come_along(
    deployment: Deployment, keyed: bool, held: bool
) -> None:
    """A power cut takes the note that they were written; whoever opens the folder then writes none twice."""
    kind: WriteKind = "upsert" if keyed else "append"
    table = deployment.table(keyed=keyed)
    waits: list[str] = []

    def note(action: str, path: str) -> None:
        if action == "write_atomic" and path.endswith("metadata.db"):
            waits.append(path)

    for number in range(3):
        batch = JobBatch("query", number)
        parts = staged(table, batch, [table_of(number, 10 + number)], kind=kind)
        deployment.storage.before = note
        assert table.staging.publish(batch, parts, lasting=True).rows == 2
        assert len(waits) == (number + 1) * (1 if held else 2)
    unfinished = deployment.service._metadata.unfinished_publications
    assert not unfinished(table.desc.table_id)
    rows = [(k, "x") for k in (0, 1, 2, 10, 11, 12)]
    for number in (2, 3):
        deployment.restart(power_cut=True)
        table, batch = deployment.handle(table.desc), JobBatch("query", number)
        assert deployment.rows(table) == rows
        again = table.staging.publish(batch, staged(table, batch, [table_of(20)], kind=kind), lasting=True)
        assert again.before == (number == 2)
        rows = sorted([*rows, (20, "x")]) if number == 3 else rows
        assert deployment.rows(table) == rows


def meet(others: threading.Barrier, action: str, path: str) -> None:
    if action == "sync" and path.endswith(".log"):
        others.wait()


def test_a_table_that_fails_holds_no_other_up(deployment: Deployment) -> None:
    """Each has what it can have, and the rest once it can, in the order of the calls."""
    tables = [deployment.table(name=f"t{n}", keyed=True, buckets=1) for n in range(3)]
    parts = []
    for t in tables:
        removed = staged(t, JobBatch("job"), [table_of(2).select(["k"])], kind="delete")
        rows = [table_of(1, 2)], [table_of(1, v="y")]
        parts.append((t.staging, [*staged(t, JobBatch("job"), *rows, kind="upsert"), *removed]))
    folder = deployment.service._tables.get(tables[1].desc.table_id).folder
    deployment.storage.before = lambda action, path: refuse(action, path, folder)
    with pytest.raises(OutcomeUnknownError, match="Do not write it under another name"):
        publish_together(JobBatch("job"), parts, lasting=False)
    there = [deployment.live(tables[n]) for n in (0, 2)]
    assert there == [[(1, "y")]] * 2
    deployment.storage.before = None
    deployment.service.maintain()
    assert [deployment.live(t) for t in tables] == [[(1, "y")]] * 3
    assert not deployment.staged_files()


def test_a_batch_names_each_table_once(deployment: Deployment) -> None:
    table, batch = deployment.table(), JobBatch("job")
    parts = staged(table, batch, [table_of(1)])
    with pytest.raises(InvalidRequestError, match="each table once"):
        publish_together(batch, [(table.staging, parts), (table.staging, parts)], lasting=False)
    assert deployment.rows(table) == []


def test_what_was_decided_is_there_for_the_first_reader(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("job", 0)
    parts = staged(table, batch, [table_of(*range(30))])

    def before(action: str, path: str) -> None:
        if action == "append" and path.endswith(".log"):
            raise OSError(errno.ENOSPC, "no room", path)

    deployment.storage.before = before
    with pytest.raises(LakeheadError):
        table.staging.publish(batch, parts, lasting=False)
    deployment.storage.before = None
    deployment.restart()
    assert len(deployment.rows(table)) == 30
    assert not deployment.staged_files()


def test_what_was_decided_is_carried_out_once_there_is_room(deployment: Deployment) -> None:
    """Also when its job is gone: who writes the same rows under another name must be told that they come."""
    table = deployment.table()
    batch = JobBatch("job", 0)
    parts = staged(table, batch, [table_of(*range(30))])
    deployment.storage.before = lambda action, path: refuse(action, path, "bucket-1")
    with pytest.raises(OutcomeUnknownError, match="Do not write it under another name"):
        table.staging.publish(batch, parts, lasting=False)
    deployment.service.maintain()
    assert 0 < len(deployment.rows(table)) < 30
    deployment.storage.before = None
    deployment.service.maintain()
    assert deployment.rows(table) == [(k, "x") for k in range(30)]
    assert not deployment.staged_files()


def test_other_attempts_at_a_decided_batch_change_nothing(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("query", 0)
    parts = staged(table, batch, [table_of(1)])
    deployment.storage.before = lambda action, path: refuse(action, path, "bucket")
    with pytest.raises(LakeheadError):
        table.staging.publish(batch, parts, lasting=True)
    deployment.storage.before = None
    answer = table.staging.publish(batch, staged(table, batch, [table_of(2)]), lasting=True)
    assert answer.before
    assert deployment.rows(table) == [(1, "x")]


def refuse(action: str, path: str, part: str) -> None:
    if action == "append" and part in path:
        raise OSError(errno.ENOSPC, "no room", path)


def test_upserts_deletes_and_partial_rows(deployment: Deployment) -> None:
    table = deployment.table(keyed=True)
    for number, (kind, rows) in enumerate(
        [
            ("upsert", table_of(1, 2, 3)),
            ("upsert", table_of(2, v="new")),
            ("delete", table_of(3).select(["k"])),
            ("upsert", table_of(4, 1).select(["k"])),
        ]
    ):
        batch = JobBatch("query", number)
        table.staging.publish(batch, staged(table, batch, [rows], kind=kind), lasting=True)
    live = {
        r["k"]: r["v"]
        for tablet in deployment.service._tables.get(table.desc.table_id).tablets.values()
        for live in tablet.live_at(tablet.high_watermark, [0, 1])
        for r in live.rows.to_pylist()
    }
    assert live == {1: "x", 2: "new", 4: None}


@pytest.mark.parametrize(
    ("kind", "rows", "error"),
    [
        ("upsert", table_of(1), WrongTableKindError),
        ("append", table_of(1).select(["k"]), SchemaMismatchError),
        (
            "append",
            pa.table({"k": [None], "v": ["x"]}, pa.schema([("k", pa.int64()), ("v", pa.string())])),
            NullKeyError,
        ),
    ],
)
def test_what_may_not_be_written_is_not_kept(
    deployment: Deployment, kind: WriteKind, rows: pa.Table, error: type[LakeheadError]
) -> None:
    table = deployment.table(buckets=1)
    batch = JobBatch("job")
    with pytest.raises(error):
        table.staging.publish(batch, staged(table, batch, [rows], kind=kind), lasting=False)
    assert not deployment.staged_files() and not deployment.rows(table)


@only_staged
def test_pieces_that_are_not_there(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("job")
    (part,) = staged(table, batch, [table_of(1)])
    table.staging.discard(batch)
    with pytest.raises(InvalidRequestError, match="Run the job again"):
        table.staging.publish(batch, [part], lasting=False)
    assert deployment.rows(table) == []


@only_staged
def test_a_damaged_piece_is_not_published(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("job")
    parts = staged(table, batch, [table_of(*range(50))])
    (path,) = deployment.staged_files()
    for position in (0, 20, 40, -70):
        deployment.storage.flip_bit(path, position)
        with pytest.raises(LakeheadError):
            table.staging.publish(batch, parts, lasting=False)
        deployment.storage.flip_bit(path, position)
        assert deployment.rows(table) == []
    table.staging.publish(batch, parts, lasting=False)
    assert len(deployment.rows(table)) == 50


@only_staged
def test_discarded_and_dropped_rows_leave_nothing(deployment: Deployment) -> None:
    table = deployment.table()
    staged(table, JobBatch("a"), [table_of(1)])
    table.staging.discard(JobBatch("a"))
    assert not deployment.staged_files()
    staged(table, JobBatch("b"), [table_of(1)])
    LocalEndpoint(deployment.service).call(m.DropTable(database="a", table="t", purge=True))
    assert not deployment.staged_files()
    with pytest.raises(TableNotFoundError):
        staged(table, JobBatch("b"), [table_of(1)])


@only_staged
@pytest.mark.parametrize("restart", [False, True])
def test_what_nobody_publishes_is_removed_in_time(deployment: Deployment, restart: bool) -> None:
    table = deployment.table()
    staged(table, JobBatch("a"), [table_of(1)])
    if restart:
        deployment.restart()
        deployment.rows(table)
    deployment.service.maintain()
    assert deployment.staged_files()
    deployment.clock.ahead += staging.KEPT_SECONDS + 1
    deployment.service.maintain()
    assert not deployment.staged_files()


@only_staged
@pytest.mark.parametrize("deployment", [dataclasses.replace(Limits(), staged_bytes_max=4000)], indirect=True)
def test_staged_bytes_are_bounded(deployment: Deployment) -> None:
    table = deployment.table(buckets=1)
    parts = staged(table, JobBatch("a"), [table_of(1)])
    with pytest.raises(LimitExceededError, match="staged_bytes_max"):
        for n in range(100):
            staged(table, JobBatch("b"), [table_of(n)])
    table.staging.discard(JobBatch("b"))
    table.staging.publish(JobBatch("a"), parts, lasting=False)
    staged(table, JobBatch("c"), [table_of(1)])


@pytest.mark.parametrize("deployment", [dataclasses.replace(Limits(), named_writers_max=2)], indirect=True)
def test_queries_are_bounded_and_jobs_forgotten(deployment: Deployment) -> None:
    table = deployment.table()

    def publish(job: str, lasting: bool) -> None:
        batch = JobBatch(job)
        table.staging.publish(batch, staged(table, batch, [table_of(1)]), lasting=lasting)

    publish("q1", True)
    publish("q2", True)
    with pytest.raises(LimitExceededError, match="checkpoint"):
        publish("q3", True)
    for n in range(5):
        publish(f"job{n}", False)
    deployment.clock.ahead += staging.KEPT_SECONDS + 1
    publish("last", False)
    known = deployment.service._metadata._rows("select job from publications order by job")
    assert [job for (job,) in known] == ["last", "q1", "q2"]


def test_nobody_writes_in_the_name_of_a_job(deployment: Deployment) -> None:
    """Else what the job publishes next would be taken for what is there already."""
    table = deployment.table(buckets=1)
    first = JobBatch("query", 0)
    table.staging.publish(first, staged(table, first, [table_of(1)]), lasting=True)
    rows = table_of(7).to_batches()[0]
    (writer,) = {f.body.stamp.writer_id for t in tablets_of(deployment, table) for f in t.frames(0, 1)}
    for epoch in (0, 1):
        stamp = WriterStamp(writer, 9, epoch=epoch)
        write, bodies = encoded_write(table.desc, "append", rows, list(route(table.desc, rows)), lambda _, s=stamp: s)
        with pytest.raises(InvalidRequestError, match="jobs that publish"):
            LocalEndpoint(deployment.service).call(write, bodies)
    with pytest.raises(InvalidRequestError, match="jobs that publish"):
        LocalEndpoint(deployment.service).call(m.OpenWriter(table_id=table.desc.table_id, writer_id=writer))
    second = JobBatch("query", 1)
    assert not table.staging.publish(second, staged(table, second, [table_of(2)]), lasting=True).before
    assert deployment.rows(table) == [(1, "x"), (2, "x")]


def tablets_of(deployment: Deployment, handle: TableHandle) -> list[Tablet]:
    return list(deployment.service._tables.get(handle.desc.table_id).tablets.values())


def test_many_publish_the_same_batch_at_once(deployment: Deployment) -> None:
    table = deployment.table()
    batch = JobBatch("query", 0)
    attempts = [staged(table, batch, [table_of(*range(50))]) for _ in range(8)]
    answers: Counter[bool] = Counter()

    def publish(parts: list[Part]) -> None:
        answers[table.staging.publish(batch, parts, lasting=True).before] += 1

    threads = [threading.Thread(target=publish, args=(parts,)) for parts in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {False: 1, True: 7}
    assert len(deployment.rows(table)) == 50
