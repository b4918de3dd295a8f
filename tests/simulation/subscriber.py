"""A subscriber of a simulated deployment: the real feed behind a subscription, and what it must hand out."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from tests.simulation.deployment import Deployment
from tests.simulation.history import Row, TabletHistory, require, rows_of, shown
from tests.simulation.lake import SimulatedLakes
from tests.simulation.workload import Actor

from lakehead.api.feed import Feed, FeedStart
from lakehead.client.table import TableHandle
from lakehead.errors import OffsetOutOfRangeError, SchemaChangedError
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.records import read_records
from lakehead.lake.union_read import Moment
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeReply, StreamHeader
from lakehead.types import (
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    ChangeType,
    TableDescriptor,
    TableSchema,
    TabletKey,
)


class SimulatedFeed(Feed):
    """The feed behind a subscription. The lake's rows come from memory; all else is the real one's."""

    def __init__(self, lakes: SimulatedLakes, client: TableHandle, start: FeedStart) -> None:
        self._lakes = lakes
        super().__init__(client, start, None, lambda desc: ReadSpec(tuple(_columns(desc))))

    @property
    def definition(self) -> TableSchema:
        """What it goes by now."""
        return self._handle.desc.schemas.current

    def _records(self, key: TabletKey, start: int, end: int) -> Iterator[pa.RecordBatch]:
        return read_records(self._handle, key, start, end, self._spec, open_lake=self._open_lake)

    def _open_lake(self, desc: TableDescriptor, info: LakeReply, moment: Moment | None) -> PinnedLake:
        """Nobody keeps the files for it: it goes on with a newer version when they are gone."""
        view = self._lakes.at(desc, info, moment)
        self._lakes.by_table[desc.table_id].release()
        return view


def _columns(desc: TableDescriptor) -> list[str]:
    changes = ["__change_type"] if desc.keyed else []
    return [*desc.schema.names, *changes, OFFSET_COLUMN, TIMESTAMP_COLUMN]


class Subscriber(Actor):
    """Follows a table over crashes and over what its log has forgotten. Where the feed gives up, it goes on at the last
    end offset that it was told."""

    def __init__(self, deployment: Deployment, desc: TableDescriptor, name: str) -> None:
        super().__init__(deployment, desc, name)
        self.positions: dict[TabletKey, int] = {}
        self._initial: dict[TabletKey, list[tuple[TableSchema, Row]]] = {}
        self._over_lake = desc.lake is not None and not desc.keyed

    def has_all(self) -> bool:
        """Whether it was pushed all that there is."""
        tablets = self.deployment.history.of(self.desc.table_id)
        return all(self.positions.get(t.key, t.log_start) == t.end for t in tablets)

    def run(self) -> None:
        positions = self.positions
        while True:
            self.think(0.1)
            cuts = self._cuts()
            start: FeedStart = dict(positions) if positions else "earliest"
            # A log that is trimmed may be followed from the rows that are live, one that is not from its beginning.
            if self.desc.keyed and not positions and self.draws.random() < 0.5:
                start = "full"
            try:
                try:
                    self._follow(start, cuts)
                except SchemaChangedError:
                    self.follow()
            except self.expected as e:
                self.note("subscription ends", type(e).__name__)
            except OffsetOutOfRangeError:
                lost = self._cuts() > 0
                require(lost or not self._over_lake, f"{self.name}: neither log nor lake has its offsets")
                self.note("subscription behind")
                positions.clear()

    def _cuts(self) -> int:
        return sum(t.cuts for t in self.deployment.history.of(self.desc.table_id))

    def _follow(self, start: FeedStart, cuts: int) -> None:
        feed = SimulatedFeed(self.deployment.lakes, self.client, start)
        self._initial = {}
        self.note("subscribe", sorted((str(k), o) for k, o in self.positions.items()))
        try:
            for header, batch in feed:
                if self._cuts() != cuts:
                    self.note("subscription ends", "the power was cut")
                    return
                require(batch.schema.equals(feed.schema), f"{self.name}: {batch.schema} is not {feed.schema}")
                self._take(header, rows_of(batch.select(batch.schema.names[:-1])), feed.definition)
        finally:
            feed.close()

    def _take(self, header: StreamHeader, rows: list[Row], schema: TableSchema) -> None:
        key, end = TabletKey(header.partition, header.bucket), header.end_offset
        tablet = self.deployment.history.tablet(self.desc.table_id, key)
        known = self.positions.get(key)
        at = known if known is not None else 0 if self._over_lake else rows[0][-1] if rows else 0
        wanted = [
            (*shown(r.row, schema), *((r.change,) if self.desc.keyed else ()), at + i)
            for i, r in enumerate(tablet.records[at:end])
        ]
        from_log = end is not None and key not in self._initial and at == 0 and rows == wanted
        if known is None and self.desc.keyed and not from_log:
            self._take_initial(tablet, end, [(schema, row) for row in rows])
            return
        assert end is not None
        require(at <= end <= tablet.readable_end, f"{tablet.name} pushes up to {end} after {at}")
        require(rows == wanted, f"{tablet.name} pushes for [{at}, {end})\n  {rows}\nmust be\n  {wanted}")
        tablet.floor = max(tablet.floor, end)
        self.positions[key] = end
        self.note("pushed from the lake" if at < tablet.log_start else "pushed", (str(key), at, end))

    def _take_initial(self, tablet: TabletHistory, end: int | None, rows: list[tuple[TableSchema, Row]]) -> None:
        """Live rows, which stand for a part of the log that was trimmed."""
        held = self._initial.setdefault(tablet.key, [])
        held += rows
        if end is None:
            return
        live = sorted(tablet.live_at(end, tablet.desc.schemas.current))
        # Of some the definition may have been another than of the rest.
        now = [
            (s, (*shown(tablet.records[o].row, s), ChangeType.INSERT, o)) for (s, _), o in zip(held, live, strict=False)
        ]
        same = held == now and len(held) == len(live)
        require(same, f"{tablet.name} pushes as live at {end}\n  {held}\nmust be\n  {now} at {live}")
        tablet.floor = max(tablet.floor, end)
        self.positions[tablet.key] = end
        self.note("pushed as live", (str(tablet.key), end))
