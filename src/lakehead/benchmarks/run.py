"""`lakehead bench`: the published figures, each beside the limit of the part below it, from one run.

Rows are events of eight columns, about 69 bytes of Arrow each, in batches of 10,000. Timings of a shared machine are
noisy: compare figures of one run.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import lakehead as lh
from lakehead.benchmarks.child import child
from lakehead.benchmarks.durability import concurrent_writers, restart
from lakehead.benchmarks.events import BATCH_ROWS, Figure, event_batches, rate, seconds
from lakehead.benchmarks.fanout import fanout
from lakehead.benchmarks.growth import growth
from lakehead.benchmarks.results import Results, check_place, moved, moved_lines, this_machine
from lakehead.benchmarks.smallwrites import small_writes
from lakehead.benchmarks.spark import on_spark
from lakehead.benchmarks.tiering import tiering
from lakehead.benchmarks.tiering_service import Sizes
from lakehead.benchmarks.tiering_spark import tiering_on_spark
from lakehead.server.flight_limit import bare_flight

PARTS = (
    "embedded",
    "loopback",
    "smallwrites",
    "push",
    "fanout",
    "lake",
    "writers",
    "restart",
    "tiering",
    "growth",
)
ASKED_PARTS = ("spark", "tiering-spark")
"""Those that are measured when they are named alone."""
Part = Callable[[str, Sequence[pa.RecordBatch]], Iterator[Figure]]
"""Measures with these events, in this folder."""
_PUSH_SECONDS = 30
_READS = 5


def run_bench(
    *,
    rows: int = 1_000_000,
    output: str = "text",
    folder: str | None = None,
    only: Sequence[str] = (),
    sizes: Sizes | None = None,
    save: str | None = None,
    compare: str | None = None,
    more: Mapping[str, Part] | None = None,
    asked: Mapping[str, Part] | None = None,
) -> int:
    """Measure all `PARTS` and ``more``, or ``only`` some of these, of `ASKED_PARTS` and ``asked``, in a temporary
    folder inside ``folder`` (default: the current one) and print it.

    Args:
        sizes: of the part ``tiering``.
        save: a file to write the results to.
        compare: a file of results; tell which ratios moved since.
        more: further parts, by their names.
        asked: parts that are measured when they are named alone.

    Raises:
        InvalidRequestError: there are no rows or no such part, ``compare`` names no results, or ``save`` or ``folder``
            a place that cannot be written to. Nothing was measured.
        StorageError: the disk refused.
        UnavailableError: a process of a measurement ended, or did not answer.
    """
    further = dict(more or {})
    parts: dict[str, Part] = {
        "embedded": _embedded,
        "loopback": _loopback,
        "smallwrites": partial(small_writes, _server),
        "push": _push,
        "fanout": _fanout,
        "lake": _lake,
        "writers": concurrent_writers,
        "restart": restart,
        "tiering": partial(tiering, _server, sizes or Sizes()),
        "growth": partial(growth, _server_process),
        "spark": on_spark,
        "tiering-spark": tiering_on_spark,
        **further,
        **(asked or {}),
    }
    if unknown := [p for p in only if p not in parts]:
        raise lh.InvalidRequestError(f"there is no part {unknown[0]!r} of the benchmark: {', '.join(parts)}")
    if rows < 1:
        raise lh.InvalidRequestError(f"rows={rows}: give 1 at least")
    before = Results.read(compare) if compare else None
    if save:
        check_place(save)
    base = _temporary_folder(folder or os.getcwd())
    figures: dict[str, list[Figure]] = {}
    try:
        batches = event_batches(rows)
        for name in only or (*PARTS, *further):
            for figure in parts[name](base, batches):
                figures.setdefault(name, []).append(figure)
                if output == "text":
                    print(f"  {figure.name:<44} {figure.value:<26} {figure.beside}", flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    results = Results(rows, this_machine(), figures)
    if save:
        results.write(save)
    changes = moved(before, results) if before is not None else []
    if output == "json":
        told = {"rows": rows, "figures": [asdict(f) for part in figures.values() for f in part]}
        if before is not None:
            told["moved"] = [{"name": n, "before": then, "now": now} for n, then, now in changes]
        print(json.dumps(told, indent=2))
    elif compare and before is not None:
        print(*moved_lines(changes, compare, before=before.rows, now=rows), sep="\n")
    return 0


def _temporary_folder(where: str) -> str:
    try:
        return tempfile.mkdtemp(prefix="lakehead-bench-", dir=where)
    except OSError as e:
        raise lh.InvalidRequestError(
            f"no folder for temporary data can be made in {where} ({e.strerror}): name another one with --folder",
            path=where,
        ) from e


def _percentiles(work: Callable[[int], object], times: int = 2000) -> str:
    taken = [seconds(lambda i=i: work(i)) * 1e3 for i in range(times)]  # type: ignore[misc]
    return "{:.3f} / {:.3f} ms".format(*np.percentile(taken, [50, 99]))


def _each(call: Callable[[pa.RecordBatch], object], batches: Sequence[pa.RecordBatch]) -> Callable[[], None]:
    def work() -> None:
        for batch in batches:
            call(batch)

    return work


def _written(table: lh.Table, batches: Sequence[pa.RecordBatch]) -> None:
    with table.writer() as writer:
        for batch in batches:
            writer.append(batch)


def _engine(con: lh.Connection, batches: Sequence[pa.RecordBatch], where: str) -> Iterator[Figure]:
    schema = batches[0].schema
    rows = sum(b.num_rows for b in batches)
    with bare_flight(batches) as bare:
        noop = seconds(bare.put)
    beside = f"no-op Flight put {rate(batches, noop)}"
    for buckets, durability in itertools.product((4, 1), ("sync", "os")):
        name = f"bench.log_{where}_{durability}_{buckets}"
        log = con.create_table(name, schema, durability=durability, buckets=buckets)
        took = seconds(_each(log.append, batches))
        what = f"append, {where}, durability={durability}{', 4 buckets' if buckets > 1 else ''}"
        yield Figure(what, rate(batches, took), beside, noop / took)
        piped = con.create_table(f"{name}_piped", schema, durability=durability, buckets=buckets)
        took = seconds(partial(_written, piped, batches))
        yield Figure(what.replace("append", "append by a writer", 1), rate(batches, took), beside, noop / took)
        con.drop_table(piped.name)
    yield from _reads(log, batches, where)
    one = batches[0].slice(0, 1)  # before there are keys, whose checkpoint would be written meanwhile
    yield Figure(f"append one row, p50 / p99, {where}", _percentiles(lambda _: log.append(one), 1000))
    keyed = con.create_table(f"bench.keyed_{where}", schema, primary_key=["event_id"])
    yield Figure(f"upsert, new keys, {where}", rate(batches, seconds(_each(keyed.upsert, batches))))
    yield Figure(f"upsert, existing keys, {where}", rate(batches, seconds(_each(keyed.upsert, batches))))
    order = np.random.default_rng(2).permutation(rows)
    asked = [pa.table({"event_id": order[i : i + BATCH_ROWS]}) for i in range(0, rows, BATCH_ROWS)]
    took = seconds(lambda: [keyed.lookup(k) for k in asked])
    yield Figure(f"lookup, {asked[0].num_rows:,} keys a call, {where}", f"{rows / took / 1e6:.2f} M keys/s")
    yield Figure(f"get, one key, p50 / p99, {where}", _percentiles(lambda i: keyed.get(int(order[i % rows]))))
    text = f"select * from {keyed.name} where event_id = ?"
    by_sql = _percentiles(lambda i: con.sql(text, [int(order[i % rows])]).fetchall())
    yield Figure(f"SQL, one row by its key, p50 / p99, {where}", by_sql)
    scanned = _percentiles(lambda i: keyed.scan(where=f"event_id = {order[i % rows]}").to_arrow())
    yield Figure(f"scan, one row by its key, p50 / p99, {where}", scanned)


def _reads(log: lh.Table, batches: Sequence[pa.RecordBatch], where: str) -> Iterator[Figure]:
    """Of all that was appended: a scan, and a subscription that reads it from the beginning."""
    for what, columns in (("all columns", batches[0].schema.names), ("one column", ["price"])):
        some = [batch.select(columns) for batch in batches]

        def scan(columns: list[str] = columns) -> object:
            return log.scan(columns).to_arrow()

        def follow(columns: list[str] = columns) -> object:
            return [batch.rows for batch in log.subscribe("earliest", columns=columns, stop="now")]

        with bare_flight(some) as bare:
            # In turns, a first time to open what stays open.
            works = (scan, follow, bare.get)
            taken = [[seconds(work) for work in works] for _ in range(_READS + 1)][1:]
        scanned, followed, got = np.median(taken, axis=0).tolist()
        beside = f"bare Flight get {rate(some, got)}"
        yield Figure(f"scan the log, {what}, {where}", rate(some, scanned), beside, got / scanned)
        yield Figure(f"subscription to its history, {what}, {where}", rate(some, followed), beside, got / followed)


def warm_up(con: lh.Connection, batches: Sequence[pa.RecordBatch]) -> None:
    """Have whoever serves the connection load or compile all kernels of keyed tables, so that no figure pays for it."""
    table = con.create_table("bench.warm", batches[0].schema, primary_key=["event_id"])
    for _ in range(2):
        table.upsert(batches[0])
    table.delete([1])
    table.lookup([1, 2])
    table.get(2)
    con.drop_table(table.name)


def _embedded(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    with lh.connect(f"{base}/embedded") as con:
        warm_up(con, batches)
        yield from _engine(con, batches, "embedded")


@contextmanager
def _server_process(folder: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "lakehead.cli.main", "server", "--data", folder, "--listen", "127.0.0.1:0"]
    with child("the server", command) as process:
        line = process.line("lakehead://")
        yield "lakehead://" + line.split("lakehead://", 1)[1].split()[0], process.pid


@contextmanager
def _server(folder: str) -> Iterator[str]:
    with _server_process(folder) as (uri, _):
        yield uri


def _fanout(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    yield from fanout(_server_process, base)


def _loopback(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    with _server(f"{base}/server") as uri, lh.connect(uri) as con:
        warm_up(con, batches)
        yield from _engine(con, batches, "loopback")


def _push(base: str, batches: Sequence[pa.RecordBatch], rows: int = 500) -> Iterator[Figure]:
    """One row each 5 ms or slower from this process; the latency is append call to arrival in a subscriber."""
    schema = pa.schema([("sent_ns", pa.int64())])
    with _server(f"{base}/push") as uri, lh.connect(uri) as con, lh.connect(uri) as other:
        table = con.create_table("bench.push", schema, durability="sync")
        taken: list[float] = []
        ready, done = threading.Event(), threading.Event()

        def listen() -> None:
            subscription = other.table("bench.push").subscribe("latest")
            ready.set()
            for batch in subscription:
                now = time.perf_counter_ns()
                taken.extend((now - sent) / 1e6 for sent in batch.rows.column("sent_ns").to_pylist())
                if len(taken) >= rows:
                    done.set()
                    return

        threading.Thread(target=listen, daemon=True).start()
        if not ready.wait(_PUSH_SECONDS):
            raise lh.UnavailableError(f"no subscription within {_PUSH_SECONDS} s")
        pause = threading.Event()
        for _ in range(rows):
            table.append([{"sent_ns": time.perf_counter_ns()}])
            pause.wait(0.005)
        if not done.wait(_PUSH_SECONDS):
            raise lh.UnavailableError(f"{len(taken)} of {rows} rows were pushed within {_PUSH_SECONDS} s")
        value = "{:.3f} / {:.3f} ms".format(*np.percentile(taken, [50, 99]))
        yield Figure("push, append call → subscriber, p50 / p99", value, f"{len(taken)} single rows, synced")


def _lake(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    table = pa.Table.from_batches(batches)
    plain = f"{base}/plain.parquet"
    bare = seconds(lambda: pq.write_table(table, plain, compression="zstd"))
    with lh.connect(f"{base}/lake") as con:
        log = con.create_table("bench.tiered", table.schema, lake="iceberg")
        for batch in batches:
            log.append(batch)
        took = seconds(lambda: con.tier("bench.tiered"))
        beside = f"bare Parquet write {table.num_rows / bare / 1e6:.2f} M rows/s"
        rate = f"{table.num_rows / took / 1e6:.2f} M rows/s"
        yield Figure("tiering round, in process, log table", rate, beside, bare / took)
        keyed = con.create_table("bench.keyed", table.schema, primary_key=["event_id"], lake="iceberg")
        for batch in batches:
            keyed.upsert(batch)
        con.tier("bench.keyed")
        for batch in batches[: max(1, len(batches) // 10)]:
            keyed.upsert(batch)

        def total(scan: lh.Scan) -> Callable[[], object]:
            return lambda: pc.sum(scan.to_arrow()["price"])

        def total_of_plain() -> object:
            return pc.sum(ds.dataset(plain).to_table(columns=["price"])["price"])

        for name, t in (("log", log), ("keyed, 10 % superseded", keyed)):
            works = (total(t.scan(["price"], tier="lake")), total(t.scan(["price"])), total_of_plain)
            # In turns: what the first of them finds cold is not warm for the others alone.
            lake, union, parquet = np.min([[seconds(work) for work in works] for _ in range(_READS)], axis=0).tolist()
            beside = f"lake alone {lake * 1e3:.0f} ms, plain Parquet {parquet * 1e3:.0f} ms"
            yield Figure(f"union read, sum of one column, {name}", f"{union * 1e3:.0f} ms", beside, lake / union)
