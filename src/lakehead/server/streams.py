"""Bulk reads: bounded ranges, live rows, and push subscriptions, as generators over tablets."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from lakehead.errors import (
    CorruptionError,
    InvalidPredicateError,
    InvalidRequestError,
    LimitExceededError,
    OffsetOutOfRangeError,
    WrongTableKindError,
)
from lakehead.format.ipc_message import require_small_file
from lakehead.log import LogView
from lakehead.predicate import PREDICATE_BYTES_MAX, Predicate
from lakehead.protocol.messages import Read, ReadLive, StreamHeader, Subscribe
from lakehead.server.filtering import Filtering, until_gone
from lakehead.server.progress import Progress
from lakehead.server.projection import Projection, coalesce
from lakehead.server.shared_turns import ROWS_MAX, Item
from lakehead.server.tables import LiveTable
from lakehead.server.tablet import Tablet
from lakehead.types import ChangeType, Offset, TableDescriptor, TabletKey

Views = Mapping[TabletKey, LogView]
_TURN_ROWS = 1 << 18
HEARTBEAT_SECONDS = 4.0
"""An idle subscription says so often that its server lives; less than its client waits until it asks."""


class Pause(enum.Enum):
    """Said by a stream, instead of an item, to who asked for that."""

    NOTHING_NEW = "there is nothing until there is progress"
    LONG = "the next item may take long to make"


class _Closed:
    """Whether a stream was closed. Who asks on its behalf holds this, and not the stream: it would be part of a cycle,
    and what it reads, segments that were trimmed meanwhile too, would stay open until Python's collector looks."""

    def __init__(self) -> None:
        self.yet = False

    def before(self, gone: Callable[[], bool]) -> Callable[[], bool]:
        """What asks whether it was, or ``gone()``."""
        return lambda: self.yet or gone()


class ServerStream:
    """A stream being served in this process; see `lakehead.protocol.messages.Stream`.

    Attributes:
        progress: what it waits for, if that is nothing else.
    """

    progress: Progress | None = None

    def __init__(self, schema: pa.Schema, open_items: Callable[..., Iterator[Any]]) -> None:
        """``open_items(closed)`` begins; with ``pauses=True``, too, where there is a ``progress``."""
        self._on_close: list[Callable[[], None]] = []  # first: one that is interrupted here is collected, too
        self._closed = _Closed()
        self._before_each: Callable[[int, Callable[[], bool]], None] | None = None
        self._open_items = open_items
        self.schema = schema

    def __iter__(self) -> Iterator[Item]:
        return self.items(lambda: False)

    def items(self, gone: Callable[[], bool]) -> Iterator[Item]:
        """Iterate until closed or until ``gone()``, which is asked now and then."""
        ended = self._closed.before(gone)
        items: Iterator[Item] = until_gone(self._open_items(ended))
        return items if self._before_each is None else self._asking(items, self._before_each, ended)

    def pausing(self, gone: Callable[[], bool]) -> Iterator[Item | Pause]:
        """As `items`, but it never waits where it can say so instead: whoever iterates goes on when there is progress,
        and now and then. Of a stream with ``progress`` alone."""
        return until_gone(self._open_items(self._closed.before(gone), pauses=True))

    @staticmethod
    def _asking(
        items: Iterator[Item], ask: Callable[[int, Callable[[], bool]], None], ended: Callable[[], bool]
    ) -> Iterator[Item]:
        for item in items:
            ask(item[1].nbytes, ended)
            yield item

    def before_each(self, ask: Callable[[int, Callable[[], bool]], None]) -> None:
        """Have `items` call this before each item, with its bytes and what tells that nobody waits for it any more: it
        returns when the reader may have it, and raises what the stream then ends with."""
        self._before_each = ask
        self.progress = None

    def on_close(self, call: Callable[[], None]) -> None:
        """Have something done when the stream is closed: twice, perhaps, if that is interrupted."""
        self._on_close.append(call)

    def close(self) -> None:
        self._closed.yet = True
        # Gone only when it is done: who is interrupted here closes again, at the latest when this is collected.
        for call in list(self._on_close):
            call()
            with contextlib.suppress(ValueError):
                self._on_close.remove(call)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        # A client that goes before its first batch leaves an iterator that never ran, and so never closes this. What
        # was interrupted while it was made has nothing to close.
        if hasattr(self, "_on_close"):
            self.close()


def _projection(desc: TableDescriptor, request: Read | ReadLive | Subscribe, filtering: Filtering) -> Projection:
    data = request.predicate
    predicate = None if data is None else filtering.read(lambda: _predicate(data, desc))
    return Projection(desc.schemas, request.columns, predicate, filtering.filter)


def _predicate(data: bytes, desc: TableDescriptor) -> Predicate:
    try:
        require_small_file(data, bytes_max=PREDICATE_BYTES_MAX)
    except (CorruptionError, LimitExceededError) as e:
        raise InvalidPredicateError(f"a filter's bytes cannot be read: {e}") from e
    return Predicate.from_bytes(data, desc.schema)


def _header(key: TabletKey, end: int | None, live_at: int | None = None) -> StreamHeader:
    return StreamHeader(partition=key.partition, bucket=key.bucket, end_offset=end, live_at=live_at)


def open_read(table: LiveTable, request: Read, leased: Views, filtering: Filtering) -> ServerStream:
    """Rows of explicit ranges, of leased views where there are any.

    Raises:
        OffsetOutOfRangeError: a range is not, or not wholly, in the log.
    """
    views: dict[TabletKey, LogView] = {}
    for part in request.ranges:
        tablet = table.tablet(part.key)
        if tablet is not None:
            # Taken now, so that nothing is trimmed away while the tablets before it are being read.
            views[part.key] = leased.get(part.key) or tablet.view()
        low, high = (views[part.key].log_start_offset, tablet.high_watermark) if tablet else (0, 0)
        if part.start < part.end and not low <= part.start < part.end <= high:
            raise OffsetOutOfRangeError(
                f"offsets [{part.start}, {part.end}) of {table.desc.path} tablet {part.key} are not all in the log,"
                f" which holds [{low}, {high})",
                log_start_offset=low,
                high_watermark=high,
            )
    # After the views: of what they hold every definition is known.
    projection = _projection(table.as_of(request.schema_id), request, filtering)

    def items(closed: Callable[[], bool]) -> Iterator[Item]:
        filtering.gone = closed
        for part in request.ranges:
            tablet = table.tablets.get(part.key)
            if tablet is None or part.start >= part.end:
                continue
            for end, batch in coalesce(_log_rows(tablet, projection, part.start, part.end, views[part.key])):
                yield _header(part.key, end), batch

    return ServerStream(projection.schema, items)


def _log_rows(
    tablet: Tablet, projection: Projection, start: int, end: int, view: LogView | None = None
) -> Iterator[tuple[int, pa.RecordBatch, int]]:
    """(end offset, rows, bytes at most) of what the log is read as."""
    for records in tablet.records(start, end, projection.schemas, view):
        batch = projection.records(records, tablet.key.bucket, start, end)
        if batch is not None and batch.num_rows:
            yield min(records.end_offset, end), batch, records.bytes_of(batch)


def open_read_live(table: LiveTable, request: ReadLive, leased: Views, filtering: Filtering) -> ServerStream:
    """Rows live at exactly the end of each range, of leased views where there are any.

    Raises:
        WrongTableKindError: the table has no keys.
        OffsetOutOfRangeError: there is no such tablet, or no such offset yet; while iterating: what was live there is
            no longer known.
    """
    desc = table.desc
    if not desc.keyed:
        raise WrongTableKindError(f"{desc.path} is a log table: it has no live rows, read its log")
    views: dict[TabletKey, LogView] = {}
    for part in request.ranges:
        tablet = table.tablet(part.key)
        high = tablet.high_watermark if tablet else 0
        if tablet is not None:
            views[part.key] = leased.get(part.key) or tablet.view()
        if part.end > high:
            raise OffsetOutOfRangeError(
                f"offset {part.end} of {desc.path} tablet {part.key} is not there yet: the log ends at {high}",
                log_start_offset=0,
                high_watermark=high,
            )
    # After the views: of what they hold every definition is known.
    projection = _projection(table.as_of(request.schema_id), request, filtering)

    def items(closed: Callable[[], bool]) -> Iterator[Item]:
        filtering.gone = closed
        for part in request.ranges:
            tablet = table.tablets.get(part.key)
            if tablet is not None:
                live = tablet.live_at(part.end, projection.positions, views[part.key], projection.schemas)
                batches = (
                    projection.live(b.offsets, b.timestamps, b.rows, part.bucket, ChangeType.INSERT) for b in live
                )
                for end, batch in coalesce((part.end, b, b.nbytes) for b in batches if b.num_rows):
                    yield _header(part.key, end), batch

    return ServerStream(projection.schema, items)


def _initial(key: TabletKey, tablet: Tablet, projection: Projection) -> Iterator[Item]:
    end, parts = tablet.live_rows(projection.positions, projection.schemas.current.id)
    for i, (offsets, rows) in enumerate(parts):
        batch = projection.live(offsets, None, rows, key.bucket, ChangeType.INSERT)
        last = i == len(parts) - 1
        if batch.num_rows or last:
            yield _header(key, end if last else None, live_at=end), batch
    if not parts:
        yield _header(key, end, live_at=end), _empty(projection)


def _empty(projection: Projection) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in projection.schema], schema=projection.schema)


def open_subscription(table: LiveTable, request: Subscribe, filtering: Filtering) -> ServerStream:
    """Rows as soon as they are readable.

    Raises:
        OffsetOutOfRangeError: a start is no longer in the log, though it has not reached its stop, or not yet.
        WrongTableKindError: ``full`` live rows were asked of a log table.
        SchemaChangedError: the table was altered, before or while it is followed.
    """
    desc = table.desc
    desc.require_schema(request.schema_id)
    if request.default == "full" and not table.desc.keyed:
        raise WrongTableKindError(f"{table.desc.path} is a log table: subscribe from 'earliest' to get all its rows")
    projection = _projection(desc, request, filtering)
    positions = {part.key: part.start for part in request.starts}
    stops = None if request.stops is None else {part.key: part.start for part in request.stops}
    known = table.answering()
    for key, start in positions.items():
        tablet = table.tablet(key)
        low, high = (tablet.log_start_offset, tablet.high_watermark) if tablet else (0, 0)
        ended = stops is not None and start >= stops.get(key, 0)
        if start > high or (start < low and not ended):
            raise OffsetOutOfRangeError(
                f"cannot start at offset {start} of {table.desc.path} tablet {key}: the log holds [{low}, {high}];"
                " subscribe from 'earliest', or from 'full' to get the current rows and what changes after",
                log_start_offset=low,
                high_watermark=high,
            )
    initial: list[TabletKey] = []
    for key, tablet in known.items():
        if key not in positions:
            trimmed = request.default == "earliest" and table.desc.keyed and tablet.log_start_offset > 0
            if request.default == "full" or trimmed:
                initial.append(key)
            positions[key] = tablet.high_watermark if request.default == "latest" else tablet.log_start_offset
    if stops is not None and any(table.tablet(key) is None for key in stops):
        raise InvalidRequestError(f"stop names tablets that {table.desc.path} does not have")
    same = (projection.schemas.current.id, tuple(request.columns), request.predicate)
    subscription = _Subscription(table, projection, positions, initial, stops, same)

    def items(closed: Callable[[], bool], *, pauses: bool = False) -> Iterator[Item | Pause]:
        filtering.gone = closed
        return subscription.items(closed, pauses)

    stream = ServerStream(projection.schema, items)
    stream.progress = table.progress
    stream.on_close(table.progress.notify)
    return stream


class _Subscription:
    def __init__(
        self,
        table: LiveTable,
        projection: Projection,
        positions: dict[TabletKey, int],
        initial: list[TabletKey],
        stops: dict[TabletKey, int] | None,
        same: Hashable,
    ) -> None:
        """``same`` is equal for those who are sent the same rows of a range."""
        self._same = same
        self._table = table
        self._projection = projection
        self._at_once = projection.at_once()
        self._positions = positions
        self._told = dict(positions)
        self._initial = initial
        self._stops = stops

    def items(self, closed: Callable[[], bool], pauses: bool) -> Iterator[Item | Pause]:
        progress = self._table.progress
        for key in self._initial:
            if closed():
                return
            tablet = self._table.tablets[key]
            for header, batch in _initial(key, tablet, self._projection):
                if header.end_offset is not None:
                    self._positions[key] = self._told[key] = header.end_offset
                yield header, batch
        if self._stops is None:
            # All that comes from here on are records, and so the same as others get who have come equally far.
            yield _header(TabletKey("", 0), None), _empty(self._projection)
        clock = self._table.clock
        spoke = clock.monotonic()
        while not closed():
            version = progress.version
            self._table.desc.require_schema(self._projection.schemas.current.id)
            sent = more = False
            for key, tablet in self._table.tablets.items():
                if pauses and self._is_long(key, tablet):
                    yield Pause.LONG
                start, end = self._range(key, tablet)
                more = more or end - start == _TURN_ROWS
                for item in self._turn(key, tablet):
                    sent = True
                    yield item
                    if closed():
                        return
            if self._done():
                return
            now = clock.monotonic()
            if sent:
                spoke = now
            elif now >= spoke + HEARTBEAT_SECONDS:
                yield from self._heartbeat()
                spoke = now
            elif more:  # of which no row was wanted so far: there is no progress to wait for
                continue
            elif pauses:
                progress.require_going()
                yield Pause.NOTHING_NEW
            else:
                progress.wait(version, closed, spoke + HEARTBEAT_SECONDS - now)

    def _heartbeat(self) -> Iterator[Item]:
        """Say that the server lives, and how far the subscription has come where no row was wanted."""
        silent = {k: p for k, p in self._positions.items() if p != self._told.get(k)}
        for key, position in silent.items():
            self._told[key] = position
            yield _header(key, position), _empty(self._projection)
        if not silent:
            yield _header(TabletKey("", 0), None), _empty(self._projection)

    def _range(self, key: TabletKey, tablet: Tablet) -> tuple[Offset, Offset]:
        start = self._positions.get(key, 0)
        end = min(tablet.high_watermark, start + _TURN_ROWS)
        return start, end if self._stops is None else min(end, self._stops.get(key, 0))

    def _is_long(self, key: TabletKey, tablet: Tablet) -> bool:
        start, end = self._range(key, tablet)
        return start < end and not self._is_shared(tablet, start, end)

    def _is_shared(self, tablet: Tablet, start: Offset, end: Offset) -> bool:
        """Whether it is little, and others may be at the same."""
        return end - start <= ROWS_MAX and start >= tablet.log_start_offset and self._projection.soon_done

    def _turn(self, key: TabletKey, tablet: Tablet) -> Iterator[Item]:
        start, end = self._range(key, tablet)
        if start >= end:
            return
        items: Iterable[Item]
        if self._is_shared(tablet, start, end):
            turn = (self._same, key, start, end)
            items = self._table.turns.of(turn, lambda: self._read(key, tablet, start, end, self._at_once))
        else:
            items = self._read(key, tablet, start, end, self._projection)
        for item in items:
            self._told[key] = item[0].end_offset or end
            yield item
        self._positions[key] = end

    def _read(self, key: TabletKey, tablet: Tablet, start: int, end: int, projection: Projection) -> Iterator[Item]:
        for position, batch in coalesce(_log_rows(tablet, projection, start, end)):
            yield _header(key, position), batch

    def _done(self) -> bool:
        return self._stops is not None and all(self._positions.get(k, 0) >= s for k, s in self._stops.items())
