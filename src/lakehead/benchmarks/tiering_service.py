"""The figures of `lakehead bench` about the tiering service: how old rows get before they are in the lake, what that
and idle tables take of the CPU, and what a second job adds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import lakehead as lh
from lakehead.api.tiering import BackgroundTiering
from lakehead.benchmarks.events import Figure
from lakehead.tiering.service import RoundReport

_ROWS = 10
"""A write has."""
_WRITES_PER_FRESHNESS = 20
_WINDOW_PER_FRESHNESS = 1.4
_SAMPLE_SECONDS = 0.02
_JOBS_FRESHNESS = 0.1
_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the part ``tiering`` measures.

    Attributes:
        commits: small rounds of one table, one after the other.
        loads: how many tables are written to, and their freshness in seconds.
        seconds: of each load; longer where the freshness is longer than most of that.
        idle: tables that nobody writes to.
        shared: tables that one job has, then two.
    """

    commits: int = 200
    loads: tuple[tuple[int, float], ...] = ((1, 1.0), (20, 5.0), (100, 30.0))
    seconds: float = 20.0
    idle: int = 20
    shared: int = 16


# ---- lag ------------------------------------------------------------------------------------------------------------


class History:
    """When rows of a table were written and when they were in the lake, by how many there were then."""

    def __init__(self) -> None:
        self.written: list[tuple[float, int]] = []
        self.tiered: list[tuple[float, int]] = []

    @staticmethod
    def add(to: list[tuple[float, int]], rows: int, at: float) -> None:
        to.append((at, (to[-1][1] if to else 0) + rows))

    def lags(self, at: Any) -> Any:
        """Age of the oldest row that the lake lacked, at each of these times."""
        written, rows = np.array(self.written).T
        tiered, held = np.array([(-np.inf, 0), *self.tiered]).T
        oldest = np.searchsorted(rows, held[np.searchsorted(tiered, at, side="right") - 1], side="right")
        return np.maximum(at - np.append(written, np.inf)[oldest], 0.0)


def lags(base: str, batches: Sequence[pa.RecordBatch], sizes: Sizes) -> Iterator[Figure]:
    """A service in this process beside one writer, whose thread's time counts as nobody's."""
    rows = batches[0].slice(0, _ROWS)
    for count, freshness in sizes.loads:
        with lh.connect(f"{base}/lag-{count}") as con:
            tables = _tables(con, count, freshness, rows)
            histories: dict[str, History] = defaultdict(History)
            seconds = max(sizes.seconds, _WINDOW_PER_FRESHNESS * freshness)
            taken: list[float] = []

            def tell(round: RoundReport, histories: dict[str, History] = histories, taken: list[float] = taken) -> None:
                History.add(histories[round.table].tiered, round.rows, time.perf_counter())
                taken.append(round.seconds)

            with con.tiering(on_round=tell) as running:
                _wait_until(lambda: _settled(running, count))  # noqa: B023
                begin, cpu = time.perf_counter(), time.process_time() - time.thread_time()
                step = freshness / _WRITES_PER_FRESHNESS / count
                _write_steadily(tables, rows, histories, begin, step, seconds)
                end, spent = time.perf_counter(), time.process_time() - time.thread_time() - cpu
                told = {
                    name: history.lags(np.arange(begin, end, _SAMPLE_SECONDS)) for name, history in histories.items()
                }
        p50, p99, worst = np.percentile(np.concatenate(list(told.values())), [50, 99, 100])
        what = f"{count} tables at {freshness:g} s" if count > 1 else f"1 table at {freshness:g} s"
        beside = (
            f"p99 {p99 / freshness:.2f} of the freshness, worst {worst:.2f} s; {_ROWS / step:,.0f} rows/s in all,"
            f" {len(taken)} rounds of {np.median(taken) * 1e3 if taken else 0:.0f} ms"
        )
        yield Figure(f"lag of {what}, p50 / p99", f"{p50:.2f} / {p99:.2f} s", beside, float(p99 / freshness))
        share = spent / (end - begin)
        value, beside = f"{share:.1%} of a core", f"{spent / max(len(taken), 1) * 1e3:.0f} ms a round"
        yield Figure(f"service's CPU, {what}", value, beside, share)


def _tables(con: lh.Connection, count: int, freshness: float, rows: pa.RecordBatch) -> list[lh.Table]:
    return [con.create_table(f"bench.t{n}", rows.schema, lake="iceberg", freshness=freshness) for n in range(count)]


def _settled(running: BackgroundTiering, count: int) -> bool:
    """Whether the service has looked at that many tables, and has nothing to move."""
    tables = list(running.service.queue.tables.values())
    return len(tables) == count and not any(t.has_news for t in tables)


def _write_steadily(
    tables: Sequence[lh.Table],
    rows: pa.RecordBatch,
    histories: dict[str, History],
    begin: float,
    step: float,
    seconds: float,
) -> None:
    pause = threading.Event()
    for n in range(int(seconds / step)):
        pause.wait(max(begin + n * step - time.perf_counter(), 0.0))
        table, at = tables[n % len(tables)], time.perf_counter()
        table.append(rows)
        History.add(histories[table.name].written, rows.num_rows, at)


def _wait_until(true: Callable[[], bool]) -> None:
    pause, end = threading.Event(), time.perf_counter() + _WAIT_SECONDS
    while not true():
        if time.perf_counter() > end:
            raise lh.UnavailableError(f"the tiering service was not ready within {_WAIT_SECONDS:.0f} s")
        pause.wait(0.02)


# ---- idle tables ----------------------------------------------------------------------------------------------------


def idle_tables(base: str, batches: Sequence[pa.RecordBatch], sizes: Sizes) -> Iterator[Figure]:
    """Tables all of whose rows are in the lake, with a service and without."""
    rows = batches[0].slice(0, _ROWS)
    with lh.connect(f"{base}/idle") as con:
        for table in _tables(con, sizes.idle, 1.0, rows):
            table.append(rows)
            con.tier(table.name)
        without = _cpu_share(sizes.seconds / 2)
        with con.tiering() as running:
            _wait_until(lambda: _settled(running, sizes.idle))
            share = _cpu_share(sizes.seconds / 2)
    beside = f"without a service {without:.2%}"
    yield Figure(f"CPU of a service with {sizes.idle} idle tables", f"{share:.2%} of a core", beside, share)


def _cpu_share(seconds: float) -> float:
    start, cpu = time.perf_counter(), time.process_time()
    threading.Event().wait(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - start)


# ---- jobs -----------------------------------------------------------------------------------------------------------


def jobs(
    server: Callable[[str], contextlib.AbstractContextManager[str]],
    base: str,
    batches: Sequence[pa.RecordBatch],
    sizes: Sizes,
) -> Iterator[Figure]:
    """``lakehead tier run --local``, once and twice: tables that are all due all the time."""
    rates = [_rounds_per_second(server, f"{base}/jobs-{n}", n, batches[0].slice(0, _ROWS), sizes) for n in (1, 2)]
    ratio = rates[1] / max(rates[0], 1 / sizes.seconds)
    beside = f"one job {rates[0]:.1f}, {ratio:.2f} times; server and writer have their share of {os.cpu_count()} cores"
    yield Figure(f"{sizes.shared} tables with a backlog, two jobs", f"{rates[1]:.1f} rounds/s", beside, ratio)


def _rounds_per_second(
    server: Callable[[str], contextlib.AbstractContextManager[str]],
    folder: str,
    count: int,
    rows: pa.RecordBatch,
    sizes: Sizes,
) -> float:
    with server(folder) as uri, lh.connect(uri) as con, contextlib.ExitStack() as stack:
        tables = _tables(con, sizes.shared, _JOBS_FRESHNESS, rows)
        told = [stack.enter_context(_job(uri)) for _ in range(count)]
        _wait_until(lambda: _shared(con, count, sizes.shared))
        step = _JOBS_FRESHNESS / sizes.shared
        # The first second has them begin.
        begin = time.perf_counter() + 1.0
        seconds = sizes.seconds / 2
        _write_steadily(tables, rows, defaultdict(History), begin - 1.0, step, seconds + 1.0)
        end = begin + seconds
        return sum(begin <= at < end for times in told for at in times) / seconds


def _shared(con: lh.Connection, count: int, tables: int) -> bool:
    have = [job.tables for job in con.tiering_status().jobs]
    return len(have) == count and sum(have) == tables and max(have) - min(have) <= 1


@contextlib.contextmanager
def _job(uri: str) -> Iterator[list[float]]:
    """A job in a process of its own, as the times at which it told of rounds."""
    command = [sys.executable, "-m", "lakehead.cli.main", "--uri", uri, "tier", "run", "--local"]
    times: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def listen() -> None:
            times.extend(time.perf_counter() for _ in lines)

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        try:
            yield times
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            listening.join(30)
