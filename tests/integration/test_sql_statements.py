"""con.sql: which statements it takes, how names resolve, parameters, frames, and what its relations raise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import lakehead as lh

ORDERS = pa.table({"id": range(100), "city": ["Oslo", "Bergen"] * 50, "day": [i % 5 for i in range(100)]})


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as connection:
        orders = connection.create_table("shop.orders", ORDERS.schema, lake="iceberg")
        orders.append(ORDERS.slice(0, 60))
        connection.tier("shop.orders")
        orders.append(ORDERS.slice(60))
        connection.create_table("shop.users", ORDERS.schema, primary_key=["id"]).upsert(ORDERS)
        yield connection


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("sql") / "data") as connection:
        connection.create_table("shop.orders", ORDERS.schema).append(ORDERS)
        connection.create_table("shop.users", ORDERS.schema, primary_key=["id"]).upsert(ORDERS)
        yield connection


@pytest.mark.parametrize(
    "query",
    [
        "insert into shop.orders select * from shop.orders",
        "update shop.users set city = 'x'",
        "delete from shop.users",
        "merge into shop.users using shop.orders o on o.id = users.id when matched then delete",
        "truncate shop.users",
        "create table x (a int)",
        "create view v as select * from shop.orders",
        "drop table shop.orders",
        "copy shop.orders to '{file}'",
        "copy (select 1) to '{file}'",
        "export database '{file}'",
        "attach '{file}' as other",
        "set threads = 1",
        "install iceberg",
        "load iceberg",
        "begin",
        "pragma table_info('shop.orders')",
        "call pragma_version()",
        "use shop",
        "prepare p as select 1",
        "explain insert into shop.orders select * from shop.orders",
        "explain analyze copy (select 1) to '{file}'",
        "select 1; copy (select 1) to '{file}'",
        "select 1; select 2",
        "with w as (select 1) insert into shop.orders select * from w",
        "--comment only",
    ],
)
def test_what_does_not_only_read_is_refused_without_an_effect(
    standing: lh.Connection, tmp_path: Path, query: str
) -> None:
    file = tmp_path / "written"
    with pytest.raises(lh.SqlError) as refused:
        standing.sql(query.format(file=file))
    assert "lakehead_" not in str(refused.value)
    assert not file.exists()
    assert standing.sql("select count(*) from shop.orders").fetchone() == (100,)
    assert standing.sql("select count(*), count(*) filter (city = 'x') from shop.users").fetchone() == (100, 0)
    assert standing.sql("show tables").fetchall() == [("shop.orders",), ("shop.users",)]


@pytest.mark.parametrize("query", ["truncate shop.users", "TRUNCATE TABLE shop.users", "-- delete\n/**/ Truncate x"])
def test_who_would_truncate_is_told_how(standing: lh.Connection, query: str) -> None:
    with pytest.raises(lh.SqlError, match=r"TRUNCATE does not: .*table\.truncate\(\)"):
        standing.sql(query)
    for other in ("delete from shop.users where city = 'truncate'", "/* truncate */ delete from truncate"):
        with pytest.raises(lh.SqlError, match=r"table\.delete"):
            standing.sql(other)


def test_a_name_that_is_nearly_right_is_told(con: lh.Connection) -> None:
    with pytest.raises(lh.TableNotFoundError, match=r"did you mean shop\.orders") as e:
        con.sql("from shop.order")
    assert "schema" not in str(e.value)  # DuckDB's has been made for this statement, or not


def test_names_resolve_as_in_duckdb(con: lh.Connection) -> None:
    odd = con.create_table("orders", pa.schema([("price$", pa.int64()), ("lake", pa.int64())]), lake="iceberg")
    odd.append([{"price$": 7, "lake": 1}])
    con.tier("orders")
    for query, answer in {
        "select price$ from orders": 7,
        "select orders.price$ from default.orders": 7,
        'select "default".orders.lake from "default"."orders"': 1,
        "select max(price$) from orders$lake, shop.orders$lake": 7,
        "select count(*) from SHOP.ORDERS": 100,
        "select count(shop.orders.id) from shop.orders": 100,
        "with orders as (select 5 x) select x from orders": 5,
        "select count(*) from (from shop.orders where id < (select max(lake) from orders))": 1,
        "select count(*) from shop.orders$LAKE where city = 'from shop.nothing' or true -- from shop.nothing": 60,
        "from (pivot shop.orders on city in ('Oslo') using count(*) group by day) select count(*)": 5,
    }.items():
        assert con.sql(query).fetchone() == (answer,), query
    assert len(con.sql("pivot shop.orders on city using count(*) group by day")) == 5


def test_two_tables_whose_names_differ_by_case_alone(con: lh.Connection) -> None:
    con.create_table("shop.Orders", ORDERS.schema)
    assert con.sql("select count(*) from shop.Orders").fetchone() == (0,)
    assert con.sql("select count(*) from shop.orders").fetchone() == (100,)
    for query in ("from shop.ORDERS", "from shop.orders, shop.Orders"):
        with pytest.raises(lh.SqlError, match=r"shop\.Orders"):
            con.sql(query)


def test_what_there_is_can_be_asked(con: lh.Connection) -> None:
    assert [r[:2] for r in con.sql("describe shop.orders").fetchall()][:2] == [("id", "BIGINT"), ("city", "VARCHAR")]
    assert con.sql("summarize shop.users").columns[:2] == ["column_name", "column_type"]
    assert con.sql("show tables").fetchall() == [("shop.orders",), ("shop.users",)]
    assert con.sql("show tables from shop").fetchall() == [("orders",), ("users",)]
    listed = con.sql("select table_schema, table_name from information_schema.tables order by 2").fetchall()
    assert listed == [("shop", "orders"), ("shop", "users")]
    assert con.sql("show databases").fetchall() == [("default",), ("shop",)]
    assert con.sql("explain analyze select count(*) from shop.orders").fetchall()


def test_parameters_and_frames(con: lh.Connection) -> None:
    assert con.sql("select count(*) from shop.orders where id < ?", [10]).fetchone() == (10,)
    assert con.sql("select count(*) from shop.orders where id < $n", {"n": 10}).fetchone() == (10,)
    both = "select $1::int + 1, (select count(*) from shop.orders where id = $1)"
    for one in (np.int64(1), np.uint8(1), np.float32(1), np.bool_(True), pa.scalar(1)):
        for params in ([one], (one,), {"1": one}):
            assert con.sql(both, params).fetchone() == (2, 1), one
    for lost in (pa.scalar(5, pa.timestamp("ns")), pa.scalar(2**62, pa.timestamp("us"))):
        with pytest.raises(lh.SqlError, match=r"params= holds <pyarrow\.TimestampScalar"):
            con.sql("select $1", [lost])
    for text in ("select * from shop.orders where {} = id", "from shop.users where {} = id", "select 1 where 1 = {}"):
        for lacking in (None, [], (), {}):
            for name in ("?", "$1", "$n"):
                with pytest.raises(lh.SqlError, match=r"has parameters \((1|n)\): give their values as params="):
                    con.sql(text.format(name), lacking)
        for wrong in (5, "5", b"5", iter([5])):
            with pytest.raises(lh.SqlError, match="a list of the values"):
                con.sql(text.format("?"), wrong)  # type: ignore[arg-type]
    assert con.sql("select count(*) from shop.orders", []).fetchone() == con.sql("from (values (100))", {}).fetchone()
    regions = [{"city": "Oslo", "region": "east"}, {"city": "Bergen", "region": "west"}]
    query = "select count(*) from shop.orders join r using (city) where region = $1"
    arrow = pa.Table.from_pylist(regions)
    made = con.create_table("regions", arrow.schema)
    made.append(arrow)
    frames = [regions, arrow, arrow.to_pandas(), arrow.to_reader(), con.sql("from regions"), duckdb.from_arrow(arrow)]
    for frame in [*frames, made.scan()]:
        assert con.sql(query, ["east"], frames={"r": frame}).fetchone() == (50,)
    for bad in ({"r": 3}, {"r": [1, 2]}, {"r 1": arrow}, {"regions": arrow}):
        with pytest.raises(lh.InvalidRequestError):
            con.sql("select 1", frames=bad)


def test_a_relation_is_duckdbs_and_its_errors_are_ours(con: lh.Connection) -> None:
    relation = con.sql("from shop.users")
    assert isinstance(relation, duckdb.DuckDBPyRelation)
    few = relation.filter("id < 3").project("id, city").order("id")
    assert few.fetchall() == [(0, "Oslo"), (1, "Bergen"), (2, "Oslo")] and few.columns == ["id", "city"]
    assert pa.table(few).num_rows == few.arrow().read_all().num_rows == len(few) == few.df().shape[0] == 3
    assert few.join(relation.set_alias("b"), "id").fetchone()
    failing = con.sql("select error('no ' || city) from shop.users where city = 'Oslo'")
    for fetch in (failing.fetchall, lambda: failing.arrow().read_all(), lambda: pa.table(failing), failing.df):
        with pytest.raises(lh.SqlError, match="no Oslo"):
            fetch()
    with pytest.raises(lh.SqlError):
        relation.filter("nope > 1")


def test_what_a_table_cannot_be_read_for_arrives_as_it_is(con: lh.Connection) -> None:
    relation = con.sql("select sum(day) from shop.users")
    con.drop_table("shop.users")
    with pytest.raises(lh.TableNotFoundError):
        relation.fetchall()


def test_all_names_of_a_statement_mean_one_moment(con: lh.Connection) -> None:
    """A writer that waits for each acknowledgement writes to a, then to b: who sees n rows in b sees as many in a."""
    schema = pa.schema([("n", pa.int64())])
    a = con.create_table("race.a", schema, primary_key=["n"], buckets=2, lake="iceberg", durability="os")
    b = con.create_table("race.b", schema, durability="os")
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for n in range(800):
                if stop.is_set():
                    return
                a.upsert([{"n": n}])
                b.append([{"n": n}])
        except BaseException as e:
            failed.append(e)

    writer = threading.Thread(target=write)
    writer.start()
    query = """select (select count(*) from race.a), (select count(*) from race.b),
        (select count(*) from race.a$changelog), (select count(*) from race.a$lake),
        (select count(*) from race.a where n in (select n from race.a$lake))"""
    try:
        for i in range(15):
            if i % 5 == 2:
                con.tier("race.a")
            keyed, log, changes, lake, both = con.sql(query).fetchone() or ()
            assert keyed - 1 <= log <= keyed and changes == keyed and both == lake
    finally:
        stop.set()
        writer.join()
    assert not failed


def test_a_day_that_pandas_has_not_is_told(con: lh.Connection) -> None:
    table = con.create_table("far.days", pa.schema([("d", pa.date32())]))
    table.append(pa.table({"d": pa.array([5_000_000], pa.int32()).cast(pa.date32())}))
    with pytest.raises(lh.InvalidRequestError, match="to_arrow"):
        table.scan().to_pandas()
