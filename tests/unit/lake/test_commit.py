"""A round lands once or not at all, and leaves nothing behind when it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyiceberg.exceptions import CommitFailedException

from lakehead.env.clock import SystemClock
from lakehead.errors import (
    CommitConflictError,
    LakeStateError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.lake.commit import PAUSES_S, CommitResult, commit_round
from lakehead.lake.files import WrittenFile
from lakehead.lake.iceberg_table import IcebergLakeTable
from lakehead.lake.marks import mark_of
from lakehead.lake.round import execute_task, resolve
from lakehead.lake.round_plan import RoundPlan, plan_round
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


class InstantClock(SystemClock):
    """Nobody waits."""

    def sleep(self, seconds: float) -> None:
        pass


INSTANT = InstantClock()


def prepare(lake: Any, *, round_id: str = "r", epoch: int = 1) -> tuple[Any, RoundPlan, list[WrittenFile]]:
    """A round up to its commit, by a service of its own."""
    table = IcebergLakeTable(lake.load)
    version = table.load()
    plan = plan_round(lake.desc, mark_of(version), lake.hot.watermarks(), epoch=epoch, round_id=round_id)
    plan = resolve(plan, lake.hot)
    return table, plan, write_files(lake, plan)


def write_files(lake: Any, plan: RoundPlan) -> list[WrittenFile]:
    writer = lake.table.writer(lake.table.load(), target_file_bytes=1 << 20)
    return [f for t in plan.tasks for f in execute_task(t, lake.hot, writer).files]


def commit(prepared: tuple[Any, RoundPlan, list[WrittenFile]]) -> CommitResult:
    return commit_round(*prepared, clock=INSTANT)


def test_a_repeat_returns_the_first_outcome_and_keeps_its_files(keyed: Any) -> None:
    keyed.write(1, 2)
    prepared = prepare(keyed)
    first = commit(prepared)
    assert commit(prepared) == first
    # The same round executed again elsewhere: other files, which are removed.
    again = (keyed.table, prepared[1], write_files(keyed, prepared[1]))
    assert commit(again).snapshot_id == first.snapshot_id
    assert keyed.data_files() == keyed.used_files()
    assert keyed.ids() == [1, 2] and len(keyed.load().metadata.snapshots) == 1


def test_two_rounds_from_one_base_land_once(keyed: Any) -> None:
    keyed.write(1, 2)
    ours, theirs = prepare(keyed, round_id="a"), prepare(keyed, round_id="b")
    commit(ours)
    with pytest.raises(CommitConflictError):
        commit(theirs)
    assert keyed.ids() == [1, 2] and keyed.data_files() == keyed.used_files()


def test_a_newer_epoch_fences_an_older_job(keyed: Any) -> None:
    keyed.write(1)
    keyed.round(epoch=5)
    keyed.write(2)
    with pytest.raises(TieringFencedError):
        keyed.round(epoch=4)
    assert keyed.data_files() == keyed.used_files()
    keyed.round()
    keyed.write(3)
    keyed.round(epoch=6)
    assert keyed.ids() == [1, 2, 3]


def test_a_foreign_append_in_between_is_kept(log: Any) -> None:
    log.write(1, 2)
    prepared = prepare(log)
    log.append_foreign(9)
    commit(prepared)
    assert log.ids() == [1, 2, 9]


def test_rows_that_others_moved_are_found_again(keyed: Any) -> None:
    keyed.write(1, 2, 3, 4)
    keyed.round()
    keyed.write(2, v=5)
    keyed.delete(3)
    prepared = prepare(keyed)
    # Copy on write: what is left of the file is written anew, offsets kept.
    keyed.load().delete("id = 4")
    result = commit(prepared)
    assert keyed.ids() == [1, 2] and (result.rows, result.deletes) == (1, 2)
    assert keyed.load().scan(row_filter="id = 2").to_arrow()["v"].to_pylist() == [5]


def test_keyed_lakes_refuse_rows_without_identity(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    keyed.append_foreign(9, bucket=0)
    keyed.write(2)
    with pytest.raises(LakeStateError, match="no bucket"):
        keyed.round()


def test_superseded_rows_that_the_lake_lacks_stop_the_round(keyed: Any) -> None:
    keyed.write(1)
    keyed.write(1)
    keyed.round()
    keyed.write(2)
    table, plan, files = prepare(keyed)
    never_written = {TABLET: np.array([1], np.int64)}
    with pytest.raises(LakeStateError, match="lacks 1 of 1"):
        commit((table, plan.with_superseded(never_written), files))
    assert keyed.data_files() == keyed.used_files()


def test_a_replaced_lake_table_is_not_written_to(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    with keyed.load().transaction() as transaction:
        transaction.set_properties({"lakehead.table-id": "t2"})
    keyed.table = IcebergLakeTable(lambda: keyed.catalog.iceberg.load_table(("db", "t")))
    with pytest.raises(LakeStateError):
        commit(prepared)
    with pytest.raises(LakeStateError, match="belongs to table id t2"):
        commit((keyed.table, *prepared[1:]))


class Interrupted(Exception):
    """What a connection raises when it breaks."""


def interrupt(lake: Any, error: Exception, *, lands: bool, times: int = 1) -> None:
    """Make the next commits to the catalog fail, before or after they land."""
    catalog = lake.catalog.iceberg
    commit: Callable[..., Any] = catalog.commit_table
    left = [None] * times

    def commit_table(*args: Any) -> Any:
        left.pop()
        if not left:
            catalog.commit_table = commit
        if lands:
            commit(*args)
        raise error

    catalog.commit_table = commit_table


def test_a_lost_reply_is_resolved_by_reading(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    interrupt(keyed, Interrupted(), lands=True)
    result = commit(prepared)
    assert result.snapshot_id == keyed.load().metadata.current_snapshot_id
    assert keyed.ids() == [1] and keyed.data_files() == keyed.used_files()


def test_a_commit_that_did_not_land_leaves_nothing(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    keyed.write(1, 2)
    prepared = prepare(keyed)
    interrupt(keyed, Interrupted(), lands=False, times=len(PAUSES_S))
    with pytest.raises(UnavailableError):
        commit(prepared)
    assert keyed.ids() == [1] and keyed.data_files() == keyed.used_files()
    keyed.round()
    assert keyed.ids() == [1, 2]


@pytest.mark.parametrize("lands", [True, False])
def test_conflicts_are_retried_without_landing_twice(keyed: Any, lands: bool) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    interrupt(keyed, CommitFailedException(), lands=lands)
    commit(prepared)
    assert keyed.ids() == [1] and len(keyed.load().metadata.snapshots) == 1


def test_a_round_that_lands_while_this_one_is_retried_wins(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed, round_id="a")
    catalog, land = keyed.catalog.iceberg, keyed.catalog.iceberg.commit_table

    def overtaken(*args: Any) -> Any:
        catalog.commit_table = land
        commit(prepare(keyed, round_id="b"))
        return land(*args)

    catalog.commit_table = overtaken
    with pytest.raises(CommitConflictError):
        commit(prepared)
    assert keyed.ids() == [1] and keyed.data_files() == keyed.used_files()
