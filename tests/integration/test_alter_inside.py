"""Fields inside columns that change: of structs, of what lists hold, of the values of maps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.expressions import In

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.errors import ColumnNotFoundError, InvalidSchemaError

STRICT = pa.struct([pa.field("s", pa.int32(), False)])
SCHEMA = pa.schema(
    [
        pa.field("k", pa.int64(), False),
        ("place", pa.struct([("zip", pa.int32()), ("town", pa.string())])),
        ("lines", pa.list_(pa.struct([("n", pa.int8()), ("note", pa.string())]))),
        ("rates", pa.map_(pa.string(), pa.struct([("v", pa.float32())]))),
        ("sizes", pa.large_list(pa.int32())),
        ("deep", pa.struct([pa.field("r", STRICT, False)])),
    ]
)


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


@pytest.fixture(params=["log", "keyed"])
def table(request: pytest.FixtureRequest, con: lh.Connection) -> lh.Table:
    key = ["k"] if request.param == "keyed" else None
    return con.create_table("t", SCHEMA, primary_key=key, lake="iceberg", buckets=2)


def put(table: lh.Table, rows: Any) -> None:
    (table.upsert if table.primary_key else table.append)(rows)


def rows_of(table: lh.Table, **scan: Any) -> list[dict[str, Any]]:
    found = table.scan(**scan).to_arrow()
    found.validate(full=True)
    return found.sort_by("k").to_pylist()


def old(k: int) -> dict[str, Any]:
    if k % 4 == 3:
        return {**dict.fromkeys(SCHEMA.names), "k": k}
    return {
        "k": k,
        "place": {"zip": k, "town": f"t{k}"},
        "lines": [{"n": k, "note": "x"}, None][: k % 3],
        "rates": [("a", {"v": k / 2})],
        "sizes": [k, None],
        "deep": {"r": {"s": k}},
    }


def new(k: int) -> dict[str, Any]:
    """An old row after `change`."""
    row = old(k)
    if row["place"] is not None:
        row["place"] = {"zip": k, "country": None, "city": f"t{k}", "town": None}
        row["lines"] = [line and {"n": line["n"], "tags": None} for line in row["lines"]]
        row["deep"] = {"r": {"s": k, "t": None}}
    return row


LATE = {
    "k": 20,
    "place": {"zip": 1 << 40, "country": "NO", "city": "Oslo", "town": True},
    "lines": [{"n": 1000, "tags": ["a"]}],
    "rates": [("b", {"v": 0.1})],
    "sizes": [1 << 40],
    "deep": {"r": {"s": None, "t": "t"}},
}


def change(table: lh.Table) -> None:
    with table.alter() as a:
        a.add_column("place.country", pa.string(), after="place.zip").rename_column("place.town", "city")
        a.widen_column("place.zip", pa.int64()).add_column("place.town", pa.bool_())
        a.add_column("lines.element.tags", pa.list_(pa.string())).drop_column("lines.element.note")
        a.widen_column("lines.element.n", pa.int32()).widen_column("rates.value.v", pa.float64())
        a.widen_column("sizes.element", pa.int64())
        a.add_column("deep.r.t", pa.string()).make_nullable("deep.r.s")


def test_rows_follow_in_every_tier(tmp_path: Path, con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(k) for k in range(6)])
    con.tier("t")
    put(table, [old(k) for k in range(6, 12)])
    behind = con.table("t")
    desc, pinned = handle_of(behind).desc, behind.scan()
    change(table)
    wanted = [new(k) for k in range(12)]
    assert rows_of(table) == wanted
    put(table, [LATE])
    kind = "upsert" if table.primary_key else "append"
    handle_of(behind).writers.write(kind, pa.Table.from_pylist([old(13)], desc.schema))
    wanted += [new(13), LATE]
    for _ in range(2):
        assert rows_of(table) == wanted
        assert rows_of(table, where="place.zip > 8 and place.city is not null") == [*wanted[9:11], *wanted[-2:]]
        asked = "select sum(place.zip), count(place.country), sum(sizes[1]), count(lines[1].n) from t"
        (found,) = con.sql(asked).fetchall()
        known = [r for r in wanted if r["place"]]
        zips = sum(r["place"]["zip"] for r in known)
        assert found == (zips, 1, zips, sum(bool(r["lines"]) for r in known))
        if table.primary_key:
            assert table.lookup([3, 4, 20]).to_pylist() == [wanted[3], wanted[4], LATE]
        con.tier("t")
    assert [r["k"] for r in pinned.to_arrow().sort_by("k").to_pylist()] == list(range(12))
    # PyIceberg reads null lists whose items changed as empty ones.
    lake = table.lake.iceberg().scan(In("k", [r["k"] for r in known])).to_arrow().sort_by("k")
    assert lake.select(table.schema.names).to_pylist() == known, "other engines see the same"
    assert table.lake.iceberg().schema().find_type("place.country").__class__.__name__ == "StringType"
    table.lake.compact()
    assert rows_of(table) == wanted == rows_of(table, tier="lake")
    con.close()
    with lh.connect(tmp_path / "data") as again:
        assert rows_of(again.table("t")) == wanted


def test_a_name_that_comes_again_is_another_field(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(0)])
    con.tier("t")
    put(table, [old(1)])
    for _ in range(2):
        with table.alter() as a:
            a.drop_column("place.town").add_column("place.town", pa.string())
    assert [r["place"] for r in rows_of(table)] == [{"zip": k, "town": None} for k in (0, 1)]
    put(table, [{**old(2), "place": {"zip": 2, "town": "again"}}])
    con.tier("t")
    assert [r["place"]["town"] for r in rows_of(table)] == [None, None, "again"]


def test_a_struct_that_gets_other_fields_only(con: lh.Connection, table: lh.Table) -> None:
    put(table, [old(k) for k in range(4)])
    con.tier("t")
    with table.alter() as a:
        a.add_column("rates.value.w", pa.int64()).drop_column("rates.value.v")
        a.add_column("place.x", pa.int64()).drop_column("place.zip").drop_column("place.town")
    wanted = [None if k == 3 else {"x": None} for k in range(4)]
    assert [r["place"] for r in rows_of(table)] == wanted, "null is one thing, a struct of nulls another"
    assert [r["rates"] for r in rows_of(table)] == [None if k == 3 else [("a", {"w": None})] for k in range(4)]


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (lambda a: a.add_column("place.zip", pa.int64()), InvalidSchemaError, "two columns named 'place.zip'"),
        (lambda a: a.add_column("place.Zip", pa.int64()), InvalidSchemaError, "equal but for case"),
        (lambda a: a.add_column("k.x", pa.int64()), InvalidSchemaError, "'k' is int64, which has no such field"),
        (lambda a: a.add_column("lines.x", pa.int64()), InvalidSchemaError, "of lists to 'name.element'"),
        (lambda a: a.add_column("rates.x", pa.int64()), InvalidSchemaError, "of maps to 'name.value'"),
        (lambda a: a.add_column("place.x.y", pa.int64()), InvalidSchemaError, "which has no such field"),
        (lambda a: a.add_column("place.x", pa.int64(), default=5), InvalidSchemaError, "only whole columns have"),
        (lambda a: a.add_column("place.x", pa.int64(), after="k"), InvalidSchemaError, "in another struct"),
        (lambda a: a.add_column("place.x", pa.int64(), after="zip"), ColumnNotFoundError, "no column 'zip'"),
        (lambda a: a.add_column("x", pa.int64(), after="place.zip"), InvalidSchemaError, "in another struct"),
        (lambda a: a.rename_column("place.zip", "town"), InvalidSchemaError, "two columns named 'place.town'"),
        (lambda a: a.rename_column("place.zip", "place.x"), InvalidSchemaError, "the field's new name alone"),
        (lambda a: a.rename_column("sizes.element", "x"), InvalidSchemaError, "what a list or map holds"),
        (lambda a: a.rename_column("place.zap", "x"), ColumnNotFoundError, "did you mean 'place.zip'"),
        (lambda a: a.drop_column("sizes.element"), InvalidSchemaError, "what a list or map holds"),
        (lambda a: a.drop_column("rates.value.v"), InvalidSchemaError, "the only field of its struct"),
        (lambda a: a.drop_column("rates.key"), InvalidSchemaError, "the key of a map"),
        (lambda a: a.widen_column("place.zip", pa.int16()), InvalidSchemaError, "cannot become"),
        (lambda a: a.widen_column("place", SCHEMA.field("deep").type), InvalidSchemaError, "cannot become"),
        (lambda a: a.make_nullable("rates.key"), InvalidSchemaError, "the key of a map"),
        (lambda a: a.set_comment("place.zip", "x"), InvalidSchemaError, "comments are of whole columns"),
    ],
)
def test_what_is_not_possible_is_refused_whole(con: lh.Connection, bad: Any, error: type, match: str) -> None:
    table = con.create_table("t", SCHEMA)
    before = table.describe()
    with pytest.raises(error, match=match), table.alter() as a:
        a.add_column("fine", pa.int64()).add_column("place.fine", pa.int64())
        bad(a)
    assert con.table("t").describe() == before


def test_names_with_points_are_still_names(con: lh.Connection) -> None:
    table = con.create_table("t", pa.schema([("k", pa.int64()), ("a.b", pa.struct([("c", pa.int32())]))]))
    table.append([{"k": 1, "a.b": {"c": 2}}])
    with table.alter() as a:
        a.add_column("x.y", pa.int64()).add_column("a.b.d", pa.int64()).widen_column("a.b.c", pa.int64())
        a.rename_column("a.b", "b.a")
    with table.alter() as a:
        a.rename_column("b.a.c", "e")
    assert rows_of(table) == [{"k": 1, "b.a": {"e": 2, "d": None}, "x.y": None}]
