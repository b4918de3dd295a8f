"""Tables of unusual shapes, all the way from the log to what other engines read of their lake."""

from __future__ import annotations

import datetime as dt
import importlib.util
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import lakehead as lh

KINDS: list[tuple[pa.DataType, Any]] = [
    (pa.int64(), lambda n: n),
    (pa.string(), lambda n: f"text {n}"),
    (pa.float64(), lambda n: n / 8),
    (pa.decimal128(20, 3), lambda n: Decimal(n) / 1000),
    (pa.date32(), lambda n: dt.date(2026, 1, 1) + dt.timedelta(n)),
    (pa.timestamp("us", "UTC"), lambda n: dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=n)),
    (pa.binary(), lambda n: bytes([n % 256] * (n % 5))),
    (pa.bool_(), lambda n: n % 2 == 0),
    (pa.int16(), lambda n: n % 1000),
    (pa.list_(pa.int32()), lambda n: [n, None] * (n % 3)),
    (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]), lambda n: {"a": n, "b": ["x"] * (n % 2)}),
    (pa.map_(pa.string(), pa.struct([("f", pa.float32())])), lambda n: [(f"m{n % 7}", {"f": float(n % 64)})]),
]
KEY = [pa.field("region", pa.string(), False), pa.field("k", pa.int64(), False)]
SHAPES = {"wide and sparse": (198, 2, 20, ["region"], 300), "64 buckets": (12, 64, 2, [], 20)}
"""Columns beside the key, buckets, of how many values one is not null, partition columns, and how many rows a round
replaces."""


def value(k: int, column: int, sparse: int, version: int) -> Any:
    make = KINDS[column % len(KINDS)][1]
    return make(k + column + 100 * version) if (k + column) % sparse == 0 else None


def rows(numbers: range, columns: int, sparse: int, version: int) -> list[dict[str, Any]]:
    return [
        {"region": "ns"[k % 2], "k": k, **{f"c{c}": value(k, c, sparse, version) for c in range(columns)}}
        for k in numbers
    ]


@pytest.fixture
def db() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as db:
        for name in ("avro", "iceberg"):
            spec = importlib.util.find_spec(f"duckdb_extension_{name}")
            assert spec is not None and spec.submodule_search_locations is not None
            (file,) = Path(next(iter(spec.submodule_search_locations))).rglob(f"{name}.duckdb_extension")
            db.load_extension(str(file))
        yield db


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "log"])
@pytest.mark.parametrize("shape", SHAPES)
def test_from_the_log_to_other_engines(shape: str, keyed: bool, tmp_path: Path, db: duckdb.DuckDBPyConnection) -> None:
    columns, buckets, sparse, partitions, replaced = SHAPES[shape]
    schema = pa.schema([*KEY, *(pa.field(f"c{c}", KINDS[c % len(KINDS)][0]) for c in range(columns))])
    key: dict[str, Any] = {"primary_key": ["region", "k"]} if keyed else {"bucket_key": ["k"]}
    model: dict[tuple[int, int], dict[str, Any]] = {}

    def put(numbers: range, version: int) -> None:
        given = rows(numbers, columns, sparse, version)
        table.upsert(pa.Table.from_pylist(given, schema)) if keyed else table.append(given)
        model.update({(r["k"], 0 if keyed else version): r for r in given})

    def in_order(found: pa.Table) -> list[dict[str, Any]]:
        return sorted(found.to_pylist(), key=lambda r: (r["k"], repr(r)))

    with lh.connect(tmp_path) as con:
        table = con.create_table("t", schema, buckets=buckets, partition_by=partitions, lake="iceberg", **key)
        for version in range(4):
            put(range((400 - replaced) * version, (400 - replaced) * version + 400), version)
            con.tier("t")
        if keyed:
            table.delete(rows(range(10), 0, 1, 0))
            for k in range(10):
                del model[k, 0]
        con.tier("t")
        tiered = pa.Table.from_pylist(list(model.values()), schema)
        put(range(100, 2000, 50), 4)
        want = in_order(pa.Table.from_pylist(list(model.values()), schema))
        assert in_order(table.scan().to_arrow()) == want
        done = table.lake.compact()
        tablets = buckets * max(1, 2 * len(partitions))
        assert done.files_before - done.files_after >= 2 * tablets
        found = table.scan().to_arrow()
        assert found.schema.equals(table.schema) and in_order(found) == want
        # PyIceberg reads null as an empty map.
        plain = [f.name for f in schema if not pa.types.is_map(f.type)]
        lake = table.lake.iceberg().scan().to_arrow().select(plain)
        assert in_order(lake.cast(table.scan(plain).to_arrow().schema)) == in_order(tiered.select(plain))
        read = f"from iceberg_scan('{table.lake.metadata_location}')"
        summed = ", ".join(f"count(c{c})" for c in range(columns))
        counts = db.sql(f"select count(*), sum(k), {summed} {read}").fetchone()
        assert counts is not None
        filled = [len(tiered) - tiered[f"c{c}"].null_count for c in range(columns)]
        assert list(counts) == [len(tiered), sum(tiered["k"].to_pylist()), *filled]
        assert con.sql("select count(*) from t where c0 is not null").fetchone() == (
            sum(r["c0"] is not None for r in model.values()),
        )
