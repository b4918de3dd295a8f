"""The transport's own limit, for benchmarks: a Flight server that throws away what is put."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
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
