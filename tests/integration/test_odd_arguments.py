"""Whatever the public API is given, it takes, or refuses with an error of its own."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import lakehead as lh

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
ROW = {"id": 1, "v": "a"}
ODD: dict[str, Callable[[], Any]] = {
    "number": lambda: 5,
    "large": lambda: 1 << 70,
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "true": lambda: True,
    "bytes": lambda: b"id",
    "no utf-8": lambda: "\udc80",
    "empty": lambda: "",
    "text": lambda: "id",
    "nothing": list,
    "mixed": lambda: ["id", 5],
    "dict": lambda: {"id": 1},
    "numpy": lambda: np.array(["id", "v"]),
    "numpy of none": lambda: np.array([], dtype=str),
    "numpy number": lambda: np.int64(1),
    "pandas": lambda: pd.Series(["id", "v"]),
    "index": lambda: pd.Index(["id"]),
    "arrow": lambda: pa.array(["id"]),
    "generator": lambda: (name for name in ["id"]),
    "object": object,
    "day": lambda: dt.date(2026, 1, 1),
    "function": lambda: len,
}
PROPERTIES = (
    "primary_key", "partition_by", "bucket_key", "buckets", "lake", "durability", "hot_retention", "freshness",
    "lake_changelog", "log_ttl", "segment_bytes",
)  # fmt: skip


class Tables:
    def __init__(self, con: lh.Connection) -> None:
        self.con = con
        self.keyed = con.create_table("odd.keyed", SCHEMA, primary_key="id")
        self.log = con.create_table("odd.log", SCHEMA)
        self.keyed.upsert([ROW])

    def make(self, name: Any = "odd.new", schema: Any = SCHEMA, **how: Any) -> None:
        made = self.con.create_table(name, schema, **how)
        self.con.drop_table(made.name)

    def feed(self, **how: Any) -> None:
        self.keyed.subscribe(**{"start": "earliest", "stop": "now", **how}).close()


CALLS: dict[str, Callable[[Tables, Any], object]] = {
    "columns of a scan": lambda t, x: t.keyed.scan(columns=x).to_arrow(),
    "tier": lambda t, x: t.keyed.scan(tier=x).to_arrow(),
    "where": lambda t, x: t.keyed.scan(where=x).to_arrow(),
    "snapshot": lambda t, x: t.keyed.scan(snapshot=x).to_arrow(),
    "limit": lambda t, x: t.keyed.scan(limit=x).to_arrow(),
    "start": lambda t, x: t.feed(start=x),
    "stop": lambda t, x: t.feed(stop=x),
    "columns of a feed": lambda t, x: t.feed(columns=x),
    "where of a feed": lambda t, x: t.feed(where=x),
    "key": lambda t, x: t.keyed.get(x),
    "keys": lambda t, x: t.keyed.lookup(x),
    "rows": lambda t, x: t.log.append(x),
    "rows of keys": lambda t, x: t.keyed.upsert(x),
    "columns of an upsert": lambda t, x: t.keyed.upsert([ROW], columns=x),
    "keys to delete": lambda t, x: t.keyed.delete(x),
    "writer": lambda t, x: t.log.writer(x).close(),
    "table": lambda t, x: t.con.table(x),
    "tables": lambda t, x: t.con.tables(x),
    "statement": lambda t, x: t.con.sql(x),
    "parameters": lambda t, x: t.con.sql("select ?", x).fetchall(),
    "frames": lambda t, x: t.con.sql("select 1", frames=x).fetchall(),
    "table to tier": lambda t, x: t.con.tier(x),
    "name to make": lambda t, x: t.make(x),
    "schema": lambda t, x: t.make(schema=x),
    "table to drop": lambda t, x: t.con.drop_table(x),
    "new name": lambda t, x: t.con.rename_table("odd.gone", x),
    "column to add": lambda t, x: t.log.alter().add_column(x, pa.int64()),
    "type to add": lambda t, x: t.log.alter().add_column("more", x),
    "column to drop": lambda t, x: t.log.alter().drop_column(x),
    "column to rename": lambda t, x: t.log.alter().rename_column(x, "more"),
    "name of a column": lambda t, x: t.log.alter().rename_column("v", x),
    **{f"{name} of a table": lambda t, x, name=name: t.make(**{name: x}) for name in PROPERTIES},  # type: ignore[misc]
}


@pytest.fixture(scope="module")
def tables(con: lh.Connection) -> Iterator[Tables]:
    made = Tables(con)
    yield made
    assert con.tables("odd") == ["odd.keyed", "odd.log"]


@pytest.mark.parametrize("call", CALLS)
def test_taken_or_refused(tables: Tables, call: str) -> None:
    raw = {}
    for name, value in ODD.items():
        try:
            CALLS[call](tables, value())
        except lh.LakeheadError:
            pass
        except Exception as e:
            raw[name] = e
    assert raw == {}
