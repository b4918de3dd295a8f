"""The figures of `lakehead bench` about Spark: union reads, streams, writes and lookups, beside plain Parquet files."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import lakehead as lh
import lakehead.spark as lhs
from lakehead.benchmarks.events import Figure, rate, seconds

# `lakehead.spark` alone imports PySpark.
DataFrame: TypeAlias = Any
SparkSession: TypeAlias = Any

_FILES = 4
_WIDE_COLUMNS = 20
_EVERY_SECONDS = 0.02
_APART_SECONDS = 0.5
_PATIENCE_SECONDS = 120.0


def on_spark(base: str, batches: Sequence[pa.RecordBatch], sent: int = 400, times: int = 3) -> Iterator[Figure]:
    """What Spark on ``local[2]`` does with a log table of which the log has a tenth, and a keyed one of which the log
    supersedes a hundredth.

    Args:
        sent: rows whose way through a streaming query is measured.
        times: of these reads and streams of the same, the quickest counts.
    """
    plain = _plain_files(f"{base}/plain", batches)
    wide = [_widened(batch) for batch in batches]
    plain_wide = _plain_files(f"{base}/plain-wide", wide)
    with lh.connect(f"{base}/on-spark") as con:
        _fill(con, batches)
        _fill_log(con, "bench.wide", wide)
        began = time.perf_counter()
        spark = lhs.session(con, app_name="lakehead bench", **{"spark.log.level": "ERROR"})
        try:
            ready = time.perf_counter() - began
            lhs.table(spark, "bench.log").count()
            first = time.perf_counter() - began
            yield Figure("first answer of a new session", f"{first:.1f} s", f"the session alone {ready:.1f} s")
            yield from _reads(spark, plain, sum(b.num_rows for b in batches), times)
            yield from _reads_of_two(spark, plain_wide, times)
            yield from _moves(spark, con, plain, batches, times)
            yield from _latency(spark, con, base, sent)
            yield from _chained(spark, con, base, max(5, sent // 20))
        finally:
            spark.stop()


def _plain_files(folder: str, batches: Sequence[pa.RecordBatch]) -> str:
    Path(folder).mkdir()
    table = pa.Table.from_batches(batches)
    step = -(-table.num_rows // _FILES)
    for at in range(0, table.num_rows, step):
        pq.write_table(table.slice(at, step), f"{folder}/{at}.parquet", compression="zstd")
    return folder


def _widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with as many columns as a wide table has, which repeat."""
    columns = [batch.column(n % batch.num_columns) for n in range(_WIDE_COLUMNS)]
    return pa.record_batch(columns, names=[f"c{n}" for n in range(_WIDE_COLUMNS)])


def _fill_log(con: lh.Connection, name: str, batches: Sequence[pa.RecordBatch]) -> None:
    log = con.create_table(name, batches[0].schema, buckets=2, lake="iceberg")
    tiered = len(batches) - len(batches) // 10
    for batch in batches[:tiered]:
        log.append(batch)
    con.tier(log.name)
    for batch in batches[tiered:]:
        log.append(batch)


def _fill(con: lh.Connection, batches: Sequence[pa.RecordBatch]) -> None:
    schema = batches[0].schema
    _fill_log(con, "bench.log", batches)
    keyed = con.create_table("bench.keyed", schema, primary_key=["event_id"], buckets=2, lake="iceberg")
    for batch in batches:
        keyed.upsert(batch)
    con.tier(keyed.name)
    for batch in batches:
        keyed.upsert(batch.slice(0, max(1, batch.num_rows // 100)))


def _run(rows: DataFrame) -> None:
    """Have Spark compute all rows, for nobody."""
    rows.write.format("noop").mode("overwrite").save()


def _reads(spark: SparkSession, plain: str, rows: int, times: int) -> Iterator[Figure]:
    at = rows // 2
    questions: dict[str, Callable[[DataFrame], object]] = {
        "all columns": _run,
        "sum of one column by another": lambda t: t.groupBy("action").sum("price").collect(),
        "1 % by a filter": lambda t: _run(t.where(f"event_id >= {at} and event_id < {at + max(1, rows // 100)}")),
        "one row by its key": lambda t: t.where(f"event_id = {at}").collect(),
    }
    tables: list[Callable[[], DataFrame]] = [
        lambda: lhs.table(spark, "bench.log"),
        lambda: lhs.table(spark, "bench.keyed"),
        lambda: spark.read.parquet(plain),
    ]

    def asked(ask: Callable[[DataFrame], object], table: Callable[[], DataFrame]) -> float:
        return seconds(lambda: ask(table()))

    for name, ask in questions.items():
        # In turns, and Spark's own work for a statement is in all of them.
        log, keyed, files = np.min([[asked(ask, t) for t in tables] for _ in range(times)], axis=0).tolist()
        beside = f"plain Parquet {files * 1e3:.0f} ms"
        yield Figure(f"read {name}, log table, a tenth hot", f"{log * 1e3:.0f} ms", beside, files / log)
        yield Figure(f"read {name}, keyed, 1 % superseded", f"{keyed * 1e3:.0f} ms", beside, files / keyed)
    # A statement is known whole before anything is read, so that the key index answers.
    key = f"event_id = {at}"
    turns = [
        (
            seconds(lambda: lhs.sql(spark, f"select * from bench.keyed where {key}").collect()),
            seconds(lambda: spark.read.parquet(plain).where(key).collect()),
        )
        for _ in range(times)
    ]
    took, files = np.min(turns, axis=0).tolist()
    value, beside = f"{took * 1e3:.0f} ms", f"plain Parquet {files * 1e3:.0f} ms"
    yield Figure("read one row by its key, keyed, by lhs.sql", value, beside, files / took)


def _reads_of_two(spark: SparkSession, plain: str, times: int) -> Iterator[Figure]:
    def asked(table: DataFrame) -> float:
        return seconds(lambda: _run(table.select("c1", "c5")))

    turns = [(asked(lhs.table(spark, "bench.wide")), asked(spark.read.parquet(plain))) for _ in range(times)]
    took, files = np.min(turns, axis=0).tolist()
    name = f"read 2 of {_WIDE_COLUMNS} columns, log table, a tenth hot"
    yield Figure(name, f"{took * 1e3:.0f} ms", f"plain Parquet {files * 1e3:.0f} ms", files / took)


def _moves(
    spark: SparkSession, con: lh.Connection, plain: str, batches: Sequence[pa.RecordBatch], times: int
) -> Iterator[Figure]:
    files = spark.read.parquet(plain)
    schema, name = batches[0].schema, batches[0].schema.names[0]

    def write(rows: DataFrame, table: str, key: list[str] | None = None) -> None:
        con.create_table(table, schema, primary_key=key, buckets=2)
        rows.write.format("lakehead").options(uri=con.uri, table=table).mode("append").save()

    write(files.limit(1), "bench.warm")  # Python processes begin
    written = seconds(lambda: files.write.parquet(f"{plain}-written"))
    for kind, key in (("log table", None), ("keyed", [name])):
        took = seconds(lambda kind=kind, key=key: write(files, f"bench.{kind[:3]}_of_spark", key))  # type: ignore[misc]
        yield Figure(f"df.write, {kind}", rate(batches, took), f"as Parquet {rate(batches, written)}", written / took)

    from_table = spark.readStream.format("lakehead").options(uri=con.uri, table="bench.log", start="earliest")
    from_files = spark.readStream.schema(files.schema)
    drains = [
        (_drain(from_table.load(), f"{plain}-{n}-table"), _drain(from_files.parquet(plain), f"{plain}-{n}-files"))
        for n in range(times)
    ]
    took, beside = np.min(drains, axis=0).tolist()
    value, of_files = rate(batches, took), f"of plain Parquet {rate(batches, beside)}"
    yield Figure("stream of all there is, log table", value, of_files, beside / took)

    # Its own join of the same, with every key asked for.
    asked, other = files.select("event_id", "user_id"), spark.read.parquet(plain).select("event_id", "price")
    joined = seconds(lambda: _run(asked.join(other, "event_id", "left")))
    took = seconds(lambda: _run(lhs.lookup_join(asked, "bench.keyed", on="event_id", columns=["price"])))
    rows = sum(b.num_rows for b in batches)
    spark_does = f"Spark's join with Parquet {rows / joined / 1e6:.2f} M rows/s"
    yield Figure("lookup join", f"{rows / took / 1e6:.2f} M rows/s", spark_does, joined / took)


def _drain(stream: DataFrame, checkpoint: str) -> float:
    """Seconds until a stream has read what there is."""
    began = time.perf_counter()
    query = stream.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query.start().awaitTermination()
    return time.perf_counter() - began


def _latency(spark: SparkSession, con: lh.Connection, base: str, sent: int) -> Iterator[Figure]:
    """One row each 20 ms through a query from one table to another; from the append to a subscriber of the other."""
    schema = pa.schema([("sent_ns", pa.int64())])
    source, target = con.create_table("bench.source", schema), con.create_table("bench.target", schema)
    taken: list[float] = []
    ready, done = threading.Event(), threading.Event()

    def listen() -> None:
        with target.subscribe("latest") as subscription:
            ready.set()
            for batch in subscription:
                now = time.perf_counter_ns()
                taken.extend((now - at) / 1e6 for at in batch.rows.column("sent_ns").to_pylist())
                if len(taken) >= 2 * sent:
                    break
        done.set()

    threading.Thread(target=listen, daemon=True).start()
    _wait(ready, "no subscription")
    options: dict[str, Any] = {"uri": con.uri, "table": source.name, "start": "earliest"}
    stream = spark.readStream.format("lakehead").options(**options).load()
    sink = {"uri": con.uri, "table": target.name, "checkpointLocation": f"{base}/latency"}
    query = stream.writeStream.format("lakehead").options(**sink).start()
    try:
        pause = threading.Event()
        for _ in range(2 * sent):  # the first half warms Spark up
            source.append([{"sent_ns": time.perf_counter_ns()}])
            pause.wait(_EVERY_SECONDS)
        _wait(done, f"{len(taken)} of {2 * sent} rows came through the query")
        query.processAllAvailable()
    finally:
        query.stop()
    value = "{:.0f} / {:.0f} ms".format(*np.percentile(taken[-sent:], [50, 99]))
    yield Figure("through a streaming query, append → subscriber, p50 / p99", value, f"{sent} single rows, synced")


def _chained(spark: SparkSession, con: lh.Connection, base: str, sent: int) -> Iterator[Figure]:
    """A few rows each half a second through three queries, each of which reads the table that the one before it writes;
    how long their micro-batches take by Spark's own account, beside those of as many queries of Spark alone."""
    schema = pa.schema([("n", pa.int64())])
    tables = [con.create_table(f"bench.layer{n}", schema) for n in range(4)]
    pause = threading.Event()

    def begin(stream: DataFrame, name: str, sink: str, **options: Any) -> Any:
        writer = stream.writeStream.format(sink).option("checkpointLocation", f"{base}/{name}").options(**options)
        return writer.start()

    def taken(query: Any) -> list[float]:
        return [p.durationMs["triggerExecution"] for p in query.recentProgress if p.numInputRows]

    def medians(queries: Sequence[Any]) -> list[float]:
        """Of each query's micro-batches that had rows, but for the first third, which warms Spark up."""
        return [float(np.median(all_of[len(all_of) // 3 :])) for all_of in map(taken, queries)]

    def stop(queries: Sequence[Any]) -> None:
        for query in queries:
            query.stop()

    of_spark = spark.readStream.format("rate").option("rowsPerSecond", 5)
    queries: list[Any] = []
    try:
        for n in range(3):
            queries.append(begin(of_spark.load(), f"rate{n}", "noop"))
        until = time.monotonic() + _PATIENCE_SECONDS
        while any(len(taken(query)) < sent for query in queries) and time.monotonic() < until:
            pause.wait(_APART_SECONDS)
        alone = medians(queries)
    finally:
        stop(queries)
    queries = []
    try:
        for n, (table, following) in enumerate(itertools.pairwise(tables)):
            read = spark.readStream.format("lakehead").options(uri=con.uri, table=table.name, start="earliest")
            queries.append(begin(read.load(), f"layer{n}", "lakehead", uri=con.uri, table=following.name))
        for n in range(sent):
            tables[0].append([{"n": n}] * 5)
            pause.wait(_APART_SECONDS)
        for query in queries:
            query.processAllAvailable()
        found = medians(queries)
    finally:
        stop(queries)
    value, of_rate = (" / ".join(f"{ms:.0f}" for ms in each) + " ms" for each in (found, alone))
    beside = f"three queries of Spark alone, rate to noop {of_rate}"
    name = "micro-batch of 5 rows in each of three chained queries, p50"
    yield Figure(name, value, beside, sum(alone) / sum(found))


def _wait(event: threading.Event, otherwise: str) -> None:
    if not event.wait(_PATIENCE_SECONDS):
        raise lh.UnavailableError(f"{otherwise} within {_PATIENCE_SECONDS:.0f} s")
