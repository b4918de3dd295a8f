"""The transport's own limits, for benchmarks: Flight servers that throw away what is put, and hand the same to all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl


class _Bare(fl.FlightServerBase):
    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._batches = batches

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        for _ in reader:
            continue

    def do_get(self, context: Any, ticket: Any) -> fl.FlightDataStream:
        return fl.RecordBatchStream(pa.RecordBatchReader.from_batches(self._batches[0].schema, self._batches))


@contextmanager
def bare_flight(batches: Sequence[pa.RecordBatch]) -> Iterator[BareFlight]:
    """A server on loopback that ignores what is put, and has these batches for who gets."""
    server = _Bare(batches)
    threading.Thread(target=server.serve, daemon=True).start()
    with fl.connect(f"grpc://127.0.0.1:{server.port}") as client:
        yield BareFlight(client, batches)
    server.shutdown()


class BareFlight:
    """Moves batches one after the other in one stream."""

    def __init__(self, client: fl.FlightClient, batches: Sequence[pa.RecordBatch]) -> None:
        self._client = client
        self._batches = batches

    def put(self) -> None:
        """To the server."""
        writer, _ = self._client.do_put(fl.FlightDescriptor.for_path("sink"), self._batches[0].schema)
        for batch in self._batches:
            writer.write_batch(batch)
        writer.close()

    def get(self) -> pa.Table:
        """From the server."""
        return self._client.do_get(fl.Ticket(b"all")).read_all()


class FanoutServer(fl.FlightServerBase):
    """Sends the same batches to all streams, as many as each asks for."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._schema = schema
        self._items: list[tuple[pa.RecordBatch, pa.Buffer]] = []
        self._waiting: list[threading.Lock] = []
        self._lock = threading.Lock()

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        return fl.GeneratorStream(self._schema, self._stream(int(ticket.ticket)))

    def _stream(self, batches: int) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
        for at in range(batches):
            while at >= len(self._items):
                woken = threading.Lock()
                woken.acquire()
                with self._lock:
                    self._waiting.append(woken)
                if at >= len(self._items):
                    woken.acquire()
            yield self._items[at]

    def send(self, batch: pa.RecordBatch) -> None:
        """Have all streams send a batch, with about as much metadata as Lakehead's."""
        self._items.append((batch, pa.py_buffer(bytes(50))))
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for woken in waiting:
            woken.release()


def read_fanout(port: int, readers: int, batches: int) -> list[Iterator[pa.RecordBatch]]:
    """So many streams of a `FanoutServer`, on one connection."""
    client = fl.connect(f"grpc://127.0.0.1:{port}")

    def received(stream: Any) -> Iterator[pa.RecordBatch]:
        while True:
            yield stream.read_chunk().data

    return [received(client.do_get(fl.Ticket(str(batches).encode()))) for _ in range(readers)]
