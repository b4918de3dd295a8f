"""TPC-H: its rows and queries, by the generator that DuckDB has as an extension, and its tables half in the lake."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import lakehead as lh

KEYS = {
    "region": ["r_regionkey"],
    "nation": ["n_nationkey"],
    "supplier": ["s_suppkey"],
    "customer": ["c_custkey"],
    "part": ["p_partkey"],
    "partsupp": ["ps_partkey", "ps_suppkey"],
    "orders": ["o_orderkey"],
    "lineitem": ["l_orderkey", "l_linenumber"],
}
_EXTRA = 50


def generate(scale: float) -> tuple[dict[str, pa.Table], list[str]]:
    """The eight tables, and the 22 queries in their order."""
    spec = importlib.util.find_spec("duckdb_extension_tpch")
    assert spec is not None and spec.origin is not None
    (extension,) = Path(spec.origin).parent.rglob("*.duckdb_extension")
    with duckdb.connect() as con:
        con.execute(f"load '{extension}'; call dbgen(sf = {scale})")
        tables = {name: con.execute(f"from {name}").to_arrow_table() for name in KEYS}
        queries = con.execute("select query from tpch_queries() order by query_nr").fetchall()
    return tables, [text.strip().rstrip(";") for (text,) in queries]


def write_plain(tables: dict[str, pa.Table], folder: Path) -> None:
    """As Parquet files, one a table."""
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")


def fill(con: lh.Connection, tables: dict[str, pa.Table]) -> None:
    """Half of each table is in the lake, of which a tenth is superseded by the log, which has the other half; rows that
    were deleted since are in the lake, too."""
    for name, rows in tables.items():
        key = KEYS[name]
        table = con.create_table(name, rows.schema, primary_key=key, buckets=2, lake="iceberg")
        half = rows.slice(0, (rows.num_rows + 1) // 2)
        table.upsert(_with_errors(half, key))
        gone = _others(half, key[0])
        table.upsert(gone)
        con.tier(name)
        table.delete(gone.select(key))
        table.upsert(half.take(np.arange(0, half.num_rows, 10)))
        if rows.num_rows > half.num_rows:
            table.upsert(rows.slice(half.num_rows))


def _with_errors(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Every tenth row has the values of the next."""
    at = np.arange(rows.num_rows)
    at[::10] = np.minimum(at[::10] + 1, rows.num_rows - 1)
    other = rows.take(at)
    columns = [rows[c] if c in key else other[c] for c in rows.column_names]
    return pa.table(columns, schema=rows.schema)


def _others(rows: pa.Table, key: str) -> pa.Table:
    """Rows with keys that the table does not have."""
    some = rows.slice(0, _EXTRA)
    position = some.column_names.index(key)
    keys = pa.array(range(-1 - some.num_rows, -1), some.schema.field(key).type)
    return some.set_column(position, some.schema.field(key), keys)


def same_rows(found: Iterable[Sequence[Any]], wanted: Iterable[Sequence[Any]]) -> bool:
    """Whether both have the same rows, whose order ties leave open; engines differ in the last digits of averages."""
    left, right = (sorted(([*row] for row in rows), key=_rounded) for rows in (found, wanted))
    return len(left) == len(right) and all(
        len(a) == len(b) and all(map(_same, a, b)) for a, b in zip(left, right, strict=True)
    )


def _rounded(row: Sequence[Any]) -> list[str]:
    return [f"{float(v):.5e}" if isinstance(v, int | float | Decimal) else str(v) for v in row]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)
    return bool(a == b)
