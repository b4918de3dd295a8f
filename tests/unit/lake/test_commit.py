"""A round lands once or not at all, and leaves nothing behind when it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyiceberg.exceptions import CommitFailedException

from lakehead.errors import (
    CommitConflictError,
    LakeStateError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.lake.commit import commit_round
from lakehead.lake.files import LakeWriteSpec, WrittenFile
from lakehead.lake.marks import read_mark
from lakehead.lake.round import execute_task, resolve
from lakehead.lake.round_plan import RoundPlan, plan_round
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


def prepare(
    lake: Any, *, round_id: str = "r", epoch: int = 1
) -> tuple[Any, RoundPlan, list[WrittenFile], LakeWriteSpec]:
    """A round up to its commit."""
    table = lake.load()
    plan = plan_round(lake.desc, read_mark(table), lake.hot.watermarks(), epoch=epoch, round_id=round_id)
    plan = resolve(plan, lake.hot)
    spec = LakeWriteSpec.of(table, target_file_bytes=1 << 20)
    files = [f for t in plan.tasks for f in execute_task(t, lake.hot, spec).files]
    return table, plan, files, spec


def test_a_repeat_returns_the_first_outcome_and_keeps_its_files(keyed: Any) -> None:
    keyed.write(1, 2)
    prepared = prepare(keyed)
    first = commit_round(*prepared)
    assert commit_round(*prepared) == first
    # The same round executed again elsewhere: other files, which are removed.
    again = (keyed.load(), prepared[1], prepare_files(keyed, prepared[1]), prepared[3])
    assert commit_round(*again).snapshot_id == first.snapshot_id
    assert keyed.data_files() == keyed.used_files()
    assert keyed.ids() == [1, 2] and len(keyed.load().metadata.snapshots) == 1


def prepare_files(lake: Any, plan: RoundPlan) -> list[WrittenFile]:
    spec = LakeWriteSpec.of(lake.load(), target_file_bytes=1 << 20)
    return [f for t in plan.tasks for f in execute_task(t, lake.hot, spec).files]


def test_two_rounds_from_one_base_land_once(keyed: Any) -> None:
    keyed.write(1, 2)
    ours, theirs = prepare(keyed, round_id="a"), prepare(keyed, round_id="b")
    commit_round(*ours)
    with pytest.raises(CommitConflictError):
        commit_round(*theirs)
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
    commit_round(*prepared)
    assert log.ids() == [1, 2, 9]


def test_rows_that_others_moved_are_found_again(keyed: Any) -> None:
    keyed.write(1, 2, 3, 4)
    keyed.round()
    keyed.write(2, v=5)
    keyed.delete(3)
    prepared = prepare(keyed)
    # Copy on write: what is left of the file is written anew, offsets kept.
    keyed.load().delete("id = 4")
    result = commit_round(*prepared)
    assert keyed.ids() == [1, 2] and (result.rows, result.deletes) == (1, 2)
    assert prepared[0].scan(row_filter="id = 2").to_arrow()["v"].to_pylist() == [5]


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
    table, plan, files, spec = prepare(keyed)
    never_written = {TABLET: np.array([1], np.int64)}
    with pytest.raises(LakeStateError, match="lacks 1 of 1"):
        commit_round(table, plan.with_superseded(never_written), files, spec)
    assert keyed.data_files() == keyed.used_files()


def test_a_replaced_lake_table_is_not_written_to(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    with keyed.load().transaction() as transaction:
        transaction.set_properties({"lakehead.table-id": "t2"})
    prepared[0].refresh()
    with pytest.raises(LakeStateError):
        commit_round(*prepared)


class Interrupted(Exception):
    """What a connection raises when it breaks."""


def interrupt(table: Any, error: Exception, *, lands: bool) -> None:
    """Make a table's next catalog commit fail, before or after it lands."""
    commit: Callable[..., Any] = table.catalog.commit_table

    def commit_table(*args: Any) -> Any:
        del table.catalog.commit_table
        if lands:
            commit(*args)
        raise error

    table.catalog.commit_table = commit_table


def test_a_lost_reply_is_resolved_by_reading(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    interrupt(prepared[0], Interrupted(), lands=True)
    result = commit_round(*prepared)
    assert result.snapshot_id == keyed.load().metadata.current_snapshot_id
    assert keyed.ids() == [1] and keyed.data_files() == keyed.used_files()


def test_a_commit_that_did_not_land_leaves_nothing(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    keyed.write(1, 2)
    prepared = prepare(keyed)
    interrupt(prepared[0], Interrupted(), lands=False)
    with pytest.raises(UnavailableError):
        commit_round(*prepared)
    assert keyed.ids() == [1] and keyed.data_files() == keyed.used_files()
    keyed.round()
    assert keyed.ids() == [1, 2]


@pytest.mark.parametrize("lands", [True, False])
def test_conflicts_are_retried_without_landing_twice(keyed: Any, lands: bool) -> None:
    keyed.write(1)
    prepared = prepare(keyed)
    interrupt(prepared[0], CommitFailedException(), lands=lands)
    commit_round(*prepared)
    assert keyed.ids() == [1] and len(keyed.load().metadata.snapshots) == 1


def test_a_round_that_lands_while_this_one_is_retried_wins(keyed: Any) -> None:
    keyed.write(1)
    prepared = prepare(keyed, round_id="a")
    catalog, commit = prepared[0].catalog, prepared[0].catalog.commit_table

    def overtaken(*args: Any) -> Any:
        catalog.commit_table = commit
        commit_round(*prepare(keyed, round_id="b"))
        return commit(*args)

    catalog.commit_table = overtaken
    with pytest.raises(CommitConflictError):
        commit_round(*prepared)
    assert keyed.ids() == [1] and keyed.data_files() == keyed.used_files()
