"""A backup that is made while jobs publish is of one moment for all they publish to: whatever came between its steps,
what is restored goes on from there, with the batch that comes next or with those it has, and each is there once."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api import backup as backups
from lakehead.api import backup_files
from lakehead.api.backup import back_up, restore
from lakehead.api.table import handle_of
from lakehead.client.remote_log import RemoteLog
from lakehead.client.staging import JobBatch, publish_together
from lakehead.errors import LakeheadError, OutcomeUnknownError, StorageError
from lakehead.server.staging import Staging
from lakehead.server.writes import Writes

SCHEMA = pa.schema([pa.field("day", pa.string(), False), pa.field("k", pa.int64(), False), ("v", pa.int64())])
TABLES = ("log", "keyed", "lake", "keyed_lake")
ABSENT = 1000


def batch_of(number: int, seed: int) -> tuple[dict[str, list[tuple[str, int, int]]], bool]:
    """What a batch has for each table, and whether it overwrites the partitions of its rows. Of keyed tables, keys from
    ``ABSENT`` on are deleted, and never were there."""
    rng = random.Random(f"{seed}-{number}")
    days = rng.choice(["a", "b", "ab"])
    found = {}
    for name in TABLES:
        keys = (
            [number * 10 + n for n in range(rng.choice([1, 3]))] if "keyed" not in name else range(rng.choice([1, 4]))
        )
        found[name] = [(day, k, 0 if rng.random() < 0.3 else number) for day in days for k in keys]
    return found, rng.random() < 0.3


class World:
    """Tables, a job that publishes to all of them, or to some, and one that publishes to the first alone."""

    def __init__(self, con: lh.Connection, seed: int, published: int = 0, tables: tuple[str, ...] = TABLES) -> None:
        self.tables = tables
        self.con = con
        self.seed = seed
        self.published = published
        self.staged = False

    def create(self) -> None:
        for name in TABLES:
            keys = {"primary_key": ["day", "k"]} if "keyed" in name else {}
            lake = {"lake": "iceberg", "hot_retention": "0s"} if "lake" in name else {}
            table = self.con.create_table(name, SCHEMA, partition_by="day", segment_bytes=4000, **keys, **lake)  # type: ignore[arg-type]
            (table.upsert if keys else table.append)([{"day": "other", "k": 0, "v": 0}])

    def publish(self, number: int | None = None, seed: int | None = None) -> None:
        number = self.published + 1 if number is None else number
        found, overwrite = batch_of(number, self.seed if seed is None else seed)
        batch, parts = JobBatch("job", number), []
        for name in self.tables:
            of = found[name]
            staging = handle_of(self.con.table(name)).staging
            held: Any = staging.rows(batch) if self.staged else staging.held()
            columns: list[Any] = [list(column) for column in zip(*of, strict=True)]
            rows = pa.table(columns, schema=SCHEMA)
            if "keyed" in name and of[0][1] >= ABSENT:
                held.add("delete", rows.select(["day", "k"]))
            else:
                held.add("upsert" if "keyed" in name else "append", rows)
            parts.append((staging, [held.done()]))
        self.published = max(self.published, number)
        publish_together(batch, parts, lasting=True, overwrite=[] if overwrite else None)

    def other(self) -> None:
        """A job of its own."""
        staging = handle_of(self.con.table("log")).staging
        held = staging.held()
        held.add("append", pa.table([["other"], [0], [0]], schema=SCHEMA))
        staging.publish(JobBatch(f"other {random.random()}"), [held], lasting=False)

    def trim(self) -> None:
        for name in TABLES:
            if "lake" in name:
                self.con.tier(name)
        self.con._server.service.maintain()  # type: ignore[attr-defined]

    def rows(self, name: str, tier: str = "union") -> list[tuple[str, int, int]]:
        found = self.con.table(name).scan(tier=tier).to_arrow().to_pylist()  # type: ignore[arg-type]
        return sorted((r["day"], r["k"], r["v"]) for r in found if r["day"] != "other")


def after(seeds: list[int], name: str) -> list[tuple[str, int, int]]:
    """What a table has once batches of these seeds were published, of which the first has number 1."""
    log: list[tuple[str, int, int]] = []
    for number, seed in enumerate(seeds, 1):
        batch, overwrite = batch_of(number, seed)
        rows = batch[name]
        if overwrite:
            days = {day for day, *_ in rows}
            log = [row for row in log if row[0] not in days]
        if "keyed" in name:
            keys = {row[:2] for row in rows}
            log = [row for row in log if row[:2] not in keys]
        log += [row for row in rows if "keyed" not in name or row[1] < ABSENT]
    return sorted(log)


def nothing() -> None:
    pass


def restored_at(world: World, folder: Path) -> int:
    """After how many batches all tables are."""
    found = {name: world.rows(name) for name in world.tables}  # which carries out what was decided
    rows = published_in(folder)
    assert len(set(rows)) <= 1 and len(rows) in (0, len(world.tables))
    (count, begun) = rows[0] if rows else (0, None)
    assert begun is None
    assert found == {name: after([world.seed] * count, name) for name in world.tables}
    return int(count)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What is done before the steps of a backup, one after the other: before it asks for the ends of a log, opens its
    files, and copies it."""
    due: list[Callable[[], object]] = []
    tablets, copy, open_all = RemoteLog.tablets, backups._copy_tablet, backup_files.OpenFiles.open_all
    busy = False

    def step() -> None:
        nonlocal busy
        if due and not busy:
            busy = True
            due.pop(0)()
            busy = False

    def ends(self: RemoteLog, **options: Any) -> Any:
        step()
        return tablets(self, **options)

    def copied(*args: Any) -> Any:
        step()
        return copy(*args)

    def opened(*args: Any) -> None:
        step()
        open_all(*args)

    monkeypatch.setattr(RemoteLog, "tablets", ends)
    monkeypatch.setattr(backup_files.OpenFiles, "open_all", opened)
    monkeypatch.setattr(backups, "_copy_tablet", copied)
    yield due
    monkeypatch.setattr(RemoteLog, "tablets", tablets)


def check(tmp_path: Path, backup: str, floor: int, was: World) -> int:
    """Go on with a backup in two ways: with batches that it may have, and with the one that comes next. After how many
    it is."""
    seed, most = was.seed, was.published
    for name in ("again", "other"):
        folder = tmp_path / f"{backup}-{name}"
        restore(str(tmp_path / backup), str(folder))
        with lh.connect(folder) as con:
            world = World(con, seed, tables=was.tables)
            count = restored_at(world, folder)
            assert floor <= count <= most
            first, seeds = (max(floor - 1, 1), seed) if name == "again" else (count + 1, seed + 1000)
            for number in range(first, most + 3):
                world.publish(number, seeds)
            told = [seed] * count + [seeds] * (most + 2 - count)
            for _ in range(2):
                for table in world.tables:
                    assert world.rows(table) == after(told, table), (table, count)
                world.trim()
            for table in world.tables:
                assert "lake" not in table or world.rows(table, "lake") == after(told, table)
    return count


@pytest.mark.parametrize("seed", range(3))
def test_it_is_of_one_moment(
    tmp_path: Path, between: list[Callable[[], object]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(backup_files, "raise_descriptors", lambda: 0)
    floors, mosts = [], []
    with lh.connect(tmp_path / "a") as con:
        world = World(con, seed)
        world.create()
        for n in range(2):
            for _ in range(rng.randrange(5)):
                world.staged = rng.random() < 0.5
                rng.choice([world.publish, world.publish, world.trim, world.other])()
            does = [world.publish, world.publish, world.publish, world.other, world.trim]
            between[:] = [rng.choice(does) if rng.random() < 0.3 else nothing for _ in range(40)]
            floors.append(world.published)
            back_up(con, str(tmp_path / "a"), str(tmp_path / f"backup{n}"))
            mosts.append(world.published)
            between.clear()
        for name in TABLES:
            assert world.rows(name) == after([seed] * world.published, name)
    for n in range(2):
        world.published = mosts[n]
        check(tmp_path, f"backup{n}", floors[n], world)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("failing", range(4))
def test_a_batch_that_is_there_in_part_is_whole_where_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool, failing: int
) -> None:
    seed = 3
    with lh.connect(tmp_path / "a") as con:
        world = World(con, seed)
        world.create()
        world.staged = staged
        for _ in range(3):
            world.publish()
        publish, replace, left = Writes.publish, Writes.replace, failing

        def some(self: Writes, batches: Any) -> list[LakeheadError | None]:
            nonlocal left
            done: list[LakeheadError | None] = []
            for batch in batches:
                left -= 1
                done += publish(self, [batch]) if left >= 0 else [StorageError("the disk is full", path="p")]
            return done

        def none(self: Writes, *args: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise StorageError("the disk is full", path="p")
            replace(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Writes, "publish", some)
            patch.setattr(Writes, "replace", none)
            with pytest.raises(OutcomeUnknownError):
                world.publish()
            back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        con._server.service.maintain()  # type: ignore[attr-defined]
        for name in TABLES:
            assert world.rows(name) == after([seed] * 4, name)
    assert check(tmp_path, "backup", 4, world) == 4


@pytest.mark.parametrize(
    ("tables", "steps"),
    [
        *((TABLES, n) for n in range(1, 9)),
        *((("log",), n) for n in (1, 3, 6)),
        *((("keyed_lake",), n) for n in (2, 4, 7)),
    ],
)
def test_a_table_that_a_job_takes_up_meanwhile_is_of_its_moment(
    tmp_path: Path, between: list[Callable[[], object]], tables: tuple[str, ...], steps: int
) -> None:
    """When the tables are listed nobody publishes to any of them."""
    with lh.connect(tmp_path / "a") as con:
        world = World(con, 1, tables=tables)
        world.create()
        between += [*[nothing] * steps, world.publish, world.publish]
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        between.clear()
    check(tmp_path, "backup", 0, world)


def publish_to(con: lh.Connection, number: int, **tables: tuple[str, pa.Table]) -> None:
    """A batch of one job with these rows."""
    parts = []
    for name, (kind, rows) in tables.items():
        staging = handle_of(con.table(name)).staging
        held = staging.held()
        held.add(kind, rows)  # type: ignore[arg-type]
        parts.append((staging, [held]))
    publish_together(JobBatch("job", number), parts, lasting=True)


def trim(con: lh.Connection, name: str) -> None:
    """What is in the lake, from the log."""
    if handle_of(con.table(name)).desc.lake:
        con.tier(name)
        for _ in range(2):
            con._server.service.maintain()  # type: ignore[attr-defined]


def published_in(folder: Path) -> list[tuple[int, int | None]]:
    """Of the job in a folder that nobody serves, by table: the last batch, and the one that was decided."""
    with closing(sqlite3.connect(folder / "metadata.db")) as db:
        return db.execute("select batch, begun from publications where job = 'job'").fetchall()


@pytest.mark.parametrize("steps", range(2, 11, 2))
def test_what_comes_next_is_not_taken_for_a_batch_that_changed_nothing(
    tmp_path: Path, between: list[Callable[[], object]], steps: int
) -> None:
    def publish(con: lh.Connection, number: int, k: int) -> None:
        rows = pa.table([["a"], [k], [number]], schema=SCHEMA)
        publish_to(con, number, keyed=("delete", rows.select(["day", "k"])) if k >= ABSENT else ("upsert", rows))

    with lh.connect(tmp_path / "a") as con:
        World(con, 0).create()
        publish(con, 1, 1)
        between += [*[nothing] * steps, lambda: publish(con, 2, ABSENT)]
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        assert not between
    restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
    ((known, _),) = published_in(tmp_path / "restored")
    with lh.connect(tmp_path / "restored") as con:
        for number in (2, 3):
            publish(con, number, number)
        expected = [(k, k) for k in (1, 2, 3) if k != 2 or known == 1]
        assert [row[1:] for row in World(con, 0).rows("keyed") if row[0] == "a"] == expected


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_checkpoint_that_is_taken_meanwhile_knows_no_batch_that_the_catalog_does_not(
    tmp_path: Path,
    between: list[Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
    trimmed: bool,
    opened: bool,
    steps: int,
) -> None:
    """At the very offset of the moment, of a batch that changed nothing."""
    schema = SCHEMA.remove(2)
    if not opened:
        monkeypatch.setattr(backup_files, "raise_descriptors", lambda: 0)
    with lh.connect(tmp_path / "a") as con:
        lake = {"lake": "iceberg", "hot_retention": "0s"} if trimmed else {}
        con.create_table("t", SCHEMA, primary_key=["day", "k"], segment_bytes=4000, **lake)  # type: ignore[arg-type]
        one = pa.table([["a"], [1], [1]], schema=SCHEMA)
        publish_to(con, 1, t=("upsert", one))
        trim(con, "t")

        def go_on() -> None:
            publish_to(con, 2, t=("delete", pa.table([["a"], [ABSENT]], schema=schema)))
            service = con._server.service  # type: ignore[attr-defined]
            for tablet in service._tables.get(handle_of(con.table("t")).desc.table_id).tablets.values():
                tablet._checkpoint()
            service.maintain()

        between += [*[nothing] * steps, go_on]
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        assert not between
    restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
    (known,) = {batch for batch, _ in published_in(tmp_path / "restored")}
    with lh.connect(tmp_path / "restored") as con:
        for number in (2, 3):
            publish_to(con, number, t=("upsert", pa.table([["a"], [number], [1]], schema=SCHEMA)))
        found = [row["k"] for row in con.table("t").scan().to_arrow().sort_by("k").to_pylist()]
        assert found == ([1, 2, 3] if known == 1 else [1, 3])


def test_a_batch_after_one_that_was_decided_is_not_there(
    tmp_path: Path, between: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment is in the middle of a batch; the next one changes nothing before the log is copied."""
    schema = SCHEMA.remove(2)
    carry_out, goes_on, decided = Staging._carry_out, threading.Event(), threading.Event()

    def slow(self: Staging, begun: Any) -> None:
        if any(of.publication.begun == 2 for of in begun):
            decided.set()
            assert goes_on.wait(WAIT_SECONDS)
        carry_out(self, begun)

    def nothing_of(k: int) -> tuple[str, pa.Table]:
        return "delete", pa.table([["a"], [k]], schema=schema)

    def one(k: int) -> tuple[str, pa.Table]:
        return "upsert", pa.table([["a"], [k], [k]], schema=SCHEMA)

    with lh.connect(tmp_path / "a") as con:
        for name in ("t", "u"):
            con.create_table(name, SCHEMA, primary_key=["day", "k"])
        publish_to(con, 1, t=one(1), u=one(1))
        monkeypatch.setattr(Staging, "_carry_out", slow)
        second = threading.Thread(target=lambda: publish_to(con, 2, t=nothing_of(ABSENT), u=one(2)))
        second.start()
        assert decided.wait(WAIT_SECONDS)

        def go_on() -> None:
            goes_on.set()
            second.join()
            publish_to(con, 3, t=nothing_of(ABSENT + 1), u=one(3))

        between += [*[nothing] * 6, go_on]
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
        assert not between
    restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
    assert set(published_in(tmp_path / "restored")) == {(1, 2)}
    with lh.connect(tmp_path / "restored") as con:
        for name in ("t", "u"):
            con.table(name).scan().to_arrow()
        publish_to(con, 3, t=one(5), u=one(5))
        found = {name: sorted(con.table(name).scan().to_arrow()["k"].to_pylist()) for name in ("t", "u")}
        assert found == {"t": [1, 5], "u": [1, 2, 5]}


def test_what_is_trimmed_and_carried_out_while_other_logs_are_copied_is_in_it(
    tmp_path: Path, between: list[Callable[[], object]]
) -> None:
    """Whatever comes after the moment takes nothing away: the first attempt succeeds."""
    with lh.connect(tmp_path / "a") as con:
        world = World(con, 5)
        world.create()
        world.staged = True
        for _ in range(3):
            world.publish()
        attempts: list[str] = []

        def work() -> None:
            world.publish()
            world.trim()

        tablets = sum(len(handle_of(con.table(name)).log.tablets()) for name in TABLES)
        between += [*[nothing] * (2 * len(TABLES) + tablets), *[work] * 10]
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"), attempts.append)
        between.clear()
    assert len(attempts) == len(TABLES)
    assert check(tmp_path, "backup", 3, world) == 3


def test_tablets_at_rest_keep_no_backup_from_ending(tmp_path: Path, between: list[Callable[[], object]]) -> None:
    """Their checkpoints are where their logs end, while jobs go on with others of their tables."""
    with lh.connect(tmp_path / "a") as con:
        con.create_table("still", SCHEMA, primary_key=["day", "k"], lake="iceberg", hot_retention="0s")
        con.create_table("busy", SCHEMA)
        one = pa.table([["a"], [1], [1]], schema=SCHEMA)
        publish_to(con, 1, still=("upsert", one), busy=("append", one))
        trim(con, "still")
        numbers = itertools.count(2)
        between += [*[nothing] * 4, *[lambda: publish_to(con, next(numbers), busy=("append", one))] * 4]
        attempts: list[str] = []
        back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"), attempts.append)
        between.clear()
    assert len(attempts) == 2
    restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
    with lh.connect(tmp_path / "restored") as con:
        assert con.table("busy").scan().count() == 1 and con.table("still").scan().count() == 1


def test_no_more_files_are_opened_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, refused = os.open, []

    def few(path: Any, flags: int, *mode: int) -> int:
        if str(path).startswith(f"{tmp_path}/a/") and str(path).endswith(".log") and flags == os.O_RDONLY:
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, *mode)

    with lh.connect(tmp_path / "a") as con:
        world = World(con, 5)
        world.create()
        for _ in range(3):
            world.publish()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", few)
            back_up(con, str(tmp_path / "a"), str(tmp_path / "backup"))
    assert len(refused) == 1, "it does not try again"
    assert check(tmp_path, "backup", 3, world) == 3
