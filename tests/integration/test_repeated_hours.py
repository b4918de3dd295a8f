"""Times of an hour that comes twice by the clock of a zone, and times finer than a column has, in filters."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import lakehead as lh

OSLO = pa.timestamp("us", "Europe/Oslo")
FIRST, SECOND, LATER = (dt.datetime(2024, 10, 27, h, 30, tzinfo=dt.UTC) for h in (0, 1, 2))  # the clock says 2, 2, 3
TEXTS = [f"timestamptz '{t:%Y-%m-%d %H:%M:%S}+00'" for t in (FIRST, SECOND, LATER)]
CONDITIONS = [
    ("h = {0}", [0]),
    ("h = {1}", [1]),
    ("h in ({0}, {1})", [0, 1]),
    ("h in ({1}, {0}) and h = {1}", [1]),
    ("h > {0}", [1, 2]),
    ("h >= {1} and h < {2}", [1]),
    ("h <= {0}", [0]),
]


@pytest.mark.parametrize("kind", ["log", "keyed", "partitioned log", "partitioned keyed"])
@pytest.mark.parametrize("zone", ["Europe/Oslo", "UTC"])
def test_instants_are_told_apart(con: lh.Connection, name: str, kind: str, zone: str) -> None:
    schema = pa.schema([("h", pa.timestamp("us", zone)), ("v", pa.int64())])
    options: dict[str, Any] = {"primary_key": "h"} if "keyed" in kind else {}
    if "partitioned" in kind:
        options = {"partition_by": "h"} | ({"primary_key": ["h", "v"]} if options else {})
    table = con.create_table(name, schema, lake="iceberg", **options)
    rows = [{"h": h, "v": v} for v, h in enumerate((FIRST, SECOND, LATER))]
    (table.upsert if options.get("primary_key") else table.append)(rows)
    for stage in ("hot", "lake", "both"):
        if stage == "lake":
            con.tier(name)
        if stage == "both" and options.get("primary_key"):
            table.upsert(rows[:2])
        for condition, want in CONDITIONS:
            where = condition.format(*TEXTS)
            scan = table.scan(where=where)
            assert sorted(scan.to_arrow()["v"].to_pylist()) == want, (stage, where)
            assert scan.count() == len(want), (stage, where)
            assert sorted(con.sql(f"select v from {name} where {where}").fetchall()) == [(v,) for v in want]
        for values in (pa.array([FIRST, SECOND], OSLO), pa.array([SECOND, FIRST], pa.timestamp("ms", "UTC"))):
            found = table.scan(where=pc.field("h").isin(values)).to_arrow()["v"].to_pylist()
            assert sorted(found) == [0, 1], stage
            own = [pa.scalar(values[0].as_py(), schema.field("h").type), pa.scalar(FIRST, schema.field("h").type)]
            assert table.scan(where=(pc.field("h") == own[0]) & (pc.field("h") >= own[1])).count() == 1


@pytest.mark.parametrize(
    ("coarse", "fine", "low", "step"),
    [
        (pa.timestamp("s"), pa.timestamp("us"), dt.datetime(2024, 5, 1), dt.timedelta(seconds=0.5)),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC"), FIRST, dt.timedelta(microseconds=5)),
        (pa.time32("s"), pa.time64("us"), dt.time(1), None),
    ],
    ids=str,
)
def test_no_row_is_found_twice_by_times_finer_than_its_key(
    con: lh.Connection, name: str, coarse: pa.DataType, fine: pa.DataType, low: Any, step: dt.timedelta | None
) -> None:
    table = con.create_table(name, pa.schema([("h", coarse), ("v", pa.int64())]), primary_key="h")
    table.upsert([{"h": low, "v": 1}])
    between = dt.time(1, 0, 0, 500_000) if step is None else low + step
    scan = table.scan(where=pc.field("h").isin(pa.array([low, between], fine)))
    assert scan.to_arrow()["v"].to_pylist() == [1] and scan.count() == 1
    assert table.scan(where=pc.field("h") == pa.scalar(between, fine)).count() == 0
