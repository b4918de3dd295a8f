"""Steps of DataFrames by few requests to the JVM.

PySpark asks the JVM for each argument of a call, and again when Python lets go of what it got: some hundreds of times
for a statement of a few tables. Here lists go as one text, and what is the same for all statements is asked for once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import types as st

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_BETWEEN = "\0"
"""Stands in no path and in no expression."""
_SCHEMAS_MAX = 1024
_PARQUET = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
"""Spark's own Parquet reader, whatever ``spark.sql.sources.useV1SourceList`` takes ``parquet`` for: the other one has
other plans, without the metadata of files and rows that dead rows are known by."""


class _Known:
    """What was asked of the JVM of one Spark application."""

    def __init__(self, context: SparkContext) -> None:
        jvm: Any = context._jvm
        self.reference = jvm.java.lang.ref.WeakReference
        self.functions = jvm.functions
        self._between = jvm.java.util.regex.Pattern.compile(_BETWEEN)
        self._schemas: dict[str, Any] = {}

    def array(self, texts: Iterable[str]) -> Any:
        """As an array of the JVM; at least one."""
        return self._between.split(_BETWEEN.join(texts))

    def schema(self, session: Any, schema: st.StructType) -> Any:
        """As one of the JVM."""
        text = schema.json()
        found = self._schemas.get(text)
        if found is None:
            if len(self._schemas) >= _SCHEMAS_MAX:
                self._schemas.clear()
            found = self._schemas[text] = session.parseDataType(text)
        return found


_known: weakref.WeakKeyDictionary[SparkContext, _Known] = weakref.WeakKeyDictionary()


def _of(context: SparkContext) -> _Known:
    known = _known.get(context)
    if known is None:
        known = _known[context] = _Known(context)
    return known


def read_parquet(spark: SparkSession, schema: st.StructType, paths: Sequence[str]) -> DataFrame:
    """``spark.read.schema(schema).parquet(*paths)``, of at least one path.

    Dates and timestamps are of the proleptic Gregorian calendar, as Iceberg says, whatever the session is set to take
    files of others for: ``LEGACY`` moves those before 1582 by days, and ``EXCEPTION`` refuses them.
    """
    known, session = _of(spark.sparkContext), spark._jsparkSession
    reader = session.read().format(_PARQUET).schema(known.schema(session, schema))
    return DataFrame(reader.option("datetimeRebaseMode", "CORRECTED").load(known.array(paths)), spark)


def without_rows(spark: SparkSession, schema: st.StructType) -> DataFrame:
    """A frame without rows, of which Spark does not know that it has none."""
    session = spark._jsparkSession
    rows = spark.sparkContext._jsc.emptyRDD()
    return DataFrame(session.createDataFrame(rows, _of(spark.sparkContext).schema(session, schema)), spark)


def select(frame: DataFrame, expressions: Iterable[str]) -> DataFrame:
    """``frame.selectExpr(*expressions)``, of at least one."""
    session = frame.sparkSession
    return DataFrame(frame._jdf.selectExpr(_of(session.sparkContext).array(expressions)), session)


def where(frame: DataFrame, condition: str) -> DataFrame:
    """``frame.where(condition)``."""
    return DataFrame(frame._jdf.filter(condition), frame.sparkSession)


def anti_join(rows: DataFrame, others: DataFrame, condition: str) -> DataFrame:
    """``rows.join(others, expr(condition), "left_anti")``."""
    session = rows.sparkSession
    met = _of(session.sparkContext).functions.expr(condition)
    return DataFrame(rows._jdf.join(others._jdf, met, "left_anti"), session)


def broadcast(frame: DataFrame) -> DataFrame:
    """``pyspark.sql.functions.broadcast``."""
    session = frame.sparkSession
    return DataFrame(_of(session.sparkContext).functions.broadcast(frame._jdf), session)


def weak(context: SparkContext, found: Any) -> Any:
    """A weak reference of the JVM to an object there: ``refersTo(None)`` once nothing there reaches it."""
    return _of(context).reference(found)


def weak_files(frame: DataFrame) -> Any:
    """A weak reference to the list of files of what `read_parquet` gave, which all plans that read them share."""
    files = frame._jdf.queryExecution().analyzed().relation().location()
    return weak(frame.sparkSession.sparkContext, files)
