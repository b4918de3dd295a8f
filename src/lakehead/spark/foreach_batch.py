"""A query that calls the driver with each of its micro-batches: what `lhs.pipeline` and `lhs.apply_changes` run on.

Spark is asked no more than it must be in between: each question to the JVM is a turn of two processes, a fifth of a
millisecond, and several times that on a busy machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pyspark.errors import IllegalArgumentException, PySparkTypeError, PySparkValueError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql.classic.dataframe import DataFrame
from pyspark.sql.session import SparkSession

from lakehead.api.connection import Connection
from lakehead.client.staging import JobBatch
from lakehead.errors import InvalidPropertyError, InvalidRequestError
from lakehead.spark.checkpoint import ReadText, checkpoint_of, planned_as
from lakehead.spark.micro_batch import MicroBatch, PlainStream, Spans
from lakehead.spark.staged_rows import QUERY, of_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame as AnyFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SMALL_ROWS = 20_000
"""A micro-batch after one of so many rows passes through the driver: tasks in Python cost more than its rows do. Spark
stops what would be too much for it (``spark.driver.maxResultSize``)."""


class Work(Protocol):
    """What is done with a micro-batch; ``small`` if tasks would cost more than its rows do."""

    def __call__(self, rows: AnyFrame, batch: JobBatch, *, small: bool) -> None: ...


class MicroBatches:
    """What Spark calls with the micro-batches of one query, one after the other.

    It is PySpark's own `pyspark.sql.utils.ForeachBatchFunction`, but that their session and the query's id, which are
    the same for all, are asked for once.

    Attributes:
        query: the query, once it has begun.
    """

    def __init__(self, stream: AnyFrame, con: Connection, work: Work) -> None:
        self.query: StreamingQuery | None = None
        self._context = stream.sparkSession.sparkContext
        self._con = con
        self._work = work
        self._plain = PlainStream.of(stream)
        self._spans: Spans | None = None
        self._session: SparkSession | None = None
        self._own = stream.sparkSession
        self._checkpoint: ReadText | None = None
        self._query_id = ""

    def call(self, rows: Any, number: int) -> None:
        """Work on a micro-batch, which is a Dataset of the JVM."""
        if self._session is None:
            session = SparkSession(self._context, rows.sparkSession())
            self._query_id = query_id(session)
            self._session = session
        given, small = self._given(DataFrame(rows, self._session), number)
        self._work(given, of_query(self._query_id, number, self._planned(number)), small=small)

    def _planned(self, number: int) -> str:
        """What the micro-batch was planned as. The first one may come before the query is known here."""
        if self._checkpoint is None:
            query = self.query or self._own.streams.get(self._query_id)
            if query is None:
                return ""
            self._checkpoint = checkpoint_of(query, self._context)
        return planned_as(self._checkpoint, number)

    def _given(self, rows: DataFrame, number: int) -> tuple[DataFrame, bool]:
        """The micro-batch that is worked on, which fetches its rows without Spark where it can, and whether it is
        small: by its own rows or, where they are not known, by those of the last one."""
        if self.query is None:
            return rows, False
        if self._plain is not None:
            self._spans = self._spans or Spans(self._plain, self.query)
            span = self._spans.of(number)
            if span is not None:
                return MicroBatch(rows, self._con, span), span.rows <= SMALL_ROWS
        last = self.query._jsq.lastProgress()
        return rows, last is not None and 0 < int(last.numInputRows()) <= SMALL_ROWS

    class Java:
        """What the JVM takes it for."""

        implements = ["org.apache.spark.sql.execution.streaming.sources.PythonForeachBatchFunction"]  # noqa: RUF012


def writer_of(
    stream: AnyFrame, *, checkpoint: str | None, name: str | None, trigger: str | None, output_mode: str = "append"
) -> DataStreamWriter:
    """What is to be `started`: nothing is read or written before.

    Raises:
        InvalidRequestError: the DataFrame is no stream.
        InvalidPropertyError: the trigger or the output mode is none.
    """
    if not stream.isStreaming:
        raise InvalidRequestError("a DataFrame of spark.read does not grow: begin with spark.readStream")
    try:
        writer = stream.writeStream.outputMode(output_mode)
    except (IllegalArgumentException, PySparkTypeError, PySparkValueError) as e:
        raise InvalidPropertyError(f"output_mode={output_mode!r} must be append, update or complete") from e
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", str(checkpoint))
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        now = isinstance(trigger, str) and trigger.replace(" ", "").lower() == "availablenow"
        try:
            writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime=trigger)
        except (IllegalArgumentException, PySparkTypeError, PySparkValueError) as e:
            raise InvalidPropertyError(
                f"trigger={trigger!r} must be 'available now' or a time such as '1 second'"
            ) from e
    return writer


def started(stream: AnyFrame, writer: DataStreamWriter, con: Connection, work: Work) -> StreamingQuery:
    """Begin a query of micro-batches; ``writer`` is that of the stream, see `writer_of`."""
    called = MicroBatches(stream, con, work)
    gateway = stream.sparkSession.sparkContext._gateway
    sources = gateway.jvm.org.apache.spark.sql.execution.streaming.sources
    sources.PythonForeachBatchHelper.callForeachBatch(writer._jwrite, called)
    ensure_callback_server_started(gateway)
    called.query = writer.start()
    return called.query


def query_id(spark: SparkSession) -> str:
    """The id, in its checkpoint, of the query whose micro-batch this thread works on."""
    found = spark.sparkContext.getLocalProperty(QUERY)
    if found is None:
        raise InvalidRequestError(f"this Spark does not tell which query a micro-batch is of ({QUERY})")
    return found
