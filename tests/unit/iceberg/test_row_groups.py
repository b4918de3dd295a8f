"""What Arrow is given to skip row groups by, and what it skips with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lakehead.iceberg.row_groups import row_group_filter
from lakehead.predicate import parse_predicate

POINT = pa.struct([("n", pa.int64()), ("x", pa.float64())])
SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("small", pa.int8()),
        ("f", pa.float64()),
        ("s", pa.large_string()),
        ("ok", pa.bool_()),
        ("ts", pa.timestamp("ms", "Europe/Oslo")),
        ("d", pa.decimal128(38, 10)),
        ("p", POINT),
    ]
)


def condition(where: Any, *without_nan: str) -> str | None:
    found = row_group_filter(parse_predicate(where, SCHEMA), SCHEMA, without_nan=without_nan)
    return (
        None
        if found is None
        else re.sub(r"FieldRef.Nested\(FieldRef.Name\((.)\) FieldRef.Name\((.)\)\)", r"\1.\2", str(found))
    )


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("i > 3", "(i > 3)"),
        ("small = 3", "(small == 3)"),
        ("not (i > 3)", "(i <= 3)"),
        ("not (i > 3 or i is null)", "((i <= 3) and is_valid(i))"),
        ("i = 1 or i = 7", "((i == 1) or (i == 7))"),
        ("i = 1 or length(s) = 2", None),
        ("i = 1 and length(s) = 2", "(i == 1)"),
        ("i = null", "false"),
        ("ok", "(ok == true)"),
        ("not ok", "(ok == false)"),
        ("(i > 3) is true", "(i > 3)"),
        ("(i > 3) is not true", None),
        ("s >= 'a'", '(s >= "a")'),
        ("p.n < 4", "(p.n < 4)"),
        ("i not in (1, 2)", None),
        ("i + 1 > 3", None),
        # Whatever NaN meets is left to the exact filter.
        ("f < 3", "(f < 3)"),
        ("f = 0", "(f == 0)"),
        ("f in (0.5, 7, 2)", "((f >= 0.5) and (f <= 7))"),
        ("f > 3", None),
        ("f <> 3", None),
        ("not (f <= 3)", None),
        ("f not between 1 and 3", None),
        ("f > 3 and i = 1", "(i == 1)"),
        ("f > 3 or i = 1", None),
        ("p.x <= 4", "(p.x <= 4)"),
        ("p.x > 4", None),
        (pc.field("f") != 3.0, None),
        (~(pc.field("f") < 3.0), None),
        (pc.field("f") > 3.0, "(f > 3)"),  # Arrow's own, which NaN does not meet
        (pc.field("i").isin([1, 2]), "is_in(i, {value_set=int64:[\n  1,\n  2\n], null_matching_behavior=MATCH})"),
    ],
)
def test_it_is_what_no_matching_row_fails(where: Any, wanted: str | None) -> None:
    assert condition(where) == wanted


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("f > 3", "(f > 3)"),
        ("f <> 3", "(f != 3)"),
        ("not (f <= 3)", "(f > 3)"),
        ("f > 3 or i = 1", "((f > 3) or (i == 1))"),
    ],
)
def test_files_without_nan_are_skipped_by_more(where: str, wanted: str) -> None:
    assert condition(where, "f") == wanted


def test_literals_take_the_types_of_the_lake() -> None:
    found = row_group_filter(parse_predicate("ts > '2026-01-01' and d > 0.5 and small < 3", SCHEMA), SCHEMA)
    lake = pa.schema([("ts", pa.timestamp("us", "UTC")), ("d", pa.decimal128(38, 10)), ("small", pa.int32())])
    table = lake.empty_table()
    assert found is not None and table.filter(found).num_rows == 0


def test_row_groups_are_skipped_and_nan_is_not_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    values = [1.0, 2.0, 3.0, float("nan"), 50.0, 60.0]
    rows = pa.table({"i": range(6), "f": values}, schema=pa.schema([("i", pa.int64()), ("f", pa.float64())]))
    pq.write_table(rows, path, row_group_size=2)

    def groups(where: str, *without_nan: str) -> list[int]:
        found = row_group_filter(parse_predicate(where, rows.schema), rows.schema, without_nan=without_nan)
        (fragment,) = ds.dataset(path).get_fragments()
        return [g.id for g in (fragment.subset(filter=found) if found is not None else fragment).row_groups]

    assert groups("i = 5") == [2] and groups("i < 2 or i > 4") == [0, 2] and groups("not (i >= 2)") == [0]
    assert groups("f < 3") == [0] and groups("f in (50, 55)") == [2]
    assert 1 in groups("f > 10") and 1 in groups("not (f <= 10)") and 1 in groups("f <> 3")
    assert groups("f > 10", "f") == [2]
