"""The union read in Spark: native Parquet scans of the lake, one anti-join on packed offsets, and the hot rows.

The scans stay vectorised, pruned and filtered: Spark pushes columns and filters through the anti-join and the union,
all but comparisons of floats (`lakehead.spark.floats`). Where executors share the driver's files, hot rows are one
file more of such a scan.
Only files with dead rows take part in the join, so that a log table's lake is read as plain Parquet. Tables that
statements ask again and again are read another way (`lakehead.spark.kept_frame`). A lake on storage that this Spark has
no driver for is read by Python workers through the data source.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as st

from lakehead.api.subscription import chosen_columns
from lakehead.api.table import Table, handle_of
from lakehead.errors import SchemaChangedError, SqlError
from lakehead.lake.keyed_read import KeyedRead
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import Pin, UnionRead, pin
from lakehead.log.netchange import Offsets
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark.column_names import as_named
from lakehead.spark.connections import is_attached
from lakehead.spark.dead_rows import Dead, LakeParts, dead_in_plan, dead_table, split_files, without_offsets
from lakehead.spark.floats import quoted
from lakehead.spark.frame_steps import anti_join, broadcast, select
from lakehead.spark.held_pins import hold_pin, weak_tables
from lakehead.spark.kept import kept_of
from lakehead.spark.kept_frame import Seen, kept_frame, look
from lakehead.spark.lake_files import LakeScan, lake_columns, opens_lake
from lakehead.spark.needs import Needs
from lakehead.spark.scratch import ScratchFile, is_shared, planned_frame, scratch_file, scratch_frame
from lakehead.spark.source import LakeheadDataSource
from lakehead.spark.types import spark_schema
from lakehead.types import TabletKey, Tier, require_tier

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BROADCAST_ROWS_MAX = 8 << 20
"""Larger sets of dead offsets are joined as Spark sees fit."""
HOT_ROWS_MAX, HOT_BYTES_MAX = 1 << 16, 8 << 20
"""So few hot rows go to a cluster with the plan, whose statements then know how large they are and do not ask for them
again; executors fetch what is more."""
_FILE_BYTES = 4096
"""About what is known of a lake file."""
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
    pinned: Pin | None = None,
    needs: Needs | None = None,
    seen: Seen | None = None,
) -> DataFrame:
    """See `lakehead.spark.table`; the read is pinned now, once for both tiers, unless it is ``pinned``.

    Where ``needs`` says what is read of the frame, it may lack other rows, and fails who reads other columns.
    """
    require_tier(tier)
    handle = handle_of(table)
    names = chosen_columns(handle.desc, as_named(handle.desc.schema.names, columns))
    if not names and not system_columns:  # Spark reads no Parquet file that has no columns
        one = handle.desc.schema.names[:1]
        return union_frame(spark, uri, table, columns=one, tier=tier, snapshot=snapshot, pinned=pinned).select()
    pinned = pinned or pin(handle, tier=tier, snapshot=snapshot)
    spec = ReadSpec(tuple(names), system_columns=system_columns)
    if needs is not None and needs.where is not None:
        asked = UnionRead(handle, pinned, replace(spec, predicate=needs.where))
        by_key = _frame_by_key(spark, asked, alone=needs.alone)
        if by_key is not None:
            return by_key
    read = UnionRead(handle, Pin(None, pinned.ranges, pinned.lease), spec)
    if pinned.lake is not None and pinned.lake.snapshot_id is not None and not opens_lake(spark, pinned.lake):
        frame = _source_frame(spark, uri, table, read, pinned.lake)
        hold_pin(spark, handle.leases, pinned, weak_tables(frame))
        return frame
    seen = seen or look(spark, table, pinned)
    kept = kept_frame(spark, table, pinned, seen, spec)
    if kept is not None:
        return kept
    moment, still, _ = seen
    needed = read if still else _needed_of(read, needs)
    superseded, hot = _hot_rows(spark, uri, table, needed, pinned.lake, moment)
    files: list[ScratchFile] = []  # read here
    frames: list[DataFrame] = []
    reads: list[Any] = []
    taken = False
    with ExitStack() as reading:
        if isinstance(hot, ScratchFile):
            files.append(reading.enter_context(hot.reading()))
        if pinned.lake is not None and pinned.lake.snapshot_id is not None:
            beside = files if needed is read else []
            frames, reads, taken = _lake_frames(spark, pinned.lake, superseded, moment, read.schema, beside)
        if hot is not None and not taken:
            rows = hot.rows(spark) if isinstance(hot, ScratchFile) else hot
            reads += [] if isinstance(hot, ScratchFile) else weak_tables(rows)
            frames.append(_chosen(rows, needed.schema.names, read.schema, table.name))
    if not frames:
        return spark.createDataFrame([], spark_schema(read.schema))
    found = reduce(lambda a, b: a.union(b), frames)
    if reads:
        hold_pin(spark, handle.leases, pinned, reads)
    return found


def _frame_by_key(spark: SparkSession, read: UnionRead, *, alone: bool) -> DataFrame | None:
    """The rows of a read by key, None where the key index does not have them at one moment: at the one that was pinned,
    or later where nothing else is read beside it (``alone``)."""
    rows = read.rows_by_key()
    if rows is None and alone:
        with suppress(SchemaChangedError):
            now = KeyedRead.of(read.handle, read.spec)
            rows = None if now is None else list(now.batches())
    if rows is None:
        return None
    found = [batch.select(read.schema.names) for batch in rows]
    if sum(batch.nbytes for batch in found) > HOT_BYTES_MAX:
        return scratch_frame(spark, read.schema, found)
    return planned_frame(spark, read.schema, found)


def _chosen(frame: DataFrame, there: Sequence[str], schema: pa.Schema, table: str) -> DataFrame:
    """Of a frame with the columns ``there`` these, in this order. One that is not there fails who reads it: Spark lets
    ``df.orderBy`` and ``df.where`` name columns that the statement which made ``df`` has not selected."""
    if list(there) == schema.names:
        return frame
    if set(there).issuperset(schema.names):
        return select(frame, map(quoted, schema.names))
    return frame.select(
        *(
            F.col(quoted(f.name)) if f.name in there else _unread(table, f.name).cast(f.dataType).alias(f.name)
            for f in spark_schema(schema)
        )
    )


def _unread(table: str, column: str) -> Column:
    why = f"the statement did not need the column {column} of {table}, which was not read: let it select the column"
    return F.raise_error(F.lit(f"{SqlError.__module__}.{SqlError.__name__}: {why}"))


# ---- hot ----------------------------------------------------------------------------------------------------------


def _needed_of(read: UnionRead, needs: Needs | None) -> UnionRead:
    """The hot rows and columns that are needed, where there are many; few are read whole, and kept for the next
    statement."""
    hot = read.pinned.ranges
    if needs is None or not is_large(hot):
        return read
    columns = [name for name in read.schema.names if name in needs.columns] or read.schema.names[:1]
    return UnionRead(read.handle, read.pinned, ReadSpec(tuple(columns), needs.where))


def is_large(ranges: Mapping[TabletKey, tuple[int, int]]) -> bool:
    """Whether so many log records are worth finding out which of them are needed."""
    return sum(end - start for start, end in ranges.values()) > HOT_ROWS_MAX


def _hot_rows(
    spark: SparkSession, uri: str, table: Table, read: UnionRead, lake: PinnedLake | None, moment: PinnedRows
) -> tuple[Superseded, ScratchFile | DataFrame | None]:
    """What the log supersedes in the lake, and the rows it adds; None when it adds none."""
    handle, pinned = handle_of(table), read.pinned
    if not moment.ranges:
        return {}, None
    if is_shared(spark):

        def find() -> tuple[Superseded, ScratchFile | None, int]:
            superseded, rows = read.hot_rows()
            stored = None if lake is None else lake_columns(lake, read.schema.names)
            file = scratch_file(spark, read.schema, rows, kept=True, stored=stored)
            return superseded, file, sum(offsets.nbytes for offsets in superseded.values())

        met = None if read.predicate is None else read.predicate.to_bytes()  # whole: as text, lists are cut short
        return kept_of(spark).get(("hot", moment, tuple(read.schema.names), met), find)
    few = _few_hot_rows(read)
    if few is not None:
        superseded, rows = few
        return superseded, scratch_frame(spark, read.schema, rows)
    return UnionRead(handle, pinned, ReadSpec(())).superseded(), _source_frame(spark, uri, table, read)


def _few_hot_rows(read: UnionRead) -> tuple[Superseded, list[pa.RecordBatch]] | None:
    """What the log supersedes, and the rows it adds; None when these are not few."""
    if is_large(read.pinned.ranges):
        return None
    superseded, batches = read.hot_rows()
    held, size = [], 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size > HOT_BYTES_MAX:
            return None
    return superseded, held


def _source_frame(
    spark: SparkSession, uri: str, table: Table, read: UnionRead, lake: PinnedLake | None = None
) -> DataFrame:
    """What Python workers read under a pin: its hot rows, and with ``lake`` all of it."""
    pinned = read.pinned
    if not is_attached(spark):  # it means its application's connection, and would find the source without its token
        spark.dataSource.register(LakeheadDataSource)
    source = spark.read.format("lakehead").option("uri", uri).option("table", table.name)
    source = source.option("ranges", json.dumps({str(k): list(r) for k, r in pinned.ranges.items()}))
    source = source.option("schema_id", handle_of(table).desc.schema_id)
    source = source.option("lease", pinned.lease or "").option("columns", json.dumps(read.schema.names))
    if read.predicate is not None:
        source = source.option("predicate", base64.b64encode(read.predicate.to_bytes()).decode())
    if lake is None:
        return source.load()
    if lake.gone:
        gone = {str(tablet): lake.overwritten[tablet] for tablet in lake.gone}
        source = source.option("overwritten", json.dumps(gone))
    return source.option("snapshot", lake.snapshot_id).load()


# ---- lake ---------------------------------------------------------------------------------------------------------


def _lake_frames(
    spark: SparkSession,
    view: PinnedLake,
    superseded: Superseded,
    moment: PinnedRows,
    schema: pa.Schema,
    hot: Sequence[ScratchFile],
) -> tuple[list[DataFrame], list[Any], bool]:
    """The rows of the lake with these columns, weak references to what reads its files, and whether the hot rows are
    among them: to Spark a file more of a scan costs less than another scan. No hot row is dead."""
    parts, dead = _lake_parts(spark, view, superseded, moment)
    scan = LakeScan(spark, view)
    frames = [scan(parts.whole, beside=hot)] if parts.whole else []
    if parts.by_offset:
        beside = () if parts.whole else hot
        frames.append(without_offsets(scan(parts.by_offset, beside=beside), view.desc, dead))
    for some in _uniquely_named(parts.by_position):
        rows = _without_positions(spark, scan, some)
        frames.append(without_offsets(rows, view.desc, dead))
    taken = bool(hot) and bool(parts.whole or parts.by_offset)
    return [select(frame, map(quoted, schema.names)) for frame in frames], scan.reads, taken


def _lake_parts(
    spark: SparkSession, view: PinnedLake, superseded: Superseded, moment: PinnedRows
) -> tuple[LakeParts, Dead]:
    """The files of a lake snapshot, and what is dead in them."""

    def split() -> tuple[LakeParts, pa.Table]:
        found = split_files(view, view.plan(), superseded)
        return replace(found, dead={}), dead_table(view.desc, found.dead)

    def find() -> tuple[tuple[LakeParts, int, tuple[int, ...] | None], ScratchFile | None, int]:
        parts, rows = split()
        size = _FILE_BYTES * (len(parts.whole) + len(parts.by_offset) + len(parts.by_position))
        size += sum(positions.nbytes for _, positions in parts.by_position)
        known = dead_in_plan(view.desc, rows)
        file = scratch_file(spark, rows.schema, rows.to_batches(), kept=True) if known is None else None
        return (parts, rows.num_rows, known), file, size

    if is_shared(spark):
        (parts, count, known), file = kept_of(spark).get(("dead", moment), find)
        frame = None if file is None else file.frame(spark)
    else:
        parts, rows = split()
        count, known = rows.num_rows, dead_in_plan(view.desc, rows)
        frame = scratch_frame(spark, rows.schema, rows.to_batches()) if known is None else None
    if known is not None:
        return parts, known
    return parts, broadcast(frame) if frame is not None and count <= BROADCAST_ROWS_MAX else frame


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
    file, position = f"{_FILE}_of_row", f"{_POSITION}_of_row"
    place = {file: ("_metadata.file_name", st.StringType()), position: ("_metadata.row_index", st.LongType())}
    rows = scan((f for f, _ in files), place)
    return anti_join(rows, broadcast(dead), f"{file} = {_FILE} and {position} = {_POSITION}")


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
