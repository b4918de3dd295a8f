"""What Spark writes is in the table once, whichever of its tasks fail, run twice or are repeated."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import types as st
from tests.integration.conftest import embedded_only

import lakehead as lh
import lakehead.spark as lhs
from lakehead.client.staging import JobBatch
from lakehead.spark.layers import Layers
from lakehead.spark.sink import BatchWriter, Overwriter, Staged, StreamWriter, batch_writer
from lakehead.spark.staged_rows import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, embedded_only]

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


def rows_of(spark: SparkSession, ids: range, v: str = "x") -> DataFrame:
    from pyspark.sql import functions as F

    return spark.range(ids.start, ids.stop, 1, 3).select("id", F.lit(v).alias("v"))


def into(con: lh.Connection, df: DataFrame, table: str, **options: Any) -> DataFrameWriter:
    return df.write.format("lakehead").option("uri", con.uri).option("table", table).options(**options).mode("append")


def written(con: lh.Connection, table: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in con.table(table).scan().to_arrow().to_pylist())


def test_append(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.log", SCHEMA, buckets=4)
    into(con, rows_of(spark, range(1000)), "w.log").save()
    into(con, rows_of(spark, range(0)), "w.log").save()
    assert written(con, "w.log") == [(n, "x") for n in range(1000)]


def test_a_temporary_view_is_read_and_written(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.viewed", SCHEMA, primary_key="id")
    spark.sql(f"create temp view viewed using lakehead options (uri '{con.uri}', table 'w.viewed')")
    try:
        rows_of(spark, range(2)).write.insertInto("viewed")
        spark.sql("insert into viewed values (1, 'new')")
        assert sorted(spark.table("viewed").collect()) == [(0, "x"), (1, "new")]
    finally:
        spark.catalog.dropTempView("viewed")


def test_upsert_some_columns_delete(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.keyed", pa.schema([*SCHEMA, ("n", pa.int32())]), primary_key="id", buckets=2)
    into(con, rows_of(spark, range(6)).selectExpr("id", "v", "cast(id * 2 as int) n"), "w.keyed").save()
    into(con, rows_of(spark, range(2, 4), "new").selectExpr("id", "v", "7 as n"), "w.keyed", columns="id, v").save()
    into(con, rows_of(spark, range(5, 6)), "w.keyed", operation="delete").save()
    expected = [(n, "new" if n in (2, 3) else "x", n * 2) for n in range(5)]
    assert written(con, "w.keyed") == expected


def test_names_are_sparks_without_regard_to_case(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.case", pa.schema([*SCHEMA, ("N", pa.int32())]), primary_key="id")
    rows = rows_of(spark, range(4))
    into(con, rows.selectExpr("cast(id as int) n", "V", "id ID"), "w.case").save()
    into(con, rows.selectExpr("ID", "'new' V", "9 n"), "w.case", columns="Id, V").save()
    lhs.write(rows.where("id = 3").selectExpr("ID"), "w.case", operation="delete")
    assert written(con, "w.case") == [(n, "new", n) for n in range(3)]
    with pytest.raises(Exception, match="ID2"):
        into(con, spark.sql("select 1L id, 2L ID2, 'x' V"), "w.case").save()
    for columns in ("ID, n", "ID"):
        read = spark.read.format("lakehead").options(uri=con.uri, table="w.case", columns=columns).load()
        assert (
            read.columns
            == lhs.table(spark, "w.case", columns=columns.split(", ")).columns
            == ["id", "N"][: len(read.columns)]
        )
        assert read.count() == lhs.table(spark, "w.case", columns=columns.split(", ")).count() == 3
    assert lhs.table(spark, "w.case$changelog", columns=["ID"]).columns == ["id"]


def test_a_table_that_is_made_has_its_columns_whatever_the_case(con: lh.Connection, spark: SparkSession) -> None:
    rows = spark.sql("select 1L as Id, 'mon' as Day")
    into(con, rows, "w.cased", primary_key="id, DAY", partition_by="day", bucket_key="ID", buckets="2").save()
    lhs.write(rows, "w.cased_too", primary_key="ID")
    into(con, rows, "w.cased", primary_key="iD, day", partition_by="Day", bucket_key="id", buckets="2").save()
    made = con.table("w.cased")
    assert (made.primary_key, made.partition_by) == (["Id", "Day"], ["Day"]) and made.scan().count() == 1
    assert con.table("w.cased_too").primary_key == ["Id"]
    for wrong in ("nosuch", "id, ID"):
        with pytest.raises(Exception, match="which the schema lacks"):
            into(con, rows, "w.unmade", primary_key=wrong).save()


def test_decimals_are_floats_where_a_table_has_those(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.floats", [("id", "int64"), ("d", "double"), ("f", "float")])
    numbers = ["1.5", "0.1", "123456789012345678.123456789", "-99999999999999999999.9", None]
    shown = ", ".join(f"({n}L, {number or 'null'})" for n, number in enumerate(numbers))
    # A decimal of 38 digits, as the second column has it, is a common one in Spark.
    into(con, spark.sql(f"select id, d, d f from values {shown} t(id, d)"), "w.floats").save()
    expected = [(n, None if d is None else float(d)) for n, d in enumerate(numbers)]
    assert [row[:2] for row in written(con, "w.floats")] == expected


def test_every_type(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.from", pa.schema([
        ("b", pa.bool_()), ("i", pa.int32()), ("l", pa.int64()), ("f", pa.float32()), ("d", pa.float64()),
        ("s", pa.string()), ("x", pa.binary()), ("day", pa.date32()), ("ts", pa.timestamp("us", "UTC")),
        ("ntz", pa.timestamp("us")), ("dec", pa.decimal128(12, 2)), ("a", pa.list_(pa.int64())),
        ("st", pa.struct([("p", pa.string()), ("q", pa.int64())])), ("m", pa.map_(pa.string(), pa.int64())),
    ]))  # fmt: skip
    row: dict[str, Any] = {
        "b": True, "i": -3, "l": 2**40, "f": 1.5, "d": float("inf"), "s": "é", "x": b"\x00", "day": dt.date(2026, 1, 2),
        "ts": dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC), "ntz": dt.datetime(2026, 1, 2, 3, 4, 5, 6),
        "dec": Decimal("1.25"), "a": [1, None], "st": {"p": None, "q": 1}, "m": [("k", 1)],
    }  # fmt: skip
    con.table("w.from").append([row, dict.fromkeys(row)])
    frame = lhs.table(spark, "w.from")
    into(con, frame, "w.copy").save()  # made with the frame's columns
    into(con, frame, "w.from").save()
    copied = con.table("w.copy").scan().to_arrow().to_pylist()
    assert sorted(copied, key=str) == sorted([row, dict.fromkeys(row)], key=str)
    assert len(con.table("w.from").scan().to_arrow()) == 4


def test_a_table_is_made_with_options(con: lh.Connection, spark: SparkSession) -> None:
    options = {"primary_key": "id", "buckets": "3", "freshness": "2s", "partition_by": "", "durability": "os"}
    into(con, rows_of(spark, range(9)), "w.made", **options).save()
    about = con.table("w.made").describe()
    assert (about["primary_key"], about["buckets"], about["properties"]["durability"]) == (["id"], 3, "os")
    assert len(written(con, "w.made")) == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tabel": "x"}, "did you mean 'table'"),
        ({"operation": "merge"}, "append, upsert or delete"),
        ({"job": "j"}, "go together"),
        ({"job": "", "batch": "0"}, "go together"),
        ({"job": "j", "batch": "²"}, "go together"),
        ({"job": "j", "batch": str(2**62 + 1)}, "is the greatest"),
        ({"buckets": "²"}, "not a number"),
        ({"operation": "upsert"}, "is a log table"),
        ({"columns": "id"}, "columns is for upserts"),
        ({"columns": "[id"}, "not a list of names"),
        ({"primary_key": "[1]"}, "not a list of names"),
        ({"buckets": "many"}, "not a number"),
    ],
)
def test_wrong_options(con: lh.Connection, spark: SparkSession, options: dict[str, str], words: str) -> None:
    con.create_table("w.wrong", SCHEMA, if_not_exists=True)
    with pytest.raises(Exception, match=words):
        into(con, rows_of(spark, range(3)), "w.wrong", **options).save()
    assert written(con, "w.wrong") == []


def test_columns_that_do_not_fit(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.fit", SCHEMA)
    for wrong in ("id, cast(id as string) as v, 1 as other", "'a' as id, v"):
        with pytest.raises(Exception, match=r"rows for w\.fit"):
            into(con, rows_of(spark, range(3)).selectExpr(*wrong.split(", ")), "w.fit").save()
    assert written(con, "w.fit") == []


FRAME = st.StructType([st.StructField("id", st.LongType()), st.StructField("v", st.StringType())])


def overwrite_of(con: lh.Connection, table: str) -> Overwriter:
    begun = batch_writer({"uri": con.uri, "table": table}, FRAME, True)
    assert isinstance(begun, Overwriter)
    return begun


def one(id: int) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pylist([{"id": id, "v": "x"}], SCHEMA)])


def test_of_two_overwrites_at_once_the_later_is_there(con: lh.Connection) -> None:
    con.create_table("w.twice", SCHEMA).append([{"id": 0, "v": "old"}])
    tables = con.tables("w")
    first, second = overwrite_of(con, "w.twice"), overwrite_of(con, "w.twice")
    of_first, of_second = first.write(one(1)), second.write(one(2))
    with pytest.raises(lh.TableNotFoundError, match=r"another overwrite of w\.twice began"):
        first.commit([of_first])
    with pytest.raises(lh.TableNotFoundError, match=r"another overwrite of w\.twice began"):
        first.commit([])
    first.abort([of_first])
    assert written(con, "w.twice") == [(0, "old")]
    second.commit([of_second])
    assert written(con, "w.twice") == [(2, "x")] and con.tables("w") == tables


def test_an_overwrite_takes_no_name_from_one_that_begins_meanwhile(con: lh.Connection) -> None:
    con.create_table("w.meanwhile", SCHEMA).append([{"id": 0, "v": "old"}])
    tables = con.tables("w")
    first = overwrite_of(con, "w.meanwhile")
    BatchWriter.commit(first, [first.write(one(1))])
    begun, rename = [], con._rename

    def late(*names: str, **how: Any) -> lh.Table:
        begun.append(overwrite_of(con, "w.meanwhile"))
        return rename(*names, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(con, "_rename", late)
        for _ in range(2):
            with pytest.raises(lh.TableNotFoundError, match=r"another overwrite of w\.meanwhile began"):
                first._swap(con)
    (second,) = begun
    first.abort([])
    assert written(con, "w.meanwhile") == [(0, "old")]
    second.commit([second.write(one(2))])
    assert written(con, "w.meanwhile") == [(2, "x")] and con.tables("w") == tables


def test_an_overwrite_whose_answer_was_lost_leaves_a_later_one(con: lh.Connection) -> None:
    con.create_table("w.lost", SCHEMA).append([{"id": 0, "v": "old"}])
    tables = con.tables("w")
    first = overwrite_of(con, "w.lost")
    first.commit([first.write(one(1))])
    second = overwrite_of(con, "w.lost")
    second.commit([second.write(one(2))])
    first._swap(con)  # as `in_worker` does where the connection broke after the first time
    assert written(con, "w.lost") == [(2, "x")] and con.tables("w") == tables


def test_an_overwrite_that_is_done_again_before_the_old_table_is_dropped(con: lh.Connection) -> None:
    con.create_table("w.again", SCHEMA).append([{"id": 0, "v": "old"}])
    tables = con.tables("w")
    first = overwrite_of(con, "w.again")
    of_first = first.write(one(1))
    drop = con.drop_table
    BatchWriter.commit(first, [of_first])
    with pytest.MonkeyPatch.context() as unanswered:
        unanswered.setattr(con, "drop_table", lambda *_, **__: drop("w.nowhere"))
        first._swap(con)
    second = overwrite_of(con, "w.again")
    second.commit([second.write(one(2))])
    first._swap(con)
    assert written(con, "w.again") == [(2, "x")] and con.tables("w") == tables


def test_a_table_that_is_replaced_while_it_is_written(con: lh.Connection) -> None:
    con.create_table("w.gone", SCHEMA)
    target, batch = Target(con.uri, "w.gone"), JobBatch("query of the tests", 3)

    def of_dropped() -> Iterator[pa.RecordBatch]:
        con.drop_table("w.gone")
        yield from one(1)

    with pytest.raises(lh.TableNotFoundError, match=r"table w\.gone was dropped, or overwritten, while rows"):
        target.stage(batch, of_dropped())
    con.create_table("w.gone", SCHEMA)
    con.create_table("w.instead", SCHEMA)
    staged = Staged(batch, target.stage(batch, one(1)))
    con.rename_table("w.instead", "w.gone", swap=True)
    with pytest.raises(lh.InvalidRequestError, match="the table was overwritten, or another one got its name"):
        StreamWriter(target, SCHEMA).commit([staged], 3)
    assert written(con, "w.gone") == written(con, "w.instead") == []
    con.drop_table("w.instead")


@pytest.mark.parametrize("key", [None, "id"])
def test_overwrite(con: lh.Connection, spark: SparkSession, key: str | None) -> None:
    name = f"w.over_{key}"
    before = con.create_table(name, SCHEMA, primary_key=key, buckets=3, lake="iceberg")
    (before.upsert if key else before.append)([{"id": 1, "v": "old"}, {"id": 2, "v": "old"}])
    con.tier(name)
    tables = con.tables("w")
    if key:
        bad = rows_of(spark, range(9)).selectExpr("nullif(id, 5) as id", "v")
        with pytest.raises(Exception, match="null"):
            into(con, bad, name).mode("overwrite").save()
        assert written(con, name) == [(1, "old"), (2, "old")]
    into(con, lhs.table(spark, name).selectExpr("id + 1 as id", "'new' as v"), name).mode("overwrite").save()
    assert written(con, name) == [(2, "new"), (3, "new")]
    table = con.table(name)
    assert table.describe()["buckets"] == 3 and list(table.primary_key) == ([key] if key else [])
    con.tier(name)
    assert sorted(table.scan(tier="lake").to_arrow()["id"].to_pylist()) == [2, 3]
    assert con.tables("w") == tables
    into(con, rows_of(spark, range(2)), f"{name}_made", **({"primary_key": key} if key else {})).mode(
        "overwrite"
    ).save()
    assert written(con, f"{name}_made") == [(0, "x"), (1, "x")]
    with pytest.raises(Exception, match=r"mode\('append'\)"):
        into(con, rows_of(spark, range(2)), name, job="j", batch="1").mode("overwrite").save()


def test_a_batch_of_a_job_is_written_once(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.once", SCHEMA)
    frame = rows_of(spark, range(100))
    for _ in range(3):
        into(con, frame, "w.once", job="nightly", batch="7").save()
    assert len(written(con, "w.once")) == 100
    into(con, frame, "w.once", job="nightly", batch="8").save()
    assert len(written(con, "w.once")) == 200
    into(con, frame, "w.once", job="nightly", batch="7").save()
    assert len(written(con, "w.once")) == 200
    assert [lhs.write(frame, "w.once", job="nightly", batch=n) for n in (8, 9, 9, 7)] == [0, 100, 0, 0]
    assert len(written(con, "w.once")) == 300
    into(con, frame, "w.once", job="nightly", batch="9").save()
    assert len(written(con, "w.once")) == 300


def test_a_job_that_fails_leaves_nothing(con: lh.Connection, spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    con.create_table("w.fails", SCHEMA)
    frame = rows_of(spark, range(30_000)).withColumn(
        "v", F.when(F.col("id") == 29_999, F.raise_error(F.lit("no luck"))).otherwise(F.col("v"))
    )
    with pytest.raises(Exception, match="no luck"):
        into(con, frame, "w.fails").save()
    assert written(con, "w.fails") == []


@pytest.mark.parametrize(("version", "uses"), [(1, 1), (1, 2), (2, 1)])
def test_a_stream_writes_each_micro_batch_once(
    con: lh.Connection,
    spark: SparkSession,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    version: int,
    uses: int,
) -> None:
    """Also when it goes on from an older checkpoint than its last, in whichever way Spark writes it."""
    import shutil

    source, checkpoint, old = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "old"
    source.mkdir()
    name = f"w.stream_{version}_{uses}"
    con.create_table(name, SCHEMA, buckets=2)
    spark.conf.set("spark.sql.streaming.offsetLog.formatVersion", version)
    request.addfinalizer(lambda: spark.conf.unset("spark.sql.streaming.offsetLog.formatVersion"))

    def run() -> None:
        frame = spark.readStream.schema("id bigint, v string").option("maxFilesPerTrigger", 1).json(str(source))
        for n in range(1, uses):
            frame = frame.where(f"id % {uses} <> {n}").union(frame.where(f"id % {uses} = {n}"))
        query = (
            frame.writeStream.format("lakehead")
            .option("uri", con.uri)
            .option("table", name)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def add(n: int) -> None:
        (source / f"{n}.json").write_text("".join(f'{{"id": {n * 10 + i}, "v": "x"}}\n' for i in range(10)))

    add(0)
    run()
    shutil.copytree(checkpoint, old)
    add(1)
    run()
    assert written(con, name) == [(n, "x") for n in range(20)]
    for _ in range(2):
        shutil.rmtree(checkpoint)
        shutil.copytree(old, checkpoint)
        run()
        assert written(con, name) == [(n, "x") for n in range(20)]
    add(2)
    run()
    assert written(con, name) == [(n, "x") for n in range(30)]
    shutil.rmtree(checkpoint)
    shutil.copytree(old, checkpoint)
    (source / "1.json").write_text((source / "1.json").read_text() + '{"id": 30, "v": "x"}\n')
    with pytest.raises(StreamingQueryException) as ended:  # another batch 1: what is new in it would be let go
        run()
    assert isinstance(lhs.raised(ended.value), lh.SequenceConflictError)
    assert written(con, name) == [(n, "x") for n in range(30)]


def test_complete_mode_is_refused(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    con.create_table("w.complete", pa.schema([("v", pa.string()), ("n", pa.int64())]))
    frame = spark.readStream.format("rate").load().selectExpr("cast(value as string) v").groupBy("v").count()
    query = (
        frame.withColumnRenamed("count", "n").writeStream.format("lakehead").outputMode("complete")
        .option("uri", con.uri).option("table", "w.complete").option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    with pytest.raises(Exception, match="foreachBatch"):
        query.awaitTermination(60)


def test_a_table_that_is_made_takes_nulls_as_sparks_own_do(con: lh.Connection, spark: SparkSession) -> None:
    """Of literals Spark says that they are never null: of these rows, not of those to come."""
    made = spark.range(2).selectExpr("id", "'new' as status", "named_struct('a', 1) as inside", "array(1) as listed")
    assert not any(field.nullable for field in made.schema)
    into(con, made, "w.literals", primary_key="id").mode("append").save()
    schema = con.table("w.literals").schema
    assert [field.nullable for field in schema] == [False, True, True, True]
    assert schema.field("inside").type.field(0).nullable and schema.field("listed").type.value_field.nullable
    into(con, made.selectExpr("id + 5 as id"), "w.literals", columns="id").mode("append").save()
    lhs.write(
        spark.sql("select 9L as id, cast(null as string) as status, null as inside, null as listed"), "w.literals"
    )
    assert con.table("w.literals").get(9) == {"id": 9, "status": None, "inside": None, "listed": None}


def test_a_table_with_a_time_is_copied(con: lh.Connection, spark: SparkSession) -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.time64("us")), ("all", pa.list_(pa.time64("us")))])
    row = {"id": 1, "at": dt.time(12, 30, 0, 5), "all": [dt.time(1), None]}
    con.create_table("w.times", schema).append([row])
    into(con, lhs.table(spark, "w.times"), "w.copied_times").mode("append").save()
    assert con.table("w.copied_times").schema.types == schema.types
    assert con.table("w.copied_times").scan().to_arrow().to_pylist() == [row]


def test_lhs_write_says_what_it_does_not_do(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("w.there", pa.schema([("id", pa.int64())]))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mode": "overwrite"}, r"df\.write"), ({"bukets": 4}, "buckets"), ({"partitionBy": "id"}, "no table"),
        ({"job": "j"}, "together"), ({"batch": 0}, "together"), ({"job": "j", "batch": -1}, "together"),
    ]  # fmt: skip
    for given, words in wrong:
        with pytest.raises(lh.InvalidPropertyError, match=words):
            lhs.write(spark.range(3), "w.there", **given)
    assert con.table("w.there").scan().count() == 0


@pytest.mark.parametrize("trigger", ["", "once", "5", "1 secnd", 5, {"availableNow": True}])
def test_triggers_that_there_are_not(con: lh.Connection, spark: SparkSession, tmp_path: Path, trigger: Any) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(lh.InvalidPropertyError, match="'available now' or a time such as '1 second'"):
        lhs.pipeline(stream, lambda rows, out: None, checkpoint=str(tmp_path / "checkpoint"), trigger=trigger)
    with pytest.raises(lh.InvalidPropertyError, match="'available now' or a time such as '1 second'"):
        lhs.apply_changes(stream, "w.never", keys="value", sequence_by="timestamp", trigger=trigger)
    assert not [name for name in con.tables() if name.startswith("w.never")]


@pytest.mark.parametrize("step", [None, "step", lambda: None, lambda rows: None, lambda rows, out, more: None])
def test_steps_that_there_are_not(spark: SparkSession, tmp_path: Path, step: Any) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(lh.InvalidRequestError, match="function of two: the rows of a micro-batch"):
        lhs.pipeline(stream, step, checkpoint=str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("mode", ["", "upsert", None])
def test_output_modes_that_there_are_not(con: lh.Connection, spark: SparkSession, tmp_path: Path, mode: Any) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(lh.InvalidPropertyError, match=r"output_mode=.* must be append, update or complete"):
        lhs.pipeline(stream, lambda rows, out: None, checkpoint=str(tmp_path / "checkpoint"), output_mode=mode)


@pytest.mark.parametrize("key", [None, "id"])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("operation", ["insert", "Append", "", "overwrite"])
def test_operations_that_there_are_not(
    con: lh.Connection, spark: SparkSession, key: str | None, there: bool, operation: Any
) -> None:
    name = f"w.op_{key}_{there}"
    if there:
        con.create_table(name, SCHEMA, primary_key=key, if_not_exists=True)
    with pytest.raises(lh.InvalidPropertyError, match=r"operation='.*' must be append, upsert or delete"):
        lhs.write(rows_of(spark, range(3)), name, operation=operation, primary_key=key)
    assert (name in con.tables("w")) is there


@pytest.mark.parametrize(("operation", "key"), [("upsert", None), ("append", "id")])
def test_no_table_is_made_that_would_not_take_the_rows(
    con: lh.Connection, spark: SparkSession, operation: Any, key: str | None
) -> None:
    with pytest.raises(lh.WrongTableKindError, match=f"operation='{operation}'"):
        lhs.write(rows_of(spark, range(3)), "w.unmade", operation=operation, primary_key=key)
    assert "w.unmade" not in con.tables("w")


@pytest.mark.parametrize(
    "definition", [{"primary_key": "k"}, {"partition_by": "k"}, {"primary_key": ["id", "k"], "bucket_key": "id"}]
)
def test_keys_that_a_collation_takes_for_one_are_refused(
    con: lh.Connection, spark: SparkSession, definition: dict[str, Any]
) -> None:
    rows = spark.sql("select 1L as id, 'A' collate UTF8_LCASE as k")
    told = {n: c if isinstance(c, str) else ", ".join(c) for n, c in definition.items()}
    kind = "upsert" if "primary_key" in definition else "append"

    def refused(table: str) -> None:
        with pytest.raises(lh.SchemaMismatchError, match="column 'k' has the collation UTF8_LCASE"):
            lhs.write(rows, table, **definition)
        with pytest.raises(Exception, match="column 'k' has the collation UTF8_LCASE"):
            into(con, rows, table, **told).save()
        layers = Layers(con, JobBatch(f"collated {table}"))
        getattr(layers, kind)(table, rows, **definition)
        with pytest.raises(lh.SchemaMismatchError, match="column 'k' has the collation UTF8_LCASE"):
            layers.write()

    refused("w.collated")
    assert "w.collated" not in con.tables("w")
    table = con.create_table("w.collated", pa.schema([("id", pa.int64()), ("k", pa.string())]), **definition)
    refused("w.collated")
    assert table.scan().count() == 0
    assert lhs.write(rows.selectExpr("id", "collate(k, 'UTF8_BINARY') k"), "w.collated") == 1
    con.drop_table("w.collated")


def test_a_column_beside_the_key_may_be_collated(con: lh.Connection, spark: SparkSession) -> None:
    lhs.write(spark.sql("select 1L as id, 'A' collate UTF8_LCASE as v"), "w.note", primary_key="id")
    assert con.table("w.note").get(1) == {"id": 1, "v": "A"}


def test_lhs_write_takes_no_stream(con: lh.Connection, spark: SparkSession) -> None:
    stream = spark.readStream.format("rate").load().selectExpr("value id")
    con.create_table("w.takes", pa.schema([("id", pa.int64())]))
    for name in ("w.takes", "w.of_a_stream"):
        with pytest.raises(lh.InvalidRequestError, match=r"writeStream\.format\('lakehead'\).*lhs\.pipeline"):
            lhs.write(stream, name)
    assert "w.of_a_stream" not in con.tables("w")


def test_a_table_that_is_dropped_ends_the_query_that_writes_it(
    con: lh.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    source = con.create_table("w.events", pa.schema([("id", pa.int64())]))
    stream = spark.readStream.format("lakehead").options(uri=con.uri, table="w.events", start="earliest").load()
    options = {"uri": con.uri, "table": "w.sunk", "primary_key": "id", "checkpointLocation": str(tmp_path / "c")}

    def begin() -> StreamingQuery:
        return stream.writeStream.format("lakehead").options(**options).start()

    query = begin()
    source.append([{"id": 1}])
    query.processAllAvailable()
    assert con.table("w.sunk").primary_key == ["id"]
    con.drop_table("w.sunk")
    source.append([{"id": 2}])
    for _ in range(2):
        with pytest.raises(Exception, match="TableNotFoundError"):
            query.awaitTermination(60)
        assert isinstance(lhs.raised(query.exception()), lh.TableNotFoundError)
        assert "w.sunk" not in con.tables()
        query = begin()
    query.stop()


def test_what_a_session_was_told_stays(con: lh.Connection, spark: SparkSession) -> None:
    zone, arrow = "spark.sql.session.timeZone", "spark.sql.execution.arrow.pyspark.enabled"
    before = {name: spark.conf.get(name) for name in (zone, arrow)}
    at = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)
    table = con.create_table("w.zones", pa.schema([("at", pa.timestamp("us", "UTC"))]), lake="iceberg")
    table.append([{"at": at}])
    con.tier("w.zones")
    table.append([{"at": at}])
    try:
        spark.conf.set(zone, "America/New_York")
        spark.conf.set(arrow, "false")
        lhs.attach(spark, con)
        assert (spark.conf.get(zone), spark.conf.get(arrow)) == ("America/New_York", "false")
        assert lhs.table(spark, "w.zones").where("at = timestamp '2026-05-01 08:00:00'").count() == 2
        into(con, lhs.table(spark, "w.zones"), "w.zones").mode("append").save()
        assert set(table.scan().to_arrow()["at"].to_pylist()) == {at}
        lhs.session(con, **{zone: "Asia/Tokyo", "app_name": "another"})
        assert spark.conf.get(zone) == "Asia/Tokyo"
        with pytest.warns(UserWarning, match=r"local\[7\].*stop it first"):
            lhs.session(con, master="local[7]")
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
