"""Who uses a simulated deployment: writers, readers, subscribers and tiering services. Each holds what it is told to
the history."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from tests.simulation.deployment import Deployment
from tests.simulation.history import Row, TabletHistory, by_offset, require, rows_of, shown
from tests.simulation.lake import tablet_of_row
from tests.simulation.network import NetworkEndpoint

from lakehead.client.batch_writer import BatchWriter
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    LakeheadError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    SchemaChangedError,
    SequenceGapError,
    UnavailableError,
    WriterFencedError,
)
from lakehead.lake.union_read import UnionRead, pin
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol import messages as m
from lakehead.types import BUCKET_COLUMN, TableDescriptor, TabletKey, WriteKind

LOG_SCHEMA = pa.schema([pa.field("who", pa.string(), False), pa.field("n", pa.int64(), False), ("text", pa.string())])
KEYED_SCHEMA = pa.schema(
    [pa.field("p", pa.string(), False), pa.field("k", pa.int64(), False), ("a", pa.int64()), ("b", pa.string())]
)
KEYS = [(p, k) for p in "xyz" for k in range(8)]
_CHANGES = ["__change_type", "__prev_offset"]


class Actor:
    """One user of one table, until the run is over."""

    def __init__(self, deployment: Deployment, desc: TableDescriptor, name: str) -> None:
        self.deployment = deployment
        self.desc = desc
        self.name = name
        self.draws = deployment.draws
        self.endpoint = NetworkEndpoint(deployment.network, name)
        self.client = TableHandle(desc, OneServer(self.endpoint), deployment.env)

    def note(self, what: str, detail: object = "") -> None:
        self.deployment.note(self.name, what, detail)

    def think(self, seconds: float = 0.02) -> None:
        self.deployment.scheduler.sleep(self.draws.random() * seconds * (10 if self.deployment.calm else 1))

    @property
    def expected(self) -> tuple[type[LakeheadError], ...]:
        """What may go wrong at any time, and is to be tried again."""
        now: tuple[type[LakeheadError], ...] = (UnavailableError, OutcomeUnknownError, ClosedError)
        if self.deployment.tells_damage:
            now = (*now, CorruptionError)
        return (*now, FencedError) if self.deployment.tells_second_owner else now

    def follow(self) -> None:
        """Go on under the definition that the table has now, after a call that knew an older one.

        Raises:
            AssertionError: it is the same one.
        """
        before, self.client = self.client, self.client.now()
        known, now = before.desc.schema_id, self.client.desc.schema_id
        require(now > known, f"{self.name} was told that schema {known} has changed, to {now}")
        self.note("follows", now)

    def lossy(self) -> bool:
        """Whether acknowledged rows may have been lost, as ``durability="os"`` allows."""
        return self.desc.properties.durability == "os" and any(
            t.cuts for t in self.deployment.history.of(self.desc.table_id)
        )


# ---- writers ------------------------------------------------------------------------------------------------------


class Source:
    """Batches that are the same however often they are made: number n of a name has the same rows in every attempt."""

    def __init__(self, desc: TableDescriptor, name: str) -> None:
        self._desc = desc
        self._name = name

    def batch(self, n: int) -> tuple[WriteKind, pa.RecordBatch]:
        chance = zlib.crc32(f"{self._name}:{n}".encode())

        def draw(below: int) -> int:
            nonlocal chance
            chance = (chance * 1103515245 + 12345) % (1 << 31)
            return (chance >> 8) % below

        rows = 1 + draw(6)
        if not self._desc.keyed:
            values = [(self._name, n * 10 + i, "x" * draw(40) or None) for i in range(rows)]
            return "append", _batch(LOG_SCHEMA, LOG_SCHEMA.names, values)
        keys = [KEYS[draw(len(KEYS))] for _ in range(rows)]
        tag = n * 10
        match draw(6):
            case 0:
                return "delete", _batch(KEYED_SCHEMA, ["p", "k"], keys)
            case 1:
                return "upsert", _batch(KEYED_SCHEMA, ["p", "k", "a"], [(*k, tag + i) for i, k in enumerate(keys)])
            case 2:
                names = [(*k, f"{self._name}{tag + i}") for i, k in enumerate(keys)]
                return "upsert", _batch(KEYED_SCHEMA, ["p", "k", "b"], names)
        full = [(*k, tag + i, None if draw(4) == 0 else f"{self._name}{tag + i}") for i, k in enumerate(keys)]
        return "upsert", _batch(KEYED_SCHEMA, KEYED_SCHEMA.names, full)


def _batch(schema: pa.Schema, columns: list[str], rows: Sequence[Row]) -> pa.RecordBatch:
    chosen = pa.schema([schema.field(c) for c in columns])
    arrays = [pa.array(values, f.type) for values, f in zip(zip(*rows, strict=True), chosen, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=chosen)


class AnonymousWriter(Actor):
    """Writes batches once each; of those that fail it does not know whether they landed."""

    def run(self, batches: int) -> None:
        source = Source(self.desc, self.name)
        for n in range(batches):
            self.think()
            kind, batch = source.batch(n)
            try:
                offsets = self.client.writers.write(kind, pa.Table.from_batches([batch]))
                self.note("write", [(str(k), *o) for k, o in offsets])
            except self.expected as e:
                self.note("write unknown", type(e).__name__)
            except SequenceGapError:
                require(self.lossy(), f"{self.name}: a batch was refused that follows the one before")
                self.note("write refused")


class NamedWriter(Actor):
    """Writes all batches of a source, resuming where its predecessor, which may still be at it, was known to be."""

    def __init__(self, deployment: Deployment, desc: TableDescriptor, name: str, source: str) -> None:
        super().__init__(deployment, desc, name)
        self._source_name = source
        self._source = Source(desc, source)

    def run(self, batches: int) -> bool:
        """True when the last batch is acknowledged; False when somebody took over."""
        while True:
            self.think(0.1)
            try:
                writer = self.client.writers.named(self._source_name)
                self.note("writer opened", f"after {writer.acked_through}")
                return self._go_on(writer, batches)
            except self.expected as e:
                self.note("writer failed", type(e).__name__)
            except SequenceGapError:
                # Its predecessor's last batch may arrive after it was opened.
                self.note("writer behind")
            except WriterFencedError:
                self.note("writer fenced")
                return False

    def _go_on(self, writer: BatchWriter, batches: int) -> bool:
        for n in range(writer.acked_through + 1, batches):
            self.think()
            offsets = writer.send(writer.prepare(*self._source.batch(n)))
            self.note("named write", [n, *((str(k), *o) for k, o in offsets)])
        if self.draws.random() < 0.5:
            writer.close()
        return True


# ---- readers ------------------------------------------------------------------------------------------------------


class Reader(Actor):
    """Looks rows up, and reads logs and live rows at offsets that it pinned a while ago, with and without a lease."""

    def run(self) -> None:
        look = self.look_up if self.desc.keyed else self.read_log
        while True:
            self.think(0.05)
            choice = self.draws.choice([self.read_log, look, self.read_live])
            try:
                try:
                    choice()
                except SchemaChangedError:
                    self.follow()
            except self.expected as e:
                self.note("read failed", type(e).__name__)

    def whole(self) -> None:
        """Read everything, when nothing is going on."""
        self.client = self.client.now()
        states = {s.key: s for s in self.client.log.tablets(sync=True)}
        for tablet in self.deployment.history.of(self.desc.table_id):
            end = states[tablet.key].high_watermark
            require(end == tablet.end, f"{tablet.name} shows {end} of {tablet.end} records at the end")
        self.read_log(all_of_it=True)
        self.read_live()
        if self.desc.keyed:
            self.look_up()

    def look_up(self) -> None:
        keys = sorted({("w", 0), *self.draws.sample(KEYS, 5)})
        found = self.client.lookups.by_key(_batch(KEYED_SCHEMA, ["p", "k"], keys))
        self.note("lookup", rows_of(found))

    def read_log(self, *, all_of_it: bool = False) -> None:
        pinned, desc = self._pin(leased=self.draws.random() < 0.5), self.client.desc
        if not all_of_it:
            for tablet, (start, end) in pinned.ranges.items():
                start = self.draws.randint(start, end)
                pinned.ranges[tablet] = (start, self.draws.randint(start, end))
            self.think(1.0)
        columns = [*desc.schema.names, *(_CHANGES if desc.keyed else []), "__offset"]
        request = m.Read(
            table_id=desc.table_id,
            schema_id=desc.schema_id,
            ranges=pinned.request(),
            columns=columns,
            predicate=None,
            lease=pinned.lease,
        )
        for tablet, found in self._rows(request, pinned):
            start, end = pinned.ranges[tablet]
            wanted = [
                (*shown(r.row, desc.schemas.current), *((r.change, r.prev) if desc.keyed else ()), start + i)
                for i, r in enumerate(tablet.records[start:end])
            ]
            require(found == wanted, f"{tablet.name} reads [{start}, {end}) as\n  {found}\nmust be\n  {wanted}")

    def read_live(self) -> None:
        if not self.desc.keyed:
            return
        pinned, desc = self._pin(leased=True), self.client.desc
        self.think(1.0)
        columns = [*desc.schema.names, "__offset"]
        request = m.ReadLive(
            table_id=desc.table_id,
            schema_id=desc.schema_id,
            ranges=pinned.request(),
            columns=columns,
            predicate=None,
            lease=pinned.lease,
        )
        for tablet, found in self._rows(request, pinned):
            end = pinned.ranges[tablet][1]
            wanted = [(*row, offset) for offset, row in tablet.live_at(end, desc.schemas.current).items()]
            require(found == wanted, f"{tablet.name} holds at {end}\n  {found}\nmust be\n  {wanted}")

    def _pin(self, *, leased: bool) -> Pinned:
        starts = self.deployment.starts
        lease, states = None, self.client.log.tablets(sync=self.draws.random() < 0.3)
        if leased:
            reply, _ = self.endpoint.call(m.OpenLeases(tables=[self.client.leased(None)], release=[]))
            lease, states = reply.leases[0].lease, reply.leases[0].tablets
        history = self.deployment.history
        ranges = {history.tablet(self.desc.table_id, s.key): (s.log_start, s.high_watermark) for s in states}
        return Pinned(ranges, lease, {t: t.cuts for t in ranges}, starts)

    def _rows(self, request: m.Read | m.ReadLive, pinned: Pinned) -> Iterator[tuple[TabletHistory, list[Row]]]:
        """The rows of each tablet whose log was not cut since it was pinned."""
        kind = type(request).__name__
        found: dict[TabletKey, list[Row]] = {}
        stream = None
        try:
            stream = self.endpoint.stream(request)
            for header, batch in stream:
                found.setdefault(TabletKey(header.partition, header.bucket), []).extend(rows_of(batch))
        except OffsetOutOfRangeError as e:
            held = pinned.lease is not None and pinned.starts == self.deployment.starts
            require(not held, f"{self.name}: a leased {kind} finds its range gone: {e}")
            self.note(f"{kind} too late")
            return
        finally:
            if stream is not None:
                stream.close()
        for tablet in pinned.ranges:
            if tablet.cuts == pinned.cuts[tablet]:
                yield tablet, found.get(tablet.key, [])
        self.note(kind, [(str(t.key), *r) for t, r in pinned.ranges.items()])


@dataclass(frozen=True)
class Pinned:
    """Ranges of tablets' logs that are to be read some time later."""

    ranges: dict[TabletHistory, tuple[int, int]]
    lease: str | None
    cuts: dict[TabletHistory, int]
    starts: int

    def request(self) -> list[m.TabletRange]:
        return [
            m.TabletRange(partition=t.key.partition, bucket=t.key.bucket, start=s, end=e)
            for t, (s, e) in self.ranges.items()
        ]


class UnionReader(Actor):
    """Pins whole tables, lake and log together, and reads them some time later."""

    def run(self) -> None:
        while True:
            self.think(0.1)
            try:
                try:
                    self.read(1.0)
                except SchemaChangedError:
                    self.follow()
            except self.expected as e:
                self.note("union failed", type(e).__name__)

    def whole(self) -> None:
        """Read everything, when nothing is going on."""
        self.client = self.client.now()
        self.read(0.0)

    def read(self, seconds: float) -> None:
        """One union read, carried out so much after it was pinned."""
        history, lakes = self.deployment.history, self.deployment.lakes
        lake = lakes.by_table[self.desc.table_id]
        try:
            cuts = {t: t.cuts for t in history.of(self.desc.table_id)}
            starts = self.deployment.starts
            pinned = pin(self.client, open_lake=lakes.at)
            self.think(seconds)
            names = tuple(self.client.desc.schema.names)
            read = UnionRead(self.client, pinned, ReadSpec(names, system_columns=True))
            try:
                rows = [row for batch in read.batches() for row in rows_of(batch)]
            except UnavailableError as e:
                if not isinstance(e.__cause__, OffsetOutOfRangeError):
                    raise
                require(starts != self.deployment.starts, f"{self.name}: a leased union read finds its range gone: {e}")
                self.note("union too late")
                return
            view = pinned.lake
            assert view is not None
            ends = {k: max(end, view.offsets.get(k, 0)) for k, (_, end) in pinned.ranges.items()}
            for tablet in history.of(self.desc.table_id):
                if tablet.cuts == cuts.get(tablet, 0) and tablet.key in ends:
                    self._compare(tablet, rows, ends[tablet.key], pinned.ranges[tablet.key][0])
            self.note("union read", sorted((str(k), *r) for k, r in pinned.ranges.items()))
        finally:
            lake.release()

    def _compare(self, tablet: TabletHistory, rows: list[Row], end: int, boundary: int) -> None:
        desc = self.client.desc
        names = [*desc.schema.names, BUCKET_COLUMN]
        mine = [
            r
            for r in rows
            if r[-2] is not None and tablet_of_row(desc, dict(zip(names, r, strict=False))) == tablet.key
        ]
        found = [(r[-2], r[:-3]) for r in mine]
        once = dict(sorted(by_offset(found).items()))
        wanted = dict(sorted(tablet.live_at(end, desc.schemas.current).items()))
        require(
            once == wanted,
            f"{tablet.name} lake up to {boundary} and log up to {end} hold\n  {once}\nmust be\n  {wanted}",
        )
