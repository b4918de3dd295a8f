"""`Subscription`: batches pushed by the server, as users see them."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.display import Displayed
from lakehead.client.table import TableClient
from lakehead.errors import ColumnNotFoundError, InvalidRequestError, LakeStateError, OffsetOutOfRangeError
from lakehead.format.predicate import Predicate, parse_predicate
from lakehead.format.schema import nearest_name
from lakehead.lake.history import read_history
from lakehead.lake.view import LakeView
from lakehead.protocol.messages import Stream, StreamHeader
from lakehead.types import (
    BUCKET_COLUMN,
    CHANGE_SYMBOLS,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
    TableDescriptor,
    TabletId,
    TabletKey,
)

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, repr=False)
class Batch(Displayed):
    """Rows of one tablet, in offset order.

    Attributes:
        rows: the columns, then ``__change_type`` (keyed tables), ``__bucket``, ``__offset`` and ``__timestamp`` (null
            in the initial rows of a ``full`` subscription).
        tablet: where they come from.
        end_offset: where a subscription that goes on after this batch starts; None until the last initial batch of a
            tablet in a ``full`` subscription.
    """

    rows: pa.RecordBatch
    tablet: TabletId
    end_offset: int | None

    def _facts(self) -> Mapping[str, object]:
        return {"rows": self.rows.num_rows, "tablet": self.tablet, "end_offset": self.end_offset}


class Subscription(Displayed):
    """An iterator of `Batch`. Iterate in one thread; `close` from any thread ends the iteration."""

    def __init__(self, desc: TableDescriptor, stream: Stream) -> None:
        self._desc = desc
        self._stream = stream
        self._items: Iterator[tuple[StreamHeader, pa.RecordBatch]] = iter(stream)
        self._tablets: dict[TabletKey, TabletId] = {}

    def _facts(self) -> Mapping[str, object]:
        return {"table": repr(str(self._desc.path)), "columns": self._stream.schema.names}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        header, rows = next(self._items)
        key = TabletKey(header.partition, header.bucket)
        tablet = self._tablets.get(key)
        if tablet is None:
            tablet = self._tablets[key] = self._desc.tablet_id(key)
        return Batch(named_changes(rows), tablet, header.end_offset)

    def close(self) -> None:
        """End the iteration and free the server's side."""
        self._stream.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        stream: Stream | None = getattr(self, "_stream", None)
        if stream is not None:
            stream.close()


def named_changes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Change types as the field writes them (``+I``), instead of the stored byte."""
    at = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if at < 0:
        return rows
    return rows.set_column(at, CHANGE_TYPE_COLUMN, _symbols().take(rows.column(at)))


@functools.cache
def _symbols() -> pa.Array:
    # Made when first used: Arrow loads pandas, which takes most of a second, for the first array of Python values.
    return pa.array(CHANGE_SYMBOLS)


def chosen_columns(desc: TableDescriptor, columns: Sequence[str] | None) -> list[str]:
    """The user columns asked for, checked.

    Raises:
        ColumnNotFoundError: one does not exist; the message names the nearest.
    """
    names: list[str] = desc.schema.names
    if columns is not None and len(set(columns)) != len(columns):
        raise InvalidRequestError(f"columns={list(columns)} names a column twice: name each once")
    for c in columns or ():
        if c not in names:
            raise ColumnNotFoundError(f"{desc.path} has no column {c!r}; {nearest_name(str(c), names)}", column=str(c))
    return names if columns is None else list(columns)


def subscribe(
    client: TableClient,
    *,
    start: Literal["latest", "earliest", "full"] | dt.datetime | Mapping[TabletId, int],
    columns: Sequence[str] | None,
    where: str | pc.Expression | None,
    stop: Literal["now"] | Mapping[TabletId, int] | None,
) -> Subscription:
    """Open a subscription; see `Table.subscribe`."""
    desc = client.desc
    wanted = chosen_columns(desc, columns)
    predicate: Predicate | None = None if where is None else parse_predicate(where, desc.schema)
    changes = [CHANGE_TYPE_COLUMN] if desc.keyed else []
    system = [BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN]
    if desc.lake is not None and not desc.keyed:
        stream: Stream = _OverLake(client, start, _stops(client, stop), [*wanted, *system], predicate)
    else:
        default, starts = _starts(client, start)
        stream = client.subscribe(
            starts=starts,
            default=default,
            stops=_stops(client, stop),
            columns=[*wanted, *changes, *system],
            predicate=predicate,
        )
    return Subscription(desc, stream)


def _starts(client: TableClient, start: Any) -> tuple[Literal["latest", "earliest", "full"], dict[TabletKey, int]]:
    if start in ("latest", "earliest"):
        return start, {}
    if start == "full":
        return ("full" if client.desc.keyed else "earliest"), {}
    if isinstance(start, dt.datetime):
        tablets = client.tablets(at_timestamp_us=_microseconds(start))
        for t in tablets:
            if t.at_timestamp is None:
                raise OffsetOutOfRangeError(
                    f"changes of {client.desc.path} since {start.isoformat()} are no longer all in the log: tablet"
                    f" {t.key} holds offsets [{t.log_start}, {t.high_watermark}); start from 'full' to get the current"
                    " rows and what changes after",
                    log_start_offset=t.log_start,
                    high_watermark=t.high_watermark,
                )
        return "earliest", {t.key: t.at_timestamp or 0 for t in tablets}
    if isinstance(start, Mapping):
        return "earliest", _by_key(client.desc, start, "start")
    raise InvalidRequestError(f"start={start!r}: use 'latest', 'earliest', 'full', a datetime or offsets per TabletId")


def _microseconds(start: dt.datetime) -> int:
    if start.tzinfo is None:
        raise InvalidRequestError("start= needs a datetime with a time zone: datetime(..., tzinfo=timezone.utc)")
    return (start - _EPOCH) // dt.timedelta(microseconds=1)


class _OverLake:
    """The stream of a log table with a lake: offsets that the log no longer holds come from the lake, before the first
    pushed row as well as when retention overtakes a slow reader."""

    def __init__(
        self,
        client: TableClient,
        start: Any,
        stops: dict[TabletKey, int] | None,
        columns: list[str],
        predicate: Predicate | None,
    ) -> None:
        self._client = client
        self._stops = stops
        self._columns = columns
        self._predicate = predicate
        self._since_us = _microseconds(start) if isinstance(start, dt.datetime) else None
        self._positions = self._first_positions(start)
        self._stopped = False
        self._pushed = self._open()
        own = pa.schema([*client.desc.schema, *SYSTEM_FIELDS])
        self.schema = pa.schema([own.field(c) for c in columns])

    def _first_positions(self, start: Any) -> dict[TabletKey, int]:
        if start == "latest":
            return {t.key: t.high_watermark for t in self._client.tablets()}
        if start in ("earliest", "full"):
            return {t.key: 0 for t in self._client.tablets()}
        if self._since_us is not None:
            return {t.key: t.at_timestamp or 0 for t in self._client.tablets(at_timestamp_us=self._since_us)}
        _, starts = _starts(self._client, start)
        return {t.key: starts.get(t.key, 0) for t in self._client.tablets()} | starts

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        while not self._stopped:
            pushed = self._pushed = self._pushed or self._open()
            if pushed is None:
                behind = self._behind(self._log_starts())
                for key in behind:
                    yield from self._from_lake(key)
                self._require_caught_up(behind)
                continue
            try:
                if self._stopped:
                    pushed.close()
                for header, batch in pushed:
                    if header.end_offset is not None:
                        self._positions[TabletKey(header.partition, header.bucket)] = header.end_offset
                    yield header, batch
                return
            except OffsetOutOfRangeError:
                # Trimmed faster than it was read: the lake has it.
                self._pushed = None
                if not self._behind(self._log_starts()):
                    raise

    def _log_starts(self) -> dict[TabletKey, int]:
        return {t.key: t.log_start for t in self._client.tablets()}

    def _behind(self, log_starts: Mapping[TabletKey, int]) -> dict[TabletKey, int]:
        """Positions that the log no longer holds and that are still wanted."""
        return {k: p for k, p in self._positions.items() if p < min(log_starts.get(k, 0), self._stop(k))}

    def _stop(self, key: TabletKey) -> int:
        return (1 << 62) if self._stops is None else self._stops.get(key, 0)

    def _from_lake(self, key: TabletKey) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        view = LakeView.current(self._client.desc, self._client.lake())
        end = min(view.offsets.get(key, 0), self._stop(key))
        start = self._positions[key]
        for batch in read_history(view, key, start, end, columns=self._columns, predicate=self._predicate):
            if self._stopped:
                return
            if self._since_us is not None:
                since = pa.scalar(self._since_us, TIMESTAMP_TYPE)
                batch = batch.filter(pc.greater_equal(batch.column(TIMESTAMP_COLUMN), since))
            if batch.num_rows:
                self._positions[key] = batch.column(OFFSET_COLUMN)[-1].as_py() + 1
                header = StreamHeader(partition=key.partition, bucket=key.bucket, end_offset=self._positions[key])
                yield header, batch
        self._positions[key] = max(start, end)

    def _require_caught_up(self, before: Mapping[TabletKey, int]) -> None:
        for key, position in self._behind(self._log_starts()).items():
            if position <= before.get(key, -1):
                raise LakeStateError(
                    f"offsets of {self._client.desc.path} tablet {key} from {position} on are neither in the log nor in"
                    " the lake: restore one of them",
                    table=str(self._client.desc.path),
                )

    def _open(self) -> Stream | None:
        """Follow the log; None when it does not hold all that is wanted."""
        starts = self._log_starts()
        if self._behind(starts):
            return None
        # Only what is not wanted any more may begin later: what is, and was trimmed just now, the server refuses.
        positions = {k: p if p < self._stop(k) else max(p, starts.get(k, 0)) for k, p in self._positions.items()}
        stops = self._stops
        if stops is not None:
            stops = {k: max(s, starts.get(k, 0)) for k, s in stops.items()}
        try:
            return self._client.subscribe(
                starts=positions, default="earliest", stops=stops, columns=self._columns, predicate=self._predicate
            )
        except OffsetOutOfRangeError:
            if self._behind(self._log_starts()):
                return None
            raise

    def close(self) -> None:
        """End the iteration."""
        self._stopped = True
        if self._pushed is not None:
            self._pushed.close()


def _stops(client: TableClient, stop: Any) -> dict[TabletKey, int] | None:
    if stop is None:
        return None
    if stop == "now":
        return {t.key: t.high_watermark for t in client.tablets()}
    if isinstance(stop, Mapping):
        return _by_key(client.desc, stop, "stop")
    raise InvalidRequestError(f"stop={stop!r}: use None, 'now' or offsets per TabletId")


def _by_key(desc: TableDescriptor, offsets: Mapping[Any, Any], name: str) -> dict[TabletKey, int]:
    try:
        return {desc.tablet_key(tablet): int(offset) for tablet, offset in offsets.items()}
    except (AttributeError, TypeError, ValueError) as e:
        raise InvalidRequestError(f"{name}= must map TabletId(partition, bucket) to offsets: {e}") from e
