"""Tiering services of a simulated deployment: the real queue in its real shell, over tables that the network reaches.

A service tiers all tables until it is killed. Those that run at the same time fence each other, table by table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

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
from lakehead.testing.lake import MemoryLake
from lakehead.tiering.commit import CommitResult
from lakehead.tiering.compaction import compact
from lakehead.tiering.expiry import expire
from lakehead.tiering.expiry_plan import Retention
from lakehead.tiering.queue import Listed, ListedTable, TieringQueue
from lakehead.tiering.round import run_round
from lakehead.tiering.service import TieringService
from lakehead.types import TablePath, TabletKey


def tier(deployment: Deployment, name: str) -> None:
    """Run a tiering service that begins at some time and soon tries again what failed."""
    # Those that begin at the same time take the same epoch, and fence nobody.
    deployment.scheduler.sleep(deployment.draws.random() * 0.5)
    queue = functools.partial(TieringQueue, relist_seconds=0.2, retry_seconds=(0.05, 0.4), maintenance_rounds=3)
    TieringService(SimulatedTables(deployment, name), deployment.env, make_queue=queue).run()


class SimulatedTables:
    """All tables of a deployment as one service reaches them; implements `TieredTables`."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self.deployment = deployment
        self.name = name
        self._endpoint = NetworkEndpoint(deployment.network, name)
        self._clients: dict[str, TableHandle] = {}
        self._epochs: dict[str, int] = {}
        self._fenced: set[str] = set()

    def note(self, what: str, detail: object = "") -> None:
        self.deployment.note(self.name, what, detail)

    def open(self) -> None:
        """See `TieredTables.open`."""

    def close(self) -> None:
        """See `TieredTables.close`."""

    def list(self, settled: frozenset[str]) -> Listed:
        """See `TieredTables.list`."""
        with self.deployment.scheduler.judging():
            try:
                reply, _ = self._endpoint.call(m.ListTables(database=None))
                found = [self._look_up(name) for name in reply.names if name not in settled]
            except LakeheadError as e:
                self._require_expected(e)
                self.note("not listed", type(e).__name__)
                # A server that stops says so to its clients as one that is away.
                raise UnavailableError(str(e)) from e
        return Listed(frozenset(reply.names), tuple(table for table in found if table is not None))

    def _look_up(self, name: str) -> ListedTable | None:
        path = TablePath.parse(name)
        try:
            reply, _ = self._endpoint.call(m.GetTable(database=path.database, table=path.table))
        except TableNotFoundError:
            return None
        desc = reply.info.descriptor()
        if desc.table_id not in self._clients:
            self._clients[desc.table_id] = TableHandle(desc, OneServer(self._endpoint), self.deployment.env)
        return ListedTable(
            desc.table_id, name, desc.properties.freshness_ms / 1000, desc.lake is not None, maintained=True
        )

    def watermarks(self, table_id: str) -> Mapping[TabletKey, int]:
        """See `TieredTables.watermarks`."""
        with self._turn(table_id, "watermarks"):
            return {t.key: t.high_watermark for t in self._clients[table_id].log.tablets()}

    def run_round(self, table_id: str, records_max: int) -> CommitResult:
        """See `TieredTables.run_round`."""
        with self._turn(table_id, "round"):
            return self._round(table_id, records_max)

    def maintain(self, table_id: str) -> bool:
        """See `TieredTables.maintain`."""
        with self._turn(table_id, "maintenance"):
            d, lake = self.deployment, self.deployment.lakes.by_table[table_id]
            client, table = self._opened(table_id)
            done = compact(table, client.desc, d.env, epoch=self._epoch(table_id, table))
            kept = Retention(keep=d.draws.randint(1, 5), older_than_us=0)
            expired = expire(table, kept, clock=d.env.clock, in_use=lake.in_use)
            lake.inspect()
            self.note("maintenance", (done.files_before, done.files_after, expired.snapshots, expired.files))
            return done.more

    @contextlib.contextmanager
    def _turn(self, table_id: str, what: str) -> Iterator[None]:
        """Judge what a service does with one table, and what goes wrong with it."""
        with self.deployment.scheduler.judging():
            require(table_id not in self._fenced, f"{self.name} goes on with a table that it lost")
            try:
                yield
            except LakeheadError as e:
                self._require_expected(e, table_id)
                if isinstance(e, TieringFencedError):
                    self._fenced.add(table_id)
                self.note(f"{what} failed", type(e).__name__)
                raise

    def _opened(self, table_id: str) -> tuple[TableHandle, MemoryLake]:
        """A table under the definition that it has now, with its lake, once that has it, too."""
        lake = self.deployment.lakes.by_table[table_id]
        client = self._clients[table_id] = self._clients[table_id].now()
        client.lake()
        lake.release()
        return client, lake.table.under(client.desc)

    def _epoch(self, table_id: str, table: MemoryLake) -> int:
        """The one that this service has taken for a table."""
        if table_id not in self._epochs:
            self._epochs[table_id] = next_epoch(table.load())
        return self._epochs[table_id]

    def _round(self, table_id: str, records_max: int) -> CommitResult:
        d, lake = self.deployment, self.deployment.lakes.by_table[table_id]
        client, table = self._opened(table_id)
        epoch = self._epoch(table_id, table)
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

    def _require_expected(self, e: LakeheadError, table_id: str | None = None) -> None:
        """Fail the run when something went wrong that nothing in the simulation explains."""
        d = self.deployment
        expected: tuple[type[LakeheadError], ...] = (UnavailableError, OutcomeUnknownError, ClosedError)
        if d.tells_damage:
            expected = (*expected, CorruptionError)
        if d.tells_second_owner:
            expected = (*expected, FencedError)
        if table_id is not None:
            expected = (*expected, CommitConflictError, CommitUnknownError, TieringFencedError)
            if self._clients[table_id].desc.schema_id < d.newest_schema(table_id):
                expected = (*expected, SchemaChangedError)
            if d.lakes.by_table[table_id].table.is_dropped:
                expected = (*expected, TableNotFoundError, LakeStateError)
        require(isinstance(e, expected), f"{self.name} meets {type(e).__name__}: {e}")
