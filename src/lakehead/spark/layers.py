"""One streaming query that writes several tables from each micro-batch: all of them, or none, and once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.util import inheritable_thread_target

from lakehead.api.connection import Connection
from lakehead.api.input import rows_for_upsert
from lakehead.api.table import Table, handle_of
from lakehead.client.staging import JobBatch, publish_together
from lakehead.env.randomness import SystemRandomness
from lakehead.errors import (
    ColumnNotFoundError,
    InvalidPropertyError,
    InvalidRequestError,
    LakeheadError,
    WrongTableKindError,
)
from lakehead.format.schema import nearest_name
from lakehead.protocol.staging import StagedPart
from lakehead.spark.connections import connection_of
from lakehead.spark.staged_rows import Target, stage_frame
from lakehead.spark.types import arrow_schema, spark_schema
from lakehead.types import WriteKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SMALL_ROWS = 20_000
"""A micro-batch after one of so many rows passes through the driver: tasks in Python cost more than its rows do. Spark
stops what would be too much for it (``spark.driver.maxResultSize``)."""
Rows: TypeAlias = "DataFrame | ArrowStream"
_QUERY = "sql.streaming.queryId"
"""Property that Spark sets where a micro-batch runs."""


class ArrowStream(Protocol):
    """Arrow data of any library: a table, record batches, a reader."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class Layers:
    """What one micro-batch writes. Nothing is in a table until the step has returned and all its rows are staged; then
    all of it is, at once for each tablet.

    Rows of one table land in the order of the calls. What the step reads of these tables is as of before the
    micro-batch, also when it is repeated.

    Rows are a DataFrame, or Arrow data (anything with ``__arrow_c_stream__``): what a step has in Arrow already, as of
    ``batch.toArrow()``, needs no further Spark job.

    Tables that do not exist are made, with the columns of the rows; keyword arguments are those of
    `lakehead.Connection.create_table`, and mean nothing for a table that is there.
    """

    def __init__(self, con: Connection, batch: JobBatch, *, small: bool = False) -> None:
        """``small`` has rows pass through the driver, which costs less than tasks do as long as they are few."""
        self._con = con
        self._batch = batch
        self._small = small
        self._writes: list[_Write] = []

    def append(self, table: str, rows: Rows, **definition: Any) -> None:
        """Append rows to a log table."""
        self._add(table, rows, "append", None, definition)

    def upsert(self, table: str, rows: Rows, *, columns: Sequence[str] | None = None, **definition: Any) -> None:
        """Insert or update rows of a keyed table; of ``columns``, the others stay as they are."""
        self._add(table, rows, "upsert", names(columns), definition)

    def delete(self, table: str, rows: Rows) -> None:
        """Delete the rows with these keys."""
        self._add(table, rows, "delete", None, {})

    def accumulate(
        self,
        table: str,
        rows: Rows,
        *,
        sum: Sequence[str] = (),
        min: Sequence[str] = (),
        max: Sequence[str] = (),
        **definition: Any,
    ) -> None:
        """Add to what a keyed table has: the new value of a column is the sum, the least or the greatest of the old one
        and of those in these rows; a null counts for nothing.

        Args:
            rows: the keys, and the columns that are named; several rows of a key count as if they were one after the
                other, so they need not be grouped before. One row a key and task comes to the driver.
        """
        how = {c: "sum" for c in sum} | {c: "min" for c in min} | {c: "max" for c in max}
        if not how or len(how) < len(sum) + len(min) + len(max):
            raise InvalidRequestError("accumulate needs columns to sum, or to take the min or max of, each named once")
        self._add(table, rows, "upsert", None, definition, how)

    def _add(
        self,
        table: str,
        rows: Rows,
        kind: WriteKind,
        columns: tuple[str, ...] | None,
        definition: Mapping[str, Any],
        how: Mapping[str, str] | None = None,
    ) -> None:
        target = Target(self._con.uri, table, kind, columns, definition)
        given = rows if isinstance(rows, DataFrame) else pa.table(rows)
        self._writes.append(_Write(target, given, how))

    def write(self) -> int:
        """Stage everything, then publish it; returns how many rows that were, 0 for what was there before."""
        if not self._writes:
            return 0
        for write in self._writes:
            write.target.require_table(write.schema)
        tables = {w.target.table: self._con.table(w.target.table) for w in self._writes}
        parts: dict[str, list[StagedPart]] = {}
        try:
            for write, staged in zip(self._writes, self._staged(tables), strict=True):
                parts.setdefault(write.target.table, []).extend(staged)
        except BaseException:
            for table in tables.values():
                with contextlib.suppress(LakeheadError):
                    handle_of(table).staging.discard(self._batch)
            raise
        together = [(handle_of(tables[name]).staging, of_table) for name, of_table in parts.items()]
        return publish_together(self._batch, together, lasting=True).rows

    def _staged(self, tables: Mapping[str, Table]) -> list[list[StagedPart]]:
        """What each write has staged. Their Spark jobs run side by side: most of a small one is waiting."""

        def stage(write: _Write) -> list[StagedPart]:
            return write.stage(tables[write.target.table], self._batch, small=self._small)

        frames = [w.rows for w in self._writes if isinstance(w.rows, DataFrame)]
        if len(frames) < 2:
            return [stage(write) for write in self._writes]
        stop_with_query = inheritable_thread_target(frames[0].sparkSession)
        with ThreadPoolExecutor(len(self._writes), "lakehead-pipeline") as pool:
            return list(pool.map(stop_with_query(stage), self._writes))


@dataclass(frozen=True)
class _Write:
    target: Target
    rows: DataFrame | pa.Table
    how: Mapping[str, str] | None

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self.rows.schema) if isinstance(self.rows, DataFrame) else self.rows.schema

    def stage(self, table: Table, batch: JobBatch, *, small: bool) -> list[StagedPart]:
        handle = handle_of(table)
        if self.how is not None:
            combine = Combine.of(table, self.schema.names, self.how)
            added = accumulated(table, combine.collected(self.rows, small), self.how)
            return [Target(self.target.uri, table.name, "upsert").stage(batch, added.to_batches(), handle)]
        if isinstance(self.rows, DataFrame) and not small:
            return stage_frame(self.target, self.rows, batch)
        rows = self.rows.toArrow() if isinstance(self.rows, DataFrame) else self.rows
        return [self.target.stage(batch, rows.to_batches(), handle)]


@dataclass(frozen=True)
class Combine:
    """One row a key: what tasks, and then the driver, do with rows that are accumulated."""

    keys: tuple[str, ...]
    how: Mapping[str, str]

    @classmethod
    def of(cls, table: Table, columns: Sequence[str], how: Mapping[str, str]) -> Combine:
        """For a table and the columns of rows.

        Raises:
            WrongTableKindError: the table has no keys.
            ColumnNotFoundError, InvalidRequestError: the columns are not the key and what ``how`` names.
        """
        if not table.primary_key:
            raise WrongTableKindError(f"{table.name} is a log table: what accumulates needs keys")
        wanted = [*table.primary_key, *how]
        for name in wanted:
            if name not in columns:
                near = nearest_name(name, columns)
                raise ColumnNotFoundError(f"the rows for {table.name} have no column {name!r}; {near}", column=name)
        if more := [c for c in columns if c not in wanted]:
            raise InvalidRequestError(
                f"columns {more} for {table.name} are no keys, and neither summed nor the min or max: leave them out"
            )
        return cls(tuple(table.primary_key), how)

    def collected(self, given: DataFrame | pa.Table, small: bool) -> pa.Table:
        """Rows, combined; the tasks of a DataFrame begin with that unless there are few."""
        if not isinstance(given, DataFrame):
            return self.rows(given)
        if small:
            return self.rows(given.toArrow())
        combined = self.rows(arrow_schema(given.schema).empty_table()).schema
        return self.rows(given.mapInArrow(self, spark_schema(combined)).toArrow())

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: list[pa.Table] = [self.rows(pa.Table.from_batches([batch])) for batch in batches]
        if held:
            yield from self.rows(pa.concat_tables(held)).to_batches()

    def rows(self, given: pa.Table) -> pa.Table:
        found = given.group_by(list(self.keys)).aggregate(list(self.how.items()))
        names = [*self.keys, *(f"{c}_{f}" for c, f in self.how.items())]
        return found.select(names).rename_columns([*self.keys, *self.how])


def accumulated(table: Table, given: pa.Table, how: Mapping[str, str]) -> pa.Table:
    """The rows that a keyed table is to have once these are added to it; see `Layers.accumulate`."""
    combine = Combine.of(table, given.column_names, how)
    desc, wanted = handle_of(table).desc, [*combine.keys, *how]
    new = rows_for_upsert(desc, combine.rows(given), None).select(wanted)
    old = table.lookup(new.select(list(combine.keys))).select(wanted)
    return rows_for_upsert(desc, combine.rows(pa.concat_tables([old, new.cast(old.schema)])), None)


def write_once(
    df: DataFrame,
    table: str,
    *,
    columns: Sequence[str] | None,
    operation: WriteKind | None,
    definition: Mapping[str, Any],
) -> int:
    """See `lakehead.spark.write`."""
    target = Target(connection_of(df.sparkSession).uri, table, operation, names(columns), definition)
    target.require_table(arrow_schema(df.schema))
    batch = JobBatch(f"run {SystemRandomness().uuid_hex()}")
    staging = target.handle.staging
    try:
        parts = stage_frame(target, df, batch)
    except BaseException:
        with contextlib.suppress(LakeheadError):
            staging.discard(batch)
        raise
    return staging.publish(batch, parts, lasting=False).rows


def names(columns: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)


Step: TypeAlias = "Callable[[DataFrame, Layers], None]"


def run_pipeline(
    stream: DataFrame,
    step: Step,
    *,
    checkpoint: str | None,
    name: str | None,
    trigger: str | None,
    output_mode: str,
) -> StreamingQuery:
    """See `lakehead.spark.pipeline`."""
    con = connection_of(stream.sparkSession)

    begun: list[StreamingQuery] = []

    def micro_batch(df: DataFrame, number: int) -> None:
        batch = JobBatch(f"query {query_id(df.sparkSession)}", number)
        layers = Layers(con, batch, small=any(0 < _last_rows(query) <= SMALL_ROWS for query in begun))
        step(df, layers)
        layers.write()

    query = started(stream, micro_batch, checkpoint=checkpoint, name=name, trigger=trigger, output_mode=output_mode)
    begun.append(query)
    return query


def _last_rows(query: StreamingQuery) -> int:
    """How many rows the last micro-batch had that Spark tells of; 0 for none."""
    last = query._jsq.lastProgress()
    return 0 if last is None else int(last.numInputRows())


def started(
    stream: DataFrame,
    micro_batch: Callable[[DataFrame, int], None],
    *,
    checkpoint: str | None,
    name: str | None,
    trigger: str | None,
    output_mode: str = "append",
) -> StreamingQuery:
    """Begin a query of micro-batches.

    Raises:
        InvalidRequestError: the DataFrame is no stream.
        InvalidPropertyError: the trigger is none.
    """
    if not stream.isStreaming:
        raise InvalidRequestError("a DataFrame of spark.read does not grow: begin with spark.readStream")
    writer = stream.writeStream.foreachBatch(micro_batch).outputMode(output_mode)
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", str(checkpoint))
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        if not trigger.strip():
            raise InvalidPropertyError("trigger='' must be 'available now' or a time such as '1 second'")
        now = trigger.replace(" ", "").lower() == "availablenow"
        writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime=trigger)
    return writer.start()


def query_id(spark: SparkSession) -> str:
    """The id, in its checkpoint, of the query whose micro-batch this thread works on."""
    found = spark.sparkContext.getLocalProperty(_QUERY)
    if found is None:
        raise InvalidRequestError(f"this Spark does not tell which query a micro-batch is of ({_QUERY})")
    return found
