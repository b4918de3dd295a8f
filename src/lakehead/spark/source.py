"""The data source ``lakehead``: a table read in partitions, each an Arrow stream from a worker's own connection.

A read is pinned once, while it is planned; partitions carry plain values (files, offset ranges, superseded offsets), so
all of them see the same lake snapshot and watermarks. Filters of a DataFrame are Spark's to apply: it plans a relation
of a Python source once for all its scans, and a filter taken for one of them would hold for the others
([RFC 0014](../../../docs/rfcs/0014-spark-filters.md)). The option ``where`` holds for all scans of its relation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from lakehead.api.table import Table, handle_of
from lakehead.api.table_names import Suffix
from lakehead.errors import ColumnNotFoundError
from lakehead.format.read_as import cast_to
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.records import first_record
from lakehead.lake.union_read import Pin, pin
from lakehead.spark.connections import planned_handle, worker_table
from lakehead.spark.options import ReadOptions, listing, require_columns, wanted_columns, wanted_rows
from lakehead.spark.parts import RecordsPart, RowsPart, read_changes, read_rows, record_parts, rows_by_key, union_parts
from lakehead.spark.sink import batch_writer, stream_writer
from lakehead.spark.stream import LakeheadStreamReader, altered
from lakehead.spark.types import arrow_schema, nullable, spark_schema


class LakeheadDataSource(DataSource):
    """``spark.read`` and ``spark.readStream``, ``.format("lakehead")``, with `ReadOptions`; ``df.write`` and
    ``df.writeStream``, with those of `lakehead.spark.sink.WriteOptions`."""

    @classmethod
    def name(cls) -> str:
        return "lakehead"

    def schema(self) -> StructType:
        options = ReadOptions.parse(self.options)
        table = worker_table(options.uri, options.table)
        wanted_rows(handle_of(table).desc, options)  # which is told here, or hidden
        return nullable(spark_schema(wanted_columns(table, options)))  # what another engine made optional is it, too

    def reader(self, schema: StructType) -> LakeheadReader:
        options = ReadOptions.parse(self.options)
        options.require_batch()
        return LakeheadReader(options, schema)

    def streamReader(self, schema: StructType) -> LakeheadStreamReader:
        options = ReadOptions.parse(self.options)
        table = worker_table(options.uri, options.table, planned=True)
        try:
            require_columns(table, options, schema.names)
        except ColumnNotFoundError as e:
            raise altered(handle_of(table), str(e)) from e
        return LakeheadStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return stream_writer(self.options, schema, overwrite)


class LakeheadReader(DataSourceReader):
    """Plans one read on the driver's side, and carries out its partitions on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    # ---- planning -------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[InputPartition]:
        table, options = self._table(), self._options
        require_columns(table, options, self._schema.names)
        handle = handle_of(table)
        handle.desc.require_schema(options.schema_id)
        if options.suffix in (Suffix.SNAPSHOTS, Suffix.FILES):
            return [InputPartition(options.suffix)]
        wanted = wanted_rows(handle.desc, options)
        if options.changelog:
            ranges = {t.key: (first_record(handle.desc, t), t.high_watermark) for t in handle.log.tablets()}
            return [InputPartition(p) for p in record_parts(handle.desc, ranges, wanted)]
        if options.ranges is not None:
            at = options.snapshot
            lake = None if at is None else PinnedLake.at(handle.desc, handle.lake(), at).without(options.overwritten)
            pinned = Pin(lake, options.ranges, options.lease)
        else:
            pinned = pin(handle, tier=options.tier, snapshot=options.snapshot, planned=True)
        if wanted is not None and (found := rows_by_key(handle, pinned, wanted, self._schema.names)) is not None:
            if pinned.lease is not None:
                handle.leases.release(pinned.lease)
            return [InputPartition(found)]
        return [InputPartition(p) for p in union_parts(handle, pinned, wanted)]

    # ---- reading --------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part, names = partition.value, self._schema.names
        batches: Iterator[pa.RecordBatch]
        if part is None:
            return
        if isinstance(part, Suffix):
            batches = iter(listing(self._table(), part).to_batches())
        elif isinstance(part, RowsPart):
            batches = iter(part.rows)
        else:
            handle = planned_handle(self._options.uri, self._options.table, part.table_id, part.schema_id)
            batches = (read_changes if isinstance(part, RecordsPart) else read_rows)(handle, part, names)
        target = arrow_schema(self._schema)
        for batch in batches:
            yield cast_to(target, batch)

    def _table(self) -> Table:
        return worker_table(self._options.uri, self._options.table)
