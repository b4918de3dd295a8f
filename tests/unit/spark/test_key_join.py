"""A lookup join tells what became of its table between two batches of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
