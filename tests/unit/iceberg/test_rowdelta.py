"""The snapshot producer: rewrites against concurrent deletes, and few manifests."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pyiceberg.exceptions import ValidationException
from pyiceberg.manifest import ManifestContent
from pyiceberg.table import snapshots
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import IdentityTransform

from lakehead.env.clock import SystemClock
from lakehead.iceberg import rowdelta
from lakehead.iceberg.planner import plan_files
from lakehead.iceberg.rowdelta import MANIFESTS_MAX


def test_a_rewrite_keeps_the_rows_and_drops_the_deletes(keyed: Any) -> None:
    keyed.write(1, 2, 3)
    keyed.round()
    keyed.write(2, v=1)
    keyed.delete(3)
    keyed.round()
    keyed.stage_rewrite().commit_transaction()
    table = keyed.load()
    assert keyed.ids() == [1, 2] and [f.delete_files for f in plan_files(table)] == [()]
    summary = table.current_snapshot().summary.additional_properties
    assert (summary["total-records"], summary["total-data-files"], summary["total-delete-files"]) == ("2", "1", "0")
    keyed.write(2, v=2)
    keyed.round()
    assert keyed.ids() == [1, 2]


@pytest.mark.parametrize("more_commits", [0, 1, 2])
def test_a_rewrite_never_brings_deleted_rows_back(keyed: Any, more_commits: int) -> None:
    keyed.write(1, 2, 3)
    keyed.round()
    staged = keyed.stage_rewrite()
    keyed.delete(2)
    keyed.round()
    for i in range(more_commits):
        keyed.write(10 + i)
        keyed.round()
    with pytest.raises(ValidationException):
        staged.commit_transaction()
    assert keyed.ids() == keyed.model_ids()


def test_a_rewrite_of_files_that_are_gone_is_refused(keyed: Any) -> None:
    keyed.write(1, 2)
    keyed.round()
    ours, theirs = keyed.stage_rewrite(), keyed.stage_rewrite()
    theirs.commit_transaction()
    with pytest.raises(ValidationException):
        ours.commit_transaction()
    assert keyed.ids() == [1, 2]


AHEAD_S = 365 * 86_400


class Ahead(SystemClock):
    """A year ahead."""

    def now_us(self) -> int:
        return super().now_us() + AHEAD_S * 1_000_000


def test_a_clock_that_goes_back_does_not_take_the_history_with_it(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time

    def check() -> list[int]:
        """What Java asks of it."""
        metadata = keyed.load().metadata
        times = [entry.timestamp_ms for entry in metadata.snapshot_log]
        files = [*(entry.timestamp_ms for entry in metadata.metadata_log), metadata.last_updated_ms]
        assert times == sorted(times) and files == sorted(files) and times[-1] <= files[-1]
        return times

    with monkeypatch.context() as patch:
        patch.setattr(snapshots.time, "time", lambda: real() + AHEAD_S)
        patch.setattr(rowdelta, "_CLOCK", Ahead())
        keyed.write(1)
        keyed.round()
    for key in (2, 3):
        keyed.write(key)
        keyed.round()
        assert check()[0] > (real() + AHEAD_S - 3600) * 1000
    keyed.load().transaction().set_properties(a="b").commit_transaction()
    check()
    keyed.table.expire(keyed.table.load(), keyed.snapshot_ids()[:1], lambda: [])
    check()
    assert keyed.ids() == [1, 2, 3]


def test_a_clock_that_leaps_ahead_for_a_moment_does_not_take_the_history_with_it(
    keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(snapshots.time, "time", lambda: real() + AHEAD_S)
        keyed.write(1)
        keyed.round()
    keyed.write(2)
    keyed.round()
    times = [entry.timestamp_ms for entry in keyed.load().metadata.snapshot_log]
    assert times == sorted(times) and times[-1] <= real() * 1000 + 1


def test_small_manifests_are_folded(keyed: Any) -> None:
    for i in range(3 * MANIFESTS_MAX):
        keyed.write(i, max(i - 1, 0))
        keyed.round()
    table = keyed.load()
    manifests = table.current_snapshot().manifests(table.io)
    for content in (ManifestContent.DATA, ManifestContent.DELETES):
        assert sum(m.content == content for m in manifests) <= MANIFESTS_MAX + 1
    assert keyed.ids() == keyed.model_ids()
    # Folding leaves each entry's own snapshot and order, by which deletes apply.
    entries = [e for m in manifests for e in m.fetch_manifest_entry(table.io)]
    assert len({e.snapshot_id for e in entries}) == 3 * MANIFESTS_MAX
    assert len({e.sequence_number for e in entries}) == 3 * MANIFESTS_MAX


def test_a_round_lands_after_a_change_that_no_row_shows(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    keyed.write(2)
    base = keyed.table.load()

    def sort_otherwise(step: str) -> None:
        if step != "commit":
            return
        keyed.on_step = lambda step: None
        with keyed.load().update_sort_order() as change:
            change.desc("id", IdentityTransform(), NullOrder.NULLS_LAST)

    keyed.on_step = sort_otherwise
    keyed.round()
    assert keyed.table.load() != base and keyed.ids() == [1, 2]
