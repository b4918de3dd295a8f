"""What every `LakeTable` promises: held by PyIceberg on real files, and by the model that simulations use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.errors import LakeFileMissingError, LakeStateError
from lakehead.lake.census import changed_by_others
from lakehead.lake.lake_table import CommitAnswer, Hit, LakeChange, LakeFile, Outcome
from lakehead.lake.marks import LakeVersion, find_round, mark_of
from lakehead.testing.lake import Fault
from lakehead.types import SYSTEM_FIELDS, TabletKey

TABLET = TabletKey("", 0)
MakeLake = Callable[..., Any]


def offsets(*values: int) -> Any:
    return np.array(values, np.int64)


def rows(lake: Any, start: int, end: int) -> list[pa.RecordBatch]:
    fields = [*lake.desc.schema, *SYSTEM_FIELDS]
    listed = [{"id": i, "code": i, "v": 0, "__bucket": 0, "__offset": i, "__timestamp": i} for i in range(start, end)]
    return [pa.RecordBatch.from_pylist(listed, pa.schema(fields))]


def change(lake: Any, base: LakeVersion, round_id: str, start: int, end: int, *dead: int) -> LakeChange:
    """Add rows of these offsets, and delete older ones."""
    data = lake.table.writer(base, target_file_bytes=1 << 20).write(rows(lake, start, end), TABLET)
    hits = []
    for f in lake.table.files(base) if dead else ():
        ((positions, _),) = lake.table.find_offsets([(f, offsets(*dead))])
        if len(positions):
            hits.append(Hit(f, positions))
    deletes = lake.table.write_deletes(base, hits)
    return LakeChange("t1", 1, round_id, {TABLET: end}, tuple(data), tuple(deletes))


def commit(lake: Any, round_id: str, start: int, end: int, *dead: int) -> CommitAnswer:
    base = lake.table.load()
    answer: CommitAnswer = lake.table.commit(base, change(lake, base, round_id, start, end, *dead))
    return answer


def test_a_new_table_is_empty(any_log: Any) -> None:
    version = any_log.table.load()
    assert (version.current_id, dict(version.snapshots), version.name) == (None, {}, "db.t")
    assert mark_of(version) is None and list(any_log.table.files(version)) == []
    assert any_log.table.load() == version


def test_a_commit_is_the_next_version(any_log: Any) -> None:
    first = commit(any_log, "r1", 0, 3)
    second = commit(any_log, "r2", 3, 5, 1)
    version = any_log.table.load()
    assert (first.outcome, second.outcome) == (Outcome.LANDED, Outcome.LANDED)
    assert [s.snapshot_id for s in version.lineage()] == [second.snapshot_id, first.snapshot_id]
    assert [s.sequence_number for s in version.lineage()] == [2, 1]
    mark = mark_of(version)
    assert mark is not None and mark == version.stored_mark == find_round(version, "r2")
    assert (mark.snapshot_id, mark.table_id, mark.epoch, mark.offsets) == (second.snapshot_id, "t1", 1, {TABLET: 5})
    assert not changed_by_others(version)
    assert any_log.ids() == [0, 2, 3, 4] and any_log.stray_files() == set()


def test_files_tell_offsets_deletes_and_tablets(any_log: Any) -> None:
    commit(any_log, "r1", 0, 3)
    commit(any_log, "r2", 3, 5, 1)
    any_log.append_foreign(9)
    version = any_log.table.load()
    by_offset = {f.offsets: f for f in any_log.table.files(version)}
    old, new, foreign = by_offset[0, 2], by_offset[3, 4], by_offset[None]
    assert (old.tablet, old.record_count, len(old.delete_files), old.null_offsets) == (TABLET, 3, 1, 0)
    assert (new.tablet, new.delete_files) == (TABLET, ())
    assert (foreign.tablet, foreign.null_offsets, foreign.record_count) == (None, 1, 1)
    assert changed_by_others(version)


@pytest.mark.parametrize("backwards", [False, True])
def test_offsets_are_found_in_sorted_and_unsorted_files(any_log: Any, backwards: bool) -> None:
    commit(any_log, "r1", 0, 3)
    commit(any_log, "r2", 3, 6, 1)
    any_log.rewrite_foreign(backwards=backwards)
    (file,) = any_log.table.files(any_log.table.load())
    assert (file.offsets, file.record_count, file.tablet) == ((0, 5), 5, TABLET)
    ((positions, found),) = any_log.table.find_offsets([(file, offsets(0, 1, 4, 7))])
    held = [0, 2, 3, 4, 5][:: -1 if backwards else 1]
    assert positions.tolist() == sorted(held.index(o) for o in (0, 4))
    assert [held[p] for p in positions] == found.tolist()


def others_append(lake: Any) -> None:
    lake.append_foreign(9)


def others_compact(lake: Any) -> None:
    lake.rewrite_foreign()


def others_delete(lake: Any) -> None:
    lake.delete_foreign(0)


def another_round(lake: Any) -> None:
    commit(lake, "other", 2, 3)


def roll_back(lake: Any) -> None:
    lake.roll_back(lake.snapshot_ids()[0])


@pytest.mark.parametrize("event", [others_append, others_compact, others_delete, another_round, roll_back])
def test_a_commit_lands_on_its_base_or_not_at_all(any_log: Any, event: Callable[[Any], None]) -> None:
    commit(any_log, "r1", 0, 1)
    commit(any_log, "r2", 1, 2)
    base = any_log.table.load()
    event(any_log)
    before = any_log.table.load(), any_log.ids()
    planned = change(any_log, base, "r3", 2, 4)
    assert any_log.table.commit(base, planned).outcome is Outcome.REFUSED
    assert (any_log.table.load(), any_log.ids()) == before


def test_the_first_commit_lands_on_an_empty_table_only(any_log: Any) -> None:
    base = any_log.table.load()
    any_log.append_foreign(9)
    assert any_log.table.commit(base, change(any_log, base, "r1", 0, 1)).outcome is Outcome.REFUSED
    assert any_log.ids() == [9]


def test_expiry_of_older_snapshots_moves_nothing(any_log: Any) -> None:
    commit(any_log, "r1", 0, 1)
    commit(any_log, "r2", 1, 2)
    base = any_log.table.load()
    any_log.expire(any_log.snapshot_ids()[0])
    assert any_log.table.commit(base, change(any_log, base, "r3", 2, 3)).outcome is Outcome.LANDED
    assert any_log.ids() == [0, 1, 2]


@pytest.mark.parametrize("same_id", [True, False])
def test_a_table_made_anew_is_another_table(any_log: Any, same_id: bool) -> None:
    base = any_log.table.load()
    any_log.recreate("t1" if same_id else "t2")
    answer = any_log.table.commit(base, change(any_log, base, "r1", 0, 1))
    assert answer.outcome is Outcome.REFUSED
    if same_id:
        assert any_log.table.load().table_uuid != base.table_uuid and any_log.ids() == []
    else:
        with pytest.raises(LakeStateError):
            any_log.table.load()


def test_a_dropped_table_takes_no_commit(any_log: Any) -> None:
    base = any_log.table.load()
    planned = change(any_log, base, "r1", 0, 1)
    any_log.drop()
    assert any_log.table.commit(base, planned).outcome is not Outcome.LANDED
    with pytest.raises(LakeStateError):
        any_log.table.load()


@pytest.mark.parametrize(
    ("fault", "outcome", "lands"),
    [
        (Fault.REQUEST_LOST, Outcome.UNKNOWN, False),
        (Fault.ANSWER_LOST, Outcome.UNKNOWN, True),
        (Fault.REFUSED, Outcome.REFUSED, False),
        (Fault.REPEATED, Outcome.REFUSED, True),
    ],
)
def test_what_an_attempt_is_told_is_not_what_happened(
    any_log: Any, fault: Fault, outcome: Outcome, lands: bool
) -> None:
    any_log.faults = [fault]
    answer = commit(any_log, "r1", 0, 2)
    assert answer.outcome is outcome and answer.cause is not None and answer.leftovers
    mark = find_round(any_log.table.load(), "r1")
    assert (mark.snapshot_id if mark else None) == (answer.snapshot_id if lands else None)
    assert any_log.ids() == ([0, 1] if lands else [])


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_delayed_commit_lands_on_its_base_or_not_at_all(make_any: MakeLake, overtaken: bool) -> None:
    lake = make_any(keyed=False, lands_late=True)
    assert lake.table.load() and lake.table.lands_late
    lake.faults = [Fault.DELAYED]
    assert commit(lake, "r1", 0, 2).outcome is Outcome.UNKNOWN
    assert lake.ids() == []
    if overtaken:
        commit(lake, "r2", 5, 6)
    assert lake.deliver() is not overtaken
    assert lake.ids() == ([5] if overtaken else [0, 1])


def test_leftovers_and_the_change_are_all_that_a_refused_attempt_leaves(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    base = any_log.table.load()
    planned = change(any_log, base, "r2", 2, 4, 0)
    any_log.faults = [Fault.REFUSED]
    answer = any_log.table.commit(base, planned)
    assert any_log.stray_files()
    any_log.table.discard([*answer.leftovers, *(f.path for f in (*planned.data, *planned.deletes))])
    assert any_log.stray_files() == set() and any_log.ids() == [0, 1]


def test_what_a_snapshot_added_is_known_while_it_is_listed(any_log: Any) -> None:
    first = commit(any_log, "r1", 0, 2)
    base = any_log.table.load()
    planned = change(any_log, base, "r2", 2, 4, 0)
    second = any_log.table.commit(base, planned)
    version = any_log.table.load()
    paths = {f.path for f in (*planned.data, *planned.deletes)}
    added = any_log.table.added_paths(version, second.snapshot_id)
    assert added is not None and paths <= added
    earlier = {f.path for f in any_log.table.files(base)}
    assert not earlier & added
    any_log.expire(first.snapshot_id)
    assert any_log.table.added_paths(any_log.table.load(), first.snapshot_id) is None


def test_files_that_are_gone_are_missed(any_log: Any) -> None:
    lost = LakeFile("file:///nowhere/a.parquet", 1, 1, TABLET, (0, 0), 0, (), (0,))
    any_log.table.load()
    with pytest.raises(LakeFileMissingError):
        any_log.table.find_offsets([(lost, offsets(0))])
