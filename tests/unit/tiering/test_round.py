"""Rounds: where tasks run, what a broken or trimmed log does, what is left behind."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from pyiceberg.table import DataScan

from lakehead.errors import CommitConflictError, LakeStateError, OffsetOutOfRangeError, TieringFencedError
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.log.hot_range import HotRange
from lakehead.tiering.executor import LocalExecutor
from lakehead.tiering.round import run_round
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


class Elsewhere(LocalExecutor):
    """Runs tasks as another process would: everything is pickled on its way in and out."""

    def run(self, task: Any, items: Sequence[Any], *, name: str = "", undo: Any = None) -> list[Any]:
        there, tasks = pickle.loads(pickle.dumps((task, list(items))))
        results: list[Any] = pickle.loads(pickle.dumps(super().run(there, tasks, undo=undo)))
        return results


def test_tasks_run_anywhere(keyed: Any) -> None:
    keyed.write(*range(20))
    keyed.write(*range(0, 20, 2), v=1)
    keyed.delete(3)
    result = run_round(
        IcebergLakeTable(keyed.load, keyed.desc),
        keyed.desc,
        keyed.hot,
        keyed.env,
        executor_of=lambda records: Elsewhere(),
        rows_per_task=7,
    )
    assert (result.rows, result.deletes) == (19, 0) and result.files > 3
    assert keyed.ids() == keyed.model_ids()


def test_an_old_log_start_stops_the_round(keyed: Any) -> None:
    keyed.write(1, 2, 3)
    keyed.hot.trim(TABLET, 1)
    with pytest.raises(LakeStateError):
        keyed.round()


def test_a_log_that_returns_too_little_stops_the_round(log: Any) -> None:
    log.write(*range(20))

    class Cut(type(log.hot)):  # type: ignore[misc]
        def read(self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None) -> Any:
            return super().read(tablet, start, min(end, 15), columns)

    cut = Cut(log.desc)
    cut._logs = log.hot._logs
    with pytest.raises(LakeStateError, match="returned 5 records"):
        run_round(log.table, log.desc, cut, log.env, rows_per_task=10)
    assert log.data_files() == set() and log.load().metadata.snapshots == []


def test_a_named_round_lands_once(log: Any) -> None:
    log.write(1)
    first = log.round(round_id="r1")
    log.write(2)
    assert log.round(round_id="r1").snapshot_id == first.snapshot_id
    assert log.ids() == [1]
    log.round()
    assert log.ids() == [1, 2] and log.data_files() == log.used_files()


def rival(lake: Any) -> None:
    """Another service tiers everything, and the server trims it."""
    run_round(lake.table, lake.desc, lake.hot, lake.env)
    lake.hot.trim(TABLET, lake.hot.watermarks()[TABLET][1])


@pytest.mark.parametrize("more", [0, 2])
def test_a_log_that_was_trimmed_while_a_round_was_planned_is_no_contradiction(any_keyed: Any, more: int) -> None:
    any_keyed.write(1, 2, 3)
    watermarks, looks = any_keyed.hot.watermarks, []

    def later() -> Any:
        looks.append(None)
        if len(looks) == 1:
            any_keyed.hot.watermarks = watermarks
            rival(any_keyed)
            any_keyed.write(*range(10, 10 + more))
        return watermarks()

    any_keyed.hot.watermarks = later
    result = any_keyed.round()
    assert (result.rows, result.snapshot_id is not None) == (more, more > 0)
    assert any_keyed.values() == any_keyed.model_values() and any_keyed.stray_files() == set()


def test_rivals_that_never_pause_are_a_conflict(any_keyed: Any) -> None:
    any_keyed.write(1)
    watermarks = any_keyed.hot.watermarks

    def later() -> Any:
        any_keyed.hot.watermarks = watermarks
        rival(any_keyed)
        any_keyed.write(1)
        rival(any_keyed)
        any_keyed.hot.watermarks = later
        return {TABLET: HotRange(watermarks()[TABLET].log_start, watermarks()[TABLET].high_watermark + 1)}

    any_keyed.hot.watermarks = later
    with pytest.raises(CommitConflictError, match="kept committing"):
        any_keyed.round()
    assert any_keyed.values() == any_keyed.model_values() and any_keyed.stray_files() == set()


@pytest.mark.parametrize("reads_before", [0, 1, 2, 3])
def test_a_log_that_is_trimmed_while_a_round_reads_it_is_a_conflict(any_keyed: Any, reads_before: int) -> None:
    any_keyed.write(1, 2, 3)
    any_keyed.round()
    any_keyed.write(*range(10), v=1)
    read, reads = any_keyed.hot.read, []

    def trimmed(tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None) -> Any:
        reads.append(None)
        if len(reads) > reads_before:
            any_keyed.hot.read = read
            rival(any_keyed)
            raise OffsetOutOfRangeError(f"offset {start} was trimmed")
        return read(tablet, start, end, columns)

    any_keyed.hot.read = trimmed
    with pytest.raises(CommitConflictError, match="trimmed"):
        run_round(any_keyed.table, any_keyed.desc, any_keyed.hot, any_keyed.env, rows_per_task=7)
    assert any_keyed.round().snapshot_id is None
    assert any_keyed.values() == any_keyed.model_values() and any_keyed.stray_files() == set()


def test_an_expired_lake_that_kept_its_property_goes_on(any_keyed: Any) -> None:
    any_keyed.write(1, 2)
    any_keyed.round()
    any_keyed.rewrite_foreign()
    any_keyed.rewrite_foreign(backwards=True)
    # All that tiering marked is gone.
    any_keyed.expire(*any_keyed.snapshot_ids()[:-1])
    any_keyed.hot.trim(TABLET, 2)
    any_keyed.write(2, 3, v=1)
    any_keyed.round()
    assert any_keyed.values() == any_keyed.model_values() and any_keyed.stray_files() == set()


def test_a_table_that_was_registered_anew_at_an_older_state_is_tiered_again(keyed: Any) -> None:
    keyed.write(1, 2)
    keyed.round()
    older = keyed.load().metadata_location
    keyed.write(2, 3, v=1)
    keyed.delete(1)
    keyed.round()
    keyed.drop()
    keyed.catalog.iceberg.register_table(("db", "t"), older)
    assert keyed.ids() == [1, 2]
    keyed.write(4)
    keyed.round()
    assert keyed.values() == keyed.model_values()


def test_a_table_that_was_registered_anew_below_the_log_stops_the_round(keyed: Any) -> None:
    keyed.write(1, 2)
    keyed.round()
    older = keyed.load().metadata_location
    keyed.write(3)
    keyed.round()
    keyed.hot.trim(TABLET, 3)
    keyed.drop()
    keyed.catalog.iceberg.register_table(("db", "t"), older)
    with pytest.raises(LakeStateError, match="begins at 3, but its lake ends at 2"):
        keyed.round()


@pytest.mark.parametrize(("epoch", "error"), [(None, CommitConflictError), (1, TieringFencedError)])
def test_a_round_of_no_service_is_not_fenced(log: Any, epoch: int | None, error: type[Exception]) -> None:
    log.write(1)

    class Overtaken(LocalExecutor):
        def run(self, task: Any, items: Sequence[Any], *, name: str = "", undo: Any = None) -> list[Any]:
            log.round(epoch=2)
            return super().run(task, items, undo=undo)

    with pytest.raises(error):
        run_round(log.table, log.desc, log.hot, log.env, executor_of=lambda _: Overtaken(), epoch=epoch)
    assert log.ids() == [1] and len(log.data_files()) == 1


def test_a_round_reads_the_manifests_of_a_version_once(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed.write(1, 2, 3, 4)
    keyed.round()
    keyed.rewrite_foreign()
    keyed.write(2, v=1)
    keyed.delete(4)
    planned: list[Any] = []
    plan_files = DataScan.plan_files
    monkeypatch.setattr(DataScan, "plan_files", lambda scan: planned.append(scan) or plan_files(scan))
    # Rows are counted, because others were there, rows to delete are found, and files that delete them are written.
    keyed.round()
    assert keyed.load().inspect.delete_files().num_rows == 1
    assert len(planned) == 1 and keyed.values() == keyed.model_values()


def test_a_long_log_is_tiered_part_by_part(any_keyed: Any) -> None:
    any_keyed.write(*range(20))
    any_keyed.write(*range(0, 20, 2), v=1)
    moved, more = [], True
    while more:
        result = run_round(any_keyed.table, any_keyed.desc, any_keyed.hot, any_keyed.env, records_max=8)
        moved.append(sum(result.offsets.values()))
        more = result.more
    assert moved == [8, 16, 24, 32, 40]
    assert any_keyed.ids() == any_keyed.model_ids()
