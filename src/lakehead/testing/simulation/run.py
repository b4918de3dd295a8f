"""One simulation from its seed: who does what, what goes wrong, and what must hold in the end."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from unittest import mock

from lakehead.client.writer import writer_bytes
from lakehead.config import TableProperties
from lakehead.log import tablet as log_tablet
from lakehead.testing.simulation.deployment import Deployment, scratch_folder
from lakehead.testing.simulation.disk import DiskFaults
from lakehead.testing.simulation.history import require
from lakehead.testing.simulation.lake import LakeFaults, simulated_views
from lakehead.testing.simulation.network import NetworkFaults
from lakehead.testing.simulation.scheduler import Process, Task
from lakehead.testing.simulation.threads import simulated_threads
from lakehead.testing.simulation.workload import (
    KEYED_SCHEMA,
    LOG_SCHEMA,
    AnonymousWriter,
    NamedWriter,
    Reader,
    Subscriber,
    TieringService,
    UnionReader,
)
from lakehead.types import TableDescriptor


@dataclass(frozen=True)
class Outcome:
    """What a run came to; equal for equal seeds."""

    seed: int
    counts: dict[str, int]
    digest: str
    failure: str | None
    events: tuple[str, ...]


def simulate(seed: int) -> Outcome:
    """Run one seed."""
    collecting = gc.isenabled()
    gc.disable()  # destructors would run at times that the seed does not decide
    try:
        with scratch_folder() as folder:
            run = Simulation(seed, folder)
            failure = run.carry_out()
            trace = run.deployment.trace
            return Outcome(seed, dict(sorted(trace.counts.items())), trace.digest, failure, tuple(trace.last))
    finally:
        if collecting:
            gc.enable()


class Simulation:
    """The cast of one run."""

    def __init__(self, seed: int, folder: str) -> None:
        self.deployment = Deployment(seed, folder)
        self.draws = self.deployment.draws
        self._writers: list[Task] = []
        self._subscribers: list[Subscriber] = []
        self._sources: dict[str, int] = {}
        self._tiering: dict[str, Task] = {}
        self._restarts = 0

    def carry_out(self) -> str | None:
        """Run to the end; returns what went wrong."""
        small = mock.patch.object(log_tablet, "CHECKPOINT_BYTES", self.draws.choice([1000, 4000]))
        with small, simulated_views(self.deployment.lakes), simulated_threads(self.deployment.scheduler):
            try:
                self.deployment.scheduler.run(self._main)
            except Exception as e:
                return f"{type(e).__name__}: {e}"
        return None

    def _main(self) -> None:
        d, draws = self.deployment, self.draws
        d.start()
        tables = [self._create("events", keyed=False), self._create("items", keyed=True)]
        d.scheduler.pause_chance = draws.choice([0.05, 0.2, 0.5])
        chance = draws.choice([0.0, 0.02, 0.1])
        d.network.faults = NetworkFaults(lost=chance, broken=chance, repeated=chance)
        d.disk.faults = DiskFaults(sync_fails=draws.choice([0.0, 0.0, 0.01]), refused=draws.choice([0.0, 0.02]))
        for desc in tables:
            self._populate(desc)
        self._trouble()
        self._heal()
        for desc in tables:
            self._check_all(desc)

    def _create(self, name: str, *, keyed: bool) -> TableDescriptor:
        draws = self.draws
        properties = TableProperties(
            durability=draws.choice(["sync", "sync", "os"]),
            segment_bytes=draws.choice([200, 600, 2000, 8000]),
            compression=draws.choice(["none", "lz4"]),
            hot_retention_ms=draws.choice([20, 200]),
            log_ttl_ms=draws.choice([20, 200, None]),
        )
        schema, key = (KEYED_SCHEMA, ("k",)) if keyed else (LOG_SCHEMA, ())
        lake = draws.random() < 0.7
        return self.deployment.create_table(name, schema, key, draws.randint(1, 2), properties, lake=lake)

    def _populate(self, desc: TableDescriptor) -> None:
        d, table = self.deployment, desc.path.table
        for i in range(self.draws.randint(1, 3)):
            writer = AnonymousWriter(d, desc, f"{table}-w{i}")
            batches = self.draws.randint(3, 12)
            self._writers.append(self._spawn(writer.name, lambda w=writer, n=batches: w.run(n)))
        batches = self.draws.randint(3, 10)
        for i in range(self.draws.randint(1, 2)):
            named = NamedWriter(d, desc, f"{table}-etl{i}", f"{table}-etl")
            self._writers.append(self._spawn(named.name, lambda w=named, n=batches: w.run(n)))
        self._sources[desc.table_id] = batches
        for i in range(self.draws.randint(1, 2)):
            reader = Reader(d, desc, f"{table}-r{i}")
            self._spawn(reader.name, reader.run)
        subscriber = Subscriber(d, desc, f"{table}-s")
        self._subscribers.append(subscriber)
        self._spawn(subscriber.name, subscriber.run)
        if desc.lake is not None:
            lake = d.lakes.by_table[desc.table_id]
            chance = self.draws.choice([0.0, 0.1, 0.4])
            lake.faults = LakeFaults(commit=chance, unreachable=chance / 4)
            self._spawn(f"{table}-u", UnionReader(d, desc, f"{table}-u").run)
            for i in range(self.draws.randint(1, 2)):
                self._start_tiering(desc, i)

    def _start_tiering(self, desc: TableDescriptor, number: int) -> None:
        service = TieringService(self.deployment, desc, f"{desc.path.table}-t{number}")
        self._tiering[desc.table_id] = self._spawn(service.name, service.run)

    def _kill_tiering(self, desc: TableDescriptor) -> None:
        """Kill the newest service of a table, wherever it is, and start another one."""
        d = self.deployment
        d.scheduler.kill(self._tiering[desc.table_id].process)
        d.note("tiering", "killed", desc.path.table)
        self._restarts += 1
        self._start_tiering(desc, 1 + self._restarts)

    def _spawn(self, name: str, body) -> Task:
        def judged() -> None:
            with self.deployment.scheduler.judging():
                body()

        return self.deployment.scheduler.spawn(name, Process(name), judged)

    def _trouble(self) -> None:
        """Crashes and restarts, until the writers are done or it has been enough."""
        d, draws = self.deployment, self.draws
        for _ in range(draws.randint(0, 8)):
            d.scheduler.sleep(draws.random() * draws.choice([0.02, 0.3]))
            what = draws.choice(["kill", "power", "stop", "clock", "full", "flip", "tiering", "lake", "lake"])
            if what == "clock":
                d.clock.error_us = draws.randint(-3_000_000, 3_000_000)
                d.note("clock", "jump", d.clock.error_us)
            elif what == "full":
                d.disk.full = True
                d.note("disk", "full")
                d.scheduler.sleep(draws.random() * 0.3)
                d.disk.full = False
                d.note("disk", "has room")
            elif what in ("tiering", "lake"):
                with_lake = [t for t in d.history.tables.values() if t.lake is not None]
                if with_lake and what == "tiering":
                    self._kill_tiering(draws.choice(with_lake))
                elif with_lake:
                    d.note("engine", d.lakes.by_table[draws.choice(with_lake).table_id].disturb())
            elif what == "flip":
                d.kill()
                if d.damage():
                    d.start()
                    d.scheduler.sleep(draws.random() * 0.3)
                    d.kill()
                    d.repair()
                d.start()
            else:
                self._restart(what)

    def _restart(self, what: str) -> None:
        d = self.deployment
        if what == "stop":
            d.stop()
        elif what == "kill":
            d.kill()
        if what == "power":
            d.cut_power()
        if self.draws.random() < 0.3:
            d.clock.error_us = self.draws.randint(-3_000_000, 3_000_000)
        d.scheduler.sleep(self.draws.random() * 0.1)
        d.start()

    def _heal(self) -> None:
        """Nothing goes wrong any more: all writers must get through."""
        d = self.deployment
        d.network.faults, d.disk.faults = NetworkFaults(), DiskFaults()
        for lake in d.lakes.by_table.values():
            lake.faults = LakeFaults()
        d.note("run", "healed")
        self._restart("kill")
        deadline = d.scheduler.now_us + 60_000_000
        while not all(w.done for w in self._writers):
            stuck = [w.name for w in self._writers if not w.done]
            require(d.scheduler.now_us < deadline, f"{stuck} still not done a minute after the last fault")
            d.scheduler.sleep(0.5)

    def _check_all(self, desc: TableDescriptor) -> None:
        d = self.deployment
        final = NamedWriter(d, desc, f"{desc.path.table}-last", f"{desc.path.table}-etl")
        while not final.run(self._sources[desc.table_id]):
            d.note("run", "take over again")
        if not final.lossy():
            missing = d.history.unwritten(writer_bytes(f"{desc.path.table}-etl"))
            require(not missing, f"batches of a named writer are missing: {missing}")
        d.scheduler.sleep(3.0)
        behind = [s.name for s in self._subscribers if s.desc is desc and not s.has_all()]
        require(not behind, f"{behind} were not pushed what there is")
        for kind in ("none", "stop", "power"):
            if kind != "none":
                self._restart(kind)
            reader = Reader(d, desc, f"{desc.path.table}-check")
            reader.whole()
            if desc.lake is not None:
                UnionReader(d, desc, f"{desc.path.table}-check").read(0.0)
