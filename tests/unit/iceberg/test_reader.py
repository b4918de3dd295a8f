"""Reads beside what other engines leave in a lake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lakehead.env.recently_used import RecentlyUsed
from lakehead.errors import LakeStateError
from lakehead.iceberg import data_files, positions
from lakehead.iceberg.file_io import locate_file
from lakehead.iceberg.planner import plan_files
from lakehead.iceberg.reader import count_lake, read_lake
from lakehead.iceberg.snapshots import snapshots_table
from lakehead.lake.listing import files_table
from lakehead.predicate import parse_predicate
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


def ids(lake: Any, *, where: str | None = None, **options: Any) -> list[int]:
    table = lake.load()
    predicate = parse_predicate(where, lake.desc.schema) if where else None
    bounds = predicate.bounds if predicate else ()
    batches = read_lake(table, lake.desc, plan_files(table, bounds=bounds), predicate=predicate, **options)
    return sorted(i for b in batches for i in b.column("id").to_pylist())


def count(lake: Any, **options: Any) -> int:
    table = lake.load()
    return count_lake(table, lake.desc, plan_files(table), **options)


def offsets(*values: int) -> dict[TabletKey, Any]:
    return {TABLET: np.array(values, np.int64)}


def test_an_empty_lake_has_no_rows(keyed: Any) -> None:
    assert ids(keyed) == [] and count(keyed) == 0
    assert snapshots_table(keyed.load()).num_rows == files_table(plan_files(keyed.load())).num_rows == 0


def test_superseded_rows_are_left_out_beside_deleted_ones(keyed: Any) -> None:
    keyed.write(1, 2, 3, 4)
    keyed.round()
    keyed.delete(1, 2)
    keyed.round()
    assert ids(keyed) == [3, 4]
    # 2 is deleted already: it counts once.
    assert ids(keyed, superseded=offsets(1, 3)) == [3] and count(keyed, superseded=offsets(1, 3)) == 1
    assert ids(keyed, superseded=offsets(1, 3), where="v = 0 and id < 9") == [3]
    assert ids(keyed, superseded={TabletKey("", 9): np.array([2], np.int64)}) == [3, 4]


@pytest.mark.parametrize("group_rows", [1, 3, 64])
def test_rows_are_left_out_by_position_whatever_row_groups_a_filter_skips(
    keyed: Any, group_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(group_rows)
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", (group_rows, group_rows))
    monkeypatch.setattr(data_files, "ROW_GROUP_BYTES", (0, 1 << 28))
    keyed.write(*range(40))
    keyed.round()
    keyed.write(*range(0, 60, 3))  # offsets with gaps, and deletes in the first file
    keyed.round()
    keyed.delete(*range(0, 60, 7))
    keyed.round()
    for f in plan_files(keyed.load()):
        fs, path = locate_file(keyed.io, f.path)
        assert pq.ParquetFile(path, filesystem=fs).num_row_groups >= f.record_count / group_rows
    monkeypatch.setattr(positions, "_groups", RecentlyUsed(64 << 20))
    monkeypatch.setattr(positions, "_bounds", RecentlyUsed(4096))
    rows = keyed.load().scan().to_arrow().select(["id", "v", "__offset"]).to_pylist()
    for _ in range(20):
        gone = np.unique(rng.integers(0, 90, rng.integers(0, 40)))
        least = int(rng.integers(0, 60))
        live = [r for r in rows if r["__offset"] not in gone]
        superseded = offsets(*gone)
        assert ids(keyed, superseded=superseded) == sorted(r["id"] for r in live)
        assert count(keyed, superseded=superseded) == len(live)
        found = ids(keyed, superseded=superseded, where=f"id >= {least} and id < {least + 9}", columns=["id"])
        assert found == sorted(r["id"] for r in live if least <= r["id"] < least + 9)
        none = read_lake(keyed.load(), keyed.desc, plan_files(keyed.load()), columns=[], superseded=superseded)
        assert sum(b.num_rows for b in none) == len(live)


def test_what_manifests_say_of_other_files_decides_nothing_about_superseded_rows(keyed: Any) -> None:
    for first in (0, 4, 8):
        keyed.write(*range(first, first + 4))
        keyed.round()
    table = keyed.load()
    for wrong in (1, 3, 9):
        files = [
            replace(f, record_count=f.record_count if f.offsets and f.offsets[0] == 4 else wrong)
            for f in plan_files(table)
        ]
        rows = read_lake(table, keyed.desc, files, columns=["id"], superseded=offsets(5, 6))
        assert sorted(i for b in rows for i in b["id"].to_pylist()) == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]


def test_rows_of_others_stay_and_may_be_deleted_by_position(log: Any) -> None:
    log.write(1, 2)
    log.round()
    log.append_foreign(7, 8, bucket=0)
    assert ids(log) == [1, 2, 7, 8] and ids(log, superseded=offsets(0, 1)) == [7, 8]
    delete_by_position(log, {7: 0})
    assert ids(log) == [1, 2, 8] and count(log) == 3
    assert ids(log, where="id > 1 and v = 0") == [2, 8]
    assert ids(log, superseded=offsets(0)) == [2, 8] and count(log, superseded=offsets(0)) == 2


def delete_by_position(log: Any, rows: dict[int, int]) -> None:
    """What an engine that merges on read does: position deletes for rows of any file."""
    from pyiceberg.table import Transaction

    from lakehead.iceberg.data_files import LakeWriteSpec, write_position_deletes
    from lakehead.iceberg.rowdelta import RowDelta, to_data_file

    table = log.load()
    spec = LakeWriteSpec.of(table, target_file_bytes=1 << 20)
    transaction = Transaction(table)
    delta = RowDelta(transaction, {})
    for id_, position in rows.items():
        (task,) = table.scan(row_filter=f"id = {id_}").plan_files()
        f = task.file
        written = write_position_deletes(
            spec, {f.file_path: np.array([position], np.int64)}, spec_id=f.spec_id, partition=(f.partition[0],)
        )
        delta.add_deletes(to_data_file(written))
    delta.commit()
    transaction.commit_transaction()


def test_rows_that_belong_to_no_tablet_are_rows_but_cannot_be_superseded(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    keyed.append_foreign(9)
    assert ids(keyed, superseded=offsets(0)) == [9]


def test_projection_and_system_columns(keyed: Any) -> None:
    keyed.write(1, 2)
    keyed.round()
    table = keyed.load()

    def names(**options: Any) -> list[str]:
        (batch,) = read_lake(table, keyed.desc, plan_files(table), **options)
        return batch.schema.names

    assert names() == ["id", "code", "v"]
    assert names(columns=["v", "__offset"]) == ["v", "__offset"]
    assert names(columns=["__offset"], system_columns=True) == ["__offset", "__bucket", "__timestamp"]
    (batch,) = read_lake(table, keyed.desc, plan_files(table), columns=[], predicate=None)
    assert (batch.num_rows, batch.num_columns) == (2, 0)
    narrow = parse_predicate("v >= 0", keyed.desc.schema)
    (batch,) = read_lake(table, keyed.desc, plan_files(table), columns=[], predicate=narrow)
    assert (batch.num_rows, batch.num_columns) == (2, 0)
    assert ids(keyed, where="v < 1000") == [1, 2] and ids(keyed, where="v > 1000") == []


def test_values_beyond_the_tables_types_are_an_error(log: Any) -> None:
    log.write(1)
    log.round()
    import pyarrow as pa

    table = log.load()
    schema = pa.schema([f.remove_metadata() for f in table.schema().as_arrow()])
    table.append(pa.Table.from_pylist([{"id": 5, "code": 5, "v": 1000}], schema))
    with pytest.raises(LakeStateError, match="do not fit"):
        ids(log)


def test_snapshots_and_files_are_listed(keyed: Any) -> None:
    keyed.write(1, 2)
    first = keyed.round()
    keyed.delete(1)
    keyed.round()
    snapshots = snapshots_table(keyed.load()).to_pylist()
    assert [s["snapshot_id"] for s in snapshots][:1] == [first.snapshot_id]
    assert [(s["added_rows"], s["total_delete_files"], s["is_current"]) for s in snapshots] == [
        (2, 0, False),
        (0, 1, True),
    ]
    assert [s["offsets"] for s in snapshots] == ['{"/0":2}', '{"/0":3}']
    (file,) = files_table(plan_files(keyed.load())).to_pylist()
    assert (file["bucket"], file["rows"], file["min_offset"], file["max_offset"]) == (0, 2, 0, 1)
    assert len(file["delete_files"]) == 1
    assert files_table(plan_files(keyed.load(), first.snapshot_id))["delete_files"].to_pylist() == [[]]
