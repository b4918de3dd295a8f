"""One query writes several tables, all of a micro-batch or none of it, and once."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import functions as F
from tests.integration.conftest import embedded_only
from tests.properties.test_change_feed import model

import lakehead as lh
import lakehead.spark as lhs
from lakehead.client import staging as client_staging
from lakehead.client.staging import Staging
from lakehead.spark.checkpoint import by_spark, in_folder
from lakehead.spark.foreach_batch import MicroBatches
from lakehead.spark.stream import LIMITED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lakehead.spark.layers import Layers

pytestmark = [pytest.mark.spark, embedded_only]

EVENTS = pa.schema([("id", pa.int64()), ("shop", pa.string()), ("amount", pa.int64())])


def events(ids: Iterable[int]) -> pa.Table:
    rows = [{"id": n, "shop": "ab"[n % 2], "amount": n} for n in ids]
    return pa.Table.from_pylist(rows, schema=EVENTS)


def stream_of(con: lh.Connection, spark: SparkSession, table: str, **options: str) -> DataFrame:
    given = {"uri": con.uri, "table": table, "start": "earliest", **options}
    return spark.readStream.format("lakehead").options(**given).load()


def rows_of(con: lh.Connection, table: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in con.table(table).scan().to_arrow().to_pylist())


def new_only(batch: DataFrame, out: Layers) -> None:
    """Silver has each event once; gold counts those that silver did not have: it reads what it writes."""
    from pyspark.sql import functions as F

    once = batch.dropDuplicates(["id"])
    seen = lhs.lookup_join(once, "p.silver", on="id", columns=["known"])
    new = seen.where("known is null").drop("known")
    out.upsert("p.silver", new.selectExpr("*", "true as known"))
    totals = new.groupBy("shop").agg(
        F.sum("amount").alias("amount"), F.count("*").alias("n"), F.max("id").alias("last")
    )
    out.accumulate("p.gold", totals, sum=["amount", "n"], max=["last"], primary_key=["shop"])


def test_layers_that_read_what_they_write_count_each_row_once(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies once all is decided, before Spark notes it, and the micro-batch comes again."""
    from lakehead.spark import layers

    bronze = con.create_table("p.bronze", EVENTS, buckets=2)
    con.create_table("p.silver", pa.schema([*EVENTS, ("known", pa.bool_())]), primary_key="id", buckets=2)
    stream = stream_of(con, spark, "p.bronze")
    publish, answers = layers.publish_together, []

    def then_die(*args: Any, **kwargs: Any) -> Any:
        answers.append(publish(*args, **kwargs))
        raise RuntimeError("the driver dies")

    for ids in (range(60), range(30, 100)):
        bronze.append(events(ids))
        bronze.append(events(ids))
        monkeypatch.setattr(layers, "publish_together", then_die)
        with pytest.raises(Exception, match="the driver dies"):
            lhs.pipeline(stream, new_only, checkpoint=str(tmp_path), trigger="available now").awaitTermination()
        monkeypatch.setattr(layers, "publish_together", publish)
        lhs.pipeline(stream, new_only, checkpoint=str(tmp_path), trigger="available now").awaitTermination()
    assert [a.before for a in answers] == [False, False]
    assert [r[0] for r in rows_of(con, "p.silver")] == list(range(100))
    assert rows_of(con, "p.gold") == [("a", sum(range(0, 100, 2)), 50, 98), ("b", sum(range(1, 100, 2)), 50, 99)]


def test_a_small_micro_batch_is_one_request_and_a_large_one_is_staged(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, staged = con.create_table("p.few_in", EVENTS), []
    send = Staging.send

    def noted(self: Staging, *args: Any) -> None:
        staged.append(args)
        send(self, *args)

    def step(batch: DataFrame, out: Layers) -> None:
        rows = batch.toArrow()
        out.append("p.few_all", rows)
        out.upsert("p.few_newest", batch, primary_key=["id"])
        out.accumulate("p.few_sum", rows.drop(["id"]), sum=["amount"], primary_key=["shop"])

    monkeypatch.setattr(Staging, "send", noted)
    query = lhs.pipeline(stream_of(con, spark, "p.few_in"), step, checkpoint=str(tmp_path))
    try:
        log.append(events(range(10)))
        query.processAllAvailable()
        staged.clear()  # of the first micro-batch nobody knew how large it is
        log.append(events(range(10, 30)))
        query.processAllAvailable()
        assert not staged
        log.append(events(range(30, 15_000)))
        monkeypatch.setattr(client_staging, "GIVEN_BYTES_MAX", 100)
        query.processAllAvailable()
        assert staged
    finally:
        query.stop()
    assert [con.table(f"p.few_{name}").scan().count() for name in ("all", "newest", "sum")] == [15_000, 15_000, 2]
    assert rows_of(con, "p.few_sum")[0] == ("a", sum(range(0, 15_000, 2)))
    assert list(tmp_path.rglob("offsets/*")) and not list(tmp_path.rglob("*.crc")), "a process for each file"


def test_an_older_checkpoint_lets_no_new_rows_go(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """The query counts its micro-batches on from there, whatever is in them."""
    source = con.create_table("p.older", EVENTS)
    checkpoint = tmp_path / "now"

    def run(*ids: int) -> None:
        source.append(events(ids))
        lhs.pipeline(
            stream_of(con, spark, "p.older"), lambda rows, out: out.append("p.copied", rows),
            checkpoint=str(checkpoint), trigger="available now",
        ).awaitTermination()  # fmt: skip

    run(0, 1)
    shutil.copytree(checkpoint, tmp_path / "old")
    run(2)
    read, by = in_folder(str(checkpoint)), by_spark(spark.sparkContext, checkpoint.as_uri())
    assert by("offsets/1") == read("offsets/1") is not None and by("offsets/2") is None
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "old", checkpoint)
    with pytest.raises(StreamingQueryException) as ended:
        run(3)
    assert isinstance(lhs.raised(ended.value), lh.SequenceConflictError)
    assert [r[0] for r in rows_of(con, "p.copied")] == [0, 1, 2]


def test_each_write_to_a_table_must_fit_it(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    con.create_table("p.misfits", EVENTS).append(events(range(5)))

    def step(batch: DataFrame, out: Layers) -> None:
        out.append("p.of_misfits", batch)
        out.upsert("p.of_misfits", batch)

    stream = stream_of(con, spark, "p.misfits")
    with pytest.raises(Exception, match="WrongTableKindError"):
        lhs.pipeline(stream, step, checkpoint=str(tmp_path), trigger="available now").awaitTermination()
    assert rows_of(con, "p.of_misfits") == []


def test_a_step_that_fails_leaves_nothing(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    log = con.create_table("p.input", EVENTS)
    log.append(events(range(5)))

    def step(batch: DataFrame, out: Layers) -> None:
        out.append("p.good", batch)
        out.upsert("p.bad", batch.selectExpr("case when id < 3 then id end as id", "shop"))

    con.create_table("p.bad", EVENTS, primary_key="id")
    stream = stream_of(con, spark, "p.input")
    with pytest.raises(Exception, match=r"null"):
        lhs.pipeline(stream, step, checkpoint=str(tmp_path), trigger="available now").awaitTermination()
    assert rows_of(con, "p.good") == rows_of(con, "p.bad") == []


def test_rows_of_one_table_land_in_the_order_of_the_calls(
    con: lh.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    con.create_table("p.changes", EVENTS).append(events(range(9)))

    def step(batch: DataFrame, out: Layers) -> None:
        out.upsert("p.kept", batch, primary_key=["id"], buckets=3)
        out.delete("p.kept", batch.where("id > 2"))
        out.upsert("p.kept", batch.where("id = 8").selectExpr("id", "'z' as shop"), columns=["id", "shop"])

    query = lhs.pipeline(stream_of(con, spark, "p.changes"), step, checkpoint=str(tmp_path), trigger="availableNow")
    query.awaitTermination()
    assert rows_of(con, "p.kept") == [(0, "a", 0), (1, "b", 1), (2, "a", 2), (8, "z", None)]


def test_accumulate_over_micro_batches(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    log = con.create_table("p.many", EVENTS)
    for start in range(0, 40, 10):
        log.append(events(range(start, start + 10)))

    def step(batch: DataFrame, out: Layers) -> None:
        out.accumulate("p.sums", batch.drop("id"), sum=["amount"], primary_key=["shop"])
        least = batch.selectExpr("shop", "id as first", "nullif(id, id) as never")
        out.accumulate("p.least", least, min=["first"], sum=["never"], primary_key=["shop"])
        out.accumulate("p.cased_sums", batch.selectExpr("SHOP", "amount"), sum=["AMOUNT"])

        rows = batch.toArrow()
        out.append("p.as_arrow", rows)
        out.accumulate("p.sums_of_arrow", rows.drop(["id"]), sum=["amount"], primary_key=["shop"])

    con.create_table("p.cased_sums", pa.schema([("shop", pa.string()), ("Amount", pa.int64())]), primary_key="shop")
    stream = stream_of(con, spark, "p.many", **({"max_rows_per_trigger": "7"} if LIMITED else {}))
    lhs.pipeline(stream, step, checkpoint=str(tmp_path), trigger="available now").awaitTermination()
    assert rows_of(con, "p.sums") == [("a", sum(range(0, 40, 2))), ("b", sum(range(1, 40, 2)))]
    assert rows_of(con, "p.least") == [("a", 0, None), ("b", 1, None)]
    assert rows_of(con, "p.as_arrow") == rows_of(con, "p.many")
    assert rows_of(con, "p.sums_of_arrow") == rows_of(con, "p.cased_sums") == rows_of(con, "p.sums")


def test_tasks_and_the_driver_accumulate_alike(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """Sums that tasks hand on have more digits than their column; NaN comes by any of them."""
    most, nan = 2**63 - 1, float("nan")
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("d", pa.decimal128(38, 2)), ("f", pa.float32())])
    rows = [{"id": 1, "n": n, "d": d, "f": f} for n, d, f in ((most, 1, nan), (5, None, 1.0), (-6, 2, None))]
    log = con.create_table("p.limits", schema, buckets=2)
    log.append(pa.Table.from_pylist(rows, schema))

    def step(batch: DataFrame, out: Layers) -> None:
        columns = batch.selectExpr("id", "n", "d", "f as least", "f as greatest").repartition(3)
        how: dict[str, Any] = {"sum": ["n", "d"], "min": "least", "max": "greatest", "primary_key": ["id"]}
        out.accumulate("p.limits_by_tasks", columns, **how)
        out.accumulate("p.limits_by_driver", columns.toArrow(), **how)

    def run() -> None:
        query = lhs.pipeline(stream_of(con, spark, "p.limits"), step, checkpoint=str(tmp_path), trigger="available now")
        query.awaitTermination()

    run()
    sums = [f"p.limits_by_{who}" for who in ("tasks", "driver")]
    expected = f"[(1, {most - 1}, Decimal('3.00'), 1.0, nan)]"
    assert [str(rows_of(con, name)) for name in sums] == [expected, expected]
    log.append(pa.Table.from_pylist([{"id": 1, "n": 2, "d": None, "f": -1.0}], schema))
    with pytest.raises(Exception, match="a sum of column 'n' does not fit int64") as raised:
        run()
    assert isinstance(lhs.raised(raised.value), lh.SchemaMismatchError)
    assert [str(rows_of(con, name)) for name in sums] == [expected, expected]


def test_what_has_no_sum_or_order_makes_no_table(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    con.create_table("p.unordered", EVENTS).append(events(range(3)))
    stream, tables = stream_of(con, spark, "p.unordered"), con.tables()
    for number, (expression, way) in enumerate(
        [("shop", "sum"), ("array(amount)", "min"), ("named_struct('a', id)", "max")]
    ):

        def step(batch: DataFrame, out: Layers, expression: str = expression, way: Any = way) -> None:
            rows = batch.selectExpr("id", f"{expression} as v")
            out.accumulate("p.of_unordered", rows, **{way: "v"}, primary_key=["id"])

        query = lhs.pipeline(stream, step, checkpoint=str(tmp_path / str(number)), trigger="available now")
        with pytest.raises(Exception, match=f"has no {way}") as raised:
            query.awaitTermination()
        assert isinstance(lhs.raised(raised.value), lh.SchemaMismatchError)
    assert con.tables() == tables


def test_a_pipeline_reads_a_stream(spark: SparkSession) -> None:
    with pytest.raises(lh.InvalidRequestError, match="readStream"):
        lhs.pipeline(spark.createDataFrame([(1,)], "id bigint"), new_only)


def test_write(con: lh.Connection, spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    frame = spark.range(0, 1000, 1, 3).select("id", F.lit("x").alias("v"))
    assert lhs.write(frame, "p.written", primary_key=["id"], buckets=2) == 1000
    assert lhs.write(frame.where("id < 10"), "p.written", operation="delete") == 10
    assert lhs.write(frame.where("id = 10").selectExpr("id", "'y' as v"), "p.written", columns=["id", "v"]) == 1
    assert rows_of(con, "p.written") == [(10, "y"), *((n, "x") for n in range(11, 1000))]
    with pytest.raises(lh.WrongTableKindError):
        lhs.write(frame, "p.written", operation="append")
    with pytest.raises(lh.NullKeyError, match="null"):
        lhs.write(frame.selectExpr("nullif(id, 999) as id", "v"), "p.written")
    assert len(rows_of(con, "p.written")) == 990


def test_columns_with_dots(con: lh.Connection, spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1, "x", [2.5])], "`user.id` bigint, `a.b` string, `c``d` array<double>")
    assert lhs.write(frame, "p.dotted", primary_key=["user.id"]) == 1
    assert con.table("p.dotted").scan().to_arrow().to_pylist() == [{"user.id": 1, "a.b": "x", "c`d": [2.5]}]
    into = frame.write.format("lakehead").options(uri=con.uri, table="p.dotted").mode("append")
    into.save()
    assert lhs.table(spark, "p.dotted").collect() == frame.collect()


@pytest.mark.parametrize("by", ["tasks", "spark", "driver"])
@pytest.mark.parametrize("scd_type", [1, 2])
def test_changes_in_any_order(
    con: lh.Connection,
    spark: SparkSession,
    tmp_path: Path,
    scd_type: int,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    """By tasks, by the driver with rows that Spark reads, and by the driver alone."""
    import random

    from pyspark.sql.functions import col

    found, given, read = MicroBatches._given, (lambda self, df, *_: (df, by == "spark")), []

    def by_driver(self: MicroBatches, *which: Any) -> tuple[DataFrame, bool]:
        wait_until(lambda: self.query is not None)
        read.append(found(self, *which)[0])
        return read[-1], True

    monkeypatch.setattr(MicroBatches, "_given", by_driver if by == "driver" else given)
    rng = random.Random(scd_type)
    changes = []
    for key in range(12):
        for sequence in rng.sample(range(40), rng.randrange(1, 9)):
            changes.append((key, sequence, rng.choice([None, "a", "b", f"v{sequence}"])))
    rng.shuffle(changes)
    source, target = f"p.cdc{scd_type}_{by}", f"p.target{scd_type}_{by}"
    feed = con.create_table(source, pa.schema([("k", pa.int64()), ("seq", pa.int32()), ("v", pa.string())]), buckets=2)
    stream = stream_of(con, spark, source)
    for part in (changes[:1], changes[1:20], changes[10:40], changes[40:]):
        feed.append([{"k": k, "seq": s, "v": v} for k, s, v in part] * 2)
        columns: dict[str, Any] = {"column_list": ["k", col("v")]}
        if by == "driver":
            columns = {"except_column_list": "seq"}
        query = lhs.apply_changes(
            stream, target, keys=[col("k")], sequence_by=col("seq"), apply_as_deletes="v is null", **columns,
            stored_as_scd_type=scd_type, checkpoint=str(tmp_path), trigger="available now",
        )  # fmt: skip
        query.awaitTermination()
        assert query.exception() is None
    assert len(read) == (4 if by == "driver" else 0)
    assert all(frame._rows is not None for frame in read)
    wanted = ["k", "v", "start_at", "end_at"] if scd_type == 2 else ["k", "v"]
    there = [tuple(r.values()) for r in con.table(target).scan(columns=wanted).to_arrow().to_pylist()]
    assert sorted(there, key=str) == sorted(model(changes, scd_type), key=str)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_keys_and_sequences_are_told_apart_whatever_their_collation(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, scd_type: Literal[1, 2]
) -> None:
    schema = pa.schema([("op", pa.string()), ("s", pa.string()), ("k", pa.string()), ("v", pa.int64())])
    source = con.create_table(f"p.collated{scd_type}", schema)
    names = [("u", "1", "A"), ("u", "2", "a"), ("d", "b", "A"), ("u", "B", "a"), ("u", "5", "b"), ("u", "6", "B")]
    source.append([{"op": op, "s": s, "k": k, "v": n} for n, (op, s, k) in enumerate(names)])
    told = stream_of(con, spark, source.name).selectExpr("op", "s collate UTF8_LCASE s", "k collate UTF8_LCASE k", "v")
    for how in ("v", "v + 0"):  # by the driver, and by tasks
        table = f"p.collated{scd_type}_{len(how)}"
        lhs.apply_changes(
            told.selectExpr("op", "s", "k", f"{how} as v"), table, keys="k", sequence_by="s",
            apply_as_deletes="op = 'd'", column_list=["k", "v"], stored_as_scd_type=scd_type,
            checkpoint=str(tmp_path / table), trigger="available now",
        ).awaitTermination()  # fmt: skip
        found = con.table(table).scan().to_arrow().to_pylist()
        live = {r["k"]: r["v"] for r in found if r.get("end_at") is None}
        assert live == {"a": 3, "b": 4, "B": 5} and (scd_type == 2 or len(found) == 3)


def test_changes_may_be_ordered_by_several_values(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    """As Spark orders such structs, whatever their values; a null in one is none."""
    import random

    rng = random.Random(7)
    edges = [-(1 << 63), -(1 << 62), -256, -1, 0, 1, 255, 1 << 40, (1 << 63) - 1]
    times = [dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC), dt.datetime(2026, 10, 25, 0, 30, tzinfo=dt.UTC)]
    texts = ["", "a", "B", "ä", "a\0", "ab"]
    rows = [
        {"k": n % 7, "b": rng.random() < 0.5, "n": rng.choice(edges), "at": rng.choice(times), "s": rng.choice(texts)}
        for n in range(300)
    ]
    schema = pa.schema(
        [("k", pa.int64()), ("b", pa.bool_()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("s", pa.string())]
    )
    con.create_table("p.several", schema).append(rows)
    stream = stream_of(con, spark, "p.several")
    by = {
        "struct(b, n, at, s)": lambda r: (r["b"], r["n"], r["at"], r["s"].encode()),
        "struct(at, cast(b as byte), to_date(at) as d, n, s)": lambda r: (r["at"], r["b"], r["n"], r["s"].encode()),
        "struct(to_timestamp_ntz(date_format(at, 'yyyy-MM-dd HH:mm:ss.SSSSSS')) as l, n, b, s)": lambda r: (
            r["at"],
            r["n"],
            r["b"],
            r["s"].encode(),
        ),
        "struct(n, at, b, s)": lambda r: (r["n"], r["at"], r["b"], r["s"].encode()),
    }
    for number, (how, order) in enumerate(by.items()):
        lhs.apply_changes(
            stream, f"p.by_several{number}", keys="k", sequence_by=how, checkpoint=str(tmp_path / str(number)),
            trigger="available now",
        ).awaitTermination()  # fmt: skip
        newest = {r["k"]: r for r in sorted(rows, key=order)}  # type: ignore[arg-type]
        found = con.table(f"p.by_several{number}").scan().to_arrow().sort_by("k").to_pylist()
        assert found == [newest[k] for k in range(7)]
    con.table("p.several").append([{"k": 9, "b": True, "n": None, "at": times[0], "s": "a"}])
    query = lhs.apply_changes(
        stream, "p.by_several0", keys="k", sequence_by="struct(b, n, at, s)", checkpoint=str(tmp_path / "0"),
        trigger="available now",
    )  # fmt: skip
    with pytest.raises(Exception, match=r"have no sequence \(sequence_by is null, or has a field that is\)"):
        query.awaitTermination()


def test_changes_that_cannot_be_applied(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    con.create_table("p.feed", pa.schema([("k", pa.int64()), ("seq", pa.int64())])).append([{"k": 1, "seq": None}])
    stream = stream_of(con, spark, "p.feed")
    with pytest.raises(lh.ColumnNotFoundError):
        lhs.apply_changes(stream, "p.fed", keys=["q"], sequence_by="seq")
    with pytest.raises(lh.InvalidRequestError, match="must be 1 or 2"):
        lhs.apply_changes(stream, "p.fed", keys="k", sequence_by="seq", stored_as_scd_type=3)  # type: ignore[arg-type]
    for how, scd_type in (("struct(seq, k)", 2), ("struct(seq, seq / 2)", 1), ("struct('a', seq)", 1)):
        with pytest.raises(lh.InvalidRequestError, match=r"sequence_by is of type struct.*format_string"):
            lhs.apply_changes(
                stream,
                "p.fed",
                keys="k",
                sequence_by=how,
                stored_as_scd_type=scd_type,  # type: ignore[arg-type]
            )
    with pytest.raises(lh.InvalidRequestError, match="one of them"):
        lhs.apply_changes(stream, "p.fed", keys="k", sequence_by="seq", column_list="k", except_column_list=["seq"])
    with pytest.raises(lh.InvalidRequestError, match="must name columns"):
        lhs.apply_changes(stream, "p.fed", keys="k", sequence_by="seq", column_list=["seq"])
    with pytest.raises(lh.WrongTableKindError):
        lhs.apply_changes(stream, "p.feed", keys="k", sequence_by="seq")
    con.create_table("p.other", pa.schema([("k", pa.int64()), ("seq", pa.int64())]), primary_key=["seq"])
    with pytest.raises(lh.SchemaMismatchError, match="needs"):
        lhs.apply_changes(stream, "p.other", keys="k", sequence_by="seq")
    with pytest.raises(Exception, match="have no sequence"):
        lhs.apply_changes(
            stream, "p.fed", keys="k", sequence_by="seq", checkpoint=str(tmp_path), trigger="available now"
        ).awaitTermination()
    assert rows_of(con, "p.fed") == []


def test_changes_that_are_refused_make_no_table(con: lh.Connection, spark: SparkSession) -> None:
    con.create_table("p.refusing", EVENTS)
    stream = stream_of(con, spark, "p.refusing")
    tables, refused = con.tables(), lh.InvalidRequestError

    def refuse(why: str, changes: DataFrame = stream, **how: Any) -> None:
        for scd_type in ("1", "2"):
            given = {"keys": "id", "sequence_by": "amount", **how}
            with pytest.raises(refused, match=why):
                lhs.apply_changes(changes, "p.refused", stored_as_scd_type=scd_type, **given)  # type: ignore[arg-type]

    refuse(r"column_list has columns \['shop'\] twice", column_list=["id", "shop", "shop"])
    refuse(r"keys has columns \['id'\] twice", keys=["id", "id"])
    refuse(r"the changes have columns \['shop'\] twice", stream.selectExpr("*", "shop"))
    for name in ("__lakehead_sequence", "__lakehead_deleted", "__x"):
        refuse(f"{name}.*except_column_list", stream.withColumn(name, stream["shop"]))
    for expression in ("shop", "upper(shop)", F.col("shop"), F.lit("d")):
        refuse("apply_as_deletes is text, and not a condition", apply_as_deletes=expression)
    for expression in ("array(amount)", "amount >", "max(", "*"):
        refuse("apply_as_deletes is", apply_as_deletes=expression)
    for what in ("apply_as_deletes", "sequence_by", "keys", "column_list", "except_column_list"):
        with pytest.raises(lh.ColumnNotFoundError, match="amnt"):
            given: dict[str, Any] = {"keys": "id", "sequence_by": "amount", what: F.col("amnt") + 1}
            lhs.apply_changes(stream, "p.refused", **given)
    for expression in ("null", "make_dt_interval(0)", "make_ym_interval(amount)", "array(amount)"):
        refuse("sequence_by is of type", sequence_by=expression)
    for expression in (
        "max(amount)",
        "max(amount) > 1",
        "row_number() over (order by amount)",
        "explode(array(amount))",
    ):
        refuse("apply_as_deletes is no expression", apply_as_deletes=expression)
        refuse("sequence_by is no expression", sequence_by=expression)
    for expression in ("struct(amount, amount)", "struct(amount, id as AMOUNT)"):
        refuse("sequence_by ", sequence_by=expression)
    refuse("must be an expression", sequence_by=5)
    refuse("must be an expression", apply_as_deletes=True)
    refuse("must name columns", keys=None)
    refuse("must name columns", column_list=[5])
    refuse("must be text", name=5)
    for unsupported in (stream.groupBy("id").agg(F.max("amount").alias("amount")), stream.orderBy("id")):
        with pytest.raises(AnalysisException):
            lhs.apply_changes(unsupported, "p.refused", keys="id", sequence_by="amount")
    with pytest.raises(AnalysisException):
        lhs.apply_changes(stream, "p.refused", keys="id", sequence_by="monotonically_increasing_id()")
    refuse("a key cannot be called 'sequence'", stream.withColumnRenamed("id", "sequence"), keys="sequence")
    refuse("readStream", spark.createDataFrame([(1, "a", 2)], "id bigint, shop string, amount bigint"))
    assert con.tables() == tables


def test_names_in_changes_are_sparks_without_regard_to_case(
    con: lh.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    con.create_table("p.cased", pa.schema([*EVENTS, ("op", pa.string())])).append(
        [{"id": n, "shop": "ab"[n % 2], "amount": n, "op": "d" if n == 3 else "u"} for n in range(4)]
    )
    con.create_table("p.cased1", pa.schema([("Shop", pa.string()), ("Id", pa.int64())]), primary_key="Shop")
    stream = stream_of(con, spark, "p.cased")
    ways: list[dict[str, Any]] = [
        {"keys": ["SHOP"], "column_list": ["ID", "shop"]},
        {"keys": F.col("sHOP"), "except_column_list": ["OP", "Amount"]},
    ]
    for number, way in enumerate(ways):  # into a table that is made, and one that has names of its own
        lhs.apply_changes(
            stream, f"p.cased{number}", sequence_by="AMOUNT", apply_as_deletes="OP = 'd'", **way,
            checkpoint=str(tmp_path / str(number)), trigger="available now",
        ).awaitTermination()  # fmt: skip
    assert (con.table("p.cased0").schema.names, rows_of(con, "p.cased0")) == (["id", "shop"], [(2, "a")])
    assert (con.table("p.cased1").schema.names, rows_of(con, "p.cased1")) == (["Shop", "Id"], [("a", 2)])
    with pytest.raises(lh.InvalidRequestError, match="twice"):
        lhs.apply_changes(stream, "p.refused", keys=["shop", "SHOP"], sequence_by="amount")
    try:
        spark.conf.set("spark.sql.caseSensitive", "true")
        with pytest.raises(lh.ColumnNotFoundError, match="no column 'SHOP'"):
            lhs.apply_changes(stream, "p.refused", keys=["SHOP"], sequence_by="amount")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_reserved_column_that_is_left_out_may_order_changes(
    con: lh.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    con.create_table("p.ordering", EVENTS).append(events(range(4)))
    stream = stream_of(con, spark, "p.ordering").selectExpr("shop", "id", "amount as __lakehead_sequence")
    lhs.apply_changes(
        stream, "p.ordered", keys="shop", sequence_by="__lakehead_sequence", checkpoint=str(tmp_path),
        except_column_list="__lakehead_sequence", trigger="available now",
    ).awaitTermination()  # fmt: skip
    assert rows_of(con, "p.ordered") == [("a", 2), ("b", 3)]


def test_the_changelog_of_another_table(con: lh.Connection, spark: SparkSession, tmp_path: Path) -> None:
    origin = con.create_table("p.origin", EVENTS, primary_key="id", buckets=2)
    origin.upsert(events(range(20)))
    origin.upsert(events(range(5, 9)).drop(["amount"]).append_column("amount", pa.array([-1] * 4)))
    origin.delete([3, 4, 5])
    changes = stream_of(con, spark, "p.origin", changelog="true").where("__change_type <> '-U'")
    lhs.apply_changes(
        changes, "p.mirror", keys="id", sequence_by="__offset", apply_as_deletes="__change_type = '-D'",
        column_list=["id", "shop", "amount"], checkpoint=str(tmp_path), trigger="available now",
    ).awaitTermination()  # fmt: skip
    assert rows_of(con, "p.mirror") == rows_of(con, "p.origin")
