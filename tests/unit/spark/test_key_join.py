"""A lookup join tells what became of its table between two batches of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.errors import SchemaChangedError

pytest.importorskip("pyspark")

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int32()), ("w", pa.int32())])
KEYS = pa.RecordBatch.from_pylist([{"k": 1}, {"k": 2}], pa.schema([("k", pa.int64())]))


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        con.create_table("a.b", SCHEMA, primary_key="k").upsert([{"k": 1, "v": 10, "w": 0}])
        yield con


def joined(con: lh.Connection, stale_ms: int, change: Callable[[], object]) -> list[list[int | None]]:
    """What a task makes of two batches, with a change before the second."""
    from lakehead.spark.key_join import LookupJoin, Planned

    planned = Planned.of(handle_of(con.table("a.b")).desc, ["v"])
    join = LookupJoin(con.uri, "a.b", ("k",), planned, "left", stale_ms, pa.schema([SCHEMA.field(0), SCHEMA.field(1)]))

    def batches() -> Iterator[pa.RecordBatch]:
        yield KEYS.slice(0, 1)
        change()
        yield KEYS

    return [rows["v"].to_pylist() for rows in join(batches())]


def sql(con: lh.Connection, *statements: str) -> Callable[[], object]:
    return lambda: [con.sql(f"alter table a.b {words}") for words in statements]


@pytest.mark.parametrize("stale_ms", [0, 3_600_000])
@pytest.mark.parametrize(
    "words",
    [
        ["drop column v"],
        ["rename column v to x"],
        ["alter v type bigint"],
        ["rename column v to x", "rename column w to v"],
        ["drop column v", "add column v int"],
    ],
)
def test_a_column_that_is_altered(con: lh.Connection, stale_ms: int, words: list[str]) -> None:
    with pytest.raises(SchemaChangedError, match=r"a\.b was altered.*make the join again"):
        joined(con, stale_ms, sql(con, *words))


@pytest.mark.parametrize("stale_ms", [0, 3_600_000])
def test_columns_that_are_not_wanted(con: lh.Connection, stale_ms: int) -> None:
    changes = sql(con, "add column x varchar", "alter w type bigint", "rename column w to y")
    assert joined(con, stale_ms, changes) == [[10], [10, None]]


def test_a_table_that_is_dropped(con: lh.Connection) -> None:
    with pytest.raises(lh.TableNotFoundError, match="make the join again"):
        joined(con, 0, lambda: con.drop_table("a.b"))


def made_anew(con: lh.Connection, schema: pa.Schema, key: str | None) -> None:
    con.drop_table("a.b")
    new = con.create_table("a.b", schema, primary_key=key)
    (new.upsert if key else new.append)([dict.fromkeys(schema.names, 2)])


def test_a_table_that_is_made_anew(con: lh.Connection) -> None:
    same = pa.schema([SCHEMA.field(1), SCHEMA.field(0)])
    assert joined(con, 0, lambda: made_anew(con, same, "k")) == [[10], [None, 2]]
    with pytest.raises(SchemaChangedError, match=r"the key \['v'\]"):
        joined(con, 0, lambda: made_anew(con, SCHEMA, "v"))


def test_a_log_table_instead(con: lh.Connection) -> None:
    with pytest.raises(lh.WrongTableKindError, match="make the join again"):
        joined(con, 0, lambda: made_anew(con, SCHEMA, None))


@pytest.mark.parametrize("stale_ms", [0, 3_600_000])
@pytest.mark.parametrize(
    ("of_table", "given", "keys", "found"),
    [
        (pa.int32(), pa.int64(), [1, 2**40, None, -(2**40), 2, 3], [1, None, None, None, 2, None]),
        (pa.int32(), pa.int64(), [2**40], [None]),
        (pa.timestamp("ms"), pa.timestamp("us"), [1000, 1001, 2000], [1, None, 2]),
        (pa.decimal128(5, 2), pa.decimal128(10, 3), ["1.000", "1.001", "2.000", "1234567.000"], [1, None, 2, None]),
    ],
)
def test_a_key_that_the_table_cannot_have_has_no_match(
    con: lh.Connection, stale_ms: int, of_table: pa.DataType, given: pa.DataType, keys: list[Any], found: list[Any]
) -> None:
    """One such row would end a stream, and again each time it goes on."""
    from lakehead.spark.key_join import LookupJoin, Planned

    there = ["1.000", "2.000"] if pa.types.is_decimal(given) else [1000, 2000] if keys[0] == 1000 else [1, 2]
    table = con.create_table("a.c", pa.schema([("k", of_table), ("v", pa.int64())]), primary_key="k")
    table.upsert(pa.table({"k": pa.array(there).cast(given).cast(of_table), "v": [1, 2]}))
    planned = Planned.of(handle_of(table).desc, ["v"])
    out = pa.schema([("k", given), ("v", pa.int64())])
    rows = pa.RecordBatch.from_arrays([pa.array(keys).cast(given)], ["k"])
    for how, expected in (("left", found), ("inner", [v for v in found if v is not None])):
        join = LookupJoin(con.uri, "a.c", ("k",), planned, how, stale_ms, out)  # type: ignore[arg-type]
        for _ in range(2):
            assert [v for part in join([rows]) for v in part["v"].to_pylist()] == expected


def test_keys_that_the_table_cannot_have_are_found_together(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one by one: a micro-batch may be full of them."""
    from lakehead.spark import key_join
    from lakehead.spark.key_join import LookupJoin, Planned

    table = con.create_table("a.many", pa.schema([("k", pa.int32()), ("v", pa.int64())]), primary_key="k")
    table.upsert([{"k": k, "v": k} for k in range(10)])
    asked = 0
    real = key_join.to_key_table

    def counted(*args: Any, **options: Any) -> pa.Table:
        nonlocal asked
        asked += 1
        return real(*args, **options)

    monkeypatch.setattr(key_join, "to_key_table", counted)
    planned, out = Planned.of(handle_of(table).desc, ["v"]), pa.schema([("k", pa.int64()), ("v", pa.int64())])
    keys = [k if k < 10 else k + 2**40 for k in range(5000)]
    join = LookupJoin(con.uri, "a.many", ("k",), planned, "inner", 0, out)
    (rows,) = join([pa.RecordBatch.from_arrays([pa.array(keys)], ["k"])])
    assert rows["v"].to_pylist() == list(range(10)) and asked == 2
