"""Altered tables on Spark: union reads, and a tiering service that runs while they change."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lakehead as lh
import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lakehead.tiering.service import RoundReport

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("a", pa.int32()), ("b", pa.string())])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def rows_of(frame: Any) -> list[dict[str, Any]]:
    return sorted((row.asDict() for row in frame.collect()), key=lambda r: r["k"])


@pytest.mark.parametrize("keyed", [False, True])
def test_union_reads_of_every_definition(spark: SparkSession, con: lh.Connection, keyed: bool) -> None:
    lhs.attach(spark, con)
    table = con.create_table("t", SCHEMA, primary_key=["k"] if keyed else None, lake="iceberg", buckets=2)
    put = table.upsert if keyed else table.append
    put([{"k": k, "a": k, "b": f"b{k}"} for k in range(6)])
    con.tier("t")
    before = lhs.table(spark, "t")
    with table.alter() as a:
        a.rename_column("b", "bee").widen_column("a", pa.int64()).add_column("b", pa.int32()).drop_column("b")
        a.add_column("b", pa.int64(), after="k")
    put([{"k": k, "a": 1 << 40, "bee": "new", "b": k} for k in range(6, 9)])
    wanted = [{"k": k, "b": None, "a": k, "bee": f"b{k}"} for k in range(6)]
    wanted += [{"k": k, "b": k, "a": 1 << 40, "bee": "new"} for k in range(6, 9)]
    assert rows_of(lhs.table(spark, "t")) == wanted
    assert rows_of(lhs.sql(spark, "select k, bee from t where a > 4")) == [
        {"k": r["k"], "bee": r["bee"]} for r in wanted if r["a"] > 4
    ]
    con.tier("t")
    assert rows_of(lhs.table(spark, "t")) == wanted == rows_of(lhs.sql(spark, "select k, b, a, bee from t$lake"))
    assert rows_of(before) == [{"k": k, "a": k, "b": f"b{k}"} for k in range(6)], "a frame is pinned"


@pytest.mark.parametrize("keyed", [False, True])
def test_defaults_of_every_type(spark: SparkSession, con: lh.Connection, keyed: bool) -> None:
    lhs.attach(spark, con)
    table = con.create_table("t", SCHEMA.remove(1), primary_key=["k"] if keyed else None, lake="iceberg", buckets=2)
    put = table.upsert if keyed else table.append
    put([{"k": k, "b": f"b{k}"} for k in range(6)])
    con.tier("t")
    put([{"k": k, "b": "hot"} for k in range(6, 8)])
    defaults = {
        "flag": (pa.bool_(), True),
        "n": (pa.int8(), -5),
        "f32": (pa.float32(), 0.25),
        "f64": (pa.float64(), math.inf),
        "d": (pa.decimal128(9, 2), Decimal("-1.50")),
        "text": (pa.string(), "it's å"),
        "raw": (pa.binary(), b"\xff\x00"),
        "day": (pa.date32(), dt.date(1, 1, 31)),
        "at": (pa.timestamp("us"), dt.datetime(1969, 12, 31, 23, 59, 59, 7)),
        "utc": (pa.timestamp("us", "UTC"), dt.datetime(2026, 3, 29, 1, 30, 0, 7, dt.UTC)),
    }
    with table.alter() as a:
        for name, (t, value) in defaults.items():
            a.add_column(name, t, default=value)
    with table.alter() as a:
        a.widen_column("n", pa.int64()).rename_column("day", "date").add_column("day", pa.date32())
    put([{"k": 8, "n": 1 << 40, "text": None}])
    wanted = table.scan().to_arrow().sort_by("k")
    assert wanted["n"].to_pylist() == [-5] * 8 + [1 << 40] and wanted["text"].to_pylist() == ["it's å"] * 8 + [None]
    for _ in range(2):
        found = lhs.table(spark, "t").toArrow().sort_by("k").select(wanted.schema.names)
        assert found.cast(wanted.schema).equals(wanted)
        asked = "n = -5 and text = 'it''s å' and utc = timestamp '2026-03-29 01:30:00.000007Z' and k % 2 = 0"
        assert rows_of(lhs.sql(spark, f"select k from t where {asked}")) == [{"k": k} for k in (0, 2, 4, 6)]
        assert rows_of(lhs.sql(spark, "select k from t where n > 0 or text is null or date is null")) == [{"k": 8}]
        con.tier("t")
        put([{"k": 8, "n": 1 << 40, "text": None}] if keyed else [])


@pytest.mark.parametrize("keyed", [False, True])
def test_fields_inside_columns(spark: SparkSession, con: lh.Connection, keyed: bool) -> None:
    lhs.attach(spark, con)
    schema = pa.schema(
        [
            pa.field("k", pa.int64(), False),
            ("p", pa.struct([("x", pa.int32()), ("y", pa.string())])),
            ("l", pa.list_(pa.struct([("n", pa.int8()), ("s", pa.string())]))),
            ("m", pa.map_(pa.string(), pa.struct([("v", pa.float32())]))),
            ("n", pa.list_(pa.int32())),
        ]
    )
    table = con.create_table("t", schema, primary_key=["k"] if keyed else None, lake="iceberg", buckets=2)
    put = table.upsert if keyed else table.append

    def row(k: int) -> dict[str, Any]:
        if k % 4 == 3:
            return {**dict.fromkeys(schema.names), "k": k}
        p, inner = {"x": k, "y": f"y{k}"}, [{"n": k, "s": "s"}, None]
        return {"k": k, "p": p, "l": inner, "m": [("a", {"v": k / 2})], "n": [k, None]}

    put([row(k) for k in range(6)])
    con.tier("t")
    put([row(k) for k in range(6, 9)])
    with table.alter() as a:
        a.add_column("p.z", pa.int64(), after="p.x").widen_column("p.x", pa.int64()).add_column(
            "m.value.w", pa.string()
        )
        a.widen_column("l.element.n", pa.int32()).widen_column("m.value.v", pa.float64())
        a.widen_column("n.element", pa.int64()).add_column("l.element.t", pa.string())
    for changed in range(2):
        wanted = table.scan().to_arrow().sort_by("k")
        for _ in range(2):
            found = lhs.table(spark, "t").toArrow().sort_by("k")
            assert found.to_pylist() == wanted.to_pylist()
            asked = "select k from t where p.x > 4 and p.z is null and n[0] > 4"
            assert rows_of(lhs.sql(spark, asked)) == [{"k": k} for k in (5, 6, 8)]
        con.tier("t")
        if not changed:
            with table.alter() as a:
                a.rename_column("p.y", "why").drop_column("l.element.s").add_column("p.y", pa.int32())


def test_a_service_goes_on_over_changes(spark: SparkSession, con: lh.Connection) -> None:
    table = con.create_table("t", SCHEMA, primary_key=["k"], lake="iceberg", freshness="1s")
    table.upsert([{"k": 0, "a": 0, "b": "0"}])
    reports: list[RoundReport] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        if len(table.schema) < 6:
            n = len(table.schema)
            with table.alter() as a:
                a.add_column(f"c{n}", pa.int64())
            table.upsert([{"k": n, f"c{n}": n}])

    service = lhs.tiering_service(spark, con, on_round=on_round)
    service.run(lambda: (len(table.schema) == 6 and table.scan(tier="hot").count() == 0) or len(reports) > 50)
    assert table.lake.iceberg().scan().to_arrow().select(table.schema.names).sort_by("k").to_pylist() == [
        {"k": 0, "a": 0, "b": "0", "c3": None, "c4": None, "c5": None},
        *({"k": n, "a": None, "b": None, **{f"c{m}": n if m == n else None for m in (3, 4, 5)}} for n in (3, 4, 5)),
    ]
