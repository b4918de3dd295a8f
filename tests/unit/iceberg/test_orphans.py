"""Orphan clean-up: what nothing names goes when it is old, and nothing else ever does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException

from lakehead.env.clock import SystemClock
from lakehead.errors import CommitConflictError, CommitUnknownError, LakeStateError, UnavailableError
from lakehead.iceberg import staging
from lakehead.iceberg.file_io import storage_properties
from lakehead.iceberg.lake_catalog import open_metadata
from lakehead.iceberg.orphans import Orphan, remove_orphans
from lakehead.lake.census import changed_by_others
from lakehead.lake.lake_table import LakeChange
from lakehead.protocol.messages import LakeUse
from lakehead.testing.lake import Fault

HOUR_MS = 3_600_000


class LaterClock(SystemClock):
    """So many hours from now."""

    def __init__(self, hours: float) -> None:
        self._us = int(hours * HOUR_MS * 1000)

    def now_us(self) -> int:
        return super().now_us() + self._us


def clean(lake: Any, *, hours: float = 48, **options: Any) -> list[Orphan]:
    """Remove what is older than a day, so many hours from now."""
    return remove_orphans(lake.load, older_than_ms=24 * HOUR_MS, clock=LaterClock(hours), **options)


def files(lake: Any) -> set[str]:
    return {str(p) for p in lake.folder.rglob("*") if p.is_file()}


def history(lake: Any) -> None:
    lake.write(1, 2, 3)
    lake.round()
    lake.write(2, 4, v=1)
    lake.delete(3)
    lake.round()
    lake.append_foreign(9) if not lake.desc.keyed else lake.rewrite_foreign()
    lake.write(1, v=2)
    lake.round()


@pytest.mark.parametrize("kind", ["keyed", "log"])
def test_a_sound_lake_has_no_orphans(request: pytest.FixtureRequest, kind: str) -> None:
    lake: Any = request.getfixturevalue(kind)
    if kind == "log":
        lake.delete = lambda *ids: None
    history(lake)
    before = files(lake)
    assert clean(lake) == [] and files(lake) == before


class Killed(BaseException):
    """A process that ends."""


STEPS = [("write data", 0), ("load", 1), ("write deletes", 0), ("commit", 0), ("committed", 0)]


@pytest.mark.parametrize("fault", [None, Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.REFUSED])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s[0]} {s[1] + 1}")
def test_after_a_crash_and_a_round_nothing_is_left_that_no_snapshot_names(
    keyed: Any, step: tuple[str, int], fault: Fault | None
) -> None:
    history(keyed)
    keyed.write(5, 4, 1, v=3)
    left = [step[1]]

    def on_step(name: str) -> None:
        if name == step[0]:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    keyed.on_step = on_step
    keyed.faults = [fault]
    with pytest.raises(Killed):
        keyed.round()
    keyed.on_step, keyed.faults = lambda step: None, []
    keyed.round()
    strays = keyed.stray_files()
    removed = {o.path for o in clean(keyed)}
    assert strays <= removed and keyed.stray_files() == set()
    # Beyond data and manifests, only metadata files of commits that lost.
    assert all(p.endswith(".metadata.json") for p in removed - strays)
    assert keyed.values() == keyed.model_values() and clean(keyed) == []


@pytest.mark.parametrize("died", [False, True])
def test_the_metadata_of_a_commit_that_lost_goes(keyed: Any, died: bool) -> None:
    keyed.write(1)
    keyed.round()
    staged = keyed.table.stage(keyed.table.load(), LakeChange("t1", 1, "r", {}))
    keyed.append_foreign(7, bucket=0)
    assert isinstance(keyed.table.publish(staged).cause, CommitFailedException)
    metadata = [p for p in staged.written if p.endswith(".metadata.json")]
    keyed.table.discard(p for p in staged.written if not died or p not in metadata)
    assert [o.path for o in clean(keyed)] == metadata * died
    assert keyed.ids() == [1, 7]


def stray(lake: Any, name: str = "data/0123456789abcdef.parquet", *, inside: str = "") -> Path:
    path = Path(lake.load().location().removeprefix("file://")) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(inside)
    return path


@pytest.mark.parametrize(("hours", "goes"), [(0, False), (23.9, False), (24.1, True)])
def test_a_file_goes_by_its_age(keyed: Any, hours: float, goes: bool) -> None:
    keyed.write(1)
    keyed.round()
    path = stray(keyed, inside="abc")
    removed = clean(keyed, hours=hours)
    assert [(o.path, o.size) for o in removed] == ([(f"file://{path}", 3)] if goes else [])
    assert path.exists() is not goes


def test_a_round_in_flight_keeps_its_files(keyed: Any) -> None:
    keyed.write(1, 2)
    keyed.round()
    keyed.write(1, 3)
    cleaned: list[Any] = []

    def on_step(step: str) -> None:
        cleaned.extend(clean(keyed, hours=23))

    keyed.on_step = on_step
    keyed.round()
    assert cleaned == [] and keyed.values() == keyed.model_values()


def test_a_file_that_is_committed_while_orphans_are_sought_stays(keyed: Any) -> None:
    keyed.write(1)
    looks: list[Any] = []

    def load() -> Any:
        looks.append(None)
        table = keyed.load()
        if len(looks) == 2:
            keyed.round()
            table = keyed.load()
        return table

    assert remove_orphans(load, older_than_ms=0, clock=LaterClock(1)) == []
    assert keyed.ids() == [1]


def test_a_dry_run_removes_nothing(keyed: Any) -> None:
    path = stray(keyed)
    (would,) = clean(keyed, dry_run=True)
    assert path.exists() and would.path == f"file://{path}"
    assert clean(keyed) == [would] and not path.exists()


@pytest.mark.parametrize("name", ["README.md", "notes/a.csv", "metadata/version-hint.text", "data/.a.parquet.crc"])
def test_files_of_other_kinds_are_not_looked_at(keyed: Any, name: str) -> None:
    path = stray(keyed, name)
    assert clean(keyed) == [] and path.exists()


@pytest.mark.parametrize("prefix", ["file:", "file://", ""])
def test_spelling_is_no_difference(keyed: Any, prefix: str) -> None:
    """Java writes ``file:/x`` where PyIceberg writes ``file:///x``."""
    from pyiceberg.table import Transaction

    from lakehead.iceberg.data_files import LakeWriteSpec, write_data_files
    from lakehead.iceberg.rowdelta import RowDelta, to_data_file

    keyed.write(1)
    table = keyed.load()
    spec = LakeWriteSpec.of(table, target_file_bytes=1)
    (rows,) = keyed.hot.read(next(iter(keyed.hot.watermarks())), 0, 1)
    rows = rows.append_column("__bucket", pa.array([0], pa.int32())).drop_columns(["__change_type", "__prev_offset"])
    (written,) = write_data_files(spec, [rows], (0,))
    plain = written.path.removeprefix("file://")
    data = to_data_file(type(written)(**{**vars(written), "path": f"{prefix}{plain}"}))
    transaction = Transaction(table)
    delta = RowDelta(transaction, {})
    delta.append_data_file(data)
    delta.commit()
    transaction.commit_transaction()
    assert clean(keyed) == [] and Path(plain).exists()


def test_what_others_expired_goes_and_what_somebody_still_reads_stays(keyed: Any) -> None:
    keyed.write(1, 2)
    keyed.round()
    keyed.rewrite_foreign()
    pinned = keyed.load()
    keyed.rewrite_foreign(backwards=True)
    keyed.rewrite_foreign()
    old = keyed.snapshot_ids()[:-1]
    # PyIceberg's expiry leaves the files.
    keyed.load().maintenance.expire_snapshots().by_ids(old).commit()
    removed = clean(keyed, also_reachable=[LakeUse(metadata=pinned.metadata_location)])
    assert removed and not any(o.path.endswith(".metadata.json") for o in removed)
    reader = open_metadata(pinned.metadata_location, storage_properties(pinned.io))
    assert sorted(reader.scan().to_arrow()["id"].to_pylist()) == [1, 2]
    # Which snapshots were expired and removed before does not matter to it.
    assert clean(keyed, also_reachable=[LakeUse(metadata=pinned.metadata_location)]) == []
    assert clean(keyed) and keyed.ids() == [1, 2] and keyed.stray_files() == set()
    with pytest.raises(FileNotFoundError):
        reader.scan().to_arrow()


def test_a_lease_whose_metadata_is_gone_stops_the_clean_up(keyed: Any) -> None:
    path = stray(keyed)
    with pytest.raises(UnavailableError, match="remove files when the read has ended"):
        clean(keyed, also_reachable=[LakeUse(metadata=f"{keyed.load().location()}/metadata/gone.metadata.json")])
    assert path.exists()


def test_a_damaged_lake_is_not_cleaned(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    path = stray(keyed)
    Path(keyed.load().current_snapshot().manifest_list.removeprefix("file://")).unlink()
    with pytest.raises(LakeStateError, match="lacks a file"):
        clean(keyed)
    assert path.exists()


# ---- other tables ---------------------------------------------------------------------------------------------------


@pytest.fixture
def neighbour(keyed: Any) -> Callable[[str], Any]:
    """Makes another table, with rows, whose folder is the lake table's own or one inside it."""

    def make(inside: str) -> Any:
        catalog = keyed.catalog.iceberg
        location = f"{keyed.load().location()}{inside}"
        table = catalog.create_table("db.neighbour", keyed.load().schema(), location=location)
        rows = keyed.load().scan().to_arrow()
        table.append(rows)
        table.append(rows)
        return table

    return make


@pytest.mark.parametrize("inside", ["", "/nested"])
@pytest.mark.parametrize("dropped", [False, True])
def test_files_of_another_table_stay(keyed: Any, neighbour: Any, inside: str, dropped: bool) -> None:
    keyed.write(1)
    keyed.round()
    other = neighbour(inside)
    metadata = other.metadata_location
    if dropped:
        # Without its files: who registers it again has it back.
        keyed.catalog.iceberg.drop_table("db.neighbour")
    before = files(keyed)
    path = stray(keyed)
    assert [o.path for o in clean(keyed)] == [f"file://{path}"] and before <= files(keyed)
    reader = open_metadata(metadata, storage_properties(keyed.load().io))
    assert reader.scan().to_arrow()["id"].to_pylist() == [1, 1]


def test_what_a_nested_table_has_not_committed_yet_stays(keyed: Any, neighbour: Any) -> None:
    neighbour("/nested")
    path = stray(keyed, "nested/data/a.parquet")
    assert clean(keyed) == [] and path.exists()


def test_a_neighbour_that_cannot_be_read_stops_the_clean_up(keyed: Any) -> None:
    stray(keyed, "metadata/9.metadata.json", inside='{"format-version": 9, "table-uuid": "x"}')
    path = stray(keyed)
    with pytest.raises(LakeStateError, match="unknown kind"):
        clean(keyed)
    assert path.exists()


def test_metadata_that_was_half_written_is_an_orphan(keyed: Any) -> None:
    half = stray(keyed, "metadata/9.metadata.json", inside='{"format-version": 2, "table-uu')
    zipped = stray(keyed, "metadata/9.gz.metadata.json", inside="not gzip")
    assert len(clean(keyed)) == 2 and not half.exists() and not zipped.exists()


def test_a_folder_that_is_missing_has_no_orphans(keyed: Any) -> None:
    table = keyed.load()
    shutil.rmtree(table.location().removeprefix("file://"))
    assert remove_orphans(lambda: table, older_than_ms=0, clock=SystemClock()) == []


@pytest.mark.parametrize("name", ["data/0123456789abcdef.parquet", "metadata/9.metadata.json"])
def test_a_file_that_goes_by_itself_is_no_error(keyed: Any, name: str) -> None:
    path = stray(keyed, name)
    looks: list[Any] = []

    def load() -> Any:
        looks.append(None)
        if len(looks) == 2:
            os.unlink(path)
        return keyed.load()

    remove_orphans(load, older_than_ms=0, clock=LaterClock(1))
    assert not path.exists()


@pytest.mark.parametrize("look", [2, 4])
def test_what_others_expire_while_orphans_are_sought_is_no_damage(keyed: Any, look: int) -> None:
    keyed.write(1, 2)
    keyed.round()
    keyed.rewrite_foreign()
    path, looks = stray(keyed), 0

    def load() -> Any:
        nonlocal looks
        looks += 1
        table = keyed.load()
        if looks == look:
            *old, _ = keyed.snapshot_ids()
            keyed.expire(*old)
        return table

    removed = remove_orphans(load, older_than_ms=0, clock=LaterClock(1))
    assert f"file://{path}" in {o.path for o in removed} and keyed.ids() == [1, 2] and keyed.stray_files() == set()


def test_snapshots_expire_beside_another_expiry(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed.write(1, 2)
    keyed.round()
    keyed.rewrite_foreign()
    keyed.rewrite_foreign()
    first, second, _ = keyed.snapshot_ids()
    loads, load = 0, keyed.table._load

    def load_late() -> Any:
        nonlocal loads
        loads += 1
        table = load()
        if loads == 2:
            keyed.expire(second)
        return table

    monkeypatch.setattr(keyed.table, "_load", load_late)
    assert keyed.table.expire(keyed.table.load(), [first], list).snapshots == 1
    assert loads > 2 and keyed.ids() == [1, 2] and keyed.stray_files() == set()


@pytest.mark.parametrize("fault", [None, Fault.ANSWER_LOST, Fault.DELAYED])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s[0]} {s[1] + 1}")
def test_a_round_does_not_commit_what_a_clean_up_took(
    make_any: Callable[..., Any], step: tuple[str, int], fault: Fault | None
) -> None:
    lake = make_any(lands_late=fault is Fault.DELAYED)
    lake.write(1, 2, 3)
    lake.round()
    lake.write(2, 4, v=1)
    lake.faults = [fault] if fault else []
    left = step[1]

    def clean_up(at: str) -> None:
        nonlocal left
        if at == step[0]:
            left -= 1
            if left < 0:
                lake.on_step = lambda step: None
                faults, lake.faults = lake.faults, []
                lake.clean_up()
                lake.faults = faults

    lake.on_step = clean_up
    try:
        lake.round()
    except (CommitConflictError, CommitUnknownError):
        lake.deliver() if fault is Fault.DELAYED else None
        lake.round()
    while fault is Fault.DELAYED and lake.deliver():
        continue
    assert lake.values() == lake.model_values()
    lake.stray_files()  # nothing that a snapshot names is gone
    assert left < 0, "it came in between"


def test_a_clean_up_without_orphans_leaves_no_trace(keyed: Any) -> None:
    history(keyed)
    before = keyed.snapshot_ids()
    assert clean(keyed) == [] and keyed.snapshot_ids() == before
    stray(keyed)
    assert clean(keyed) and len(keyed.snapshot_ids()) == len(before) + 1
    assert not changed_by_others(keyed.table.load())
    keyed.write(5)
    keyed.round()
    assert keyed.values() == keyed.model_values()


def test_an_empty_lake_is_cleaned(keyed: Any) -> None:
    stray(keyed)
    assert clean(keyed)
    keyed.write(1)
    keyed.round()
    assert keyed.values() == keyed.model_values()


def test_a_busy_table_is_not_cleaned(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stray(keyed)
    before = keyed.all_files()
    monkeypatch.setattr(staging, "swap_metadata", lambda *_: (_ for _ in ()).throw(CommitFailedException))
    with pytest.raises(CommitConflictError):
        clean(keyed)
    assert path.exists() and keyed.all_files() == before


def test_an_announcement_that_is_delivered_twice_has_landed(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second delivery is refused; what the first one made the table's stays."""
    history(keyed)
    path, swap = stray(keyed), staging.swap_metadata

    def deliver_twice(*args: Any) -> None:
        swap(*args)
        swap(*args)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "swap_metadata", deliver_twice)
        assert [o.path.removeprefix("file://") for o in clean(keyed)] == [str(path)]
    assert keyed.stray_files() == set() and keyed.values() == keyed.model_values()
    keyed.write(8)
    keyed.round()
    assert keyed.values() == keyed.model_values()
