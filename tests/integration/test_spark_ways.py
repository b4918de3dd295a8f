"""Ways of writing that a Spark user takes for granted: several in one step, without an address, decimals for floats,
errors of Lakehead's own whatever statement met them."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.integration.conftest import embedded_only

import lakehead as lh
import lakehead.spark as lhs
from lakehead.errors import InvalidPropertyError, LakeheadError, SchemaMismatchError, SqlError
from lakehead.spark import checks, union_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lakehead.spark.layers import Layers

pytestmark = [pytest.mark.spark, embedded_only]

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string()), ("n", pa.int64())])


def write(df: DataFrame, table: str, **options: str) -> None:
    df.write.format("lakehead").option("table", table).options(**options).mode("append").save()


def written(con: lh.Connection, table: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in con.table(table).scan().to_arrow().to_pylist())


def test_each_way_of_writing_a_batch_is_written_once(con: lh.Connection, spark: SparkSession) -> None:
    """As a step does that upserts some rows of a change feed, and deletes others."""
    table = con.create_table("y.ways", SCHEMA, primary_key="id")
    table.upsert([{"id": n, "v": "old", "n": 0} for n in range(4)])
    seen = []
    for _ in range(2):
        write(spark.sql("select 1L id, 'new' v, 1L n"), "y.ways", job="cdc", batch="1")
        write(spark.sql("select 3L id"), "y.ways", operation="DELETE", job="cdc", batch="1")
        write(spark.sql("select 0L id, 7L n"), "y.ways", columns="id, n", job="cdc", batch="1")
        given = spark.sql("select 0L id, 'x' v")
        seen.append(lhs.write(given, "y.ways", columns=["v", "id"], job="cdc", batch=1))
        seen.append(lhs.write(spark.sql("select 2L id"), "y.ways", operation="delete", job="cdc", batch=1))
        seen.append(table.get({"id": 3}))
        table.upsert([{"id": 3, "v": "back", "n": 3}])
    back = {"id": 3, "v": "back", "n": 3}
    assert seen == [1, 0, None, 0, 0, back], "the first time all is written, deletes as one; the second time nothing"
    assert written(con, "y.ways") == [(0, "x", 7), (1, "new", 1), (2, "old", 0), (3, "back", 3)]


def test_an_overwrite_of_a_batch_is_a_way_of_its_own(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("y.days", [("day", "string"), ("n", "int64")], partition_by=["day"])
    rows = spark.sql("select 'a' day, 1L n")
    for _ in range(2):
        over = rows.write.format("lakehead").options(table="y.days", partitionOverwriteMode="dynamic", job="d", batch=1)
        over.mode("overwrite").save()
        write(rows, "y.days", job="d", batch="1")
    assert written(con, "y.days") == [("a", 1)] * 2
    con.table("y.days").append([{"day": "b", "n": 5}])
    for partition in ("day=a", "day=b", "day=a", "day=b"):
        rows = spark.sql(f"select '{partition[4:]}' day, 9L n")
        over = rows.write.format("lakehead").options(table="y.days", partitions=partition, job="d", batch=2)
        over.mode("overwrite").save()
    assert written(con, "y.days") == [("a", 9), ("b", 9)], "each choice of partitions is one, too"


def test_columns_of_a_batch_are_the_same_ones_in_another_case(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("y.cased", SCHEMA, primary_key="id")
    for columns in ("id, n", "N, ID"):
        write(spark.sql("select 1L id, 1L n"), "y.cased", columns=columns, job="c", batch="1")
        table.upsert([{"id": 1, "v": "x", "n": 9}])
    write(spark.sql("select 1L id, 1L n"), "y.cased", columns='["Id", "n"]', job="c", batch="1")
    assert written(con, "y.cased") == [(1, "x", 9)]
    for more in ({}, {"operation": "delete"}):
        with pytest.raises(Exception, match="200 characters at most"):
            write(spark.sql("select 1L id"), "y.cased", job="j" * 201, batch="1", **more)
        write(spark.sql("select 7L id"), "y.cased", job="j" * 200, batch="1", **more)


def test_a_session_that_is_attached_needs_no_address(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    con.create_table("y.near", [("id", "int64")])
    write(spark.range(5), "y.near")
    read = spark.read.format("lakehead").option("table", "y.near")
    assert read.load().count() == 5
    stream = spark.readStream.format("lakehead").options(table="y.near", start="earliest").load()
    options = {"table": "y.near_too", "checkpointLocation": str(tmp_path / "checkpoint")}
    stream.writeStream.format("lakehead").options(**options).trigger(availableNow=True).start().awaitTermination()
    assert written(con, "y.near_too") == written(con, "y.near") == [(n,) for n in range(5)]
    with pytest.raises(Exception, match="option uri"):
        read.option("uri", "elsewhere").load()
    other = spark.newSession()
    with lh.connect(tmp_path / "other") as near:
        near.create_table("y.near", [("id", "int64")])
        lhs.attach(other, near)
        write(other.range(2), "y.near")
        assert near.table("y.near").scan().count() == 2
        write(spark.range(1), "y.near")
        assert con.table("y.near").scan().count() == 6, "each session means its own"
        lhs.attach(spark, con)


def test_an_attach_that_is_refused_changes_nothing(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    con.create_table("y.mine", [("id", "int64")])
    with lh.connect(tmp_path / "other") as other:
        other.create_table("y.mine", [("id", "int64")])

        def refuse(*_: Any) -> None:
            raise lh.AuthenticationError("no luck")

        with monkeypatch.context() as patched, pytest.raises(lh.AuthenticationError):
            patched.setattr(checks, "require_executors", refuse)
            lhs.attach(spark, other)
        write(spark.range(3), "y.mine")
        assert lhs.table(spark, "y.mine").count() == con.table("y.mine").scan().count() == 3
        assert other.table("y.mine").scan().count() == 0
    with pytest.raises(lh.ClosedError):
        lhs.attach(spark, other)
    assert spark.read.format("lakehead").option("table", "y.mine").load().count() == 3


def test_a_copy_of_a_session_may_be_attached_elsewhere(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """As Spark makes one for each stream."""
    con.create_table("y.here", [("id", "int64")]).append([{"id": n} for n in range(4)])
    seen: list[int] = []
    with lh.connect(tmp_path / "other") as other:
        other.create_table("y.here", [("id", "int64")])

        def step(rows: DataFrame, _: int) -> None:
            seen.append(lhs.table(rows.sparkSession, "y.here").count())
            lhs.attach(rows.sparkSession, other)
            seen.append(lhs.table(rows.sparkSession, "y.here").count())

        stream = spark.readStream.format("lakehead").options(table="y.here", start="earliest").load()
        begun = stream.writeStream.foreachBatch(step).option("checkpointLocation", str(tmp_path / "checkpoint"))
        begun.trigger(availableNow=True).start().awaitTermination()
        assert seen == [4, 0] and lhs.table(spark, "y.here").count() == 4
        assert spark.read.format("lakehead").option("table", "y.here").load().count() == 4
    lhs.attach(spark, con)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_view_says_what_an_insert_overwrites(con: lh.Connection, spark: SparkSession, mode: str) -> None:
    con.create_table(f"y.{mode}", [("day", "string"), ("n", "int64")], partition_by=["day"])
    con.table(f"y.{mode}").append([{"day": "a", "n": 0}, {"day": "b", "n": 0}])
    named = f"table 'y.{mode}', partitionOverwriteMode '{mode}'"
    spark.sql(f"create or replace temp view days using lakehead options ({named})")
    spark.sql("insert overwrite days values ('a', 1)")
    assert written(con, f"y.{mode}") == ([("a", 1)] if mode == "static" else [("a", 1), ("b", 0)])
    assert sorted(map(tuple, spark.table("days").collect())) == written(con, f"y.{mode}")
    spark.catalog.dropTempView("days")


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("insert into shown values (cast('x' as string), 1, 2)", SqlError),  # Spark's own: it casts no such text
        ("insert into shown select -1, 'v', null where raise_error('no luck') is null", SqlError),
        ("insert into shown values (null, 'v', 1)", lh.NullKeyError),
        ("insert overwrite parted values (1, 'v', 1)", InvalidPropertyError),
        ("create table made_of_it using parquet as select * from gone", lh.TableNotFoundError),
    ],
)
def test_what_a_statement_does_at_once_fails_as_it_does_elsewhere(
    con: lh.Connection, spark: SparkSession, statement: str, error: type[LakeheadError]
) -> None:
    for name, more in (("shown", {"primary_key": "id"}), ("parted", {"partition_by": ["n"]}), ("gone", {})):
        con.create_table(f"y.{name}", SCHEMA, if_not_exists=True, **more)  # type: ignore[arg-type]
        spark.sql(f"create or replace temp view {name} using lakehead options (table 'y.{name}')")
    con.drop_table("y.gone")
    with pytest.raises(LakeheadError) as raised:
        lhs.sql(spark, statement)
    assert type(raised.value) is error, raised.value
    assert con.table("y.shown").scan().count() == con.table("y.parted").scan().count() == 0


def run(
    con: lh.Connection, spark: SparkSession, checkpoint: Path, table: str, begin: Callable[[DataFrame, str], Any]
) -> None:
    stream = spark.readStream.format("lakehead").options(table=table, start="earliest").load()
    query = begin(stream, str(checkpoint))
    query.awaitTermination()
    assert query.exception() is None


def test_decimals_are_summed_and_compared_for_floats(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """By the driver and by tasks, whole sums and others."""
    amounts = pa.schema([("k", pa.int64()), ("d", pa.decimal128(10, 2)), ("part", pa.int32())])
    log = con.create_table("y.amounts", amounts)
    columns = [("k", "int64"), ("total", "double"), ("least", "double"), ("most", "float")]
    for by in ("tasks", "driver"):
        con.create_table(f"y.by_{by}", columns, primary_key="k")

    def step(batch: DataFrame, out: Layers) -> None:
        rows = batch.selectExpr("k", "d as total", "d as least", "d as most")
        how: dict[str, Any] = {"sum": ["total"], "min": ["least"], "max": ["most"]}
        out.accumulate("y.by_tasks", rows.repartition(2), **how)
        out.accumulate("y.by_driver", rows.toArrow(), **how)

    expected = []
    for texts, total in ((("1.00", "2.00"), 3.0), (("1.50", "2.25"), 6.75), (("0.10", "0.20"), 7.05)):
        log.append(pa.Table.from_pylist([{"k": 1, "d": Decimal(t), "part": 0} for t in texts], amounts))
        run(
            con, spark, tmp_path / "sums", "y.amounts",
            lambda s, at: lhs.pipeline(s, step, checkpoint=at, trigger="available now"),
        )  # fmt: skip
        expected.append(total)
        assert [round(r[1], 9) for r in written(con, "y.by_tasks")] == [total]
        assert written(con, "y.by_driver") == written(con, "y.by_tasks")
    assert [r[2:] for r in written(con, "y.by_tasks")] == [(0.1, 2.25)]


def test_whole_decimals_are_floats_too(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """Whole numbers that no float holds are refused."""
    amounts = pa.schema([("k", pa.int64()), ("d", pa.decimal128(38, 0)), ("n", pa.int64())])
    log = con.create_table("y.wholes", amounts)
    con.create_table("y.of_wholes", [("k", "int64"), ("d", "double"), ("n", "double")], primary_key="k")

    def add(d: int, n: int) -> None:
        log.append(pa.Table.from_pylist([{"k": 1, "d": Decimal(d), "n": n}], amounts))
        run(
            con, spark, tmp_path / "checkpoint", "y.wholes",
            lambda s, at: lhs.pipeline(
                s, lambda rows, out: out.accumulate("y.of_wholes", rows, sum=["d", "n"]), checkpoint=at,
                trigger="available now",
            ),
        )  # fmt: skip

    add(10**29, 5)
    add(2**53 + 1, 2**53 - 5)
    assert written(con, "y.of_wholes") == [(1, 1e29 + 2.0**53, 2.0**53)]
    with pytest.raises(Exception, match="column 'n'"):
        add(1, 2**53 + 1)
    assert written(con, "y.of_wholes") == [(1, 1e29 + 2.0**53, 2.0**53)]


@pytest.mark.parametrize("scd_type", [1, 2])
def test_changes_with_decimals_are_applied_to_floats(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, scd_type: int
) -> None:
    changes = pa.schema([("k", pa.int64()), ("seq", pa.int64()), ("price", pa.decimal128(10, 2))])
    rows = [{"k": 1, "seq": n, "price": Decimal(n) / 4} for n in (1, 3, 2)]
    name = f"y.prices{scd_type}"
    con.create_table(f"{name}_changes", changes).append(pa.Table.from_pylist(rows, changes))
    own = [("k", "int64"), ("price", "double")]
    spans = [("start_at", "int64"), ("end_at", "int64")] if scd_type == 2 else []
    key = ["k", "start_at"] if scd_type == 2 else ["k"]
    con.create_table(name, [*own, *spans], primary_key=key, **({"bucket_key": ["k"]} if scd_type == 2 else {}))  # type: ignore[arg-type]
    run(
        con, spark, tmp_path / "checkpoint", f"{name}_changes",
        lambda s, at: lhs.apply_changes(
            s, name, keys=["k"], sequence_by="seq", except_column_list=["seq"], stored_as_scd_type=scd_type,
            checkpoint=at, trigger="available now",
        ),
    )  # fmt: skip
    expected = [(1, 0.75)] if scd_type == 1 else [(1, 0.25, 1, 2), (1, 0.5, 2, 3), (1, 0.75, 3, None)]
    assert written(con, name) == expected


def test_what_fits_no_float_is_refused_as_ever(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("y.texts", [("k", "int64"), ("d", "double")], primary_key="k")
    with pytest.raises(Exception, match="column 'd'") as raised:
        write(spark.sql("select 1L k, 'x' d"), "y.texts")
    assert isinstance(lhs.raised(raised.value), SchemaMismatchError)


def test_a_session_that_nobody_attached_reads_much_as_whom_its_application_is(
    con: lh.Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read by Python workers, too, which would find the token of who may do everything."""
    con.create_table("y.granted", [("n", "int64")]).append([{"n": n} for n in range(10)])
    con.create_table("y.secret", [("n", "int64")])
    con.grant("read", "y.granted", to="reader")
    monkeypatch.setattr(union_frame, "is_shared", lambda *_: False)  # as on a cluster
    monkeypatch.setattr(union_frame, "is_large", lambda *_: True)
    with lh.connect(con.uri, token=con.create_token("reader").token) as theirs:
        lhs.attach(spark.newSession(), theirs)
        try:
            third = spark.newSession()
            assert lhs.table(third, "y.granted").count() == lhs.table(third, "y.granted").count() == 10
            # By what the session knows the format by then, Python workers read as nobody else does.
            with pytest.raises(Exception, match="reader") as told:
                third.read.format("lakehead").options(uri=con.uri, table="y.secret").load()
            assert isinstance(lhs.raised(told.value), lh.PermissionDeniedError)
        finally:
            lhs.attach(spark, con)
