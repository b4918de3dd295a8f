"""The figures of `lakehead bench` about tiering: what a round costs beside a bare Parquet write, whether rounds and
scans grow with commits, and what the service makes of a load (`lakehead.benchmarks.tiering_service`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import lakehead as lh
from lakehead.api.tiering import ConnectionTables
from lakehead.benchmarks.events import Figure, rate, seconds
from lakehead.benchmarks.tiering_service import Sizes, idle_tables, jobs, lags
from lakehead.tiering.queue import MAINTENANCE_ROUNDS, ROUND_RECORDS

BUCKETS = 2
_ROUND_ROWS = 100
_TIMES = 3
_MARKS = (20, 200, 2000, 20_000)
_MARK_ROUNDS = 11
"""So many rounds up to a mark make its time, by their median."""
_SCANS = 9


def tiering(
    server: Callable[[str], contextlib.AbstractContextManager[str]],
    sizes: Sizes,
    base: str,
    batches: Sequence[pa.RecordBatch],
) -> Iterator[Figure]:
    """All but what needs Spark; ``server`` serves a folder."""
    with lh.connect(f"{base}/rounds") as con:
        yield from _large_rounds(con, base, batches)
    with lh.connect(f"{base}/commits") as con:
        yield from _many_rounds(con, batches, sizes.commits)
    yield from lags(base, batches, sizes)
    yield from idle_tables(base, batches, sizes)
    yield from jobs(server, base, batches, sizes)


# ---- large rounds ---------------------------------------------------------------------------------------------------


def half_updated(batches: Sequence[pa.RecordBatch], new: int) -> list[pa.RecordBatch]:
    """The same rows again, every second under a new key, which count from ``new`` on."""
    out, at = [], 0
    for batch in batches:
        ids = np.arange(at, at + batch.num_rows)
        out.append(batch.set_column(0, "event_id", pa.array(np.where(ids % 2 == 0, ids, new + ids))))
        at += batch.num_rows
    return out


def bare_write(base: str, batches: Sequence[pa.RecordBatch]) -> tuple[float, float]:
    """Seconds that PyArrow takes to write the rows as one Parquet file, and seconds of CPU, the least of a few."""
    table = pa.Table.from_batches(batches)
    times = [_timed(lambda: pq.write_table(table, f"{base}/bare.parquet", compression="zstd")) for _ in range(_TIMES)]
    return min(t[0] for t in times), min(t[1] for t in times)


def _large_rounds(con: lh.Connection, base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    bare = bare_write(base, batches)
    rows = sum(b.num_rows for b in batches)
    log = con.create_table("bench.log", batches[0].schema, buckets=BUCKETS, lake="iceberg")
    keyed = con.create_table(
        "bench.keyed", batches[0].schema, primary_key=["event_id"], buckets=BUCKETS, lake="iceberg"
    )
    _write(keyed.upsert, batches)
    con.tier(keyed.name)
    taken: dict[str, list[tuple[float, float]]] = {"log table": [], "keyed, 50 % updates": []}
    for n in range(1, _TIMES + 1):
        _write(log.append, batches)
        taken["log table"].append(_timed(lambda: con.tier(log.name)))
        _write(keyed.upsert, half_updated(batches, n * rows))
        taken["keyed, 50 % updates"].append(_timed(lambda: con.tier(keyed.name)))
    for name, times in taken.items():
        wall, cpu = (min(t[i] for t in times) for i in range(2))
        beside = (
            f"{bare[1] / cpu:.2f} of a bare Parquet write a core, which does {rate(batches, bare[1])};"
            f" {bare[0] / wall:.2f} by the clock"
        )
        yield Figure(f"round in process, a core, {name}", rate(batches, cpu), beside, bare[1] / cpu)


def _write(write: Callable[[pa.RecordBatch], object], batches: Sequence[pa.RecordBatch]) -> None:
    for batch in batches:
        write(batch)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of this process's CPU."""
    cpu = time.process_time()
    return seconds(work), time.process_time() - cpu


# ---- many small rounds ----------------------------------------------------------------------------------------------


def _many_rounds(con: lh.Connection, batches: Sequence[pa.RecordBatch], commits: int) -> Iterator[Figure]:
    rows = batches[0].slice(0, _ROUND_ROWS)
    tables = {
        name: con.create_table(f"bench.{name}", rows.schema, buckets=BUCKETS, lake="iceberg")
        for name in ("maintained", "unmaintained", "fresh")
    }
    yield from _rounds(con, tables["maintained"], rows, commits, maintained=True)
    yield from _rounds(con, tables["unmaintained"], rows, commits, maintained=False)
    tables["fresh"].append(tables["maintained"].scan().to_arrow())
    con.tier(tables["fresh"].name)
    yield from _scans(tables, commits)


def _rounds(
    con: lh.Connection, table: lh.Table, rows: pa.RecordBatch, commits: int, *, maintained: bool
) -> Iterator[Figure]:
    """Rounds as a service runs them, which looks after a maintained table each `MAINTENANCE_ROUNDS` of them."""
    service = ConnectionTables(con, [table.name])
    table_id = service.look(frozenset(), frozenset()).tables[0].table_id
    how = "maintained" if maintained else "not maintained"
    marks = sorted({m for m in _MARKS if m <= commits} | {commits})
    taken: list[tuple[float, float]] = []
    phases: list[dict[str, float]] = []
    maintenance: list[float] = []
    first = None

    def maintain() -> None:
        while service.maintain(table_id):
            pass

    try:
        for n in range(1, commits + 1):
            table.append(rows)
            taken.append(_timed(lambda: phases.append(dict(service.run_round(table_id, ROUND_RECORDS[1]).seconds))))
            if n in marks:
                wall, cpu = np.median(taken[-_MARK_ROUNDS:], axis=0).tolist()
                first = first or (wall, cpu)
                beside = (
                    f"{wall / first[0]:.2f} of that at commit {marks[0]} by the clock, {cpu / first[1]:.2f} in CPU,"
                    f" {cpu * 1e3:.1f} ms; {_phases(phases[-_MARK_ROUNDS:])}"
                )
                yield Figure(f"small round at commit {n:,}, {how}", f"{wall * 1e3:.1f} ms", beside, first[1] / cpu)
            if maintained and n % MAINTENANCE_ROUNDS == 0:
                maintenance.append(seconds(maintain))
    finally:
        service.close()
    if maintenance:
        begin, end = (float(np.median(part)) * 1e3 for part in (maintenance[:3], maintenance[-3:]))
        share = sum(maintenance) / sum(wall for wall, _ in taken)
        beside = f"{share:.2f} of the time of rounds; the first {begin:.0f} ms, the last {end:.0f} ms"
        value = f"{np.mean(maintenance) * 1e3:.0f} ms"
        yield Figure(f"maintenance each {MAINTENANCE_ROUNDS} small rounds, mean", value, beside, share)


def _phases(laps: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{name} {np.median([lap[name] for lap in laps]) * 1e3:.1f}" for name in laps[-1])


def _scans(tables: dict[str, lh.Table], commits: int) -> Iterator[Figure]:
    taken: dict[str, list[float]] = {name: [] for name in tables}
    for _ in range(_SCANS):
        for name, table in tables.items():
            taken[name].append(_timed(lambda table=table: table.scan(tier="lake").to_arrow())[0])  # type: ignore[misc]
    took = {name: float(np.median(times)) for name, times in taken.items()}
    for name, how in (("maintained", "maintained"), ("unmaintained", "not maintained")):
        files = [tables[n].lake.files().num_rows for n in (name, "fresh")]
        beside = (
            f"{took[name] / took['fresh']:.2f} times a freshly written table's {took['fresh'] * 1e3:.1f} ms;"
            f" {files[0]} files, {files[1]}"
        )
        value = f"{took[name] * 1e3:.1f} ms"
        yield Figure(f"lake scan after {commits:,} rounds, {how}", value, beside, took["fresh"] / took[name])
