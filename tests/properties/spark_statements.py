"""The conditions of `predicate_cases` in Spark's words, and what Spark makes of them on plain rows."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import PySparkException
from tests.properties.predicate_cases import KEY, Condition, Value, sql

from lakehead.format.schema import lake_schema
from lakehead.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def spark_literal(value: Value) -> str:
    """The value in Spark's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value!r}D" if math.isfinite(value) else f"double('{value}')"
        case int():
            return str(value)
        case Decimal():
            return format(value, "f")
        case str():
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\0", "\\u0000") + "'"
        case bytes():
            return f"X'{value.hex()}'"
        case dt.datetime():
            return f"{'timestamp' if value.tzinfo else 'timestamp_ntz'}'{value.isoformat(sep=' ')}'"
        case dt.date():
            return f"date'{value.isoformat()}'"
        case dt.time():
            return f"time'{value.isoformat()}'"


def spark_text(condition: Condition) -> str:
    """The condition as Spark SQL."""
    return sql(condition, spark_literal, quote="`")


def plain_frame(spark: SparkSession, rows: pa.Table) -> DataFrame:
    """Rows in Spark's memory, where no filter can be pushed."""
    stored = lake_schema(rows.schema)
    cast = [c.cast(f.type) for c, f in zip(rows.columns, stored, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(cast, schema=stored), spark_schema(rows.schema))


def plain_keys(plain: DataFrame, condition: str) -> list[int] | None:
    """Keys of the rows that Spark keeps, sorted; None where Spark answers with an error."""
    try:
        return sorted(r[0] for r in plain.where(condition).select(KEY).collect())
    except PySparkException:
        return None


def statement(table: str, conditions: Sequence[str]) -> str:
    """All conditions as filters of one statement, so that many scans share a table's relation."""
    parts = [f"select {i} as c, {KEY} from {table} where {c}" for i, c in enumerate(conditions)]
    return " union all ".join(parts)


def keys_of(frame: DataFrame, conditions: int) -> list[list[int]]:
    """What `statement` found, per condition, sorted."""
    out: list[list[int]] = [[] for _ in range(conditions)]
    for c, key in frame.collect():
        out[c].append(key)
    return [sorted(keys) for keys in out]
