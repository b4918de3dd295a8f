"""SQL over union reads: DuckDB sees each Lakehead table that a statement names as an Arrow dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.dataset import PushdownDataset
from lakehead.api.subscription import named_changes
from lakehead.api.table_names import SUFFIXES, TableName, find_tables, replace_names
from lakehead.errors import LakeheadError, SqlError, TableNotFoundError
from lakehead.format.predicate import parse_predicate
from lakehead.lake.union import Pin, Tier, UnionRead, pin
from lakehead.types import CHANGE_TYPE_COLUMN, SYSTEM_FIELDS

if TYPE_CHECKING:
    import duckdb

    from lakehead.api.connection import Connection
    from lakehead.api.table import Table

_VIEW = "__lakehead_{}"


def run_sql(con: Connection, cursor: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation:
    """See `Connection.sql`."""
    import duckdb

    if not isinstance(query, str) or not query.strip():
        raise SqlError("the statement is empty: write for example 'select count(*) from shop.orders'")
    objects: dict[str, object] = {}
    mapping: dict[TableName, str] = {}
    seen: dict[tuple[str, str], str] = {}
    for name in find_tables(query, con.tables()):
        full = name.table
        if (full, name.suffix) not in seen:
            seen[full, name.suffix] = _VIEW.format(len(seen))
            objects[seen[full, name.suffix]] = sql_object(con.table(full), name.suffix)
        view = seen[full, name.suffix]
        mapping[name] = view if _has_alias(query, name) else f"{view} as {_alias(name)}"
    scope: dict[str, Any] = {"run": cursor.sql, "query": replace_names(query, mapping), **objects}
    try:
        # DuckDB looks unknown table names up in the caller's variables and keeps what it found alive.
        relation = eval("run(query)", scope)
    except LakeheadError:
        raise
    except duckdb.Error as e:
        raise _sql_error(e, con) from e
    if relation is None:
        raise SqlError("the statement returns no rows: con.sql() reads; write through append, upsert and delete")
    assert isinstance(relation, duckdb.DuckDBPyRelation)
    return relation


def _has_alias(query: str, name: TableName) -> bool:
    import re

    after = re.match(r"\s+(as\s+)?([^\W\d]\w*|\")", query[name.end :], re.IGNORECASE)
    stops = "where group order having limit join inner left right full cross natural on using union except intersect"
    stops += " window qualify offset semi anti asof positional tablesample sample pivot unpivot select fetch for"
    words = set(stops.split())
    return after is not None and (after[1] is not None or after[2].lower() not in words)


def _alias(name: TableName) -> str:
    """What columns are qualified by when the statement gives no alias: the last part of the name."""
    last = name.path[-1] + (f"${name.suffix}" if name.suffix else "")
    return '"' + last.replace('"', '""') + '"'


def _sql_error(e: Exception, con: Connection) -> LakeheadError:
    import duckdb

    text = str(e)
    if isinstance(e, duckdb.CatalogException) and "Table with name" in text:
        return TableNotFoundError(f"{text.splitlines()[0]} Lakehead tables: {', '.join(con.tables()) or 'none'}")
    return SqlError(text)


def sql_object(table: Table, suffix: str) -> object:
    """What a table name with this suffix stands for in SQL: something DuckDB can scan.

    Raises:
        SqlError: there is no such suffix.
        NoLakeError: the table has no lake.
    """
    if suffix in ("", "lake"):
        return _dataset(table, "lake" if suffix else "union")
    if suffix == "changelog":
        return _changelog(table)
    if suffix == "lake$snapshots":
        return table.lake.snapshots()
    if suffix == "lake$files":
        return table.lake.files()
    known = ", ".join(f"${s}" for s in SUFFIXES)
    raise SqlError(f"{table.name}${suffix}: there is no such suffix; use one of {known}")


def _dataset(table: Table, tier: Tier) -> PushdownDataset:
    client = table._client
    pinned: Pin = pin(client, tier=tier)
    user = client.desc.schema
    # System columns can be selected by name; `select *` shows the user's columns only where DuckDB asks for them all.
    schema = pa.schema([*user])

    def read(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        predicate = None if where is None else parse_predicate(where, user)
        return UnionRead(client, pinned, columns=columns or [], predicate=predicate).batches()

    return PushdownDataset(schema, read)


def _changelog(table: Table) -> PushdownDataset:
    client = table._client
    stops = {t.key: (t.log_start, t.high_watermark) for t in client.tablets()}
    kind = [pa.field(CHANGE_TYPE_COLUMN, pa.string())]
    schema = pa.schema([*client.desc.schema, *kind, *SYSTEM_FIELDS])

    def read(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        wanted = schema.names if columns is None else columns
        names = schema.names if where is not None else wanted
        projected = pa.schema([schema.field(c) for c in wanted])
        for _, batch in client.read_ranges(stops, names or ["__offset"]):
            rows = named_changes(batch)
            if where is not None:
                rows = pa.Table.from_batches([rows]).filter(where)
                for part in rows.to_batches():
                    yield _project(part, projected)
            else:
                yield _project(rows, projected)

    return PushdownDataset(schema, read)


def _project(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([rows.column(c) for c in schema.names], schema=schema)
