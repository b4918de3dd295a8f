"""What is killed, where and how: a deck of steps, shuffled by the seed, and how each step is played."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.crash import points
from tests.crash.change_steps import ChangeSteps, change_deck
from tests.crash.deployment import LAKE_TABLES, Counts, Deployment, HeldScan
from tests.crash.history import LOG_SCHEMA, WrongDataError, log_rows, require
from tests.crash.processes import Rounds, SparkTiering, Task, wait_until
from tests.crash.publishing import PublishSteps, publish_deck
from tests.crash.streaming import StreamSteps, layers_deck, stream_deck
from tests.crash.tools import REACH_SECONDS, Step
from tests.crash.workload import Load

from lakehead.api.table import handle_of

SPARK_SECONDS = 90.0
_BESIDE_QUERIES = Load(pause=0.1)
"""Queries that die catch up with it."""
STEPS_PER_FOLDER = 24
_MAINTENANCE = ("compact", "expire")
_EXPIRED = ("expire.catalog.commit.after", "expire.lake.remove.before")
"""The list is committed: nobody may refuse what is left to do."""
_NEVER_REFUSED = ("expire.catalog.commit.before", *_EXPIRED)
"""Where others were first, expiry begins again from what they left."""
_ALL_MAINTENANCE: tuple[Task, ...] = ("maintain", "clean")
_ROUND_AND_MAINTENANCE: tuple[Task, ...] = ("tier", *_ALL_MAINTENANCE)


def deck(seed: int) -> list[Step]:
    """The steps of a full run without Spark, in the seed's order."""
    loaded = (*points.SEGMENT, *points.CHECKPOINT, *points.TRIM, *points.REQUESTS)
    steps = [
        *(Step("server", p) for p in loaded * 2),
        *(Step("server", p) for p in points.SEGMENT),
        *(Step("churn", p) for p in points.CREATE_AND_DROP * 2),
        *(Step("recovery", p) for p in points.RECOVERY * 2),
        *(Step("recovery", p, first) for p, first in points.RECOVERY_AFTER.items()),
        *(Step("stop", p) for p in points.STOP * 2),
        *(Step("round", p) for p in points.ROUND * 2),
        *(Step("maintenance", p) for p in (*points.COMPACTION, *points.EXPIRY)),
        *(Step("maintenance", p, first) for p, first in points.CLEAN_UP_AFTER.items()),
        *(Step("lost", p) for p in ("catalog.commit.before", "catalog.commit.after") * 2),
        *(Step("lost", f"{task}.catalog.commit.{step}") for task in _MAINTENANCE for step in ("before", "after")),
        *(Step("asleep", p) for p in ("lake.data.closed", "lake.metadata.closed", "catalog.commit.before") * 2),
        *(Step("asleep", p) for p in ("compact.lake.data.closed", "compact.catalog.commit.before")),
        *(Step("asleep", p) for p in _NEVER_REFUSED),
        *(Step("under", p) for p in ("round.read", "lake.data.open", "catalog.commit.before", "catalog.commit.after")),
        *(Step("under", p) for p in ("compact.catalog.commit.before", "expire.begin", *_EXPIRED)),
        *(Step("locked", p) for p in ("killed", "refused", "restart")),
        *change_deck(),
        *publish_deck(),
        *(Step("random", p) for p in ("server",) * 24 + ("rounds",) * 8 + ("maintenance",) * 4),
    ]
    random.Random(seed).shuffle(steps)
    return steps


def spark_deck(seed: int) -> list[Step]:
    """The steps that need Spark."""
    draw = random.Random(f"spark {seed}")
    in_driver = [p for p in points.ROUND if p not in points.WORKER]
    driver = ["catalog.commit.before", "catalog.commit.after", *draw.sample(in_driver, 3)]
    driver += [*draw.sample(points.COMPACTION, 2), *draw.sample(points.EXPIRY, 2)]
    steps = [
        *(Step("worker", p) for p in points.WORKER * 2),
        *(Step("worker", "random") for _ in range(3)),
        *(Step("beside", p) for p in ("server", "server", "server")),
        *(Step("driver", p) for p in (*driver, "random")),
        *stream_deck(),
    ]
    draw.shuffle(steps)
    return steps


def query_deck(seed: int) -> list[Step]:
    """The steps with queries that write several tables, those of a kind one after the other."""
    draw = random.Random(f"queries {seed}")
    return sorted(layers_deck(), key=lambda s: (s.kind, draw.random()))


class Player(ChangeSteps, PublishSteps, StreamSteps):
    """Plays steps on one deployment after the other."""

    def __init__(self, root: Path, seed: int, say: Callable[[str], None]) -> None:
        super().__init__(seed)
        self.root = root
        self._say = say
        self._spark: SparkTiering | None = None
        self._scratch = 0
        self._dropping = ""

    def play(self, steps: Sequence[Step], load: Load | None = None) -> None:
        """Play steps, with a new folder now and then.

        Raises:
            WrongDataError: data is wrong; the message names the step, the folder is kept.
        """
        done = 0
        for begin in range(0, len(steps), STEPS_PER_FOLDER):
            number = begin // STEPS_PER_FOLDER
            with self._deployment(f"folder-{number}", self.seed + number, load) as deployment:
                # A tablet is trimmed for the first time once.
                here = sorted(
                    steps[begin : begin + STEPS_PER_FOLDER], key=lambda s: not s.point.startswith("log-start.create")
                )
                for step in here:
                    done += 1
                    self._play_one(deployment, step, f"{done}/{len(steps)}")
                self._finish(deployment)

    def play_spark(self, steps: Sequence[Step], load: Load | None = None) -> None:
        """Play steps on one deployment with a Spark tiering service."""
        with self._deployment("spark", self.seed, load) as deployment:
            self._spark = SparkTiering(deployment.work)
            try:
                self._spark.start(deployment.server.uri, list(LAKE_TABLES))
                for number, step in enumerate(steps, 1):
                    self._play_one(deployment, step, f"{number}/{len(steps)}")
                self._catch_up(deployment)
            finally:
                self._spark.kill()
                self.end_streams()
            deployment.check()
            deployment.check_lake_folders()

    def play_queries(self, steps: Sequence[Step], load: Load | None = None) -> None:
        """Play steps of queries, each kind on a deployment of its own."""
        load = load or _BESIDE_QUERIES
        for kind, of_kind in itertools.groupby(enumerate(steps, 1), key=lambda numbered: numbered[1].kind):
            with self._deployment(kind, self.seed, load) as deployment:
                try:
                    for number, step in of_kind:
                        self._play_one(deployment, step, f"{number}/{len(steps)}")
                finally:
                    self.end_streams()
                self._finish(deployment)

    @contextlib.contextmanager
    def _deployment(self, name: str, seed: int, load: Load | None) -> Iterator[Deployment]:
        deployment = Deployment(self.root / name, seed, self.counts, load)
        try:
            yield deployment
        finally:
            if self._tierer is not None:
                self._tierer.kill()
                self._tierer = None
            deployment.end()

    def _play_one(self, deployment: Deployment, step: Step, number: str) -> None:
        begin, missed = time.perf_counter(), self.counts.missed.total()
        try:
            getattr(self, f"_{step.kind}")(deployment, step)
        except Exception as e:
            raise WrongDataError(f"step {number} ({step}) in {deployment.work}, seed {self.seed}: {e!r}") from e
        note = "  (not reached)" if self.counts.missed.total() > missed else ""
        self._say(f"{number:>8}  {step!s:45} {time.perf_counter() - begin:5.1f} s{note}")

    def _finish(self, deployment: Deployment) -> None:
        """What a deployment ends with: everything tiered, cleaned up, stopped well and opened again."""
        deployment.gate.shut()
        for table in deployment.lakes():
            self._tier(deployment, table)
        deployment.check()
        deployment.check_lake_folders()
        deployment.server.terminate()
        require(deployment.server.wait_dead(60), "a clean stop takes more than a minute")
        require(deployment.server.process and deployment.server.process.returncode == 0, "a clean stop failed")
        deployment.server.release()
        deployment.restart()
        deployment.check()

    def _nudge(self, deployment: Deployment) -> None:
        """Have the server do what the load alone has it do now and then: maintain its tables, open a named writer."""
        handle_of(deployment.tables["t.log_sync"]).writers.named("nudge")
        for table in LAKE_TABLES:
            handle_of(deployment.tables[table]).report_tiered()

    # ---- the server ---------------------------------------------------------------------------------------------

    def _server(self, deployment: Deployment, step: Step) -> None:
        """Killed at a point under load, now and then with a round under way."""
        with self._round_beside(deployment):
            deployment.server.arm(step.point, nth=self._nth(step.point))
            deployment.gate.open()
            self._die(deployment, step.point, lambda: self._nudge(deployment))
            deployment.restart()
        deployment.check()

    @contextlib.contextmanager
    def _round_beside(self, deployment: Deployment) -> Iterator[None]:
        if self.random.random() < 0.5:
            yield
            return
        rounds = self._rounds(deployment)
        rounds.send(self.random.choice(LAKE_TABLES))
        yield
        answer = rounds.answer()
        deployment.note(answer)
        require(answer is not None, f"a process for rounds died: {rounds.errors[-2000:]}")

    def _random(self, deployment: Deployment, step: Step) -> None:
        """Killed at any time: the server under load, or the process of a round or of maintenance."""
        if step.point == "server":
            with self._round_beside(deployment):
                deployment.gate.open()
                self._wait(0.0, 1.0)
                deployment.server.kill()
                self._count("server at a random time", True)
                deployment.restart()
            deployment.check()
            return
        deployment.gate.open()
        self._wait(0.1, 0.3)
        if step.point == "maintenance":
            table = self.random.choice(LAKE_TABLES)
            for _ in range(4):
                self._tier(deployment, table)
            rounds = self._rounds(deployment)
            rounds.send(table, "maintain")
        else:
            rounds = self._rounds(deployment)
            rounds.send(self.random.choice(LAKE_TABLES))
        self._wait(0.0, 0.5)
        self._bury(rounds)
        self._count(f"{step.point} at a random time", True)
        self._tier(deployment, self.random.choice(LAKE_TABLES))
        deployment.check()
        if step.point == "maintenance":
            deployment.check_lake_folders()

    def _churn(self, deployment: Deployment, step: Step) -> None:
        """Killed while tables are created and dropped."""
        deployment.server.arm(step.point)
        deployment.gate.open()
        self._die(deployment, step.point, lambda: self._create_and_drop(deployment))
        deployment.restart()
        for name in deployment.con.tables("scratch"):
            if name == self._dropping:
                # Its drop was under way: whatever is left of it, dropping it again must end that.
                deployment.con.drop_table(name, purge=True)
                continue
            table = deployment.con.create_table(name, LOG_SCHEMA, partition_by="p", lake="iceberg", if_not_exists=True)
            before = table.scan().count()
            table.append(log_rows(1, range(9)))
            require(table.scan().count() == before + 9, f"{name}: a table whose creation was cut off loses rows")
            deployment.con.drop_table(name, purge=True)
        left = [p.name for p in (deployment.server.folder / "tables").iterdir() if p.name.startswith("scratch.")]
        require(not left, f"folders of dropped tables are left: {left}")
        deployment.check()

    def _create_and_drop(self, deployment: Deployment) -> None:
        self._scratch += 1
        name = f"scratch.t{self._scratch}"
        table = deployment.con.create_table(name, LOG_SCHEMA, partition_by="p", lake="iceberg")
        table.append(log_rows(1, range(9)))
        self._dropping = name
        deployment.con.drop_table(name, purge=True)

    def _recovery(self, deployment: Deployment, step: Step) -> None:
        """Killed under load, and again while it recovers."""
        deployment.gate.open()
        if step.first:
            deployment.server.arm(step.first, nth=self._nth(step.first))
            self._die(deployment, step.first, lambda: self._nudge(deployment))
        else:
            self._wait(0.1, 0.5)
            deployment.server.kill()
            self._count("server at a random time", True)
        deployment.server.arm(step.point, nth=1 if step.first else self._nth(step.point))
        if deployment.start():
            self._die(deployment, step.point, lambda: self._open_all(deployment))
        else:
            self._count(step.point, True)
        self._recover(deployment)

    def _open_all(self, deployment: Deployment) -> None:
        """Have the server open its tables: writers whose outcome is not known write no more before the next check."""
        for table in deployment.tables.values():
            table.scan().count()

    def _stop(self, deployment: Deployment, step: Step) -> None:
        """Killed while it stops cleanly."""
        deployment.gate.open()
        self._wait(0.1, 0.4)
        deployment.server.arm(step.point, nth=self._nth(step.point))
        deployment.server.terminate()
        self._die(deployment, step.point)
        self._recover(deployment)

    # ---- rounds -------------------------------------------------------------------------------------------------

    def _table_of(self, point: str) -> str:
        return "t.kv_lake" if point.startswith("lake.deletes") else self.random.choice(LAKE_TABLES)

    def _send_until_reached(self, deployment: Deployment, rounds: Rounds, point: str, table: str | None = None) -> bool:
        """Rounds, and maintenance where the point is one of it, until the armed point is reached in one, whose answer
        is still to come; the load must run."""
        table = table or self._table_of(point)
        deadline = time.monotonic() + REACH_SECONDS
        while time.monotonic() < deadline:
            for task in _tasks_of(point):
                rounds.send(table, task)
                if wait_until(lambda: rounds.reached or not rounds.idle, 30) and rounds.reached:
                    return True
                deployment.note(rounds.answer(), task)
            self._wait(0.05, 0.1)
        return False

    def _round(self, deployment: Deployment, step: Step) -> None:
        """The process of a round is killed at a point of it."""
        deployment.gate.open()
        self._kill_in_round(deployment, step.point, self._table_of(step.point))
        self._tier(deployment, self._table_of(step.point))
        deployment.check()

    def _kill_in_round(self, deployment: Deployment, point: str, table: str) -> None:
        rounds = self._rounds(deployment)
        rounds.arm(point, nth=self._nth(point))
        self._count(point, self._send_until_reached(deployment, rounds, point, table))
        self._bury(rounds)

    def _maintenance(self, deployment: Deployment, step: Step) -> None:
        """The process is killed at a point of compaction, of expiry or of the removal of orphans, with scans under
        way; what it left is found and removed by the next one."""
        held = [HeldScan(deployment.tables[table]) for table in LAKE_TABLES]
        deployment.gate.open()
        table = self.random.choice(LAKE_TABLES)
        if step.first:
            self._kill_in_round(deployment, step.first, table)
        self._kill_in_round(deployment, step.point, table)
        for task in _ROUND_AND_MAINTENANCE:
            self._tier(deployment, table, task)
        deployment.counts.scans_held += len(held)
        while held:
            held.pop().finish()
        deployment.check()
        deployment.check_lake_folders()

    def _lost(self, deployment: Deployment, step: Step) -> None:
        """The catalog's answer, or the request to it, is lost: the outcome is read from the lake, or tried again."""
        rounds = self._rounds(deployment)
        rounds.arm(step.point, action="lose")
        deployment.gate.open()
        hit = self._send_until_reached(deployment, rounds, step.point)
        self._count(f"lost: {step.point}", hit)
        if hit:
            answer = rounds.answer()
            deployment.note(answer, _tasks_of(step.point)[-1])
            allowed = {None} if step.point.startswith(("catalog", "compact")) else {"UnavailableError"}
            require(answer is not None and answer.get("error") in allowed, f"a lost answer became {answer}")
        rounds.disarm()
        deployment.check()
        deployment.check_lake_folders()

    def _asleep(self, deployment: Deployment, step: Step) -> None:
        """A round, or maintenance, is stopped before it commits, others commit and clean up, the first wakes up: it
        must be refused, but expiry begins again, and one that had committed goes on."""
        sleeper = self._rounds(deployment)
        sleeper.arm(step.point, action="stop")
        deployment.gate.open()
        hit = self._send_until_reached(deployment, sleeper, step.point)
        self._count(f"asleep: {step.point}", hit)
        self._tierer = None
        won = [self._tier(deployment, table) for table in LAKE_TABLES]
        if _tasks_of(step.point) != ["tier"]:
            won += [self._tier(deployment, table, task) for table in LAKE_TABLES for task in _ALL_MAINTENANCE]
        os.kill(sleeper.pid, signal.SIGCONT)
        if hit:
            answer = sleeper.answer()
            deployment.note(answer, _tasks_of(step.point)[-1])
            expected = None if step.point in _NEVER_REFUSED else "CommitConflictError"
            require(
                answer is not None and answer.get("error") == expected,
                f"one that slept at {step.point} while others committed ({won}) ended with {answer}",
            )
        sleeper.kill()
        deployment.check()
        deployment.check_lake_folders()

    def _under(self, deployment: Deployment, step: Step) -> None:
        """The server is killed and comes back while a round, or maintenance, stands still at a point."""
        rounds = self._rounds(deployment)
        rounds.arm(step.point, action="stop")
        deployment.gate.open()
        hit = self._send_until_reached(deployment, rounds, step.point)
        deployment.server.kill()
        self._count(f"server during {step.point}", True)
        deployment.restart()
        os.kill(rounds.pid, signal.SIGCONT)
        if hit:
            answer = rounds.answer()
            require(answer is not None, f"a process whose server was killed ended, too: {rounds.errors[-3000:]}")
            deployment.note(answer, _tasks_of(step.point)[-1])
        rounds.disarm()
        self._tier(deployment, self._table_of(step.point))
        deployment.check()
        deployment.check_lake_folders()

    def _locked(self, deployment: Deployment, step: Step) -> None:
        """The catalog's file is locked: in a commit that is then killed, in one that gives up, and at a restart."""
        rounds = self._rounds(deployment)
        if step.point != "restart":
            rounds.arm("catalog.commit.before", action="stop")
        deployment.gate.open()
        hit = step.point == "restart" or self._send_until_reached(deployment, rounds, "catalog.commit.before")
        with _exclusive_lock(deployment.server.folder / "lake" / "catalog.db"):
            if step.point == "restart":
                deployment.server.kill()
                deployment.restart()
            elif step.point == "killed":
                os.kill(rounds.pid, signal.SIGCONT)
                self._wait(0.2, 1.0)
                self._bury(rounds)
            else:
                os.kill(rounds.pid, signal.SIGCONT)
                answer = rounds.answer() if hit else {"error": "not reached"}
                deployment.note(answer)
                require(answer and "error" in answer, f"a round committed through a locked catalog: {answer}")
        self._count(f"catalog locked: {step.point}", hit)
        if self._tierer is not None:
            self._tierer.disarm()
        self._tier(deployment, self._table_of(step.point))
        deployment.check()

    # ---- Spark --------------------------------------------------------------------------------------------------

    def _service(self) -> SparkTiering:
        assert self._spark is not None
        return self._spark

    def _next_rounds(self, count: int = 1) -> None:
        """Wait for rounds of the service that begin and end from now on."""
        spark = self._service()
        goal = spark.rounds + count
        met = wait_until(lambda: spark.rounds >= goal or not spark.alive, SPARK_SECONDS)
        require(met and spark.alive, f"the tiering service does no rounds: {spark.errors[-3000:]}")

    def _worker(self, deployment: Deployment, step: Step) -> None:
        """A Python worker of Spark dies in a task: the round is done again."""
        spark = self._service()
        deployment.gate.open()
        self._next_rounds()
        if step.point == "random":
            found = wait_until(lambda: bool(spark.workers()), SPARK_SECONDS)
            self._wait(0.0, 1.0)
            for worker in spark.workers()[:1]:
                worker.kill()
            self._count("Spark worker at a random time", found)
        else:
            spark.arm_worker(step.point)
            wait_until(lambda: spark.worker_reached, SPARK_SECONDS)
            self._count(f"Spark worker: {step.point}", spark.worker_reached)
        self._next_rounds(2)
        deployment.check()

    def _driver(self, deployment: Deployment, step: Step) -> None:
        """The driver of the tiering service dies; the next one goes on."""
        spark = self._service()
        deployment.gate.open()
        self._next_rounds()
        if step.point == "random":
            self._wait(0.0, 1.5)
            hit = True
        else:
            spark.arm(step.point)
            hit = wait_until(lambda: not spark.alive, SPARK_SECONDS)
        self._count(f"Spark driver: {step.point}", hit)
        spark.remember_family()
        spark.kill()
        spark.disarm()
        deployment.check()
        spark.start(deployment.server.uri, list(LAKE_TABLES))

    def _beside(self, deployment: Deployment, step: Step) -> None:
        """The server dies while the service does rounds."""
        deployment.gate.open()
        self._next_rounds()
        self._wait(0.0, 1.5)
        deployment.server.kill()
        self._count("server beside Spark", True)
        deployment.restart()
        self._next_rounds()
        deployment.check()

    def _catch_up(self, deployment: Deployment) -> None:
        """With nothing written any more the service brings everything to the lake."""
        deployment.gate.shut()

        def tiered() -> bool:
            lags = [deployment.tables[n].status()["lag_rows"].to_pylist() for n in LAKE_TABLES]
            return not any(lag for table in lags for lag in table)

        require(wait_until(tiered, SPARK_SECONDS), f"the service does not catch up: {self._service().errors[-3000:]}")


@contextlib.contextmanager
def _exclusive_lock(database: Path) -> Iterator[None]:
    """Nobody else can read or write an SQLite database meanwhile."""
    db = sqlite3.connect(database, isolation_level=None, timeout=30)
    try:
        db.execute("begin exclusive")
        yield
    finally:
        db.rollback()
        db.close()


def _tasks_of(point: str) -> list[Task]:
    """What a process is asked for, again and again, until it comes to a point."""
    if point.startswith(("compact.", "expire.")):
        return ["tier", "maintain"]
    return ["tier", "clean"] if point.startswith("orphans.") else ["tier"]


def missed_points(counts: Counts) -> list[str]:
    """Named points that no kill of a full run was at."""
    expected = {
        *points.SEGMENT, *points.CHECKPOINT, *points.TRIM, *points.REQUESTS, *points.CREATE_AND_DROP, *points.STOP,
        *points.RECOVERY, *points.RECOVERY_AFTER, *points.ROUND, *points.COMPACTION, *points.EXPIRY,
        *points.CLEAN_UP_AFTER, *(str(s) for s in (*change_deck(), *publish_deck(), *stream_deck(), *layers_deck())),
        *(f"Spark worker: {p}" for p in points.WORKER),
    }  # fmt: skip
    return sorted(expected - set(counts.kills))
