"""PySpark reads what `Table.scan` reads: union, lake and hot, log and keyed, every type, deleted and foreign rows."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Transaction
from pyiceberg.types import DecimalType, DoubleType, LongType

import lakehead as lh
import lakehead.spark as lhs
from lakehead.iceberg.data_files import LakeWriteSpec, write_data_files, write_position_deletes
from lakehead.iceberg.rowdelta import RowDelta, to_data_file
from lakehead.spark import checks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64()), ("kind", pa.string()), ("qty", pa.int32()), ("price", pa.float64())])
KEYED = pa.schema([("day", pa.date32()), ("id", pa.int64()), ("status", pa.string()), ("amount", pa.decimal128(12, 2))])


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    # A folder name that globbing or URL decoding would take for something else.
    with lh.connect(tmp_path_factory.mktemp("data") / "odd é [x] {y} +") as con:
        yield con


def events(start: int, end: int) -> pa.Table:
    i = np.arange(start, end)
    kinds = np.array(["view", "cart", "buy"])[i % 3]
    return pa.table([pa.array(i), pa.array(kinds), pa.array((i % 7).astype("i4")), pa.array(i / 8)], schema=SCHEMA)


def orders(ids: range, version: int) -> pa.Table:
    rows = [
        {
            "day": dt.date(2026, 1, 1 + i % 3),
            "id": i,
            "status": None if i % 11 == 0 else f"v{version}",
            "amount": Decimal(i + version) / 4,
        }
        for i in ids
    ]
    return pa.Table.from_pylist(rows, KEYED)


def same(frame: DataFrame, want: pa.Table, *keys: str) -> None:
    assert frame.columns == want.column_names
    got = frame.toArrow().cast(pa.schema([f.with_nullable(True) for f in want.schema]))
    order = [(k, "ascending") for k in keys]
    assert got.sort_by(order).to_pylist() == want.sort_by(order).to_pylist()


@pytest.fixture(scope="module")
def log(con: lh.Connection) -> lh.Table:
    t = con.create_table("shop.events", SCHEMA, buckets=2, lake="iceberg")
    t.append(events(0, 6000))
    con.tier("shop.events")
    t.append(events(6000, 10_000))
    return t


@pytest.fixture(scope="module")
def keyed(con: lh.Connection) -> lh.Table:
    t = con.create_table(
        "shop.orders", KEYED, primary_key=["day", "id"], partition_by=["day"], buckets=2, lake="iceberg"
    )
    t.upsert(orders(range(3000), 0))
    con.tier("shop.orders")
    t.upsert(orders(range(1000, 1500), 1))
    t.delete(orders(range(100), 0))
    con.tier("shop.orders")
    t.upsert(orders(range(1200, 3300), 2))
    t.delete(orders(range(80, 200), 0))
    return t


def test_log_table(spark: SparkSession, log: lh.Table) -> None:
    same(lhs.table(spark, "shop.events"), log.scan().to_arrow(), "id")
    same(lhs.table(spark, "shop.events", tier="lake"), log.scan(tier="lake").to_arrow(), "id")
    same(lhs.table(spark, "shop.events", tier="hot"), log.scan(tier="hot").to_arrow(), "id")


def test_keyed_table(spark: SparkSession, keyed: lh.Table) -> None:
    assert lhs.table(spark, "shop.orders", tier="lake").count() == keyed.scan(tier="lake").count() == 2900
    same(lhs.table(spark, "shop.orders"), keyed.scan().to_arrow(), "id")
    same(lhs.table(spark, "shop.orders", columns=["amount", "id"]), keyed.scan(["amount", "id"]).to_arrow(), "id")
    got = lhs.table(spark, "shop.orders", columns=["id"], system_columns=True)
    same(got, keyed.scan(["id"], system_columns=True).to_arrow(), "id")


def test_a_session_that_nobody_prepared_knows_the_format(
    spark: SparkSession, con: lh.Connection, keyed: lh.Table
) -> None:
    plain = spark.newSession()
    options = {"uri": con.uri, "table": keyed.name}
    assert plain.read.format("lakehead").options(**options).load().count() == keyed.scan().count()
    pairs = ", ".join(f"{name} '{value}'" for name, value in options.items())
    plain.sql(f"create temporary view prepared_by_nobody using lakehead options ({pairs})")
    (found,) = plain.sql("select count(*) n from prepared_by_nobody where status is not null").collect()
    assert found.n == keyed.scan(where="status is not null").count()


def test_a_session_means_the_connection_that_it_was_given(
    spark: SparkSession, con: lh.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another of its application was given another one since, or was refused one."""
    con.create_table("mine.t", [("here", "int64")])
    other, third = spark.newSession(), spark.newSession()
    with lh.connect(tmp_path / "other") as elsewhere:
        elsewhere.create_table("mine.t", [("there", "int64")])
        lhs.attach(other, elsewhere)
        copy = type(other)(spark.sparkContext, other._jsparkSession.cloneSession())  # as a stream works with
        columns = [lhs.table(s, "mine.t").columns for s in (spark, other, copy, third)]
        assert columns == [["here"], ["there"], ["there"], ["there"]]

        def refused(*_: object) -> None:
            raise lh.MissingDependencyError("nothing is installed there")

        with monkeypatch.context() as patch:
            patch.setattr(checks, "require_planner", refused)
            for session, asked in ((spark, elsewhere), (third, con)):
                with pytest.raises(lh.MissingDependencyError):
                    lhs.attach(session, asked)
        columns = [lhs.sql(s, "select * from mine.t").columns for s in (spark, other, copy, third)]
        assert columns == [["here"], ["there"], ["there"], ["there"]]
    lhs.attach(spark, con)
    with pytest.raises(lh.InvalidRequestError, match="no Spark session"):
        lhs.table(con, "mine.t")  # type: ignore[arg-type]
    with pytest.raises(lh.InvalidRequestError, match="no Spark session"):
        lhs.attach(None, con)  # type: ignore[arg-type]


def test_time_travel(spark: SparkSession, keyed: lh.Table) -> None:
    first = keyed.lake.snapshots()["snapshot_id"][0].as_py()
    same(lhs.table(spark, "shop.orders", snapshot=first), orders(range(3000), 0), "id")


def test_before_anything_is_tiered(spark: SparkSession, con: lh.Connection) -> None:
    con.create_table("shop.none", SCHEMA, lake="iceberg")
    assert lhs.table(spark, "shop.none").count() == 0
    t = con.create_table("shop.nolake", KEYED, primary_key=["day", "id"])
    t.upsert(orders(range(100), 0))
    t.upsert(orders(range(50), 1))
    same(lhs.table(spark, "shop.nolake"), t.scan().to_arrow(), "id")
    with pytest.raises(lh.NoLakeError):
        lhs.table(spark, "shop.nolake$lake")


def test_the_lake_part_stays_native(
    spark: SparkSession, log: lh.Table, keyed: lh.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)

    def plan(frame: DataFrame) -> str:
        return str(frame._jdf.queryExecution().executedPlan().toString())

    text = plan(lhs.table(spark, "shop.events").where("qty > 3").select("id"))
    assert "GreaterThan(qty,3)" in text and "Batched: true" in text and "Join" not in text
    text = plan(lhs.table(spark, "shop.orders").where("status = 'v0'").select("id"))
    assert "EqualTo(status,v0)" in text and text.count("LeftAnti") == 1 and "amount" not in text


def test_every_type(spark: SparkSession, con: lh.Connection) -> None:
    at = dt.datetime(2026, 5, 4, 3, 2, 1, 123456)
    values = {
        "id": (pa.int64(), 1),
        "flag": (pa.bool_(), True),
        "i8": (pa.int8(), -128),
        "i16": (pa.int16(), 32767),
        "f32": (pa.float32(), 1.5),
        "dec": (pa.decimal128(20, 3), Decimal("12345678901234567.125")),
        "day": (pa.date32(), at.date()),
        "clock": (pa.time64("us"), at.time()),
        "seconds": (pa.time32("s"), dt.time(1, 2, 3)),
        "at": (pa.timestamp("us"), at),
        "milli": (pa.timestamp("ms"), at.replace(microsecond=5000)),
        "zoned": (pa.timestamp("us", "UTC"), at.replace(tzinfo=dt.UTC)),
        "large": (pa.large_string(), "søk"),
        "bin": (pa.binary(), b"\x00\xff"),
        "fixed": (pa.binary(3), b"abc"),
        "tags": (pa.list_(pa.string()), ["a", None]),
        "bytes": (pa.list_(pa.int8()), [1, -1]),
        "map": (pa.map_(pa.string(), pa.int16()), [("k", 7)]),
        "nest": (pa.struct([("x", pa.int16()), ("y", pa.list_(pa.float64()))]), {"x": 5, "y": [0.5]}),
    }
    schema = pa.schema([(n, t) for n, (t, _) in values.items()])
    row = {n: v for n, (_, v) in values.items()}
    t = con.create_table("types.every", schema, lake="iceberg")
    t.append([row, {**dict.fromkeys(row), "id": 2}])
    con.tier("types.every")
    t.append([{**row, "id": 3}, {**dict.fromkeys(row), "id": 4}])
    same(lhs.table(spark, "types.every"), t.scan().to_arrow(), "id")
    source = spark.read.format("lakehead").option("uri", con.uri).option("table", "types.every").load()
    same(source, t.scan().to_arrow(), "id")
    for where in ("i8 < 0", "day = date'2026-05-04'", "zoned > timestamp'2026-05-04 00:00:00Z'", "dec > 1"):
        assert [r.id for r in lhs.table(spark, "types.every").where(where).orderBy("id").collect()] == [1, 3], where
        assert source.where(where).count() == 2, where


def test_sql(spark: SparkSession, con: lh.Connection, log: lh.Table, keyed: lh.Table) -> None:
    def one(query: str) -> object:
        return lhs.sql(spark, query).collect()[0][0]

    assert one("select count(*) from shop.events") == 10_000
    assert one("select count(*) from shop.events$lake") == 6000
    assert one("select count(*) from shop.orders$lake$snapshots") == 2
    assert one("select sum(rows) from shop.events$lake$files") == 6000
    kinds = lhs.sql(spark, "select __change_type k, count(*) n from shop.orders$changelog group by 1").collect()
    stream = [b.rows for b in keyed.subscribe(start="earliest", stop="now")]
    assert {r.k: r.n for r in kinds}["-U"] == sum(b["__change_type"].to_pylist().count("-U") for b in stream)
    asked = "select count(*) from shop.events where kind = :kind and id < :below"
    assert lhs.sql(spark, asked, args={"kind": "buy", "below": 30}).first()[0] == 10
    assert lhs.sql(spark, asked.replace(":kind", "?").replace(":below", "?"), args=("buy", 30)).first()[0] == 10
    joined = "select count(*) from shop.events e join shop.orders on orders.id = e.id where e.kind = 'buy'"
    assert one(joined) == con.sql(joined).fetchone()[0]
    assert one("with events as (select 1 as x) select max(x) from events") == 1
    assert not [v.name for v in spark.catalog.listTables() if v.name.startswith("lakehead_")]
    with pytest.raises(lh.SqlError, match="no such suffix"):
        lhs.sql(spark, "select * from shop.events$lakes")
    with pytest.raises(lh.SqlError):
        lhs.sql(spark, "select nope from shop.events")
    with pytest.raises(lh.TableNotFoundError):
        lhs.sql(spark, "select * from shop.missing$lake")


def test_source(spark: SparkSession, con: lh.Connection, log: lh.Table, keyed: lh.Table) -> None:
    def read(table: str, **options: str) -> DataFrame:
        return spark.read.format("lakehead").options(uri=con.uri, table=table, **options).load()

    same(read("shop.events"), log.scan().to_arrow(), "id")
    same(read("shop.orders"), keyed.scan().to_arrow(), "id")
    same(read("shop.orders", columns="amount,id"), keyed.scan(["amount", "id"]).to_arrow(), "id")
    assert read("shop.events", tier="lake").count() == 6000
    assert read("shop.events", tier="hot").count() == 4000
    assert read("shop.events").where("kind = 'buy' and price >= 100").count() == (
        log.scan(where="kind = 'buy' and price >= 100").count()
    )
    assert read("shop.orders").where("status like 'v2%' and amount < 500").count() == (
        keyed.scan(where="status = 'v2' and amount < 500").count()
    )
    with pytest.raises(Exception, match="there is no table"):
        read("shop.missing")


@pytest.mark.parametrize("where", ["id % 7 = 3 and price < 900", "id = 5", "id in (2, 7000, 99999)", "kind = 'nope'"])
def test_rows_that_the_source_is_asked_for(spark: SparkSession, con: lh.Connection, log: lh.Table, where: str) -> None:
    """They are those of a scan, and of all statements over the frame, whatever those filter by themselves."""
    source = spark.read.format("lakehead").options(uri=con.uri, table="shop.events", where=where)
    for tier in ("union", "hot", "lake"):
        same(source.option("tier", tier).load(), log.scan(where=where, tier=tier).to_arrow(), "id")  # type: ignore[arg-type]
    frame = source.option("tier", "union").load()
    assert frame.where("kind = 'buy'").count() == log.scan(where=f"{where} and kind = 'buy'").count()
    assert frame.select("qty").count() == frame.count() == log.scan(where=where).count()
    changes = spark.read.format("lakehead").options(uri=con.uri, table="shop.events$changelog", where=where).load()
    assert changes.count() == log.scan(where=where).count()


def test_keys_that_the_source_is_asked_for(spark: SparkSession, con: lh.Connection, keyed: lh.Table) -> None:
    """The index answers for a whole key: of rows that lake and log both have, and none of the lake's files is read."""

    def read(where: str, table: str = "shop.orders", **options: str) -> DataFrame:
        return spark.read.format("lakehead").options(uri=con.uri, table=table, where=where, **options).load()

    for where in (
        "id = 5 and day = '2026-01-03'",
        "id in (1, 2, 2999, 99999) and day in ('2026-01-02', '2026-01-03')",
        "id = 5 and day = '2026-01-03' and status is null",
        "id = 5",
        "day = '2026-01-02' and amount > 100",
    ):
        same(read(where), keyed.scan(where=where).to_arrow(), "id")
        same(read(where, columns="amount, id"), keyed.scan(["amount", "id"], where=where).to_arrow(), "id")
        same(read(where, "shop.orders$lake"), keyed.scan(where=where, tier="lake").to_arrow(), "id")
    point = read("id = 5 and day = '2026-01-03'")
    assert [f.name for f in point.schema] == KEYED.names and point.rdd.getNumPartitions() == 1
    assert read("day = '2026-01-03'").rdd.getNumPartitions() > 1
    for bad, words in (("nope = 1", "names 'nope'"), ("id +", "where|parse|filter"), ("id", "condition|bool")):
        with pytest.raises(Exception, match=words):
            read(bad)
    with pytest.raises(Exception, match="option where is for the rows of tables"):
        read("rows > 1", "shop.orders$lake$files")


def test_what_else_the_source_reads(spark: SparkSession, con: lh.Connection, log: lh.Table, keyed: lh.Table) -> None:
    def read(table: str, **options: object) -> DataFrame:
        return spark.read.format("lakehead").options(uri=con.uri, table=table, **options).load()

    same(read("shop.orders$lake"), keyed.scan(tier="lake").to_arrow(), "id")
    ids, times = (keyed.lake.snapshots()[c].to_pylist() for c in ("snapshot_id", "committed_at"))
    first = keyed.scan(snapshot=ids[0]).to_arrow()
    same(read("shop.orders", timestamp=times[0].isoformat()), first, "id")
    same(read("shop.orders", timestamp=int(times[1].timestamp() * 1000) + 1), keyed.scan(tier="lake").to_arrow(), "id")
    same(lhs.table(spark, "shop.orders", snapshot=times[0]), first, "id")
    then = lhs.sql(
        spark,
        f"select o.*, now.id is null gone from shop.orders version as of {ids[0]} o"
        f" left join shop.orders timestamp as of '{times[1].isoformat()}' now on now.id = o.id",
    )
    assert (then.count(), then.where("gone").count()) == (3000, 100)
    told = {"then": ids[0], "at": times[1], "least": 2990}
    counted = "select count(*) n from shop.orders version as of :then where id >= :least union all"
    counted += " select count(*) from shop.orders timestamp as of :at where id >= :least"
    before, after = (row.n for row in lhs.sql(spark, counted, told).collect())
    assert (before, after) == tuple(
        lhs.table(spark, "shop.orders", snapshot=at).where("id >= 2990").count() for at in (ids[0], times[1])
    )
    expressions = (
        f"timestamp '{times[0].isoformat()}' + interval 1 microsecond",
        "to_timestamp(:at) - interval 0 seconds",
        f"timestamp_micros({int(times[0].timestamp() * 1e6)}) as o where o.id >= 0",
    )
    for expression in expressions:
        found = lhs.sql(spark, f"select * from shop.orders timestamp as of {expression}", {"at": times[0]})
        same(found, first, "id")
    found = lhs.sql(spark, "select count(*) n from shop.orders timestamp as of now() + interval 1 second")
    assert found.first().n == keyed.scan(tier="lake").count()
    for wrong in ("now() - interval 1", "cast(null as timestamp)", "nothing(1)", "interval 1 day"):
        with pytest.raises(lh.SqlError, match="timestamp as of"):
            lhs.sql(spark, f"select * from shop.orders timestamp as of {wrong}")
    with pytest.raises(lh.SnapshotNotFoundError):
        lhs.sql(spark, "select * from shop.orders version as of 5")
    same(read("shop.events$lake$files", columns="path,rows"), log.lake.files().select(["path", "rows"]), "path")
    assert read("shop.orders$lake$snapshots").count() == 2
    changes = [r for b in keyed.subscribe(start="earliest", stop="now") for r in b.rows.to_pylist()]
    got = read("shop.orders$changelog").toArrow()
    assert got.schema.names == [*KEYED.names, "__change_type", "__bucket", "__offset", "__timestamp"]
    assert sorted(map(str, got.to_pylist())) == sorted(map(str, changes))
    with pytest.raises(Exception, match=r"start is for spark\.readStream"):
        read("shop.orders", start="full").count()
    with pytest.raises(Exception, match="has no snapshot of 1970"):
        read("shop.orders", timestamp=1).count()


def test_rows_moved_and_updated_by_others(
    spark: SparkSession, con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine moves rows to another file, and updates as Spark does: the new row keeps the old one's offset."""
    t = con.create_table("foreign.log", SCHEMA, lake="iceberg")
    t.append(events(0, 1000))
    con.tier("foreign.log")
    t.append(events(1000, 2000))
    con.tier("foreign.log")
    t.append(events(2000, 2500))
    table = t.lake.iceberg()
    spec = LakeWriteSpec.of(table, target_file_bytes=1 << 27)
    first, second = sorted(
        (task.file for task in table.scan().plan_files()),
        key=lambda f: t.lake.files()["path"].to_pylist().index(f.file_path),
    )

    def commit(data: pa.Table | None, deletes: dict[object, list[int]]) -> None:
        tx = Transaction(t.lake.iceberg())
        delta = RowDelta(tx, {})
        for file, positions in deletes.items():
            partition = tuple(file.partition[i] for i in range(len(file.partition)))  # type: ignore[attr-defined]
            written = write_position_deletes(
                spec,
                {file.file_path: np.array(positions)},
                spec_id=file.spec_id,
                partition=partition,  # type: ignore[attr-defined]
            )
            delta.add_deletes(to_data_file(written))
        for file_written in write_data_files(spec, data.to_batches(), (0,)) if data is not None else ():
            delta.append_data_file(to_data_file(file_written))
        delta.commit()
        tx.commit_transaction()

    commit(None, {first: [0, 1, 999]})
    with pytest.raises(lh.LakeStateError, match="roll it back"):
        lhs.table(spark, "foreign.log")
    marked = t.lake.snapshots()["snapshot_id"].to_pylist()[1]
    t.lake.iceberg().manage_snapshots().set_current_snapshot(marked).commit()
    moved = pq.read_table(first.file_path.removeprefix("file://"), partitioning=None).take([0, 1, 999])
    commit(moved, {first: [0, 1, 999]})
    same(lhs.table(spark, "foreign.log"), events(0, 2500), "id")
    with monkeypatch.context() as moving:
        moving.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)
        joined = lhs.table(spark, "foreign.log")
    assert "LeftAnti" in joined._jdf.queryExecution().executedPlan().toString()
    same(joined, events(0, 2500), "id")

    old = pq.read_table(second.file_path.removeprefix("file://"), partitioning=None).slice(10, 5)
    kept = old.set_column(old.schema.get_field_index("kind"), "kind", pa.array(["changed"] * 5))
    commit(kept, {second: list(range(10, 15))})
    changed = events(1010, 1015).set_column(1, SCHEMA.field("kind"), pa.array(["changed"] * 5))
    want = pa.concat_tables([events(0, 1010), changed, events(1015, 2500)])
    same(lhs.table(spark, "foreign.log"), want, "id")
    same(spark.read.format("lakehead").options(uri=con.uri, table="foreign.log").load(), want, "id")


def test_columns_of_lake_files_are_found_by_id(spark: SparkSession, con: lh.Connection) -> None:
    """Names were swapped, also in a struct, files written, and names swapped back."""
    inner = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.string()), ("s", inner), ("l", pa.list_(inner))])

    def rows(start: int, end: int) -> pa.Table:
        listed = [
            {"a": i, "b": -i, "c": str(i), "s": {"x": i, "y": -i}, "l": [{"x": i, "y": -i}]} for i in range(start, end)
        ]
        return pa.Table.from_pylist(listed, schema)

    t = con.create_table("foreign.odd", schema, lake="iceberg")
    for start in (0, 100):
        t.append(rows(start, start + 100))
        con.tier("foreign.odd")
    t.append(rows(200, 300))
    turns = [("a", "t"), ("b", "a"), ("c", "b"), ("t", "c"), ("s.x", "t"), ("s.y", "x"), ("s.t", "y")]
    for old, new in turns:
        with t.lake.iceberg().update_schema() as update:
            update.rename_column(old, new)
    files = t.lake.iceberg().inspect.files()["file_path"].to_pylist()
    first, second = (Path(p.removeprefix("file://")) for p in files)
    held = pq.read_table(first, partitioning=None)
    pq.write_table(renamed(held, {"a": "c", "b": "a", "c": "b", "x": "y", "y": "x"}), first)
    with pytest.raises(lh.LakeStateError, match="rename it back"):
        lhs.table(spark, "foreign.odd")
    for old, new in [("s.y", "t"), ("s.x", "y"), ("s.t", "x"), ("c", "t"), ("b", "c"), ("a", "b"), ("t", "a")]:
        with t.lake.iceberg().update_schema() as update:
            update.rename_column(old, new)
    same(lhs.table(spark, "foreign.odd"), rows(0, 300), "a")
    assert t.scan().to_arrow().sort_by("a") == rows(0, 300)
    for where, found in [
        ("a > 90", 209),
        ("b < -90", 209),
        ("c = '7'", 1),
        ("s.x between 5 and 8", 4),
        ("s.y = -9", 1),
    ]:
        assert lhs.table(spark, "foreign.odd").where(where).count() == found
    second.unlink()
    with pytest.raises(lh.LakeFileMissingError) as e:
        lhs.table(spark, "foreign.odd")
    assert Path(str(e.value.context["path"])).name == second.name


@pytest.mark.parametrize("keyed", [False, True])
def test_types_that_another_engine_widened(spark: SparkSession, con: lh.Connection, keyed: bool) -> None:
    """Files of before and after, and rows of the log, are read as the types of the table; what does not fit is told."""
    inner = pa.struct([pa.field("a", pa.int32(), nullable=False), ("b", pa.float32())])
    plain = [("k", pa.int32()), ("f", pa.float32()), ("d", pa.decimal128(5, 2)), ("t", pa.int16())]
    schema = pa.schema([*plain, ("s", inner), ("l", pa.list_(pa.int32()))])

    def rows(numbers: range) -> pa.Table:
        listed = [
            {"k": i, "f": i / 2, "d": Decimal(i), "t": i, "s": {"a": i, "b": i / 4}, "l": [i, None]} for i in numbers
        ]
        return pa.Table.from_pylist(listed, schema)

    name = f"foreign.widened_{keyed}".lower()
    if keyed:
        table = con.create_table(name, schema, primary_key=["k"], lake="iceberg")
        put = table.upsert
    else:
        table = con.create_table(name, schema, lake="iceberg")
        put = table.append
    put(rows(range(10)))
    con.tier(name)
    with table.lake.iceberg().update_schema() as update:
        wide = {"k": LongType(), "f": DoubleType(), "d": DecimalType(9, 2), "t": LongType(), "l.element": LongType()}
        for column, to in {**wide, "s.a": LongType(), "s.b": DoubleType()}.items():
            update.update_column(column, to)
    put(rows(range(10, 20)))
    con.tier(name)
    for start in (20, 30):  # the second read finds what is kept of the first
        put(rows(range(start, start + 10)))
        want = rows(range(start + 10)).cast(table.schema)
        assert table.scan().to_arrow().sort_by("k") == want
        same(lhs.table(spark, name), want, "k")
        same(lhs.sql(spark, f"select * from {name}"), want, "k")
        met = "k >= 8 and f < 11.5 and d <> 9 and t < 22 and s.a > 8"
        assert lhs.table(spark, name).where(met).count() == table.scan(where=met).count() == 12
    if not keyed:
        wider = pa.schema([f.remove_metadata() for f in table.lake.iceberg().schema().as_arrow()])
        table.lake.iceberg().append(pa.Table.from_pylist([{"k": 1 << 40}], wider))
        for ansi in ("true", "false"):
            spark.conf.set("spark.sql.ansi.enabled", ansi)
            try:
                with pytest.raises(Exception, match="do not fit a column of type int"):
                    lhs.table(spark, name).collect()
            finally:
                spark.conf.unset("spark.sql.ansi.enabled")


def renamed(rows: pa.Table, names: dict[str, str]) -> pa.Table:
    """The same rows with other names, inside structs and lists too."""

    def field(f: pa.Field) -> pa.Field:
        return pa.field(names.get(f.name, f.name), inside(f.type), f.nullable, f.metadata)

    def inside(t: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(t):
            return pa.struct([field(t.field(i)) for i in range(t.num_fields)])
        return pa.list_(field(t.value_field)) if pa.types.is_list(t) else t

    schema = pa.schema([field(f) for f in rows.schema])

    def spelled(value: object, t: pa.DataType) -> object:
        if isinstance(value, dict):
            return {names.get(k, k): v for k, v in value.items()}
        return [spelled(v, t) for v in value] if isinstance(value, list) else value

    return pa.Table.from_arrays(
        [pa.array([spelled(v, f.type) for v in rows.column(i).to_pylist()], f.type) for i, f in enumerate(schema)],
        schema=schema,
    )


@pytest.mark.parametrize("few", ["HOT_ROWS_MAX", "HOT_BYTES_MAX", None])
def test_executors_that_share_no_files(
    spark: SparkSession, log: lh.Table, keyed: lh.Table, monkeypatch: pytest.MonkeyPatch, few: str | None
) -> None:
    """What a cluster's session does: few hot rows go with the plan, others through the data source at the same pin, and
    dead offsets without files. Of few rows Spark knows the size, and joins without a shuffle."""
    monkeypatch.setattr("lakehead.spark.scratch.is_local", lambda master: False)
    if few is not None:
        monkeypatch.setattr(f"lakehead.spark.union_frame.{few}", 0)
    before = set(Path(spark.sparkContext._temp_dir).iterdir())
    frames = [(lhs.table(spark, "shop.events"), log), (lhs.table(spark, "shop.orders"), keyed)]
    for frame, table in frames:
        same(frame, table.scan().to_arrow(), "id")
    system = lhs.table(spark, "shop.orders", columns=["id"], system_columns=True)
    same(system, keyed.scan(["id"], system_columns=True).to_arrow(), "id")
    assert lhs.sql(spark, "select * from shop.events$lake$snapshots").count() == 1
    assert not [p for p in set(Path(spark.sparkContext._temp_dir).iterdir()) - before if p.suffix == ".parquet"]
    many = spark.range(5_000_000).toDF("id")
    for frame, _ in frames:
        plan = many.join(frame, "id")._jdf.queryExecution().executedPlan().toString()
        assert ("BroadcastHashJoin [id" in plan) == (few is None), plan


def test_nothing_is_left_behind(spark: SparkSession, log: lh.Table) -> None:
    folder = Path(spark.sparkContext._temp_dir)
    lhs.table(spark, "shop.events").count()
    assert list(folder.glob("*.parquet")), "scratch files lie in the folder that Spark removes"


def test_wrong_names(spark: SparkSession, con: lh.Connection, log: lh.Table) -> None:
    assert lhs.attach(spark, con) is spark
    assert lhs.session(con).sparkContext is spark.sparkContext
    with pytest.raises(lh.TableNotFoundError):
        lhs.table(spark, "shop.nope")
    with pytest.raises(lh.ColumnNotFoundError):
        lhs.table(spark, "shop.events", columns=["nope"])
    mistyped = spark.read.schema("evnt_id long").format("lakehead").options(uri=con.uri, table="shop.events")
    with pytest.raises(Exception, match="no column 'evnt_id'") as failed:
        mistyped.load().collect()
    assert isinstance(lhs.raised(failed.value), lh.ColumnNotFoundError)


def test_workers_have_spark_as_it_is_installed(spark: SparkSession) -> None:
    """Compiled, and not as the archive that Spark puts first."""

    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark.sql.streaming

        for _ in batches:
            yield pa.record_batch([[pyspark.__file__, pyspark.sql.streaming.__file__]], ["path"])

    import pyspark

    found = {r.path for r in spark.range(1).mapInArrow(where, "path string").collect()}
    home = os.path.dirname(pyspark.__file__)
    assert found == {f"{home}/__init__.py", f"{home}/sql/streaming/__init__.py"}


@pytest.mark.parametrize("suffix", ["$changelog", "$lake$files", "$lake$snapshots"])
def test_columns_of_what_stands_beside_a_table(spark: SparkSession, con: lh.Connection, name: str, suffix: str) -> None:
    table = con.create_table(name, pa.schema([("id", pa.int64()), ("f.x", pa.int64())]), lake="iceberg")
    table.append([{"id": 1, "f.x": 2}])
    con.tier(name)
    names = lhs.table(spark, name + suffix).columns
    last = names[1]
    assert lhs.table(spark, name + suffix, columns=[last, names[0]]).columns == [last, names[0]]
    assert lhs.table(spark, name + suffix, columns=last).columns == [last]
    with pytest.raises(lh.ColumnNotFoundError, match="nowhere"):
        lhs.table(spark, name + suffix, columns=["nowhere"])
    with pytest.raises(lh.InvalidRequestError, match="twice"):
        lhs.table(spark, name + suffix, columns=[last, last])
