"""PySpark: sessions, union reads as native DataFrames, SQL names, the data source, and tiering as a Spark job.

Importing this needs neither PySpark nor Java; the first call that does raises `MissingDependencyError` without them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lakehead.config import parse_duration_ms
from lakehead.spark.failures import raised

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from lakehead.api.connection import Connection
    from lakehead.spark.change_columns import Names
    from lakehead.spark.lag import SourceProgress
    from lakehead.spark.layers import Step
    from lakehead.tiering.executor import SmallRounds
    from lakehead.tiering.service import RoundReport, TieringService
    from lakehead.types import Tier

__all__ = [
    "apply_changes", "attach", "lookup_join", "pipeline", "progress", "raised", "session", "sql", "table",
    "tiering_service", "write",
]  # fmt: skip


def session(con_or_uri: Connection | str, **conf: Any) -> SparkSession:
    """A Spark session with everything set for Lakehead; names in `table` and `sql` mean this connection's tables.

    Args:
        con_or_uri: a connection, or what `lakehead.connect` takes; executors reach it through its URI.
        **conf: ``master`` (default: what Spark is configured with, else ``local[2]``), ``app_name``, and any Spark
            setting, as in ``**{"spark.driver.memory": "4g"}``.

    A session that runs already is used as it is. One on this machine is closed to its other users, where neither
    ``conf`` nor Spark's configuration says otherwise.

    Raises:
        MissingDependencyError: PySpark or a Java 17+ runtime is not installed; nothing was started. Or as of `attach`,
            which ends the session again.
    """
    _require()
    from lakehead.spark.launch import open_session

    return open_session(con_or_uri, conf)


def attach(spark: SparkSession, con_or_uri: Connection | str) -> SparkSession:
    """Make an existing session know a connection: sets what can be set at run time, registers the data source, and has
    the executors of a cluster look whether they have what tasks need.

    Raises:
        MissingDependencyError: the Python that Spark runs there, or plans with here, lacks a module, or is not there.
        AuthenticationError, InvalidRequestError: executors are not let in by the server, or do not reach it.
    """
    _require()
    from lakehead.spark.launch import attach_session

    return attach_session(spark, con_or_uri)


def table(
    spark: SparkSession,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    tier: Tier = "union",
    snapshot: int | dt.datetime | None = None,
    system_columns: bool = False,
) -> DataFrame:
    """A table as of now: native Parquet scans of the lake without what is deleted or superseded, and the hot rows.

    Args:
        name: ``"db.table"``, also with ``$lake``, ``$lake$snapshots``, ``$lake$files`` or ``$changelog``.
        columns: the columns wanted, in this order; None for all.
        tier: as in `lakehead.Table.scan`.
        snapshot: the lake alone, as of this lake snapshot, or as of a time with a zone.
        system_columns: add ``__bucket``, ``__offset`` and ``__timestamp``.

    Raises:
        TableNotFoundError, ColumnNotFoundError, NoLakeError, SnapshotNotFoundError.
    """
    _require()
    from lakehead.spark.table_names import read_name

    return read_name(spark, name, columns=columns, tier=tier, snapshot=snapshot, system_columns=system_columns)


def sql(spark: SparkSession, query: str, args: Mapping[str, Any] | Sequence[Any] | None = None) -> DataFrame:
    """Run Spark SQL; Lakehead's tables may be named, also ``t$lake``, ``t$changelog``, ``t$lake$snapshots``.

    All are read as of one moment, that of this call, or the lake alone ``version as of`` a snapshot's id or ``timestamp
    as of`` a time or an expression of one, in the session's zone where it names none. Names that are not Lakehead's are
    left to Spark, which looks for temporary views of the session first.

    ``create temp view v as select ...`` and ``cache table c as select ...`` give a query a name that lasts as long as
    the session; it reads what it reads now. Statements that change a Lakehead table are refused, and say what does it.

    Args:
        query: one statement.
        args: values of its parameters, by name (``:day``) or in order (``?``), as `SparkSession.sql` takes them.

    Raises:
        SqlError: the statement cannot be parsed, names an unknown suffix or changes a table, or no literal follows ``as
            of``.
        SnapshotNotFoundError, NoLakeError: there is nothing of that moment.
        TableNotFoundError: a name with a suffix is no table.
    """
    _require()
    from lakehead.spark.table_names import run_sql

    return run_sql(spark, query, args)


def progress(query: StreamingQuery) -> list[SourceProgress]:
    """How far a streaming query is behind each Lakehead table that it reads, as of its last progress; empty before it
    made any."""
    _require()
    from lakehead.spark.lag import query_progress

    return query_progress(query)


def lookup_join(
    df: DataFrame,
    table: str,
    on: str | Sequence[str] | Mapping[str, str],
    *,
    columns: Sequence[str] | None = None,
    how: Literal["left", "inner"] = "left",
    max_staleness: str | float | None = None,
) -> DataFrame:
    """Add to each row what a keyed table has for its key: of a batch or a stream, without a shuffle and without state.

    Executors ask the table's key index when they come to a batch of rows, so the values are those of that moment, and a
    stream sees what was written a moment before. What is looked up again, as when Spark computes a row twice, may have
    changed meanwhile.

    The table may be altered and overwritten meanwhile, as long as it has this key and these columns. Else whatever
    computes the rows fails, a query that runs too, with what `raised` makes `SchemaChangedError` of
    (`WrongTableKindError` where there is a log table now, `TableNotFoundError` where there is none): then make the
    join again.

    Args:
        df: its session knows the connection (`session`, `attach`).
        table: the name of a keyed table.
        on: the columns that are the table's primary key, all of it; ``{"its name": "name in the key"}`` where they are
            called something else. A row with a null among them, or a value that the key's type does not hold, has no
            match.
        columns: the columns to add, in this order; None for all but the key.
        how: ``left`` keeps rows without a match, with nulls; ``inner`` drops them.
        max_staleness: how old the values may be, as in ``"5s"``: each executor process remembers that long what it has
            looked up, keys that are not there included, up to 131,072 keys and 32 MiB a join. None has every batch
            asked for.

    Raises:
        TableNotFoundError, WrongTableKindError: there is no keyed table of that name.
        ColumnNotFoundError, InvalidRequestError: a column is not there, or there twice, as Spark tells names apart;
            ``on`` is not the key.
        SchemaMismatchError: a column of ``on`` is of another type than the key, or has a collation: keys are compared
            by their bytes.
    """
    _require()
    from lakehead.spark.key_join import lookup_join as joined

    stale_ms = 0 if max_staleness is None else parse_duration_ms(max_staleness, "max_staleness")
    return joined(df, table, on, columns=columns, how=how, stale_ms=stale_ms)


def pipeline(
    stream: DataFrame,
    step: Step,
    *,
    checkpoint: str | None = None,
    name: str | None = None,
    trigger: str | None = None,
    output_mode: Literal["append", "update"] = "append",
) -> StreamingQuery:
    """Begin a streaming query that writes several tables from each of its micro-batches: all of them or none, once,
    whatever fails, also when the step comes to other rows the second time.

    Args:
        stream: a streaming DataFrame, whose session knows the connection (`session`, `attach`).
        step: called with the rows of a micro-batch and the `Layers` to write: ``append``, ``upsert``, ``delete`` and
            ``accumulate``. It only says what is to be written; this is done after it has returned.
        checkpoint: where Spark keeps how far the query is. A query that is to go on after a restart needs it.
        name: of the query, for people.
        trigger: ``"available now"``, or how often a micro-batch begins, as in ``"1 second"``; None for at once.
        output_mode: ``update`` for streams that aggregate: micro-batches of the rows that changed. ``complete`` has all
            rows in each.

    Raises:
        InvalidRequestError: ``stream`` is no stream, its session knows no connection, or ``step`` takes no two
            arguments.
        InvalidPropertyError: ``trigger`` or ``output_mode`` is none.
    """
    _require()
    from lakehead.spark.layers import run_pipeline

    return run_pipeline(stream, step, checkpoint=checkpoint, name=name, trigger=trigger, output_mode=output_mode)


def apply_changes(
    stream: DataFrame,
    table: str,
    *,
    keys: Names,
    sequence_by: str | Column,
    apply_as_deletes: str | Column | None = None,
    column_list: Names | None = None,
    except_column_list: Names | None = None,
    stored_as_scd_type: Literal[1, 2, "1", "2"] = 1,
    checkpoint: str | None = None,
    name: str | None = None,
    trigger: str | None = None,
) -> StreamingQuery:
    """Begin a query that applies the changes in a stream to a keyed table, once each, in the order of their sequence,
    in whatever order they come: what `create_auto_cdc_flow` does in Spark's pipelines, by the same names.

    A table ``<table>__sequences`` (type 1) or ``<table>__deletes`` (type 2) is kept beside it, by which late changes
    are known. Both tables are made where they do not exist.

    Args:
        stream: a streaming DataFrame of changes, whole rows each, whose session knows the connection.
        table: the name of the keyed table. Its primary key is ``keys``; for type 2 ``keys`` and ``start_at``.
        keys: the columns that say which row is meant, by name or as such (``col("id")``).
        sequence_by: a column or SQL expression, never null or NaN: the greater of two changes of a key is the later.
            Changes of the same key and sequence are the same change. Type 1 takes a struct of integers, booleans, dates
            and timestamps, too, whose last field may be a string: the first field that differs decides.
        apply_as_deletes: a condition, as in ``"op = 'd'"``: such a change deletes the row. A text is none.
        column_list, except_column_list: the columns that the table gets, or does not; None for all of the stream.
        stored_as_scd_type: 1 keeps the newest row of a key; 2 all, with ``start_at``, the sequence at which a row came
            into force, and ``end_at``, that of the change which ended it, null for the row in force.
        checkpoint, name, trigger: as of `pipeline`.

    Raises:
        ColumnNotFoundError, InvalidRequestError: a column is not there, an expression is none, or the stream is none.
        InvalidPropertyError: ``trigger`` is none; no table was made.
        WrongTableKindError, SchemaMismatchError: the table has no keys, or others.
    """
    _require()
    from lakehead.spark.change_feed import apply_changes as applied

    return applied(
        stream,
        table,
        keys=keys,
        sequence_by=sequence_by,
        apply_as_deletes=apply_as_deletes,
        column_list=column_list,
        except_column_list=except_column_list,
        stored_as_scd_type=stored_as_scd_type,
        checkpoint=checkpoint,
        name=name,
        trigger=trigger,
    )


def write(
    df: DataFrame,
    table: str,
    *,
    columns: Sequence[str] | None = None,
    operation: Literal["append", "upsert", "delete"] | None = None,
    job: str | None = None,
    batch: int | None = None,
    **definition: Any,
) -> int:
    """Write the rows of a DataFrame, once, straight from its executors; returns how many, once they are there.

    What ``df.write.format("lakehead")`` does, in one call, and without a process that plans the write.

    Args:
        df: its session knows the connection (`session`, `attach`).
        table: its name. A table that does not exist is made, with the DataFrame's columns and ``definition``.
        columns: of an upsert, the columns to take; the others stay as they are.
        operation: ``append``, ``upsert`` or ``delete``; None for what the kind of the table takes, append or upsert.
        job, batch: as in ``foreachBatch``: a name of yours, and a number that grows with each batch of the job, which
            is then in the table once; 0 rows are written of one that is there already.
        **definition: as of `lakehead.Connection.create_table`, without the schema.

    Raises:
        InvalidRequestError: ``df`` is a stream; `pipeline` and ``df.writeStream.format("lakehead")`` write those.
        InvalidPropertyError: there is no such operation, one of ``job`` and ``batch`` lacks the other, or the
            definition says what no table has; nothing was made.
        WrongTableKindError, SchemaMismatchError: the table does not take such rows.
        LakeheadError: what a task raised.
    """
    _require()
    from lakehead.spark.layers import write_once

    return write_once(df, table, columns=columns, operation=operation, job=job, batch=batch, definition=definition)


def tiering_service(
    spark: SparkSession | None,
    con_or_uri: Connection | str,
    tables: Sequence[str] | None = None,
    *,
    on_round: Callable[[RoundReport], None] | None = None,
    small_rounds: SmallRounds = "spark",
) -> TieringService:
    """The service that keeps lake tables as fresh as they promise; ``.run(until)`` runs it.

    Args:
        spark: where rounds run; None makes a session of its own while it runs.
        tables: names, or patterns such as ``shop.*``; None for all tables with a lake, those created later too.
        on_round: called after each round that moved rows, in the thread of ``run``.
        small_rounds: where rounds of fewer than 50,000 log records run: ``spark``, many of them in one job, or
            ``driver``, in this process, which takes a fifth of the time and no executor.
    """
    _require()
    from lakehead.spark.tiering import open_service

    return open_service(spark, con_or_uri, tables, on_round=on_round, small_rounds=small_rounds)


def _require() -> None:
    from lakehead.spark.launch import require_pyspark

    require_pyspark()
