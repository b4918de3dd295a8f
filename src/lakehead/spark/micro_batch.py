"""The rows of a micro-batch, read by the driver itself where a Spark job would take longer than they do.

A micro-batch of a Lakehead table is what lies between two offsets, which whoever knows them can read. So
``batch.toArrow()`` of one that is small, and no more than rows and columns that `lakehead.spark.plain_columns` knows,
is a request to the server: no job, no task, no Python worker. What cannot be read like that, or fails, is left to
Spark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.sql.classic.dataframe import DataFrame
from pyspark.sql.types import StructType

from lakehead.api.connection import Connection
from lakehead.api.table import handle_of
from lakehead.client.table import TableHandle
from lakehead.errors import LakeheadError
from lakehead.format.read_as import cast_to
from lakehead.spark.checkpoint import local_folder, root_of
from lakehead.spark.options import ReadOptions, wanted_rows
from lakehead.spark.parts import read_changes, record_parts
from lakehead.spark.plain_columns import PlainRows, kind_of, rows_of
from lakehead.spark.stream_offsets import StreamOffset, records_between, rows_between
from lakehead.spark.types import arrow_schema
from lakehead.types import CHANGE_TYPE_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as AnyFrame
    from pyspark.sql.streaming.query import StreamingQuery

ROWS_MAX = 1 << 18
BYTES_MAX = 128 << 20
"""What is larger is read by tasks, side by side."""
_SOURCE = "lakehead"


@dataclass
class PlainStream:
    """A stream of one Lakehead table that does no more than choose rows and columns.

    Attributes:
        read: the columns to read: those that others are computed from, and what decides which records are rows.
        given: the schema of what is read, as Spark gives it in Arrow.
        rows: what becomes of it.
        schema: of that, as Spark gives it in Arrow.
        handle: the table, once a micro-batch was read; it serves all that name the same definition of it.
    """

    options: ReadOptions
    read: tuple[str, ...]
    given: pa.Schema
    rows: PlainRows
    schema: pa.Schema
    handle: TableHandle | None = None

    @classmethod
    def of(cls, stream: AnyFrame) -> PlainStream | None:
        """What a streaming DataFrame is, if it is that."""
        try:
            found = rows_of(stream._jdf.queryExecution().analyzed())
            if found is None:
                return None
            relation, rows = found
            if kind_of(relation) != "StreamingRelationV2" or relation.sourceName() != _SOURCE:
                return None
            options = ReadOptions.parse(dict(relation.extraOptions().asCaseSensitiveMap()))
            columns = arrow_schema(StructType.fromJson(json.loads(relation.schema().json())))
            large = stream.sparkSession.conf.get("spark.sql.execution.arrow.useLargeVarTypes")
        except (Py4JError, TypeError, LakeheadError):  # also a Spark that names its plans in another way
            return None
        names = stream.columns
        if large == "true" or len(set(names)) < len(names) or not names or not rows.reads:
            return None
        given = pa.schema([field for field in columns if field.name in rows.reads])
        told = CHANGE_TYPE_COLUMN in columns.names and CHANGE_TYPE_COLUMN not in given.names
        read = (*given.names, CHANGE_TYPE_COLUMN) if told else tuple(given.names)
        return cls(options, read, given, rows, arrow_schema(stream.schema))

    def made_of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """What becomes of records that were read."""
        return self.rows.of(cast_to(self.given, rows), self.schema)


@dataclass(frozen=True)
class Span:
    """The offsets that a micro-batch of a plain stream lies between."""

    of: PlainStream
    start: StreamOffset
    end: StreamOffset

    @property
    def rows(self) -> int:
        """How many records lie between them."""
        return rows_between(self.start, self.end)

    def read(self, con: Connection) -> pa.Table | None:
        """The rows, None where Spark is to read them: live rows, many rows, and a table that is another one by now."""
        if self.start.live is not None or self.rows > ROWS_MAX:
            return None
        try:
            if self.of.handle is None or not self._is_of(self.of.handle):
                self.of.handle = handle_of(con.table(self.of.options.table))
            return self._read(self.of.handle) if self._is_of(self.of.handle) else None
        except LakeheadError:
            self.of.handle = None
            return None

    def _is_of(self, handle: TableHandle) -> bool:
        return (handle.desc.table_id, handle.desc.schema_id) == (self.end.table_id, self.end.schema_id) and (
            self.start.table_id == self.end.table_id
        )

    def _read(self, handle: TableHandle) -> pa.Table | None:
        held, size = [], 0
        wanted = wanted_rows(handle.desc, self.of.options)
        for part in record_parts(handle.desc, records_between(self.start, self.end), wanted):
            for batch in read_changes(handle, part, self.of.read):
                held.append(self.of.made_of(batch))
                size += batch.nbytes
                if size > BYTES_MAX:
                    return None
        return pa.Table.from_batches(held, self.of.schema)


class Spans:
    """The offsets that the micro-batches of a query of a plain stream lie between, one after the other.

    One begins where the one before it has ended, and where it ends stands in the query's log of offsets, which Spark
    has written before. Where that is on a local disk it is read, else Spark is asked, which takes a dozen questions.
    """

    def __init__(self, stream: PlainStream, query: StreamingQuery) -> None:
        self._stream = stream
        self._query = query
        self._folder = local_folder(root_of(query))
        self._last: tuple[int, StreamOffset] | None = None

    def of(self, number: int) -> Span | None:
        """Those of the micro-batch that the query works on now; None where Spark does not tell."""
        span = self._next(number) or self._asked(number)
        self._last = None if span is None else (number, span.end)
        return span

    def _next(self, number: int) -> Span | None:
        if self._folder is None or self._last is None or self._last[0] != number - 1:
            return None
        try:
            with open(f"{self._folder}/offsets/{number}", encoding="utf-8") as file:
                version, _, offset = file.read().split("\n")
            return Span(self._stream, self._last[1], _offset(offset)) if version == "v1" else None
        except (OSError, ValueError, LakeheadError):  # also a Spark that writes its log in another way
            return None

    def _asked(self, number: int) -> Span | None:
        try:
            plan = self._query._jsq.streamingQuery().lastExecution()
            leaves = plan.logical().collectLeaves()
            if plan.currentBatchId() != number or leaves.size() != 1:
                return None
            leaf = leaves.head()
            start, end = (_offset(o.get().json()) for o in (leaf.startOffset(), leaf.endOffset()))
        except (Py4JError, TypeError, LakeheadError):
            return None
        return Span(self._stream, end.beginning(start), end)


class MicroBatch(DataFrame):
    """The DataFrame of a micro-batch, whose rows are fetched without Spark if they can be."""

    def __new__(cls, df: AnyFrame, con: Connection, span: Span) -> MicroBatch:
        return object.__new__(cls)

    def __init__(self, df: AnyFrame, con: Connection, span: Span) -> None:
        super().__init__(df._jdf, df.sparkSession)
        self._con = con
        self._span = span
        self._rows: pa.Table | None = None

    def toArrow(self) -> pa.Table:
        if self._rows is None:
            self._rows = self._span.read(self._con)
        return super().toArrow() if self._rows is None else self._rows


def _offset(text: str) -> StreamOffset:
    return StreamOffset.from_json(json.loads(text))
