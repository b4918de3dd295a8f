"""The transport's own limits, for benchmarks: Flight servers that throw away what is put, and hand the same to all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl


class _Sink(fl.FlightServerBase):
    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        for _ in reader:
            continue


def noop_put_seconds(batches: Sequence[pa.RecordBatch]) -> float:
    """Seconds to put the batches, one after the other in one stream, to a server on loopback that ignores them."""
    server = _Sink("grpc://127.0.0.1:0")
    threading.Thread(target=server.serve, daemon=True).start()
    with fl.connect(f"grpc://127.0.0.1:{server.port}") as client:
        start = time.perf_counter()
        writer, _ = client.do_put(fl.FlightDescriptor.for_path("sink"), batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.close()
        seconds = time.perf_counter() - start
    server.shutdown()
    return seconds


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
