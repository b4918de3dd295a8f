"""Offsets to positions, in files of every kind that lakes may come to hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakehead.env.recently_used import RecentlyUsed
from lakehead.errors import LakeFileMissingError
from lakehead.iceberg import positions
from lakehead.iceberg.file_io import SyncedFileIO, open_parquet
from lakehead.iceberg.positions import GroupOffsets, deleted_positions, find_offsets, find_positions, offset_statistics

IO = SyncedFileIO()
SORTED = [0, 1, 4, 5, 9, 12]
FILES = {
    "sorted": SORTED,
    "one after the other": [3, 4, 5, 6, 7, 8],
    "unsorted": [5, 1, 12, 0, 9, 4],
    "an offset twice": [1, 4, 4, 9],
    "nulls": [None, 4, None, 9],
    "only nulls": [None, None],
    "empty": [],
}
NO_ID = 7  # these files have none, so that columns are found by name
WANTED = [[], [4], [3, 8], [2, 4, 5, 9], [0, 12], [4, 5, 9], [2, 3], [100], [-1], [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("group_rows", [2, 100])
def test_every_position_of_an_offset_is_found(tmp_path: Path, kind: str, group_rows: int) -> None:
    offsets = FILES[kind]
    path = str(tmp_path / "__bucket=0" / "a.parquet")
    (tmp_path / "__bucket=0").mkdir()
    table = pa.table({"x": pa.nulls(len(offsets), pa.int8()), "__offset": pa.array(offsets, pa.int64())})
    pq.write_table(table, path, row_group_size=group_rows)
    for wanted in WANTED:
        positions, values = find_offsets(IO, f"file:{path}", np.array(wanted, np.int64), NO_ID)
        expected = [i for i, o in enumerate(offsets) if o in wanted]
        assert positions.tolist() == expected and values.tolist() == [offsets[i] for i in expected], wanted
        assert find_positions(IO, f"file:{path}", np.array(wanted, np.int64), NO_ID).tolist() == expected


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("group_rows", [2, 100])
@pytest.mark.parametrize("statistics", [True, False, ["x", "z"], ["__offset"]])
def test_what_a_file_says_of_its_offsets(tmp_path: Path, kind: str, group_rows: int, statistics: bool) -> None:
    """From its footer or from its rows, whatever stands in other columns, and wherever."""
    offsets = FILES[kind]
    others = {n: pa.array([100 + i if i else None for i in range(len(offsets))], pa.int64()) for n in "Axz"}
    nested = pa.StructArray.from_arrays([others["x"], others["z"]], names=["__offset", "b"])
    columns = {"A": others["A"], "s": nested, "x": others["x"], "__offset": pa.array(offsets, pa.int64())}
    table = pa.table({**columns, "z": others["z"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group_rows, write_statistics=statistics)
    known = [o for o in offsets if o is not None]
    bounds = (min(known), max(known)) if known else None
    assert offset_statistics(IO, str(tmp_path / "a.parquet"), NO_ID) == (bounds, offsets.count(None))


def test_a_file_without_offsets_has_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    assert len(find_offsets(IO, str(tmp_path / "a.parquet"), np.array([0], np.int64), NO_ID)[0]) == 0


def test_delete_files_may_overlap_and_name_several_files(tmp_path: Path) -> None:
    ours, theirs = f"file://{tmp_path}/a.parquet", f"file:{tmp_path}/b.parquet"
    deletes = [[(ours, 1), (ours, 3)], [(theirs, 0), (f"file:{tmp_path}/a.parquet", 3), (ours, 7)], [(theirs, 5)]]
    paths = []
    for i, rows in enumerate(deletes):
        paths.append(f"file://{tmp_path}/{i}.parquet")
        pq.write_table(pa.table({"file_path": [p for p, _ in rows], "pos": [n for _, n in rows]}), paths[-1][7:])
    assert deleted_positions(IO, ours, paths).tolist() == [1, 3, 7]
    assert deleted_positions(IO, theirs, paths).tolist() == [0, 5]
    assert deleted_positions(IO, ours, []).tolist() == []


def test_a_delete_file_of_many_data_files_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"file://{tmp_path}/{n}.parquet" for n in range(9)]
    deletes = str(tmp_path / "deletes.parquet")
    pq.write_table(pa.table({"file_path": [*paths, *paths], "pos": [9 - n // 9 for n in range(18)]}), deletes)
    opened: list[str] = []
    monkeypatch.setattr(
        positions, "open_parquet", lambda path, *a, **how: opened.append(path) or open_parquet(path, *a, **how)
    )
    for path in paths:
        assert deleted_positions(IO, path, [deletes]).tolist() == [8, 9]
    assert deleted_positions(IO, f"{tmp_path}/another.parquet", [deletes]).tolist() == []
    assert opened == [deletes]
    Path(deletes).unlink()
    with pytest.raises(LakeFileMissingError):
        deleted_positions(IO, paths[0], [deletes])


def test_little_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files asked for last, and of those no more than memory allows; what is not is read again."""
    bounds: RecentlyUsed[Any, Any] = RecentlyUsed(3)
    groups: RecentlyUsed[Any, GroupOffsets] = RecentlyUsed(2000, lambda group: group.bytes)
    monkeypatch.setattr(positions, "_bounds", bounds)
    monkeypatch.setattr(positions, "_groups", groups)
    wanted = np.arange(0, 100, 7)
    for n in (0, 1, 2, 3, 4, 0, 4):
        path = str(tmp_path / f"{n}.parquet")
        offsets = np.arange(0, 100 + n, 1 + n % 2)
        pq.write_table(pa.table({"__offset": offsets}), path, row_group_size=40)
        for _ in range(2):
            assert find_offsets(IO, path, wanted, NO_ID)[1].tolist() == sorted(set(wanted) & set(offsets))
        assert groups.size <= 2000
        assert bounds.size <= 3
