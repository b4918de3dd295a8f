"""What is measured with, and how a measurement is told: events of eight columns, and a figure beside its limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BATCH_ROWS = 10_000
_ACTIONS = np.array(["view", "cart", "buy", "return", "share"])


@dataclass(frozen=True)
class Figure:
    """One measured figure; ``beside`` says what it is compared with, ``ratio`` is figure / limit where it has one."""

    name: str
    value: str
    beside: str = ""
    ratio: float | None = None


def event_batches(rows: int) -> list[pa.RecordBatch]:
    """Deterministic events in batches of `BATCH_ROWS`; ``event_id`` counts from 0."""
    r = np.random.default_rng(1)
    ids = np.arange(rows)
    start = np.datetime64("2026-01-01", "us")
    table = pa.table(
        {
            "event_id": ids,
            "user_id": r.integers(0, 50_000, rows),
            "item_id": r.integers(0, 9_000, rows).astype(np.int32),
            "ts": start + ids.astype("timedelta64[ms]"),
            "action": _ACTIONS[r.integers(0, 5, rows)],
            "price": np.round(r.gamma(2.0, 20.0, rows), 2),
            "qty": r.integers(1, 9, rows).astype(np.int32),
            "session": pc.utf8_lpad(pc.cast(pa.array(r.integers(0, 1 << 40, rows)), pa.string()), 16, "0"),
        }
    )
    return [b for b in table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)]


def seconds(work: Callable[[], object]) -> float:
    """What the work takes by the clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rate(batches: Sequence[pa.RecordBatch], took: float) -> str:
    """What it is to have moved these rows in so many seconds, for people."""
    rows, size = sum(b.num_rows for b in batches), sum(b.nbytes for b in batches)
    return f"{rows / took / 1e6:.2f} M rows/s {size / took / 1e6:.0f} MB/s"
