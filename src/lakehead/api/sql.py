"""SQL over union reads: DuckDB sees each Lakehead table that a statement names as a view of an Arrow dataset.

ALTER TABLE it sees as one of an empty table of its own: see `lakehead.api.alter_statement`.

A statement has a catalog of its own inside one DuckDB, with a schema a database, so that names resolve as they do in
DuckDB. Everything that it names is pinned at one moment.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from lakehead.api.alter_statement import EmptyCopy
from lakehead.api.copied_table import CopiedRows
from lakehead.api.copied_tables import SeenTable
from lakehead.api.dataset import FRAMES, SHOWN, CountedDataset, FrameDataset, PushdownDataset
from lakehead.api.input import in_partitions
from lakehead.api.point_query import PointQuery
from lakehead.api.pushdown import as_duckdb_means
from lakehead.api.relation import INTERRUPTED, Reading, Relation, as_duckdb, require_uninterrupted
from lakehead.api.row_literals import VALUES_MAX, are_texts, rows_as_query
from lakehead.api.sandbox import require_data
from lakehead.api.sql_engine import SqlEngine
from lakehead.api.statement import NamedTable, Statement, read_statement
from lakehead.api.subscription import changelog_schema
from lakehead.api.table import Table, handle_of, pinned_together
from lakehead.api.table_names import Suffix, suffix_of
from lakehead.client.table import TableHandle
from lakehead.env.interrupts import shielded, stoppable
from lakehead.errors import (
    InvalidRequestError,
    SchemaChangedError,
    SchemaMismatchError,
    SqlError,
    TableNotFoundError,
)
from lakehead.format.changes import named_changes
from lakehead.format.plain import PlainKey, plain_rows
from lakehead.format.rows import to_key_table
from lakehead.lake.listing import files_table
from lakehead.lake.records import read_log
from lakehead.lake.union_read import Pin, UnionRead
from lakehead.predicate import parse_predicate
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import OFFSET_COLUMN

_DEFAULT = "default"
_ROWS = "lakehead_statement_rows"
"""What statements call rows by key. What people write cannot name it: see `require_data`."""
_ALTER_ATTEMPTS_MAX = 20


class Tables(Protocol):
    """What a statement asks of the connection that runs it."""

    def tables(self) -> list[str]: ...

    def _tables_called(self, names: Iterable[str]) -> list[str]: ...

    def databases(self) -> list[str]: ...

    def table(self, name: str) -> Table: ...

    def rename_table(self, old: str, new: str) -> object: ...


@dataclass(frozen=True)
class _View:
    """A Lakehead table under one of its names."""

    path: str
    suffix: Suffix | None

    @property
    def schema(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.partition(".")[2] + (f"${self.suffix}" if self.suffix else "")


def run_sql(
    con: Tables, engine: SqlEngine, query: object, params: object, frames: Mapping[str, object] | None
) -> duckdb.DuckDBPyRelation:
    """See `Connection.sql`."""
    try:
        return _run(con, engine, query, _given(params), frames)
    except RuntimeError as e:
        require_uninterrupted(e)
        raise


def _given(params: object) -> object:
    """Parameters as DuckDB takes them; None for none at all, which it would take for a statement that has no plan."""
    if params is not None and (isinstance(params, str | bytes) or not isinstance(params, Sized)):
        kind = type(params).__name__
        raise SqlError(f"params= takes a list of the values of ? or $1, or a dict of those of $name, not {kind}")
    if isinstance(params, Mapping):
        params = {name: _value(v) for name, v in params.items()}
    elif isinstance(params, list | tuple):
        params = [_value(v) for v in params]
    return params if params is not None and len(params) else None


def _value(value: object) -> object:
    """A parameter as DuckDB takes it, which knows none of Arrow's scalars, and not all numbers of numpy."""
    if isinstance(value, np.number | np.bool_):
        return value.item()
    if not isinstance(value, pa.Scalar):
        return value
    try:
        found = value.as_py()
    except (OverflowError, ValueError) as e:
        raise SqlError(f"params= holds {value!r}, which is no value of Python's: {e}") from e
    if getattr(found, "nanosecond", 0):  # which DuckDB would cut off
        raise SqlError(f"params= holds {value!r}, which has nanoseconds: round it")
    return found


def _run(
    con: Tables, engine: SqlEngine, query: object, params: object, frames: Mapping[str, object] | None
) -> duckdb.DuckDBPyRelation:
    cursor = engine.cursor()
    statement = read_statement(cursor, query, unrestricted=engine.unrestricted)
    if not engine.unrestricted:
        require_data(cursor, statement)
    opened: dict[str, Table] = {}
    by_index = engine.reading(cursor)

    def begun() -> tuple[list[str], set[_View], duckdb.DuckDBPyRelation | None]:
        """The tables that there are, those that are named, and the answer where a key index has it: all in one thread,
        as waking another takes as long as to find a row."""
        tables = con.tables() if statement.catalog or statement.shows else con._tables_called(_names(statement, frames))
        views = _views(statement, tables)
        if statement.point is None or not views or frames is not None or engine.unrestricted:
            return tables, views, None
        (view,) = views
        table = opened[view.path] = con.table(view.path)
        return tables, views, _by_index(table, by_index, statement, statement.point, params)

    tables, views, answered = stoppable(begun, by_index.stop)
    if answered is not None:
        return answered
    if statement.catalog and not engine.unrestricted:  # each sees its own tables alone
        cursor, catalog = engine.alone(), "memory"
    else:
        catalog = engine.catalog(cursor, cursor)
    reading = engine.reading(cursor)
    if statement.shows is not None:
        return as_duckdb(Relation(cursor.from_arrow(_shown(con, statement.shows, tables)), reading))
    if statement.alters:
        return as_duckdb(Relation(_alter(con, cursor, catalog, statement, params, views, reading), reading))
    shown = shielded(lambda: _contents(con, opened, views, statement, engine, cursor, reading))
    for rows in shown.values():
        reading.keep(rows)
    if statement.catalog:
        unread = {_View(path, None) for path in tables} - views
        shown |= {view: con.table(view.path).schema.empty_table() for view in unread}
    reading.run(functools.partial(_make_views, cursor, catalog, shown), here=True)
    if frames is not None and not isinstance(frames, Mapping):
        raise InvalidRequestError('frames= takes tables by name: {"name": data}')
    seen: set[str] = set()
    for name, rows in (frames or {}).items():
        _register(cursor, name, rows, tables, seen, reading)
    relation = functools.partial(_relation, cursor, statement, params, con.tables)  # with parameters, it runs at once
    return as_duckdb(Relation(reading.run(relation, relation), reading))


def _by_index(
    table: Table, reading: Reading, statement: Statement, point: PointQuery, params: object
) -> duckdb.DuckDBPyRelation | None:
    """What the statement finds among the rows that the key index has for it; None where the index cannot tell, or
    DuckDB has something to say, which it is to say of the whole table."""
    if statement.parameters and params is None:
        return None
    handle = handle_of(table)
    desc, lookups = handle.desc, handle.lookups
    keys = point.keys(desc.schema, desc.key_columns, params)
    prefixes = [] if keys else point.keys(desc.schema, lookups.prefix_columns, params)
    if not keys and not prefixes:
        return None
    cursor = reading.held
    try:
        rows = _row(handle, keys[0]) if len(keys) == 1 else None
        if rows is None:
            columns = desc.key_columns if keys else lookups.prefix_columns
            asked = in_partitions(desc, to_key_table(keys or prefixes, columns, what="keys"), "keys")
            (batch,) = asked.combine_chunks().to_batches()
            found = lookups.at_once(batch) if keys else lookups.prefix_at_once(batch)
            if found is None:
                return None
            rows = _few(handle, found)
            if rows is None:
                cursor.register(_ROWS, FrameDataset(found, reading.noted))
                rows = _ROWS
    except (InvalidRequestError, SchemaMismatchError, SchemaChangedError):
        return None
    asked_of_rows = dataclasses.replace(statement, text=f"{point.before}{rows}{point.after}")

    def relation() -> duckdb.DuckDBPyRelation:
        found = _relation(cursor, asked_of_rows, params, list)
        found.execute()  # here, as an error would show the text that DuckDB was given
        return found

    try:
        return as_duckdb(Relation(reading.run(relation, relation), reading))
    except (SqlError, TableNotFoundError):
        return None


def _row(handle: TableHandle, key: PlainKey) -> str | None:
    """The query of the row that has a key; None where rows are no text, or this one."""
    if not _are_texts(handle):
        return None
    row = handle.lookups.row(key)
    return _as_query(handle, [] if row is None else [row])


def _few(handle: TableHandle, rows: pa.Table) -> str | None:
    """The query of these rows; None where they are no text, or many."""
    few = rows.num_rows * rows.num_columns <= VALUES_MAX
    return _as_query(handle, plain_rows(rows)) if few and _are_texts(handle) else None


def _are_texts(handle: TableHandle) -> bool:
    return handle.lookups.plain and are_texts(handle.desc.schema)


def _as_query(handle: TableHandle, rows: Sequence[Sequence[Any]]) -> str | None:
    query = rows_as_query(handle.desc.schema, rows)
    return None if query is None else f"({query})"


def _relation(
    cursor: duckdb.DuckDBPyConnection, statement: Statement, params: object, tables: Callable[[], Sequence[str]]
) -> duckdb.DuckDBPyRelation:
    if statement.parameters and params is None:
        raise SqlError(
            f"the statement has parameters ({', '.join(statement.parameters)}): give their values as params="
        )
    try:
        relation = cursor.sql(statement.text, params=params) if params is not None else cursor.sql(statement.text)
    except duckdb.CatalogException as e:
        if "Table with name" not in str(e):
            raise
        raise _not_found(str(e).splitlines()[0], statement, tables()) from e
    except (TypeError, ValueError, RuntimeError) as e:
        if INTERRUPTED in str(e):
            raise
        raise SqlError(f"these parameters cannot be used: {e}") from e
    return relation if isinstance(relation, duckdb.DuckDBPyRelation) else _done(cursor)


def _done(cursor: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyRelation:
    """What DuckDB answers a statement that has no rows."""
    return cursor.sql("select true as Success where false")


def _alter(
    con: Tables,
    cursor: duckdb.DuckDBPyConnection,
    catalog: str,
    statement: Statement,
    params: object,
    views: set[_View],
    reading: Reading,
) -> duckdb.DuckDBPyRelation:
    """Change the table that the statement names; no rows, as DuckDB answers it."""
    if suffixed := [v for v in views if v.suffix]:
        path, suffix = suffixed[0].path, suffixed[0].suffix
        raise SqlError(f"{path}${suffix} has the columns of {path}: alter {path}, and it follows", statement="ALTER")
    cursor.execute(f'create schema if not exists {catalog}."{_DEFAULT}"; use {catalog}."{_DEFAULT}"')
    if views:
        (view,) = views
        for left in reversed(range(_ALTER_ATTEMPTS_MAX)):
            try:
                _alter_once(con, con.table(view.path), cursor, catalog, statement, params, reading)
                break
            except SchemaChangedError:  # by somebody else, since it was opened a moment ago
                if not left:
                    raise
    else:  # of a table that does not exist, which is nothing with IF EXISTS
        reading.run(lambda: _execute(cursor, statement, params, con.tables()))
    return _done(cursor)


def _alter_once(
    con: Tables,
    table: Table,
    cursor: duckdb.DuckDBPyConnection,
    catalog: str,
    statement: Statement,
    params: object,
    reading: Reading,
) -> None:
    copy = EmptyCopy(cursor, catalog, table)
    if statement.comments:
        with table.alter() as alteration:
            reading.run(lambda: copy.run_comment(statement, params, alteration))
        return
    reading.run(lambda: copy.run(statement, params))
    name = reading.run(copy.new_name)
    if name is not None:
        con.rename_table(table.name, name)
        return
    with table.alter() as alteration:
        reading.run(lambda: copy.tell(alteration))


def _execute(cursor: duckdb.DuckDBPyConnection, statement: Statement, params: object, tables: Sequence[str]) -> None:
    try:
        cursor.execute(statement.text, params)
    except duckdb.CatalogException as e:
        if "Table with name" not in str(e):
            raise
        raise _not_found(str(e).splitlines()[0], statement, tables) from e


def _not_found(text: str, statement: Statement, tables: Sequence[str]) -> TableNotFoundError:
    named = {f"{t.schema or _DEFAULT}.{t.name}" for t in statement.tables}
    near = [f"{n}: did you mean {m[0]}?" for n in sorted(named) if (m := difflib.get_close_matches(n, tables, 1))]
    known = f"Lakehead tables: {', '.join(tables[:20]) or 'none'}"
    lacks = [t.name for t in statement.tables if not t.schema and f"name {t.name} does" in text]
    variable = f". A variable of the program is given by frames={{{lacks[0]!r}: ...}}" if lacks else ""
    text = text.partition(" because schema ")[0].removesuffix("!")  # which is DuckDB's
    return TableNotFoundError(f"{text}! {' '.join(near) or known + variable}")


def _shown(con: Tables, what: str, tables: Sequence[str]) -> pa.Table:
    if what == "tables":
        return pa.table({"name": pa.array(tables, pa.string())})
    column = "database_name" if what == "databases" else "schema_name"
    return pa.table({column: pa.array(con.databases(), pa.string())})


# ---- names ----------------------------------------------------------------------------------------------------------


def _names(statement: Statement, frames: object) -> set[str]:
    """What tables would be called that the statement, or a frame, names."""
    named = {f"{t.schema or _DEFAULT}.{t.name.partition('$')[0]}" for t in statement.tables if not t.catalog}
    given = [name for name in frames if isinstance(name, str)] if isinstance(frames, Mapping) else []
    named |= {f"{_DEFAULT}.{name}" for name in given if name.isidentifier()}  # others are refused
    return {name.lower() for name in named}


def _views(statement: Statement, tables: Sequence[str]) -> set[_View]:
    """The Lakehead tables that a statement names; names that are none are left to DuckDB.

    Raises:
        SqlError: there is no such suffix, or two tables are named whose names differ only by case.
        TableNotFoundError: a name with a suffix is no table's.
    """
    found = {view for named in statement.tables if (view := _view(named, tables)) is not None}
    seen: dict[str, str] = {}
    for view in sorted(found, key=lambda v: v.path):
        other = seen.setdefault(view.path.lower(), view.path)
        if other != view.path:
            raise SqlError(f"{other} and {view.path} are one name in SQL: read one of them with scan()")
    return found


def _view(named: NamedTable, tables: Sequence[str]) -> _View | None:
    if named.catalog:
        return None
    name, _, suffix = named.name.partition("$")
    asked = f"{named.schema or _DEFAULT}.{name}"
    same = [t for t in tables if t.lower() == asked.lower()]
    path = asked if asked in same else same[0] if len(same) == 1 else None
    if path is not None:
        return _View(path, suffix_of(path, suffix))
    if len(same) > 1:
        raise SqlError(f"{asked} may be {' or '.join(same)}: write it as it is")
    if suffix.lower() in tuple(Suffix):
        raise TableNotFoundError(f"there is no table {asked}: its ${suffix} cannot be read", table=asked)
    return None


def _register(
    cursor: duckdb.DuckDBPyConnection,
    name: object,
    rows: object,
    tables: Sequence[str],
    seen: set[str],
    reading: Reading,
) -> None:
    """Let the statement read a frame under its name, any number of times: what can be read once is read here, whole."""
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidRequestError(f"frames: {name!r} is not a name that a statement can use")
    if any(t.lower() == f"{_DEFAULT}.{name}".lower() for t in tables):
        raise InvalidRequestError(f"frames: {name!r} is a table of this connection too: give the frame another name")
    if name.lower() in seen:
        raise InvalidRequestError(f"frames: {name!r} is the name of two frames, as SQL has no case: rename one of them")
    seen.add(name.lower())
    if isinstance(rows, list):
        rows = _table_of(name, rows)
    elif type(rows).__module__.startswith("polars.") and hasattr(rows, "to_arrow"):
        rows = rows.to_arrow()
    elif not isinstance(rows, FRAMES) and _may_be_a_stream(rows):
        rows = _read_whole(name, rows)
    try:
        cursor.register(name, FrameDataset(rows, reading.noted) if isinstance(rows, FRAMES) else rows)
    except (duckdb.Error, TypeError) as e:
        if _lacks_columns(rows):
            raise InvalidRequestError(
                f"frames: {name!r} has no columns, of which an empty list of dicts tells nothing: give Arrow data or a"
                " data frame that has them, such as schema.empty_table()"
            ) from e
        schema = getattr(rows, "schema", None)
        if isinstance(e, duckdb.NotImplementedException) and isinstance(schema, pa.Schema):
            unread = ", ".join(f"{f.name} ({f.type})" for f in schema if not _is_read(cursor, f))
            raise InvalidRequestError(
                f"frames: {name!r} has columns of types that DuckDB does not know: {unread or e}: cast them, or leave"
                " them out"
            ) from e
        raise InvalidRequestError(
            f"frames: {name!r} is a {type(rows).__name__}, which has no rows that DuckDB can read: give Arrow data,"
            " pandas, Polars or a list of dicts",
        ) from e


def _is_read(cursor: duckdb.DuckDBPyConnection, column: pa.Field) -> bool:
    try:
        cursor.from_arrow(pa.schema([column]).empty_table())
    except duckdb.Error:
        return False
    return True


def _lacks_columns(rows: object) -> bool:
    schema = getattr(rows, "schema", None)
    names = schema.names if isinstance(schema, pa.Schema) else getattr(rows, "columns", None)  # pandas'
    return isinstance(names, Sized) and not len(names)


def _table_of(name: str, rows: list[Any]) -> pa.Table:
    """Dicts as a table with the columns that any of them has; null where one lacks it."""
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidRequestError(f"frames: row {i} of {name!r} is no dict of column name to value")
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    if odd := [column for column in columns if not isinstance(column, str)]:
        raise InvalidRequestError(f"frames: the rows of {name!r} have {odd[0]!r}, which is no name of a column")
    try:
        return pa.table({column: pa.array([row.get(column) for row in rows]) for column in columns})
    except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError) as e:
        raise InvalidRequestError(f"frames: the rows of {name!r} are no dicts of like values: {e}") from e


def _may_be_a_stream(rows: object) -> bool:
    """Whether what has Arrow data may have them once: pandas' and our own have them again."""
    has = hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__") or isinstance(rows, ds.Scanner)
    return has and not any(cls.__module__.split(".")[0] == "pandas" for cls in type(rows).__mro__)


def _read_whole(name: str, rows: Any) -> pa.Table:
    try:
        if isinstance(rows, pa.RecordBatchReader):  # whose errors are lost on the way through C
            return rows.read_all()
        return rows.to_table() if isinstance(rows, ds.Scanner) else pa.table(rows)
    except (pa.ArrowException, OSError, TypeError, ValueError) as e:
        raise InvalidRequestError(f"frames: {name!r} cannot be read: {e}") from e


# ---- rows -----------------------------------------------------------------------------------------------------------


def _make_views(cursor: duckdb.DuckDBPyConnection, catalog: str, shown: Mapping[_View, object]) -> None:
    """Names for what a statement reads; the schema in use is the default one afterwards."""
    schemas = {view.schema for view in shown} - {_DEFAULT}
    for schema in (*schemas, _DEFAULT):
        cursor.execute(f'create schema if not exists {catalog}."{schema}"; use {catalog}."{schema}"')
        for view, rows in shown.items():
            if view.schema == schema:
                if isinstance(rows, CopiedRows):
                    cursor.sql(rows.text).create_view(view.name)
                    continue
                relation = cursor.from_arrow(rows)
                (relation.project(SHOWN) if isinstance(rows, CountedDataset) else relation).create_view(view.name)


def _contents(
    con: Tables,
    opened: dict[str, Table],
    views: set[_View],
    statement: Statement,
    engine: SqlEngine,
    cursor: duckdb.DuckDBPyConnection,
    reading: Reading,
) -> dict[_View, object]:
    """What each view reads, all as of one moment.

    Args:
        opened: tables that were opened for this statement a moment ago, by name; they are taken out.

    Raises:
        NoLakeError: a suffix asks for the lake of a table that has none.
    """
    pinned, copies, unrestricted = (
        pinned_together(lambda path: opened.pop(path, None) or con.table(path), {v.path for v in views}),
        engine.copies,
        engine.unrestricted,
    )

    def rows(view: _View) -> object:
        (table, pin), suffix = pinned[view.path], view.suffix
        if suffix is Suffix.CHANGELOG:
            return _changelog(table, pin, reading)
        if suffix:
            table._desc.require_lake()
            assert pin.lake is not None
            if suffix is Suffix.SNAPSHOTS:
                return pin.lake.table.snapshots()
            if suffix is Suffix.FILES:
                return files_table(pin.lake.as_committed().plan())
            pin = pin.of_lake()
        by_key = table.primary_key and statement.valued.issuperset(map(str.lower, table.primary_key))
        if unrestricted or statement.catalog or by_key:  # which could change a copy, has none, or an index
            return _dataset(table, pin, None, reading)
        seen = copies.seen(handle_of(table), pin)
        copy = reading.run(lambda: copies.copy(cursor, seen, handle_of(table), pin))
        return copy or _dataset(table, pin, seen, reading)

    return {view: rows(view) for view in views}


def _dataset(table: Table, pinned: Pin, seen: SeenTable | None, reading: Reading) -> CountedDataset:
    """The user's columns; `Table.scan` has the system columns, too. Reads are noted where a copy could take them."""
    handle = handle_of(table)
    user = handle.desc.schema

    def read(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        predicate = None if where is None else parse_predicate(as_duckdb_means(where, user), user)
        yield from UnionRead(handle, pinned, ReadSpec(tuple(columns or ()), predicate)).batches()

    def count() -> Iterator[int]:
        yield UnionRead(handle, pinned, ReadSpec(())).count()

    timed = read if seen is None else seen.timed(read, handle.env.clock)
    return CountedDataset(pa.schema([*user]), reading.noted(timed), reading.noted(count))


def _changelog(table: Table, pinned: Pin, reading: Reading) -> PushdownDataset:
    handle = handle_of(table)
    schema = changelog_schema(handle.desc)

    def read(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        wanted = schema.names if columns is None else columns
        names = schema.names if where is not None else wanted
        projected = pa.schema([schema.field(c) for c in wanted])
        predicate = None if where is None else parse_predicate(as_duckdb_means(where, schema), schema)
        for batch in read_log(handle, pinned, ReadSpec(tuple(dict.fromkeys((*names, OFFSET_COLUMN))))):
            rows = named_changes(batch)
            yield _project(rows if predicate is None else predicate.filter(rows), projected)

    return PushdownDataset(schema, reading.noted(read))


def _project(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([rows.column(c) for c in schema.names], schema=schema)
