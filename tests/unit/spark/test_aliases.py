"""What unnamed tables are called, so that their columns are theirs alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lakehead.api.table_names import find_names, replace_names
from lakehead.errors import SqlError
from lakehead.spark.aliases import Unnamed, alias_for, alias_place
from lakehead.spark.table_names import find_spark_tables

TABLES = ["shop.orders", "hist.orders", "shop.users", "default.orders"]


def renamed(query: str) -> str:
    """The statement with ``t`` for each table."""
    tables = [name for name, _ in find_spark_tables(query, TABLES)]
    unnamed = [name for name in tables if alias_for(query, name)]
    names = Unnamed(query, unnamed)
    at = {n: replace(n, start=alias_place(query, n), end=alias_place(query, n)) for n in unnamed}
    mapping = dict.fromkeys(tables, "t") | {at[n]: f" {names.called(n)}" for n in unnamed}
    mapping |= {n: found for n in find_names(query) if n not in mapping and (found := names.column(n))}
    return replace_names(query, mapping)


@pytest.mark.parametrize(
    ("query", "becomes"),
    [
        ("select orders.id from shop.orders", "select orders.id from t `orders`"),
        ("select `z`.id from shop.orders`z`where`z`.id = 1", "select `z`.id from t`z`where`z`.id = 1"),
        ("select z.id from `shop`.`orders`z where z.id = 1", "select z.id from t z where z.id = 1"),
        ("select z.id from shop.orders as`z`", "select z.id from t as`z`"),
        ("select shop.orders.id from Shop.Orders", "select `orders`.`id` from t `orders`"),
        (
            "select orders from shop.orders where shop.orders.a = 1",
            "select orders from t `orders` where `orders`.`a` = 1",
        ),
        ("select orders.a from shop.orders, hist.orders o", "select orders.a from t `orders`, t o"),
        (
            "select shop.orders.a, hist.orders.* from shop.orders, hist.orders",
            "select `shop.orders`.`a`, `hist.orders`.* from t `shop.orders`, t `hist.orders`",
        ),
        (
            "select id from shop.orders where exists (select 1 from hist.orders where hist.orders.id = shop.orders.id)",
            "select id from t `shop.orders` where exists (select 1 from t `hist.orders` where `hist.orders`.`id`"
            " = `shop.orders`.`id`)",
        ),
        (
            "select shop.orders.id from shop.orders where exists (select id from hist.orders as orders)",
            "select `shop.orders`.`id` from t `shop.orders` where exists (select id from t as orders)",
        ),
        (
            "with a as (select 1 x) select shop.orders.id from shop.orders, (select 1 y) orders",
            "with a as (select 1 x) select `shop.orders`.`id` from t `shop.orders`, (select 1 y) orders",
        ),
        (
            "select orders.id from shop.orders tablesample (9 percent)",
            "select orders.id from t tablesample (9 percent) `orders`",
        ),
        (
            "from shop.orders TABLESAMPLE(bucket 1 out of (2)) repeatable (3), x",
            "from t TABLESAMPLE(bucket 1 out of (2)) repeatable (3) `orders`, x",
        ),
        ("select o.id from shop.orders tablesample (9 rows) o", "select o.id from t tablesample (9 rows) o"),
        ("select orders.a from shop.orders join hist.orders", "select orders.a from t `orders` join t `orders`"),
        (
            "select shop.users.id from shop.users, shop.orders, hist.orders",
            "select `users`.`id` from t `users`, t `orders`, t `orders`",
        ),
    ],
)
def test_a_column_is_of_the_table_that_it_is_named_with(query: str, becomes: str) -> None:
    assert renamed(query) == becomes


@pytest.mark.parametrize(
    "query",
    [
        "select id from shop.orders where exists (select 1 from hist.orders orders where orders.id = shop.orders.id)",
        "select id from hist.orders where exists (select 1 from shop.orders where orders.x = 1 and shop.orders.id = 2)",
        "select shop.orders.id from shop.orders, orders where orders.x = 1",
        "with orders as (select 1) select orders.*, shop.orders.id from shop.orders, orders",
    ],
)
def test_a_column_that_may_be_of_two_things_is_refused(query: str) -> None:
    with pytest.raises(SqlError, match=r"give (shop|hist|default)\.orders another one"):
        renamed(query)
