"""What every `LakeTable` promises: held by PyIceberg on real files, and by the model that simulations use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.errors import CommitConflictError, LakeFileMissingError, LakeStateError
from lakehead.lake.census import changed_by_others
from lakehead.lake.lake_table import CommitAnswer, LakeChange, Outcome, StagedCommit, WrittenFile
from lakehead.lake.listing import SNAPSHOTS_SCHEMA
from lakehead.lake.marks import LakeVersion, find_round, mark_of
from lakehead.predicate import parse_predicate
from lakehead.predicate.read_spec import ReadSpec
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
    added = write(lake, base, rows(lake, start, end))
    return LakeChange("t1", 1, round_id, {TABLET: end}, added, deleted={TABLET: offsets(*dead)} if dead else {})


def write(lake: Any, base: LakeVersion, batches: list[pa.RecordBatch]) -> tuple[WrittenFile, ...]:
    return tuple(lake.table.writer(base, target_file_bytes=1 << 20).write(batches, TABLET))


def stage(lake: Any, base: LakeVersion, round_id: str, start: int, end: int, *dead: int) -> StagedCommit:
    staged: StagedCommit = lake.table.stage(base, change(lake, base, round_id, start, end, *dead))
    return staged


def commit(lake: Any, round_id: str, start: int, end: int, *dead: int) -> tuple[StagedCommit, CommitAnswer]:
    staged = stage(lake, lake.table.load(), round_id, start, end, *dead)
    return staged, lake.table.publish(staged)


def test_a_new_table_is_empty(any_log: Any) -> None:
    version = any_log.table.load()
    assert (version.current_id, dict(version.snapshots), version.name) == (None, {}, "db.t")
    assert mark_of(version) is None and list(any_log.table.plan(version)) == []
    assert any_log.table.load() == version


def test_a_commit_is_the_next_version(any_log: Any) -> None:
    first, answer = commit(any_log, "r1", 0, 3)
    second, next_answer = commit(any_log, "r2", 3, 5, 1)
    version = any_log.table.load()
    assert (answer.outcome, next_answer.outcome) == (Outcome.LANDED, Outcome.LANDED)
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
    by_offset = {f.offsets: f for f in any_log.table.plan(version)}
    old, new, foreign = by_offset[0, 2], by_offset[3, 4], by_offset[None]
    assert (old.tablet, old.record_count, len(old.delete_files), old.null_offsets) == (TABLET, 3, 1, 0)
    assert (new.tablet, new.delete_files) == (TABLET, ())
    assert (foreign.tablet, foreign.null_offsets, foreign.record_count) == (None, 1, 1)
    assert changed_by_others(version)


@pytest.mark.parametrize("backwards", [False, True])
def test_rows_to_delete_are_found_in_sorted_and_unsorted_files(any_log: Any, backwards: bool) -> None:
    commit(any_log, "r1", 0, 3)
    commit(any_log, "r2", 3, 6, 1)
    any_log.rewrite_foreign(backwards=backwards)
    (file,) = any_log.table.plan(any_log.table.load())
    assert (file.offsets, file.record_count, file.tablet) == ((0, 5), 5, TABLET)
    commit(any_log, "r3", 6, 6, 0, 4)
    assert any_log.ids() == [2, 3, 5]


@pytest.mark.parametrize("lacking", [7, 1])
def test_rows_that_are_not_there_cannot_be_deleted(any_log: Any, lacking: int) -> None:
    commit(any_log, "r1", 0, 3)
    commit(any_log, "r2", 3, 6, 1)
    any_log.rewrite_foreign()
    before = any_log.stray_files()
    with pytest.raises(LakeStateError, match="lacks 1 of 2 rows"):
        any_log.table.stage(any_log.table.load(), LakeChange("t1", 1, "r", {}, deleted={TABLET: offsets(0, lacking)}))
    assert any_log.stray_files() == before


def test_files_are_taken_out_for_others_with_the_same_rows(any_log: Any) -> None:
    commit(any_log, "r1", 0, 3)
    commit(any_log, "r2", 3, 5, 1)
    commit(any_log, "r3", 5, 7, 3)
    base = any_log.table.load()
    old = [f for f in any_log.table.plan(base) if f.offsets in ((0, 2), (3, 4))]
    live = pa.Table.from_batches(rows(any_log, 0, 5)).take([0, 2, 4]).to_batches()
    mark = LakeChange("t1", 1, "r4", {TABLET: 7}, write(any_log, base, live), tuple(old))
    assert any_log.table.publish(any_log.table.stage(base, mark)).outcome is Outcome.LANDED
    version = any_log.table.load()
    assert [(f.offsets, f.record_count, f.delete_files) for f in any_log.table.plan(version)] == [
        ((0, 4), 3, ()),
        ((5, 6), 2, ()),
    ]
    assert any_log.ids() == [0, 2, 4, 5, 6] and not changed_by_others(version)
    assert any_log.table.census(version).rows == {TABLET: 5}
    # What was there before is there still, and rows are deleted in what stays, not in what goes.
    assert any_log.table.census(version, snapshot_id=base.current_id).rows == {TABLET: 5}
    new, _ = any_log.table.plan(version)
    gone = LakeChange("t1", 1, "r5", {TABLET: 7}, removed=(new,), deleted={TABLET: offsets(5)})
    assert any_log.table.publish(any_log.table.stage(version, gone)).outcome is Outcome.LANDED
    assert any_log.ids() == [6]


def test_a_delete_file_goes_with_the_last_file_that_it_applies_to(any_log: Any) -> None:
    commit(any_log, "r1", 0, 3)
    commit(any_log, "r2", 3, 5, 1)
    base = any_log.table.load()
    old, _ = any_log.table.plan(base)
    live = pa.Table.from_batches(rows(any_log, 0, 3)).take([0, 2]).to_batches()
    mark = LakeChange("t1", 1, "r3", {TABLET: 5}, write(any_log, base, live), (old,))
    assert any_log.table.publish(any_log.table.stage(base, mark)).outcome is Outcome.LANDED
    any_log.expire(*any_log.snapshot_ids()[:-1])
    assert any_log.stray_files() == set() and any_log.ids() == [0, 2, 3, 4]
    assert len(any_log.table.plan(any_log.table.load())) == 2


# ---- files are written anew -----------------------------------------------------------------------------------------


def rewrite(lake: Any, base: LakeVersion, round_id: str = "c") -> LakeChange:
    """All files of the tablet become one, which holds their live rows; the mark stays where it was."""
    mark, old = mark_of(base), lake.table.plan(base)
    assert mark is not None
    live = list(lake.table.read(old, ReadSpec(tuple(lake.desc.schema.names), system_columns=True)))
    added = write(lake, base, live)
    return LakeChange("t1", 1, round_id, mark.offsets, added, removed=tuple(old), rows=mark.rows)


def history(lake: Any) -> LakeVersion:
    commit(lake, "r1", 0, 3)
    commit(lake, "r2", 3, 5, 1)
    commit(lake, "r3", 5, 7, 0, 3)
    version: LakeVersion = lake.table.load()
    return version


LIVE = [2, 4, 5, 6]


@pytest.mark.parametrize(
    ("fault", "outcome", "lands"),
    [
        (None, Outcome.LANDED, True),
        (Fault.REQUEST_LOST, Outcome.UNKNOWN, False),
        (Fault.ANSWER_LOST, Outcome.UNKNOWN, True),
        (Fault.REFUSED, Outcome.REFUSED, False),
        (Fault.REPEATED, Outcome.REFUSED, True),
    ],
)
def test_files_are_taken_out_for_others_or_not_at_all(
    any_log: Any, fault: Fault | None, outcome: Outcome, lands: bool
) -> None:
    base = history(any_log)
    planned = rewrite(any_log, base)
    staged = any_log.table.stage(base, planned)
    any_log.faults = [fault]
    assert any_log.table.publish(staged).outcome is outcome
    version = any_log.table.load()
    assert (find_round(version, "c") is not None) is lands and any_log.ids() == LIVE
    paths = {f.path for f in any_log.table.plan(version)}
    assert paths == {f.path for f in (planned.added if lands else planned.removed)}
    if lands:
        any_log.expire(*any_log.snapshot_ids()[:-1])
        assert not any_log.all_files() & {f.path for f in planned.removed}
    else:
        any_log.table.discard([*staged.written, *(f.path for f in planned.added)])
    assert any_log.stray_files() == set() and any_log.ids() == LIVE
    commit(any_log, "r4", 7, 8, 4)
    assert any_log.ids() == [2, 5, 6, 7]


def others_delete_what_is_rewritten(lake: Any) -> None:
    lake.delete_foreign(4)


def a_round_deletes_what_is_rewritten(lake: Any) -> None:
    commit(lake, "other", 7, 7, 4)


def another_compaction(lake: Any) -> None:
    base = lake.table.load()
    lake.table.publish(lake.table.stage(base, rewrite(lake, base, "other")))


MEANWHILE = [
    others_delete_what_is_rewritten,
    a_round_deletes_what_is_rewritten,
    another_compaction,
    lambda lake: lake.append_foreign(9),
    lambda lake: lake.rewrite_foreign(backwards=True),
    lambda lake: lake.roll_back(lake.snapshot_ids()[1]),
    lambda lake: lake.clean_up(),
]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("when", ["read", "staged", "on its way"])
def test_files_that_came_or_changed_meanwhile_are_not_taken_out(
    make_any: MakeLake, meanwhile: Callable[[Any], None], when: str
) -> None:
    lake = make_any(keyed=False, lands_late=True)
    base = history(lake)
    planned = rewrite(lake, base)
    if when == "read":
        meanwhile(lake)
    try:
        staged = lake.table.stage(base, planned)
    except CommitConflictError:
        assert (meanwhile, when) == (MEANWHILE[-1], "read"), "a clean-up alone takes the new file"
        staged = None
    if when == "staged":
        meanwhile(lake)
    if when == "on its way":
        lake.faults = [Fault.DELAYED]
    if staged is not None:
        answer = lake.table.publish(staged)
        assert answer.outcome is (Outcome.UNKNOWN if when == "on its way" else Outcome.REFUSED)
    if when == "on its way":
        meanwhile(lake)
    before = lake.table.load(), lake.ids(), lake.snapshot_ids()
    assert when != "on its way" or not lake.deliver()
    assert (lake.table.load(), lake.ids(), lake.snapshot_ids()) == before
    assert find_round(before[0], "c") is None
    lake.table.discard([*(staged.written if staged else ()), *(f.path for f in planned.added)])
    assert lake.stray_files() == set() and lake.ids() == before[1]


def test_a_rewrite_that_is_late_lands_where_nothing_came_between(make_any: MakeLake) -> None:
    lake = make_any(keyed=False, lands_late=True)
    base = history(lake)
    lake.faults = [Fault.DELAYED]
    lake.table.publish(lake.table.stage(base, rewrite(lake, base)))
    assert len(lake.table.plan(lake.table.load())) == 3
    assert lake.deliver() and lake.ids() == LIVE and len(lake.table.plan(lake.table.load())) == 1


def test_staging_calls_no_catalog(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    base = any_log.table.load()
    any_log.drop()
    staged = stage(any_log, base, "r2", 2, 4, 0)
    written = {p for p in staged.written if not p.endswith(".metadata.json")}
    assert staged.base is base and written and written <= any_log.all_files()


def test_what_is_published_twice_lands_once(any_log: Any) -> None:
    staged, first = commit(any_log, "r1", 0, 2)
    assert first.outcome is Outcome.LANDED
    assert any_log.table.publish(staged).outcome is Outcome.REFUSED
    assert any_log.ids() == [0, 1] and any_log.snapshot_ids() == [staged.snapshot_id]


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
    staged = stage(any_log, base, "r3", 2, 4)
    assert any_log.table.publish(staged).outcome is Outcome.REFUSED
    assert (any_log.table.load(), any_log.ids()) == before


def test_the_first_commit_lands_on_an_empty_table_only(any_log: Any) -> None:
    base = any_log.table.load()
    any_log.append_foreign(9)
    assert any_log.table.publish(stage(any_log, base, "r1", 0, 1)).outcome is Outcome.REFUSED
    assert any_log.ids() == [9]


def test_expiry_of_older_snapshots_moves_nothing(any_log: Any) -> None:
    """A format may refuse what was staged before it; staged anew, it lands."""
    commit(any_log, "r1", 0, 1)
    commit(any_log, "r2", 1, 2)
    base = any_log.table.load()
    any_log.expire(any_log.snapshot_ids()[0])
    now = any_log.table.load()
    if any_log.table.publish(stage(any_log, base, "r3", 2, 3)).outcome is Outcome.REFUSED:
        assert now != base
        assert any_log.table.publish(stage(any_log, now, "r3", 2, 3)).outcome is Outcome.LANDED
    assert any_log.ids() == [0, 1, 2]


@pytest.mark.parametrize("same_id", [True, False])
def test_a_table_made_anew_is_another_table(any_log: Any, same_id: bool) -> None:
    base = any_log.table.load()
    any_log.recreate("t1" if same_id else "t2")
    answer = any_log.table.publish(stage(any_log, base, "r1", 0, 1))
    assert answer.outcome is Outcome.REFUSED
    if same_id:
        assert any_log.table.load().table_uuid != base.table_uuid and any_log.ids() == []
    else:
        with pytest.raises(LakeStateError):
            any_log.table.load()


def test_a_dropped_table_takes_no_commit(any_log: Any) -> None:
    base = any_log.table.load()
    staged = stage(any_log, base, "r1", 0, 1)
    any_log.drop()
    assert any_log.table.publish(staged).outcome is not Outcome.LANDED
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
    staged, answer = commit(any_log, "r1", 0, 2)
    assert answer.outcome is outcome and answer.cause is not None and staged.written
    mark = find_round(any_log.table.load(), "r1")
    assert (mark.snapshot_id if mark else None) == (staged.snapshot_id if lands else None)
    assert any_log.ids() == ([0, 1] if lands else [])


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_delayed_commit_lands_on_its_base_or_not_at_all(make_any: MakeLake, overtaken: bool) -> None:
    lake = make_any(keyed=False, lands_late=True)
    assert lake.table.load() and lake.table.lands_late
    lake.faults = [Fault.DELAYED]
    assert commit(lake, "r1", 0, 2)[1].outcome is Outcome.UNKNOWN
    assert lake.ids() == []
    if overtaken:
        commit(lake, "r2", 5, 6)
    assert lake.deliver() is not overtaken
    assert lake.ids() == ([5] if overtaken else [0, 1])


def test_what_was_staged_and_the_change_are_all_that_a_refused_attempt_leaves(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    base = any_log.table.load()
    planned = change(any_log, base, "r2", 2, 4, 0)
    any_log.faults = [Fault.REFUSED]
    staged = any_log.table.stage(base, planned)
    any_log.table.publish(staged)
    assert any_log.stray_files()
    any_log.table.discard([*staged.written, *(f.path for f in planned.added)])
    assert any_log.stray_files() == set() and any_log.ids() == [0, 1]


def test_what_a_snapshot_added_is_known_while_it_is_listed(any_log: Any) -> None:
    first, _ = commit(any_log, "r1", 0, 2)
    base = any_log.table.load()
    planned = change(any_log, base, "r2", 2, 4, 0)
    second = any_log.table.stage(base, planned)
    any_log.table.publish(second)
    version = any_log.table.load()
    paths = {f.path for f in planned.added}
    added = any_log.table.added_paths(version, second.snapshot_id)
    assert added is not None and paths <= added
    earlier = {f.path for f in any_log.table.plan(base)}
    assert not earlier & added
    any_log.expire(first.snapshot_id)
    assert any_log.table.added_paths(any_log.table.load(), first.snapshot_id) is None


def test_files_that_are_gone_are_missed(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    base = any_log.table.load()
    any_log.lose(*(f.path for f in any_log.table.plan(base)))
    with pytest.raises(LakeFileMissingError):
        stage(any_log, base, "r2", 2, 3, 0)


def test_a_file_to_add_that_is_gone_stops_the_commit(any_log: Any) -> None:
    base = any_log.table.load()
    planned = change(any_log, base, "r1", 0, 2)
    any_log.table.discard(f.path for f in planned.added)
    with pytest.raises(CommitConflictError, match="was removed before the round"):
        any_log.table.stage(base, planned)
    assert any_log.stray_files() == set()


# ---- reads ----------------------------------------------------------------------------------------------------------


def read(lake: Any, spec: ReadSpec, superseded: Any = None, snapshot_id: int | None = None) -> list[tuple[Any, ...]]:
    """Rows as their columns' values, sorted."""
    version = lake.table.load()
    files = lake.table.plan(version, spec.bounds, snapshot_id=snapshot_id)
    batches = list(lake.table.read(files, spec, superseded))
    assert all(b.schema.names == list(spec.names) for b in batches)
    return sorted(tuple(row.values()) for b in batches for row in b.to_pylist())


@pytest.mark.parametrize("rewritten", [False, True])
def test_reads_leave_out_what_is_deleted_and_what_is_superseded(any_log: Any, rewritten: bool) -> None:
    commit(any_log, "r1", 0, 4)
    commit(any_log, "r2", 4, 6, 1)
    if rewritten:
        any_log.rewrite_foreign(backwards=True)
    assert read(any_log, ReadSpec(("id",))) == [(0,), (2,), (3,), (4,), (5,)]
    gone = {TABLET: offsets(1, 3, 4), TabletKey("", 9): offsets(0)}
    assert read(any_log, ReadSpec(("id",)), gone) == [(0,), (2,), (5,)]
    some = parse_predicate("id > 1 and v = 0", any_log.desc.schema)
    assert read(any_log, ReadSpec(("code", "id"), some), gone) == [(2, 2), (5, 5)]
    version = any_log.table.load()
    files = any_log.table.plan(version)
    assert any_log.table.count(files) == 5 and any_log.table.count(files, gone) == 3


def test_reads_have_the_columns_and_types_that_are_asked_for(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    version = any_log.table.load()
    (batch,) = any_log.table.read(any_log.table.plan(version), ReadSpec(("v", "__offset"), system_columns=True))
    own = pa.schema([*any_log.desc.schema, *SYSTEM_FIELDS])
    assert batch.schema.equals(pa.schema([own.field(n) for n in ("v", "__offset", "__bucket", "__timestamp")]))
    (batch,) = any_log.table.read(any_log.table.plan(version), ReadSpec(()))
    assert (batch.num_rows, batch.num_columns) == (2, 0)
    assert read(any_log, ReadSpec(("id",), parse_predicate("id > 9", any_log.desc.schema))) == []


def test_rows_of_others_stay_whatever_is_superseded(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    any_log.append_foreign(9, bucket=0)
    assert read(any_log, ReadSpec(("id",)), {TABLET: offsets(0)}) == [(1,), (9,)]


def test_older_snapshots_are_read_as_they_were(any_log: Any) -> None:
    first, _ = commit(any_log, "r1", 0, 2)
    commit(any_log, "r2", 2, 3, 0)
    assert read(any_log, ReadSpec(("id",))) == [(1,), (2,)]
    assert read(any_log, ReadSpec(("id",)), snapshot_id=first.snapshot_id) == [(0,), (1,)]
    listed = any_log.table.snapshots()
    assert listed.schema.equals(SNAPSHOTS_SCHEMA) and listed["snapshot_id"].to_pylist() == any_log.snapshot_ids()
    assert listed["round_id"].to_pylist() == ["r1", "r2"] and listed["is_current"].to_pylist() == [False, True]
    version = any_log.table.load()
    times = [int(t.timestamp() * 1_000_000) for t in listed["committed_at"].to_pylist()]
    assert any_log.table.snapshot_at(version, times[1]) == any_log.snapshot_ids()[1]
    assert any_log.table.snapshot_at(version, times[0] - 1000) is None


def test_an_older_snapshot_does_not_stand_in_for_one_that_expired(any_log: Any) -> None:
    for n in range(5):
        commit(any_log, f"r{n}", n, n + 1)
    ids, version = any_log.snapshot_ids(), any_log.table.load()
    times = [version.snapshots[i].committed_us for i in ids]
    assert [any_log.table.snapshot_at(version, t) for t in times] == ids
    any_log.expire(ids[2])
    version = any_log.table.load()
    found = [any_log.table.snapshot_at(version, t) for t in times]
    # Until when the second was current, nobody knows any more, but that it was when it was committed.
    assert found[1:] == [ids[1], None, *ids[3:]]


def test_a_file_that_is_gone_cannot_be_read(any_log: Any) -> None:
    commit(any_log, "r1", 0, 2)
    files = any_log.table.plan(any_log.table.load())
    any_log.lose(*(f.path for f in files))
    with pytest.raises(LakeFileMissingError):
        list(any_log.table.read(files, ReadSpec(("id",))))
