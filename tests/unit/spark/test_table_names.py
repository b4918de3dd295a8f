"""Table names in Spark SQL: what is Lakehead's, what is not, and what keeps its alias."""

from __future__ import annotations

import pytest

from lakehead.spark.aliases import alias_for
from lakehead.spark.identifiers import with_identifiers
from lakehead.spark.table_names import find_spark_tables

TABLES = ["shop.orders", "shop.users", "default.bare"]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("select * from shop.orders", ["shop.orders"]),
        ("select * from shop.orders$lake", ["shop.orders$lake"]),
        ("select * from shop.orders$lake$snapshots s", ["shop.orders$lake$snapshots"]),
        ("select * from `shop`.`orders` o join shop.users u on o.id = u.id", ["shop.orders", "shop.users"]),
        ("select 'from shop.orders$lake', \"from shop.users$lake\" from x", []),
        ("select 'it\\'s' from shop.orders -- from shop.users", ["shop.orders"]),
        ("select * from spark_view", []),
        ("select * from bare", ["default.bare"]),
        ("with bare as (select 1) select * from bare", []),
        ("with t as (select * from shop.orders) select * from t", ["shop.orders"]),
        ("select * from (select * from shop.orders), shop.users", ["shop.orders", "shop.users"]),
        ("select * from SHOP.Orders o, BARE, shop.ORDERS$Lake", ["shop.orders", "default.bare", "shop.orders$Lake"]),
        ("describe extended shop.orders", ["shop.orders"]),
        ("select `it's`, `a--b`, `c/*d` from shop.orders where `it's` = 'from shop.users'", ["shop.orders"]),
        # What a statement defines is its own from there on, in the query that defines it.
        ("(with bare as (select 1) select * from bare)", []),
        ("select * from (with bare as (select 1) select * from bare) a, bare", ["default.bare"]),
        ("select * from bare where x in (with BARE(x) as (select 1) select x from Bare)", ["default.bare"]),
        ("create table q using parquet as with bare as (select 1) select * from bare", []),
        ("with a as (select * from bare), bare as (select 2) select * from a, bare", ["default.bare"]),
        ("with bare as (select ')' x from bare) select * from bare", ["default.bare"]),
        ("with recursive bare as (select 1 union all select x from bare) select * from bare", []),
        ("with `bare` as (select `)` from shop.users), b as (select * from bare) select * from b", ["shop.users"]),
        ("with a as (with bare as (select 1) select * from bare) select * from a, bare", ["default.bare"]),
        ("select x from bare group by x with rollup", ["default.bare"]),
        ("with bare as (select 1", []),
        # What follows a list of tables, and a pipe, names columns; a parameter's name is no word of the statement's.
        ("select x from shop.orders sort by x, bare", ["shop.orders"]),
        ("select x from shop.orders distribute by x, bare cluster by bare, bare", ["shop.orders"]),
        ("select 1 from shop.orders lateral view posexplode(x) e as pos, bare", ["shop.orders"]),
        ("from shop.orders |> extend x + 1 as y, bare as z |> drop x, bare |> set x = 1, bare = 2", ["shop.orders"]),
        ("from shop.orders, bare |> join shop.users using (id)", ["shop.orders", "default.bare", "shop.users"]),
        ("select :from, bare from shop.orders where x = :join and bare::table, bare", ["shop.orders"]),
        (r"select r'\' as s, 'from shop.users' from shop.orders where x like '%'", ["shop.orders"]),
        (r'select R"\" as s from shop.orders where x = 1 or"it\"s from shop.users" = x', ["shop.orders"]),
    ],
)
def test_find(query: str, names: list[str]) -> None:
    found = find_spark_tables(query, TABLES)
    assert [full for _, full in found] == names
    assert all(query[n.start : n.end] == n.text for n, _ in found)


@pytest.mark.parametrize(
    ("query", "plain"),
    [
        ("select * from identifier('shop.orders') o", "select * from shop.orders  o"),
        ('select * from IDENTIFIER ( "Shop.Orders$lake" )o', "select * from Shop.Orders$lake o"),
        ("select identifier('id') from identifier(:t)", "select identifier('id') from shop.users "),
        ("select * from identifier(:unknown)", None),
        ("select * from identifier(:other) where x = 'identifier(''bare'')'", None),
        ("select * from identifier('shop.' || lower(:t)), x", "select * from shop.users , x"),
        ("select * from identifier(?), identifier('other.t'), identifier('shop.' || lower(:t)", None),
        ("select * from identifier('shop.orders o, x') -- identifier('shop.orders')", None),
    ],
)
def test_tables_that_are_named_by_text(query: str, plain: str | None) -> None:
    literals = ["shop.orders", "Shop.Orders$lake", "id", "bare", "other.t", "shop.orders o, x"]
    texts = {f"'{text}'": text for text in literals} | {f'"{text}"': text for text in literals}
    texts |= {":t": "shop.users", "'shop.' || lower(:t)": "shop.users"}
    assert with_identifiers(query, TABLES, lambda e: texts.get(e.strip())) == (query if plain is None else plain)


def test_names_that_differ_but_for_case_are_said_exactly() -> None:
    tables = ["shop.orders", "shop.Orders"]
    assert [full for _, full in find_spark_tables("select * from shop.Orders, shop.orders", tables)] == tables[::-1]
    assert find_spark_tables("select * from SHOP.ORDERS", tables) == []


@pytest.mark.parametrize(
    ("query", "alias"),
    [
        ("select orders.id from shop.orders", " as `orders`"),
        ("select orders.id from shop.orders where id > 3", " as `orders`"),
        ("select o.id from shop.orders o", ""),
        ("select o.id from shop.orders as o", ""),
        ("select * from shop.orders left join x on true", " as `orders`"),
        ("select * from shop.orders$lake", " as `orders$lake`"),
        ("describe shop.orders", ""),
        ("describe formatted shop.orders", ""),
    ],
)
def test_alias(query: str, alias: str) -> None:
    ((name, _),) = find_spark_tables(query, TABLES)
    assert alias_for(query, name) == alias
