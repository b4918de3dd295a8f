"""What the processes of `lakehead.benchmarks.fanout` run: subscribers, and the bare Flight streams beside them.

A row holds when it was sent, by the clock that all processes of a machine share. A process says "ready", and when it
has all rows, how many milliseconds each took, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

import lakehead as lh
from lakehead.server.flight_limit import FanoutServer, read_fanout

SCHEMA = pa.schema([("sent_ns", pa.int64())])
# What a subscriber is sent of such a row.
_SENT = pa.schema([*SCHEMA, ("__bucket", pa.int32()), ("__offset", pa.int64()), ("__timestamp", pa.timestamp("us"))])
PAUSE_SECONDS = 0.02


def subscribers(uri: str, readers: int, rows: int) -> None:
    """So many subscriptions of one connection."""
    with lh.connect(uri) as con:

        def open_one() -> Iterator[pa.RecordBatch]:
            return (batch.rows for batch in con.table("bench.fanout").subscribe("latest"))

        _listen([open_one() for _ in range(readers)], rows)


def bare_readers(port: int, readers: int, rows: int) -> None:
    """So many ``DoGet`` streams of one connection."""
    _listen(read_fanout(port, readers, rows), rows)


def _listen(feeds: Sequence[Iterator[pa.RecordBatch]], rows: int) -> None:
    taken: list[float] = []

    def listen(feed: Iterator[pa.RecordBatch]) -> None:
        mine: list[float] = []
        while len(mine) < rows:
            batch = next(feed)
            now = time.perf_counter_ns()
            mine += [(now - sent) / 1e6 for sent in batch.column(0).to_pylist()]
        taken.extend(mine)

    threads = [threading.Thread(target=listen, args=(feed,), daemon=True) for feed in feeds]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()
    print(json.dumps(taken), flush=True)
    # Nothing is closed: what is measured is over.
    os._exit(0)


def bare_server(rows: int) -> None:
    """Prints its port, and sends a row each `PAUSE_SECONDS` once it reads a line."""
    server = FanoutServer(_SENT)
    print(server.port, flush=True)
    sys.stdin.readline()
    pause = threading.Event()
    for row in range(rows):
        numbers = [time.perf_counter_ns(), 0, row, 0]
        columns = [pa.array(np.array([n], f.type.to_pandas_dtype())) for n, f in zip(numbers, _SENT, strict=True)]
        server.send(pa.RecordBatch.from_arrays(columns, schema=_SENT))
        pause.wait(PAUSE_SECONDS)
    sys.stdin.readline()
    os._exit(0)


PARTS: dict[str, Callable[..., None]] = {
    "subscribers": subscribers,
    "bare_readers": bare_readers,
    "bare_server": bare_server,
}

if __name__ == "__main__":
    part, *given = sys.argv[1:]
    PARTS[part](*(int(value) if value.isdecimal() else value for value in given))
