"""A filter that names primary keys, whole or their leading columns, is answered by the key index, with the rows of the
moment the scan was made: those of one tablet at once, those of several as they were pinned."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.client import lookups
from lakehead.lake.keyed_read import KeyedRead
from lakehead.lake.union_read import UnionRead

SCHEMA = pa.schema([("a", pa.string()), ("b", pa.int64()), ("v", pa.int64()), ("f", pa.float64())])


@pytest.fixture(params=["lake", "no lake"])
def table(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[lh.Table]:
    lake = "iceberg" if request.param == "lake" else None
    with lh.connect(tmp_path) as con:
        table = con.create_table(
            "t", SCHEMA, primary_key=["a", "b"], partition_by=["a"], bucket_key=["b"], buckets=2, lake=lake
        )
        table.upsert([{"a": a, "b": b, "v": b, "f": float("nan")} for a in "xyz" for b in range(20)])
        if lake:
            con.tier("t")
        table.upsert([{"a": "x", "b": 3, "v": 33}, {"a": "new", "b": 1, "v": 1}])
        table.delete([("x", 4)])
        yield table


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each read that asked the key index was answered by it."""
    answers: list[bool] = []
    rows_by_key, batches = UnionRead.rows_by_key, KeyedRead.batches

    def noted(self: UnionRead) -> Any:
        found = rows_by_key(self)
        if self._keys is not None:
            answers.append(found is not None)
        return found

    def held(self: KeyedRead) -> Iterator[pa.RecordBatch]:
        answers.append(True)
        return batches(self)

    monkeypatch.setattr(UnionRead, "rows_by_key", noted)
    monkeypatch.setattr(KeyedRead, "batches", held)
    return answers


@pytest.fixture(params=["one tablet", "several tablets"])
def others(request: pytest.FixtureRequest) -> str:
    """More keys, of other buckets than the one which is asked for; in their rows ``v`` is ``b``."""
    return "" if request.param == "one tablet" else ", 5, 6, 7, 8, 9, 10, 11, 12"


def rows(found: lh.Scan) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in found.to_arrow().to_pylist())


WHERE = [
    ("a = 'x' and b = 3", [("x", 3, 33)]),
    ("a = 'x' and b = 4", []),
    ("a = 'nobody' and b = 4", []),
    ("b in (1, 3, 5) and a in ('x', 'new')", [("new", 1, 1), ("x", 1, 1), ("x", 3, 33), ("x", 5, 5)]),
    ("b = 3 and a = 'x' and v > 100", []),
    ("b = 3 and a = 'y' and v < 100", [("y", 3, 3)]),
    ("b in (1, 2) and b in (2, 3) and a = 'z'", [("z", 2, 2)]),
    ("b = 1 and b = 2 and a = 'z'", []),
]


@pytest.mark.parametrize(("where", "expected"), WHERE)
def test_they_are_the_rows(table: lh.Table, asked: list[bool], where: str, expected: list[tuple[Any, ...]]) -> None:
    scan = table.scan(["a", "b", "v"], where=where)
    assert rows(scan) == expected and scan.count() == len(expected)
    assert asked == [True, True] and "asked of the key index" in scan.explain()
    assert table.scan(["v"], where=where, limit=1).to_arrow().num_rows == min(len(expected), 1)
    assert rows(table.scan(["v"], where=where)) == sorted((v,) for _, _, v in expected)


@pytest.mark.parametrize("where", ["a = 'x'", "a = 'x' or b = 3", "a = 'x' and b > 3", "a = 'x' and not (b = 3)"])
def test_filters_that_name_no_keys(table: lh.Table, asked: list[bool], where: str) -> None:
    table.scan(where=where).to_arrow()
    assert not asked


@pytest.mark.parametrize("change", ["upsert", "delete", "insert", "another", "truncate"])
def test_a_scan_has_the_rows_of_its_moment(table: lh.Table, asked: list[bool], others: str, change: str) -> None:
    present = table.scan(["a", "b", "v"], where=f"a = 'x' and b in (3{others}) and v <> b")
    absent = table.scan(["a", "b", "v"], where=f"a = 'x' and b in (77{others}) and v <> b")
    match change:
        case "upsert":
            table.upsert([{"a": "x", "b": 3, "v": -1}])
        case "delete":
            table.delete([("x", 3)])
        case "insert":
            table.upsert([{"a": "x", "b": 77, "v": -1}])
        case "another":
            table.upsert([{"a": "x", "b": n, "v": -1} for n in range(13, 20)])
        case "truncate":
            table.truncate()
    assert rows(present) == [("x", 3, 33)] and rows(absent) == []
    same = change not in ("upsert", "delete", "truncate") or not others
    assert asked[0] == same, "what did not change, or is held, needs no scan"


def test_after_the_columns_changed(table: lh.Table, asked: list[bool], others: str) -> None:
    scan = table.scan(["a", "b", "v"], where=f"a = 'x' and b in (3{others}) and v <> b")
    with table.alter() as a:
        a.drop_column("v")
    assert rows(scan) == [("x", 3, 33)] and asked == [not others]
    assert (3,) in rows(table.scan(["b"], where=f"a = 'x' and b in (3{others})"))
    with pytest.raises(lh.InvalidPredicateError, match="no such column"):
        table.scan(where=f"a = 'x' and b in (3{others}) and v = 33")


def test_another_client_altered_the_table(table: lh.Table, tmp_path: Path, others: str) -> None:
    with lh.connect(tmp_path) as con:
        with con.table("t").alter() as a:
            a.add_column("w", pa.int64(), default=7)
        con.table("t").upsert([{"a": "x", "b": 3, "v": 1, "w": 2}])
    found = rows(table.scan(["v", "w"], where=f"a = 'x' and b in (3, 19{others})"))
    assert found[0] == (1, 2) and found[-1] == (19, 7)


def test_what_a_read_by_key_raises(table: lh.Table, tmp_path: Path, others: str) -> None:
    where = f"a = 'x' and b in (3{others})"
    failing = table.scan(where=f"{where} and cast(a as int) = 1")
    for read in (failing.to_arrow, failing.count):
        with pytest.raises(lh.InvalidPredicateError, match="failed on the rows"):
            read()
    with lh.connect(tmp_path) as con:
        scan, gone = con.table("t").scan(where=where), con.table("t")
        assert "v" in repr(scan) and scan.schema.names == SCHEMA.names
    for read in (scan.to_arrow, scan.count, lambda: gone.scan(where=where)):
        with pytest.raises(lh.ClosedError):
            read()
    with lh.connect(tmp_path) as con:
        con.drop_table("t")
    with pytest.raises(lh.TableNotFoundError):
        table.scan(where=where)


@pytest.fixture(params=["lake", "no lake"])
def lines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[lh.Table]:
    """A table whose rows are found by the leading columns of their keys, too."""
    lake = "iceberg" if request.param == "lake" else None
    schema = pa.schema([*SCHEMA, ("line", pa.int16())])
    with lh.connect(tmp_path / "lines") as con:
        how: dict[str, Any] = {"primary_key": ["b", "a", "line"], "partition_by": ["a"], "bucket_key": ["b"]}
        table = con.create_table("t", schema, **how, buckets=2, lake=lake)
        made = [{"a": a, "b": b, "line": n, "v": b} for a in "xyz" for b in range(20) for n in range(b % 4)]
        table.upsert(pa.Table.from_pylist(made, schema))
        if lake:
            con.tier("t")
        new = [{"a": "x", "b": 3, "line": n, "v": 33, "f": float("nan")} for n in (1, 2, 9)]
        table.upsert(pa.Table.from_pylist([*new, {"a": "new", "b": 1, "line": 1, "v": 1}], schema))
        table.delete(pa.table({"b": [6, 6], "a": ["x", "y"], "line": pa.array([1, 1], pa.int16())}))
        yield table


@pytest.mark.parametrize("change", ["upsert", "delete", "insert", "truncate", "nothing"])
def test_rows_by_the_leading_columns(lines: lh.Table, asked: list[bool], change: str) -> None:
    scan = lines.scan(["line", "v"], where="a = 'x' and b = 3")
    few = lines.scan(["line"], where="a = 'x' and b = 3 and line >= 2", limit=1)
    match change:
        case "upsert":
            lines.upsert([{"a": "x", "b": 3, "line": n, "v": -1} for n in range(10)])
        case "delete":
            lines.delete(pa.table({"b": [3], "a": ["x"], "line": pa.array([2], pa.int16())}))
        case "insert":
            lines.upsert([{"a": "x", "b": 3, "line": 10, "v": -1}])
        case "truncate":
            lines.truncate()
    assert rows(scan) == [(0, 3), (1, 33), (2, 33), (9, 33)] and scan.count() == 4 and few.count() == 1
    assert asked == [True] * 3 and "1 by prefix, asked of the key index, which had 4" in scan.explain()
    for tier in ("union", "hot"):
        assert lines.scan(where="a = 'z' and b = 1000", tier=tier).count() == 0  # type: ignore[arg-type]


def test_what_of_the_leading_columns_is_read_otherwise(
    lines: lh.Table, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ", ".join(map(str, range(3, 12)))
    for where in (
        "b = 3",
        "a = 'x'",
        "a = 'x' and line = 1",
        "a in ('x', 'y') and b = 3",
        f"a = 'x' and b in ({several})",
    ):
        assert lines.scan(where=where).count() > 0
    for bytes_max, few in ((10, False), (4 * 64 - 1, False), (4 * 64, True)):
        monkeypatch.setattr(lookups, "PREFIX_BYTES_MAX", bytes_max)
        asked.clear()
        assert lines.scan(where="a = 'x' and b = 3").count() == 4 and asked == [True] * few
        assert lines.scan(where="a = 'x' and b = 1").count() == 1 and asked[-1:] == [True]


def test_how_many_are_held(tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
        table = con.create_table("t", schema, primary_key=["a", "b"], bucket_key="a", buckets=1)
        table.upsert(pa.table({"a": range(2000), "b": range(2000)}))
        for count, held in ((1000, True), (1001, False)):
            some = f"a in ({', '.join(map(str, range(count)))})"
            scan = table.scan(where=some)
            assert isinstance(scan._read, KeyedRead) == held and scan.count() == count
            scan = table.scan(where=f"b = 7 and {some}")
            assert isinstance(scan._read, KeyedRead) == held and scan.count() == 1
            assert con.sql(f"select count(*) from t where {some}").fetchall() == [(count,)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", ["whole keys", "leading columns"])
def test_the_longer_way_finds_the_same(
    table: lh.Table, lines: lh.Table, monkeypatch: pytest.MonkeyPatch, by: str, seed: int
) -> None:
    rng = random.Random(seed)
    made = 0
    for _ in range(60):
        keys = ", ".join(str(rng.randrange(25)) for _ in range(rng.choice([1, 1, 2, 3])))
        where = f"b in ({keys}) and a = '{rng.choice(['x', 'y', 'new', 'none'])}'"
        if by == "leading columns":
            table = lines
            where += rng.choice(["", "", " and line < 2", " and line = 1"])
        if rng.random() < 0.5:
            where += f" and {rng.choice(['v > 5', 'v is null', 'f > 1', 'f is null or v < 9', 'not (v = 33)'])}"
        columns = rng.choice([None, ["v"], ["f", "a"], ["b", "a", "v", "f"], []])
        limit = rng.choice([None, None, 0, 1, 2])
        scan = table.scan(columns, where=where, limit=limit)
        made += isinstance(scan._read, KeyedRead)
        with monkeypatch.context() as m:
            m.setattr(KeyedRead, "of", lambda handle, spec: None)
            longer = table.scan(columns, where=where, limit=limit)
        assert isinstance(longer._read, UnionRead)
        assert scan.schema == longer.schema and scan.count() == longer.count(), where
        few, all_rows = scan.to_arrow(), longer.to_arrow()
        assert few.schema == all_rows.schema and few.num_rows == all_rows.num_rows
        if limit is None:  # NaN equals itself as text
            assert sorted(map(str, few.to_pylist())) == sorted(map(str, all_rows.to_pylist())), where
    assert made > 20


def test_sql(table: lh.Table, asked: list[bool], tmp_path: Path) -> None:
    with lh.connect(tmp_path) as con:
        # Keys that are not constants: those have a way of their own (test_sql_by_key.py).
        assert con.sql("select v from t where b = 1 + 2 and a = 'x'").fetchall() == [(33,)]
        assert con.sql("select sum(v) from t where b in (1 + 2, 5) and a = 'x'").fetchall() == [(38,)]
    assert asked and all(asked)


def test_parts_of_the_table(table: lh.Table, asked: list[bool]) -> None:
    where = "a = 'x' and b = 3"
    if table.describe()["lake"]:
        assert rows(table.scan(["v"], where=where, tier="lake")) == [(3,)]
        snapshot = table.lake.snapshots()["snapshot_id"][0].as_py()
        assert rows(table.scan(["v"], where=where, snapshot=snapshot)) == [(3,)]
        assert rows(table.scan(["v"], where=where, tier="hot")) == [(33,)]
        assert not asked
    assert table.scan(["v"], where=where, system_columns=True).to_arrow().num_rows == 1


@pytest.mark.parametrize(
    ("kind", "value", "literal"),
    [
        (pa.int8(), 5, "5"),
        (pa.date32(), dt.date(2026, 1, 2), "date '2026-01-02'"),
        (pa.timestamp("ns"), dt.datetime(2026, 1, 2, 3, 4, 5), "timestamp '2026-01-02 03:04:05'"),
        (pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "timestamptz '2026-01-02 00:00:00+00'"),
        (pa.decimal128(9, 2), Decimal("1.50"), "1.5"),
        (pa.string(), "é", "'é'"),
    ],
)
def test_keys_of_every_type(tmp_path: Path, asked: list[bool], kind: pa.DataType, value: object, literal: str) -> None:
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", pa.schema([("k", kind), ("v", pa.int64())]), primary_key="k")
        table.upsert(pa.table({"k": pa.array([value], kind), "v": [1]}))
        assert table.scan(["v"], where=f"k = {literal}").to_arrow().to_pylist() == [{"v": 1}]
        number = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
        for unfit in ("k = 1000", "k = 1.25", "k is null", "k = null"):
            if number or "null" in unfit:
                assert table.scan(where=unfit).to_arrow().num_rows == 0
            else:
                with pytest.raises(lh.InvalidPredicateError, match="compares a value of type"):
                    table.scan(where=unfit)
