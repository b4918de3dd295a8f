"""What was looked up is remembered for as long as it may be, and not beyond its bounds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.env.clock import SystemClock
from lakehead.format import joins
from lakehead.spark import remembered
from lakehead.spark.remembered import Positions, Remembered, RememberedJoins

ROW = pa.schema([("v", pa.string())])


class Clock(SystemClock):
    at = 100.0

    def monotonic(self) -> float:
        return self.at


class Store:
    """Keys and values, and which keys were asked for."""

    def __init__(self, **values: str) -> None:
        self.values = values
        self.asked: list[list[str]] = []

    def __call__(self, keys: pa.Table) -> tuple[Positions, pa.Table]:
        asked = keys["k"].to_pylist()
        self.asked.append(asked)
        there = [k for k in self.values if k in asked]
        rows = pa.Table.from_pylist([{"v": self.values[k]} for k in there], ROW)
        return np.array([there.index(k) if k in there else -1 for k in asked], np.int64), rows


def values(found: Remembered, store: Store, *keys: str) -> list[str | None]:
    at, rows = found.places(pa.table({"k": pa.array(keys, pa.string())}), store)
    out: list[str | None] = rows["v"].take(pa.array(at, mask=at < 0)).to_pylist()
    return out


@pytest.mark.parametrize(
    "t",
    [
        pa.int8(), pa.int64(), pa.date32(), pa.time32("s"), pa.time64("us"), pa.timestamp("s"), pa.timestamp("us"),
        pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.binary(), pa.binary(4), pa.large_binary(), pa.string(),
        pa.large_string(),
    ],
    ids=str,
)  # fmt: skip
def test_keys_of_every_type_and_of_any_year(t: pa.DataType) -> None:
    if pa.types.is_temporal(t):
        large = 80_000 if pa.types.is_time(t) else 2**30 if t.bit_width == 32 else 2**61
        keys = pa.array([0, large, 1], pa.int32() if t.bit_width == 32 else pa.int64()).cast(t)
    elif pa.types.is_decimal(t) or pa.types.is_integer(t):
        keys = pa.array([0, 100, 1], t)
    else:
        keys = pa.array(["zero", "more", "some"]).cast(pa.binary()).cast(t)
    asked = []

    def ask(unknown: pa.Table) -> tuple[Positions, pa.Table]:
        asked.append(len(unknown))
        at = pc.index_in(unknown["k"].combine_chunks(), keys.slice(1)).fill_null(-1)
        return at.to_numpy().astype(np.int64), pa.table({"v": ["large", "small"]})

    found = Remembered(5.0, Clock())
    for _ in range(2):
        at, rows = found.places(pa.table({"k": pa.concat_arrays([keys, keys.slice(0, 2)])}), ask)
        rows = rows["v"].take(pa.array(at, mask=at < 0))
        assert rows.to_pylist() == [None, "large", "small", None, "large"]
    assert asked == [5]


def test_a_hit_that_is_too_old_is_asked_again() -> None:
    clock, store = Clock(), Store(a="1", b="2")
    found = Remembered(5.0, clock)
    assert values(found, store, "b", "x", "a", "b") == ["2", None, "1", "2"]
    store.values = {"a": "new", "x": "there"}
    clock.at += 4.9
    assert values(found, store, "a", "x", "c") == ["1", None, None]
    assert store.asked[1:] == [["c"]]
    clock.at += 0.1
    assert values(found, store, "a", "x", "c", "b") == ["new", "there", None, None]
    assert store.asked[2:] == [["a", "x", "b"]]
    clock.at += 4.9
    assert values(found, store, "c", "a") == [None, "new"]
    assert store.asked[3:] == [["c"]]


def test_no_keys_and_absent_keys_alone() -> None:
    clock, store = Clock(), Store()
    found = Remembered(5.0, clock)
    assert values(found, store) == []
    assert values(found, store, "x", "y") == [None, None]
    assert values(found, store, "y", "x") == [None, None]
    assert [a for a in store.asked if a] == [["x", "y"]]


def test_memory_is_bounded() -> None:
    clock, store = Clock(), Store(**{str(n): "v" * 100 for n in range(100)})
    found = Remembered(1e9, clock, keys_max=10, bytes_max=2_000)
    for n in range(50):
        assert values(found, store, str(n), f"absent {n}") == ["v" * 100, None]
        assert len(found) <= 10
        assert found.nbytes <= 2_000
    assert values(found, store, *map(str, range(30))) == ["v" * 100] * 30  # more than is remembered at once
    assert len(found) <= 10
    assert found.nbytes <= 2_000
    for n in range(1000):
        values(found, store, *[f"absent {n}"] * (n % 2))
        assert len(found._answers) <= 11


def test_joins_are_bounded() -> None:
    joins = RememberedJoins()
    first = joins.of(0, 1.0, Clock())
    for n in range(1, remembered.JOINS_MAX):
        joins.of(n, 1.0, Clock())
    assert joins.of(0, 1.0, Clock()) is first
    joins.of("new", 1.0, Clock())
    assert joins.of(0, 1.0, Clock()) is first
    assert len(joins._joins) == remembered.JOINS_MAX


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as con:
        yield con


@pytest.mark.parametrize("asked", [(1, 9, 2, 1, 1, None, 6, 5, 5, 4, 3, 1, 8), (1,) * 9])
def test_rows_that_many_have_come_in_parts(
    con: lh.Connection, monkeypatch: pytest.MonkeyPatch, asked: tuple[int | None, ...]
) -> None:
    from lakehead.spark import key_join
    from lakehead.spark.key_join import LookupJoin, Planned

    schema = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("v", pa.string()), ("l", pa.list_(pa.int8()))])
    table = con.create_table("a.b", schema, primary_key="k", buckets=3)
    have = {k: {"k": k, "n": k, "v": f"{k}" * 900, "l": [k] * k} for k in range(1, 7)}
    table.upsert(list(have.values()))
    given = [{"k": k} for k in asked]
    batch = pa.RecordBatch.from_pylist(given, pa.schema([("k", pa.int64())]))
    for columns, how in itertools.product((["v", "l", "n"], ["n"], []), ("left", "inner")):
        planned = Planned.of(handle_of(table).desc, columns)
        out = pa.schema([("k", pa.int64()), *(schema.field(c) for c in columns)])
        join = LookupJoin(con.uri, "a.b", ("k",), planned, how, 0, out)  # type: ignore[arg-type]
        rows = [{**g, **{c: have.get(g["k"], {}).get(c) for c in columns}} for g in given]
        expected = [r for r in rows if how == "left" or r["k"] in have]
        with monkeypatch.context() as patch:
            assert [r for b in join.joined(table, batch) for r in b.to_pylist()] == expected
            patch.setattr(key_join, "BYTES_MAX", 2000)
            patch.setattr(joins, "BYTES_MAX", 2000)
            parts = list(join.joined(table, batch))
        assert [r for b in parts for r in b.to_pylist()] == expected
        assert not columns or all(b.nbytes <= 2500 for b in parts)
        assert (len(parts) > 4) == ("v" in columns)


@pytest.mark.parametrize("stale_ms", [0, 5000])
def test_a_join_asks_again_when_it_must(con: lh.Connection, stale_ms: int) -> None:
    from lakehead.spark.key_join import LookupJoin, Planned

    table = con.create_table("a.b", pa.schema([("k", pa.int64()), ("v", pa.string())]), primary_key="k")
    table.upsert([{"k": 1, "v": "old"}])
    clock = Clock()
    handle_of(table).env = dataclasses.replace(handle_of(table).env, clock=clock)
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    planned = Planned.of(handle_of(table).desc, ["v"])
    join = LookupJoin(con.uri, "a.b", ("k",), planned, "left", stale_ms, schema)
    batch = pa.RecordBatch.from_pylist([{"k": 1}, {"k": 2}, {"k": None}], pa.schema([("k", pa.int64())]))

    def seen() -> list[str | None]:
        out: list[str | None] = next(join.joined(table, batch))["v"].to_pylist()
        return out

    assert seen() == ["old", None, None]
    table.upsert([{"k": 1, "v": "new"}, {"k": 2, "v": "two"}])
    assert seen() == (["old", None, None] if stale_ms else ["new", "two", None])
    clock.at += 5
    assert seen() == ["new", "two", None]
    with table.alter() as a:
        a.add_column("w", "string")
    con.drop_table("a.b")
    assert con.create_table("a.b", schema, primary_key="k").upsert([{"k": 2, "v": "other"}]).rows == 1
    table = con.table("a.b")
    assert seen() == [None, "other", None]
