"""Columns with defaults: rows of before, whoever wrote them and wherever they are, and rows that do not say them."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.types import IntegerType

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.errors import LakeStateError
from lakehead.server.endpoint import LocalEndpoint

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("b", pa.string())])
PRICE = Decimal("1.50")


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


def made(con: lh.Connection, keyed: bool, lake: str | None = "iceberg", **properties: Any) -> lh.Table:
    key = ["k"] if keyed else None
    return con.create_table("t", SCHEMA, primary_key=key, lake=lake, buckets=2, **properties)


def put(table: lh.Table, rows: Any) -> None:
    (table.upsert if table.primary_key else table.append)(rows)


def fill(table: lh.Table, start: int, end: int) -> None:
    put(table, [{"k": k, "b": f"b{k}"} for k in range(start, end)])


def change(table: lh.Table) -> None:
    with table.alter() as a:
        a.add_column("n", pa.int32(), default=5, after="k").add_column("price", pa.decimal128(5, 2), default=PRICE)


def row(k: int, **more: Any) -> dict[str, Any]:
    return {"k": k, "n": 5, "b": f"b{k}", "price": PRICE, **more}


def rows_of(table: lh.Table, **scan: Any) -> list[dict[str, Any]]:
    return sorted(table.scan(**scan).to_arrow().to_pylist(), key=lambda r: r["k"])


def maintain(con: lh.Connection) -> None:
    """Take checkpoints and trim what they allow."""
    assert isinstance(con._server, LocalEndpoint)
    con._server.service.maintain()


@pytest.mark.parametrize("lake", [None, "iceberg"])
def test_every_tier_has_them(tmp_path: Path, keyed: bool, lake: str | None) -> None:
    with lh.connect(tmp_path / "data") as con:
        table = made(con, keyed, lake, hot_retention="0s")
        fill(table, 0, 100)
        if lake:
            con.tier("t")
        maintain(con)
        fill(table, 100, 300)
        change(table)
        wanted = [row(k) for k in range(300)]
        put(table, [row(300, n=None), row(301, n=7)])
        wanted += [row(300, n=None), row(301, n=7)]
        assert rows_of(table) == wanted
        feed = table.subscribe("full" if keyed else "earliest", stop="now")
        pushed = [{c: r[c] for c in table.schema.names} for b in feed for r in b.rows.to_pylist()]
        assert sorted(pushed, key=lambda r: r["k"]) == wanted
    with lh.connect(tmp_path / "data") as con:
        table = con.table("t")
        for _ in range(2):
            assert rows_of(table) == wanted
            for where, found in {
                "n = 5": 300,
                "n > 5": 1,
                "n < 5": 0,
                "n is null": 1,
                "n is not null": 301,
                "n in (4, 6)": 0,
                "price = 1.5 and k < 150": 150,
                "price <> 1.5": 0,
            }.items():
                assert table.scan(where=where).count() == found == len(rows_of(table, where=where)), where
            asked = "select count(*), count(n), sum(n), sum(price) from t where price > 1 and n >= 5"
            assert con.sql(asked).fetchall() == [(301, 301, 1507, Decimal("451.50"))]
            if keyed:
                assert table.get(0) == row(0) and table.lookup([150, 300]).to_pylist() == [row(150), row(300, n=None)]
            if lake:
                con.tier("t")
            maintain(con)


def test_what_a_write_does_not_say(con: lh.Connection, keyed: bool) -> None:
    table = made(con, keyed)
    fill(table, 0, 3)
    old = con.table("t")
    change(table)
    desc = handle_of(old).desc
    if not keyed:
        table.append([{"k": 3, "b": "b3"}, {"k": 4, "b": "b4", "n": None}])
        table.append(pa.table({"k": [5], "b": ["b5"], "price": pa.array([None], pa.null())}))
        table.append(
            [pa.table({"k": [6], "b": ["b6"]}), pa.table({"k": [7], "b": ["b7"], "n": pa.array([8], pa.int8())})]
        )
        old.append({"k": 8, "b": "b8"})
        handle_of(old).writers.write("append", pa.table({"k": [9], "b": ["b9"]}, desc.schema))
        wanted = [row(k) for k in range(10)]
        wanted[4]["n"] = wanted[5]["price"] = None
        wanted[7]["n"] = 8
    else:
        table.upsert([{"k": 0, "n": None}, {"k": 1, "n": 6}])
        table.upsert([{"k": 3, "b": "x"}, {"k": 3, "b": "b3"}])
        table.upsert([{"k": 0, "b": "b0"}])
        table.upsert([{"k": 4, "price": None, "b": "b4"}])
        old.upsert([{"k": 1, "b": "b1"}, {"k": 5, "b": "b5"}])
        handle_of(old).writers.write("upsert", pa.table({"k": [0, 6], "b": ["b0", "b6"]}, desc.schema))
        table.upsert([{"k": 2, "n": 9}])
        table.delete([2])
        table.upsert([{"k": 2, "b": "b2"}])
        wanted = [row(0, n=None), row(1, n=6), row(2), row(3), row(4, price=None), row(5), row(6)]
    assert rows_of(table) == wanted
    con.tier("t")
    assert rows_of(table) == wanted == rows_of(table, tier="lake")


def test_the_lake_has_them_once_it_is_compacted(con: lh.Connection, keyed: bool) -> None:
    table = made(con, keyed)
    for n in range(8):
        fill(table, 10 * n, 10 * n + 10)
        con.tier("t")
    change(table)
    fill(table, 80, 90)
    con.tier("t")
    assert rows_of(table, tier="lake") == [row(k) for k in range(90)]
    other = table.lake.iceberg().scan().to_arrow()
    assert other["n"].null_count == 80, "files of Iceberg's version 2 cannot say what they lack"
    table.lake.compact()
    other = table.lake.iceberg().scan().to_arrow().sort_by("k")
    assert other.select(table.schema.names).to_pylist() == rows_of(table, tier="lake") == [row(k) for k in range(90)]


def test_a_name_that_comes_again_has_another_default(con: lh.Connection, keyed: bool) -> None:
    table = made(con, keyed)
    fill(table, 0, 5)
    con.tier("t")
    change(table)
    put(table, [row(5, n=6)])
    with table.alter() as a:
        a.widen_column("n", pa.int64()).rename_column("n", "m").add_column("n", pa.string(), default="é")
    with table.alter() as a:
        a.drop_column("price").add_column("price", pa.float64(), default=0.5)
    assert [c.get("default") for c in table.describe()["columns"]] == [None, 5, None, "é", 0.5]
    with table.alter() as a:
        a.drop_column("price").add_column("price", pa.float64())
    wanted = [{"k": k, "m": 6 if k == 5 else 5, "b": f"b{k}", "n": "é", "price": None} for k in range(6)]
    for _ in range(2):
        assert rows_of(table) == wanted and rows_of(table, where="m = 5 and price is null") == wanted[:5]
        con.tier("t")


def test_old_offsets_are_read_again(con: lh.Connection, keyed: bool) -> None:
    table = made(con, keyed, None)
    fill(table, 0, 100)
    change(table)
    for where, found in {None: 100, "n = 5": 100, "n = 6": 0, "price > 1": 100}.items():
        pushed = [b.rows for b in table.subscribe("earliest", where=where, stop="now")]
        assert sum(b.num_rows for b in pushed) == found, where
    only = pa.Table.from_batches(b.rows for b in table.subscribe("earliest", columns=["n"], stop="now"))
    assert only["n"].to_pylist() == [5] * 100


def test_a_copy_has_the_same_defaults(con: lh.Connection, keyed: bool) -> None:
    table = made(con, keyed)
    fill(table, 0, 3)
    change(table)
    with table.alter() as a:
        a.set_comment("n", "how many").widen_column("n", pa.int64())
    copy = con.copy_table("t", "other").table
    put(copy, [{"k": 3, "b": "b3"}])
    assert rows_of(copy) == [row(k) for k in range(4)]
    assert copy.describe()["columns"] == table.describe()["columns"]


def test_a_column_that_another_engine_has_added_is_in_the_way(con: lh.Connection) -> None:
    table = made(con, keyed=False)
    fill(table, 0, 3)
    con.tier("t")
    with table.lake.iceberg().update_schema() as change_schema:
        change_schema.add_column("n", IntegerType())
    fill(table, 3, 5)
    con.tier("t")  # into a file where it is null
    with pytest.raises(LakeStateError, match="without a default"), table.alter() as a:
        a.add_column("n", pa.int32(), default=5)
    with table.alter() as a:
        a.add_column("n", pa.int32())
    assert [r["n"] for r in rows_of(table)] == [None] * 5


def test_files_without_field_ids(con: lh.Connection, tmp_path: Path) -> None:
    """Another engine may bring some: they go by names."""
    table = made(con, keyed=False)
    fill(table, 0, 2)
    con.tier("t")
    path = str(tmp_path / "data" / "lake" / "bare.parquet")
    bare = pa.schema([*SCHEMA, ("__bucket", pa.int32())])
    pq.write_table(pa.table({"k": [2], "b": ["b2"], "__bucket": [0]}, bare), path)
    lake = table.lake.iceberg()
    with lake.transaction() as change_lake:
        mapping = create_mapping_from_schema(lake.schema()).model_dump_json()
        change_lake.set_properties({"schema.name-mapping.default": mapping})
    lake.add_files([path])
    change(table)
    assert rows_of(table, tier="lake") == [row(k) for k in range(3)]
    assert rows_of(table, tier="lake", columns=["k", "b"]) == [{"k": k, "b": f"b{k}"} for k in range(3)]
