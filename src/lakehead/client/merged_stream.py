"""Streams of several servers as one: batches in the order in which they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa

from lakehead.env.threads import Threads
from lakehead.protocol.messages import Stream, StreamHeader

_AHEAD_BATCHES = 2


class MergedStream:
    """A `Stream` that ends when all have ended, or with the first error. A few batches are read ahead of its reader."""

    def __init__(self, streams: Sequence[Stream], threads: Threads) -> None:
        self.schema: pa.Schema = streams[0].schema
        self._streams = streams
        self._threads = threads
        self._lock = threads.lock()
        self._changed = threads.condition()
        self._items: deque[tuple[StreamHeader, pa.RecordBatch]] = deque()
        self._left = len(streams)
        self._error: BaseException | None = None
        self._closed = False

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        for stream in self._streams:
            self._threads.start(partial(self._pull, stream), "lakehead-merge")
        while True:
            self._changed.wait_for(lambda: bool(self._items or self._closed or not self._left))
            if self._closed:
                return
            if self._items:
                yield self._items.popleft()
                self._changed.notify_all()
                continue
            if self._error is not None:
                raise self._error
            return

    def _pull(self, stream: Stream) -> None:
        try:
            for item in stream:
                self._changed.wait_for(lambda: len(self._items) < _AHEAD_BATCHES or self._closed)
                if self._closed:
                    return
                self._items.append(item)
                self._changed.notify_all()
        except BaseException as e:
            self._error = self._error or e
            # The others end, too: who reads opens all of them again.
            for other in self._streams:
                other.close()
        finally:
            with self._lock:
                self._left -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all of them, and the iteration."""
        self._closed = True
        for stream in self._streams:
            stream.close()
        self._changed.notify_all()
