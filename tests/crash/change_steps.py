"""Steps in which tables change: altered, renamed and emptied, with the server or who asks killed on the way; and in
which tiering jobs share tables, until one of them dies or sleeps."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.crash import points
from tests.crash.changing import PROPERTIES, WITH_LAKE, Changing
from tests.crash.changing_history import tablet_of
from tests.crash.deployment import Deployment
from tests.crash.history import PARTITIONS, require
from tests.crash.processes import TieringJob, wait_until
from tests.crash.tools import Step, Tools
from tests.crash.workload import UNKNOWN

from lakehead.api.table import handle_of

JOB_SECONDS = 60.0
TAKEOVER_SECONDS = 20.0
"""A job is gone after five seconds of silence; the rest is for a machine that has other things to do."""


def change_deck() -> list[Step]:
    """The steps that are played here, each once."""
    return [
        *(Step("alter", p) for p in (*points.ALTER, "random")),
        *(Step("rename", p) for p in (*points.RENAME, "random")),
        *(Step("truncate", p) for p in (*points.TRUNCATE, *points.TRUNCATE_LOG, "random")),
        *(Step("empty", p) for p in points.TRUNCATE_LAKE),
        *(Step("job", p) for p in (*points.JOB, "random", "asleep")),
    ]


class ChangeSteps(Tools):
    """Played by name, as those of `Player`."""

    def _alter(self, deployment: Deployment, step: Step) -> None:
        """The server dies in a change of columns: it is there wholly or not at all, and the lake follows."""
        changing = self._changing(deployment)
        changed = changing.tables[self._label(step.point)]
        self._change(deployment, step, lambda: changing.alter(changed))

    def _rename(self, deployment: Deployment, step: Step) -> None:
        """The server dies in a rename, or in an exchange of two names."""
        changing = self._changing(deployment)
        label = self._label(step.point)
        others = [o for o in (WITH_LAKE if label in WITH_LAKE else PROPERTIES) if o != label]
        other = self.random.choice([None, self.random.choice(others)])
        self._change(deployment, step, lambda: changing.rename(label, other))

    def _truncate(self, deployment: Deployment, step: Step) -> None:
        """The server dies in a truncation: all tablets are emptied at an offset each, or none is."""
        changing = self._changing(deployment)
        quiet = step.point in points.TRUNCATE_LOG
        changed = changing.tables["kv" if quiet else self.random.choice([*PROPERTIES])]
        self._change(deployment, step, lambda: changing.truncate(changed), quiet=quiet)

    def _changing(self, deployment: Deployment) -> Changing:
        """The tables that change, with some rows, of which some are in the lake."""
        changing = deployment.changing()
        deployment.gate.open()
        self._wait(0.2, 0.5)
        self._tier(deployment, changing.tables[self.random.choice(WITH_LAKE)].name)
        self._wait(0.1, 0.3)
        return changing

    def _label(self, point: str) -> str:
        return self.random.choice(WITH_LAKE if point.startswith("follow.") else [*PROPERTIES])

    def _change(self, deployment: Deployment, step: Step, change: Callable[[], None], *, quiet: bool = False) -> None:
        if quiet:
            deployment.gate.shut()

        def once() -> None:
            with contextlib.suppress(*UNKNOWN):
                change()

        if step.point == "random":
            self._die_in_a_moment(deployment, str(step), once)
        else:
            deployment.server.arm(step.point, nth=1 if quiet else self._nth(step.point))
            self._die(deployment, str(step), once)
        deployment.restart()
        self._settle(deployment)

    def _settle(self, deployment: Deployment) -> None:
        """What is left goes on: checked as it is, then with more rows, and a round of each lake."""
        deployment.check()
        deployment.gate.open()
        self._wait(0.1, 0.3)
        for name in deployment.changing().lakes():
            self._tier(deployment, name)
        deployment.check()

    def _empty(self, deployment: Deployment, step: Step) -> None:
        """Who empties a log table with a lake dies on the way: the lake decides."""
        changing = self._changing(deployment)
        changed = changing.tables["log_lake"]
        rounds = self._rounds(deployment)
        rounds.arm(step.point)
        with changing.truncating(changed) as done:
            rounds.send(changed.name, "truncate")
            answer = rounds.answer()
            require(answer is None or "error" not in answer, f"a truncation ended with {answer}")
            if answer is not None:
                done({tablet_of(i): answer["ends"].get(tablet_of(i).partition[0], 0) for i in range(PARTITIONS)})
        self._count(str(step), rounds.reached)
        self._bury(rounds)
        self._settle(deployment)
        deployment.check_lake_folders()

    # ---- tiering jobs -----------------------------------------------------------------------------------------------

    def _job(self, deployment: Deployment, step: Step) -> None:
        """One of two jobs that share the tables is killed, or sleeps: the other takes its tables over within seconds,
        and every row arrives once."""
        self._changing(deployment)
        lakes = set(deployment.lakes())
        with self._two_jobs(deployment) as (victim, survivor):
            if step.point == "asleep":
                self._put_to_sleep(victim, deployment.server.folder / "lake" / "catalog.db")
                hit = True
            elif step.point == "random":
                self._wait(0.0, 1.0)
                hit = True
            else:
                victim.arm(step.point)
                hit = victim.wait_dead(JOB_SECONDS)
            self._count(str(step), hit)
            if step.point != "asleep":
                victim.kill()
            before, begin = len(survivor.rounds), time.monotonic()
            met = wait_until(lambda: lakes <= set(survivor.rounds[before:]) or not survivor.alive, TAKEOVER_SECONDS)
            done = sorted(set(survivor.rounds[before:]))
            require(
                met and survivor.alive, f"the other job works on {done} of {sorted(lakes)}: {survivor.errors[-2000:]}"
            )
            deployment.counts.takeover_seconds.append(time.monotonic() - begin)
            if step.point == "asleep":
                os.kill(victim.pid, signal.SIGCONT)
                self._wait(1.0, 2.0)
            deployment.check()
            self._catch_up_jobs(deployment)
            if step.point == "asleep":
                victim.kill()
            survivor.terminate()
            require(survivor.wait_dead(JOB_SECONDS), "a job does not end")
            survivor.release()
        deployment.check()
        deployment.check_lake_folders()

    def _put_to_sleep(self, victim: TieringJob, catalog: Path) -> None:
        """Stop a job while it does not hold the catalog's lock: a database that is one file stays locked as long as
        who has locked it stands still."""
        while True:
            self._wait(0.0, 1.0)
            os.kill(victim.pid, signal.SIGSTOP)
            with contextlib.closing(sqlite3.connect(catalog, timeout=5)) as db, contextlib.suppress(sqlite3.Error):
                db.execute("begin exclusive")
                return
            os.kill(victim.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def _two_jobs(self, deployment: Deployment) -> Iterator[list[TieringJob]]:
        """Two that work, each on half of the tables that have a lake, in any order; some are left of earlier steps."""
        con = deployment.con
        tables = sum(handle_of(con.table(name)).desc.lake is not None for name in con.tables())
        jobs = [TieringJob(deployment.work, n) for n in (1, 2)]
        try:
            for job in jobs:
                job.disarm()
                job.start(deployment.server.uri)

            def shared() -> bool:
                halves = sorted(job.tables for job in con.tiering_status().jobs)
                return halves == [tables // 2, tables - tables // 2] and all(job.rounds for job in jobs)

            met = wait_until(shared, JOB_SECONDS)
            errors = [job.errors[-1000:] for job in jobs]
            require(met, f"two jobs do not share {tables} tables: {con.tiering_status().jobs}, {errors}")
            self.random.shuffle(jobs)
            yield jobs
        finally:
            for job in jobs:
                if job.alive:
                    job.kill()

    def _catch_up_jobs(self, deployment: Deployment) -> None:
        """With nothing written any more everything comes to the lake, as it is."""
        deployment.gate.shut()

        def tiered() -> bool:
            return not any(lag for t in deployment.lakes().values() for lag in t.status()["lag_rows"].to_pylist())

        require(wait_until(tiered, JOB_SECONDS), "the job that is left does not catch up")
