"""Users of a simulated deployment that do what few do: a writer that sends other rows under a number it used before,
and one that drops a table under its users and creates it again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from tests.simulation.deployment import Deployment
from tests.simulation.history import require
from tests.simulation.scheduler import Task
from tests.simulation.subscriber import Subscriber
from tests.simulation.workload import (
    KEYED_SCHEMA,
    LOG_SCHEMA,
    Actor,
    AnonymousWriter,
    NamedWriter,
    Reader,
    Source,
)

from lakehead.client.batch_writer import BatchWriter, writer_bytes
from lakehead.client.routes import OneServer
from lakehead.config import TableProperties
from lakehead.errors import (
    LakeStateError,
    SequenceConflictError,
    SequenceGapError,
    TableNotFoundError,
    UnavailableError,
    WriterFencedError,
)
from lakehead.protocol import messages as m
from lakehead.types import Schemas, TableDescriptor, TablePath

_VARIANTS = 3


class DivergentWriter(Actor):
    """A named writer whose source does not give the same rows twice. What it sends under a number that landed, in any
    tablet, is acknowledged when it is what landed, and refused otherwise."""

    def __init__(self, deployment: Deployment, desc: TableDescriptor, name: str) -> None:
        super().__init__(deployment, desc, name)
        self._sources = [Source(desc, f"{name}{variant}") for variant in range(_VARIANTS)]
        deployment.history.divergent.add(writer_bytes(name))

    def run(self, batches: int) -> None:
        """Until the last batch is acknowledged."""
        while True:
            self.think(0.1)
            try:
                writer = self.client.writers.named(self.name)
                if writer.acked_through >= 0 and self.draws.random() < 0.5:
                    self._send(self._before(writer), writer.acked_through)
                    continue
                for n in range(writer.acked_through + 1, batches):
                    self._send(writer, n)
                    if n < batches - 1 and self.draws.random() < 0.4:
                        break
                else:
                    return
            except self.expected as e:
                self.note("writer failed", type(e).__name__)
            except (SequenceGapError, SequenceConflictError, WriterFencedError) as e:
                self.note("writer refused", type(e).__name__)

    def _before(self, writer: BatchWriter) -> BatchWriter:
        """One that goes on too early, at the last batch that is acknowledged."""
        again = BatchWriter(
            self.desc,
            OneServer(self.endpoint),
            self.deployment.clock,
            writer_id=writer_bytes(self.name),
            epoch=writer._epoch,
            last_sequence=writer.acked_through - 1,
        )
        again._previous = {k: n for k, n in writer._previous.items() if n < writer.acked_through}
        return again

    def _send(self, writer: BatchWriter, n: int) -> None:
        history, number = self.deployment.history, (writer_bytes(self.name), n)
        self.think()
        cuts = sum(t.cuts for t in history.of(self.desc.table_id))
        write = writer.prepare(*self.draws.choice(self._sources).batch(n))
        try:
            writer.send(write)
        except SequenceConflictError:
            landed = history.landed(self.desc.table_id, number)
            same = landed is not None and history.version(write.request, write.bodies) in landed
            calm = cuts == sum(t.cuts for t in history.of(self.desc.table_id))
            require(not (same and calm), f"{self.name}: batch {n} is refused as another one than itself")
            raise
        self.note("divergent write", n)


class Dropper:
    """Creates a table, lets it be used, drops it, and creates it again under the same name.

    Attributes:
        gone: tables that are dropped, of which nothing may be left.
    """

    def __init__(self, deployment: Deployment, spawn: Callable[[str, Callable[[], object]], Task]) -> None:
        self.deployment = deployment
        self.gone: list[str] = []
        self._spawn = spawn
        self._dropping: set[str] = set()

    def run(self, times: int) -> None:
        d = self.deployment
        for turn in range(times):
            desc = self._create(keyed=d.draws.random() < 0.5)
            users = self._use(desc, turn)
            d.scheduler.sleep(d.draws.random() * 0.5)
            self._drop(desc)
            while not all(u.done for u in users):
                d.scheduler.sleep(0.1)

    def _ask(self, request: m.Request[m.R]) -> m.R:
        """Until there is an answer. No request of these arrives again later: tables are dropped by name."""
        while True:
            self.deployment.scheduler.sleep(0.01)
            try:
                reply, _ = self.deployment.network.deliver(request, [])
                return reply
            except UnavailableError:
                self.deployment.note("dropper", "no answer", type(request).__name__)

    def _create(self, *, keyed: bool) -> TableDescriptor:
        d = self.deployment
        schema, key = (KEYED_SCHEMA, ("p", "k")) if keyed else (LOG_SCHEMA, ())
        lake = "iceberg" if d.draws.random() < 0.5 else None
        properties = TableProperties(segment_bytes=1024, hot_retention_ms=20, log_ttl_ms=20, freshness_ms=50)
        asked = TableDescriptor(
            "", TablePath("sim", "temp"), Schemas.only(schema), key, (), key[-1:], 1, lake, properties
        )
        reply = self._ask(m.CreateTable(info=m.TableInfo.of(asked), if_not_exists=True))
        desc = reply.info.descriptor()
        require(desc.table_id not in self.gone, "a table that was dropped is there again")
        d.took(desc)
        d.note("dropper", "table created", "with a lake" if lake else "")
        return desc

    def _use(self, desc: TableDescriptor, turn: int) -> list[Task]:
        d, name = self.deployment, f"temp{turn}"
        named = NamedWriter(d, desc, f"{name}-etl", "temp-etl")
        users: list[tuple[str, Callable[[], object]]] = [
            (f"{name}-w", functools.partial(AnonymousWriter(d, desc, f"{name}-w").run, 20)),
            (f"{name}-etl", functools.partial(named.run, 20)),
            (f"{name}-r", Reader(d, desc, f"{name}-r").run),
            (f"{name}-s", Subscriber(d, desc, f"{name}-s").run),
        ]
        return [self._spawn(who, functools.partial(self._until_dropped, desc, run)) for who, run in users]

    def _until_dropped(self, desc: TableDescriptor, run: Callable[[], object]) -> None:
        try:
            run()
        except (TableNotFoundError, LakeStateError):
            require(desc.table_id in self._dropping, f"{desc.path} is gone, and nobody dropped it")

    def _drop(self, desc: TableDescriptor) -> None:
        self._dropping.add(desc.table_id)
        path = desc.path
        with contextlib.suppress(TableNotFoundError):  # an earlier attempt, whose answer was lost, has dropped it
            self._ask(m.DropTable(database=path.database, table=path.table, purge=False))
        self.gone.append(desc.table_id)
        self.deployment.note("dropper", "table dropped")

    def leftovers(self) -> list[str]:
        """Files of dropped tables; none after the server was started once more."""
        return [p for p in self.deployment.disk.paths() if any(f"-{table[:8]}/" in p for table in self.gone)]
