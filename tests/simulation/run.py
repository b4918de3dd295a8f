"""One simulation from its seed: who does what, what goes wrong, and what must hold in the end."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.altering import Alterer, CurrentWriter, Renamer, Truncator
from tests.simulation.deployment import Deployment
from tests.simulation.disk import DiskFaults
from tests.simulation.history import require
from tests.simulation.lake import LakeFaults, SimulatedLake
from tests.simulation.lines import Lines
from tests.simulation.network import NetworkFaults
from tests.simulation.owners import exchange_owners, open_copy
from tests.simulation.rare import DivergentWriter, Dropper
from tests.simulation.scheduler import Process, Task
from tests.simulation.subscriber import Subscriber
from tests.simulation.tiering import tier
from tests.simulation.workload import (
    KEYED_SCHEMA,
    LOG_SCHEMA,
    AnonymousWriter,
    NamedWriter,
    Reader,
    UnionReader,
)

from lakehead.client.batch_writer import writer_bytes
from lakehead.client.table import TableHandle
from lakehead.config import TableProperties
from lakehead.log.checkpoint import CheckpointPolicy
from lakehead.types import TableDescriptor

RARE_EVERY = 10
"""Of so many seeds one has each of the rare kinds: see `Simulation._add_rare`; in 5 tasks are switched at lines."""


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
        run = Simulation(seed)
        failure = run.carry_out()
        trace = run.deployment.trace
        return Outcome(seed, dict(sorted(trace.counts.items())), trace.digest, failure, tuple(trace.last))
    finally:
        if collecting:
            gc.enable()


def simulate_quietly(seed: int) -> Outcome:
    """`simulate` without the warnings of code that meets faults all the time."""
    logging.getLogger("lakehead").setLevel(logging.CRITICAL)
    return simulate(seed)


class Simulation:
    """The cast of one run."""

    def __init__(self, seed: int) -> None:
        self.deployment = Deployment(seed)
        self.draws = self.deployment.draws
        self.deployment.checkpoint_policy = CheckpointPolicy(log_bytes=self.draws.choice([1000, 4000]))
        self._writers: list[Task] = []
        self._subscribers: list[Subscriber] = []
        self._sources: dict[str, int] = {}
        self._tiering: list[Task] = []
        self._lines = Lines(self.deployment.scheduler, seed + 3, every=100)
        self._seed = seed
        self._troubles: list[Callable[[], None]] = []
        self._dropper: Dropper | None = None
        if seed % RARE_EVERY == 5:
            self.deployment.scheduler.on_task = self._lines.watch

    def carry_out(self) -> str | None:
        """Run to the end; returns what went wrong."""
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
        d.disk.faults = DiskFaults(sync_fails=draws.choice([0.0, 0.0, 0.03]), refused=draws.choice([0.0, 0.02]))
        for desc in tables:
            self._populate(desc)
        for _ in range(draws.randint(1, 3)):
            self._start_tiering()
        if draws.random() < 0.4:
            renamer = Renamer(d, tables)
            self._writers.append(self._spawn("renamer", functools.partial(renamer.run, draws.randint(1, 6))))
        self._add_rare(tables)
        self._trouble()
        self._heal()
        for desc in tables:
            self._check_all(desc)
        if self._dropper is not None:
            left = self._dropper.leftovers()
            require(not left, f"dropped tables have left {left}")

    def _create(self, name: str, *, keyed: bool) -> TableDescriptor:
        draws = self.draws
        properties = TableProperties(
            durability=draws.choice(["sync", "sync", "os"]),
            segment_bytes=draws.choice([1024, 1024, 2000, 8000]),
            compression=draws.choice(["none", "none", "none", "lz4"]),
            hot_retention_ms=draws.choice([0, 20, 200]),
            log_ttl_ms=draws.choice([20, 200, None]),
            freshness_ms=draws.choice([50, 200]),
        )
        schema, key = (KEYED_SCHEMA, ("p", "k")) if keyed else (LOG_SCHEMA, ())
        return self.deployment.create_table(
            name,
            schema,
            key,
            draws.randint(1, 2),
            properties,
            partition_by=("p",) if keyed and draws.random() < 0.3 else (),
            lake=draws.random() < 0.7,
        )

    def _add_rare(self, tables: list[TableDescriptor]) -> None:
        """Who and what only some seeds have."""
        d, draws = self.deployment, self.draws
        match self._seed % RARE_EVERY:
            case 1:
                for desc in tables:
                    other = DivergentWriter(d, desc, f"{desc.path.table}-divergent")
                    self._writers.append(self._spawn(other.name, functools.partial(other.run, draws.randint(3, 8))))
            case 3:
                d.network.faults.silent = 0.03
                self._troubles += [self._silence, self._silence]
            case 7:
                dropper = self._dropper = Dropper(d, self._spawn)
                self._writers.append(self._spawn("dropper", functools.partial(dropper.run, draws.randint(2, 4))))
            case 9:
                self._troubles += [self._second_owner, self._copy] * 4

    def _silence(self) -> None:
        """Nothing gets through for a while, and nobody is told."""
        d = self.deployment
        d.network.silent_until_us = d.scheduler.now_us + self.draws.randint(100_000, 3_000_000)
        d.note("network", "silent")
        self._wait(3.0)

    def _populate(self, desc: TableDescriptor) -> None:
        d, table = self.deployment, desc.path.table
        together: TableHandle | None = None
        for i in range(self.draws.randint(1, 3)):
            writer = AnonymousWriter(d, desc, f"{table}-w{i}")
            if not desc.keyed:  # threads of one process, whose rows may go together
                writer.client = together = together or writer.client
            batches = self.draws.randint(3, 12)
            self._writers.append(self._spawn(writer.name, functools.partial(writer.run, batches)))
        batches = self.draws.randint(3, 10)
        for i in range(self.draws.randint(1, 2)):
            named = NamedWriter(d, desc, f"{table}-etl{i}", f"{table}-etl")
            self._writers.append(self._spawn(named.name, functools.partial(named.run, batches)))
        self._sources[desc.table_id] = batches
        for i in range(self.draws.randint(1, 2)):
            reader = Reader(d, desc, f"{table}-r{i}")
            self._spawn(reader.name, reader.run)
        subscriber = Subscriber(d, desc, f"{table}-s")
        self._subscribers.append(subscriber)
        self._spawn(subscriber.name, subscriber.run)
        if self.draws.random() < 0.5:
            self._alter(desc)
        if (desc.keyed or desc.lake is None) and self.draws.random() < 0.4:
            truncator = Truncator(d, desc, f"{table}-t")
            self._writers.append(
                self._spawn(truncator.name, functools.partial(truncator.run, self.draws.randint(1, 3)))
            )
        if desc.lake is not None:
            lake = d.lakes.by_table[desc.table_id]
            chance = self.draws.choice([0.0, 0.1, 0.4, 0.8])
            lake.faults = LakeFaults(commit=chance, unreachable=chance / 4)
            self._spawn(f"{table}-u", UnionReader(d, desc, f"{table}-u").run)
            if self.draws.random() < 0.5:
                self._spawn(f"{table}-e", functools.partial(self._run_engine, lake))

    def _alter(self, desc: TableDescriptor) -> None:
        """Have the table altered while all others use it, who know its first definition or go with it."""
        d, name = self.deployment, desc.path.table
        alterer, writer = Alterer(d, desc, f"{name}-a"), CurrentWriter(d, desc, f"{name}-c")
        self._writers.append(self._spawn(alterer.name, functools.partial(alterer.run, self.draws.randint(1, 8))))
        self._writers.append(self._spawn(writer.name, functools.partial(writer.run, self.draws.randint(3, 10))))

    def _start_tiering(self) -> None:
        name = f"tiering{len(self._tiering)}"
        self._tiering.append(self._spawn(name, functools.partial(tier, self.deployment, name)))

    def _spawn(self, name: str, body: Callable[[], object]) -> Task:
        def judged() -> None:
            with self.deployment.scheduler.judging():
                body()

        return self.deployment.scheduler.spawn(name, Process(name), judged)

    # ---- what goes wrong ----------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        troubles = [self._kill, self._power, self._stop, self._clock, self._full, self._flip, self._tiering_killed]
        troubles += self._troubles
        for _ in range(self.draws.randint(0, 8)):
            self._wait(self.draws.choice([0.02, 0.3]))
            self.draws.choice([*troubles, self._flip, self._engine])()

    def _wait(self, seconds: float) -> None:
        self.deployment.scheduler.sleep(self.draws.random() * seconds)

    def _kill(self) -> None:
        self.deployment.kill()
        self._start_again()

    def _power(self) -> None:
        self.deployment.cut_power()
        self._start_again()

    def _stop(self) -> None:
        self.deployment.stop()
        self._start_again()

    def _start_again(self) -> None:
        if self.draws.random() < 0.3:
            self._clock()
        self._wait(0.1)
        self.deployment.start()

    def _second_owner(self) -> None:
        exchange_owners(self.deployment, lambda: self._wait(0.3))

    def _copy(self) -> None:
        """After a power cut or a stop in good order, somebody opens a copy."""
        d = self.deployment
        self.draws.choice([d.cut_power, d.stop])()
        open_copy(d)
        self._start_again()

    def _clock(self) -> None:
        clock = self.deployment.clock
        clock.error_us = self.draws.randint(-3_000_000, 3_000_000)
        self.deployment.note("clock", "jump", clock.error_us)

    def _full(self) -> None:
        d = self.deployment
        d.disk.full = True
        d.note("disk", "full")
        self._wait(0.3)
        d.disk.full = False
        d.note("disk", "has room")

    def _flip(self) -> None:
        d = self.deployment
        d.kill()
        if d.damage():
            d.start()
            self._wait(0.3)
            d.kill()
            d.repair()
        d.start()

    def _tiering_killed(self) -> None:
        """The newest service is killed, wherever it is, and another one started."""
        self.deployment.scheduler.kill(self._tiering[-1].home)
        self.deployment.note("tiering", "killed")
        self._start_tiering()

    def _engine(self) -> None:
        lakes = list(self.deployment.lakes.by_table.values())
        if lakes:
            self.deployment.note("engine", self.draws.choice(lakes).disturb())

    def _run_engine(self, lake: SimulatedLake) -> None:
        """Another engine that is at it all the time."""
        while not self.deployment.calm:
            self._wait(0.1)
            self.deployment.note("engine", lake.disturb())

    # ---- what must hold in the end ------------------------------------------------------------------------------

    def _heal(self) -> None:
        """Nothing goes wrong any more: all writers must get through."""
        d = self.deployment
        d.network.faults, d.disk.faults = NetworkFaults(), DiskFaults()
        d.network.silent_until_us = 0
        for lake in d.lakes.by_table.values():
            lake.faults = LakeFaults()
        d.note("run", "healed")
        self._kill()
        self._until(lambda: [w.name for w in self._writers if not w.done], "writers have not come through")
        d.calm = True

    @staticmethod
    def _finish(writer: NamedWriter, batches: int) -> None:
        # A late request of a predecessor may still open the writer, and so fence this one.
        while not writer.run(batches):
            pass

    def _until(self, missing: Callable[[], list[str]], what: str) -> None:
        """Wait until nothing is missing, a minute at most."""
        scheduler = self.deployment.scheduler
        deadline = scheduler.now_us + 60_000_000
        while found := missing():
            require(scheduler.now_us < deadline, f"a minute after the last fault {what}: {found}")
            scheduler.sleep(0.2)

    def _check_all(self, desc: TableDescriptor) -> None:
        d, name = self.deployment, desc.path.table
        final = NamedWriter(d, desc, f"{name}-last", f"{name}-etl")
        last = self._spawn(final.name, functools.partial(self._finish, final, self._sources[desc.table_id]))
        self._until(lambda: [] if last.done else [final.name], "a named writer has no successor")
        if not final.lossy():
            missing = d.history.unwritten(writer_bytes(f"{name}-etl"))
            require(not missing, f"batches of a named writer are missing: {missing}")
        followers = [s for s in self._subscribers if s.desc is desc]
        self._until(lambda: [s.name for s in followers if not s.has_all()], "subscribers were not pushed all")
        if desc.lake is not None:
            lake = d.lakes.by_table[desc.table_id]
            self._start_tiering()
            tablets = list(d.history.of(desc.table_id))
            self._until(
                lambda: [t.name for t in tablets if lake.offsets().get(t.key, 0) < t.end], "the lake does not have all"
            )
        for again in (None, self._stop, self._power):
            if again is not None:
                again()
            Reader(d, desc, f"{name}-check").whole()
            if desc.lake is not None:
                UnionReader(d, desc, f"{name}-check").whole()
