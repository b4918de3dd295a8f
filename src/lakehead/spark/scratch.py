"""Small Arrow tables made readable for Spark.

Where executors share the driver's files (local masters), as uncompressed Parquet in the folder that Spark removes when
its process ends: three times faster than `createDataFrame`. Elsewhere through `createDataFrame`. A file goes once no
DataFrame can read it any more, unless it is kept for the next statement.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.sql import functions as F

from lakehead.env.randomness import SystemRandomness
from lakehead.format.read_as import cast_to
from lakehead.format.schema import lake_schema
from lakehead.spark.floats import quoted, unprunable_floats
from lakehead.spark.frame_steps import read_parquet, weak_files
from lakehead.spark.privacy import is_local
from lakehead.spark.types import are_alike, narrowed, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCRATCH_BYTES_MAX = 8 << 30
"""Scratch files of one process beyond so many bytes are removed, oldest first; frames that read them then fail."""
_ROW_GROUP_ROWS = 128 << 10

_GLOB = re.compile(r"([\[\]{}*?\\])")

_lock = threading.Lock()
_files: dict[str, ScratchFile] = {}


@dataclass(eq=False)
class ScratchFile:
    """Rows that DataFrames of one application read.

    Attributes:
        schema: of the rows, in the table's own types.
        stored: the columns as they stand in the file.
        kept: whether it stays when no DataFrame reads it.
        wanted: by how many it is going to be read: who makes it does, once.
        readers: weak references to what reads it in the JVM.
    """

    path: str
    schema: pa.Schema
    stored: pa.Schema
    size: int
    kept: bool = False
    wanted: int = 1
    readers: list[Any] = field(default_factory=list)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Its rows, with the Spark types of its schema, for one who wanted it."""
        with self.reading():
            return self.rows(spark)

    @contextmanager
    def reading(self) -> Iterator[ScratchFile]:
        """For one who wanted it: from the end on it is there for those alone who read it by then."""
        try:
            yield self
        finally:
            with _lock:
                self.wanted -= 1

    def rows(self, spark: SparkSession) -> DataFrame:
        """Its rows, while it is wanted."""
        return scratch_rows(spark, [self])

    @property
    def address(self) -> str:
        """As Spark reads it."""
        return spark_path(f"file://{self.path}")

    def read_by(self, reader: Any) -> None:
        """Note what reads it in the JVM, a weak reference, while it is wanted."""
        with _lock:
            self.readers.append(reader)

    @property
    def _unread(self) -> bool:
        try:
            self.readers = [r for r in self.readers if not r.refersTo(None)]
        except (Py4JError, OSError, AttributeError):
            return True  # the JVM is gone
        return not self.readers

    @property
    def over(self) -> bool:
        """Whether nobody reads it, and nobody is going to."""
        return not self.kept and not self.wanted and self._unread


def scratch_rows(spark: SparkSession, files: Sequence[ScratchFile]) -> DataFrame:
    """The rows of files with the same columns, at least one, while they are wanted, in the types of their schema."""
    own = spark_schema(files[0].schema)
    stored = spark_schema(files[0].schema, files[0].stored, as_stored="us")
    rows = read_parquet(spark, stored, [file.address for file in files])
    reader = weak_files(rows)
    for file in files:
        file.read_by(reader)
    both = list(zip(stored, own, strict=True))
    if not all(are_alike(there.dataType, f.dataType) for there, f in both):
        rows = rows.select(*(narrowed(F.col(quoted(f.name)), f.dataType).alias(f.name) for _, f in both))
    return unprunable_floats(rows, own.fields)


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
    if is_shared(spark):
        file = scratch_file(spark, schema, _chain(first, filled))
        assert file is not None
        return file.frame(spark)
    return planned_frame(spark, schema, _chain(first, filled))


def planned_frame(spark: SparkSession, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> DataFrame:
    """Few rows, or none, as a DataFrame that has them in its plan: to filter and collect them takes no Spark job;
    arguments as of `scratch_frame`."""
    stored = lake_schema(schema)
    rows = pa.Table.from_batches((cast_to(stored, b) for b in batches), stored)
    return spark.createDataFrame(rows, spark_schema(schema))


def scratch_file(
    spark: SparkSession,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    kept: bool = False,
    stored: pa.Schema | None = None,
) -> ScratchFile | None:
    """Rows as a file that executors read, where they can; arguments and None as of `scratch_frame`.

    Args:
        stored: the columns as they stand in the file, with field ids; None: as in a lake, without.
    """
    filled = (b for b in batches if b.num_rows)
    first = next(filled, None)
    if first is None:
        return None
    stored = stored or lake_schema(schema)
    path = os.path.join(spark.sparkContext._temp_dir, f"{SystemRandomness().uuid_hex()}.parquet")
    try:
        with pq.ParquetWriter(path, stored, compression="none", use_dictionary=False, store_schema=False) as writer:
            for batch in _chain(first, filled):
                writer.write_batch(cast_to(stored, batch), row_group_size=_ROW_GROUP_ROWS)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise
    file = ScratchFile(path, schema, stored, os.path.getsize(path), kept)
    with _lock:
        unread = [f for f in _files.values() if f.over]
        _files[path] = file
        over = sum(f.size for f in _files.values()) - sum(f.size for f in unread) - SCRATCH_BYTES_MAX
        for oldest in [f for f in _files.values() if not f.kept and f not in unread and f is not file]:
            if over > 0:
                unread.append(oldest)
                over -= oldest.size
        for gone in unread:
            _remove(gone)
    return file


def sweep() -> None:
    """Remove files that no DataFrame reads and that nobody keeps."""
    with _lock:
        for file in [f for f in _files.values() if f.over]:
            _remove(file)


def _remove(file: ScratchFile) -> None:
    del _files[file.path]
    with suppress(FileNotFoundError):
        os.unlink(file.path)


def _chain(first: pa.RecordBatch, rest: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    yield first
    yield from rest
