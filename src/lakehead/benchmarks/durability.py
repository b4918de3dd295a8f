"""The figures of durability in `lakehead bench`: what a synced write costs, and how long a killed server is away."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

import lakehead as lh
from lakehead.benchmarks.child import child
from lakehead.benchmarks.events import Figure

WRITERS = (1, 8, 64)
_WRITES, _EACH_MIN = 2000, 100

_LOAD = """
import sys
import lakehead as lh
from lakehead.benchmarks.events import event_batches
con = lh.connect(sys.argv[1])
batches = event_batches(int(sys.argv[2]))
table = con.create_table("bench.keyed", batches[0].schema, primary_key=["event_id"], buckets=2, durability="os")
for batch in batches:
    table.upsert(batch)
for batch in batches[: len(batches) // 10]:
    table.upsert(batch)
print("loaded", flush=True)
sys.stdin.read()
"""
_FIRST_GET = """
import sys, time
import lakehead as lh
start = time.perf_counter()
with lh.connect(sys.argv[1]) as con:
    if con.table("bench.keyed").get(int(sys.argv[2]) - 1) is None:
        sys.exit("a row that was written is not there")
    print(time.perf_counter() - start)
"""


def concurrent_writers(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """Single rows from so many threads, each waiting for its acknowledgement, into one tablet."""
    row = batches[0].slice(0, 1)
    with lh.connect(f"{base}/writers") as con:
        for writers in WRITERS:
            rates = {}
            for durability in ("sync", "os"):
                name = f"bench.writers_{writers}_{durability}"
                table = con.create_table(name, row.schema, durability=durability)
                table.append(row)
                rates[durability] = _writes_per_second(table, row, writers)
            beside = f"os {rates['os']:,.0f}/s"
            value = f"{rates['sync']:,.0f} writes/s"
            yield Figure(f"{writers} writers of one row, sync", value, beside, rates["sync"] / rates["os"])


def _writes_per_second(table: lh.Table, row: pa.RecordBatch, writers: int) -> float:
    gate = threading.Barrier(writers + 1)
    each = max(_WRITES // writers, _EACH_MIN)

    def write() -> None:
        gate.wait()
        for _ in range(each):
            table.append(row)

    with ThreadPoolExecutor(writers) as pool:
        running = [pool.submit(write) for _ in range(writers)]
        gate.wait()
        start = time.perf_counter()
        for one in running:
            one.result()
    return each * writers / (time.perf_counter() - start)


def restart(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """SIGKILL of a process that holds all rows under keys, a tenth of them updated, and the first `get` after it: with
    the checkpoints that were written meanwhile, and once more with the log that came after."""
    rows = sum(b.num_rows for b in batches)
    folder = f"{base}/restart"
    command = [sys.executable, "-c", _LOAD, folder, str(rows)]
    with child("the process that loads rows", command, stop=signal.SIGKILL) as process:
        process.line("loaded")
    size = _bytes_of(folder, ".checkpoint")
    with child("the process that asks for a row", [sys.executable, "-c", _FIRST_GET, folder, str(rows)]) as process:
        took = float(process.line())
    beside = f"checkpoints {size / 1e6:.0f} MB, log {_bytes_of(folder, '.log') / 1e6:.0f} MB"
    yield Figure(f"restart after SIGKILL, {rows:,} keys, to first get", f"{took:.2f} s", beside)


def _bytes_of(folder: str, suffix: str) -> int:
    return sum(
        os.path.getsize(os.path.join(where, name))
        for where, _, names in os.walk(folder)
        for name in names
        if name.endswith(suffix)
    )
