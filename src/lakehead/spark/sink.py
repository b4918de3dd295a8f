"""The sink ``lakehead``: what Spark's tasks write becomes part of a table once, whatever fails and runs twice.

Each attempt at a task stages its rows on the server, straight from its executor. When all tasks have ended, the driver
has the server publish one attempt of each, which it does once (`lakehead.protocol.staging`): a streaming query is
known by the id in its checkpoint and its micro-batch by its number, so that one that is repeated, by the same query or
after a restart from an older checkpoint, is recognised for as long as the table lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from lakehead.api.connection import Connection
from lakehead.api.input import rows_for_append, rows_for_delete, rows_for_upsert
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.client.table import TableHandle
from lakehead.config import TableProperties
from lakehead.env.randomness import SystemRandomness
from lakehead.errors import InvalidPropertyError, InvalidRequestError, TableNotFoundError, WrongTableKindError
from lakehead.protocol.staging import StagedPart
from lakehead.spark.connections import in_worker, worker_table
from lakehead.spark.options import given_options, names_of
from lakehead.spark.types import arrow_schema
from lakehead.types import WriteKind

STAGED_ROWS = 1 << 16
STAGED_BYTES = 32 << 20
"""A task stages what it has once it is so much."""
_NAMES = ("primary_key", "bucket_key", "partition_by")
_DEFINITION = (*_NAMES, "buckets", "lake", *TableProperties().to_user())
_OPTIONS = ("uri", "table", "operation", "columns", "job", "batch")
_SPARKS = ("checkpointlocation", "queryname")
"""Options that are Spark's own."""
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Properties that Spark sets for the tasks of a micro-batch."""


@dataclass(frozen=True)
class WriteOptions:
    """Options of one ``df.write`` or ``df.writeStream``.

    Attributes:
        uri: address of the server.
        table: the table's name. A table that does not exist is made, with the DataFrame's columns and ``definition``.
        operation: ``append``, ``upsert`` or ``delete``; None for what the kind of the table takes, append or upsert.
        columns: of an upsert, the columns to take; the others stay as they are.
        job: with ``batch``, has the same batch of the same job written once, as in ``foreachBatch``; None for a job
            that runs once.
        batch: a number that grows with each batch of the job.
        definition: ``primary_key``, ``bucket_key``, ``partition_by`` (``a, b``), ``buckets``, ``lake`` and table
            properties, for the table that is made.
    """

    uri: str
    table: str
    operation: WriteKind | None
    columns: tuple[str, ...] | None
    job: str | None
    batch: int
    definition: Mapping[str, Any]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Read the texts of ``.option(name, value)``; names in any case.

        Raises:
            InvalidPropertyError: one is missing, unknown or cannot be read.
        """
        given = given_options(options, (*_OPTIONS, *_DEFINITION, *_SPARKS), "sink", internal=_SPARKS)
        operation = given.get("operation")
        if operation not in (None, "append", "upsert", "delete"):
            raise InvalidPropertyError(f"option operation={operation!r} must be append, upsert or delete")
        batch = given.get("batch")
        if (batch is None) != ("job" not in given) or not (batch or "0").isdigit():
            raise InvalidPropertyError(
                "options job and batch go together: a name of your own for the job, and a number that grows with each"
                " of its batches, as foreachBatch has one"
            )
        if not given.get("buckets", "1").isdigit():
            raise InvalidPropertyError(f"option buckets={given['buckets']!r} is not a number")
        return cls(
            given["uri"],
            given["table"],
            cast("WriteKind | None", operation),
            names_of(given, "columns"),
            given.get("job"),
            int(batch or 0),
            {n: _definition(given, n) for n in given if n in _DEFINITION},
        )

    def require_table(self, schema: StructType) -> None:
        """Return once the table exists, and takes such rows; its columns are those of the DataFrame when it is made
        now.

        Raises:
            TableNotFoundError: there is none, and this deletes rows or takes some columns.
            WrongTableKindError, SchemaMismatchError: the table does not take them.
        """

        def require(con: Connection) -> None:
            try:
                con.table(self.table)
            except TableNotFoundError:
                if self.operation == "delete" or self.columns is not None:
                    raise
                con.create_table(self.table, arrow_schema(schema), if_not_exists=True, **self.definition)

        in_worker(self.uri, require)
        handle = self.handle
        rows_for(handle, self, self.kind(handle), arrow_schema(schema).empty_table())

    @property
    def handle(self) -> TableHandle:
        return handle_of(worker_table(self.uri, self.table))

    def kind(self, handle: TableHandle) -> WriteKind:
        """What is done with rows.

        Raises:
            WrongTableKindError: the table does not take that.
        """
        keyed = handle.desc.keyed
        kind: WriteKind = self.operation or ("upsert" if keyed else "append")
        if keyed == (kind == "append"):
            table = "primary-key" if keyed else "log"
            raise WrongTableKindError(f"{self.table} is a {table} table: operation={kind!r} is not for it")
        if self.columns is not None and kind != "upsert":
            raise WrongTableKindError(f"option columns is for upserts: {self.table} gets whole rows, or keys to delete")
        return kind


def _definition(given: Mapping[str, str], name: str) -> Any:
    if name in _NAMES:
        return list(names_of(given, name) or ())
    return int(given[name]) if name == "buckets" else given[name]


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged, and for which batch."""

    batch: JobBatch
    part: StagedPart


def _stage(options: WriteOptions, batch: JobBatch, batches: Iterator[pa.RecordBatch]) -> Staged:
    """Stage what a task writes, some batches at a time."""
    handle = options.handle
    kind = options.kind(handle)
    context = TaskContext.get()
    staged = handle.staging.rows(batch, share=0 if context is None else context.partitionId())
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for part in batches:
        held.append(part)
        rows, size = rows + part.num_rows, size + part.nbytes
        if rows >= STAGED_ROWS or size >= STAGED_BYTES:
            staged.add(kind, rows_for(handle, options, kind, pa.Table.from_batches(held)))
            held, rows, size = [], 0, 0
    if rows:
        staged.add(kind, rows_for(handle, options, kind, pa.Table.from_batches(held)))
    return Staged(batch, staged.done())


def rows_for(handle: TableHandle, options: WriteOptions, kind: WriteKind, given: pa.Table) -> pa.Table:
    """Rows of a DataFrame as the table takes them; errors as of `lakehead.Table.append`, `upsert` and `delete`."""
    match kind:
        case "append":
            return rows_for_append(handle.desc, given)
        case "upsert":
            return rows_for_upsert(handle.desc, given, options.columns)
        case "delete":
            return rows_for_delete(handle.desc, given)


def _publish(options: WriteOptions, messages: Sequence[WriterCommitMessage | None], *, lasting: bool) -> None:
    staged = [m for m in messages if isinstance(m, Staged)]
    if staged:
        options.handle.staging.publish(staged[0].batch, [m.part for m in staged], lasting=lasting)


def _discard(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    for batch in {m.batch for m in messages if isinstance(m, Staged)}:
        options.handle.staging.discard(batch)


class BatchWriter(DataSourceArrowWriter):
    """One ``df.write``."""

    def __init__(self, options: WriteOptions, batch: JobBatch) -> None:
        self._options = options
        self._batch = batch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return _stage(self._options, self._batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _publish(self._options, messages, lasting=self._options.job is not None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._options.handle.staging.discard(self._batch)


class StreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of one ``df.writeStream``."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        query = context and context.getLocalProperty(_QUERY)
        number = context and context.getLocalProperty(_BATCH)
        if not query or not number:
            raise InvalidRequestError(
                f"this Spark does not tell its tasks which query they are of ({_QUERY}, {_BATCH}): write each"
                " micro-batch with foreachBatch and options job and batch"
            )
        return _stage(self._options, JobBatch(f"query {query}", int(number)), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _publish(self._options, messages, lasting=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _discard(self._options, messages)


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """Begin a ``df.write``, on the driver.

    Raises:
        InvalidPropertyError: an option is missing, unknown or cannot be read.
        InvalidRequestError: the mode is not append.
    """
    options = WriteOptions.parse(given)
    if overwrite:
        raise InvalidRequestError(
            f"mode('overwrite') is not there: call con.table({options.table!r}).truncate() and append; or write another"
            " table and give it this one's name, with con.rename_table(..., swap=True)"
        )
    options.require_table(schema)
    run = f"run {SystemRandomness().uuid_hex()}"
    return BatchWriter(options, JobBatch((options.job and f"job {options.job}") or run, options.batch))


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """Begin a micro-batch of a ``df.writeStream``, on the driver; errors as of `batch_writer`."""
    options = WriteOptions.parse(given)
    if options.job is not None:
        raise InvalidPropertyError("options job and batch are for df.write: a streaming query has its own")
    if overwrite:
        raise InvalidRequestError(
            "outputMode('complete') writes all rows anew each time: upsert them into a keyed table, in foreachBatch"
            " with options job and batch"
        )
    options.require_table(schema)
    return StreamWriter(options)
