"""Statements that copy what they read into DuckDB, however little it was read before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api import copied_tables
from lakehead.api.sql_engine import SqlEngine

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), pa.field("p", pa.string(), False), ("v", pa.string())])


@contextmanager
def copying_at_once() -> Iterator[None]:
    """While this lasts, `con.sql` copies each table that it reads whole, when it is named first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_tables, "READS_LEAST", 0)
        patch.setattr(copied_tables, "COPY_SECONDS", 0.0)
        patch.setattr(copied_tables, "CELLS_PER_SECOND", float("inf"))
        patch.setattr(copied_tables, "COPY_LEAST", float("inf"))
        patch.setattr(copied_tables, "EXCESS_MAX", float("inf"))
        patch.setattr(copied_tables, "_per_cell", lambda seconds, cells: 0.0)
        yield


def rows_of(con: lh.Connection, name: str, where: str = "true") -> list[tuple[Any, ...]]:
    return sorted(con.sql(f"select * from {name} where {where}").fetchall())


def put(table: lh.Table, ids: range, v: str) -> list[tuple[Any, ...]]:
    rows = [{"k": n, "p": f"p{n % 2}", "v": v} for n in ids]
    (table.upsert if table.primary_key else table.append)(rows)
    return [tuple(row.values()) for row in rows]


def engine_of(con: lh.Connection) -> SqlEngine:
    return con._sql[False]


def catalogs(con: lh.Connection) -> list[str]:
    """What is attached to the DuckDB of its statements, once what was let go of is gone."""
    gc.collect()
    cursor = engine_of(con).cursor()
    return [n for (n,) in cursor.execute("select database_name from duckdb_databases() where not internal").fetchall()]
