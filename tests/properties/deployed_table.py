"""A table that a state machine can break: a real service on a disk that loses power, and a lake that others commit to.

What both kinds of tables have in common: ends and restarts, the lake, checkpoints and trimming, pinned reads.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Literal
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import Transaction
from tests.altering import TYPES, Column, Row, Shape
from tests.standby import with_standby

from lakehead import LakeheadError
from lakehead.api.connection import Connection
from lakehead.api.table import Table, handle_of
from lakehead.client.batch_writer import PreparedWrite
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.config import LakeConfig, Limits, TableProperties
from lakehead.env import Env, SystemRandomness, SystemThreads
from lakehead.errors import OutcomeUnknownError, StorageError
from lakehead.format.schema import validate_definition
from lakehead.iceberg.catalog_state import CatalogLakeState
from lakehead.iceberg.data_files import LakeWriteSpec, write_data_files
from lakehead.iceberg.rowdelta import RowDelta, to_data_file
from lakehead.protocol import messages as m
from lakehead.protocol.alterations import SetProperty
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.testing.storage import FaultyStorage
from lakehead.types import OFFSET_COLUMN, Schemas, TableDescriptor, TablePath, WriteKind

Rows = list[dict[str, Any]]
Held = list[dict[int, Any]]
"""Rows as models have them: by the numbers of columns, see `Shape`."""
HOUR_US = 3_600_000_000
STEPS = {"taken": 0}
DISTURBANCES = ["tier", "compact", "expire"]
_PLAIN = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean)
COMPRESSION = st.sampled_from(["none", "lz4", "zstd"])


class ManualClock:
    """Time that passes when it is told to, and while someone sleeps."""

    def __init__(self) -> None:
        self.us = 1_700_000_000_000_000

    def now_us(self) -> int:
        self.us += 1000
        return self.us

    def monotonic(self) -> float:
        return self.us / 1e6

    def sleep(self, seconds: float) -> None:
        self.us += int(seconds * 1e6)


def in_order(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: json.dumps(row, default=str, sort_keys=True))


class Deployed(RuleBasedStateMachine):
    """A table of a service, and what both kinds of tables have in common.

    Attributes:
        schema: at the beginning.
        fixed: columns that no alter touches.
        shape: the columns as they are now.
        definitions: all that the table ever had, the one in force last.
    """

    schema: ClassVar[pa.Schema]
    fixed: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="lakehead-model-")
        self.storage = FaultyStorage()
        self.clock = ManualClock()
        self.env = Env(self.clock, self.storage, SystemRandomness(), SystemThreads())
        self.service: Service | None = None
        self.pins: list[tuple[Any, Rows]] = []
        self.sent: list[tuple[PreparedWrite, Any]] = []
        self.rounds = 0
        self.definitions: list[tuple[TableDescriptor, Shape]] = []
        # Files of several row groups: what is left out by their bounds moves the positions of what is read.
        self.row_groups = mock.patch("lakehead.iceberg.data_files.ROW_GROUP_ROWS", (4, 6))
        self.row_groups.start()

    def deploy(
        self,
        *,
        primary_key: tuple[str, ...],
        partition_by: tuple[str, ...],
        bucket_key: tuple[str, ...],
        buckets: int,
        lake: bool,
        durable: bool,
        compression: Literal["none", "lz4", "zstd"],
    ) -> None:
        self.durable = durable
        self.has_lake = lake
        self.start()
        schema, keys, partitions, bucketing = validate_definition(
            self.schema,
            primary_key=primary_key,
            partition_by=partition_by,
            bucket_key=bucket_key,
            buckets=buckets,
            limits=Limits(),
        )
        properties = TableProperties(
            durability="sync" if durable else "os",
            compression=compression,
            segment_bytes=3000,
            hot_retention_ms=3_600_000,
            log_ttl_ms=3_600_000 if primary_key else None,
        )
        desc = TableDescriptor(
            table_id="",
            path=TablePath("m", "t"),
            schemas=Schemas.only(schema),
            primary_key=keys,
            partition_by=partitions,
            bucket_key=bucketing,
            buckets=buckets,
            lake="iceberg" if lake else None,
            properties=properties,
        )
        assert self.service is not None
        LocalEndpoint(self.service).call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
        self.open()
        self.shape = Shape.of(schema)
        self.definitions.append((handle_of(self.table).desc, self.shape))

    def start(self) -> None:
        self.service = Service(
            self.folder,
            env=self.env,
            limits=Limits(lease_seconds=1e9),
            lake=CatalogLakeState(LakeConfig(), self.folder, self.clock),
            committers=with_standby,
        )

    def open(self) -> None:
        assert self.service is not None
        reply, _ = LocalEndpoint(self.service).call(m.GetTable(database="m", table="t"))
        self.table = Table(self.handle(reply.info.descriptor()))

    def handle(self, desc: TableDescriptor) -> TableHandle:
        """The table as somebody knows it who opened it under this definition."""
        assert self.service is not None
        return TableHandle(desc, OneServer(LocalEndpoint(self.service)), self.env)

    def stop(self, *, dead: bool = False) -> None:
        """Stop the service; a ``dead`` one writes nothing any more."""
        assert self.service is not None
        self.pins.clear()
        if dead:
            self.storage.before = self.refuse
            with suppress(LakeheadError):
                self.service.close()
            self.storage.before = None
        else:
            self.service.close()
        self.service = None

    @staticmethod
    def refuse(action: str, path: str) -> None:
        raise OSError(errno.EIO, f"{action} {path} by a dead process")

    # ---- what the kinds say ---------------------------------------------------------------------------------------

    def rows(self) -> Held:
        """What the table holds."""
        raise NotImplementedError

    def lake_rows(self) -> Held:
        """What its lake holds."""
        raise NotImplementedError

    def shown(self, rows: Held) -> Rows:
        """Rows as the table shows them now."""
        return [self.shape.shown(row) for row in rows]

    def hot_rows(self) -> int | None:
        """How many rows a union read takes from the log, where the model tells."""
        raise NotImplementedError

    def tiered(self) -> None:
        """All that the table holds is in the lake now."""
        raise NotImplementedError

    # ---- definitions ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 3), by_another=st.booleans(), compression=st.none() | COMPRESSION)
    def alter(self, data: st.DataObject, count: int, by_another: bool, compression: str | None) -> None:
        """Change some columns, through the table that all else is done with, which then has to find out, or another."""
        changes, shape = [], self.shape
        for _ in range(count):
            changes.append(shape.next_change(lambda s: data.draw(st.sampled_from(s)), fixed=self.fixed, types=TYPES))
            shape = shape.after(changes[-1])
        more = [] if compression is None else [SetProperty(name="compression", value=compression)]
        if by_another:
            handle = self.handle(self.definitions[-1][0]).altered([*changes, *more])
        else:
            self.refresh()
            self.table._alter([*changes, *more])
            handle = handle_of(self.table)
        self.shape = shape
        self.definitions.append((handle.desc, shape))
        assert handle.desc.schema == shape.schema

    def refresh(self) -> None:
        """Have the table know how it is defined now."""
        self.table = Table(handle_of(self.table).now())

    # ---- ends and restarts ----------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.stop()
        self.start()
        self.open()

    @rule()
    def kill(self) -> None:
        self.stop(dead=True)
        self.start()
        self.open()

    @precondition(lambda self: self.durable)
    @rule(torn_bytes=st.integers(0, 2000))
    def power_cut(self, torn_bytes: int) -> None:
        self.storage.crash(torn_bytes=torn_bytes)
        self.stop(dead=True)
        self.start()
        self.open()

    def write_and_cut_power(self, write: Any, *, syncs: int, torn_bytes: int) -> bool:
        """Have a sync of a write fail, then the power; True when the write was acknowledged before."""
        done = 0

        def fail(action: str, path: str) -> None:
            nonlocal done
            if action == "sync":
                done += 1
                if done > syncs:
                    self.refuse(action, path)

        self.storage.before = fail
        try:
            write()
            acknowledged = True
        except (StorageError, OutcomeUnknownError):
            acknowledged = False
        self.power_cut(torn_bytes)
        return acknowledged

    def write_when_full(self, write: Any) -> None:
        """A full disk refuses the write whole, and takes it once there is room."""
        self.storage.full = True
        try:
            write()
        except StorageError:
            pass
        else:
            raise AssertionError("a full disk took a write")
        self.union_is_the_model()
        self.storage.full = False

    # ---- repetition -----------------------------------------------------------------------------------------------

    def send(self, kind: WriteKind, rows: Rows) -> None:
        """Write a batch that is sent again later, as after an answer that got lost."""
        self.refresh()
        writer = handle_of(self.table).writers.anonymous()
        write = writer.prepare(kind, pa.RecordBatch.from_pylist(rows, self.table.schema))
        self.sent.append((write, [offsets for _, offsets in writer.send(write)]))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 99))
    def send_again(self, which: int) -> None:
        write, offsets = self.sent[which % len(self.sent)]
        assert self.service is not None
        reply, _ = LocalEndpoint(self.service).call(write.request, write.bodies)
        assert isinstance(reply, m.WriteReply) and reply.offsets == offsets, "a repeat gets the first answer"

    # ---- the lake -------------------------------------------------------------------------------------------------

    def iceberg(self) -> IcebergTable:
        return self.table.lake.iceberg()

    @precondition(lambda self: self.has_lake)
    @rule(trim=st.booleans())
    def tier(self, trim: bool) -> None:
        self.table.lake.tier()
        self.tiered()
        self.rounds += 1
        if trim:
            self.maintain(hours=2)

    @precondition(lambda self: self.rounds)
    @rule(backwards=st.booleans())
    def compact(self, backwards: bool) -> None:
        """Write the live rows of each partition of the lake as one file, as a rewrite that is ours would."""
        table = self.iceberg()
        tasks = list(table.scan().plan_files())
        transaction = Transaction(table)
        delta = RowDelta(transaction, {})
        spec = LakeWriteSpec.of(table, target_file_bytes=1 << 30)
        rows = self.whole_lake().sort_by([(OFFSET_COLUMN, "descending" if backwards else "ascending")])
        for task in tasks:
            delta.delete_data_file(task.file)
        for file in {d for t in tasks for d in t.delete_files}:
            delta.remove_deletes(file)
        for partition in {tuple(t.file.partition[i] for i in range(len(t.file.partition))) for t in tasks}:
            part = rows.filter(self.in_partition(partition))
            for written in write_data_files(spec, part.to_batches(), partition):
                delta.append_data_file(to_data_file(written))
        delta.commit()
        transaction.commit_transaction()

    def whole_lake(self) -> pa.Table:
        """Its rows, in its own columns."""
        lake = pa.schema([f.remove_metadata() for f in self.iceberg().schema().as_arrow()])
        return self.table.scan(tier="lake", system_columns=True).to_arrow().select(lake.names).cast(lake)

    def in_partition(self, values: tuple[Any, ...]) -> pc.Expression:
        """Rows of one lake partition: of the values of the partition columns, and one bucket."""
        names = [*self.table.partition_by, "__bucket"]
        whole = pc.scalar(True)
        for name, value in zip(names, values, strict=True):
            whole &= pc.field(name).is_null() if value is None else pc.field(name) == value
        return whole

    @precondition(lambda self: self.rounds and len(self.table.describe()["bucket_key"]) != 1)
    @rule()
    def rewrite_by_another_engine(self) -> None:
        """One that knows of the defaults, which it cannot see."""
        rows = self.whole_lake()
        if rows.num_rows:
            self.iceberg().overwrite(rows)

    @precondition(lambda self: self.rounds > 1)
    @rule()
    def expire(self) -> None:
        table = self.iceberg()
        current = table.current_snapshot()
        ids = [s.snapshot_id for s in table.metadata.snapshots if current and s.snapshot_id != current.snapshot_id]
        if ids:
            table.maintenance.expire_snapshots().by_ids(ids).commit()

    # ---- checkpoint and trim --------------------------------------------------------------------------------------

    @rule(hours=st.sampled_from([0, 2]))
    def maintain(self, hours: int) -> None:
        assert self.service is not None
        self.clock.us += hours * HOUR_US
        self.service.maintain()

    # ---- reads ----------------------------------------------------------------------------------------------------

    @rule(tier=st.sampled_from(["union", "union", "lake"]), then=st.lists(st.sampled_from(DISTURBANCES), max_size=4))
    def pin(self, tier: Literal["union", "lake"], then: list[str]) -> None:
        """Pin a read; some of what may follow follows at once, the rest at other steps."""
        if self.has_lake or tier == "union":
            rows = self.rows() if tier == "union" else self.lake_rows()
            self.pins.append((self.table.scan(tier=tier), in_order(self.shown(rows))))
        for action in then if self.has_lake else []:
            {"tier": self.tier, "compact": self.compact}[action](True) if action != "expire" else self.expire()
        self.read_what_was_pinned(len(self.pins) - 1, again=True)

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 99), again=st.booleans())
    def read_what_was_pinned(self, which: int, again: bool) -> None:
        if not self.pins:
            return
        at = which % len(self.pins)
        scan, rows = self.pins[at] if again else self.pins.pop(at)
        assert in_order(scan.to_arrow().to_pylist()) == rows
        assert scan.count() == len(rows)

    @rule()
    def count(self) -> None:
        assert self.table.scan().count() == len(self.rows())

    @rule(data=st.data(), every=st.booleans(), tier=st.sampled_from(["union", "union", "lake"]))
    def ask(self, data: st.DataObject, every: bool, tier: Literal["union", "lake"]) -> None:
        """Rows of conditions on keys, partitions and other columns: by a scan and by SQL, read and counted."""
        if tier == "lake" and not self.has_lake:
            return
        rows = self.rows() if tier == "union" else self.lake_rows()
        plain = [c for c in self.shape.columns if any(is_one(c.type) for is_one in _PLAIN)]
        keys = [c for c in plain if c.name in self.fixed]
        several = data.draw(st.just(keys) | st.lists(st.sampled_from(plain), min_size=1, max_size=3))
        parts = [self.condition(data, c, rows) for c in several]
        where = (" and " if every else " or ").join(text for text, _ in parts)
        wanted = [row for row in rows if (all if every else any)(meets(row) for _, meets in parts)]
        self.refresh()
        scan = self.table.scan(where=where, tier=tier)
        assert in_order(scan.to_arrow().to_pylist()) == in_order(self.shown(wanted))
        assert scan.count() == len(wanted)
        assert self.service is not None
        with Connection(LocalEndpoint(self.service), "", None) as con:
            name, column = "m.t" if tier == "union" else "m.t$lake", plain[0]
            found = con.sql(f'select "{column.name}" from {name} where {where}').fetchall()
            assert sorted(map(str, found)) == sorted(str((column.of(row),)) for row in wanted)
            assert con.sql(f"select count(*) from {name} where {where}").fetchall() == [(len(wanted),)]
            assert con.sql(f"select count(*) from {name}").fetchall() == [(len(rows),)]

    @staticmethod
    def condition(data: st.DataObject, c: Column, rows: Held) -> tuple[str, Callable[[Row], bool]]:
        """A condition on a column, mostly with values that it has, and whether a row meets it."""
        there = [value for row in rows if (value := c.of(row)) is not None]
        if not there or data.draw(st.sampled_from([False, False, False, True])):
            return f'"{c.name}" is null', lambda row: c.of(row) is None
        values = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=3))
        texts = [f"'{v}'" if isinstance(v, str) else str(v).lower() for v in values]
        if len(values) == 1 and not isinstance(values[0], bool):
            less = data.draw(st.booleans())
            if less:
                return f'"{c.name}" < {texts[0]}', lambda row: (v := c.of(row)) is not None and v < values[0]
        return f'"{c.name}" in ({", ".join(texts)})', lambda row: c.of(row) in values

    @precondition(lambda self: self.has_lake)
    @rule()
    def read_the_tiers(self) -> None:
        found = self.table.scan(tier="lake").to_arrow().to_pylist()
        assert in_order(found) == in_order(self.shown(self.lake_rows()))
        assert self.table.scan(tier="lake").count() == len(self.lake_rows())
        hot = self.hot_rows()
        if hot is not None:
            assert self.table.scan(tier="hot").count() == hot == self.table.scan(tier="hot").to_arrow().num_rows

    @invariant()
    def union_is_the_model(self) -> None:
        if self.service is None:
            return
        STEPS["taken"] += 1
        found = self.table.scan(system_columns=True).to_arrow().to_pylist()
        places = [
            (tuple(r[c] for c in self.table.partition_by), r["__bucket"], r.pop("__offset"))
            for r in found
            if r["__offset"] is not None
        ]
        assert len(set(places)) == len(places), "an offset is one row's"
        mine = [{c: r[c] for c in self.shape.names} for r in found]
        assert in_order(mine) == in_order(self.shown(self.rows()))

    def teardown(self) -> None:
        self.row_groups.stop()
        if self.service is not None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
