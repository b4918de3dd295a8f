"""How a pinned read is cut into partitions."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa

from lakehead.lake.lake_table import LakeFile
from lakehead.spark.parts import HOT_ROWS, LAKE_BYTES, hot_parts, lake_parts, record_parts
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

A, B = TabletKey("", 0), TabletKey("", 1)
SCHEMAS = Schemas.only(pa.schema([("k", pa.int64())]), 3)
DESC = TableDescriptor("id", TablePath("a", "t"), SCHEMAS, (), (), (), 3, "iceberg")
KEYED = TableDescriptor("id", TablePath("a", "t"), SCHEMAS, ("k",), (), ("k",), 3, "iceberg")


def file(tablet: TabletKey, low: int, high: int, size: int = 1) -> LakeFile:
    return LakeFile(f"f{low}", size, high - low + 1, tablet, (low, high), 0, ())


def test_lake_parts_carry_what_is_superseded_in_them() -> None:
    files = [file(A, 0, 9, LAKE_BYTES), file(A, 10, 19), file(B, 0, 9)]
    superseded = {A: np.array([3, 12, 15]), B: np.array([100])}
    first, second = lake_parts(DESC, files, superseded)
    assert [f.path for f in first.files] == ["f0"] and (first.table_id, first.schema_id) == ("id", 3)
    assert first.superseded[A].tolist() == [3]
    assert second.superseded[A].tolist() == [12, 15]
    assert second.superseded[B].tolist() == []


def test_hot_parts_cover_each_offset_once() -> None:
    ranges = {A: (5, 5 + 3 * HOT_ROWS + 1), B: (0, 10), TabletKey("", 2): (4, 4)}
    covered = [(k, s, e) for part in hot_parts(DESC, ranges) for k, (s, e) in part.ranges.items()]
    assert sum(e - s for _, s, e in covered) == 3 * HOT_ROWS + 11
    pieces = sorted((s, e) for k, s, e in covered if k == A)
    assert pieces[0][0] == 5 and pieces[-1][1] == ranges[A][1]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    whole = list(hot_parts(KEYED, ranges))
    assert {k: r for p in whole for k, r in p.ranges.items()} == {A: ranges[A], B: ranges[B]}


def test_records_of_a_key_stay_in_one_partition() -> None:
    ranges = {A: (0, 2 * HOT_ROWS), B: (7, 9)}
    assert len(list(record_parts(DESC, ranges))) == 3
    assert {k: r for p in record_parts(KEYED, ranges) for k, r in p.ranges.items()} == ranges
