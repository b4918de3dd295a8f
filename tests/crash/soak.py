"""`make soak`: an hour of mixed load with kills, every process watched, the data checked every few minutes.

    python -m tests.crash.soak --minutes 60 [--seed N] [--folder PATH]

Wrong data fails the run. Whether curves are flat is for the reader of the table; the samples are in two CSV files.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.crash.deployment import LAKE_TABLES, PATIENCE_SECONDS, Counts, Deployment
from tests.crash.deployment import PROPERTIES as TABLES
from tests.crash.history import WrongDataError
from tests.crash.processes import SparkTiering, wait_until
from tests.crash.quiet import quiet_stderr
from tests.crash.workload import Load

import lakehead as lh
from lakehead.client import patience

SAMPLE_SECONDS = 10.0
WARM_SECONDS = 60.0
"""Samples of a younger process are kept out of the table: it is still loading code."""
LOAD = Load(pause=0.12, rows=8, keys=1000, abandon=0.0)
PROPERTIES = {
    name: {
        "segment_bytes": 1 << 18,
        "freshness": "30s",
        **({"hot_retention": "60s"} if name in LAKE_TABLES else {"log_ttl": "60s"}),
    }
    for name in TABLES
}
_PROCESS_COLUMNS = ("seconds", "process", "pid", "age", "rss_bytes", "fds", "threads", "cpu_percent")
_DISK_COLUMNS = (
    "seconds", "log_bytes", "trimmed_log_bytes", "checkpoint_bytes", "tmp_files", "lake_files", "acknowledged_rows",
    "restart_seconds", "answer_seconds",
)  # fmt: skip


class Sampler(threading.Thread):
    """Writes what each process holds, and what is on disk, every ten seconds."""

    def __init__(self, folder: Path, deployment: Deployment, spark: SparkTiering) -> None:
        super().__init__(name="sampler", daemon=True)
        self._deployment, self._spark = deployment, spark
        self._begin = time.monotonic()
        self._over = threading.Event()
        self._seen: dict[int, psutil.Process] = {}
        self._files = [open(folder / name, "w", newline="") for name in ("processes.csv", "disk.csv")]  # noqa: SIM115
        self._processes, self._disk = (csv.writer(f) for f in self._files)
        self._processes.writerow(_PROCESS_COLUMNS)
        self._disk.writerow(_DISK_COLUMNS)
        self.samples: list[dict[str, Any]] = []
        self.disk: list[dict[str, Any]] = []

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.sample()

    def stop(self) -> None:
        self._over.set()
        self.join(60)
        for file in self._files:
            file.close()

    def sample(self) -> None:
        """Take one sample of everything."""
        seconds = round(time.monotonic() - self._begin, 1)
        for name, process in self._named().items():
            try:
                with process.oneshot():
                    row = (
                        seconds, name, process.pid, round(time.time() - process.create_time(), 1),
                        process.memory_info().rss, process.num_fds(), process.num_threads(), process.cpu_percent(),
                    )  # fmt: skip
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._processes.writerow(row)
            self.samples.append(dict(zip(_PROCESS_COLUMNS, row, strict=True)))
        deployment = self._deployment
        on_disk = (seconds, *_disk(deployment.server.folder), deployment.acknowledged, *deployment.last_restart)
        self._disk.writerow(on_disk)
        self.disk.append(dict(zip(_DISK_COLUMNS, on_disk, strict=True)))
        for file in self._files:
            file.flush()

    def _named(self) -> dict[str, psutil.Process]:
        named: dict[str, psutil.Process] = {}
        for name, child in (("server", self._deployment.server), ("spark driver", self._spark)):
            if child.alive:
                self._add(named, name, child.pid)
        for process in self._spark.family():
            try:
                java = process.name() == "java"
            except psutil.NoSuchProcess:
                continue
            if java:
                self._add(named, "spark jvm", process.pid)
        workers = self._spark.workers()
        for number, process in enumerate(sorted(workers, key=lambda p: p.pid), 1):
            self._add(named, f"spark worker {number}", process.pid)
        self._add(named, "checker and load", os.getpid())
        return named

    def _add(self, named: dict[str, psutil.Process], name: str, pid: int) -> None:
        # The same object each time: CPU is counted from one look to the next.
        try:
            if pid not in self._seen or not self._seen[pid].is_running():
                self._seen[pid] = psutil.Process(pid)
        except psutil.NoSuchProcess:
            return
        named[name] = self._seen[pid]


def _disk(folder: Path) -> tuple[int, int, int, int, int]:
    logs = trimmed = checkpoints = temporary = 0
    for path in (folder / "tables").rglob("*"):
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        if path.suffix == ".log":
            logs += size
            trimmed += size * ("_lake" in str(path) or "_ttl" in str(path))
        elif path.suffix == ".checkpoint":
            checkpoints += size
        elif path.suffix == ".tmp":
            temporary += 1
    return logs, trimmed, checkpoints, temporary, sum(1 for p in (folder / "lake").rglob("*") if p.is_file())


class Soak:
    """One run: a deployment, a tiering service, and a clock that says what happens next."""

    def __init__(self, folder: Path, seed: int, minutes: float) -> None:
        self.random = random.Random(seed)
        self.counts = Counts()
        self.folder = folder
        self._end = time.monotonic() + 60 * minutes
        self._minutes = minutes
        self._begin = time.monotonic()
        self.deployment = Deployment(
            folder / "work", seed, self.counts, LOAD, points=False, properties=PROPERTIES, answers_kept=500
        )
        self.spark = SparkTiering(folder / "work", points=False)
        self.sampler = Sampler(folder, self.deployment, self.spark)

    def run(self) -> None:
        """Until the time is over; ends with a round of each table and a last check."""
        self.spark.start(self.deployment.server.uri, list(LAKE_TABLES))
        self.sampler.start()
        self.deployment.gate.open()
        events: list[tuple[Callable[[], None], float]] = [
            (self.check, 3.0),
            (self.kill_server, 4.0),
            (self.round_here, 1.3),
            (self.maintain_lake, 7.0),
            (self.kill_worker, 9.0),
            (self.kill_spark, 14.0),
        ]
        due = [(self._begin + 60 * every * self.random.uniform(0.3, 1.0), every, act) for act, every in events]
        pause = threading.Event()
        while (now := time.monotonic()) < self._end:
            due.sort(key=lambda d: d[0])
            at, every, act = due[0]
            if at > now:
                pause.wait(min(at - now, self._end - now, 1.0))
                self.deployment.raise_problems()
                continue
            act()
            due[0] = (time.monotonic() + 60 * every * self.random.uniform(0.6, 1.4), every, act)
        self.check()
        self._tier_all()
        self.check()
        self.sampler.sample()

    def _say(self, text: str) -> None:
        minutes = (time.monotonic() - self._begin) / 60
        print(f"{minutes:6.1f} min  {text}", flush=True)

    def check(self) -> None:
        """Compare all tables with what was acknowledged."""
        begin = time.monotonic()
        self.deployment.check()
        self.deployment.gate.open()
        acknowledged = f"{self.deployment.acknowledged:,} rows acknowledged"
        starts = {n: max(t.status()["start_offset"].to_pylist()) for n, t in self.deployment.tables.items()}
        self._say(
            f"check {self.counts.checks}: all right in {time.monotonic() - begin:.1f} s; {acknowledged},"
            f" Spark rounds {self.spark.rounds}, log starts {starts}"
        )

    def kill_server(self) -> None:
        """SIGKILL under load and a restart; none in the last third, so that one life is long."""
        if time.monotonic() > self._begin + 40 * self._minutes and self._minutes >= 30:
            return
        self.deployment.server.kill()
        self.counts.kills["server"] += 1
        self.deployment.restart()
        start, answer = self.deployment.last_restart
        self._say(f"server killed; ready after {start:.2f} s, first lookup after {answer:.2f} s")

    def kill_spark(self) -> None:
        """SIGKILL of the tiering driver; a new one takes over."""
        self.spark.kill()
        self.counts.kills["spark driver"] += 1
        self.spark.start(self.deployment.server.uri, list(LAKE_TABLES))
        self._say("tiering driver killed and started again")

    def kill_worker(self) -> None:
        """SIGKILL of a Python worker of the tiering job."""
        workers = self.spark.workers()
        if workers:
            workers[0].kill()
            self.counts.kills["spark worker"] += 1
            self._say(f"one of {len(workers)} Python workers killed")

    def round_here(self) -> None:
        """A round beside the tiering service: one of them may lose to the other."""
        table = self.random.choice(LAKE_TABLES)
        try:
            result = self.deployment.con.tier(table)
            self.counts.rounds["here: moved rows" if result.rows else "here: nothing to move"] += 1
        except (lh.CommitError, lh.FencedError, lh.UnavailableError) as e:
            self.counts.rounds[f"here: {type(e).__name__}"] += 1

    def maintain_lake(self) -> None:
        """What a lake table's owner runs now and then."""
        for name in LAKE_TABLES:
            lake = self.deployment.tables[name].lake
            try:
                if hasattr(lake, "remove_orphans"):
                    lake.remove_orphans()
            except (lh.CommitError, lh.UnavailableError) as e:
                self._say(f"maintenance of {name}: {e}")

    def _tier_all(self) -> None:
        """Nothing is written any more once the last check has shut the gate: the lake must get it all."""
        self.deployment.gate.shut()

        def all_tiered() -> bool:
            lags = [self.deployment.tables[n].status()["lag_rows"].to_pylist() for n in LAKE_TABLES]
            return not any(lag for table in lags for lag in table)

        if not wait_until(all_tiered, 120):
            raise WrongDataError(f"the tiering service has not caught up in two minutes: {self.spark.errors[-3000:]}")

    def end(self) -> None:
        self.sampler.stop()
        self.spark.kill()
        self.deployment.end()

    def report(self) -> None:
        """The curves: start, quartiles, end and slope per hour of what is left once processes are warm."""
        print(f"\n{'':28}{'start':>12}{'25 %':>12}{'median':>12}{'75 %':>12}{'end':>12}{'per hour':>12}")
        names = sorted({s["process"] for s in self.sampler.samples})
        for name in names:
            warm = [s for s in self.sampler.samples if s["process"] == name and s["age"] >= WARM_SECONDS]
            for column, unit in (("rss_bytes", 1 << 20), ("fds", 1), ("threads", 1), ("cpu_percent", 1)):
                label = f"{name} {'MiB' if column == 'rss_bytes' else column}"
                _print_curve(label, warm, column, unit)
        last = max((s["pid"] for s in self.sampler.samples if s["process"] == "server"), default=0)
        life = [s for s in self.sampler.samples if s["pid"] == last and s["age"] >= WARM_SECONDS]
        _print_curve("server MiB, last life", life, "rss_bytes", 1 << 20)
        for column in _DISK_COLUMNS[1:]:
            unit = 1 << 20 if column.endswith("bytes") else 1
            _print_curve(column.replace("bytes", "MiB"), self.sampler.disk, column, unit)
        counts = self.counts
        print(f"\nkills: {dict(counts.kills)}; rounds beside the service: {dict(counts.rounds)}")
        print(
            f"{counts.acknowledged:,} rows acknowledged, {counts.unanswered} calls without an answer, {counts.checks}"
            f" checks of {counts.rows_checked:,} rows, {counts.scans:,} scans, {counts.lookups:,} lookups; writers"
            f" resumed {counts.writers_resumed} times, subscribers {counts.feeds_resumed}, from live rows"
            f" {counts.feeds_restarted}"
        )


def _print_curve(label: str, rows: Sequence[Mapping[str, Any]], column: str, unit: int) -> None:
    values = np.array([row[column] for row in rows], float) / unit
    if not len(values):
        return
    hours = np.array([row["seconds"] for row in rows]) / 3600
    slope = float(np.polyfit(hours, values, 1)[0]) if len(values) > 2 else 0.0
    cells = [values[0], *np.percentile(values, [25, 50, 75]), values[-1], slope]
    print(f"{label:28}" + "".join(f"{cell:12,.2f}" if abs(cell) < 100 else f"{cell:12,.0f}" for cell in cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for data and samples; default: a new temporary one")
    given = parser.parse_args(arguments)
    patience.PATIENCE_SECONDS = PATIENCE_SECONDS
    folder = given.folder or Path(tempfile.mkdtemp(prefix="lakehead-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"soak of {given.minutes:g} minutes, seed {given.seed}, in {folder} (pid {os.getpid()})", flush=True)
    failed = False
    with quiet_stderr(folder / "stderr.txt"):
        soak = Soak(folder, given.seed, given.minutes)
        try:
            soak.run()
        except Exception as e:
            print(f"WRONG: {e!r}", flush=True)
            failed = True
        finally:
            soak.end()
    soak.report()
    print(f"\nsamples: {folder}/processes.csv and {folder}/disk.csv")
    print("FAILED: see WRONG above; the data is kept" if failed else "every check was right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
