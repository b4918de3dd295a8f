"""When a read of a table is an earlier one and what came since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.lake.later_rows import ReadBefore, ranges_between, rows_between
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import pin
from lakehead.types import TabletKey

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
FIRST, SECOND = TabletKey("", 0), TabletKey("", 1)


@pytest.mark.parametrize("keyed", [False, True])
def test_what_came_is_told_by_tablet(tmp_path: Path, keyed: bool) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None)
        table.append([{"k": 1, "v": "a"}]) if not keyed else table.upsert([{"k": 1, "v": "a"}])
        handle = handle_of(table)
        now = pin(handle)

        def between(before: dict[TabletKey, tuple[int, int]], later: dict[TabletKey, tuple[int, int]]) -> object:
            return ranges_between(handle, replace(now, ranges=before), replace(now, ranges=later))

        assert between({FIRST: (0, 5)}, {FIRST: (0, 5)}) == {FIRST: (5, 5)}
        assert between({FIRST: (0, 5)}, {FIRST: (0, 9), SECOND: (0, 2)}) == {FIRST: (5, 9), SECOND: (0, 2)}
        assert between({FIRST: (0, 5)}, {FIRST: (0, 4)}) is None, "an older one"
        assert between({FIRST: (0, 5), SECOND: (0, 1)}, {FIRST: (0, 5)}) is None
        assert between({}, {}) is None
        assert between({FIRST: (0, 5)}, {FIRST: (2, 9)}) is None, "of a log alone, which forgot rows or gave them away"


def test_what_came_is_read(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", SCHEMA, primary_key=["k"])
        handle = handle_of(table)
        table.upsert([{"k": n, "v": "a"} for n in range(5)])
        first = pin(handle)
        before = ReadBefore.of(first, PinnedRows.of(handle, first))
        table.upsert([{"k": 1, "v": "b"}, {"k": 9, "v": "b"}])
        table.upsert([{"k": 9, "v": "c"}])
        table.delete([{"k": 3}])
        now = pin(handle)
        rows, ranges = PinnedRows.of(handle, now), ranges_between(handle, first, now) or {}
        (change,) = rows_between(handle, before, now, rows, ranges, ["k", "v", "__bucket"], bytes_max=1 << 20) or []
        assert change.superseded.tolist() == [1, 3]
        assert [r for b in change.rows for r in b.select(["k", "v", "__bucket"]).to_pylist()] == [
            {"k": 1, "v": "b", "__bucket": 0},
            {"k": 9, "v": "c", "__bucket": 0},
        ]
        assert rows_between(handle, before, now, rows, ranges, ["k", "v"], bytes_max=10) is None, "too much"
        other = replace(before, rows=replace(before.rows, ranges=((FIRST, 0, 5, 17),)))
        assert rows_between(handle, other, now, rows, ranges, ["k"], bytes_max=1 << 20) is None, (
            "another row had that offset then"
        )
