"""The figures of `lakehead bench` about many subscribers of one table: until a row has arrived at each, and what of the
server's time that takes, beside Flight streams that do nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

import lakehead as lh
from lakehead.benchmarks.child import Child, child
from lakehead.benchmarks.events import Figure
from lakehead.benchmarks.fanout_readers import PAUSE_SECONDS, SCHEMA

READERS = ((1, 1), (10, 1), (25, 1), (100, 4))
"""How many, in how many processes."""
_ROWS = 150


def fanout(server: Callable[[str], contextlib.AbstractContextManager[tuple[str, int]]], base: str) -> Iterator[Figure]:
    """A row each 20 ms, appended from this process; ``server`` serves a folder and gives its address and process."""
    for readers, processes in READERS:
        bare, _ = _bare(readers, processes)
        with server(f"{base}/fanout-{readers}") as (uri, pid), lh.connect(uri) as con:
            table = con.create_table("bench.fanout", SCHEMA, durability="sync")
            table.append([{"sent_ns": 0}])
            taken, seconds = _listening("subscribers", uri, readers, processes, pid, partial(_append, table))
        value = "{:.2f} / {:.2f} ms".format(*np.percentile(taken, [50, 99]))
        beside = "bare Flight streams {:.2f} / {:.2f} ms".format(*np.percentile(bare, [50, 99]))
        ratio = float(np.median(bare) / np.median(taken))
        yield Figure(f"append call → {readers} subscribers, p50 / p99", value, beside, ratio)
        if seconds is not None:
            each = f"{seconds / len(taken) * 1e3:.3f} ms a delivery"
            yield Figure(f"server's CPU, {readers} subscribers", each, f"in {processes} processes, {_ROWS} rows")


def _append(table: lh.Table) -> None:
    pause = threading.Event()
    for _ in range(_ROWS):
        table.append([{"sent_ns": time.perf_counter_ns()}])
        pause.wait(PAUSE_SECONDS)


def _bare(readers: int, processes: int) -> tuple[list[float], float | None]:
    with _child("bare_server", _ROWS) as server:
        port = server.line()
        return _listening("bare_readers", port, readers, processes, server.pid, server.tell)


def _listening(
    part: str, address: str, readers: int, processes: int, pid: int, send: Callable[[], None]
) -> tuple[list[float], float | None]:
    """Milliseconds of each arrival, and the seconds of CPU that the process took, where that is told."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_child(part, address, readers // processes, _ROWS)) for _ in range(processes)]
        for one in children:
            one.line()
        before = _cpu_seconds(pid)
        send()
        taken: list[float] = [ms for one in children for ms in json.loads(one.line())]
        after = _cpu_seconds(pid)
    return taken, None if before is None or after is None else after - before


def _child(part: str, *given: object) -> contextlib.AbstractContextManager[Child]:
    command = [sys.executable, "-m", "lakehead.benchmarks.fanout_readers", part, *map(str, given)]
    return child(f"the process of {part}", command, stop=signal.SIGKILL)


def _cpu_seconds(pid: int) -> float | None:
    """User and system time of a process, where the system tells."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields: Sequence[str] = f.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
