"""The figures of `lakehead bench` about small writes: what one costs, and what it costs to read what came in many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

import lakehead as lh
from lakehead.benchmarks.events import Figure, seconds

_ROWS = 10
_CALLS = 30_000
_SYNCED_CALLS = 2000
_QUESTIONS = 9
_AGGREGATE = "select user_id % 10 as g, sum(price), count(*) from small group by g"


def small_writes(
    server: Callable[[str], contextlib.AbstractContextManager[str]], base: str, batches: Sequence[pa.RecordBatch]
) -> Iterator[Figure]:
    """Batches of ten rows, a call each, and questions about them; ``server`` serves a folder."""
    small = [b.slice(i, _ROWS) for b in batches for i in range(0, b.num_rows, _ROWS)][:_CALLS]
    with lh.connect(f"{base}/small") as con:
        yield from _of(con, small, "embedded")
        yield from _counts(con, batches)
    with server(f"{base}/small-server") as uri, lh.connect(uri) as con:
        yield from _of(con, small, "loopback")


def _of(con: lh.Connection, small: Sequence[pa.RecordBatch], where: str) -> Iterator[Figure]:
    for durability, calls in (("os", len(small)), ("sync", _SYNCED_CALLS)):
        table = con.create_table("small" if durability == "os" else "synced", small[0].schema, durability=durability)
        taken = [seconds(partial(table.append, b)) * 1e3 for b in small[:calls]]
        value = f"{np.mean(taken):.3f} / {np.percentile(taken, 50):.3f} / {np.percentile(taken, 99):.3f} ms"
        name = f"append {small[0].num_rows} rows, mean / p50 / p99, {where}, {durability}"
        yield Figure(name, value, f"{len(taken):,} calls")
    table, rows = con.table("small"), sum(b.num_rows for b in small)
    large = con.create_table("large", small[0].schema)
    large.append(table.scan(["event_id", "user_id", "item_id", "ts", "action", "price", "qty", "session"]).to_arrow())
    what = f"{rows:,} rows of {len(small):,} batches"
    questions: tuple[tuple[str, Callable[[lh.Table], object]], ...] = (
        ("SQL aggregate", lambda t: con.sql(_AGGREGATE.replace("small", t.name)).fetchall()),
        ("scan, all columns", lambda t: t.scan().to_arrow()),
        ("subscription of all", lambda t: [b.rows.num_rows for b in t.subscribe("earliest", stop="now")]),
    )
    for name, ask in questions:
        here, beside = _median(ask, table), _median(ask, large)
        yield Figure(f"{name}, {what}, {where}", f"{here:.1f} ms", f"of few batches {beside:.1f} ms", beside / here)


def _counts(con: lh.Connection, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    for name, key in (("log", None), ("keyed", ["event_id"])):
        for lake in (None, "iceberg"):
            of = f"counted_{name}_{lake or 'hot'}"
            table = con.create_table(of, batches[0].schema, primary_key=key, lake=lake)
            write = table.upsert if key else table.append
            for batch in batches:
                write(batch)
            if lake:
                con.tier(of)
                write(batches[0])
            took, beside = (
                _median(lambda q: con.sql(q).fetchall(), q) for q in (f"select count(*) from {of}", "select 1")
            )
            yield Figure(
                f"SQL count(*), {name} table, {lake or 'no lake'}", f"{took:.1f} ms", f"select 1 {beside:.1f} ms"
            )


def _median(work: Callable[[Any], object], about: object) -> float:
    """Milliseconds."""
    return float(np.median([seconds(partial(work, about)) for _ in range(_QUESTIONS)])) * 1e3
