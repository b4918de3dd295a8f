"""The sink ``lakehead``: what Spark's tasks write becomes part of a table once, whatever fails and runs twice.

Each attempt at a task stages its rows on the server, straight from its executor. When all tasks have ended, the driver
has the server publish one attempt of each, which it does once (`lakehead.protocol.staging`): a streaming query is
known by the id in its checkpoint and its micro-batch by its number, so that one that is repeated, by the same query or
after a restart from an older checkpoint, is recognised for as long as the table lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from lakehead.api.copying import unfinished_like
from lakehead.api.definition import DEFINITION
from lakehead.api.table import handle_of
from lakehead.client.staging import JobBatch
from lakehead.client.table import TableHandle
from lakehead.errors import InvalidPropertyError, InvalidRequestError, LakeheadError, TableNotFoundError
from lakehead.protocol.staging import StagedPart
from lakehead.spark.checkpoint import in_folder, local_folder, planned_as
from lakehead.spark.connections import in_worker
from lakehead.spark.options import given_options, names_of
from lakehead.spark.staged_rows import NAMES_COLUMNS, QUERY, Target, gone_is_told, of_job, of_query, of_run
from lakehead.spark.types import collations, written_schema
from lakehead.types import TableDescriptor, TabletKey, WriteKind

_MODE = "partitionoverwritemode"
_NAMED = "partitions"
_OPTIONS = ("uri", "table", "operation", "columns", "job", "batch", _MODE, _NAMED)
_SPARKS = ("checkpointlocation", "queryname")
"""Options that are Spark's own."""
_BATCH = "streaming.sql.batchId"
"""Property that Spark sets for the tasks of a micro-batch: its number."""


@dataclass(frozen=True)
class WriteOptions:
    """Options of one ``df.write`` or ``df.writeStream``.

    Attributes:
        target: where the rows go.
        job: with ``batch``, has the same batch of the same job written once, as in ``foreachBatch``; None for a job
            that runs once.
        batch: a number that grows with each batch of the job.
        overwrites: what ``mode("overwrite")`` is of: partitions (``dynamic``), or the table (``static``); None where
            nothing is said.
        partitions: those, by their names; empty for those that rows are written to.
        checkpoint: of a streaming query, as it was given.
    """

    target: Target
    job: str | None
    batch: int
    overwrites: str | None = None
    partitions: tuple[str, ...] = ()
    checkpoint: str = ""

    @property
    def dynamic(self) -> bool:
        return self.overwrites == "dynamic"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Read the texts of ``.option(name, value)``; names in any case.

        Raises:
            InvalidPropertyError: one is missing, unknown or cannot be read.
        """
        given = given_options(options, (*_OPTIONS, *DEFINITION, *_SPARKS), "sink", internal=_SPARKS)
        batch = given.get("batch")
        if batch is not None or "job" in given:
            of_job(given.get("job"), batch)
        if not given.get("buckets", "1").isdecimal():
            raise InvalidPropertyError(f"option buckets={given['buckets']!r} is not a number")
        target = Target(
            given["uri"],
            given["table"],
            cast("WriteKind | None", given["operation"].lower() if "operation" in given else None),
            names_of(given, "columns"),
            {n: _definition(given, n) for n in given if n in DEFINITION},
        )
        mode = given[_MODE].lower() if _MODE in given else None
        if mode not in (None, "static", "dynamic"):
            raise InvalidPropertyError(f"option partitionOverwriteMode={mode!r} must be static or dynamic")
        named = names_of(given, _NAMED)
        if named is not None and (not named or mode == "static"):
            raise InvalidPropertyError(
                f"option partitions={given[_NAMED]!r} names those that mode('overwrite') replaces, such as"
                " day=2026-05-01, and leaves the others: name one, and leave out partitionOverwriteMode='static'"
            )
        mode = mode if named is None else "dynamic"
        checkpoint = given.get("checkpointlocation", "")
        return cls(target, given.get("job"), int(batch or 0), mode, named or (), checkpoint)


def _definition(given: Mapping[str, str], name: str) -> Any:
    if name in NAMES_COLUMNS:
        return list(names_of(given, name) or ())
    return int(given[name]) if name == "buckets" else given[name]


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged, and for which batch."""

    batch: JobBatch
    part: StagedPart


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [m for m in messages if isinstance(m, Staged)]


def _discard(target: Target, batch: JobBatch) -> None:
    """Forget what was staged, if the server can be asked to: what has failed is told, not this."""
    with contextlib.suppress(LakeheadError):
        target.handle.staging.discard(batch)


class BatchWriter(DataSourceArrowWriter):
    """One ``df.write``."""

    def __init__(self, options: WriteOptions, batch: JobBatch) -> None:
        self._options = options
        self._batch = batch

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return Staged(self._batch, self._options.target.stage(self._batch, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        options, parts = self._options, [m.part for m in _staged(messages)]
        if parts or options.partitions:
            over = options.partitions if options.dynamic else None
            with gone_is_told(options.target.table):
                staging = self._handle().staging
                staging.publish(self._batch, parts, lasting=options.job is not None, overwrite=over)

    def _handle(self) -> TableHandle:
        return self._options.target.handle

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _discard(self._options.target, self._batch)


class Overwriter(BatchWriter):
    """One ``df.write.mode("overwrite")``: a table of the same definition gets the rows, and then the name.

    Args:
        table: the name that is overwritten.
        new_id: the id of the table that gets the rows, which ``options`` name.
    """

    def __init__(self, table: str, new_id: str, options: WriteOptions) -> None:
        super().__init__(options, of_run())
        self._table = table
        self._new_id = new_id
        self._swapped = False

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        super().commit(messages)
        in_worker(self._options.target.uri, self._swap, planned=True)

    def _handle(self) -> TableHandle:
        """The table that gets the rows.

        Raises:
            TableNotFoundError: another overwrite has removed it, as it does with what is left of one that died; what
                has its name now is that one's.
        """
        return in_worker(self._options.target.uri, self._required, planned=True)

    def _required(self, con: Connection) -> TableHandle:
        handle = self._unfinished(con)
        if handle is None:
            raise TableNotFoundError(
                f"another overwrite of {self._table} began while this one ran, and takes its place: nothing of this one"
                " is there; run it again if its rows are to be",
                table=self._table,
            )
        return handle

    def _unfinished(self, con: Connection) -> TableHandle | None:
        """The table that gets the rows, as long as it has not got the name."""
        try:
            handle = handle_of(con.table(self._options.target.table))
        except TableNotFoundError:
            return None
        return handle if handle.desc.table_id == self._new_id else None

    def _swap(self, con: Connection) -> None:
        """Give the new table the name, and drop the one that had it. Whoever does this again, as its answer was lost,
        finds that it was done, also where others have overwritten the table since: names that are swapped twice are as
        they were."""
        aside = self._options.target.table
        if not self._swapped:
            self._required(con)
        if not self._swapped or self._unfinished(con) is not None:
            self._swapped = True
            try:
                con._rename(aside, self._table, swap=True, only=self._new_id)
            except TableNotFoundError:
                self._swapped = False
                self._required(con)
                raise
        with contextlib.suppress(TableNotFoundError):
            con.drop_table(aside, purge=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with contextlib.suppress(TableNotFoundError):
            in_worker(self._options.target.uri, self._drop)

    def _drop(self, con: Connection) -> None:
        con._drop(self._options.target.table, purge=True, only=self._new_id)


class StreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of one ``df.writeStream``, of which the first makes a table that does not exist: one that is
    gone later was dropped, and ends the query."""

    def __init__(self, target: Target, schema: pa.Schema, checkpoint: str = "") -> None:
        self._target = target
        self._schema = schema
        self._checkpoint = checkpoint

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        query = context and context.getLocalProperty(QUERY)
        number = context and context.getLocalProperty(_BATCH)
        if not query or not number:
            raise InvalidRequestError(
                f"this Spark does not tell its tasks which query they are of ({QUERY}, {_BATCH}): write each"
                " micro-batch with foreachBatch and options job and batch"
            )
        batch = of_query(query, int(number))
        self._make(batch.number)
        return Staged(batch, self._target.stage(batch, iterator))

    def _make(self, number: int) -> None:
        if number == 0:
            in_worker(self._target.uri, lambda con: self._target.opened(con, self._schema), planned=True)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._make(batchId)  # no task has, if there are no rows
        if staged := _staged(messages):
            with gone_is_told(self._target.table):
                batch = dataclasses.replace(staged[0].batch, planned=self._planned(batchId))
                self._target.handle.staging.publish(batch, [m.part for m in staged], lasting=True)

    def _planned(self, number: int) -> str:
        """What the micro-batch was planned as, if the checkpoint is on a disk of this machine, where Spark's driver is:
        Spark has no driver for other places in Python."""
        folder = local_folder(self._checkpoint)
        return "" if folder is None else planned_as(in_folder(folder), number)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        for batch in {m.batch for m in _staged(messages)}:
            _discard(self._target, batch)


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """Begin a ``df.write``, on the driver.

    Raises:
        InvalidPropertyError: an option is missing, unknown or cannot be read.
        WrongTableKindError, SchemaMismatchError: the table does not take such rows.
    """
    options = WriteOptions.parse(given)
    target = dataclasses.replace(options.target, collated=collations(schema))
    table = in_worker(target.uri, lambda con: target.opened(con, written_schema(schema)))
    if not overwrite or options.dynamic:
        if options.dynamic:
            _require_dynamic(options, handle_of(table).desc, overwrite=overwrite)
        if options.job is None:
            return BatchWriter(options, of_run())
        way = target.way(handle_of(table).desc, options.partitions if options.dynamic else None)
        return BatchWriter(options, of_job(options.job, options.batch, way))
    if options.job is not None or target.columns is not None or target.operation == "delete":
        raise InvalidPropertyError(
            "mode('overwrite') writes all rows of a table: options job, batch, columns and operation are for"
            " mode('append'), or with partitionOverwriteMode='dynamic', job and batch"
        )
    desc = handle_of(table).desc
    if desc.partition_by and options.overwrites is None:
        raise InvalidPropertyError(
            f"{desc.path} has partitions: say option('partitionOverwriteMode', 'static') to replace all of them, or"
            " 'dynamic' to replace those that rows are written to, for INSERT OVERWRITE as an option of the view; Spark"
            " tells sources in Python nothing of its own setting of that name"
        )
    new = in_worker(target.uri, lambda con: unfinished_like(con, desc, desc.path, "overwrite"))
    aside = dataclasses.replace(options, target=dataclasses.replace(target, table=new.name))
    return Overwriter(target.table, handle_of(new).desc.table_id, aside)


def _require_dynamic(options: WriteOptions, desc: TableDescriptor, *, overwrite: bool) -> None:
    if not overwrite:
        raise InvalidPropertyError(
            "options partitions and partitionOverwriteMode='dynamic' are for mode('overwrite'): use that, or leave them"
            " out"
        )
    if options.target.columns is not None or options.target.operation == "delete":
        raise InvalidPropertyError("mode('overwrite') writes whole rows: leave out the options columns and operation")
    desc.require_replaceable()
    for name in options.partitions:
        if not desc.may_have(TabletKey(name, 0)):
            like = "&".join(f"{column}=..." for column in desc.partition_by)
            raise InvalidPropertyError(
                f"option partitions: {name!r} is no partition of {desc.path}, whose names are {like}, with dates as"
                " 2026-05-01 and texts percent-encoded; a JSON list of names may have commas in them"
            )


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """Begin a micro-batch of a ``df.writeStream``, on the driver; errors as of `batch_writer`."""
    options = WriteOptions.parse(given)
    if options.job is not None:
        raise InvalidPropertyError("options job and batch are for df.write: a streaming query has its own")
    if options.dynamic:
        raise InvalidPropertyError(
            "options partitions and partitionOverwriteMode are for df.write: overwrite partitions in foreachBatch, with"
            " options job and batch"
        )
    if overwrite:
        raise InvalidRequestError(
            "outputMode('complete') writes all rows anew each time: upsert them into a keyed table, in foreachBatch"
            " with options job and batch"
        )
    columns = written_schema(schema)
    target = dataclasses.replace(options.target, collated=collations(schema))
    # A micro-batch of many may be planned by a process that has not reached the server before.
    in_worker(target.uri, lambda con: target.checked(con, columns), planned=True)
    return StreamWriter(target, columns, options.checkpoint)
