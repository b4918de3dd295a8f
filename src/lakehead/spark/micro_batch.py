"""The rows of a micro-batch, read by the driver itself where a Spark job would take longer than they do.

A micro-batch of a Lakehead table is what lies between two offsets, which whoever knows them can read. So
``batch.toArrow()`` of one that is small and nothing else, no filter and no join, is a request to the server: no job, no
task, no Python worker. What cannot be read like that, or fails, is left to Spark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.sql.classic.dataframe import DataFrame

from lakehead.api.connection import Connection
from lakehead.api.table import handle_of
from lakehead.client.table import TableHandle
from lakehead.errors import LakeheadError
from lakehead.format.read_as import cast_to
from lakehead.spark.options import ReadOptions
from lakehead.spark.parts import read_changes, record_parts
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
    """A stream of one Lakehead table that does no more than choose columns.

    Attributes:
        read: the columns to read: those chosen, and what decides which records are rows.
        schema: of the chosen columns, as Spark gives them in Arrow.
        handle: the table, once a micro-batch was read; it serves all that name the same definition of it.
    """

    options: ReadOptions
    read: tuple[str, ...]
    schema: pa.Schema
    handle: TableHandle | None = None

    @classmethod
    def of(cls, stream: AnyFrame) -> PlainStream | None:
        """What a streaming DataFrame is, if it is that."""
        try:
            plan = stream._jdf.queryExecution().analyzed()
            while _kind(plan) == "Project":
                chosen = plan.projectList().iterator()
                while chosen.hasNext():
                    if _kind(chosen.next()) != "AttributeReference":
                        return None
                plan = plan.child()
            if _kind(plan) != "StreamingRelationV2" or plan.sourceName() != _SOURCE:
                return None
            options = ReadOptions.parse(dict(plan.extraOptions().asCaseSensitiveMap()))
            told = CHANGE_TYPE_COLUMN in [a.name() for a in _each(plan.output())]
            large = stream.sparkSession.conf.get("spark.sql.execution.arrow.useLargeVarTypes")
        except (Py4JError, TypeError, LakeheadError):  # a Spark that names its plans in another way
            return None
        names = tuple(stream.columns)
        if large == "true" or len(set(names)) < len(names):
            return None
        read = (*names, CHANGE_TYPE_COLUMN) if told and CHANGE_TYPE_COLUMN not in names else names
        return cls(options, read, arrow_schema(stream.schema))


@dataclass(frozen=True)
class Span:
    """The offsets that a micro-batch of a plain stream lies between."""

    of: PlainStream
    start: StreamOffset
    end: StreamOffset

    @classmethod
    def now(cls, stream: PlainStream, query: StreamingQuery, number: int) -> Span | None:
        """Those of the micro-batch that a query works on, if that is this one."""
        try:
            plan = query._jsq.streamingQuery().lastExecution()
            leaves = plan.logical().collectLeaves()
            if plan.currentBatchId() != number or leaves.size() != 1:
                return None
            leaf = leaves.head()
            ends = [_offset(o.get().json()) for o in (leaf.startOffset(), leaf.endOffset())]
        except (Py4JError, TypeError, LakeheadError):
            return None
        return cls(stream, *ends)

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
        for part in record_parts(handle.desc, records_between(self.start, self.end)):
            for batch in read_changes(handle, part, self.of.read):
                held.append(cast_to(self.of.schema, batch))
                size += batch.nbytes
                if size > BYTES_MAX:
                    return None
        return pa.Table.from_batches(held, self.of.schema)


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


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _each(found: Any) -> list[Any]:
    out, at = [], found.iterator()
    while at.hasNext():
        out.append(at.next())
    return out
