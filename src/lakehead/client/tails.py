"""Subscriptions of one connection to the same rows share one stream from the server, once they have come equally far.

Each begins with a stream of its own, a `Tail`, which the server checks as any other. When two tails of the same request
have come to the same positions, or one to where the other was a moment ago, the readers of one go over to the other,
and the server sends to one less. Nobody waits for anybody: who does not take what came loses its seat before its queue
grows large, and goes on where it is with a tail of its own, whose sender waits for it.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from lakehead.client.channel import BROKEN, Channel, Queued, Wait
from lakehead.client.received import streamed
from lakehead.env.interrupts import Latch
from lakehead.errors import LakeheadError
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import StreamHeader, Subscribe, TabletRange
from lakehead.types import TabletKey

_QUEUED_ITEMS_MAX, _QUEUED_BYTES_MAX = 1024, 4 << 20
_RECENT_ITEMS_MAX, _RECENT_BYTES_MAX = 64, 1 << 20
_OPEN_SECONDS = 120.0
_NOTICE_SECONDS = 1.0
_UNKNOWN = -1
_UNSEATED = object()

Positions = Mapping[TabletKey, int]


class Item(NamedTuple):
    """What came for a reader."""

    header: StreamHeader
    batch: pa.RecordBatch
    size: int


class _Recent(NamedTuple):
    """Rows that came lately, and where their tablet was before."""

    key: TabletKey
    start: int
    item: Item


class Seat:
    """A reader's place in a tail.

    Attributes:
        items: what came for it; a schema is the first of each tail that it opened.
        tail: where it sits.
    """

    tail: Tail

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Each is written by one thread at a time: what came inside the lock, what went by the reader.
        self._came = self._came_bytes = 0
        self._went = self._went_bytes = 0

    def next_item(self, seconds: float) -> Any:
        """See `lakehead.client.channel.Queued`."""
        return self.items.get(timeout=seconds)

    def offer(self, item: Item) -> None:
        """Queue it."""
        self._came += 1
        self._came_bytes += item.size
        self.items.put(item)

    def took(self, item: Item) -> None:
        """The reader has it; a sender that waited for that goes on."""
        self._went += 1
        self._went_bytes += item.size
        self.tail.wake()

    def holds(self, share: float = 1.0) -> bool:
        """Whether so much is queued of what may be; one item always may."""
        items, size = self._came - self._went, self._came_bytes - self._went_bytes
        return items > 1 and (items >= share * _QUEUED_ITEMS_MAX or size >= share * _QUEUED_BYTES_MAX)


class Tail(Wait):
    """One stream of the server and those who sit in it, who have all come equally far.

    Attributes:
        group: which tails it may be joined with: those of one connection and one request, but for where they start.
        seats: whose they are; changed inside the lock of `Tails`, as all that follows.
        positions: how far it has come, of the tablets of which that is known.
        settled: whether all that is still to come are records: live rows are for one reader alone.
        ended: whether nothing comes any more.
    """

    def __init__(self, tails: Tails, channel: Channel, request: Subscribe, seat: Seat) -> None:
        self._tails = tails
        self._request = request
        self._room: Latch | None = None
        self._recent: deque[_Recent] = deque()
        self._recent_bytes = 0
        self.group = (id(channel), encode(msgspec.structs.replace(request, starts=[], default="earliest")))
        self.seats = [seat]
        self.positions: dict[TabletKey, int] = {part.key: part.start for part in request.starts}
        self.settled = self.ended = False
        seat.tail = self
        super().__init__(channel)
        tails.add(self)
        self._start(self._receive, "lakehead-tail")

    def _receive(self) -> None:
        reader = self._channel.reader(self._request, self._began)
        self._heard(reader.schema)
        while not self.cancelled:
            chunk = reader.read_chunk()
            self._channel.heard_at = time.monotonic()
            header, rows = streamed(chunk, from_own=self._channel.is_from_own(chunk))
            self._tails.deliver(self, Item(header, rows, rows.get_total_buffer_size()))
            self._wait_for_room()

    def _put(self, item: Any) -> None:
        with self._tails.lock:
            for seat in tuple(self.seats):
                seat.items.put(item)
            if isinstance(item, BaseException):
                self.ended = True
                self._tails.remove(self)

    def cancel(self) -> None:
        super().cancel()
        self.wake()

    def wake(self) -> None:
        """Look again whether there is room."""
        room = self._room
        if room is not None:
            room.open()

    def _wait_for_room(self) -> None:
        """Return when each seat has room: alone, a reader is waited for; of several, those without room have to go."""
        while not self.cancelled:
            room = self._room = Latch()
            if not self._tails.crowded(self):
                self._room = None
                return
            room.wait(_NOTICE_SECONDS)

    # ---- inside the lock --------------------------------------------------------------------------------------

    def take(self, item: Item) -> None:
        """Hand it to all who sit here."""
        header = item.header
        key = TabletKey(header.partition, header.bucket)
        start = self.positions.get(key, _UNKNOWN)
        if header.end_offset is not None:
            self.positions[key] = header.end_offset
        live = header.live_at is not None
        self.settled = self.settled or not live
        if not live and header.end_offset is None:
            return  # the server lives
        for seat in tuple(self.seats):
            seat.offer(item)
        if not live:
            self._recent.append(_Recent(key, start, item))
            self._recent_bytes += item.size
            while len(self._recent) > _RECENT_ITEMS_MAX or self._recent_bytes > _RECENT_BYTES_MAX:
                self._recent_bytes -= self._recent.popleft().item.size

    def since(self, positions: Positions) -> list[Item] | None:
        """What came here after these positions; None when that is not known, or they are ahead."""
        if not self.positions.keys() <= positions.keys():
            return None
        behind = {}
        for key, position in positions.items():
            here = self.positions.get(key, 0)  # of tablets that were made after it was opened, it gets all
            if here != position:
                behind[key] = position
        if not behind:
            return []
        begun = {(r.key, r.start) for r in self._recent}
        if not begun.issuperset(behind.items()):
            return None
        return [r.item for r in self._recent if r.key in behind and r.start >= behind[r.key]]


class Tails:
    """All tails of one endpoint."""

    def __init__(self) -> None:
        # Reentrant, as the garbage collector may close a forgotten stream at any point of any thread.
        self.lock = threading.RLock()
        self._groups: dict[tuple[int, bytes], list[Tail]] = {}

    def add(self, tail: Tail) -> None:
        with self.lock:
            if not tail.ended:
                self._groups.setdefault(tail.group, []).append(tail)

    def remove(self, tail: Tail) -> None:
        with self.lock:
            group = self._groups.get(tail.group, [])
            if tail in group:
                group.remove(tail)
            if not group:
                self._groups.pop(tail.group, None)

    def deliver(self, tail: Tail, item: Item) -> None:
        """Hand on what came, and join tails that have come equally far."""
        with self.lock:
            tail.take(item)
            left = self._joined(tail)
        for empty in left:
            empty.cancel()

    def _joined(self, tail: Tail) -> list[Tail]:
        """The tails that nobody sits in any more."""
        left: list[Tail] = []
        for other in tuple(self._groups.get(tail.group, ())):
            if other is tail or not (other.settled and tail.settled) or tail.ended or other.ended:
                continue
            for stays, goes in ((other, tail), (tail, other)):
                missed = stays.since(goes.positions)
                if missed is None or any(seat.holds(0.5) for seat in goes.seats):
                    continue
                self._move(goes, stays, missed)
                left.append(goes)
                break
            if tail in left:
                break
        return left

    def _move(self, goes: Tail, stays: Tail, missed: Sequence[Item]) -> None:
        self.remove(goes)
        seats, goes.seats = goes.seats, []
        for seat in seats:
            seat.tail = stays
            for item in missed:
                seat.offer(item)
        stays.seats += seats
        stays.wake()

    def crowded(self, tail: Tail) -> bool:
        """Whether the one reader of a tail has no room; of several, those without lose their seats."""
        with self.lock:
            full = [seat for seat in tail.seats if seat.holds()]
            for seat in full[: len(tail.seats) - 1]:
                tail.seats.remove(seat)
                seat.items.put(_UNSEATED)
            return len(tail.seats) == 1 and tail.seats[0].holds()

    def leave(self, seat: Seat) -> None:
        """Give the seat up."""
        with self.lock:
            tail = seat.tail
            if seat in tail.seats:
                tail.seats.remove(seat)
            empty = not tail.seats
            if empty:
                self.remove(tail)
        if empty:
            tail.cancel()
        else:
            tail.wake()
        seat.items.put(StopIteration())


class _Endpoint(Protocol):
    """What a stream asks its `FlightEndpoint`."""

    def next_of(self, channel: Channel, wait: Queued, seconds: float | None) -> Any: ...

    def failure(self, e: BaseException, channel: Channel) -> LakeheadError: ...


def may_share(request: Subscribe) -> bool:
    """Whether what the request asks for depends on nothing but its positions: then others may get the same."""
    return request.stops is None and request.default != "latest"


class SharedStream:
    """A subscription, see `lakehead.protocol.messages.Stream`."""

    def __init__(self, endpoint: _Endpoint, tails: Tails, channel: Channel, request: Subscribe) -> None:
        """Open it.

        Raises:
            LakeheadError: the server refused, or does not answer.
        """
        self._endpoint = endpoint
        self._tails = tails
        self._channel = channel
        self._request = request
        self._positions = {part.key: part.start for part in request.starts}
        self._closed = False
        self._seat = Seat()
        self.schema = self._open(request)

    def _open(self, request: Subscribe) -> pa.Schema:
        Tail(self._tails, self._channel, request, self._seat)
        try:
            return self._endpoint.next_of(self._channel, self._seat, _OPEN_SECONDS)
        except BaseException as e:
            self._tails.leave(self._seat)
            if isinstance(e, BROKEN):
                raise self._endpoint.failure(e, self._channel) from e
            raise

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        while True:
            try:
                item = self._endpoint.next_of(self._channel, self._seat, None)
            except BROKEN as e:
                if self._closed or (isinstance(e, StopIteration) and not self._seat.tail.cancelled):
                    return
                raise self._endpoint.failure(e, self._channel) from e
            if item is _UNSEATED:
                self._open(self._rest())
                continue
            self._seat.took(item)
            header = item.header
            if header.end_offset is not None:
                self._positions[TabletKey(header.partition, header.bucket)] = header.end_offset
            yield header, item.batch

    def _rest(self) -> Subscribe:
        starts = [
            TabletRange(partition=k.partition, bucket=k.bucket, start=o, end=o) for k, o in self._positions.items()
        ]
        return msgspec.structs.replace(self._request, starts=starts, default="earliest")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tails.leave(self._seat)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        # Nobody refers to this but its reader; what is made of it before it was interrupted has nothing to close.
        if getattr(self, "_seat", None) is not None and hasattr(self._seat, "tail"):
            self.close()
