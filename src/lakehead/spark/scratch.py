"""Small Arrow tables made readable for Spark.

Where executors share the driver's files (local masters), as uncompressed Parquet in the folder that Spark removes when
its process ends: three times faster than `createDataFrame`. Elsewhere through `createDataFrame`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from lakehead.env.randomness import SystemRandomness
from lakehead.format.read_as import cast_to
from lakehead.format.schema import lake_schema
from lakehead.spark.floats import unprunable_floats
from lakehead.spark.launch import is_local
from lakehead.spark.types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCRATCH_BYTES_MAX = 8 << 30
"""Scratch files of one process beyond so many bytes are removed, oldest first; frames that read them then fail."""
_ROW_GROUP_ROWS = 128 << 10

_GLOB = re.compile(r"([\[\]{}*?\\])")

_lock = threading.Lock()
_files: dict[str, int] = {}


def spark_path(location: str) -> str:
    """A file's address as Spark reads it literally: a folder may be called ``a[b]``.

    Escaped, because Spark 4.3 reads each of several such files as often as there are files when globbing is off.
    """
    if location.startswith("s3://"):
        location = "s3a://" + location.removeprefix("s3://")
    return _GLOB.sub(r"\\\1", location)


def is_shared(spark: SparkSession) -> bool:
    """Whether executors can read files that the driver writes."""
    return is_local(spark.sparkContext.master)


def scratch_frame(spark: SparkSession, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> DataFrame | None:
    """Rows as a DataFrame with the Spark types of ``schema``; None when there are no rows.

    Args:
        schema: in the table's own types; batches hold these columns, perhaps among others.
    """
    filled = (b for b in batches if b.num_rows)
    first = next(filled, None)
    if first is None:
        return None
    stored = lake_schema(schema)
    rows = (cast_to(stored, b) for b in _chain(first, filled))
    if is_shared(spark):
        path = _write(spark.sparkContext._temp_dir, stored, rows)
        return unprunable_floats(spark.read.schema(spark_schema(schema)).parquet(spark_path(f"file://{path}")))
    return spark.createDataFrame(pa.Table.from_batches(rows, stored), spark_schema(schema))


def _chain(first: pa.RecordBatch, rest: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    yield first
    yield from rest


def _write(folder: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
    path = os.path.join(folder, f"{SystemRandomness().uuid_hex()}.parquet")
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False, store_schema=False) as writer:
        for batch in batches:
            writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
    with _lock:
        _files[path] = os.path.getsize(path)
        while sum(_files.values()) > SCRATCH_BYTES_MAX and len(_files) > 1:
            oldest = next(iter(_files))
            del _files[oldest]
            if os.path.exists(oldest):
                os.unlink(oldest)
    return path
