"""Which files may be anti-joined by offset, and dead offsets as rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from lakehead.lake.lake_table import LakeFile
from lakehead.spark.dead_rows import dead_table, separate_files
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

A, B = TabletKey("", 0), TabletKey("", 1)


def file(
    path: str, tablet: TabletKey | None, offsets: tuple[int, int] | None, nulls: int | None = 0, rows: int = 10
) -> LakeFile:
    return LakeFile(path, 1, rows, tablet, offsets, nulls, ())


def separate(*files: LakeFile) -> set[str]:
    return {f.path for f in separate_files(files)}


def test_disjoint_ranges() -> None:
    assert separate(file("a", A, (0, 9)), file("b", A, (10, 19)), file("c", B, (0, 9))) == {"a", "b", "c"}


def test_overlap_disqualifies_both() -> None:
    files = [file("a", A, (0, 9)), file("b", A, (9, 19)), file("c", A, (20, 29)), file("d", B, (0, 9))]
    assert separate(*files) == {"c", "d"}


def test_a_long_range_reaches_over_others() -> None:
    assert separate(file("a", A, (0, 100)), file("b", A, (1, 2)), file("c", A, (5, 9)), file("d", A, (101, 102))) == {
        "d"
    }


def test_rows_without_identity() -> None:
    assert separate(file("a", A, (0, 9)), file("foreign", None, None, nulls=10)) == {"a"}
    assert separate(file("a", A, (0, 9)), file("b", A, (10, 19), nulls=1), file("c", A, (20, 29), nulls=None)) == {"a"}


def test_unknown_bounds_disqualify_the_tablet() -> None:
    assert separate(file("a", A, (0, 9)), file("b", A, None), file("c", B, (0, 9))) == {"c"}


def test_rows_of_no_tablet_disqualify_all() -> None:
    assert separate(file("a", A, (0, 9)), file("b", None, (20, 29))) == set()


def test_dead_table() -> None:
    schema = pa.schema([pa.field("day", pa.date32(), False), pa.field("id", pa.int64(), False)])
    desc = TableDescriptor(
        "t", TablePath("d", "t"), Schemas.only(schema), ("day", "id"), ("day",), ("id",), 4, "iceberg"
    )
    got = dead_table(desc, {TabletKey("day=2026-01-02", 3): np.array([0, 7])})
    assert got.column(0).to_pylist() == [3 << 48, (3 << 48) | 7]
    assert [str(d) for d in got.column(1).to_pylist()] == ["2026-01-02"] * 2
    assert dead_table(desc, {}).num_rows == 0
