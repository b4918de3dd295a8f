"""A connection's own door to a server: closing it ends this connection's calls and streams, and nobody else's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from lakehead.env.forks import keep
from lakehead.errors import ClosedError, LakeheadError
from lakehead.protocol.messages import Endpoint, R, Request, Stream, StreamHeader


class Ending(Protocol):
    """What lives no longer than its connection. `close` waits for nothing, and may come again."""

    def close(self) -> None: ...


class ClosableEndpoint:
    """An `Endpoint` in front of another one, which connections of one process may share. Thread-safe."""

    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner
        self._ending: weakref.WeakSet[Ending] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.closed = self._forgotten = False
        self._reason = "the connection is closed: connect again"

    def call(self, request: Request[R], attachments: Sequence[pa.Buffer] = ()) -> tuple[R, list[pa.Buffer]]:
        self.require_open()
        return self._inner.call(request, attachments)

    def stream(self, request: Request[Stream]) -> ClosableStream:
        self.require_open()
        stream = ClosableStream(self, self._inner.stream(request))
        self.ends(stream)
        return stream

    def ends(self, what: Ending) -> None:
        """Close it when this is closed, or now; it is not kept alive."""
        with self._lock:
            self._ending.add(what)
        if self.closed:
            what.close()

    def require_open(self) -> None:
        """Raises: ClosedError."""
        if self.closed:
            raise ClosedError(self._reason)

    def close(self) -> None:
        """Refuse further calls and end all streams and writers with `ClosedError`; what stands behind stays open."""
        self.closed = True
        with self._lock:
            ending = list(self._ending)
        for what in ending:
            what.close()

    def forget(self) -> None:
        """In a forked child: refuse everything, touch nothing that the parent uses."""
        self._forgotten = True
        keep(*self._ending)
        self._reason = (
            "this connection was opened before the process was forked: start children by multiprocessing's 'spawn', and"
            " connect there"
        )
        self.closed = True


class ClosableStream:
    """A stream of one connection; see `lakehead.protocol.messages.Stream`."""

    def __init__(self, endpoint: ClosableEndpoint, inner: Stream) -> None:
        self._endpoint = endpoint
        self._inner = inner
        self.schema: pa.Schema = inner.schema

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        self._endpoint.require_open()
        try:
            for item in self._inner:
                yield item
                self._endpoint.require_open()
        except LakeheadError:
            self._endpoint.require_open()
            raise
        self._endpoint.require_open()

    def close(self) -> None:
        if not self._endpoint._forgotten:
            self._inner.close()
