"""`Feed`: the stream behind a subscription, which goes on at its positions whatever happens in between.

A server that is away is waited for. Offsets of a log table with a lake that the log no longer holds come from the lake,
before the first pushed row as well as when retention overtakes a slow reader.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.client.patience import Patience
from lakehead.client.received import require_tablet
from lakehead.client.table import TableHandle
from lakehead.errors import OffsetOutOfRangeError, SchemaChangedError, UnavailableError
from lakehead.lake.records import first_record, outlives_log, read_records
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import Stream, StreamHeader, TabletState
from lakehead.types import (
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
    TableDescriptor,
    TabletKey,
)

Item = tuple[StreamHeader, pa.RecordBatch]
FeedStart = Literal["latest", "earliest", "full"] | int | Mapping[TabletKey, int]
"""Where a feed starts; an int is a time, in microseconds."""

_NO_STOP = 1 << 62
_ATTEMPTS_MAX = 10


@dataclass(frozen=True)
class _LiveRows:
    """The rows of a tablet that were live at one offset, of which some were handed out."""

    at: int
    rows: int


class Feed:
    """Rows of a table as soon as they are readable, each once, in order per tablet; see `Table.subscribe`.

    Without ``stops`` it waits for its server as long as it must; with ``stops`` it is a read, and gives up as reads do.
    """

    def __init__(
        self,
        handle: TableHandle,
        start: FeedStart,
        stops: Mapping[TabletKey, int] | None,
        specify: Callable[[TableDescriptor], ReadSpec],
    ) -> None:
        """Find where it starts, and open it.

        Args:
            specify: what is wanted of the table under a definition; asked again when it is altered.

        Raises:
            LakeheadError: that is not possible.
        """
        self._handle = handle
        self._over_lake = outlives_log(handle.desc)
        self._stops = stops
        self._specify = specify
        self._spec = specify(handle.desc)
        self._since_us = start if isinstance(start, int) else None
        self._begins_anew = _ATTEMPTS_MAX if start == "earliest" else 0
        self._default: Literal["earliest", "full"] = "full" if start == "full" else "earliest"
        self._positions: dict[TabletKey, int] = {}
        self._live_first: dict[TabletKey, _LiveRows | None] = {}
        self._stopped = False
        what, clock = f"subscription to {handle.desc.path}", handle.env.clock
        self._patience = Patience(clock, what, None) if stops is None else Patience.bounded(clock, what)
        self._stream = self._first(start)
        self.schema = self._columns()

    # ---- where it starts --------------------------------------------------------------------------------------

    def _first(self, start: FeedStart) -> Stream | None:
        for attempt in range(_ATTEMPTS_MAX):
            tablets = self._handle.log.tablets(at_timestamp_us=self._since_us)
            self._live_first.clear()
            found = {t.key: self._first_position(start, t) for t in tablets}
            self._positions = {k: position for k, position in found.items() if position is not None}
            if isinstance(start, Mapping):
                self._positions |= start
            try:
                return self._open(tablets)
            except OffsetOutOfRangeError:
                # The log was trimmed a moment ago, or the caller asked for offsets that do not exist.
                if start != "earliest" or attempt == _ATTEMPTS_MAX - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _first_position(self, start: FeedStart, tablet: TabletState) -> int | None:
        """None when the rows that are live come first."""
        if start == "latest":
            return tablet.high_watermark
        if isinstance(start, int):
            return self._position_at_time(tablet, start)
        if isinstance(start, Mapping) and tablet.key in start:
            return start[tablet.key]
        first = first_record(self._handle.desc, tablet)
        if self._handle.desc.keyed and (start == "full" or first > 0):
            self._live_first[tablet.key] = None
            return None
        return first

    def _position_at_time(self, tablet: TabletState, at_us: int) -> int:
        if tablet.at_timestamp is None and not self._over_lake:
            at = dt.datetime.fromtimestamp(at_us / 1e6, dt.UTC)
            raise OffsetOutOfRangeError(
                f"changes of {self._handle.desc.path} since {at.isoformat()} are no longer all in the log: tablet"
                f" {tablet.key} holds offsets [{tablet.log_start}, {tablet.high_watermark}); start from 'full' to get"
                " the current rows and what changes after",
                log_start_offset=tablet.log_start,
                high_watermark=tablet.high_watermark,
            )
        return tablet.at_timestamp or 0

    # ---- what comes -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Item]:
        altered = anew = False
        while not self._stopped:
            try:
                if altered:
                    self._follow_definition()
                    altered = False
                if anew:
                    self._stream = self._first("earliest")
                    anew = False
                if self._stream is None:
                    yield from self._rest_of_live_rows()
                    self._stream = self._open(self._handle.log.tablets())
                if self._stream is None:
                    yield from self._catch_up()
                    continue
                yield from self._follow(self._stream)
                return
            except SchemaChangedError:
                self._forget_stream()
                altered = True
            except UnavailableError as e:
                self._forget_stream()
                if not self._stopped:
                    self._patience.wait(e)
            except OffsetOutOfRangeError:
                # Trimmed faster than it was read: the lake has it.
                self._forget_stream()
                if self._over_lake and self._behind(self._log_starts()):
                    continue
                if not self._begins_anew:
                    raise
                # Nothing was handed out: what is earliest is what there is now.
                self._begins_anew -= 1
                anew = True
            except BaseException:
                self._forget_stream()
                raise

    def _follow_definition(self) -> None:
        """Go on at the same positions, with the columns that the table has now, or those of them that were asked for.

        Raises:
            ColumnNotFoundError: one that was asked for does not exist any more, or the condition needs it.
        """
        self._handle = self._handle.now()
        self._spec = self._specify(self._handle.desc)
        self.schema = self._columns()

    def _columns(self) -> pa.Schema:
        """The stream's own: what comes from the lake has the same."""
        fields = pa.schema([*self._handle.desc.schema, *SYSTEM_FIELDS, pa.field(CHANGE_TYPE_COLUMN, pa.int8())])
        return pa.schema([fields.field(c) for c in self._spec.names])

    def _follow(self, stream: Stream) -> Iterator[Item]:
        if self._stopped:
            stream.close()
        for header, batch in stream:
            self._patience.progress()
            key = TabletKey(header.partition, header.bucket)
            if batch.num_rows or header.end_offset is not None:  # others say that the server lives
                require_tablet(self._handle.desc, key)
            if batch.num_rows:
                self._begins_anew = 0
            if header.live_at is not None:
                self._took_live_rows(key, header, batch)
                yield header, batch
            elif header.end_offset is not None:
                self._positions[key] = header.end_offset
                if batch.num_rows:
                    yield header, batch
        if self._stops is None and not self._stopped:
            raise UnavailableError("the server ended the stream", gone=True)

    def _took_live_rows(self, key: TabletKey, header: StreamHeader, batch: pa.RecordBatch) -> None:
        assert header.live_at is not None
        if header.end_offset is not None:
            self._positions[key] = header.end_offset
            self._live_first.pop(key, None)
            return
        held = self._live_first.get(key) or _LiveRows(header.live_at, 0)
        self._live_first[key] = _LiveRows(held.at, held.rows + batch.num_rows)

    def _rest_of_live_rows(self) -> Iterator[Item]:
        """The rest of a tablet's live rows, of which a part was handed out, as of the same offset."""
        for key, held in list(self._live_first.items()):
            if held is None:
                continue
            rest = self._handle.log.read_ranges({key: (0, held.at)}, self._spec, live=True, skip=held.rows)
            waiting: pa.RecordBatch | None = None
            for _, batch in rest:
                if waiting is not None:
                    yield self._live_item(key, held.at, waiting, last=False)
                waiting = batch
            yield self._live_item(key, held.at, waiting, last=True)

    def _live_item(self, key: TabletKey, at: int, batch: pa.RecordBatch | None, *, last: bool) -> Item:
        if batch is None:
            batch = pa.RecordBatch.from_pylist([], schema=self.schema)
        column = batch.schema.get_field_index(TIMESTAMP_COLUMN)
        nulls = pa.nulls(batch.num_rows, TIMESTAMP_TYPE)
        batch = batch.set_column(column, batch.schema.field(column), nulls)
        header = StreamHeader(partition=key.partition, bucket=key.bucket, end_offset=at if last else None, live_at=at)
        self._took_live_rows(key, header, batch)
        return header, batch

    def _forget_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    # ---- log and lake -----------------------------------------------------------------------------------------

    def _log_starts(self) -> dict[TabletKey, int]:
        return {t.key: t.log_start for t in self._handle.log.tablets()}

    def _behind(self, log_starts: Mapping[TabletKey, int]) -> dict[TabletKey, int]:
        """Positions that the log no longer holds and that are still wanted."""
        return {k: p for k, p in self._positions.items() if p < min(log_starts.get(k, 0), self._stop(k))}

    def _stop(self, key: TabletKey) -> int:
        return _NO_STOP if self._stops is None else self._stops.get(key, 0)

    def _catch_up(self) -> Iterator[Item]:
        """What the log had trimmed when it was asked where it begins."""
        log_starts = self._log_starts()
        for key, position in self._behind(log_starts).items():
            end = min(log_starts[key], self._stop(key))
            for batch in self._records(key, position, end):
                if self._stopped:
                    return
                if self._since_us is not None:
                    since = pa.scalar(self._since_us, TIMESTAMP_TYPE)
                    batch = batch.filter(pc.greater_equal(batch.column(TIMESTAMP_COLUMN), since))
                if batch.num_rows:
                    self._positions[key] = batch.column(OFFSET_COLUMN)[-1].as_py() + 1
                    header = StreamHeader(partition=key.partition, bucket=key.bucket, end_offset=self._positions[key])
                    yield header, batch
            self._positions[key] = end

    def _records(self, key: TabletKey, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return read_records(self._handle, key, start, end, self._spec)

    def _open(self, tablets: Sequence[TabletState]) -> Stream | None:
        """Follow the log; None when it does not hold all that is wanted, and the lake does.

        The server refuses a position that was trimmed meanwhile, unless the tablet has reached its stop.
        """
        log_starts = {t.key: t.log_start for t in tablets}
        for key in log_starts:
            if key not in self._live_first:
                # Made since: wanted from its beginning.
                self._positions.setdefault(key, 0)
        if self._over_lake and self._behind(log_starts):
            return None
        try:
            return self._handle.log.subscribe(
                starts=self._positions, default=self._default, stops=self._stops, spec=self._spec
            )
        except OffsetOutOfRangeError:
            if self._over_lake and self._behind(self._log_starts()):
                return None
            raise

    def close(self) -> None:
        """End the iteration."""
        self._stopped = True
        stream = self._stream
        if stream is not None:
            stream.close()
