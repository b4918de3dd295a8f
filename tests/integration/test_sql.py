"""con.sql over hot, lake and joined tables, against DuckDB over the plain rows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import lakehead as lh
from lakehead.api.relation import Reading
from lakehead.server.metadata import MetadataStore

ROWS = pa.table(
    {
        "id": pa.array(range(1000), pa.int64()),
        "city": pa.array([["Oslo", "Bergen", None][i % 3] for i in range(1000)]),
        "price": pa.array([i / 4 for i in range(1000)]),
        "day": pa.array([i % 5 for i in range(1000)], pa.date32()),
    }
)


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as connection:
        log = connection.create_table("shop.orders", ROWS.schema, buckets=2, lake="iceberg")
        log.append(ROWS.slice(0, 600))
        connection.tier("shop.orders")
        log.append(ROWS.slice(600))
        keyed = connection.create_table("shop.users", ROWS.schema, primary_key=["id"], buckets=2, lake="iceberg")
        keyed.upsert(ROWS)
        connection.tier("shop.users")
        keyed.upsert([{"id": i, "city": "Tromsø"} for i in range(0, 100)])
        keyed.delete([{"id": i} for i in range(990, 1000)])
        yield connection


def plain_users() -> pa.Table:
    table = ROWS.slice(0, 990)
    cities = ["Tromsø"] * 100 + table["city"].to_pylist()[100:]
    return table.set_column(1, "city", pa.array(cities))


QUERIES = [
    "select count(*), sum(price), min(day) from shop.orders",
    "select city, count(*) n from shop.orders where price > 100 group by city order by city",
    "select count(*) from shop.orders where city is null and id between 10 and 900",
    "select city, max(id) from shop.users group by 1 order by 1",
    "select users.city, count(*) from shop.users join shop.orders on users.id = orders.id group by 1 order by 1",
    "select o.id from shop.orders o where o.id in (select id from shop.users u where u.city = 'Tromsø') order by 1",
    "with x as (select * from shop.users where price < 10) select count(*), sum(id) from x",
    "select count(*) from shop.orders, shop.users where orders.id = users.id and users.day > date '1970-01-02'",
    "select id from shop.users order by id desc limit 3",
    "select distinct city from shop.orders order by 1 nulls first",
    "select count(*) from shop.users",
    "select count(*), count(*) + 1 from shop.orders",
    "select (select count(*) from shop.users), count(*) from shop.orders",
    "select count(*) from shop.orders, shop.users",
    "select 7 from shop.users limit 3",
    "select exists (select 1 from shop.users), exists (from shop.orders)",
    "select count(*), 1 as one from shop.orders group by one",
    "select count(*) from (select * from shop.users) as u, shop.orders as o where o.id < 3",
    "select * from shop.users order by id limit 2",
    "select o from shop.orders as o order by id limit 2",
    "from shop.users where id = 5",
    "describe shop.users",
]


@pytest.mark.parametrize("query", QUERIES)
def test_answers_equal_those_over_the_plain_rows(con: lh.Connection, query: str) -> None:
    model = duckdb.connect()
    model.sql("create schema shop")
    model.register("orders_rows", ROWS)
    model.register("users_rows", plain_users())
    model.sql("create view shop.orders as select * from orders_rows")
    model.sql("create view shop.users as select * from users_rows")
    assert con.sql(query).fetchall() == model.sql(query).fetchall()


def test_the_lake_alone_lags_behind(con: lh.Connection) -> None:
    assert con.sql("select count(*) from shop.orders$lake").fetchone() == (600,)
    assert con.sql("select count(*) from shop.orders").fetchone() == (1000,)


def test_changelog_and_snapshots(con: lh.Connection) -> None:
    changes = con.sql("select __change_type, count(*) from shop.users$changelog group by 1 order by 1").fetchall()
    assert changes == [("+I", 1000), ("+U", 100), ("-D", 10), ("-U", 100)]
    assert con.sql("select count(*) from shop.users$lake$snapshots").fetchone() == (1,)


def test_a_relation_is_pinned_when_it_is_made(con: lh.Connection) -> None:
    relation = con.sql("select count(*) from shop.orders")
    con.table("shop.orders").append(ROWS.slice(0, 10))
    assert relation.fetchone() == (1000,)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("select * from shop.nothing", lh.TableNotFoundError),
        ("selec 1", lh.SqlError),
        ("", lh.SqlError),
        ("select nope from shop.orders", lh.SqlError),
        ("select * from shop.orders$nope", lh.SqlError),
        ("select * from shop.nothing$lake", lh.TableNotFoundError),
        ("select * from hot$lake", lh.NoLakeError),
        ("select count(*) from shop.orders where id > ?", lh.SqlError),
        ("select id = $a from shop.orders where id > ?", lh.SqlError),
        ("select * from rows", lh.TableNotFoundError),
    ],
)
def test_errors_are_typed(con: lh.Connection, query: str, error: type[lh.LakeheadError]) -> None:
    con.create_table("hot", ROWS.schema)
    rows = ROWS  # a variable is no table: frames= is
    with pytest.raises(error):
        con.sql(query)
    assert rows is ROWS


def test_many_threads(con: lh.Connection) -> None:
    counts: list[object] = []
    threads = [
        threading.Thread(target=lambda: counts.append(con.sql("select count(*) from shop.users").fetchone()))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert counts == [(990,)] * 8


def test_a_timestamp_without_a_zone_is_utc_beside_one_with_a_zone(con: lh.Connection) -> None:
    table = con.create_table("shop.seen", pa.schema([("time", pa.timestamp("us", "Asia/Tokyo"))]), lake="iceberg")
    table.append(pa.table({"time": pa.array([0, 3_600_000_000], pa.timestamp("us", "Asia/Tokyo"))}))
    assert con.sql("select current_setting('TimeZone')").fetchone() == ("UTC",)
    where = "time > '1970-01-01 00:30:00'"
    assert con.sql(f"select count(*) from shop.seen where {where}").fetchone() == (table.scan(where=where).count(),)


def test_a_table_of_names_that_sql_takes_for_one_opens_and_sql_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older, lh.connect(tmp_path / "data") as con:
        older.setattr("lakehead.format.schema.twin_names", lambda schema: None)
        made = con.create_table("t", pa.schema([("a", pa.int64()), ("A", pa.int64())]), lake="iceberg")
        made.append([{"a": 1, "A": 2}])
    with lh.connect(tmp_path / "data") as con:
        table = con.table("t")
        con.tier("t")
        table.append([{"a": 3, "A": 4}])
        assert table.scan(where="A = 2 or a = 3").to_arrow().to_pylist() == [{"a": 1, "A": 2}, {"a": 3, "A": 4}]
        with pytest.raises(lh.SqlError, match="cannot tell columns 'a' and 'A' apart"):
            con.sql("select A from t")


def test_conditions_that_duckdb_cannot_push_down_are_answered_all_the_same(con: lh.Connection) -> None:
    native = duckdb.connect()
    native.from_arrow(ROWS).create("orders")
    for where in ("price is not distinct from 2.5 or price > 249", "(city is distinct from 'Oslo') or city > 'P'"):
        plain = native.sql(f"select count(*) from orders where {where}").fetchone()
        assert plain is not None and con.sql(f"select count(*) from shop.orders where {where}").fetchone() == plain
        assert con.sql(f"select * from shop.orders where {where}").to_arrow_table().num_rows == plain[0]


def test_a_frame_of_types_that_duckdb_lacks_names_its_columns(con: lh.Connection) -> None:
    half = pa.table({"ok": [1], "h": pa.array([np.float16(1)])})
    with pytest.raises(lh.InvalidRequestError, match=r"h \(halffloat\)"):
        con.sql("select * from f", frames={"f": half})


def test_frames_are_filtered_as_duckdb_means_it(con: lh.Connection) -> None:
    rows = pa.table({"k": [1, 2, 3, 4], "f": [1.0, 9.0, float("nan"), -0.0]})
    for where, keys in {"f > 7": [2, 3], "f in (0.0, 1.0)": [1, 4], "not (f <= 40)": [3], "k > 3": [4]}.items():
        for frame in (rows, rows.to_pylist()):
            frames = {"frame": frame}
            found = con.sql(f"select k from frame where {where} order by k", frames=frames).fetchall()
            assert [k for (k,) in found] == keys
            assert con.sql(f"select count(*) from frame where {where}", frames=frames).fetchone() == (len(keys),)
    assert con.sql("select count(*), max(f) from frame", frames={"frame": rows}).fetchone()[0] == 4  # type: ignore[index]
    assert con.sql("select count(*) from frame", frames={"frame": rows}).fetchone() == (4,)


ODD_COLUMNS: list[tuple[pa.Array, list[str]]] = [
    (pa.array([1.5, float("nan"), None, -0.0, 0.0]).dictionary_encode(), ["1.5", "0", "'nan'::double"]),
    (pa.array(["a", "b", None, "a", "c"]).dictionary_encode(), ["'a'"]),
    (pa.array([0, 1, None, 1_500, -1_500], pa.timestamp("ns", "UTC")), ["'1970-01-01'::timestamptz"]),
    (pa.array([0, 1, None, 10**9, -1], pa.timestamp("s", "UTC")), ["'1970-01-01 00:00:00.5+00'::timestamptz"]),
    (pa.array([0, 1, None, 1_500, -1_500], pa.timestamp("ns")), ["'1970-01-01 00:00:00.000000001'::timestamp_ns"]),
    (pa.array([{"x": 1.5}, {"x": float("nan")}, None, {"x": None}, {"x": -0.0}]), ["{'x':1.5}"]),
    (pa.array(["a", "b", None, "é", "a"], pa.string_view()), ["'a'"]),
    (pa.array([b"a", b"b", None, b"", b"a"], pa.binary_view()), ["'a'::blob"]),
    (pa.RunEndEncodedArray.from_arrays([2, 3, 5], pa.array(["a", None, "b"])), ["'a'"]),
]


@pytest.mark.parametrize(
    ("column", "values"), ODD_COLUMNS, ids=lambda p: str(p.type) if isinstance(p, pa.Array) else ""
)
def test_frames_of_odd_types_are_filtered_as_duckdb_means_it(
    con: lh.Connection, column: pa.Array, values: list[str]
) -> None:
    """As its own rows: what it pushed into a frame was compared exactly, by Arrow, or could not be."""
    frame, native = pa.table({"k": range(5), "c": column}), duckdb.connect()
    native.execute("set timezone = 'UTC'")
    native.register("given", frame)
    native.execute("create table frame as select * from given")
    ways = ["c = {}", "c <> {}", "c > {}", "not (c > {})", "c in ({}, {})", "k in (select k from frame where c = {})"]
    for where in [way.replace("{}", value) for way in ways for value in values]:
        text = f"select k from frame where {where} order by k"
        assert con.sql(text, frames={"frame": frame}).fetchall() == native.sql(text).fetchall(), where
    assert len(con.sql("select c, k from frame", frames={"frame": frame}).fetchall()) == 5


def test_lists_that_python_has_no_values_for_are_read_all_the_same(con: lh.Connection, name: str) -> None:
    """DuckDB gave Arrow texts for such days, or an error that only spoke of bytes."""
    days = pa.array([-800_000, 3_000_000, 0, 5], pa.int32()).view(pa.date32())
    rows = pa.table({"k": range(4), "d": days, "ts": days.cast(pa.timestamp("us"))})
    table = con.create_table(name, rows.schema)
    table.append(rows)
    large = pa.table({"k": [0, 1], "d": pa.array([2**64 - 1, 1], pa.uint64())})
    for column in ("date '10183-09-21', date '0222-09-04 (BC)'", "date '10183-09-21', date '1970-01-01'"):
        stamps = column.replace("date ", "timestamp ")
        wanted = [(0,), (1,)] if "BC" in column else [(1,), (2,)]
        for where in (f"d in ({column})", f"ts in ({stamps})"):
            assert con.sql(f"select k from {name} where {where} order by k").fetchall() == wanted, where
            assert con.sql(f"select k from z where {where} order by k", frames={"z": rows}).fetchall() == wanted, where
    found = con.sql("select k from z where d in (18446744073709551615, 18446744073709551614)", frames={"z": large})
    assert found.fetchall() == [(0,)]


class Stream:
    """Arrow data that another library has, which it gives away once or again and again."""

    def __init__(self, rows: pa.Table, *, once: bool) -> None:
        self._rows, self._reader = rows, rows.to_reader() if once else None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return (self._reader or self._rows).__arrow_c_stream__(requested_schema)


FRAMES: dict[str, Callable[[pa.Table], object]] = {
    "table": lambda rows: rows,
    "reader": lambda rows: rows.to_reader(max_chunksize=3),
    "dicts": lambda rows: rows.to_pylist(),
    "pandas": lambda rows: rows.to_pandas(),
    "dataset": ds.dataset,
    "scanner": lambda rows: ds.Scanner.from_batches(rows.to_reader()),
    "dataset's scanner": lambda rows: ds.dataset(rows).scanner(),
    "stream once": lambda rows: Stream(rows, once=True),
    "stream": lambda rows: Stream(rows, once=False),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_is_read_as_often_as_a_statement_reads_it(con: lh.Connection, kind: str) -> None:
    rows = pa.table({"k": range(10), "f": [*map(float, range(9)), float("nan")]})
    for query, n in {
        "select * from z": 10,
        "select * from z a join z b using (k)": 10,
        "select * from z union all select * from z": 20,
        "select * from z where f > 7": 2,
        "select id from shop.orders join z on id = k where f <= 'nan'::double": 10,
        "select id from shop.users where price <= 'nan'::double union all select k from z": 1000,
    }.items():
        n -= kind == "pandas" and ("f > 7" in query or "z on" in query)  # whose NaN is null
        relation = con.sql(query, frames={"z": FRAMES[kind](rows)})
        assert [len(relation.fetchall()), len(relation.fetchall()), relation.to_arrow_table().num_rows] == [n] * 3, (
            query
        )


def test_a_scan_as_a_frame_is_filtered_as_duckdb_means_it(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("default.t", pa.schema([("k", pa.int64()), ("f", pa.float64())]))
        table.append([{"k": k, "f": f} for k, f in enumerate([1.0, 8.0, float("nan"), None])])
        relation = con.sql(
            "select a.k from z a join z b using (k) where a.f > 7 order by 1", frames={"z": table.scan()}
        )
        assert relation.fetchall() == relation.fetchall() == [(1,), (2,)]


def test_dicts_of_a_frame_have_the_columns_that_any_has(con: lh.Connection) -> None:
    rows = [{"a": 1}, {"b": "x", "a": 2}, {"c": 0.5}, {}]
    relation = con.sql("select * from z", frames={"z": rows})
    assert relation.columns == ["a", "b", "c"]
    assert relation.fetchall() == [(1, None, None), (2, "x", None), (None, None, 0.5), (None, None, None)]


@pytest.mark.parametrize(
    "rows",
    [[{"a": 10**20}], [{"a": "\udc80"}], [{"\udc80": 1}], [{1: 2}], [{"a": 1}, 5], [{"a": 1}, [("a", 2)]], [{"a": 1j}],
     [{"a": 1}, {"a": "x"}], []],
)  # fmt: skip
def test_frames_that_are_no_rows_are_refused(con: lh.Connection, rows: object) -> None:
    with pytest.raises(lh.InvalidRequestError, match="'z'"):
        con.sql("select * from z", frames={"z": rows})


@pytest.mark.parametrize(
    "rows", [[], [{}, {}], pa.table({}), pa.record_batch({}), pa.table({}).to_reader(), ds.dataset(pa.table({})),
             pd.DataFrame(), pd.DataFrame(index=[1])],
)  # fmt: skip
def test_frames_without_columns_are_told_so(con: lh.Connection, rows: object) -> None:
    with pytest.raises(lh.InvalidRequestError, match="'z' has no columns"):
        con.sql("select * from z", frames={"z": rows})
    assert con.sql("select * from z", frames={"z": pa.schema([("a", pa.int64())]).empty_table()}).fetchall() == []


def test_two_frames_of_one_name_in_sql_are_refused(con: lh.Connection) -> None:
    with pytest.raises(lh.InvalidRequestError, match="two frames"):
        con.sql("select * from zz", frames={"ZZ": [{"a": 1}], "zz": [{"a": 2}]})


def test_what_a_stream_raises_is_raised(con: lh.Connection) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield ROWS.to_batches()[0]
        raise lh.InvalidRequestError("enough")

    reader = pa.RecordBatchReader.from_batches(ROWS.schema, failing())
    with pytest.raises(lh.InvalidRequestError, match="enough"):
        con.sql("select * from z", frames={"z": reader})


NANS = pa.table(
    {
        "k": [1, 2, 3, 4],
        "f": [9.0, float("nan"), None, 1.0],
        "g": [None, 2.0, 3.0, float("nan")],
        "s": [{"x": 9.0}, {"x": float("nan")}, None, {"x": None}],
    }
)
AT_MOST_NAN = [
    "f is not distinct from 'nan'::double or f <= 2",
    "f is distinct from 'nan'::double or k = 2",
    "f <= 'nan'",
    "not (f > 'nan')",
    "f <= $f",
    "f <= 0.0::double / 0.0::double",
    "f between 1 and 'nan'",
    "f >= 'nan'",
    "f > 'nan'",
    "f >= 1 and g <= 'nan'",
    "g <= 'NaN' and f > 1",
    "f <= 'nan' or g <= 'nan'",
    "(f < 5 or f <= 'nan') and k < 4",
    "s.x <= 'nan'",
    "k < 3 and s.x <= 'nan'",
]


@pytest.fixture
def nans(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as connection:
        connection.create_table("nans", NANS.schema).append(NANS)
        yield connection


def _native(text: str, params: object = None) -> list[tuple[object, ...]]:
    native = duckdb.connect()
    native.from_arrow(NANS).create("nans")
    return native.sql(text, params=params).fetchall()


@pytest.mark.parametrize("where", AT_MOST_NAN)
def test_rows_without_a_number_are_never_compared_with_nan(nans: lh.Connection, where: str, tmp_path: Path) -> None:
    params = {"f": float("nan")} if "$" in where else None
    wanted = _native(f"select k from nans where {where} order by k", params)
    assert nans.sql(f"select k from nans where {where} order by k", params).fetchall() == wanted
    assert nans.sql(f"select count(*) from nans where {where}", params).fetchone() == (len(wanted),)
    changes = nans.sql(f"select k from nans$changelog where {where} order by k", params)
    assert changes.fetchall() == wanted
    pq.write_table(NANS, tmp_path / "nans.parquet")
    for frame in (NANS, NANS.to_batches()[0], NANS.to_reader(), ds.dataset(tmp_path / "nans.parquet")):
        found = nans.sql(f"select k from frame where {where} order by k", params, frames={"frame": frame})
        assert found.fetchall() == wanted, type(frame)
    if params is None:
        assert nans.sql("select * from nans").filter(where).order("k").project("k").fetchall() == wanted


def test_a_join_tells_one_side_the_range_of_the_other(nans: lh.Connection) -> None:
    for text in (
        "select a.k, b.k from nans a join nans b on a.f = b.f order by a.k",
        "select a.k, b.k from nans a join nans b on a.f = b.g order by a.k",
    ):
        assert nans.sql(text).fetchall() == _native(text)


def test_every_way_to_fetch_meets_nan_alike(nans: lh.Connection) -> None:
    text, wanted = "select k from nans where f <= 'nan' order by k", [1, 2, 4]
    one = nans.sql(text)
    assert [one.fetchone(), one.fetchone(), one.fetchone(), one.fetchone()] == [(1,), (2,), (4,), None]
    assert nans.sql(text).fetchmany(2) == [(1,), (2,)]
    assert nans.sql(text).to_arrow_reader().read_all()["k"].to_pylist() == wanted
    assert pa.table(nans.sql(text))["k"].to_pylist() == wanted
    assert nans.sql(text).df()["k"].tolist() == wanted
    assert nans.sql(text).fetch_df_chunk()["k"].tolist() == wanted
    assert len(nans.sql(text)) == 3 and "│     4 │" in repr(nans.sql(text))


def test_what_one_statement_cannot_push_down_others_do(nans: lh.Connection) -> None:
    for where in ("f <= 'nan'", "k is not distinct from 2 or k > 300"):
        nans.sql(f"select k from nans where {where}").fetchall()
        plan = nans.sql("select f from nans where k = 1").explain()
        assert "Filters: k=1" in plan and "FILTER" not in plan, where


def test_an_interrupt_that_duckdb_met_is_one() -> None:
    reading = Reading(duckdb.connect())
    for text, error in (("Query interrupted", KeyboardInterrupt), ("another", RuntimeError)):
        with pytest.raises(error):
            reading.run(lambda text=text: (_ for _ in ()).throw(RuntimeError(text)))  # type: ignore[misc]


@pytest.mark.parametrize("query", ["select count(*) from shop.orders", "select * from shop.users where id = 3"])
def test_what_a_statement_pinned_is_let_go_of_with_its_relation(con: lh.Connection, query: str) -> None:
    leases = con._server.service._leases  # type: ignore[attr-defined]
    kept = con.sql(query)
    for _ in range(10):
        con.sql(query).fetchall()
    gc.collect()
    con.table("shop.orders").scan().count()  # leases are ended with the next call
    assert len(leases._open) <= 3
    assert kept.fetchall()


def test_a_statement_is_told_of_the_tables_that_it_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: to list thousands would take several times as long as the statement."""
    with lh.connect(tmp_path) as con:
        for name in ("a.T", "a.other", "b.t", "T"):
            con.create_table(name, pa.schema([("k", pa.int64())]), primary_key="k").upsert([{"k": 1}])
        monkeypatch.setattr(MetadataStore, "paths", None)
        monkeypatch.setattr(MetadataStore, "tables", None)
        frames = {"f": pa.table({"k": [1]})}
        for text in (
            "select k from a.t",
            "select k from A.T where k = 1",
            "select k from t join b.t using (k) join f using (k) join a.other$changelog using (k)",
            "with x as (select k from b.T) select k from x",
        ):
            assert con.sql(text, frames=frames).fetchall() == con.sql(text, frames=frames).fetchall() == [(1,)]
        with pytest.raises(lh.InvalidRequestError, match="is a table of this connection"):
            con.sql("select 1", frames={"t": frames["f"]})
        for odd in ("\ud800", "a.b", "", 1):
            with pytest.raises(lh.InvalidRequestError, match="is not a name"):
                con.sql("select 1", frames={odd: frames["f"]})  # type: ignore[dict-item]
        monkeypatch.undo()
        assert con.sql("show tables").fetchall() == [("a.T",), ("a.other",), ("b.t",), ("default.T",)]
        with pytest.raises(lh.TableNotFoundError, match=r"did you mean a\.other"):
            con.sql("select k from a.othr").fetchall()
        many = " union all ".join(f"select k from a.no{n}" for n in range(1200))
        with pytest.raises(lh.TableNotFoundError):
            con.sql(f"select k from a.t union all {many}").fetchall()
