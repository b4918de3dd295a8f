"""Lakehead's table names in Spark SQL: found in the text, registered as views for one statement, and replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from pyspark.errors import PySparkException

from lakehead.api.connection import Connection
from lakehead.api.subscription import changelog_schema, chosen_columns
from lakehead.api.table import Table, handle_of, pinned_together
from lakehead.api.table_names import (
    Suffix,
    TableName,
    find_names,
    find_tables,
    replace_names,
    spelt,
    suffix_of,
    unquoted,
)
from lakehead.env.randomness import SystemRandomness
from lakehead.errors import InvalidRequestError, SqlError
from lakehead.format.changes import named_changes
from lakehead.lake.listing import files_table
from lakehead.lake.records import read_log
from lakehead.lake.union_read import Moment, Pin, pin
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark.aliases import Unnamed, alias_for, alias_place
from lakehead.spark.as_of import Times, as_of, masked
from lakehead.spark.column_names import as_named
from lakehead.spark.connections import connection_of
from lakehead.spark.defined_names import defined_names, inserts
from lakehead.spark.failures import raised
from lakehead.spark.floats import quoted
from lakehead.spark.handled_errors import handled
from lakehead.spark.identifiers import Texts, called, with_identifiers
from lakehead.spark.kept_frame import Seen, look
from lakehead.spark.needs import Needs, needs_of
from lakehead.spark.scratch import scratch_frame
from lakehead.spark.statements import NamedQuery, ShownDatabases, ShownTables, keeps_text, require_read
from lakehead.spark.types import spark_schema
from lakehead.spark.union_frame import is_large, union_frame
from lakehead.types import Tier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WHERE = re.compile(r"\bwhere\b", re.IGNORECASE)
_EQUALS = r"(?:==?|<=>|\bin\b)"
_VALUES = frozenset(["date", "timestamp", "timestamp_ntz", "cast", "true", "false", "x"])
"""Words that a value may begin with."""
_MISSING = {"TABLE_OR_VIEW_NOT_FOUND": "relationName", "SCHEMA_NOT_FOUND": "schemaName"}
"""Where Spark's errors name what was not found."""
FEW_ROWS = 10_000
"""A keyed table of so many rows is read sooner than a statement is asked which keys it needs."""
_Read: TypeAlias = tuple[str, Moment | None]
"""A full name with its suffix, and the moment of the lake that it is read at, None for now."""
_Ask: TypeAlias = Callable[[Mapping[_Read, pa.Schema]], Mapping[_Read, Needs]]


def read_name(
    spark: SparkSession,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    tier: Tier = "union",
    snapshot: Moment | None = None,
    system_columns: bool = False,
) -> DataFrame:
    """See `lakehead.spark.table`."""
    con = connection_of(spark)
    path, _, text = name.partition("$")
    table = con.table(path)
    suffix = suffix_of(table.name, text)
    if suffix in (None, Suffix.LAKE):
        if suffix:
            tier = "lake"
        return union_frame(
            spark, con.uri, table, columns=columns, tier=tier, snapshot=snapshot, system_columns=system_columns
        )
    if tier != "union" or snapshot is not None or system_columns:
        raise InvalidRequestError(f"{name}: tier, snapshot and system_columns are for tables and their $lake")
    frame = _pinned_name(spark, table, suffix, pin(handle_of(table)))
    if columns is None:
        return frame
    names = chosen_columns(handle_of(table).desc, as_named(frame.columns, columns), frame.columns)
    return frame.select(*map(quoted, names))


def _pinned_name(
    spark: SparkSession,
    table: Table,
    suffix: Suffix | None,
    pinned: Pin,
    needs: Needs | None = None,
    seen: Seen | None = None,
) -> DataFrame:
    """What a name with this suffix reads under a pin, or what is needed of it; ``seen`` as in `union_frame`."""
    handle = handle_of(table)
    if suffix is Suffix.CHANGELOG:
        schema = changelog_schema(handle.desc)
        return _frame(spark, schema, map(named_changes, read_log(handle, pinned, ReadSpec(tuple(schema.names)))))
    if suffix is None:
        return union_frame(spark, connection_of(spark).uri, table, pinned=pinned, needs=needs, seen=seen)
    handle.desc.require_lake()
    if suffix is Suffix.LAKE:
        return union_frame(spark, connection_of(spark).uri, table, pinned=pinned.of_lake())
    assert pinned.lake is not None
    rows = (
        pinned.lake.table.snapshots() if suffix is Suffix.SNAPSHOTS else files_table(pinned.lake.as_committed().plan())
    )
    return _frame(spark, rows.schema, rows.to_batches())


def _frame(spark: SparkSession, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> DataFrame:
    frame = scratch_frame(spark, schema, batches)
    return frame if frame is not None else spark.createDataFrame([], spark_schema(schema))


@handled()
def run_sql(spark: SparkSession, query: str, args: Mapping[str, Any] | Sequence[Any] | None = None) -> DataFrame:
    """See `lakehead.spark.sql`."""
    if not isinstance(query, str) or not query.strip():
        raise SqlError("the statement is empty: write for example 'select count(*) from shop.orders'")
    con = connection_of(spark)
    texts = Texts(spark, args)
    tables = con._tables_called(called(query, texts))
    query = with_identifiers(query, tables, texts)
    text = masked(query)
    require_read(
        text,
        lambda name: None if _is_view(spark, name) else spelt(name, con._tables_called([name.table])),
        _own_databases(spark, con, text),
    )
    if (shown := ShownTables.of(query, text)) is not None and (
        own := _database(spark, con, shown.database)
    ) is not None:
        rows = [(own, table, False) for path in con.tables(own) if shown.has(table := path.partition(".")[2])]
        return spark.createDataFrame(rows, "namespace string, tableName string, isTemporary boolean")
    if (databases := ShownDatabases.of(query, text)) is not None:
        there = {*con.databases(), *(found.namespace for found in spark.sql("show databases").collect())}
        return spark.createDataFrame([(name,) for name in sorted(filter(databases.has, there))], "namespace string")
    if (named := NamedQuery.of(text)) is not None and find_spark_tables(query, tables):
        return _named(spark, named, run_sql(spark, query[named.start :], args))
    kept = find_spark_tables(query, tables) if keeps_text(text) else []
    if (own := next((full for name, full in kept if not _is_view(spark, name)), None)) is not None:
        raise SqlError(
            f"Spark keeps this statement as text, in which {own} is no table of its own: make a view of a"
            " DataFrame, as in lhs.sql(spark, 'select ...').createOrReplaceTempView('name')"
        )
    views: dict[_Read, str] = {}
    mapping: dict[TableName, str] = {}
    aliases: dict[TableName, str] = {}
    prefix = f"lakehead_{SystemRandomness().uuid_hex()}"
    try:
        for name, full in find_spark_tables(query, tables):
            if _is_view(spark, name):
                continue
            whole, moment = as_of(query, name, Times(spark, _plain(args)), args)
            view = views.setdefault((full, moment), f"{prefix}_{len(views)}")
            mapping[whole] = view
            if alias := alias_for(query, whole):
                aliases[whole] = alias
        names = Unnamed(text, [name for name in aliases if not name.suffix])
        for name, alias in aliases.items():
            at = alias_place(query, name)
            place = replace(name, start=at, end=at, text="")
            mapping[place] = alias if name.suffix else f" as {names.called(name)}"
        mapping |= {n: columns for n in find_names(text) if n not in mapping and (columns := names.column(n))}
        statement = replace_names(query, mapping)

        def ask(schemas: Mapping[_Read, pa.Schema]) -> dict[_Read, Needs]:
            found = needs_of(spark, text, statement, _plain(args), {views[r]: s for r, s in schemas.items()})
            alone = len(views) == 1
            return {read: replace(found[view], alone=alone) for read in schemas if (view := views[read]) in found}

        inserting = bool(inserts(text))
        for read, frame in _frames(spark, con, list(views), query, ask):
            # No statement can write to what is selected, whatever it is that inserts.
            (frame.select("*") if inserting else frame).createOrReplaceTempView(views[read])
        # The statement is analysed here, so that the views may go; the frame holds what they stood for.
        return spark.sql(statement, _plain(args))
    except PySparkException as e:
        raise raised(e) or SqlError(_not_there(con, text, e) or _readable(e, views)) from e
    finally:
        for view in views.values():
            spark.catalog.dropTempView(view)


def _frames(
    spark: SparkSession, con: Connection, reads: Sequence[_Read], query: str, ask: _Ask
) -> Iterator[tuple[_Read, DataFrame]]:
    """What a statement reads: tables now, all as of one moment, or the lake of some other one.

    Args:
        ask: what the statement needs of tables, once it has all else that it names; asked where this may pay.
    """
    now = {read: read[0].partition("$") for read in reads if read[1] is None}
    pinned = pinned_together(con.table, {path for path, _, _ in now.values()})
    tables, pins = {path: table for path, (table, _) in pinned.items()}, {path: at for path, (_, at) in pinned.items()}
    suffixes = {read: suffix_of(tables[path].name, suffix) for read, (path, _, suffix) in now.items()}
    for full, moment in reads:
        if moment is not None:
            yield (full, moment), read_name(spark, full, snapshot=moment)
        elif suffixes[full, None] is not None:
            path = now[full, None][0]
            yield (full, None), _pinned_name(spark, tables[path], suffixes[full, None], pins[path])
    plain = {read: path for read, (path, _, _) in now.items() if suffixes[read] is None}
    seen = {path: look(spark, tables[path], pins[path]) for path in sorted(set(plain.values()))}
    needs: Mapping[_Read, Needs] = {}
    if any(
        (is_large(pins[path].ranges) and not at.still and at.base is None)
        or _has_key(query, tables[path], pins[path], alone=len(reads) == 1)
        for path, at in seen.items()
    ):
        needs = ask({read: handle_of(tables[path]).desc.schema for read, path in plain.items()})
    for read, path in plain.items():
        yield read, _pinned_name(spark, tables[path], None, pins[path], needs.get(read), seen[path])


def _has_key(query: str, table: Table, pinned: Pin, *, alone: bool) -> bool:
    """Whether a statement may give the whole key of rows, of so many that asking their index pays; the columns that
    lead it, where it reads nothing else."""
    if (pinned.live_rows or 0) <= FEW_ROWS or _WHERE.search(query) is None:
        return False
    leading = handle_of(table).lookups.prefix_columns.names if alone else ()
    keys = leading or table.primary_key
    return bool(keys) and all(gives_value(query, key) for key in keys)


def gives_value(query: str, column: str) -> bool:
    """Whether a statement may have a column equal a value, or one of a list, and not just another column."""
    name = rf"(?<!\w){re.escape(column)}(?!\w)`?"
    for found in re.finditer(rf"{name}\s*{_EQUALS}\s*(?P<word>[^\W\d]\w*|`|\(\s*select\b)?", query, re.IGNORECASE):
        if found["word"] is None or found["word"].lower() in _VALUES:
            return True
    value_first = rf"(?:[\d'\")?]|:\w+)\s*{_EQUALS}\s*(?:[\w`]+\.)*`?{name}"
    return re.search(value_first, query, re.IGNORECASE) is not None


def _named(spark: SparkSession, named: NamedQuery, frame: DataFrame) -> DataFrame:
    """Give a query its name; it reads what it reads now."""
    if named.columns is not None:
        if len(named.columns) != len(frame.columns):
            raise SqlError(f"view {named.name} has {len(named.columns)} columns, its query {len(frame.columns)}")
        frame = frame.toDF(*named.columns)
    name = quoted(named.name)
    try:
        if named.everywhere:
            (frame.createOrReplaceGlobalTempView if named.replace else frame.createGlobalTempView)(name)
        else:
            (frame.createOrReplaceTempView if named.replace else frame.createTempView)(name)
        if named.cached is not None:
            spark.catalog.cacheTable(name)
            if named.cached:
                spark.table(name).count()
    except PySparkException as e:
        raise raised(e) or SqlError(_readable(e, {})) from e
    return spark.createDataFrame([], spark_schema(pa.schema([])))


def _own_databases(spark: SparkSession, con: Connection, text: str) -> list[str]:
    """Lakehead's databases that Spark has none of the names of; asked where a statement creates something."""
    if not text.lstrip().lower().startswith(("create", "replace")):
        return []
    return [name for name in con.databases() if not spark.catalog.databaseExists(name)]


def _database(spark: SparkSession, con: Connection, name: str) -> str | None:
    """Lakehead's database of that name, which Spark has none of; None for no such."""
    folded = name.casefold()
    own = [d for d in con.databases() if d.casefold() == folded]
    return own[0] if len(own) == 1 and not spark.catalog.databaseExists(name) else None


def _is_view(spark: SparkSession, name: TableName) -> bool:
    """Whether the session has a temporary view of that name, which Spark looks for first."""
    if len(name.path) > 1 or name.suffix:
        return False
    return bool(spark._jsparkSession.sessionState().catalog().getTempView(name.path[0]).isDefined())


def _plain(args: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Any] | list[Any] | None:
    return None if args is None else dict(args) if isinstance(args, Mapping) else list(args)


def find_spark_tables(query: str, tables: Sequence[str]) -> list[tuple[TableName, str]]:
    """Lakehead's tables that a Spark statement reads, each with its full name and suffix.

    Double quotes are strings in Spark, and a bare name is the statement's own where it defines it
    (``with orders as``).
    """
    text = masked(query)
    defined = defined_names(text)
    out = []
    for name in find_tables(text, tables):
        bare = name.path[0].casefold() if len(name.path) == 1 and not name.suffix else None
        if any(own.name == bare and own.start <= name.start < own.end for own in defined):
            continue
        full = ".".join(name.path) if len(name.path) > 1 else f"default.{name.path[0]}"
        out.append((name, f"{full}${name.suffix}" if name.suffix else full))
    return out


def _not_there(con: Connection, text: str, e: PySparkException) -> str | None:
    """What is to be done where Spark did not find what Lakehead has: it is named by a parameter without a name, in a
    string, or where nothing is read. None for other errors."""
    named = (e.getMessageParameters() or {}).get(_MISSING.get(e.getCondition() or "", ""), "")
    path = [unquoted(part) for part in re.findall(r"`(?:[^`]|``)*`", named)]
    if not path:
        return None
    if e.getCondition() == "SCHEMA_NOT_FOUND":
        found = next((d for d in con.databases() if d.casefold() == path[-1].casefold()), None)
        return found and f"{found} is a database of Lakehead's, which Spark's own catalog lacks: name {found}.<table>"
    name, words = ".".join(path[-2:]), " ".join(text.lower().split()[:2])
    if not con._tables_called({name.partition("$")[0]}):
        return None
    return (
        f"{name} is a table of Lakehead's, which lhs.sql does not find in {words} ...: name it where a statement reads"
        f" it (from {name}, identifier('{name}'), identifier(:name)); describe {name} shows its columns"
    )


def _readable(e: Exception, views: Mapping[_Read, str]) -> str:
    text = str(e).split("\n\nJVM stacktrace")[0].split(";\n'")[0].strip()
    for (full, _), view in views.items():
        text = text.replace(view, full)
    return text
