"""Tables of both kinds against plain Python: whatever stops, moves, compacts or trims them, they hold what was written.

A real service runs on a disk that can lose power, with a real Iceberg table beside it. Rules write, break, restart,
tier, compact, expire, let other engines commit, checkpoint, trim and read in any order. Always: a union read is the
model, hot and lake rows do not overlap, offsets are dense, lookups and replayed changelogs agree.

``LAKEHEAD_MODEL_EXAMPLES=500`` makes a long run of it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from contextlib import suppress
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyiceberg.expressions import In
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import Transaction

from lakehead import LakeheadError, OffsetOutOfRangeError, TabletId
from lakehead.api.table import Table
from lakehead.client.routing import route
from lakehead.client.table import TableClient
from lakehead.config import LakeConfig, Limits, TableProperties
from lakehead.env import SystemRandomness
from lakehead.errors import StorageError
from lakehead.format.schema import validate_definition
from lakehead.lake.files import LakeWriteSpec, write_data_files
from lakehead.lake.rowdelta import RowDelta, to_data_file
from lakehead.lake.state import CatalogLakeState
from lakehead.protocol import messages as m
from lakehead.server.service import Service
from lakehead.testing.storage import FaultyStorage
from lakehead.types import OFFSET_COLUMN, TableDescriptor, TablePath

Rows = list[dict[str, Any]]
HOUR_US = 3_600_000_000
EXAMPLES = int(os.environ.get("LAKEHEAD_MODEL_EXAMPLES", "0"))
STEPS = {"taken": 0}
DISTURBANCES = ["tier", "compact", "expire"]


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
    """A table of a service, and what both kinds of tables have in common."""

    schema: ClassVar[pa.Schema]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="lakehead-model-")
        self.storage = FaultyStorage()
        self.clock = ManualClock()
        self.service: Service | None = None
        self.pins: list[tuple[Any, Rows]] = []
        self.rounds = 0

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
            schema=schema,
            schema_id=0,
            primary_key=keys,
            partition_by=partitions,
            bucket_key=bucketing,
            buckets=buckets,
            lake="iceberg" if lake else None,
            properties=properties,
        )
        assert self.service is not None
        self.service.call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
        self.open()

    def start(self) -> None:
        self.service = Service(
            self.folder,
            storage=self.storage,
            clock=self.clock,
            randomness=SystemRandomness(),
            limits=Limits(lease_seconds=1e9),
            lake=CatalogLakeState(LakeConfig(), self.folder),
        )

    def open(self) -> None:
        assert self.service is not None
        reply, _ = self.service.call(m.GetTable(database="m", table="t"))
        assert isinstance(reply, m.TableReply)
        client = TableClient(reply.info.descriptor(), self.service, self.clock, SystemRandomness())
        self.table = Table(client)

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

    def rows(self) -> Rows:
        """What the table holds."""
        raise NotImplementedError

    def lake_rows(self) -> Rows:
        """What its lake holds."""
        raise NotImplementedError

    def hot_rows(self) -> int | None:
        """How many rows a union read takes from the log, where the model tells."""
        raise NotImplementedError

    def tiered(self) -> None:
        """All that the table holds is in the lake now."""
        raise NotImplementedError

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
        except StorageError:
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
        rows = table.scan().to_arrow().sort_by([(OFFSET_COLUMN, "descending" if backwards else "ascending")])
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
        table = self.iceberg()
        rows = table.scan().to_arrow()
        if rows.num_rows:
            table.overwrite(rows)

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
            self.pins.append((self.table.scan(tier=tier), in_order(rows)))
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

    @precondition(lambda self: self.has_lake)
    @rule()
    def read_the_tiers(self) -> None:
        assert in_order(self.table.scan(tier="lake").to_arrow().to_pylist()) == in_order(self.lake_rows())
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
        mine = [{c: r[c] for c in self.schema.names} for r in found]
        assert in_order(mine) == in_order(self.rows())

    def teardown(self) -> None:
        if self.service is not None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


COMPRESSION = st.sampled_from(["none", "lz4", "zstd"])
SYNCS, TORN = st.integers(0, 3), st.integers(0, 1500)


class LogTable(Deployed):
    """The model: rows by number, where each lies, and what other engines did to the lake."""

    schema = pa.schema([("n", pa.int64()), ("p", pa.string()), ("v", pa.float64())])

    @initialize(
        partitioned=st.booleans(),
        buckets=st.integers(1, 3),
        bucket_key=st.sampled_from([(), ("n",), ("n", "p")]),
        lake=st.sampled_from([True, True, False]),
        durable=st.booleans(),
        compression=COMPRESSION,
        warm=st.booleans(),
    )
    def create(
        self, partitioned: bool, buckets: int, bucket_key: tuple[str, ...], compression: Any, warm: bool, **how: Any
    ) -> None:
        partition_by = ("p",) if partitioned else ()
        self.deploy(
            primary_key=(),
            partition_by=partition_by,
            bucket_key=tuple(c for c in bucket_key if c not in partition_by),
            buckets=buckets,
            compression=compression,
            **how,
        )
        self.next = 0
        self.held: dict[int, dict[str, Any]] = {}
        self.place: dict[int, tuple[TabletId, int]] = {}
        self.in_lake: set[int] = set()
        self.deleted: set[int] = set()
        self.foreign: dict[int, dict[str, Any]] = {}
        self.etl = -1
        if warm:
            self.append(40)
            self.tier(True) if self.has_lake else self.maintain(2)
            self.append(5)

    def made(self, count: int) -> Rows:
        numbers = range(self.next, self.next + count)
        self.next += count
        return [{"n": n, "p": "xyz"[n % 3], "v": None if n % 4 == 0 else n / 2} for n in numbers]

    def rows(self) -> Rows:
        return [*(r for n, r in self.held.items() if n not in self.deleted), *self.foreign.values()]

    def lake_rows(self) -> Rows:
        return [*(self.held[n] for n in self.in_lake - self.deleted), *self.foreign.values()]

    def hot_rows(self) -> int | None:
        return len(self.held) - len(self.in_lake)

    def tiered(self) -> None:
        self.in_lake = set(self.held)

    def took(self, rows: Rows, where: dict[int, tuple[TabletId, int]]) -> None:
        """The table has these rows now, at the next offsets of their tablets and in their order."""
        ends: dict[TabletId, int] = {}
        for tablet, offset in self.place.values():
            ends[tablet] = max(ends.get(tablet, 0), offset + 1)
        for row in rows:
            tablet, offset = where[row["n"]]
            assert offset == ends.get(tablet, 0), "offsets are dense, a batch keeps its order"
            ends[tablet] = offset + 1
            self.place[row["n"]] = (tablet, offset)
            self.held[row["n"]] = row

    def places(self, rows: Rows) -> dict[int, tuple[TabletId, int]]:
        found = self.table.scan(["n", "p"], where=f"n >= {rows[0]['n']}", system_columns=True).to_arrow().to_pylist()
        partitioned = bool(self.table.partition_by)
        tablets = {r["n"]: TabletId((r["p"],) if partitioned else (), r["__bucket"]) for r in found}
        return {r["n"]: (tablets[r["n"]], r["__offset"]) for r in found if r["__offset"] is not None}

    @rule(count=st.integers(1, 60))
    def append(self, count: int) -> None:
        rows = self.made(count)
        offsets = self.table.append(rows).offsets
        where = self.places(rows)
        self.took(rows, where)
        for tablet, (start, end) in offsets.items():
            assert {o for t, o in where.values() if t == tablet} == set(range(start, end))

    @rule(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5), named=st.booleans())
    def append_through_a_writer(self, counts: list[int], named: bool) -> None:
        batches = [self.made(c) for c in counts]
        with self.table.writer("etl" if named else None) as writer:
            assert not named or writer.last_sequence == self.etl
            for batch in batches:
                writer.append(batch)
            writer.flush()
            self.etl = writer.last_sequence if named else self.etl
        rows = [r for b in batches for r in b]
        if rows:
            self.took(rows, self.places(rows))

    @precondition(lambda self: self.durable)
    @rule(count=st.integers(1, 20), syncs=SYNCS, torn_bytes=TORN)
    def append_and_cut_power(self, count: int, syncs: int, torn_bytes: int) -> None:
        rows = self.made(count)
        done = self.write_and_cut_power(lambda: self.table.append(rows), syncs=syncs, torn_bytes=torn_bytes)
        where = self.places(rows)
        parts = route(self.table._desc, pa.RecordBatch.from_pylist(rows, self.table.schema))
        for _, positions in parts:
            part = rows if positions is None else [rows[i] for i in positions]
            there = [r["n"] in where for r in part]
            assert all(there) or not (done or any(there)), "a batch is atomic in a tablet, and there once acknowledged"
        self.took([r for r in rows if r["n"] in where], where)

    @rule(count=st.integers(1, 9))
    def append_to_a_full_disk(self, count: int) -> None:
        rows = self.made(count)
        self.write_when_full(lambda: self.table.append(rows))
        self.table.append(rows)
        self.took(rows, self.places(rows))

    @precondition(lambda self: self.has_lake and not self.table.describe()["bucket_key"])
    @rule(count=st.integers(1, 5))
    def append_by_another_engine(self, count: int) -> None:
        rows = [{**r, "n": r["n"] - 10**9} for r in self.made(count)]
        table = self.iceberg()
        lake = pa.schema([f.remove_metadata() for f in table.schema().as_arrow()])
        table.append(pa.Table.from_pylist(rows, lake))
        self.foreign |= {r["n"]: r for r in rows}

    @precondition(lambda self: self.has_lake and not self.table.describe()["bucket_key"] and self.in_lake)
    @rule(which=st.integers(0, 6))
    def delete_by_another_engine(self, which: int) -> None:
        numbers = sorted(r["n"] for r in self.lake_rows() if r["n"] % 7 == which)
        if numbers:
            self.iceberg().delete(In("n", numbers))
            self.deleted |= {n for n in numbers if n in self.held}
            self.foreign = {n: r for n, r in self.foreign.items() if n not in numbers}

    @precondition(lambda self: self.place)
    @rule(first=st.integers(0, 999), count=st.integers(0, 999))
    def read_some_range(self, first: int, count: int) -> None:
        tablet = min(t for t, _ in self.place.values())
        numbers = sorted((o, n) for n, (t, o) in self.place.items() if t == tablet)
        start = first % len(numbers)
        end = min(start + count, len(numbers))
        found: Rows = []
        stops = {t: 0 for t, _ in self.place.values()} | {tablet: end}
        try:
            for batch in self.table.subscribe(dict.fromkeys(stops, 0) | {tablet: start}, stop=stops):
                found += batch.rows.to_pylist()
        except OffsetOutOfRangeError:
            assert not self.has_lake
            return
        wanted = [(o, n) for o, n in numbers[start:end]]
        got = [(r["__offset"], r["n"]) for r in found]
        # What another engine deleted from the lake is gone once the log is trimmed.
        assert [x for x in wanted if x in got or x[1] not in self.deleted] == got
        times = [r["__timestamp"] for r in found]
        assert times == sorted(times)

    @rule()
    def follow_from_the_beginning(self) -> None:
        last: dict[TabletId, int] = {}
        seen = set()
        for batch in self.table.subscribe("earliest", stop="now"):
            for row in batch.rows.to_pylist():
                n = row["n"]
                assert self.place[n] == (batch.tablet, row["__offset"]) and row["__offset"] > last.get(batch.tablet, -1)
                assert {c: row[c] for c in self.schema.names} == self.held[n]
                last[batch.tablet] = row["__offset"]
                seen.add(n)
        assert set(self.held) - self.deleted <= seen <= set(self.held)

    @rule(low=st.integers(0, 300), width=st.integers(0, 80), limit=st.none() | st.integers(0, 20))
    def scan_where(self, low: int, width: int, limit: int | None) -> None:
        where = f"n >= {low} and n < {low + width} and v is not null"
        wanted = [r["n"] for r in self.rows() if low <= r["n"] < low + width and r["v"] is not None]
        found = self.table.scan(columns=["n"], where=where, limit=limit).to_arrow()["n"].to_pylist()
        assert len(found) == (len(wanted) if limit is None else min(limit, len(wanted)))
        assert set(found) <= set(wanted) and len(set(found)) == len(found)


KEYS = [(k, s) for k in range(6) for s in ("x", "", "é")]
Key = tuple[int, str]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
numbers_ = st.none() | st.integers(-9, 9)
texts = st.none() | st.sampled_from(["", "text", "a longer text, past what fits inline"])


def key_row(key: Key) -> dict[str, Any]:
    return {"k": key[0], "s": key[1], "p": key[0] % 2 == 0}


class KeyedTable(Deployed):
    """The model: key -> row."""

    schema = pa.schema(
        [("k", pa.int32()), ("s", pa.string()), ("p", pa.bool_()), ("a", pa.int64()), ("b", pa.string())]
    )

    @initialize(
        partitioned=st.booleans(),
        buckets=st.integers(1, 3),
        prefixed=st.booleans(),
        lake=st.sampled_from([True, True, False]),
        durable=st.booleans(),
        compression=COMPRESSION,
        warm=st.booleans(),
    )
    def create(self, partitioned: bool, prefixed: bool, warm: bool, **how: Any) -> None:
        self.deploy(
            primary_key=("k", "s", "p") if partitioned else ("k", "s"),
            partition_by=("p",) if partitioned else (),
            bucket_key=("k",) if prefixed else ("k", "s"),
            **how,
        )
        self.prefixed = prefixed
        self.model: dict[Key, dict[str, Any]] = {}
        self.in_lake: Rows = []
        self.etl = -1
        if warm:
            self.upsert([(key, i, "text") for i, key in enumerate(KEYS)])
            self.tier(True) if self.has_lake else self.maintain(2)
            self.delete(KEYS[::3])

    def rows(self) -> Rows:
        return list(self.model.values())

    def lake_rows(self) -> Rows:
        return self.in_lake

    def hot_rows(self) -> int | None:
        return None

    def tiered(self) -> None:
        self.in_lake = self.rows()

    def keys_only(self, some: list[Key]) -> Rows:
        return [{c: key_row(key)[c] for c in self.table.primary_key} for key in some]

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_, texts), min_size=1, max_size=10))
    def upsert(self, rows: list[tuple[Key, int | None, str | None]]) -> None:
        self.table.upsert([{**key_row(key), "a": a, "b": b} for key, a, b in rows])
        self.model |= {key: {**key_row(key), "a": a, "b": b} for key, a, b in rows}

    def updated(self, rows: list[tuple[Key, int | None]]) -> dict[Key, dict[str, Any]]:
        new: dict[Key, dict[str, Any]] = {}
        for key, a in rows:
            new[key] = {**(new.get(key) or self.model.get(key) or {**key_row(key), "b": None}), "a": a}
        return new

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=10))
    def upsert_some_columns(self, rows: list[tuple[Key, int | None]]) -> None:
        self.table.upsert([{**key_row(key), "a": a} for key, a in rows])
        self.model |= self.updated(rows)

    @rule(some=some_keys)
    def delete(self, some: list[Key]) -> None:
        self.table.delete(self.keys_only(some))
        for key in some:
            self.model.pop(key, None)

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=6), gone=some_keys)
    def write_through_a_named_writer(self, rows: list[tuple[Key, int | None]], gone: list[Key]) -> None:
        with self.table.writer("etl") as writer:
            assert writer.last_sequence == self.etl
            writer.upsert([{**key_row(key), "a": a} for key, a in rows])
            writer.delete(self.keys_only(gone))
            writer.flush()
            self.etl = writer.last_sequence
        self.model |= self.updated(rows)
        for key in gone:
            self.model.pop(key, None)

    @rule(many=st.integers(100, 1000))
    def fill_and_empty(self, many: int) -> None:
        rows = [{"k": 1000 + i, "s": "", "p": i % 2 == 0, "a": i, "b": str(i)} for i in range(many)]
        self.table.upsert(rows)
        assert self.table.scan().count() == len(self.model) + many
        self.table.delete([{c: r[c] for c in self.table.primary_key} for r in rows])

    @precondition(lambda self: self.durable)
    @rule(
        rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=10),
        delete=st.booleans(),
        syncs=SYNCS,
        torn_bytes=TORN,
    )
    def write_and_lose_power(
        self, rows: list[tuple[Key, int | None]], delete: bool, syncs: int, torn_bytes: int
    ) -> None:
        keys = [key for key, _ in rows]
        new = dict.fromkeys(keys) if delete else self.updated(rows)
        if delete:
            write = lambda: self.table.delete(self.keys_only(keys))  # noqa: E731
        else:
            write = lambda: self.table.upsert([{**key_row(key), "a": a} for key, a in rows])  # noqa: E731
        done = self.write_and_cut_power(write, syncs=syncs, torn_bytes=torn_bytes)
        found = {(r["k"], r["s"]): r for r in self.table.scan().to_arrow().to_pylist()}
        schema = pa.schema([self.table.schema.field(c) for c in self.table.primary_key])
        for _, positions in route(self.table._desc, pa.RecordBatch.from_pylist(self.keys_only(keys), schema)):
            part = keys if positions is None else [keys[i] for i in positions]
            after = {key: new[key] for key in part}
            if {key: found.get(key) for key in part} == after:
                self.model |= {key: row for key, row in after.items() if row is not None}
                for key in [key for key, row in after.items() if row is None]:
                    self.model.pop(key, None)
            else:
                assert not done, "what was acknowledged is there"
                assert {k: found.get(k) for k in part} == {k: self.model.get(k) for k in part}, "a batch is atomic"

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=4))
    def upsert_to_a_full_disk(self, rows: list[tuple[Key, int | None]]) -> None:
        self.write_when_full(lambda: self.table.upsert([{**key_row(key), "a": a} for key, a in rows]))
        self.upsert_some_columns(rows)

    @rule(some=some_keys)
    def lookup(self, some: list[Key]) -> None:
        found = self.table.lookup(self.keys_only(some)).to_pylist()
        assert found == [self.model[key] for key in some if key in self.model]

    @precondition(lambda self: self.prefixed)
    @rule(k=st.integers(0, 6))
    def prefix_lookup(self, k: int) -> None:
        asked = {c: v for c, v in {"k": k, "p": k % 2 == 0}.items() if c == "k" or c in self.table.partition_by}
        found = self.table.prefix_lookup([asked]).to_pylist()
        assert in_order(found) == in_order([row for (number, _), row in self.model.items() if number == k])

    @rule(low=st.integers(-9, 9))
    def scan_where(self, low: int) -> None:
        scan = self.table.scan(where=f"a > {low} or b is null")
        wanted = [r for r in self.rows() if (r["a"] is not None and r["a"] > low) or r["b"] is None]
        assert in_order(scan.to_arrow().to_pylist()) == in_order(wanted)
        assert scan.count() == len(wanted)

    @rule(start=st.sampled_from(["earliest", "full"]))
    def replay_the_changelog(self, start: Any) -> None:
        state: dict[Key, dict[str, Any]] = {}
        for batch in self.table.subscribe(start, stop="now"):
            for r in batch.rows.to_pylist():
                key, image = (r["k"], r["s"]), {c: r[c] for c in self.schema.names}
                if r["__change_type"] in ("-U", "-D"):
                    assert state.pop(key) == image
                else:
                    assert key not in state
                    state[key] = image
        assert state == self.model


TestLogTable = LogTable.TestCase
TestLogTable.settings = settings(max_examples=EXAMPLES or 7, stateful_step_count=15)
TestKeyedTable = KeyedTable.TestCase
TestKeyedTable.settings = settings(max_examples=EXAMPLES or 7, stateful_step_count=15)
