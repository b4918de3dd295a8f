"""``mode("overwrite")`` of the partitions that rows are written to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.conftest import embedded_only

import lakehead as lh
import lakehead.spark as lhs
from lakehead.spark import union_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, embedded_only]

SCHEMA = pa.schema([pa.field("day", pa.string(), False), pa.field("id", pa.int64(), False), ("v", pa.string())])


def frame(spark: SparkSession, *days: str, ids: range, v: str) -> DataFrame:
    rows = spark.range(ids.start, ids.stop, 1, 3).selectExpr("id", f"'{v}' as v")
    return rows.crossJoin(spark.createDataFrame([(d,) for d in days], "day string")).select("day", "id", "v")


def overwrite(con: lh.Connection, df: DataFrame, table: str, mode: str = "overwrite", **options: Any) -> None:
    given = {"uri": con.uri, "table": table, "partitionOverwriteMode": "dynamic", **options}
    df.write.format("lakehead").options(**given).mode(mode).save()


def loaded(con: lh.Connection, spark: SparkSession, table: str) -> DataFrame:
    return spark.read.format("lakehead").options(uri=con.uri, table=table).load()


def rows_of(con: lh.Connection, table: str, **scan: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in con.table(table).scan(**scan).to_arrow().to_pylist())


def expected(*parts: tuple[str, range, str]) -> list[tuple[Any, ...]]:
    return sorted((day, n, v) for day, ids, v in parts for n in ids)


@pytest.mark.parametrize("kind", ["log", "log with a lake", "keyed", "keyed with a lake"])
def test_only_the_partitions_that_are_written_lose_their_rows(
    con: lh.Connection, spark: SparkSession, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"o.{kind.replace(' ', '_')}"
    lake = "iceberg" if "lake" in kind else None
    key = ["day", "id"] if "keyed" in kind else None
    table = con.create_table(name, SCHEMA, primary_key=key, partition_by="day", buckets=2, lake=lake)
    overwrite(con, frame(spark, "mon", "tue", ids=range(50), v="old"), name)
    if lake:
        con.tier(name)
    overwrite(con, frame(spark, "tue", "wed", ids=range(40, 60), v="new"), name)
    told = expected(("mon", range(50), "old"), ("tue", range(40, 60), "new"), ("wed", range(40, 60), "new"))
    assert rows_of(con, name) == told
    for found in (lhs.table(spark, name), lhs.sql(spark, f"select * from {name}"), loaded(con, spark, name)):
        assert sorted(tuple(r) for r in found.collect()) == told
    with monkeypatch.context() as where_spark_has_no_driver:
        where_spark_has_no_driver.setattr(union_frame, "opens_lake", lambda *_: False)
        assert sorted(tuple(r) for r in lhs.table(spark, name).collect()) == told
    if lake:
        held = lhs.table(spark, name)
        con.tier(name)
        assert rows_of(con, name, tier="lake") == told
        assert sorted(tuple(r) for r in held.collect()) == told, "as it was pinned"
    overwrite(con, frame(spark, ids=range(0), v="none").where("day is not null"), name)
    assert rows_of(con, name) == told, "no rows name no partition"
    (table.upsert if key else table.append)([{"day": "tue", "id": 1000, "v": "later"}])
    assert rows_of(con, name) == sorted([*told, ("tue", 1000, "later")])
    for v in ("once", "twice"):  # a repeated batch of a job
        overwrite(con, frame(spark, "tue", ids=range(3), v=v), name, job="daily", batch="7")
    assert rows_of(con, name) == expected(
        ("mon", range(50), "old"), ("tue", range(3), "once"), ("wed", range(40, 60), "new")
    )


def test_partitions_are_named(con: lh.Connection, spark: SparkSession) -> None:
    name = "o.named"
    con.create_table(name, SCHEMA, primary_key=["day", "id"], partition_by="day", buckets=2, lake="iceberg")
    to = {"uri": con.uri, "table": name}

    def write(df: DataFrame, **options: Any) -> None:
        df.write.format("lakehead").options(**to, **options).mode("overwrite").save()

    write(frame(spark, "mon", "tue", "a, b", ids=range(5), v="old"), partitionOverwriteMode="dynamic")
    con.tier(name)
    write(frame(spark, "tue", ids=range(2), v="new"), partitions="day=mon, day=tue, day=sun")
    told = expected(("tue", range(2), "new"), ("a, b", range(5), "old"))
    assert rows_of(con, name) == told, "one that gets no rows has none"
    with pytest.raises(Exception, match="are of partition day=tue, which is not one of those") as caught:
        write(frame(spark, "mon", "tue", ids=range(2), v="beside"), partitions="day=mon")
    assert isinstance(lhs.raised(caught.value), lh.InvalidRequestError)
    for named in ("day=2026, dya=mon", "mon", "day=mon/0", "day=a b", " , "):
        with pytest.raises(Exception, match="option partitions") as caught:
            write(frame(spark, "mon", ids=range(2), v="x"), partitions=named)
        assert isinstance(lhs.raised(caught.value), lh.InvalidPropertyError)
    assert rows_of(con, name) == told
    write(frame(spark, ids=range(0), v="none"), partitions='["day=a%2C%20b"]')
    assert rows_of(con, name) == expected(("tue", range(2), "new"))
    con.tier(name)
    assert rows_of(con, name, tier="lake") == expected(("tue", range(2), "new"))
    for v in ("once", "twice"):
        write(frame(spark, "wed", ids=range(2), v=v), partitions="day=tue, day=wed", job="daily", batch="1")
    assert rows_of(con, name) == expected(("wed", range(2), "once"))


def test_a_stream_goes_on_behind_what_was_overwritten(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """Of a log table with a lake: what it has not read yet and is gone is not delivered, what came in its place is."""
    table = con.create_table("o.streamed", SCHEMA, partition_by="day", buckets=1, lake="iceberg", hot_retention="0s")
    seen: list[tuple[Any, ...]] = []

    def read_on() -> list[tuple[Any, ...]]:
        seen.clear()
        rows = spark.readStream.format("lakehead").options(uri=con.uri, table="o.streamed", start="earliest").load()
        query = rows.writeStream.foreachBatch(lambda df, _: seen.extend(tuple(r) for r in df.collect()))
        query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start().awaitTermination()
        return sorted(seen)

    table.append([{"day": "mon", "id": n, "v": "first"} for n in range(3)])
    assert read_on() == expected(("mon", range(3), "first"))
    table.append([{"day": day, "id": n, "v": "unread"} for day in ("mon", "tue") for n in range(3)])
    con.tier("o.streamed")
    overwrite(con, frame(spark, "mon", ids=range(2), v="new"), "o.streamed")
    assert read_on() == expected(("mon", range(2), "new"), ("tue", range(3), "unread"))
    con.tier("o.streamed")
    assert read_on() == []


def test_what_cannot_be(con: lh.Connection, spark: SparkSession) -> None:
    df = frame(spark, "mon", ids=range(2), v="x")
    con.create_table("o.whole", SCHEMA)
    con.create_table("o.days", SCHEMA, partition_by="day", primary_key=["day", "id"]).upsert(
        [{"day": "mon", "id": 9, "v": "stays"}]
    )
    for table, given, words in (
        ("o.whole", {}, "no partitions"),
        ("o.whole", {"partitions": "day=mon"}, "no partitions"),
        ("o.days", {"mode": "append"}, "are for mode.*use that, or leave them out"),
        ("o.days", {"mode": "append", "partitions": "day=mon"}, "are for mode.*use that, or leave them out"),
        ("o.days", {"partitions": "day=mon", "partitionOverwriteMode": "static"}, "leave out"),
        ("o.days", {"columns": "day, id"}, "whole rows: leave out the options columns and operation"),
        ("o.days", {"partitionOverwriteMode": "sometimes"}, "static or dynamic"),
    ):
        with pytest.raises(Exception, match=words):
            overwrite(con, df, table, **given)
    assert rows_of(con, "o.days") == [("mon", 9, "stays")]
    overwrite(con, df, "o.days", partitionOverwriteMode="STATIC")
    assert len(rows_of(con, "o.days")) == 2


def test_what_is_overwritten_of_a_table_with_partitions_is_to_be_said(con: lh.Connection, spark: SparkSession) -> None:
    """Spark does not tell sources in Python how it is set, and who set it to dynamic would lose partitions."""
    con.create_table("o.said", SCHEMA, primary_key=["day", "id"], partition_by="day")
    overwrite(con, frame(spark, "mon", "tue", ids=range(4), v="a"), "o.said", partitionOverwriteMode="static")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        with pytest.raises(Exception, match="has partitions: say option") as caught:
            options = {"uri": con.uri, "table": "o.said"}
            frame(spark, "tue", ids=range(2), v="b").write.format("lakehead").options(**options).mode(
                "overwrite"
            ).save()
        assert isinstance(lhs.raised(caught.value), lh.InvalidPropertyError)
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert con.table("o.said").scan().count() == 8
