"""The union read in Spark: native Parquet scans of the lake, one anti-join on packed offsets, and the hot rows.

The scans stay vectorised, pruned and filtered: Spark pushes columns and filters through the anti-join and the union,
all but comparisons of floats (`lakehead.spark.floats`).
Only files with dead rows take part in the join, so that a log table's lake is read as plain Parquet. A lake on storage
that this Spark has no driver for is read by Python workers through the data source.
"""

from __future__ import annotations

import datetime as dt
import json
import posixpath
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from lakehead.api.subscription import chosen_columns
from lakehead.api.table import Table, handle_of
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import Pin, UnionRead, pin
from lakehead.log.netchange import Offsets
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark.dead_rows import KEY_COLUMN, OFFSET_BITS, PARTITION_COLUMN, LakeParts, dead_table, split_files
from lakehead.spark.floats import quoted
from lakehead.spark.held_pins import hold_pin
from lakehead.spark.lake_files import LakeScan, opens_lake
from lakehead.spark.scratch import is_shared, scratch_frame
from lakehead.spark.types import spark_schema
from lakehead.types import BUCKET_COLUMN, OFFSET_COLUMN, TableDescriptor, Tier, require_tier

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BROADCAST_ROWS_MAX = 8 << 20
"""Larger sets of dead offsets are joined as Spark sees fit."""
_FILE, _POSITION = "__dead_file", "__dead_position"
_DEAD_POSITIONS = pa.schema([pa.field(_FILE, pa.string(), False), pa.field(_POSITION, pa.int64(), False)])


def union_frame(
    spark: SparkSession,
    uri: str,
    table: Table,
    *,
    columns: Sequence[str] | None = None,
    tier: Tier = "union",
    snapshot: int | dt.datetime | None = None,
    system_columns: bool = False,
) -> DataFrame:
    """See `lakehead.spark.table`; the read is pinned now, once for both tiers."""
    require_tier(tier)
    handle = handle_of(table)
    names = list(chosen_columns(handle.desc, columns))
    pinned = pin(handle, tier=tier, snapshot=snapshot)
    spec = ReadSpec(tuple(names), system_columns=system_columns)
    read = UnionRead(handle, Pin(None, pinned.ranges, pinned.lease), spec)
    if pinned.lake is not None and pinned.lake.snapshot_id is not None and not opens_lake(spark, pinned.lake):
        frame = _source_frame(spark, uri, table, read, pinned.lake)
        hold_pin(spark, handle.leases, pinned, frame)
        return frame
    superseded, hot = _hot_frame(spark, uri, table, read)
    parts = [*_lake_frames(spark, pinned.lake, superseded), *([hot] if hot is not None else [])]
    if not parts:
        return spark.createDataFrame([], spark_schema(read.schema))
    frame = reduce(lambda a, b: a.unionByName(b), [p.select(*map(quoted, read.schema.names)) for p in parts])
    if pinned.lake is not None or not is_shared(spark):
        hold_pin(spark, handle.leases, pinned, frame)
    return frame


# ---- hot ----------------------------------------------------------------------------------------------------------


def _hot_frame(spark: SparkSession, uri: str, table: Table, read: UnionRead) -> tuple[Superseded, DataFrame | None]:
    """What the log supersedes in the lake, and the rows it adds; None when it adds none."""
    handle, pinned = handle_of(table), read.pinned
    if not any(start < end for start, end in pinned.ranges.values()):
        return {}, None
    if is_shared(spark):
        if not handle.desc.keyed:
            return {}, scratch_frame(spark, read.schema, read.batches())
        superseded, rows = read.hot_changes()
        return superseded, scratch_frame(spark, read.schema, (b for _, b in rows))
    superseded = UnionRead(handle, pinned, ReadSpec(())).hot_changes()[0] if handle.desc.keyed else {}
    return superseded, _source_frame(spark, uri, table, read)


def _source_frame(
    spark: SparkSession, uri: str, table: Table, read: UnionRead, lake: PinnedLake | None = None
) -> DataFrame:
    """What Python workers read under a pin: its hot rows, and with ``lake`` all of it."""
    pinned = read.pinned
    source = spark.read.format("lakehead").option("uri", uri).option("table", table.name)
    source = source.option("ranges", json.dumps({str(k): list(r) for k, r in pinned.ranges.items()}))
    source = source.option("schema_id", handle_of(table).desc.schema_id)
    source = source.option("lease", pinned.lease or "").option("columns", json.dumps(read.schema.names))
    return (source if lake is None else source.option("snapshot", lake.snapshot_id)).load()


# ---- lake ---------------------------------------------------------------------------------------------------------


def _lake_frames(spark: SparkSession, view: PinnedLake | None, superseded: Superseded) -> list[DataFrame]:
    if view is None or view.snapshot_id is None:
        return []
    parts = split_files(view, view.plan(), superseded)
    scan = LakeScan(spark, view)
    frames = [scan(parts.whole)] if parts.whole else []
    dead = _dead_frame(spark, view.desc, parts)
    if parts.by_offset:
        frames.append(_without_offsets(scan(parts.by_offset), view.desc, dead))
    for some in _uniquely_named(parts.by_position):
        rows = _without_positions(spark, scan, some)
        frames.append(_without_offsets(rows, view.desc, dead) if dead is not None else rows)
    return frames


def _dead_frame(spark: SparkSession, desc: TableDescriptor, parts: LakeParts) -> DataFrame | None:
    rows = dead_table(desc, parts.dead)
    frame = scratch_frame(spark, rows.schema, rows.to_batches())
    return F.broadcast(frame) if frame is not None and rows.num_rows <= BROADCAST_ROWS_MAX else frame


def _without_offsets(rows: DataFrame, desc: TableDescriptor, dead: DataFrame | None) -> DataFrame:
    if dead is None:
        return rows
    key = F.shiftleft(F.col(BUCKET_COLUMN).cast("long"), OFFSET_BITS).bitwiseOR(F.col(OFFSET_COLUMN))
    rows = rows.withColumn(KEY_COLUMN + "_of_row", key)
    same: Column = rows[KEY_COLUMN + "_of_row"] == dead[KEY_COLUMN]
    for i, column in enumerate(desc.partition_by):
        same &= rows[quoted(column)] == dead[PARTITION_COLUMN.format(i)]
    return rows.join(dead, same, "left_anti")


def _without_positions(spark: SparkSession, scan: LakeScan, files: Sequence[tuple[LakeFile, Offsets]]) -> DataFrame:
    batches = [
        pa.RecordBatch.from_arrays(
            [pa.repeat(posixpath.basename(f.path), len(positions)), pa.array(positions)], schema=_DEAD_POSITIONS
        )
        for f, positions in files
    ]
    dead = scratch_frame(spark, _DEAD_POSITIONS, batches)
    if dead is None:
        return scan(f for f, _ in files)
    place = {_FILE + "_of_row": F.col("_metadata.file_name"), _POSITION + "_of_row": F.col("_metadata.row_index")}
    rows = scan((f for f, _ in files), place)
    same = (rows[_FILE + "_of_row"] == dead[_FILE]) & (rows[_POSITION + "_of_row"] == dead[_POSITION])
    return rows.join(F.broadcast(dead), same, "left_anti")


def _uniquely_named(files: Iterable[tuple[LakeFile, Offsets]]) -> list[list[tuple[LakeFile, Offsets]]]:
    """Groups in which no two files have the same name: Spark spells whole addresses differently from Iceberg."""
    groups: list[dict[str, tuple[LakeFile, Offsets]]] = []
    for f, positions in files:
        name = posixpath.basename(f.path)
        group = next((g for g in groups if name not in g), None)
        if group is None:
            group = {}
            groups.append(group)
        group[name] = (f, positions)
    return [list(g.values()) for g in groups]
