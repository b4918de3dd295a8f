from __future__ import annotations

import pytest

from lakehead.api.table_names import find_names, find_tables, replace_names

TABLES = ["shop.orders", "shop.users", "default.flat"]

CASES = [
    ("select * from shop.orders", ["shop.orders"]),
    ("SELECT * FROM shop.orders o JOIN shop.users u ON o.id = u.id", ["shop.orders", "shop.users"]),
    ("select orders.id from shop.orders, shop.users where orders.id = users.id", ["shop.orders", "shop.users"]),
    ("select * from flat", ["flat"]),
    ("select flat from shop.users", ["shop.users"]),
    ("select * from shop.orders$lake", ["shop.orders$lake"]),
    ("select * from shop.orders$lake$snapshots order by 1", ["shop.orders$lake$snapshots"]),
    ('select * from "shop"."orders$changelog"', ['"shop"."orders$changelog"']),
    ('select * from shop."orders"', ['shop."orders"']),
    ("select * from `shop`.`orders`$lake", ["`shop`.`orders`$lake"]),
    ("select 'from shop.orders' from shop.users -- from shop.orders", ["shop.users"]),
    ("select /* from shop.orders */ 1 from shop.users", ["shop.users"]),
    ("select $$from shop.orders$$ from shop.users", ["shop.users"]),
    ("select * from (select * from shop.orders) x, shop.users", ["shop.orders", "shop.users"]),
    ("with t as (select * from shop.orders) select * from t", ["shop.orders"]),
    ("select extract(year from ts) from shop.orders", ["shop.orders"]),
    ("select extract(year from flat) from shop.orders", ["shop.orders"]),
    ("select trim(both 'x' from flat), f(1, flat) from shop.orders, flat", ["shop.orders", "flat"]),
    ("select substring(flat from (select 2 from flat)) from shop.orders", ["flat", "shop.orders"]),
    ("select 1 from shop.orders where flat is distinct from flat or flat is not distinct from flat", ["shop.orders"]),
    ("select distinct x from flat", ["flat"]),
    ("desc flat", ["flat"]),
    ("select x from shop.orders order by x desc, flat desc", ["shop.orders"]),
    ("show columns in flat", ["flat"]),
    ("show columns from flat", ["flat"]),
    ("select * from unknown.table", []),
    ("select * from shop.orders where id in (select id from shop.users)", ["shop.orders", "shop.users"]),
    ("select count(*) from shop.orders union all select count(*) from shop.users", ["shop.orders", "shop.users"]),
    ("select 1.5e3, 'it''s' from shop.orders", ["shop.orders"]),
]


@pytest.mark.parametrize(("sql", "want"), CASES, ids=[sql for sql, _ in CASES])
def test_tables_are_found_where_tables_stand(sql: str, want: list[str]) -> None:
    assert [n.text for n in find_tables(sql, TABLES)] == want


def test_suffix_and_path_are_told_apart() -> None:
    (name,) = find_tables("select * from shop.orders$lake$snapshots", TABLES)
    assert (name.path, name.suffix) == (("shop", "orders"), "lake$snapshots")
    (name,) = find_tables('select * from "shop"."orders$lake"', TABLES)
    assert (name.path, name.suffix) == (("shop", "orders"), "lake")


def test_replacing_keeps_everything_else() -> None:
    sql = "select o.x from shop.orders$lake o join shop.users u using (id) -- shop.users"
    names = find_tables(sql, TABLES)
    assert (
        replace_names(sql, dict(zip(names, ("a", "b"), strict=True)))
        == "select o.x from a o join b u using (id) -- shop.users"
    )


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("", []),
        ("'open", ["open"]),
        ('"open', ["open"]),
        ("$", []),
        ("select $1", ["select"]),
        ("/* open", ["open"]),
        ("a.b.c.d$e$f", ["a.b.c.d$e$f"]),
        ("\x00", []),
    ],
)
def test_odd_text_does_not_fail(sql: str, names: list[str]) -> None:
    assert [n.text for n in find_names(sql)] == names
