"""The data source's options and how a pinned read is cut into partitions."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

from lakehead.errors import InvalidPropertyError
from lakehead.lake.lake_table import LakeFile
from lakehead.spark.source import HOT_ROWS, LAKE_BYTES, ReadOptions, hot_parts, lake_parts
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

A, B = TabletKey("", 0), TabletKey("", 1)
SCHEMAS = Schemas.only(pa.schema([("k", pa.int64())]), 3)
DESC = TableDescriptor("id", TablePath("a", "t"), SCHEMAS, (), (), (), 3, "iceberg")
KEYED = TableDescriptor("id", TablePath("a", "t"), SCHEMAS, ("k",), (), ("k",), 3, "iceberg")


def file(tablet: TabletKey, low: int, high: int, size: int = 1) -> LakeFile:
    return LakeFile(f"f{low}", size, high - low + 1, tablet, (low, high), 0, ())


def test_options() -> None:
    got = ReadOptions.parse({"URI": "lakehead://h:1", "Table": "a.b", "columns": "x, y", "snapshot": "7"})
    assert (got.columns, got.tier, got.snapshot, got.ranges) == (("x", "y"), "union", 7, None)
    assert ReadOptions.parse({"uri": "u", "table": "t", "columns": '["a, b"]'}).columns == ("a, b",)
    assert ReadOptions.parse({"uri": "u", "table": "t", "ranges": '{"/1": [3, 5]}'}).ranges == {B: (3, 5)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": "t"}, "con.uri"),
        ({"uri": "u"}, "db.table"),
        ({"uri": "u", "table": "t", "tiers": "hot"}, "'tier'"),
        ({"uri": "u", "table": "t", "tier": "warm"}, "'union', 'hot' or 'lake'"),
        ({"uri": "u", "table": "t", "snapshot": "last"}, "lake snapshot"),
    ],
)
def test_bad_options(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidPropertyError, match=words):
        ReadOptions.parse(options)


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
