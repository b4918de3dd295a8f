"""`lakehead.spark.lookup_join` adds what a keyed table has for each row, to batches and streams."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lakehead as lh
import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("data")) as con:
        users = con.create_table(
            "j.users",
            pa.schema(
                [("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string())), ("age", pa.int16())]
            ),
            primary_key="id",
            buckets=3,
            lake="iceberg",
        )
        users.upsert([{"id": i, "name": f"u{i}", "tags": ["a", None], "age": i} for i in range(100)])
        con.tier("j.users")
        users.upsert([{"id": 7, "name": "new"}])
        users.delete([8])
        con.create_table(
            "j.prices",
            pa.schema([("day", pa.date32()), ("item", pa.string()), ("price", pa.decimal128(9, 2))]),
            primary_key=["day", "item"],
            partition_by="day",
        ).upsert([{"day": dt.date(2026, 1, d), "item": "x", "price": d} for d in (1, 2)])
        yield con


def test_left_and_inner(spark: SparkSession) -> None:
    asked = [7, 8, None, 5, 7, 1000]
    df = spark.createDataFrame([(n, i) for n, i in enumerate(asked)], "n int, id int")
    left = lhs.lookup_join(df.coalesce(1), "j.users", on="id")
    assert left.columns == ["n", "id", "name", "tags", "age"]
    names = {7: "new", 5: "u5"}
    assert [(r.n, r.id, r.name) for r in left.collect()] == [(n, i, names.get(i)) for n, i in enumerate(asked)]
    assert [r.tags for r in left.collect()] == [["a", None] if i in names else None for i in asked]
    inner = lhs.lookup_join(df, "j.users", on=["id"], columns=["age"], how="inner", max_staleness="5s")
    assert sorted((r.n, r.id, r.age) for r in inner.collect()) == [(0, 7, 7), (3, 5, 5), (4, 7, 7)]


def test_keys_of_several_columns_and_other_names(spark: SparkSession) -> None:
    rows = [("x", dt.date(2026, 1, 2)), ("x", dt.date(2026, 1, 3)), ("y", dt.date(2026, 1, 1)), (None, None)]
    df = spark.createDataFrame(rows, "what string, when date")
    found = lhs.lookup_join(df, "j.prices", on={"what": "item", "when": "day"}).collect()
    assert sorted(str(r.price) for r in found) == ["2.00", "None", "None", "None"]


def test_no_rows(spark: SparkSession) -> None:
    df = spark.createDataFrame([], "id long")
    assert lhs.lookup_join(df, "j.users", on="id").collect() == []
    df = spark.createDataFrame([(None,)], "id long")
    assert [r.name for r in lhs.lookup_join(df, "j.users", on="id").collect()] == [None]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "j.user", "on": "id"}, "no table"),
        ({"name": "j.log", "on": "id"}, "log table"),
        ({"name": "j.users", "on": "name"}, "must be the primary key"),
        ({"name": "j.users", "on": {"di": "id"}}, "no column 'di'; columns: id"),
        ({"name": "j.users", "on": "id", "columns": ["nam"]}, "'nam'; did you mean 'name'"),
        ({"name": "j.users", "on": "id", "columns": ["id"]}, "already"),
        ({"name": "j.users", "on": "id", "how": "outer"}, "'left' or 'inner'"),
        ({"name": "j.users", "on": "id", "max_staleness": "soon"}, "duration"),
    ],
)
def test_what_cannot_be(con: lh.Connection, spark: SparkSession, given: dict[str, Any], words: str) -> None:
    con.create_table("j.log", pa.schema([("id", pa.int64())]), if_not_exists=True)
    with pytest.raises(lh.LakeheadError, match=words):
        lhs.lookup_join(spark.range(3), given.pop("name"), **given)


def test_a_column_of_another_type_than_the_key(spark: SparkSession) -> None:
    for wrong in ("date'2026-01-01'", "array(1)", "'x'", "true"):
        with pytest.raises(lh.SchemaMismatchError, match=r"j\.users"):
            lhs.lookup_join(spark.range(1).selectExpr(f"{wrong} as id"), "j.users", on="id")


def test_columns_with_dots(spark: SparkSession) -> None:
    df = spark.createDataFrame([(7, "x")], "`the.id` int, `a.b` string")
    found = lhs.lookup_join(df, "j.users", on={"the.id": "id"}, columns=["name"])
    assert found.columns == ["the.id", "a.b", "name"] and found.collect() == [(7, "x", "new")]


def test_a_stream(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "1.json").write_text('{"id": 1}\n{"id": 999}\n')
    frame = lhs.lookup_join(
        spark.readStream.schema("id bigint").json(str(source)), "j.users", on="id", columns=["name"]
    )
    query = (
        frame.writeStream.format("lakehead").option("uri", con.uri).option("table", "j.enriched")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    found = con.table("j.enriched").scan().to_arrow().to_pylist()
    assert sorted(found, key=str) == [{"id": 1, "name": "u1"}, {"id": 999, "name": None}]
