"""Files are skipped alike, whether a snapshot's manifests are read or remembered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.env.recently_used import RecentlyUsed
from lakehead.iceberg import planner
from lakehead.iceberg.iceberg_table import native_table
from lakehead.iceberg.planner import all_files, plan_files, read_manifests
from lakehead.lake.union_read import pin
from lakehead.predicate import Bound

SCHEMA = pa.schema([("id", pa.int64()), ("land", pa.string()), ("v", pa.float64())])


def bounds() -> Iterator[Sequence[Bound]]:
    of_land = [[], [Bound("land", "==", "de")], [Bound("land", "in", ("at", "fr"))], [Bound("land", "is_null", None)]]
    of_id = [[], [Bound("id", ">=", 30)], [Bound("id", "<", 10)], [Bound("id", "==", 1000)]]
    of_v = [[], [Bound("v", ">", 0.5)], [Bound("v", "not_null", None)], [Bound("absent", "==", 1)]]
    for parts in itertools.product(of_land, of_id, of_v):
        yield list(itertools.chain.from_iterable(parts))


@pytest.fixture
def lake(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Table:
    """Of several rounds, with partitions of two kinds, and rows that were deleted."""
    monkeypatch.setattr(planner, "_known", RecentlyUsed(10_000, lambda known: known.size))
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["id", "land"], partition_by=["land"], lake="iceberg")
        for first, lands in ((0, ("de", "at")), (20, ("at", "fr")), (40, ("de",))):
            for land in lands:
                ids = range(first, first + 12)
                values = [None if i == 25 else i / 40 for i in ids]
                table.upsert(pa.table({"id": ids, "land": [land] * 12, "v": values}, schema=SCHEMA))
            con.tier("t")
        table.delete([(3, "de"), (21, "fr")])
        con.tier("t")
        pinned = pin(handle_of(table)).lake
        assert pinned is not None
        return native_table(pinned.table)


def test_what_is_remembered_is_skipped_as_manifests_say(lake: Table) -> None:
    sizes = set()
    snapshots = [None, *(s.snapshot_id for s in lake.metadata.snapshots)]
    for snapshot, some in itertools.product(snapshots, bounds()):
        wanted = read_manifests(lake, snapshot, some).files
        assert plan_files(lake, snapshot, some) == wanted
        sizes.add(len(wanted))
    assert len(sizes) > 3


def test_another_partitioning_is_skipped_by_its_own(keyed: Any) -> None:
    for first in (0, 20):
        keyed.write(*range(first, first + 10))
        keyed.round()
    lake = keyed.load()
    with lake.update_spec() as spec:
        spec.add_field("id", BucketTransform(4), "by_id")
    assert len(lake.specs()) == 2
    ops: tuple[Any, ...] = ("==", "<", ">=")
    for op, value in itertools.product(ops, (5, 15, 25)):
        some = [Bound("id", op, value)]
        assert plan_files(lake, None, some) == read_manifests(lake, None, some).files


def test_manifests_of_few_files_are_read_once(lake: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    files, one = plan_files(lake), Bound("id", "==", 5)
    of_land = plan_files(lake, None, [one])
    monkeypatch.setattr(planner, "scan_of", None)
    assert plan_files(lake) is files and all_files(lake).files is files
    assert plan_files(lake, None, [one]) == of_land


def test_those_of_many_are_read_as_far_as_needed(lake: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_FEW_FILES", 1)
    monkeypatch.setattr(planner, "_known", RecentlyUsed(100))
    assert plan_files(lake, None, [Bound("id", "==", 45)]) and all_files(lake).files
    assert planner._known.size == 0


@pytest.mark.parametrize("kind", ["list", "manifest"])
def test_what_is_remembered_of_a_file_that_changed_or_is_gone_is_not_used(lake: Table, kind: str) -> None:
    snapshot = lake.current_snapshot()
    assert snapshot is not None
    address = snapshot.manifest_list if kind == "list" else snapshot.manifests(lake.io)[0].manifest_path
    path, files = Path(address.removeprefix("file://")), plan_files(lake)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2] + bytes(100) + whole[len(whole) // 2 + 100 :]):
        path.write_bytes(damaged)
        with pytest.raises(lh.CorruptionError, match=path.name):
            plan_files(lake)
    path.unlink()
    with pytest.raises(lh.LakeFileMissingError, match=path.name):
        plan_files(lake, None, [Bound("id", "==", 5)])
    path.write_bytes(whole)
    assert plan_files(lake) == files


def test_of_each_table_one_snapshot_is_remembered(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_known", RecentlyUsed(10_000, lambda known: known.size))
    for key in range(5):
        keyed.write(key)
        keyed.round()
        assert len(plan_files(keyed.load())) == key + 1
    columns = len(keyed.load().schema().fields)
    assert planner._known.size == 6 * columns
    first = keyed.load().metadata.snapshots[0].snapshot_id
    assert len(plan_files(keyed.load(), first)) == 1 and planner._known.size == 2 * columns


def test_a_column_that_is_called_otherwise_is_so_in_what_is_remembered(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    lake = keyed.load()
    assert plan_files(lake) == plan_files(lake)
    with lake.update_schema() as schema:
        schema.rename_column("v", "w")
    assert plan_files(lake, None, [Bound("w", "==", 100)]) == []
