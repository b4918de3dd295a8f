"""Tiering services of a simulated deployment: the real queue in its real shell, over tables that the network reaches.

A service tiers its tables until it is killed. Those that run at the same time share them as the server says, or fence
each other, table by table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

from tests.simulation.deployment import Deployment
from tests.simulation.history import require
from tests.simulation.network import NetworkEndpoint

from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.errors import (
    ClosedError,
    CommitConflictError,
    CommitUnknownError,
    CorruptionError,
    FencedError,
    LakeheadError,
    LakeStateError,
    OutcomeUnknownError,
    SchemaChangedError,
    TableNotFoundError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.lake.marks import next_epoch
from lakehead.protocol import messages as m
from lakehead.protocol.tiering import AskTieringWork, TieredTable, TieringWork
from lakehead.testing.lake import MemoryLake
from lakehead.tiering.commit import CommitResult
from lakehead.tiering.compaction import compact
from lakehead.tiering.expiry import expire
from lakehead.tiering.expiry_plan import Retention
from lakehead.tiering.queue import FoundTable, Looked, TieringQueue
from lakehead.tiering.round import run_round
from lakehead.tiering.service import TieringService
from lakehead.types import TablePath


def tier(deployment: Deployment, name: str) -> None:
    """Run a tiering service that begins at some time and soon tries again what failed."""
    # Those that begin at the same time take the same epoch, and fence nobody.
    deployment.scheduler.sleep(deployment.draws.random() * 0.5)
    queue = functools.partial(
        TieringQueue,
        turns_at_once=deployment.draws.choice([1, 3]),
        look_seconds=0.2,
        retry_seconds=(0.05, 0.4),
        maintenance_rounds=3,
    )
    TieringService(SimulatedTables(deployment, name), deployment.env, make_queue=queue).run()


@dataclasses.dataclass
class _Turn:
    """What a service does with one table; a round and maintenance of one table may run at once, each with the
    definition that it began with."""

    table_id: str
    client: TableHandle


class SimulatedTables:
    """All tables of a deployment as one service reaches them; implements `TieredTables`."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self.deployment = deployment
        self.name = name
        self._endpoint = NetworkEndpoint(deployment.network, name)
        self._job_id = deployment.env.randomness.uuid_hex()
        # Some ask nobody which tables are theirs, as services of another server would.
        self._shares = deployment.draws.random() < 0.5
        self._asked = 0
        self._clients: dict[str, TableHandle] = {}
        self._epochs: dict[str, int] = {}
        self._lost: set[str] = set()
        self._fenced: set[str] = set()  # of those lost, that the queue knows of

    def note(self, what: str, detail: object = "") -> None:
        self.deployment.note(self.name, what, detail)

    def open(self) -> None:
        """See `TieredTables.open`."""

    def close(self) -> None:
        """See `TieredTables.close`."""

    def look(self, has: frozenset[str], without: frozenset[str]) -> Looked:
        """See `TieredTables.look`."""
        with self.deployment.scheduler.judging():
            try:
                found = [t for t in self._ask(has, without).tables if self._look_up(t)]
            except LakeheadError as e:
                self._require_expected(e)
                self.note("not looked", type(e).__name__)
                # A server that stops says so to its clients as one that is away.
                raise UnavailableError(str(e)) from e
        names = {t.table_id for t in found}
        for table_id in self._epochs.keys() - names:
            del self._epochs[table_id]
        self._fenced = (self._fenced | self._lost) & without
        self._lost -= self._fenced
        return Looked(tuple(FoundTable(t.table_id, t.name, t.freshness_ms / 1000, t.maintained, t.end) for t in found))

    def _ask(self, has: frozenset[str], without: frozenset[str]) -> TieringWork:
        self._asked += 1
        request = AskTieringWork(
            job_id=self._job_id if self._shares else "",
            name=self.name,
            number=self._asked,
            tables=None,
            has=sorted(has),
            without=sorted(without),
        )
        return self._endpoint.call(request)[0]

    def _look_up(self, table: TieredTable) -> bool:
        """Whether there still is one under its name, of which a handle is made."""
        if table.table_id not in self._clients:
            path = TablePath.parse(table.name)
            try:
                reply, _ = self._endpoint.call(m.GetTable(database=path.database, table=path.table))
            except TableNotFoundError:
                return False
            desc = reply.info.descriptor()
            if desc.table_id != table.table_id:
                return False
            self._clients[desc.table_id] = TableHandle(desc, OneServer(self._endpoint), self.deployment.env)
        return True

    def run_round(self, table_id: str, records_max: int) -> CommitResult:
        """See `TieredTables.run_round`."""
        with self._turn(table_id, "round") as turn:
            return self._round(turn, records_max)

    def maintain(self, table_id: str) -> bool:
        """See `TieredTables.maintain`."""
        with self._turn(table_id, "maintenance") as turn:
            d, lake = self.deployment, self.deployment.lakes.by_table[table_id]
            client, table = self._opened(turn)
            done = compact(table, client.desc, d.env, epoch=self._epoch(table_id, table))
            kept = Retention(keep=d.draws.randint(1, 5), older_than_us=0)
            expired = expire(table, kept, clock=d.env.clock, in_use=lake.in_use)
            lake.inspect()
            self.note("maintenance", (done.files_before, done.files_after, expired.snapshots, expired.files))
            return done.more

    @contextlib.contextmanager
    def _turn(self, table_id: str, what: str) -> Iterator[_Turn]:
        """Judge what a service does with one table, and what goes wrong with it."""
        with self.deployment.scheduler.judging():
            require(table_id not in self._fenced, f"{self.name} goes on with a table that it lost")
            turn = _Turn(table_id, self._clients[table_id])
            try:
                yield turn
            except LakeheadError as e:
                self._require_expected(e, turn)
                if isinstance(e, TieringFencedError):
                    self._lost.add(table_id)
                self.note(f"{what} failed", type(e).__name__)
                raise

    def _opened(self, turn: _Turn) -> tuple[TableHandle, MemoryLake]:
        """A table under the definition that it has now, with its lake, once that has it, too."""
        lake = self.deployment.lakes.by_table[turn.table_id]
        client = turn.client = self._clients[turn.table_id] = turn.client.now()
        client.lake()
        lake.release()
        return client, lake.table.under(client.desc)

    def _epoch(self, table_id: str, table: MemoryLake) -> int:
        """The one that this service has taken for a table."""
        if table_id not in self._epochs:
            self._epochs.setdefault(table_id, next_epoch(table.load()))
        return self._epochs[table_id]

    def _round(self, turn: _Turn, records_max: int) -> CommitResult:
        d, lake = self.deployment, self.deployment.lakes.by_table[turn.table_id]
        client, table = self._opened(turn)
        epoch = self._epoch(turn.table_id, table)
        round_id = d.env.randomness.uuid_hex()
        try:
            result = run_round(
                table,
                client.desc,
                client.log,
                d.env,
                epoch=epoch,
                round_id=round_id,
                rows_per_task=d.draws.choice([5, 1000]),
                records_max=d.draws.choice([7, records_max]),
            )
        except (CommitUnknownError, SchemaChangedError):
            raise
        except LakeheadError:
            lake.refused(round_id)
            raise
        if result.snapshot_id is not None:
            require(lake.has_landed(round_id), f"{self.name}: a round was said to have landed, and has not")
            self.note("round", (result.rows, result.deletes, [(str(k), o) for k, o in result.offsets.items()]))
            client.report_tiered()
        return result

    def _require_expected(self, e: LakeheadError, turn: _Turn | None = None) -> None:
        """Fail the run when something went wrong that nothing in the simulation explains."""
        d = self.deployment
        expected: tuple[type[LakeheadError], ...] = (UnavailableError, OutcomeUnknownError, ClosedError)
        if d.tells_damage:
            expected = (*expected, CorruptionError)
        if d.tells_second_owner:
            expected = (*expected, FencedError)
        if turn is not None:
            expected = (*expected, CommitConflictError, CommitUnknownError, TieringFencedError)
            if turn.client.desc.schema_id < d.newest_schema(turn.table_id):
                expected = (*expected, SchemaChangedError)
            if d.lakes.by_table[turn.table_id].table.is_dropped:
                expected = (*expected, TableNotFoundError, LakeStateError)
        require(isinstance(e, expected), f"{self.name} meets {type(e).__name__}: {e}")
