"""ALTER TABLE through con.sql: DuckDB's grammar, names and types; what is refused changes nothing."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.alteration import TableAlteration
from lakehead.errors import ColumnNotFoundError, InvalidSchemaError, LakeheadError, TableNotFoundError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        pa.field("units", pa.int32(), False),
        ("price", pa.decimal128(8, 2)),
        ("Unit price", pa.float32()),
        ("tags", pa.list_(pa.string())),
    ]
)
ROW = {"id": 1, "units": 2, "price": None, "Unit price": 0.5, "tags": ["a"]}


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as connection:
        orders = connection.create_table("shop.orders", SCHEMA, primary_key=["id"], lake="iceberg")
        orders.upsert([ROW])
        connection.create_table("bare", SCHEMA).append([ROW])
        yield connection


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("sql") / "data") as connection:
        connection.create_table("shop.orders", SCHEMA, primary_key=["id"], lake="iceberg")
        yield connection


def changed(before: pa.Schema, column: str, f: pa.Field | None) -> pa.Schema:
    at = before.get_field_index(column)
    if at < 0:
        return before.append(f)
    return before.remove(at) if f is None else before.set(at, f)


PLACE = pa.struct(
    [("zip", pa.int32()), ("My town", pa.string()), ("at", pa.struct([("x", pa.float32()), ("y", pa.float32())]))]
)
NESTED = pa.schema(
    [
        ("place", PLACE),
        ("lines", pa.list_(pa.struct([("n", pa.int32()), ("note", pa.string())]))),
        ("named", pa.map_(pa.string(), pa.struct([("n", pa.int32()), ("m", pa.int32())]))),
    ]
)


@pytest.mark.parametrize(
    ("action", "same"),
    [
        ("add column place.country varchar", lambda a: a.add_column("place.country", pa.string())),
        (
            "add column if not exists place.at.z decimal(9, 2)",
            lambda a: a.add_column("place.at.z", pa.decimal128(9, 2)),
        ),
        ("add column lines.element.x int[]", lambda a: a.add_column("lines.element.x", pa.list_(pa.int32()))),
        ("add named.value.k bigint", lambda a: a.add_column("named.value.k", pa.int64())),
        ('rename column place."My town" to town', lambda a: a.rename_column("place.My town", "town")),
        ("rename place.at.x to east", lambda a: a.rename_column("place.at.x", "east")),
        ("drop column place.at", lambda a: a.drop_column("place.at")),
        ("drop lines.element.note", lambda a: a.drop_column("lines.element.note")),
        ("drop column if exists place.at.q", lambda a: None),
    ],
)
def test_fields_inside_columns(standing: lh.Connection, action: str, same: Callable[[TableAlteration], object]) -> None:
    for name in ("in_sql", "in_python"):
        standing.create_table(f"nested.{name}", NESTED)
    try:
        standing.sql(f"alter table nested.in_sql {action}")
        with standing.table("nested.in_python").alter() as a:
            same(a)
        assert standing.table("nested.in_sql").schema == standing.table("nested.in_python").schema
        for refused in ("add column place.more int default 5", "add column place.zip int", "rename place.zip to at"):
            with pytest.raises(lh.SqlError):
                standing.sql(f"alter table nested.in_sql {refused}")
        assert standing.table("nested.in_sql").schema == standing.table("nested.in_python").schema
    finally:
        for name in ("in_sql", "in_python"):
            standing.drop_table(f"nested.{name}")


@pytest.mark.parametrize(
    ("action", "column", "f"),
    [
        ("add column note varchar", "note", pa.field("note", pa.string())),
        ("ADD note TEXT;", "note", pa.field("note", pa.string())),
        ('add column if not exists "a ""note""" bigint', 'a "note"', pa.field('a "note"', pa.int64())),
        ("add seen timestamptz", "seen", pa.field("seen", pa.timestamp("us", "UTC"))),
        ("add day date", "day", pa.field("day", pa.date32())),
        ("add seen timestamp_s", "seen", pa.field("seen", pa.timestamp("s"))),
        ("add d decimal(20, 4)", "d", pa.field("d", pa.decimal128(20, 4))),
        ("add b blob /* ) */ -- ,", "b", pa.field("b", pa.binary())),
        ("add s struct(a int, b varchar[])", "s", pa.field("s", pa.struct([("a", pa.int32()), ("b", SCHEMA[4].type)]))),
        ("add m map(varchar, double)", "m", pa.field("m", pa.map_(pa.string(), pa.float64()))),
        ("rename column price to cost", "price", pa.field("cost", pa.decimal128(8, 2))),
        ("rename PRICE to Price", "price", pa.field("Price", pa.decimal128(8, 2))),
        ("drop column price", "price", None),
        ('drop if exists "unit price" cascade', "Unit price", None),
        ("alter column units type bigint", "units", pa.field("units", pa.int64(), False)),
        ("alter units set data type int8", "units", pa.field("units", pa.int64(), False)),
        ('alter "Unit price" type double', "Unit price", pa.field("Unit price", pa.float64())),
        ("alter price type decimal(12, 2)", "price", pa.field("price", pa.decimal128(12, 2))),
        ("alter column units drop not null", "units", pa.field("units", pa.int32())),
    ],
)
def test_each_form(con: lh.Connection, action: str, column: str, f: pa.Field | None) -> None:
    for name, path in {"shop.orders": "shop.orders", "bare": "default.bare"}.items():
        answer = con.sql(f"Alter Table {name} {action}")
        assert (answer.columns, answer.fetchall()) == (["Success"], [])
        table = con.table(path)
        assert table.schema == changed(SCHEMA, column, f)
        (row,) = table.scan().to_arrow().to_pylist()
        assert row == {now: ROW.get(was) for now, was in zip(table.schema.names, _old_names(column, f), strict=True)}


def _old_names(column: str, f: pa.Field | None) -> list[str]:
    names = SCHEMA.names
    if column not in names:
        return [*names, column]
    return names if f is not None else [n for n in names if n != column]


@pytest.mark.parametrize(
    "statement",
    [
        "alter table if exists shop.nothing add column x int",
        "alter table shop.orders add column if not exists Units bigint",
        "alter table shop.orders drop column if exists nothing",
        "alter table shop.orders alter units type integer",
        "alter table shop.orders alter price drop not null",
        "alter table shop.orders alter units set not null",
        "alter table shop.orders rename column price to price",
    ],
)
def test_what_holds_already_is_no_change(standing: lh.Connection, statement: str) -> None:
    assert standing.sql(statement).fetchall() == []
    assert standing.table("shop.orders").describe()["columns"][1:3] == [
        {"name": "units", "type": "int32", "nullable": False},
        {"name": "price", "type": "decimal128(8, 2)", "nullable": True},
    ]


def test_names_are_resolved_as_in_queries(con: lh.Connection) -> None:
    con.create_table("shop.Rows", SCHEMA)
    names = ("default.bare", '"default"."bare"', "BARE", "shop.rows", "Shop.ROWS", "only shop.orders")
    for n, name in enumerate(names):
        con.sql(f"alter table {name} add column c{n} int")
    assert [len(con.table(t).schema) for t in ("bare", "shop.Rows", "shop.orders")] == [8, 7, 6]
    con.sql("alter table shop.orders add column bare int")
    con.sql("alter table shop.orders rename bare to rows")
    assert con.sql("select rows from shop.orders").fetchall() == [(None,)]


def test_defaults(con: lh.Connection) -> None:
    given = {
        "int default 5": 5,
        "int default '7'": 7,
        "bool default true": True,
        "double default -1e3": -1000.0,
        "decimal(5, 2) default 1.5": Decimal("1.50"),
        "varchar default 'it''s'": "it's",
        "blob default '\\xAA'::blob": b"\xaa",
        "date default date '2024-01-31'": dt.date(2024, 1, 31),
        "time default '01:02:03'": dt.time(1, 2, 3),
        "timestamp default timestamp '2024-01-31 00:00:01'": dt.datetime(2024, 1, 31, 0, 0, 1),
        "timestamptz default '2024-01-31 00:00:01+01'": dt.datetime(2024, 1, 30, 23, 0, 1, tzinfo=dt.UTC),
        "varchar default null": None,
    }
    for n, (text, value) in enumerate(given.items()):
        assert con.sql(f"alter table shop.orders add column c{n} {text}").fetchall() == []
        assert con.sql(f"select c{n} from shop.orders").to_arrow_table()[f"c{n}"].to_pylist() == [value], text
    con.sql("alter table shop.orders add column if not exists c0 int default 6")
    con.sql("alter table shop.orders alter c0 type bigint")
    assert [c.get("default") for c in con.table("shop.orders").describe()["columns"][-12:]] == list(given.values())


def test_one_after_the_other(con: lh.Connection) -> None:
    con.tier("shop.orders")
    con.sql("alter table shop.orders add column note varchar")
    con.table("shop.orders").upsert([{**ROW, "note": "x"}, {**ROW, "id": 2, "note": "y"}])
    con.sql("alter table shop.orders rename column note to remark")
    con.tier("shop.orders")
    con.sql("alter table shop.orders drop column price")
    for name in ("shop.orders", "shop.orders$lake"):
        assert con.sql(f"select id, remark from {name} order by id").fetchall() == [(1, "x"), (2, "y")]


def test_statements_at_once_are_one_after_the_other(con: lh.Connection) -> None:
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda n: con.sql(f"alter table bare add column c{n} int"), range(6)))
        done = list(threads.map(lambda n: con.sql("alter table bare add column if not exists x int"), range(6)))
    assert [d.fetchall() for d in done] == [[]] * 6
    assert sorted(con.table("bare").schema.names) == sorted([*SCHEMA.names, *(f"c{n}" for n in range(6)), "x"])


@pytest.mark.parametrize(
    ("statement", "error", "match"),
    [
        ("alter table shop.orders drop column unit", ColumnNotFoundError, "no column 'unit'; did you mean 'units'"),
        ("alter table shop.orders rename prize to x", ColumnNotFoundError, "did you mean 'price'"),
        ("alter table shop.orders alter prize type double", ColumnNotFoundError, "did you mean 'price'"),
        ("alter table shop.orders alter prize drop not null", ColumnNotFoundError, "did you mean 'price'"),
        ("alter table shop.orderz add x int", TableNotFoundError, "did you mean shop.orders"),
        ("alter table orders add x int", TableNotFoundError, "Lakehead tables: shop.orders"),
        ("alter table other.shop.orders add x int", lh.SqlError, "other"),
        ("alter table shop.orders$lake add x int", lh.SqlError, "alter shop.orders, and it follows"),
        ("alter table shop.orders$lakes add x int", lh.SqlError, "no such suffix"),
        ("alter table shop.orders drop id", InvalidSchemaError, "primary key"),
        ("alter table shop.orders alter id drop not null", InvalidSchemaError, "primary key"),
        ("alter table shop.orders alter units type smallint", InvalidSchemaError, "cannot become int16"),
        ("alter table shop.orders alter tags type varchar", InvalidSchemaError, "cannot become string"),
        ("alter table shop.orders add __offset int", InvalidSchemaError, "reserved"),
        ("alter table shop.orders add x ubigint", InvalidSchemaError, r"use decimal128\(20, 0\)"),
        ("alter table shop.orders add x uuid", InvalidSchemaError, "UUID, which is not supported: use VARCHAR"),
        ("alter table shop.orders add x json", InvalidSchemaError, "use VARCHAR"),
        ("alter table shop.orders add x hugeint", InvalidSchemaError, r"use DECIMAL\(38,0\)"),
        ("alter table shop.orders add x enum('a')", InvalidSchemaError, "use VARCHAR"),
        ("alter table shop.orders add x struct(a bit)", InvalidSchemaError, "BIT"),
        ("alter table shop.orders add x variant", lh.SqlError, "VARIANT"),
        ("alter table shop.orders add x string_", lh.SqlError, "string_"),
        ("alter table shop.orders add UNITS int", lh.SqlError, "already exists"),
        ("alter table shop.orders rename price to units", lh.SqlError, "already exists"),
        ("alter table shop.orders add x int default (1 + 1)", lh.SqlError, r"to be a literal, not \(1 \+ 1\)"),
        ("alter table shop.orders add x timestamp default now()", lh.SqlError, r"to be a literal, not now\(\)"),
        ("alter table shop.orders add x int[] default [1]", lh.SqlError, "to be a literal"),
        ("alter table shop.orders add x int default 'one'", lh.SqlError, "the default of 'x' is no INTEGER"),
        ("alter table shop.orders add x tinyint default 300", lh.SqlError, "the default of 'x' is no TINYINT"),
        ("alter table shop.orders add x int default 1; select 1", lh.SqlError, "statements"),
        ("alter table shop.orders add x varchar collate nocase", lh.SqlError, "collations"),
        ("alter table shop.orders add x int not null", lh.SqlError, "constraints"),
        ("alter table shop.orders add x int, add y int", lh.SqlError, r"Only one ALTER[^$]*takes RENAME TO"),
        ("alter table shop.orders add primary key (id)", lh.SqlError, "constraints"),
        ("alter table shop.orders add primary key (units)", lh.SqlError, "constraints"),
        ("alter table shop.orders add constraint u unique (units)", lh.SqlError, "takes RENAME TO"),
        ("alter table shop.orders alter units set default 1", lh.SqlError, "when it is added, or never"),
        ("alter table shop.orders alter price set not null", lh.SqlError, "may be null in 'price'"),
        ("alter table shop.orders alter units type bigint using units * 2", lh.SqlError, "USING"),
        ("alter table shop.orders alter units set data type using 1", lh.SqlError, "USING"),
        ("alter table shop.orders rename to __sales", lh.InvalidRequestError, "not a table name"),
        ("alter table shop.orders set schema other", lh.SqlError, "takes RENAME TO"),
        ("alter table shop.orders set partitioned by (units)", lh.SqlError, "takes RENAME TO"),
        ("alter table shop.orders add column tags.x int", lh.SqlError, "only add fields to structs"),
        ("alter table shop.orders rename tags.x to y", lh.SqlError, "does not exist"),
        ("alter table shop.orders drop tags.x", lh.SqlError, 'Cannot drop field "x"'),
        ("alter table shop.orders add x int; alter table shop.orders add y int", lh.SqlError, "2 statements"),
        ("explain alter table shop.orders add x int", lh.SqlError, "by itself"),
        ("explain analyze alter table shop.orders add x int", lh.SqlError, "by itself"),
        ("alter view shop.orders rename to x", lh.SqlError, "ALTER TABLE, by itself"),
        ("comment on view shop.orders is 'x'", lh.SqlError, "COMMENT ON"),
        ("comment on column shop.orders.nothing is 'x'", lh.LakeheadError, "nothing"),
        ("comment on table shop.nothing is 'x'", TableNotFoundError, "nothing"),
        ("alter database memory set alias to y", lh.SqlError, "ALTER TABLE, by itself"),
        ("alter table", lh.SqlError, "syntax error"),
    ],
)
def test_what_is_refused_changes_nothing(
    standing: lh.Connection, statement: str, error: type[LakeheadError], match: str
) -> None:
    before = standing.table("shop.orders").describe()
    with pytest.raises(error, match=match) as refused:
        standing.sql(statement)
    assert "lakehead_" not in str(refused.value) and "as it was" not in str(refused.value)
    assert standing.table("shop.orders").describe() == before and standing.tables() == ["shop.orders"]


def test_values_are_not_for_definitions(standing: lh.Connection) -> None:
    with pytest.raises(lh.SqlError):
        standing.sql("alter table shop.orders add column x int default ?", params=[1])
    assert standing.table("shop.orders").schema == SCHEMA


def test_comments(con: lh.Connection) -> None:
    for name, path in {"shop.orders": "shop.orders", "bare": "default.bare"}.items():
        for statement in ("Table {} is 'what ''they'' bought'", "column {}.\"Unit price\" is '€';"):
            answer = con.sql("Comment On " + statement.format(name))
            assert (answer.columns, answer.fetchall()) == (["Success"], [])
        definition = con.table(path).describe()
        assert definition.get("comment") == "what 'they' bought"
        assert [c.get("comment") for c in definition["columns"]] == [None, None, None, "€", None]
        con.sql(f'comment on column {name}."unit PRICE" is null')
        con.sql(f"comment on table {name} is null")
        assert (
            con.table(path).describe().get("comment") is con.table(path).describe()["columns"][3].get("comment") is None
        )
