"""Which offsets a lake snapshot holds: rollbacks, expiry, foreign commits, time travel."""

from __future__ import annotations

from typing import Any

import pytest

from lakehead.errors import LakeStateError, SnapshotNotFoundError
from lakehead.iceberg.version import read_mark
from lakehead.lake.census import changed_by_others
from lakehead.lake.marks import MARK, find_round, mark_of, next_epoch
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


def offset(lake: Any, snapshot_id: int | None = None) -> int | None:
    mark = mark_of(lake.table.load(), snapshot_id)
    return mark.offsets[TABLET] if mark else None


def test_no_mark_before_the_first_round(log: Any) -> None:
    assert read_mark(log.load()) is None and next_epoch(log.table.load()) == 1
    log.append_foreign(1)
    assert read_mark(log.load()) is None


def test_the_nearest_marked_ancestor_decides(log: Any) -> None:
    log.write(1, 2)
    first = log.round(epoch=3)
    log.append_foreign(7)
    foreign = log.load().metadata.current_snapshot_id
    log.write(3)
    second = log.round()
    assert (offset(log), offset(log, first.snapshot_id), offset(log, foreign)) == (3, 2, 2)
    mark = read_mark(log.load())
    assert mark is not None and (mark.snapshot_id, mark.epoch, mark.table_id) == (second.snapshot_id, 3, "t1")
    assert next_epoch(log.table.load()) == 4
    assert find_round(log.table.load(), mark.round_id) == mark
    assert find_round(log.table.load(), "other") is None
    assert not changed_by_others(log.table.load()) and changed_by_others(log.table.load(), foreign)
    with pytest.raises(SnapshotNotFoundError):
        read_mark(log.load(), 12345)


def test_the_property_stands_in_for_an_expired_mark(log: Any) -> None:
    log.write(1, 2)
    result = log.round()
    log.append_foreign(7)
    first_foreign = log.load().metadata.current_snapshot_id
    log.append_foreign(8)
    log.expire(result.snapshot_id)
    mark = read_mark(log.load())
    assert mark is not None and (mark.snapshot_id, mark.offsets[TABLET]) == (result.snapshot_id, 2)
    # An older snapshot joined to the current one by listed parents holds the same.
    assert offset(log, first_foreign) == 2
    log.write(3)
    assert log.round().offsets == {TABLET: 3}
    assert log.ids() == [1, 2, 3, 7, 8]


def test_an_older_snapshot_is_not_told_by_a_newer_mark(log: Any) -> None:
    log.write(1)
    first = log.round()
    log.append_foreign(7)
    foreign = log.load().metadata.current_snapshot_id
    log.write(2)
    log.round()
    log.expire(first.snapshot_id)
    assert offset(log) == 2
    log.write(3)
    second = read_mark(log.load())
    log.round()
    assert second is not None
    log.expire(second.snapshot_id)
    with pytest.raises(LakeStateError, match="cannot be known"):
        read_mark(log.load(), foreign)


def test_a_rollback_stops_everything(log: Any) -> None:
    log.write(1)
    first = log.round()
    log.write(2)
    second = log.round()
    log.load().manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
    with pytest.raises(LakeStateError, match="rolled back"):
        read_mark(log.load())
    with pytest.raises(LakeStateError):
        log.round()
    # Time travel still works.
    assert (offset(log, first.snapshot_id), offset(log, second.snapshot_id)) == (1, 2)


def test_a_rollback_to_before_the_first_mark_is_seen_after_expiry(log: Any) -> None:
    log.append_foreign(7)
    foreign = log.load().metadata.current_snapshot_id
    assert foreign is not None
    log.write(1)
    result = log.round()
    log.load().manage_snapshots().rollback_to_snapshot(foreign).commit()
    log.expire(result.snapshot_id)
    with pytest.raises(LakeStateError):
        read_mark(log.load())
    assert offset(log, foreign) is None


def test_a_rollback_to_a_foreign_snapshot_is_seen_after_expiry(any_log: Any) -> None:
    any_log.write(1)
    any_log.round()
    any_log.append_foreign(7)
    any_log.write(2)
    any_log.round()
    first, foreign, second = any_log.snapshot_ids()
    any_log.roll_back(foreign)
    # Neither the mark that would decide nor the one that was rolled back is listed: the property alone tells of the
    # second, which the current snapshot does not hold.
    any_log.expire(first, second)
    with pytest.raises(LakeStateError, match="rolled back"):
        offset(any_log)
    with pytest.raises(LakeStateError, match="rolled back"):
        any_log.round()


def test_a_rollback_to_an_older_mark_is_tiered_again_once_the_newer_is_forgotten(any_log: Any) -> None:
    any_log.write(1)
    any_log.round()
    any_log.write(2)
    any_log.round()
    first, second = any_log.snapshot_ids()
    version = any_log.table.load()
    forgotten = version.snapshots[second].mark
    assert forgotten is not None and find_round(version, forgotten.round_id) == forgotten
    any_log.roll_back(first)
    with pytest.raises(LakeStateError, match="rolled back"):
        find_round(any_log.table.load(), forgotten.round_id)
    any_log.expire(second)
    assert find_round(any_log.table.load(), forgotten.round_id) is None and offset(any_log) == 1
    any_log.round()
    assert any_log.ids() == [1, 2] and offset(any_log) == 2


def test_a_property_without_sequence_number_is_believed(log: Any) -> None:
    log.write(1)
    result = log.round()
    log.append_foreign(7)
    with log.load().transaction() as transaction:
        text = log.load().properties[MARK].replace('"sequence-number": 1, ', "")
        assert "sequence-number" not in text
        transaction.set_properties({MARK: text})
    log.expire(result.snapshot_id)
    assert offset(log) == 1


def test_a_history_that_expiry_cut_behind_a_mark_that_is_listed_stops_until_it_is_expired_too(any_log: Any) -> None:
    any_log.write(1)
    any_log.round()
    any_log.append_foreign(7)
    any_log.append_foreign(8)
    first, foreign, _ = any_log.snapshot_ids()
    any_log.expire(foreign)
    with pytest.raises(LakeStateError, match=f"if it surely was not, expire snapshot {first} too"):
        offset(any_log)
    any_log.expire(first)
    assert offset(any_log) == 1
    any_log.write(2)
    any_log.round()
    assert any_log.ids() == [1, 2, 7, 8]
