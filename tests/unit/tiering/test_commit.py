"""A round lands once or not at all, and leaves nothing behind when it does not; on real tables and on the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lakes import is_exact

from lakehead.errors import (
    CommitConflictError,
    CommitUnknownError,
    LakeheadError,
    LakeStateError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.lake.lake_table import WrittenFile
from lakehead.lake.marks import mark_of
from lakehead.testing.lake import Fault
from lakehead.tiering.commit import PAUSES_S, CommitResult, commit_round
from lakehead.tiering.executor import LocalExecutor
from lakehead.tiering.round import execute_task, resolve
from lakehead.tiering.round_plan import RoundPlan, plan_round
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)
Prepared = tuple[RoundPlan, list[WrittenFile]]
MakeLake = Callable[..., Any]


def prepare(lake: Any, *, round_id: str = "r", epoch: int = 1) -> Prepared:
    """A round up to its commit."""
    plan = plan_round(
        lake.desc, mark_of(lake.table.load()), lake.hot.watermarks(), epoch=epoch, round_id=round_id, rows_per_task=3
    )
    plan = resolve(plan, lake.hot, LocalExecutor())
    return plan, write_files(lake, plan)


def write_files(lake: Any, plan: RoundPlan) -> list[WrittenFile]:
    writer = lake.table.writer(lake.table.load(), target_file_bytes=1 << 20)
    return [f for t in plan.tasks for f in execute_task(t, lake.hot, writer).files]


def commit(lake: Any, prepared: Prepared) -> CommitResult:
    return commit_round(lake.table, *prepared, clock=lake.clock)


def history(lake: Any) -> None:
    """Two rounds, and a third to come, that deletes rows of both."""
    lake.write(1, 2, 3)
    lake.round()
    lake.write(4, 5)
    lake.write(2, v=1)
    lake.round()
    lake.write(6, 4, v=2)
    lake.delete(3)


# ---- repeats and rivals ---------------------------------------------------------------------------------------------


def test_a_repeat_returns_the_first_outcome_and_keeps_its_files(any_keyed: Any) -> None:
    any_keyed.write(1, 2)
    prepared = prepare(any_keyed)
    first = commit(any_keyed, prepared)
    assert commit(any_keyed, prepared) == first
    # The same round executed again elsewhere: other files, which are removed.
    assert commit(any_keyed, (prepared[0], write_files(any_keyed, prepared[0]))) == first
    assert any_keyed.stray_files() == set() and len(any_keyed.snapshot_ids()) == 1
    any_keyed.write(1, 3)
    any_keyed.round()
    # It is found behind later rounds too.
    assert commit(any_keyed, (prepared[0], write_files(any_keyed, prepared[0]))).snapshot_id == first.snapshot_id
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


def test_a_repeat_of_a_round_that_is_forgotten_keeps_the_files_that_the_lake_has(any_keyed: Any) -> None:
    any_keyed.write(1, 2)
    prepared = prepare(any_keyed)
    first = commit(any_keyed, prepared)
    any_keyed.write(3)
    any_keyed.round()
    any_keyed.expire(first.snapshot_id)
    with pytest.raises(CommitConflictError):
        commit(any_keyed, prepared)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


def test_two_rounds_from_one_base_land_once(any_keyed: Any) -> None:
    any_keyed.write(1, 2)
    ours, theirs = prepare(any_keyed, round_id="a"), prepare(any_keyed, round_id="b")
    commit(any_keyed, ours)
    with pytest.raises(CommitConflictError):
        commit(any_keyed, theirs)
    assert any_keyed.ids() == [1, 2] and any_keyed.stray_files() == set()


def test_a_round_that_lands_between_check_and_commit_wins(any_keyed: Any) -> None:
    history(any_keyed)
    ours, theirs = prepare(any_keyed, round_id="a"), prepare(any_keyed, round_id="b")
    at_step(any_keyed, "commit", lambda: commit(any_keyed, theirs))
    with pytest.raises(CommitConflictError):
        commit(any_keyed, ours)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


def at_step(lake: Any, name: str, action: Callable[[], Any], *, skip: int = 0) -> None:
    """Do something once, at a step of what comes."""
    left = [skip]

    def on_step(step: str) -> None:
        if step == name:
            left[0] -= 1
            if left[0] < 0:
                lake.on_step = lambda step: None
                action()

    lake.on_step = on_step


def test_a_newer_epoch_fences_an_older_job(any_keyed: Any) -> None:
    any_keyed.write(1)
    any_keyed.round(epoch=5)
    any_keyed.write(2)
    with pytest.raises(TieringFencedError):
        any_keyed.round(epoch=4)
    assert any_keyed.stray_files() == set()
    any_keyed.round()
    any_keyed.write(3)
    any_keyed.round(epoch=6)
    assert any_keyed.ids() == [1, 2, 3]


@pytest.mark.parametrize("step", ["load", "write deletes", "commit"])
def test_an_older_epoch_that_wakes_up_after_a_newer_one_has_committed_cannot(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    sleeper = prepare(any_keyed, round_id="old", epoch=1)
    at_step(any_keyed, step, lambda: any_keyed.round(epoch=2))
    with pytest.raises(TieringFencedError) as caught:
        commit(any_keyed, sleeper)
    assert (caught.value.context["epoch"], caught.value.context["newer"]) == (1, 2)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()
    any_keyed.write(9)
    with pytest.raises(TieringFencedError):
        any_keyed.round(epoch=1)
    any_keyed.round(epoch=2)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


# ---- other engines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["load", "commit"])
def test_a_foreign_append_in_between_is_kept(any_log: Any, step: str) -> None:
    any_log.write(1, 2)
    prepared = prepare(any_log)
    at_step(any_log, step, lambda: any_log.append_foreign(9))
    commit(any_log, prepared)
    assert any_log.ids() == [1, 2, 9] and any_log.stray_files() == set()


@pytest.mark.parametrize("step", ["load", "write deletes", "commit"])
@pytest.mark.parametrize("backwards", [False, True])
def test_rows_that_others_moved_are_found_again(any_keyed: Any, step: str, backwards: bool) -> None:
    history(any_keyed)
    prepared = prepare(any_keyed)
    at_step(any_keyed, step, lambda: any_keyed.rewrite_foreign(backwards=backwards))
    commit(any_keyed, prepared)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


@pytest.mark.parametrize("step", ["load", "write deletes", "commit"])
def test_rows_that_others_deleted_stop_the_round_until_they_are_back(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    marked = any_keyed.snapshot_ids()[-1]
    prepared = prepare(any_keyed)
    # One that the round leaves alone, one that it deletes, one that it replaces.
    at_step(any_keyed, step, lambda: any_keyed.delete_foreign(1, 3, 4))
    for _ in range(2):
        with pytest.raises(LakeStateError, match=f"roll it back to snapshot {marked}"):
            commit(any_keyed, prepared)
        assert any_keyed.stray_files() == set()
        prepared = prepare(any_keyed)
    any_keyed.roll_back(marked)
    any_keyed.round()
    assert is_exact(any_keyed)


def test_rows_that_others_deleted_by_copy_on_write_stop_the_round(keyed: Any) -> None:
    keyed.write(1, 2, 3, 4)
    keyed.round()
    keyed.write(2, v=5)
    keyed.delete(3)
    prepared = prepare(keyed)
    keyed.load().delete("id = 4")
    with pytest.raises(LakeStateError, match="has 3 rows, and tiering left 4"):
        commit(keyed, prepared)


def test_others_that_never_pause_are_a_conflict(any_log: Any) -> None:
    any_log.write(1)
    prepared = prepare(any_log)

    def on_step(step: str) -> None:
        if step == "commit":
            any_log.append_foreign(9)

    any_log.on_step = on_step
    with pytest.raises(CommitConflictError, match="kept changing"):
        commit(any_log, prepared)
    assert any_log.ids() == [9] * len(PAUSES_S) and any_log.stray_files() == set()
    assert any_log.clock.slept == [p for p in PAUSES_S if p]


def test_keyed_lakes_refuse_rows_without_identity(any_keyed: Any) -> None:
    any_keyed.write(1)
    any_keyed.round()
    any_keyed.append_foreign(9, bucket=0)
    any_keyed.write(2)
    with pytest.raises(LakeStateError, match="have no offset"):
        any_keyed.round()
    assert any_keyed.stray_files() == set()


def test_superseded_rows_that_the_lake_lacks_stop_the_round(any_keyed: Any) -> None:
    any_keyed.write(1)
    any_keyed.write(1)
    any_keyed.round()
    any_keyed.write(2)
    plan, files = prepare(any_keyed)
    never_written = {TABLET: np.array([1], np.int64)}
    with pytest.raises(LakeStateError, match="lacks 1 of 1"):
        commit(any_keyed, (plan.with_superseded(never_written), files))
    assert any_keyed.stray_files() == set()


def test_a_lake_that_lost_a_file_is_named_as_that(keyed: Any) -> None:
    history(keyed)
    prepared = prepare(keyed)
    for path in keyed.used_files():
        Path(path).unlink()
    with pytest.raises(LakeStateError, match="is gone"):
        commit(keyed, prepared)


# ---- tables that are not what they were -----------------------------------------------------------------------------


def test_a_replaced_lake_table_is_not_written_to(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    with keyed.load().transaction() as transaction:
        transaction.set_properties({"lakehead.table-id": "t2"})
    with pytest.raises(LakeStateError):
        commit(keyed, prepared)
    unchecked = IcebergLakeTable(lambda: keyed.catalog.iceberg.load_table(("db", "t")), keyed.desc)
    with pytest.raises(LakeStateError, match="belongs to table id t2"):
        commit_round(unchecked, *prepared, clock=keyed.clock)


@pytest.mark.parametrize("step", ["load", "commit"])
def test_a_table_that_was_dropped_or_made_anew_meanwhile_stops_the_round(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    prepared = prepare(any_keyed)
    at_step(any_keyed, step, lambda: any_keyed.recreate("t2"))
    with pytest.raises(LakeStateError):
        commit(any_keyed, prepared)


@pytest.mark.parametrize("step", ["load", "commit"])
def test_a_table_that_is_empty_again_is_a_conflict(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    prepared = prepare(any_keyed)
    at_step(any_keyed, step, lambda: any_keyed.recreate("t1"))
    with pytest.raises(CommitConflictError):
        commit(any_keyed, prepared)
    # The log still has everything.
    any_keyed.round()
    assert is_exact(any_keyed)


@pytest.mark.parametrize("step", ["load", "commit"])
def test_a_rollback_meanwhile_stops_the_round(any_keyed: Any, step: str) -> None:
    history(any_keyed)
    prepared = prepare(any_keyed)
    at_step(any_keyed, step, lambda: any_keyed.roll_back(any_keyed.snapshot_ids()[0]))
    with pytest.raises(LakeStateError, match="rolled back"):
        commit(any_keyed, prepared)
    assert any_keyed.ids() == [1, 2, 3]
    # What was sent to a snapshot that the current one does not come from is not known to be dead.
    assert any_keyed.stray_files() == set() or step == "commit"
    any_keyed.roll_back(any_keyed.snapshot_ids()[-1])
    any_keyed.round()
    assert is_exact(any_keyed)


# ---- answers that do not tell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", Fault)
def test_whatever_befalls_one_commit_the_round_lands_once(make_any: MakeLake, fault: Fault, late: bool) -> None:
    lake = make_any(lands_late=late)
    history(lake)
    lake.faults = [fault]
    result = lake.round()
    assert is_exact(lake) and lake.snapshot_ids()[-1] == result.snapshot_id and len(lake.snapshot_ids()) == 3
    # What may be on its way is left alone; elsewhere nothing stays.
    assert not lake.deliver() and is_exact(lake)
    assert lake.stray_files() == set() or (late and fault in (Fault.DELAYED, Fault.REQUEST_LOST))


def test_a_delayed_commit_that_arrives_before_the_next_attempt_is_the_round(make_any: MakeLake) -> None:
    lake = make_any(lands_late=True)
    history(lake)
    lake.faults = [Fault.DELAYED]
    # Loads: the plan, before the first attempt, and before the second, which is sent in vain.
    at_step(lake, "commit", lake.deliver, skip=1)
    lake.round()
    assert is_exact(lake) and len(lake.snapshot_ids()) == 3
    assert lake.stray_files() == set()


@pytest.mark.parametrize(
    ("fault", "late", "error"),
    [
        (Fault.REQUEST_LOST, False, UnavailableError),
        (Fault.REQUEST_LOST, True, CommitUnknownError),
        (Fault.DELAYED, True, CommitUnknownError),
        (Fault.REFUSED, False, CommitConflictError),
        (Fault.REFUSED, True, CommitConflictError),
    ],
)
def test_a_round_that_never_lands_says_whether_it_may(
    make_any: MakeLake, fault: Fault, late: bool, error: type[LakeheadError]
) -> None:
    lake = make_any(lands_late=late)
    history(lake)
    before = lake.values()
    lake.fail_always(fault)
    with pytest.raises(LakeheadError) as caught:
        lake.round()
    assert type(caught.value) is error and lake.values() == before
    assert (lake.stray_files() == set()) is (error is not CommitUnknownError)
    lake.faults = []
    lake.round()
    assert is_exact(lake) and len(lake.snapshot_ids()) == 3
    while lake.deliver():
        raise AssertionError("a round landed after the next one")


def test_the_round_after_one_that_lands_late_goes_on_from_there(make_any: MakeLake) -> None:
    lake = make_any(lands_late=True)
    history(lake)
    lake.fail_always(Fault.DELAYED)
    with pytest.raises(CommitUnknownError):
        lake.round()
    lake.faults = []
    lake.write(7, 6)
    prepared = prepare(lake)
    assert lake.deliver() and not lake.deliver()
    with pytest.raises(CommitConflictError):
        commit(lake, prepared)
    lake.round()
    assert is_exact(lake) and len(lake.snapshot_ids()) == 4


def test_a_commit_whose_snapshot_has_expired_is_found_by_the_property(any_log: Any) -> None:
    any_log.write(1, 2)
    prepared = prepare(any_log)
    any_log.faults = [Fault.ANSWER_LOST]

    def others() -> None:
        any_log.append_foreign(9)
        any_log.expire(any_log.snapshot_ids()[0])

    at_step(any_log, "load", others, skip=1)
    commit(any_log, prepared)
    assert any_log.ids() == [1, 2, 9] and any_log.stray_files() == set()


def test_files_of_a_commit_that_can_no_longer_be_found_are_kept(any_log: Any) -> None:
    any_log.write(1, 2)
    prepared = prepare(any_log)
    any_log.faults = [Fault.ANSWER_LOST]

    def others() -> None:
        any_log.write(3)
        any_log.round()
        any_log.expire(any_log.snapshot_ids()[0])

    at_step(any_log, "load", others, skip=1)
    # Whether the round landed is not known any more, but another has come after: the next one goes on from there.
    with pytest.raises(CommitConflictError):
        commit(any_log, prepared)
    assert any_log.ids() == [1, 2, 3]


def test_a_commit_that_landed_and_was_rolled_back_keeps_its_files(any_log: Any) -> None:
    any_log.write(1)
    any_log.round()
    any_log.write(2)
    any_log.faults = [Fault.ANSWER_LOST]
    at_step(any_log, "load", lambda: any_log.roll_back(any_log.snapshot_ids()[0]), skip=2)
    with pytest.raises(LakeStateError, match="rolled back"):
        any_log.round()
    assert any_log.stray_files() == set()
    any_log.roll_back(any_log.snapshot_ids()[1])
    assert any_log.ids() == [1, 2]


@pytest.mark.parametrize("fault", [None, Fault.ANSWER_LOST])
def test_a_catalog_that_comes_back_is_waited_for(any_keyed: Any, fault: Fault | None) -> None:
    history(any_keyed)
    prepared = prepare(any_keyed)
    any_keyed.faults = [fault]
    down = [False, True, True, False] if fault else [True, True, False]

    def on_step(step: str) -> None:
        if step == "load" and down and down.pop(0):
            raise UnavailableError("the catalog is down")

    any_keyed.on_step = on_step
    commit(any_keyed, prepared)
    assert is_exact(any_keyed) and any_keyed.stray_files() == set()


@pytest.mark.parametrize("fault", [Fault.ANSWER_LOST, Fault.REQUEST_LOST])
def test_a_catalog_that_does_not_come_back_leaves_it_open(any_keyed: Any, fault: Fault) -> None:
    history(any_keyed)
    prepared = prepare(any_keyed)
    any_keyed.faults = [fault]
    loads = []

    def on_step(step: str) -> None:
        loads.append(step) if step == "load" else None
        if len(loads) > 1:
            raise UnavailableError("the catalog is down")

    any_keyed.on_step = on_step
    # The model's commit has steps of its own, after which it is down too.
    with pytest.raises((CommitUnknownError, UnavailableError)) as caught:
        commit(any_keyed, prepared)
    assert type(caught.value) is CommitUnknownError and len(loads) == len(PAUSES_S) + 1
    any_keyed.on_step = lambda step: None
    any_keyed.round()
    assert is_exact(any_keyed) and len(any_keyed.snapshot_ids()) == 3


# ---- crashes --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """A process that ends: nothing of it runs any more."""


STEPS = [("load", 0), ("write data", 0), ("load", 1), ("write deletes", 0), ("commit", 0), ("committed", 0)]


@pytest.mark.parametrize("fault", [None, Fault.ANSWER_LOST, Fault.DELAYED])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s[0]} {s[1] + 1}")
def test_a_round_after_one_that_was_killed_has_each_row_once(
    make_any: MakeLake, step: tuple[str, int], fault: Fault | None
) -> None:
    lake = make_any(lands_late=True)
    history(lake)

    def kill() -> None:
        raise Killed

    at_step(lake, step[0], kill, skip=step[1])
    lake.faults = [fault]
    with pytest.raises(Killed):
        lake.round()
    lake.faults = []
    lake.write(8, 1, v=4)
    lake.round()
    assert is_exact(lake)
    assert not lake.deliver() and is_exact(lake)
    lake.write(1, v=5)
    lake.round()
    assert is_exact(lake)


@pytest.mark.parametrize("step", STEPS[:-1], ids=lambda s: f"{s[0]} {s[1] + 1}")
def test_a_round_that_fails_leaves_no_file(any_keyed: Any, step: tuple[str, int]) -> None:
    history(any_keyed)
    before = any_keyed.values()

    def fail() -> None:
        raise RuntimeError("something else")

    at_step(any_keyed, step[0], fail, skip=step[1])
    with pytest.raises(RuntimeError):
        any_keyed.round()
    # Before the commit has read the lake, what is in it is not known to the round.
    assert any_keyed.values() == before and (any_keyed.stray_files() == set() or step == ("load", 1))
    any_keyed.round()
    assert is_exact(any_keyed)
