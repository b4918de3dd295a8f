"""Compaction, in Iceberg and in the model: the same rows in fewer files, whatever comes between."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.types import LongType
from tests.lakes import is_exact
from tests.unit.tiering.test_commit import at_step

from lakehead.errors import CommitConflictError, CommitError, LakeStateError, TieringFencedError, UnavailableError
from lakehead.lake.lake_table import LakeFile
from lakehead.lake.marks import mark_of
from lakehead.testing.lake import Fault
from lakehead.tiering.compaction import CompactionResult, compact
from lakehead.tiering.compaction_plan import Rewrite, plan_rewrites
from lakehead.types import TabletKey

KIB = 1 << 10
MIB = 1 << 20


# ---- the plan -------------------------------------------------------------------------------------------------------


def made(*sizes: int, bucket: int = 0, deletes: int = 0) -> list[LakeFile]:
    """Files in offset order, of 100 rows each."""
    tablet = TabletKey("", bucket)
    return [
        LakeFile(f"{bucket}/{i}", size, 100, tablet, (100 * i, 100 * i + 99), 0, ("d",) * deletes)
        for i, size in enumerate(sizes)
    ]


def planned(files: list[LakeFile], *, live: int = 100, bytes_max: int = 1 << 40) -> list[list[int]]:
    """Which files are joined, by place in their tablet."""
    rewrites, _ = plan_rewrites(files, lambda f: live, target_bytes=128 * MIB, bytes_max=bytes_max)
    return [[int(f.path.split("/")[1]) for f in r.files] for r in rewrites]


def test_small_neighbours_are_joined() -> None:
    assert planned(made(*[10 * KIB] * 4)) == [[0, 1, 2, 3]]
    assert planned(made(*[10 * KIB] * 3)) == []
    assert planned([]) == []
    two = [*made(*[KIB] * 4), *made(*[KIB] * 5, bucket=1)]
    assert sorted(map(len, planned(two))) == [4, 5], "of one tablet only"


def test_what_is_large_is_left_and_what_is_larger_than_all_newer_ones_waits() -> None:
    assert planned(made(64 * MIB, *[KIB] * 4)) == [[1, 2, 3, 4]]
    assert planned(made(63 * MIB, *[10 * MIB] * 4)) == [[1, 2, 3, 4]]
    assert planned(made(40 * MIB, *[10 * MIB] * 4)) == [[0, 1, 2, 3, 4]]
    assert planned(made(*[40 * MIB] * 4)) == [], "three are all that a file holds"
    assert planned(made(*[30 * MIB] * 9)) == [[5, 6, 7, 8], [1, 2, 3, 4]]


def test_many_rounds_write_a_row_a_few_times() -> None:
    files: list[int] = []
    written = 0
    for _ in range(3000):
        files.append(100 * KIB)
        for group in planned(made(*files)):
            size = sum(files[i] for i in group)
            files[group[0] : group[-1] + 1] = [size]
            written += size
    assert len(files) < 40 and written < 10 * 3000 * 100 * KIB


def test_worn_files_are_cleared() -> None:
    assert planned(made(100 * MIB, deletes=1), live=81) == []
    assert planned(made(100 * MIB, deletes=1), live=80) == [[0]]
    assert planned(made(MIB, deletes=8)) == [] and planned(made(MIB, deletes=9)) == [[0]]
    assert planned(made(100 * MIB, deletes=58)) == [] and planned(made(100 * MIB, deletes=59)) == [[0]]
    assert planned(made(*[KIB] * 4, deletes=9)) == [[0, 1, 2, 3]]


def test_a_turn_is_bounded() -> None:
    files = [*made(*[10 * MIB] * 4), *made(*[MIB] * 6, bucket=1)]
    for bytes_max, expected in [(1, 1), (45 * MIB, 1), (46 * MIB, 2)]:
        rewrites, more = plan_rewrites(files, lambda f: 100, target_bytes=128 * MIB, bytes_max=bytes_max)
        assert (len(rewrites), more) == (expected, expected == 1)
        assert isinstance(rewrites[0], Rewrite) and rewrites[0].tablet.bucket == 1, "many files first"


@pytest.mark.parametrize("what", [{"tablet": None}, {"offsets": None}, {"null_offsets": None}, {"null_offsets": 1}])
def test_what_is_not_ours_is_left(what: Any) -> None:
    files = made(*[KIB] * 9)
    files[4] = dataclasses.replace(files[4], **what)
    assert 4 not in {i for group in planned(files) for i in group}


def test_offsets_that_overlap_are_not_joined() -> None:
    files = [dataclasses.replace(f, offsets=(0, 1000)) for f in made(*[KIB] * 9)]
    assert planned(files) == []


# ---- the commit -----------------------------------------------------------------------------------------------------


def history(lake: Any, rounds: int = 6) -> None:
    for n in range(rounds):
        lake.write(*range(3 * n, 3 * n + 3), v=n)
        if lake.desc.keyed:
            lake.write(n // 2, v=n + 1)
            if n % 3 == 2:
                lake.delete(n)
        lake.round()


def run(lake: Any, **options: Any) -> CompactionResult:
    return compact(lake.table, lake.desc, lake.env, **options)


def test_the_same_rows_in_fewer_files(any_lake: Any) -> None:
    history(any_lake)
    before = any_lake.table.load()
    found = run(any_lake)
    after = any_lake.table.load()
    assert is_exact(any_lake) and found.snapshot_id == after.current_id
    (file,) = any_lake.table.plan(after)
    assert file.delete_files == () and file.record_count == found.rows == len(any_lake.values())
    assert (found.files_before, found.files_after, found.more) == (6, 1, False)
    mark, old = mark_of(after), mark_of(before)
    assert mark is not None and old is not None
    assert (mark.offsets, mark.rows, mark.epoch) == (old.offsets, old.rows, old.epoch)
    assert any_lake.stray_files() == set()
    assert run(any_lake).snapshot_id is None, "there is nothing left to do"
    any_lake.write(1, v=9)
    any_lake.round()
    assert is_exact(any_lake)


def test_older_snapshots_hold_what_they_held(any_lake: Any) -> None:
    history(any_lake)
    version = any_lake.table.load()
    counts = {i: sum(any_lake.table.census(version, snapshot_id=i).rows.values()) for i in version.snapshots}
    run(any_lake)
    version = any_lake.table.load()
    assert {i: sum(any_lake.table.census(version, snapshot_id=i).rows.values()) for i in counts} == counts


def test_a_lake_without_rounds(any_lake: Any) -> None:
    assert run(any_lake) == CompactionResult(None, 0, 0, 0, False)


@pytest.mark.parametrize("step", ["write data", "commit"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_what_rounds_delete_meanwhile_is_deleted_where_it_stands_now(any_keyed: Any, step: str, rounds: int) -> None:
    history(any_keyed)

    def overtake() -> None:
        for n in range(rounds):
            any_keyed.delete(n, 4 + n)
            any_keyed.write(8, 100 + n, v=77)
            any_keyed.round()

    at_step(any_keyed, step, overtake)
    found = run(any_keyed)
    version = any_keyed.table.load()
    assert found.snapshot_id == version.current_id and is_exact(any_keyed) and any_keyed.stray_files() == set()
    files = any_keyed.table.plan(version)
    assert (found.files_before, len(files)) == (6, 1 + rounds) and files[0].delete_files
    any_keyed.write(2, 100, v=78)
    any_keyed.round()
    run(any_keyed)
    assert is_exact(any_keyed)


@pytest.mark.parametrize("step", ["write data", "commit"])
def test_a_lake_that_is_rolled_back_meanwhile_is_left(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    before = any_keyed.snapshot_ids()[-3]
    at_step(any_keyed, step, lambda: any_keyed.roll_back(before))
    with pytest.raises((CommitConflictError, LakeStateError)):
        run(any_keyed)
    assert any_keyed.table.load().current_id == before


@pytest.mark.parametrize("step", ["write data", "commit"])
def test_files_that_are_expired_meanwhile_are_a_conflict(any_keyed: Any, step: str) -> None:
    """Another service has written them anew, and expired what had them before."""
    history(any_keyed)

    def expired() -> None:
        run(any_keyed)
        version = any_keyed.table.load()
        any_keyed.table.expire(version, [i for i in version.snapshots if i != version.current_id], list)

    at_step(any_keyed, step, expired)
    with pytest.raises(CommitConflictError):
        run(any_keyed)
    assert is_exact(any_keyed) and (step == "commit" or any_keyed.stray_files() == set())
    any_keyed.write(1, v=9)
    any_keyed.round()
    run(any_keyed)
    assert is_exact(any_keyed)


@pytest.mark.parametrize("step", ["write data", "write deletes", "commit"])
def test_a_compaction_in_between_keeps_no_round_from_landing(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    any_keyed.delete(0, 4)
    any_keyed.write(5, 100, v=77)
    at_step(any_keyed, step, lambda: run(any_keyed))
    any_keyed.round()
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


@pytest.mark.parametrize("step", ["write data", "commit"])
def test_what_another_engine_deletes_meanwhile_stays_deleted(any_log: Any, step: str) -> None:
    history(any_log)
    at_step(any_log, step, lambda: any_log.delete_foreign(4))
    with pytest.raises((CommitConflictError, LakeStateError)):
        run(any_log)
    assert 4 not in any_log.ids() and any_log.stray_files() == set()


def test_a_row_that_another_engine_moves_meanwhile_is_there_once(log: Any) -> None:
    """As many rows as before, with other deletes: a count tells nothing."""
    history(log)

    def move() -> None:
        row = log.load().scan(row_filter="id = 4").to_arrow()
        log.delete_foreign(4)
        log.load().append(row)

    at_step(log, "commit", move)
    assert run(log).snapshot_id is not None
    assert log.ids() == log.model_ids() and log.stray_files() == set()


@pytest.mark.parametrize("step", ["write data", "commit"])
def test_another_engine_that_compacts_meanwhile_goes_first(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    at_step(any_keyed, step, any_keyed.rewrite_foreign)
    with pytest.raises(CommitConflictError):
        run(any_keyed)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("late", [False, True])
def test_whatever_a_catalog_does(make_any: Callable[..., Any], fault: Fault, late: bool) -> None:
    lake = make_any(keyed=True, lands_late=late)
    history(lake)
    lake.faults = [fault]
    assert run(lake).snapshot_id is not None
    while lake.deliver():
        pass
    assert is_exact(lake)
    lake.write(1, v=5)
    lake.round()
    assert is_exact(lake)


@pytest.mark.parametrize("fault", Fault)
def test_a_catalog_that_always_fails(make_any: Callable[..., Any], fault: Fault) -> None:
    lake = make_any(keyed=True)
    history(lake)
    lake.fail_always(fault)
    with contextlib.suppress(CommitError, UnavailableError):
        run(lake)
    lake.faults = []
    assert is_exact(lake)
    run(lake)
    assert is_exact(lake)


@pytest.mark.parametrize("fault", [None, *Fault])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_round_deletes_once_an_attempt_is_sent_stays_deleted(
    make_any: Callable[..., Any], fault: Fault | None, late: bool
) -> None:
    lake = make_any(keyed=True, lands_late=late)
    history(lake)

    def overtake() -> None:
        lake.delete(0, 4)
        lake.write(5, v=77)
        lake.round()

    lake.faults = [fault]
    at_step(lake, "committed", overtake)
    with contextlib.suppress(CommitError):
        run(lake)
    lake.deliver()
    assert is_exact(lake)
    lake.clean_up()
    assert lake.stray_files() == set() and is_exact(lake)
    run(lake)
    assert is_exact(lake)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["load", "write data", "commit", "committed"])
@pytest.mark.parametrize("nth", [0, 1])
def test_a_process_that_ends_at_any_step_leaves_litter_at_most(any_lake: Any, step: str, nth: int) -> None:
    history(any_lake)
    listed = any_lake.snapshot_ids()

    def end() -> None:
        raise Killed

    at_step(any_lake, step, end, skip=nth)
    if step == "load" or not nth:
        with pytest.raises(Killed):
            run(any_lake)
    else:
        run(any_lake)
    assert is_exact(any_lake) and set(listed) <= set(any_lake.snapshot_ids())
    any_lake.on_step = lambda step: None
    any_lake.clean_up()
    assert any_lake.stray_files() == set()
    run(any_lake)
    any_lake.write(1, v=9)
    any_lake.round()
    assert is_exact(any_lake) and any_lake.stray_files() == set()


def test_a_newer_job_fences_it(any_keyed: Any) -> None:
    history(any_keyed)
    any_keyed.write(50)
    any_keyed.round(epoch=7)
    with pytest.raises(TieringFencedError):
        run(any_keyed, epoch=6)
    assert any_keyed.stray_files() == set() and is_exact(any_keyed)
    assert run(any_keyed, epoch=8).snapshot_id is not None
    any_keyed.write(51)
    with pytest.raises(TieringFencedError):
        any_keyed.round(epoch=7)


def test_a_failed_write_leaves_nothing(any_keyed: Any) -> None:
    history(any_keyed)

    def fail() -> None:
        raise OSError("disk full")

    at_step(any_keyed, "write data", fail)
    with pytest.raises(OSError, match="disk full"):
        run(any_keyed)
    assert any_keyed.stray_files() == set() and is_exact(any_keyed)


def test_what_another_engine_wrote_into_columns_of_its_own_stays(log: Any) -> None:
    history(log)
    with log.load().update_schema() as change:
        change.add_column("theirs", LongType())
    rows = log.load().scan().to_arrow()
    values = pa.array(range(rows.num_rows), pa.int64())
    log.load().overwrite(rows.set_column(rows.schema.get_field_index("theirs"), "theirs", values))
    history(log)
    files = len(log.table.plan(log.table.load()))
    assert files > 4 and run(log).snapshot_id is None
    found = log.load().scan().to_arrow()["theirs"].drop_null().to_pylist()
    assert sorted(found) == values.to_pylist() and log.ids() == log.model_ids()
    with log.load().update_schema() as change:
        change.delete_column("theirs")
    assert run(log).snapshot_id is not None and log.ids() == log.model_ids()
