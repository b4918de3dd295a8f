"""What statements do beside reading."""

from __future__ import annotations

import pytest

from lakehead.api.table_names import spelt
from lakehead.errors import SqlError
from lakehead.spark.as_of import masked
from lakehead.spark.statements import NamedQuery, ShownTables, keeps_text, require_read


def check(query: str) -> None:
    require_read(masked(query), lambda name: spelt(name, ["shop.orders", "default.t"]), ["shop"])


@pytest.mark.parametrize(
    ("query", "remedy"),
    [
        ("insert into shop.orders select 1", "lhs.write"),
        ("INSERT OVERWRITE TABLE shop.orders\nselect 1", "lhs.write"),
        ("insert into t values (1)", "lhs.write"),
        ("/* a comment */ insert into `shop`.`orders` select 1", "lhs.write"),
        ("with a as (select 1) insert into shop.orders select * from a", "lhs.write"),
        ("from a insert overwrite table shop.orders select *", "lhs.write"),
        ("from a insert into b select * insert into shop.orders select *", "lhs.write"),
        ("explain insert into shop.orders select 1", "lhs.write"),
        ("with a as (select 1), b as (select ')') delete from shop.orders where id in (select * from a)", "operation="),
        ("  with a(x) as (select 1) update shop.orders set x = 1", "columns="),
        ("with `a b` as (select 1) merge into t using `a b` on true when matched then delete", "lhs.write"),
        ("merge into shop.orders using x on true when matched then delete", "lhs.write"),
        ("update shop.orders set a = 1", "columns="),
        ("delete from shop.orders where id = 1", "operation='delete'"),
        ("truncate table shop.orders", "truncate()"),
        ("drop table if exists shop.orders", "con.drop_table('shop.orders')"),
        ("drop table t", "con.drop_table('default.t')"),
        ("alter table shop.orders add column a int", "alter()"),
        ("cache table shop.orders", "lhs.table(spark, 'shop.orders').cache()"),
        ("uncache table if exists shop.orders", "cache()"),
        ("create table shop.new as select 1", "lhs.write"),
        ("create table SHOP.new as select 1", "lhs.write"),
        ("create or replace table if not exists shop.new (a int)", "lhs.write"),
        ("analyze table shop.orders compute statistics", "nothing"),
    ],
)
def test_what_changes_a_table_says_what_to_do(query: str, remedy: str) -> None:
    with pytest.raises(SqlError, match=r"lhs.sql reads") as caught:
        check(query)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        "select 'insert into shop.orders' from shop.orders",
        "insert into other.place select * from shop.orders",
        "create table elsewhere.copy using parquet as select * from shop.orders",
        "create table copy as select * from t",
        "drop table other.orders",
        "drop table",
        "delete from (select 1)",
        "with t as (select 1) select * from t",
        "describe shop.orders",
        "cache table c as select * from shop.orders",
        "create temp view v as select * from shop.orders",
        "update_of(1)",
        "select `insert into t` from shop.orders",
        "with a as (select 1) insert into elsewhere.copy select * from shop.orders",
        "from shop.orders insert into a select * insert overwrite b select *",
    ],
)
def test_what_does_not_is_let_pass(query: str) -> None:
    check(query)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("create temp view v as select 1", ("v", None, False, False, None)),
        ("CREATE OR REPLACE TEMPORARY VIEW `my v` (a, `b c`) AS select 1", ("my v", ("a", "b c"), True, False, None)),
        ("create global temp view v as with x as (select 1) select * from x", ("v", None, False, True, None)),
        ("cache table c select 1", ("c", None, False, False, True)),
        ("cache lazy table c options ('storageLevel' 'DISK_ONLY') as select 1", ("c", None, False, False, False)),
        ("create view v as select 1", None),
        ("cache table c", None),
        ("select 'create temp view v as select 1'", None),
    ],
)
def test_queries_that_get_a_name(query: str, found: tuple[object, ...] | None) -> None:
    named = NamedQuery.of(masked(query))
    if found is None or named is None:
        assert named is found is None
    else:
        assert (named.name, named.columns, named.replace, named.everywhere, named.cached) == found
        assert query[named.start :].split()[0] in ("select", "with")


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        ("create temp view v comment 'of (all) as' as select 1", None),
        ("create temp view v (a comment 'the id, (b)', `b c` , d) comment \"x\" as select 1, 2, 3", ("a", "b c", "d")),
        ("create temp view v(a,b) as select 1, 2", ("a", "b")),
    ],
)
def test_comments_are_no_names(query: str, columns: tuple[str, ...] | None) -> None:
    named = NamedQuery.of(masked(query))
    assert named is not None and (named.name, named.columns) == ("v", columns)
    assert query[named.start :].startswith(" select 1")


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("create or replace temporary function f() returns int return select 1", True),
        ("CREATE FUNCTION f as 'a.b'", True),
        ("create view v as select 1", True),
        ("set a.b = select 1 from shop.orders", True),
        ("set var a = (select 1)", False),
        ("set variable a = (select 1)", False),
        ("create table a using parquet as select 1", False),
        ("select 1 as set", False),
    ],
)
def test_what_spark_keeps_as_text(query: str, kept: bool) -> None:
    assert keeps_text(masked(query)) is kept


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("show tables in shop", ["a1", "B1", "c"]),
        (" SHOW TABLES FROM `shop` ; ", ["a1", "B1", "c"]),
        ("show tables in shop like 'b*'", ["B1"]),
        ("show tables in shop '*1'", ["a1", "B1"]),
        ("show tables in shop -- like 'a*'", ["a1", "B1", "c"]),
        ('show tables in shop /* not "c" */ like "A*|c" -- or so', ["a1", "c"]),
        ("show tables in shop like 'c' or 'b'", None),
        ('show tables in shop like "A*| c "', ["a1", "c"]),
        ("show tables in shop like '['", []),
        ("show tables", None),
        ("show tables in shop partition (x = 1)", None),
        ("select 1", None),
    ],
)
def test_tables_that_are_shown(query: str, found: list[str] | None) -> None:
    shown = ShownTables.of(query, masked(query))
    assert (shown and [name for name in ("a1", "B1", "c") if shown.has(name)]) == found
    assert shown is None or shown.database == "shop"
