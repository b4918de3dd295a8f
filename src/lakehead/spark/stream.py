"""``spark.readStream.format("lakehead")``: a table's history and what comes, cut into micro-batches by offsets.

A micro-batch is all that lies between two offsets, which Spark keeps in its checkpoint; whoever reads it, however
often, reads the same rows: live rows at a lake snapshot and log offsets, records at their offsets, from log or lake.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from lakehead.api.copying import was_overwritten
from lakehead.api.table import handle_of
from lakehead.client.table import TableHandle
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    OffsetOutOfRangeError,
    SchemaChangedError,
    SnapshotNotFoundError,
    TableNotFoundError,
    UnavailableError,
)
from lakehead.format.read_as import cast_to
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.records import first_record, outlives_log, read_records, records_lake
from lakehead.lake.union_read import Pin, pin
from lakehead.predicate import Predicate
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import TabletState
from lakehead.spark.connections import planned_handle, worker_table
from lakehead.spark.options import ReadOptions, wanted_columns, wanted_rows
from lakehead.spark.parts import (
    HotPart,
    LakePart,
    RecordsPart,
    read_changes,
    read_rows,
    record_parts,
    union_parts,
)
from lakehead.spark.stream_offsets import LiveRows, StreamOffset, live_between, records_between
from lakehead.spark.types import arrow_schema, spark_schema
from lakehead.types import CHANGE_TYPE_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN, TIMESTAMP_TYPE, TabletKey

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # before Spark 4.2, which asks for no limit and lets availableNow take all at once
    SupportsTriggerAvailableNow = object

LIMITED = SupportsTriggerAvailableNow is not object
"""Whether this PySpark cuts what there is into micro-batches. Before 4.2 a query of ``availableNow`` has one, which it
does not tell us: with a limit, it would end before the last row."""
_TOLD_MAX = 20
_SAMPLE_ROWS = 256
"""Records whose size stands for that of a micro-batch."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class LakeheadStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans a query's micro-batches in a process that lives as long as the query, and reads them on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: TableHandle | None = None
        self._seen: Sequence[TabletState] = ()
        self._target: dict[TabletKey, int] | None = None
        self._initial: StreamOffset | None = None
        self._reached: StreamOffset | None = None
        self._lease: str | None = None
        self._held = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_held": None}

    # ---- how far --------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint starts."""
        if self._initial is None:
            self._initial = _first_offset(self._handle(), self._options)
            self._hold(self._initial)
        return self._initial.to_json()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Where the next micro-batch ends: ``start`` itself when there is nothing new.

        Raises:
            TableNotFoundError: the table was dropped, overwritten or renamed.
            SchemaChangedError: it was altered while the query runs.
        """
        told = StreamOffset.from_json(self._where() if start is None else start)
        ends = self._look()
        handle = self._handle()
        self._require_same_table(handle, told)
        self._hold(told)
        told.require_within(ends)
        if self._target is not None:
            ends = {k: min(e, self._target.get(k, 0)) for k, e in ends.items()}
        begin = _offset(handle, told.at, told.live)
        rows = {t.key: t.rows for t in self._seen}
        reached = begin.advanced(ends, self._rows_max(handle, begin, ends, limit), rows)
        if reached is begin:
            reached = replace(reached, began=told.began)  # the same text: nothing is new
        elif self._initial is not None and told.to_json() == self._initial.to_json():
            reached = replace(reached, began=told)
        self._reached = reached
        return self._reached.to_json()

    def _where(self) -> dict[str, Any]:
        """Where the query is, which Spark tells before 4.2 where it goes on from a checkpoint alone, as the two ends of
        a micro-batch of nothing; later it is where the last one ended."""
        return self.initialOffset() if self._reached is None else self._reached.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The options' limits, of which Spark is told one."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        return ReadAllAvailable() if self._options.max_bytes is None else ReadMaxBytes(self._options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        """What comes after this is not for this query."""
        self._target = self._look()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the logs ended when they were last looked at; what lies between is the query's lag."""
        ends = _ends(self._seen) or self._look()
        return _offset(self._handle(), ends).to_json()

    # ---- micro-batches --------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """What lies between two offsets."""
        handle, until = self._handle(), StreamOffset.from_json(end)
        begin = until.beginning(StreamOffset.from_json(start))
        self._require_same_table(handle, begin)
        self._require_same_table(handle, until)
        self._reached = until
        parts: list[LakePart | HotPart | RecordsPart] = []
        self._hold(begin)
        wanted = wanted_rows(handle.desc, self._options)
        live = live_between(begin, until)
        if live is not None:
            parts += _live_parts(handle, live, wanted)
        parts += record_parts(handle.desc, records_between(begin, until), wanted)
        return [InputPartition(p) for p in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one partition, on an executor."""
        target = arrow_schema(self._schema)
        try:
            for batch in self._rows(partition.value):
                if batch.num_rows:
                    yield cast_to(target, batch)
        except SchemaChangedError as e:
            raise altered(handle_of(worker_table(self._options.uri, self._options.table))) from e

    def _rows(self, part: LakePart | HotPart | RecordsPart) -> Iterator[pa.RecordBatch]:
        handle = planned_handle(self._options.uri, self._options.table, part.table_id, part.schema_id)
        if isinstance(part, RecordsPart):
            return read_changes(handle, part, self._schema.names)
        return _as_of_start(handle, read_rows(handle, part, self._schema.names))

    def commit(self, end: dict[str, Any]) -> None:
        """What was delivered is not read again: the server need not hold it."""
        if "live" not in end:
            self._release()

    def stop(self) -> None:
        """The query ends, and may go on in another process: what it waits for is held a while longer."""
        self._held.close()

    # ---- the table ------------------------------------------------------------------------------------------------

    def _handle(self) -> TableHandle:
        """The table under the definition that the query was planned with.

        Raises:
            InvalidPropertyError: an option is not one of streams. What is raised earlier, PySpark hides.
            SchemaChangedError: it has another one now.
        """
        if self._opened is None:
            self._options.require_stream(limited=LIMITED)
            table = worker_table(self._options.uri, self._options.table, planned=True)
            wanted = spark_schema(wanted_columns(table, self._options))
            if [(f.name, f.dataType) for f in wanted] != [(f.name, f.dataType) for f in self._schema]:
                raise altered(handle_of(table))
            self._opened = handle_of(table)
        return self._opened

    def _look(self) -> dict[TabletKey, int]:
        """Where the logs end; a restart of the server takes nothing of that back."""
        handle = self._handle()
        try:
            now = handle.now()
        except (AuthenticationError, ClosedError):
            # The server was started again, with another token.
            self._opened = None
            handle = self._handle()
            now = handle.now()
        except TableNotFoundError as e:
            raise self._gone(handle) from e
        if was_overwritten(now.desc):
            raise self._gone(handle)
        if now.desc.schema_id != handle.desc.schema_id:
            raise altered(now)
        if now.desc.path != handle.desc.path:
            raise TableNotFoundError(
                f"table {handle.desc.path} is called {now.desc.path} now: load the stream by that name and start the"
                " query from its checkpoint, it goes on where it was",
                table=str(handle.desc.path),
            )
        try:
            self._seen = handle.log.tablets(sync=True)
        except TableNotFoundError as e:
            raise self._gone(handle) from e
        return _ends(self._seen)

    def _gone(self, handle: TableHandle) -> TableNotFoundError:
        """What ends a query whose table was dropped, as one is that was overwritten."""
        was = f"table {handle.desc.path}, which this query reads, was dropped"
        try:
            worker_table(self._options.uri, self._options.table)
        except TableNotFoundError:
            told = f"{was}: the query ends with it"
        else:
            told = (
                f"{was} or overwritten, and the {handle.desc.path} there is now is another table, whose offsets"
                " begin anew: start the query with another checkpointLocation to read that, and make anew what it has"
                " written by the old ones, as apply_changes does with sequence_by='__offset'"
            )
        return TableNotFoundError(told, table=str(handle.desc.path))

    def _hold(self, offset: StreamOffset) -> None:
        """Renew what rows as of the start are held by, while they wait and this process lives."""
        lease = None if offset.live is None else offset.live.lease
        if lease is not None and lease != self._lease:
            self._release()  # of a beginning that was found anew, and is not this query's
            self._lease = lease
            self._held.enter_context(self._handle().leases.used(lease))

    def _release(self) -> None:
        if self._lease is not None:
            leases = self._handle().leases
            self._held.close()
            leases.release(self._lease)
            leases.renew()
            self._lease = None

    def _require_same_table(self, handle: TableHandle, offset: StreamOffset) -> None:
        if offset.table_id != handle.desc.table_id:
            raise TableNotFoundError(
                f"table {offset.table}, which this query's checkpoint is of, was dropped, overwritten or renamed, and"
                f" the {handle.desc.path} there is now is another table, whose offsets begin anew: start the query with"
                " another checkpointLocation, and make anew what it has written by the old ones (as apply_changes does"
                " with sequence_by='__offset'), or load the stream by the name that the first one has now",
                table=offset.table,
            )

    # ---- limits ---------------------------------------------------------------------------------------------------

    def _rows_max(
        self, handle: TableHandle, begin: StreamOffset, ends: Mapping[TabletKey, int], limit: ReadLimit | None
    ) -> int | None:
        if limit is None or isinstance(limit, ReadAllAvailable):
            return None
        rows, size = self._options.max_rows, self._options.max_bytes
        if size is None:
            return rows
        if begin.live is not None:  # their size is not known: one tablet's at a time
            return 1
        most = max(ends, key=lambda k: ends[k] - begin.at.get(k, 0), default=None)
        if most is None or ends[most] <= begin.at.get(most, 0):
            return rows
        of_size = max(1, size // self._row_bytes(handle, most, begin.at.get(most, 0), ends[most]))
        return of_size if rows is None else min(rows, of_size)

    def _row_bytes(self, handle: TableHandle, tablet: TabletKey, start: int, end: int) -> int:
        """About what a row takes as Arrow, by the next ones."""
        names = [n for n in self._schema.names if n not in (CHANGE_TYPE_COLUMN, OFFSET_COLUMN)]
        spec = ReadSpec((*names, OFFSET_COLUMN))
        sample = next(read_records(handle, tablet, start, min(start + _SAMPLE_ROWS, end), spec), None)
        return 1 if sample is None else max(1, sample.nbytes // sample.num_rows)


def _offset(handle: TableHandle, at: Mapping[TabletKey, int], live: LiveRows | None = None) -> StreamOffset:
    return StreamOffset(str(handle.desc.path), handle.desc.table_id, handle.desc.schema_id, at, live)


def _ends(tablets: Sequence[TabletState]) -> dict[TabletKey, int]:
    return {t.key: t.high_watermark for t in tablets}


def altered(now: TableHandle, lacks: str = "") -> SchemaChangedError:
    """What a query that reads a table is ended with, which has other columns now than were planned; ``lacks`` says
    which are gone, unless a schema that its user gave it has others than the table ever had."""
    columns = ", ".join(f"{f.name} {f.type}" for f in now.desc.schema)
    has = f"has now, as schema {now.desc.schema_id}, the columns {columns}"
    again = "load the stream again and start the query from its checkpoint, it goes on where it was"
    return SchemaChangedError(
        f"{lacks}. The table {has}: if it was altered, {again}"
        if lacks
        else f"table {now.desc.path} was altered while a query reads it, and {has}: {again}",
        table=str(now.desc.path),
        schema_id=now.desc.schema_id,
    )


# ---- where it starts ------------------------------------------------------------------------------------------------


def _first_offset(handle: TableHandle, options: ReadOptions) -> StreamOffset:
    """Where a stream starts, tablet by tablet as a subscription does.

    Raises:
        OffsetOutOfRangeError: the log, and the lake where it holds all of the log, do not have what is asked for.
    """
    desc, start = handle.desc, options.start
    since_us = (start - _EPOCH) // dt.timedelta(microseconds=1) if isinstance(start, dt.datetime) else None
    at: dict[TabletKey, int] = {}
    live = set()
    for tablet in handle.log.tablets(sync=True, at_timestamp_us=since_us):
        key = tablet.key
        if start == "latest":
            at[key] = tablet.high_watermark
        elif since_us is not None:
            at[key] = _offset_at(handle, tablet, since_us)
        elif isinstance(start, Mapping) and key in start:
            at[key] = start[key]
        elif desc.keyed and (start == "full" or first_record(desc, tablet) > 0):
            live.add(key)
        else:
            at[key] = first_record(desc, tablet)
        if isinstance(start, Mapping):
            _require_readable(handle, start, tablet)
    if isinstance(start, Mapping) and (unknown := sorted(start.keys() - at.keys())):
        there = sorted(map(str, at))
        told = ", ".join(there[:_TOLD_MAX]) + (", ..." if len(there) > _TOLD_MAX else "")
        raise OffsetOutOfRangeError(
            f"option start names tablet {unknown[0]}, which {desc.path} does not have: it has {told or 'none yet'}"
        )
    return _offset(handle, at, _live_now(handle, live))


def _live_now(handle: TableHandle, tablets: set[TabletKey]) -> LiveRows | None:
    if not tablets:
        return None
    pinned = pin(handle, planned=True)
    handle.log.watermarks()  # synced, and what was pinned with it
    snapshot = pinned.lake.snapshot_id if pinned.lake is not None else None
    return LiveRows(snapshot, pinned.lease, {k: r for k, r in pinned.ranges.items() if k in tablets})


def _require_readable(handle: TableHandle, start: Mapping[TabletKey, int], tablet: TabletState) -> None:
    first = 0 if outlives_log(handle.desc) else tablet.log_start
    if not first <= start.get(tablet.key, first) <= tablet.high_watermark:
        raise OffsetOutOfRangeError(
            f"option start wants offset {start[tablet.key]} of {handle.desc.path} tablet {tablet.key}, which holds"
            f" [{first}, {tablet.high_watermark})",
            log_start_offset=first,
            high_watermark=tablet.high_watermark,
        )


def _offset_at(handle: TableHandle, tablet: TabletState, since_us: int) -> int:
    """First offset of a row that was committed at a time or later."""
    if tablet.at_timestamp is not None:
        return tablet.at_timestamp
    desc = handle.desc
    if not outlives_log(desc):
        since = dt.datetime.fromtimestamp(since_us / 1e6, dt.UTC)
        raise OffsetOutOfRangeError(
            f"changes of {desc.path} since {since.isoformat()} are no longer all in the log: tablet {tablet.key} holds"
            f" [{tablet.log_start}, {tablet.high_watermark}); start 'full' gives the current rows, then what changes",
            log_start_offset=tablet.log_start,
            high_watermark=tablet.high_watermark,
        )
    lake = records_lake(handle)
    spec, wanted = ReadSpec((OFFSET_COLUMN, TIMESTAMP_COLUMN)), pa.scalar(since_us, TIMESTAMP_TYPE)
    low, high = 0, tablet.log_start
    while low < high:
        middle = (low + high) // 2
        rows = next(read_records(handle, tablet.key, middle, high, spec, open_lake=lambda *_: lake), None)
        if rows is None or rows.column(TIMESTAMP_COLUMN)[0].as_py() >= wanted.as_py():
            high = middle
        else:
            low = rows.column(OFFSET_COLUMN)[0].as_py() + 1
    return high


# ---- live rows ------------------------------------------------------------------------------------------------------


def _live_parts(handle: TableHandle, live: LiveRows, wanted: Predicate | None) -> list[LakePart | HotPart]:
    try:
        lake = None if live.snapshot is None else PinnedLake.at(handle.desc, handle.lake(), live.snapshot)
        return union_parts(handle, Pin(lake, live.ranges, live.lease), wanted)
    except (SnapshotNotFoundError, UnavailableError) as e:
        raise _translated(handle, e) from e


def _as_of_start(handle: TableHandle, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except UnavailableError as e:
        raise _translated(handle, e) from e


def _translated(handle: TableHandle, e: SnapshotNotFoundError | UnavailableError) -> Exception:
    """What is held for a query's first rows goes a while after the query did."""
    if isinstance(e, UnavailableError) and not isinstance(e.__cause__, OffsetOutOfRangeError):
        return e
    return OffsetOutOfRangeError(
        f"the rows of {handle.desc.path} as of the start of this query are no longer all there, and it had not"
        f" delivered them: start it with another checkpointLocation ({e})",
        table=str(handle.desc.path),
    )
