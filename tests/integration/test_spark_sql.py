"""What `lhs.sql` does beside a plain select: one moment, names that last, and what it leaves to others."""

from __future__ import annotations

import datetime as dt
import logging
import posixpath
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.clientserver import JavaClient
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from tests.integration.conftest import embedded_only
from tests.waiting import WAIT_SECONDS

import lakehead as lh
import lakehead.spark as lhs
from lakehead.client.table import TableHandle
from lakehead.errors import SqlError
from lakehead.lake.keyed_read import KeyedRead
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark import dead_rows, kept_frame, union_frame

pytestmark = [pytest.mark.spark, embedded_only]

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


def rows(*ids: int) -> list[dict[str, object]]:
    return [{"id": n, "v": f"v{n}"} for n in ids]


@pytest.fixture
def clicks(con: lh.Connection) -> Iterator[lh.Table]:
    table = con.create_table("q.clicks", SCHEMA, lake="iceberg")
    table.append(rows(1, 2))
    con.tier("q.clicks")
    table.append(rows(3))
    yield table
    con.drop_table("q.clicks", purge=True)


def test_all_names_of_a_statement_are_of_one_moment(spark: SparkSession, con: lh.Connection, clicks: lh.Table) -> None:
    other, stop = con.create_table("q.keyed", SCHEMA, primary_key="id"), threading.Event()

    def write() -> None:
        n = 100
        while not stop.is_set():
            n += 1
            clicks.append(rows(n))
            other.upsert(rows(n))
            if n % 20 == 0:
                con.tier("q.clicks")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            found = lhs.sql(
                spark,
                "select (select count(*) from q.clicks) as now, (select count(*) from q.clicks$changelog) as changes,"
                " (select count(*) from q.clicks$lake) as lake,"
                " (select sum(rows) from q.clicks$lake$files) as files,"
                " (select count(*) from q.keyed) as keyed",
            ).first()
            assert found is not None
            assert found["now"] == found["changes"] and found["lake"] == found["files"]
            assert found["now"] - 3 - found["keyed"] in (
                0,
                1,
            )  # the last one may be in the first alone
    finally:
        stop.set()
        writer.join(WAIT_SECONDS)
    con.drop_table("q.keyed")


def test_times_are_what_spark_takes_them_for(spark: SparkSession, clicks: lh.Table) -> None:
    """Texts in the session's zone, and parameters without a zone in the process's, as elsewhere in a statement."""
    (at,) = clicks.lake.snapshots()["committed_at"].to_pylist()
    clicks.lake.tier()

    def read(said: str, given: object = None) -> list[int]:
        found = lhs.sql(spark, f"select id from q.clicks timestamp as of {said}", {"at": given})
        return sorted(row.id for row in found.collect())

    naive = at.astimezone().replace(tzinfo=None)
    assert read(":at", naive) == read(":at + interval 0 seconds", naive) == [1, 2]
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    try:
        spark.conf.set("spark.sql.session.timeZone", "+05:30")
        there = at.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=30))).replace(tzinfo=None)
        assert read(f"'{there}'") == read(f"timestamp '{there}'") == read(":at", str(there)) == [1, 2]
        assert read(f"'{at.replace(tzinfo=None)} UTC'") == [1, 2]
        with pytest.raises(SqlError, match="timestamp as of"):
            read(f"'{there.date()}+09:00'")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_an_error_is_told_once(spark: SparkSession, clicks: lh.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the exception. Of errors of other statements PySpark writes as ever."""
    records: set[logging.LogRecord] = set()  # of all loggers, by one handler or several
    monkeypatch.setattr(logging.StreamHandler, "emit", lambda self, record: records.add(record))

    def written() -> list[str]:
        return [record.getMessage() for record in records if "QueryContext" in record.name]

    at = "timestamp as of now() + interval 1 hour o"
    for wrong in ("nothing from q.clicks", "v from q.clicks where id = = 1", f"nothing from q.clicks {at}"):
        with pytest.raises(SqlError):
            lhs.sql(spark, f"select {wrong}")
    assert not written()
    with pytest.raises(AnalysisException):
        spark.sql("select nothing from range(3)")
    assert len(written()) == 1


def test_views_and_cached_queries_last(spark: SparkSession, clicks: lh.Table) -> None:
    lhs.sql(spark, "create temp view seen as select * from q.clicks where id < :most", {"most": 3})
    lhs.sql(spark, "create or replace temp view named (a, b) as select id, v from q.clicks")
    lhs.sql(spark, "create or replace global temp view all_sessions as select count(*) as n from q.clicks")
    lhs.sql(spark, "cache table kept as select id from q.clicks")
    clicks.append(rows(4))
    assert sorted(r.id for r in spark.sql("select id from seen").collect()) == [1, 2]
    assert spark.table("named").columns == ["a", "b"] and spark.table("named").count() == 3
    assert [r.n for r in spark.sql("select n from global_temp.all_sessions").collect()] == [3]
    assert spark.catalog.isCached("kept") and spark.table("kept").count() == 3
    assert lhs.sql(spark, "select count(*) as n from q.clicks").collect()[0].n == 4
    with pytest.raises(lh.SqlError, match="seen"):
        lhs.sql(spark, "create temp view seen as select * from q.clicks")
    with pytest.raises(lh.SqlError, match="2 columns"):
        lhs.sql(spark, "create temp view two (a, b) as select id from q.clicks")
    spark.catalog.uncacheTable("kept")
    for name in ("seen", "named", "kept"):
        spark.catalog.dropTempView(name)
    spark.catalog.dropGlobalTempView("all_sessions")


def test_what_changes_a_table_is_refused_and_changes_nothing(spark: SparkSession, clicks: lh.Table) -> None:
    for statement in ("insert into q.clicks select 9, 'x'", "drop table q.clicks", "delete from q.clicks where id = 1"):
        with pytest.raises(lh.SqlError, match=r"lhs.sql reads q\.clicks"):
            lhs.sql(spark, statement)
    with pytest.raises(lh.SqlError, match=r"lhs\.write"):
        lhs.sql(spark, "create table q.copied as select * from q.clicks")
    assert clicks.scan().count() == 3


def test_columns_by_the_whole_name_of_their_table(spark: SparkSession, con: lh.Connection, clicks: lh.Table) -> None:
    con.create_table("q.users", SCHEMA, primary_key="id").upsert(rows(2, 3))
    found = lhs.sql(
        spark,
        "select q.clicks.id, q.users.v as name from q.clicks join q.users on q.clicks.id = q.users.id"
        " where q.clicks.v <> 'q.clicks.v' order by q.clicks.id",
    )
    assert [tuple(row) for row in found.collect()] == [(2, "v2"), (3, "v3")]
    assert lhs.sql(spark, "select count(*) as n from q.clicks tablesample (100 percent)").collect()[0].n == 3
    sampled = "select count(clicks.id) as n from q.clicks tablesample (100 percent) repeatable (7) where clicks.id > 1"
    assert lhs.sql(spark, sampled).collect()[0].n == 2
    con.drop_table("q.users")


def test_names_are_found_whatever_their_case(spark: SparkSession, con: lh.Connection, clicks: lh.Table) -> None:
    for text in (
        "select Clicks.ID, q.clicks.v from Q.CLICKS where Q.Clicks.id = 2",
        "select * from Q.clicks$LAKE where ID = 2",
    ):
        assert lhs.sql(spark, text).collect() == [(2, "v2")]
    assert con.sql("select * from Q.CLICKS where ID = 2").fetchall() == [(2, "v2")]
    assert lhs.sql(spark, "select Clicks.* from identifier(:t) where id = 2", {"t": "Q.clicks"}).collect() == [
        (2, "v2")
    ]
    with pytest.raises(SqlError, match=r"lhs\.sql reads q\.clicks"):
        lhs.sql(spark, "insert into identifier('Q.Clicks') select 1, 'x'")
    assert lhs.sql(spark, "describe extended Q.Clicks").where("col_name = 'v'").count() == 1
    for text in ("show columns in q.clicks", "show columns from Q.Clicks"):
        assert [row[0] for row in lhs.sql(spark, text).collect()] == ["id", "v"]
    assert ("q", "clicks", False) in lhs.sql(spark, "show tables in Q").collect()
    assert lhs.sql(spark, "show tables in q like 'CLICK*|x'").collect() == [("q", "clicks", False)]
    assert lhs.sql(spark, "show tables in default").columns == ["namespace", "tableName", "isTemporary"]
    with pytest.raises(SqlError, match=r"lhs\.sql reads q\.clicks"):
        lhs.sql(spark, "drop table Q.Clicks")


def test_tables_whose_names_a_statement_computes(spark: SparkSession, con: lh.Connection, clicks: lh.Table) -> None:
    args = {"d": "q", "t": "Clicks"}
    for text in (
        "select count(*) from identifier('q' || '.clicks')",
        "select count(*) from identifier(:d || '.' || lower(:t)) where id > 0",
        "select count(*) from identifier(concat_ws('.', :d, :t)) /* ( */",
        "select (select count(*) from q.clicks) where 1 in (select id from identifier(replace('q/clicks', '/', '.')))",
    ):
        assert lhs.sql(spark, text, args).first() == (3,), text
    with pytest.raises(SqlError, match=r"lhs\.sql reads q\.clicks, it does not insert into"):
        lhs.sql(spark, "insert into identifier('q' || '.clicks') select 1, 'x'")
    for text in (
        "execute immediate 'select * from q.clicks where id > ?' using 1",
        "execute immediate 'select * from Q.Clicks'",
        "show columns from clicks from q",
        "select * from identifier('nosuch' || '.t')",
        "select * from identifier(id)",
    ):
        ours = "nosuch" not in text and "(id)" not in text
        with pytest.raises(SqlError, match="is a table of Lakehead's.*identifier" if ours else "TABLE_OR_VIEW|IDENTI"):
            lhs.sql(spark, text)
    with pytest.raises(SqlError, match=r"in select \* .*identifier\(:name\)"):
        lhs.sql(spark, "select * from identifier(?)", ["q.clicks"])


def test_what_shows_databases_and_properties(spark: SparkSession, con: lh.Connection, clicks: lh.Table) -> None:
    shown = lhs.sql(spark, "show databases")
    assert shown.columns == ["namespace"] and {("q",), ("default",)} <= set(shown.collect())
    assert lhs.sql(spark, "show schemas like 'Q|nosuch' -- all").collect() == [("q",)]
    with pytest.raises(SqlError, match=r"q is a database of Lakehead's.*name q\.<table>"):
        lhs.sql(spark, "use q")
    for text in ("show create table q.clicks", "show tblproperties q.clicks", "show partitions Q.clicks"):
        with pytest.raises(SqlError, match=r"it does not show .*con\.table\('q\.clicks'\)\."):
            lhs.sql(spark, text)


def test_spark_looks_for_the_views_of_its_session_first(spark: SparkSession, con: lh.Connection) -> None:
    con.create_table("sales_of_ours", SCHEMA).append(rows(1))
    assert lhs.sql(spark, "select count(*) as n from sales_of_ours").collect()[0].n == 1
    spark.range(7).createOrReplaceTempView("sales_of_ours")
    assert lhs.sql(spark, "select count(*) as n from sales_of_ours").collect()[0].n == 7
    assert lhs.sql(spark, "select count(*) as n from default.sales_of_ours").collect()[0].n == 1
    lhs.sql(spark, "cache table sales_of_ours")
    assert spark.catalog.isCached("sales_of_ours")
    lhs.sql(spark, "drop view sales_of_ours")
    with pytest.raises(lh.SqlError, match="drop_table"):
        lhs.sql(spark, "drop view sales_of_ours")
    assert lhs.sql(spark, "select count(*) as n from sales_of_ours").collect()[0].n == 1
    con.drop_table("sales_of_ours")


@pytest.mark.parametrize("where", ["id = 2", "id in (2, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)", "id = :n and v > ''"])
def test_a_point_query_asks_the_key_index(
    spark: SparkSession, con: lh.Connection, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("lakehead.spark.table_names.FEW_ROWS", 0)
    monkeypatch.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)
    table = con.create_table("q.points", SCHEMA, primary_key="id", lake="iceberg")
    try:
        table.upsert(rows(1, 2, 3))
        con.tier("q.points")
        table.upsert([{"id": 3, "v": "new"}])
        found = lhs.sql(spark, f"select * from q.points where {where}", {"n": 2} if ":n" in where else None)
        of_lake = {posixpath.basename(f) for f in table.lake.files()["path"].to_pylist()}
        assert of_lake.isdisjoint(map(posixpath.basename, found.inputFiles())), "the lake is not asked"
        read = lhs.sql(spark, "select * from q.points where v > ''").inputFiles()
        assert of_lake <= set(map(posixpath.basename, read)), "it is where no key is said"
        table.upsert([{"id": 2, "v": "later"}])
        assert found.collect() == [(2, "v2")], "as of when the statement was made"
        assert lhs.sql(spark, "select v from q.points where id = 4").collect() == []
    finally:
        con.drop_table("q.points", purge=True)


def test_columns_and_rows_that_are_not_needed_are_not_read(
    spark: SparkSession, clicks: lh.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakehead.spark.union_frame.HOT_ROWS_MAX", 0)
    monkeypatch.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)
    clicks.append(rows(4, 5))
    written: list[tuple[list[str], int]] = []
    write = union_frame.scratch_file

    def seen(spark: SparkSession, schema: pa.Schema, batches: Iterable[pa.RecordBatch], **how: Any) -> object:
        held = list(batches)
        written.append((schema.names, sum(b.num_rows for b in held)))
        return write(spark, schema, held, **how)

    monkeypatch.setattr(union_frame, "scratch_file", seen)
    found = lhs.sql(spark, "select v from q.clicks where id >= 5 or id = 1")
    assert sorted(found.collect()) == [("v1",), ("v5",)]
    assert (["id", "v"], 1) in written
    found = lhs.sql(spark, "select v from q.clicks")
    assert (["v"], 3) in written and found.count() == 5
    with pytest.raises(Exception, match=r"did not need the column id of q\.clicks") as failed:
        found.orderBy("id").collect()  # Spark lets this name a column that was not selected
    assert isinstance(lhs.raised(failed.value), SqlError)


def test_a_table_costs_few_requests_to_the_jvm_however_many_files_and_columns(
    spark: SparkSession, con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send, here = JavaClient.send_command, threading.get_ident()

    def seen(self: JavaClient, command: str, *args: Any, **how: Any) -> Any:
        if threading.get_ident() == here:  # another one asks which frames of earlier statements are still there
            asked.append(command)
        return send(self, command, *args, **how)

    def requests(statement: str) -> int:
        lhs.sql(spark, statement)
        with monkeypatch.context() as m:
            m.setattr(JavaClient, "send_command", seen)
            asked.clear()
            lhs.sql(spark, statement)
        return sum(not command.startswith("m\n") for command in asked)  # others tell that something is let go of

    more = pa.schema([*SCHEMA, *(pa.field(f"x{n}", pa.float64()) for n in range(40))])
    counts = {}
    for name, schema, rounds in (("q.small", SCHEMA, 1), ("q.wide", more, 6)):
        table = con.create_table(name, schema, primary_key="id", buckets=4, lake="iceberg")
        for n in range(rounds):
            table.upsert(rows(*range(n * 10, n * 10 + 10)))
            con.tier(name)
        table.upsert(rows(1, 2, 1000))
        with monkeypatch.context() as moving:
            moving.setattr(kept_frame, "COPIED_ROWS_MAX", -1)
            counts[name] = requests(f"select * from {name}")
    with monkeypatch.context() as moving:
        moving.setattr(kept_frame, "COPIED_ROWS_MAX", -1)
        both = requests("select a.id from q.small a join q.wide b using (id)")
    assert max(counts.values()) <= 60 and both <= 100, (counts, both)
    kept = [requests("select a.id from q.small a join q.wide b using (id)") for _ in range(3)][-1]
    assert kept <= 60, "frames of tables that stand still are not made anew"
    for name in counts:
        con.drop_table(name, purge=True)


def test_a_statement_asks_for_the_tables_that_it_names(
    spark: SparkSession, con: lh.Connection, clicks: lh.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands it would be told with each statement."""

    def listed(*_: object) -> list[str]:
        raise AssertionError("all tables were listed")

    monkeypatch.setattr(lh.Connection, "tables", listed)
    for statement in (
        "select count(*) from Q.Clicks",
        "with a as (select * from q.clicks$lake union all select * from q.clicks) select count(*) - 2 from a",
        "select count(*) from identifier('q.clicks')",
        "select (select count(*) from q.clicks) where 1 in (select id from identifier(:name))",
    ):
        assert lhs.sql(spark, statement, args={"name": "q.clicks"}).first() == (3,), statement
    with pytest.raises(SqlError, match=r"lhs\.write"):
        lhs.sql(spark, "update q.clicks set v = 'a'")
    with pytest.raises(SqlError, match="nosuch"):
        lhs.sql(spark, "select * from q.nosuch")


def test_a_statement_that_leads_keys_asks_the_index(
    spark: SparkSession, con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it reads one table alone, and the rows are in one tablet; others read it as it was pinned."""
    asked: list[bool] = []

    def seen(handle: TableHandle, spec: ReadSpec) -> KeyedRead | None:
        found = KeyedRead.of(handle, spec)
        asked.append(found is not None)
        return found

    monkeypatch.setattr("lakehead.spark.union_frame.KeyedRead", SimpleNamespace(of=seen))
    monkeypatch.setattr("lakehead.spark.table_names.FEW_ROWS", 0)
    schema = pa.schema([("shop", pa.string()), ("id", pa.int64()), ("v", pa.int64())])
    key = {"primary_key": ["shop", "id"], "bucket_key": "shop", "buckets": 4, "lake": "iceberg"}
    table = con.create_table("shop.led", schema, **key)  # type: ignore[arg-type]
    table.upsert([{"shop": f"s{n % 20}", "id": n, "v": n} for n in range(400)])
    con.tier("shop.led")
    table.upsert([{"shop": "s3", "id": 3, "v": -3}, {"shop": "s3", "id": 1000, "v": 0}])
    table.delete([{"shop": "s3", "id": 23}])

    def find(statement: str, **args: object) -> tuple[list[tuple[object, ...]], list[bool]]:
        asked.clear()
        return sorted(map(tuple, lhs.sql(spark, statement, args or None).collect())), list(asked)

    rows = sorted((r["id"], r["v"]) for r in table.scan(["id", "v"], where="shop = 's3'").to_arrow().to_pylist())
    assert len(rows) == 20
    assert find("select id, v from shop.led where shop = 's3'") == (rows, [True])
    assert find("select o.id, v from Shop.Led o where shop = :s and v <> 3", s="s3") == (rows, [True])
    assert find("select count(*), min(v) from shop.led where 's3' = shop and id < 1000") == ([(19, -3)], [True])
    assert find("select count(*) from shop.led where shop = 's3' or v = 5") == ([(21,)], [False])
    both = "select count(*) from shop.led{} a join shop.led b using (shop, id) where shop = 's3'"
    assert find(both.format("")) == ([(20,)], [True])
    assert find(both.format("$lake")) == ([(19,)], []), "two moments would be read"
    monkeypatch.setattr("lakehead.client.lookups.PREFIX_BYTES_MAX", 1)
    assert find("select id, v from shop.led where shop = 's3'") == (rows, [False]), "too much for the index"
    con.drop_table("shop.led", purge=True)


def test_tables_of_one_name_in_two_databases_are_two(spark: SparkSession, con: lh.Connection) -> None:
    """A column that is named with its database is of that table, also in a query within the query."""
    tables = {"q.same": range(4), "p.same": range(3, 6)}
    for name, ids in tables.items():
        con.create_table(name, SCHEMA).append(rows(*ids))
    try:
        for statement, found in (
            ("select id from q.same where exists (select 1 from p.same where p.same.id = q.same.id)", [3]),
            ("select id from q.same where not exists (select 1 from p.same where p.same.id = Q.Same.id)", [0, 1, 2]),
            ("select (select count(*) from p.same where p.same.id <= q.same.id) from q.same", [0, 0, 0, 1]),
            ("select p.same.id from q.same join p.same on q.same.id = p.same.id", [3]),
            ("select q.same.id from q.same, p.same where q.same.v = p.same.v", [3]),
            ("select a.id from q.same a join p.same b on a.id = b.id", [3]),
        ):
            assert sorted(row[0] for row in lhs.sql(spark, statement).collect()) == found, statement
        with pytest.raises(SqlError, match=r"give [pq]\.same another one"):
            lhs.sql(spark, "select id from q.same where exists (select 1 from p.same same where same.id = q.same.id)")
    finally:
        for name in tables:
            con.drop_table(name)


def test_views_with_comments_last_and_functions_of_tables_are_refused(
    spark: SparkSession, con: lh.Connection, clicks: lh.Table
) -> None:
    lhs.sql(spark, "create temp view said (n comment 'the id', v) comment 'of clicks' as select * from q.clicks")
    assert lhs.sql(spark, "select max(n) from said").first() == (3,)
    spark.catalog.dropTempView("said")
    for statement in (
        "create temporary function f() returns bigint return (select max(id) from q.clicks)",
        "create or replace temp view v tblproperties ('a' = 'b') as select * from q.clicks",
        "create view v as select * from q.clicks",
        "set x.y = select 1 from q.clicks",
    ):
        with pytest.raises(SqlError, match=r"q\.clicks"):
            lhs.sql(spark, statement)
    con.create_table("default.shadowed", SCHEMA)
    spark.range(3).createOrReplaceTempView("shadowed")
    lhs.sql(spark, "create temporary function most() returns bigint return (select max(id) from shadowed)")
    assert spark.sql("select most()").first() == (2,)
    spark.sql("drop temporary function most")
    spark.catalog.dropTempView("shadowed")
    con.drop_table("default.shadowed")
    assert lhs.sql(spark, r"select r'\' s, count(*) n from q.clicks where v like '%'").first() == ("\\", 3)


def test_a_view_of_the_session_is_what_its_name_means(spark: SparkSession, con: lh.Connection) -> None:
    """As in Spark, which looks for it first, in any case; other names are Lakehead's."""
    con.create_table("default.seen", SCHEMA).append(rows(1, 2))
    try:
        spark.range(5).createOrReplaceTempView("Seen")
        assert [lhs.sql(spark, f"select count(*) from {n}").first() for n in ("sEEn", "default.seen")] == [(5,), (2,)]
        spark.catalog.dropTempView("seen")
        assert lhs.sql(spark, "select count(*) from seen").first() == (2,)
    finally:
        con.drop_table("default.seen")


@pytest.mark.parametrize(("in_plan", "scans"), [(512, 1), (0, 2)])
def test_hot_rows_are_a_file_of_the_scan_of_the_lake(
    spark: SparkSession, con: lh.Connection, monkeypatch: pytest.MonkeyPatch, in_plan: int, scans: int
) -> None:
    monkeypatch.setattr(dead_rows, "DEAD_IN_PLAN_MAX", in_plan)
    monkeypatch.setattr(kept_frame, "COPIED_ROWS_MAX", -1)
    table = con.create_table("q.one", SCHEMA, primary_key="id", lake="iceberg")
    try:
        table.upsert(rows(1, 2))
        con.tier("q.one")
        table.upsert(rows(3))
        whole = lhs.table(spark, "q.one")
        table.upsert([{"id": 1, "v": "new"}])
        less = lhs.table(spark, "q.one", system_columns=True)
        assert sorted(whole.collect()) == [(1, "v1"), (2, "v2"), (3, "v3")]
        assert sorted((r.id, r.v, r["__offset"]) for r in less.collect()) == [(1, "new", 4), (2, "v2", 1), (3, "v3", 2)]
        # The same files, through the same reader, where the session would read Parquet by its other one.
        spark.conf.set("spark.sql.sources.useV1SourceList", "")
        assert sorted(lhs.table(spark, "q.one").collect()) == [(1, "new"), (2, "v2"), (3, "v3")]
        assert lhs.table(spark, "q.one", columns=[]).count() == 3
        plans = [str(f._jdf.queryExecution().optimizedPlan()) for f in (whole, less)]  # type: ignore[attr-defined]
        assert [plan.count("parquet") for plan in plans] == [1, scans], plans  # the other one is of dead offsets
    finally:
        spark.conf.unset("spark.sql.sources.useV1SourceList")
        con.drop_table("q.one", purge=True)


def test_statements_with_other_long_lists_read_other_rows(
    spark: SparkSession, con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of one is not the other's: Arrow writes a list without its middle."""
    monkeypatch.setattr("lakehead.spark.union_frame.HOT_ROWS_MAX", 0)
    table = con.create_table("q.lists", SCHEMA)
    try:
        table.append(rows(*range(400)))
        for left_out in (100, 150, 200, 250):
            asked = [n for n in range(400) if n != left_out]
            found = lhs.sql(spark, f"select id from q.lists where id in ({', '.join(map(str, asked))})")
            assert sorted(r.id for r in found.collect()) == asked
    finally:
        con.drop_table("q.lists", purge=True)


@pytest.mark.parametrize("mode", ["LEGACY", "EXCEPTION"])
def test_old_days_are_the_same_whatever_calendar_a_session_takes_files_for(
    spark: SparkSession, con: lh.Connection, mode: str
) -> None:
    at = dt.datetime(1, 1, 1)
    row = {"id": 1, "day": at.date(), "at": at, "zoned": at.replace(tzinfo=dt.UTC), "days": [dt.date(1582, 10, 10)]}
    instant = pa.timestamp("us", "UTC")
    types = {
        "id": pa.int64(),
        "day": pa.date32(),
        "at": pa.timestamp("us"),
        "zoned": instant,
        "days": pa.list_(pa.date32()),
    }
    name = f"types.old_{mode.lower()}"
    t = con.create_table(name, types, lake="iceberg")
    t.append([row])
    con.tier(name)
    t.append([{**row, "id": 2}])
    setting = "spark.sql.parquet.datetimeRebaseModeInRead"
    before = spark.conf.get(setting)
    spark.conf.set(setting, mode)
    try:
        rows = lhs.table(spark, name).toArrow().sort_by("id").to_pylist()
        assert rows == t.scan().to_arrow().sort_by("id").to_pylist()
        assert lhs.sql(spark, f"select id from {name} where day = date'0001-01-01'").count() == 2
    finally:
        spark.conf.set(setting, before)
