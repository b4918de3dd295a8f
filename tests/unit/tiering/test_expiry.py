"""Expiry, in Iceberg and in the model: snapshots that nobody needs leave, with the files that only they named."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.lakes import is_exact
from tests.unit.tiering.test_commit import at_step
from tests.unit.tiering.test_compaction import Killed, history

from lakehead.errors import (
    CommitConflictError,
    InvalidRequestError,
    LakeFileMissingError,
    LakeStateError,
    UnavailableError,
)
from lakehead.lake.marks import LakeMark, LakeSnapshot, LakeVersion, mark_of
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeUse
from lakehead.testing.lake import Fault
from lakehead.tiering.compaction import compact
from lakehead.tiering.expiry import ExpiryResult, expire
from lakehead.tiering.expiry_plan import HOUR_US, USUAL, Retention, plan_expiry

MARK = LakeMark(0, "t", 1, "r", {}).to_summary()
NOW = 1000 * HOUR_US


# ---- the plan -------------------------------------------------------------------------------------------------------


def listed(*ages_us: int, marks: Iterable[int] | None = None) -> LakeVersion:
    """Snapshots 1, 2, ... of these ages, each made from the one before; all are rounds, or those that are named."""
    marked = set(range(1, len(ages_us) + 1)) if marks is None else set(marks)
    snapshots = {
        n: LakeSnapshot(n, n - 1 if n > 1 else None, n, MARK if n in marked else {}, NOW - age)
        for n, age in enumerate(ages_us, 1)
    }
    return LakeVersion("t", "u", len(ages_us) or None, snapshots, {})


def expired(version: LakeVersion, keep: int, older_than_us: int, one_per_us: int | None = None) -> list[int]:
    return plan_expiry(version, Retention(keep, older_than_us, one_per_us), now_us=NOW)


def test_by_age_and_count() -> None:
    version = listed(50, 40, 30, 20, 10)
    assert expired(version, 1, 30) == [1, 2, 3]
    assert expired(version, 1, 31) == [1, 2] and expired(version, 4, 0) == [1] and expired(version, 9, 0) == []
    assert expired(version, 1, 0) == [1, 2, 3, 4] and expired(listed(), 1, 0) == []


def test_one_of_each_span_stays() -> None:
    version = listed(*(HOUR_US * h + m for h in (30, 3, 2, 1, 0) for m in (3, 2, 1)))
    assert expired(version, 3, 24 * HOUR_US, HOUR_US) == [1, 2, 3, 4, 5, 7, 8, 10, 11]


def test_all_stay_for_a_time() -> None:
    version = listed(60, 50, 40, 30, 20, 10, marks=[1, 6])
    assert plan_expiry(version, Retention(1, 100, 1000, all_for_us=41), now_us=NOW) == [2]
    assert plan_expiry(version, Retention(1, 5, 1000, all_for_us=41), now_us=NOW) == [1, 2]


def test_but_no_more_than_so_many() -> None:
    version = listed(*(HOUR_US + n for n in range(40, 0, -1)))
    all_stay = Retention(2, 24 * HOUR_US, HOUR_US, all_for_us=2 * HOUR_US)
    assert plan_expiry(version, all_stay, now_us=NOW) == []
    ten_do = dataclasses.replace(all_stay, all_max=10)
    assert plan_expiry(version, ten_do, now_us=NOW) == list(range(1, 30))  # beside the ten, one of that hour


def test_of_others_only_the_newest_stay() -> None:
    version = listed(*(HOUR_US * h for h in range(9, 0, -1)), marks=[1, 3, 4, 8])
    assert expired(version, 1, 24 * HOUR_US, HOUR_US) == [2, 5, 6, 7]


def test_what_the_mark_is_read_from_stays() -> None:
    version = listed(50, 40, 30, 20, 10, marks=[1, 2])
    assert expired(version, 1, 0) == [1]


def test_what_is_newer_than_the_current_one_stays() -> None:
    version = dataclasses.replace(listed(50, 40, 30, 20, 10), current_id=3)
    assert expired(version, 1, 0) == [1, 2]


def test_a_gap_in_the_history_hides_nothing() -> None:
    version = listed(50, 40, 30, 20, 10)
    snapshots = {**version.snapshots, 4: dataclasses.replace(version.snapshots[4], parent_id=None)}
    assert expired(dataclasses.replace(version, snapshots=snapshots), 9, 0) == [1, 2, 3]


def test_the_current_one_cannot_go() -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        Retention(0, 0)
    assert USUAL.keep == 100


# ---- what it does ---------------------------------------------------------------------------------------------------


def run(lake: Any, keep: int = 1, in_use: Callable[[], Iterable[LakeUse]] = lambda: ()) -> ExpiryResult:
    return expire(lake.table, Retention(keep, 0), clock=lake.clock, in_use=in_use)


@pytest.mark.parametrize("compacted", [False, True])
def test_only_what_is_needed_is_left(any_lake: Any, compacted: bool) -> None:
    history(any_lake)
    if compacted:
        compact(any_lake.table, any_lake.desc, any_lake.env)
    before, mark = len(any_lake.all_files()), mark_of(any_lake.table.load())
    ids = any_lake.snapshot_ids()
    found = run(any_lake, 2)
    assert any_lake.snapshot_ids() == ids[-2:] and found.snapshots == len(ids) - 2
    assert any_lake.stray_files() == set() and is_exact(any_lake)
    assert before - len(any_lake.all_files()) <= found.files
    assert mark_of(any_lake.table.load()) == mark
    assert run(any_lake, 2) == ExpiryResult(0, 0)
    last = run(any_lake)
    assert last.snapshots == 1 and (last.files > 0 or not compacted)
    assert len(any_lake.table.plan(any_lake.table.load())) == (1 if compacted else 6)
    history(any_lake, 3)
    assert is_exact(any_lake) and any_lake.stray_files() == set()


def test_a_lake_without_rounds(any_lake: Any) -> None:
    assert run(any_lake) == ExpiryResult(0, 0)


def live(lake: Any, files: Any) -> list[int]:
    return sorted(i for b in lake.table.read(files, ReadSpec(("id",))) for i in b["id"].to_pylist())


@pytest.mark.parametrize("all_of_it", [False, True])
def test_what_somebody_reads_stays(any_lake: Any, all_of_it: bool) -> None:
    history(any_lake)
    version = any_lake.table.load()
    snapshot = None if all_of_it else version.current_id
    held = any_lake.table.plan(version)
    rows = live(any_lake, held)
    compact(any_lake.table, any_lake.desc, any_lake.env)
    found = run(any_lake, in_use=lambda: [LakeUse(metadata=version.state, snapshot=snapshot)])
    assert found.snapshots == (0 if snapshot is None else 5)
    assert live(any_lake, held) == rows, "the files of a pinned read are there"
    assert is_exact(any_lake) and any_lake.stray_files() == set()
    assert len(any_lake.snapshot_ids()) == (7 if snapshot is None else 2), "what nobody reads is gone"
    run(any_lake)
    assert len(any_lake.snapshot_ids()) == 1 and any_lake.stray_files() == set()
    with pytest.raises(LakeFileMissingError):
        live(any_lake, held)


def test_what_somebody_began_to_read_when_it_left_the_list_stays(any_lake: Any) -> None:
    history(any_lake)
    version = any_lake.table.load()
    held = any_lake.table.plan(version)
    rows = live(any_lake, held)
    compact(any_lake.table, any_lake.desc, any_lake.env)
    use = LakeUse(metadata=version.state, snapshot=version.current_id)
    answers = iter([[], [use]])
    run(any_lake, in_use=lambda: next(answers))
    assert len(any_lake.snapshot_ids()) == 1 and live(any_lake, held) == rows


def test_a_read_needs_its_snapshot_and_no_metadata_file(keyed: Any) -> None:
    """Of which the newest fifty are kept, whoever reads older ones."""
    history(keyed)
    version = keyed.table.load()
    compact(keyed.table, keyed.desc, keyed.env)
    keyed.lose(version.state)
    run(keyed, in_use=lambda: [LakeUse(metadata=version.state, snapshot=version.current_id)])
    assert keyed.snapshot_ids()[0] == version.current_id and len(keyed.snapshot_ids()) == 2


def test_nothing_changes_while_it_is_not_known_what_is_in_use(any_keyed: Any) -> None:
    history(any_keyed)
    ids, files, state = any_keyed.snapshot_ids(), any_keyed.all_files(), any_keyed.table.load().state

    def unknown() -> Iterable[LakeUse]:
        raise UnavailableError("away")

    with pytest.raises(UnavailableError):
        run(any_keyed, in_use=unknown)
    with pytest.raises(UnavailableError):
        run(any_keyed, in_use=lambda: [LakeUse(metadata=f"{state}.gone")])
    assert any_keyed.snapshot_ids() == ids and any_keyed.all_files() == files


def test_a_round_in_between_goes_first(any_keyed: Any) -> None:
    history(any_keyed)
    version = any_keyed.table.load()
    ids = any_keyed.snapshot_ids()
    any_keyed.write(1, v=8)
    any_keyed.round()
    with pytest.raises(CommitConflictError):
        any_keyed.table.expire(version, ids[:2], lambda: ())
    assert set(ids) < set(any_keyed.snapshot_ids()) and is_exact(any_keyed) and any_keyed.stray_files() == set()


@pytest.mark.parametrize(
    ("fault", "error", "lands"),
    [
        (Fault.REQUEST_LOST, UnavailableError, False),
        (Fault.ANSWER_LOST, UnavailableError, True),
        (Fault.REFUSED, None, True),
        (Fault.REPEATED, None, True),
    ],
)
def test_whatever_a_catalog_does(any_lake: Any, fault: Fault, error: type[Exception] | None, lands: bool) -> None:
    history(any_lake)
    compact(any_lake.table, any_lake.desc, any_lake.env)
    ids, files = any_lake.snapshot_ids(), any_lake.all_files()
    any_lake.faults = [fault]
    with pytest.raises(error) if error else contextlib.nullcontext():
        run(any_lake)
    assert any_lake.snapshot_ids() == (ids[-1:] if lands else ids)
    assert is_exact(any_lake) and (any_lake.all_files() >= files) is (error is not None)
    run(any_lake)
    any_lake.clean_up()
    assert any_lake.snapshot_ids()[0] == ids[-1] and is_exact(any_lake) and any_lake.stray_files() == set()
    history(any_lake, 3)
    assert is_exact(any_lake)


def test_others_that_keep_committing_go_first(any_lake: Any) -> None:
    history(any_lake)
    ids = any_lake.snapshot_ids()
    any_lake.faults = [Fault.REFUSED] * 5
    with pytest.raises(CommitConflictError):
        run(any_lake)
    assert any_lake.snapshot_ids() == ids and is_exact(any_lake)


@pytest.mark.parametrize("overtaken", [False, True])
def test_one_that_is_late_takes_no_file(make_any: Callable[..., Any], overtaken: bool) -> None:
    lake = make_any(lands_late=True)
    history(lake)
    compact(lake.table, lake.desc, lake.env)
    ids, files = lake.snapshot_ids(), lake.all_files()
    lake.faults = [Fault.DELAYED]
    with pytest.raises(UnavailableError):
        run(lake)
    if overtaken:
        lake.write(1, v=8)
        lake.round()
    assert lake.deliver() is not overtaken
    assert set(lake.snapshot_ids()) >= (set(ids) if overtaken else {ids[-1]})
    assert lake.all_files() >= files and is_exact(lake)
    run(lake)
    lake.clean_up()
    assert lake.stray_files() == set() and is_exact(lake)


@pytest.mark.parametrize("step", ["commit", "committed"])
def test_a_process_that_ends_in_between_leaves_litter_at_most(any_lake: Any, step: str) -> None:
    history(any_lake)
    compact(any_lake.table, any_lake.desc, any_lake.env)
    files = any_lake.all_files()

    def end() -> None:
        raise Killed

    at_step(any_lake, step, end)
    with pytest.raises(Killed):
        run(any_lake)
    assert any_lake.all_files() >= files and is_exact(any_lake)
    any_lake.clean_up()
    assert any_lake.stray_files() == set() and is_exact(any_lake)
    history(any_lake, 3)
    assert is_exact(any_lake)


@pytest.mark.parametrize("step", ["write data", "write deletes", "commit"])
def test_an_expiry_in_between_keeps_no_round_from_landing(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    any_keyed.delete(0, 4)
    any_keyed.write(5, 100, v=77)
    at_step(any_keyed, step, lambda: run(any_keyed))
    any_keyed.round()
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


def test_a_lake_that_was_rolled_back_is_left_as_it_is(any_keyed: Any) -> None:
    history(any_keyed)
    ids = any_keyed.snapshot_ids()
    any_keyed.roll_back(ids[-2])
    with pytest.raises(LakeStateError, match="rolled back"):
        run(any_keyed)
    assert any_keyed.snapshot_ids() == ids


def test_branches_and_tags_stay(keyed: Any) -> None:
    history(keyed)
    ids = keyed.snapshot_ids()
    keyed.load().manage_snapshots().create_tag(ids[1], "quarter").commit()
    run(keyed)
    assert keyed.snapshot_ids() == [ids[1], ids[-1]]
    assert keyed.load().scan(snapshot_id=ids[1]).to_arrow().num_rows > 0 and keyed.stray_files() == set()
