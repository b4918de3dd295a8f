"""The lake of a simulation: a catalog that loses, repeats and delays commits, and other engines that write to it.

Every snapshot is compared, when it appears, with the logs: it must hold exactly the rows that are live where its mark
says that it ends.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.history import History, held, ids_of, require, shown
from tests.simulation.scheduler import Process, Scheduler, Task

from lakehead.env.randomness import Randomness
from lakehead.errors import SchemaChangedError, UnavailableError
from lakehead.lake.lake_table import LakeChange
from lakehead.lake.marks import LakeMark, LakeVersion, mark_of
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import Moment
from lakehead.protocol.messages import LakeReply, LakeUse
from lakehead.server.lake_state import LakeOwner
from lakehead.testing.lake import Fault, MemoryLake
from lakehead.testing.lake_parts import Row
from lakehead.types import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    TableDescriptor,
    TableSchema,
    TabletKey,
    field_id,
    partition_name,
)

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass
class LakeFaults:
    """Chances.

    Attributes:
        commit: that something is wrong with a commit.
        unreachable: that a load fails.
    """

    commit: float = 0.0
    unreachable: float = 0.0


class SimulatedLake:
    """The lake table of one table, with its catalog."""

    def __init__(self, scheduler: Scheduler, history: History, desc: TableDescriptor, randomness: Randomness) -> None:
        self.desc = desc
        self.faults = LakeFaults()
        self.table = MemoryLake(desc, randomness, lands_late=scheduler.draws.random() < 0.8)
        self.table.on_step = self._step
        self.table.fault = self._fault
        self.foreign_rows = 0
        self._pins: dict[Task, list[LakeVersion]] = {}
        self._scheduler = scheduler
        self._history = history
        self._rounds: dict[str, LakeMark] = {}
        self._refused: set[str] = set()
        self._seen: dict[int, list[tuple[TableSchema, Row]]] = {}
        self._quiet = False
        self._offsets_at_drop: Mapping[TabletKey, int] = {}

    def drop(self) -> None:
        """The table goes from its catalog."""
        self._offsets_at_drop = self.offsets()
        self.table.drop()

    def offsets(self) -> Mapping[TabletKey, int]:
        """What the lake holds now, or did when it was dropped, as the model of it knows without asking the catalog."""
        if self.table.is_dropped:
            return self._offsets_at_drop
        self._quiet = True
        try:
            mark = mark_of(self.table.now().load())
        finally:
            self._quiet = False
        return mark.offsets if mark else {}

    def snapshot_id(self) -> int | None:
        """The current snapshot."""
        ids = self.table.snapshot_ids()
        return ids[-1] if ids else None

    # ---- who reads it ---------------------------------------------------------------------------------------------

    def pin(self, version: LakeVersion) -> None:
        """The current task is told a version: what that names stays until the task releases all that it was told."""
        self._pins.setdefault(self._scheduler.current, []).append(version)

    def release(self) -> None:
        """The current task reads none of the versions that it was told any more."""
        self._pins.pop(self._scheduler.current, None)

    def in_use(self) -> list[LakeUse]:
        """What somebody may read now: each snapshot that was the current one when it was told."""
        pinned = {(v.state, v.current_id) for task, versions in self._pins.items() if not task.done for v in versions}
        return [LakeUse(metadata=state, snapshot=i) for state, i in sorted(pinned, key=str)]

    # ---- the catalog ----------------------------------------------------------------------------------------------

    def _step(self, step: str) -> None:
        if self._quiet:
            return
        if step == "committed":
            self.inspect()
        self._scheduler.sleep(self._scheduler.draws.random() * 0.01)
        self._scheduler.check_alive()
        if step == "load" and self._scheduler.draws.random() < self.faults.unreachable:
            raise UnavailableError("the catalog does not answer")

    def _fault(self, change: LakeChange) -> Fault | None:
        draws = self._scheduler.draws
        if draws.random() >= self.faults.commit:
            return None
        fault = draws.choice([f for f in Fault if f is not Fault.DELAYED or self.table.lands_late])
        if fault is Fault.DELAYED:
            seconds = draws.choice([0.005, 0.1, 3.0])
            self._scheduler.spawn("late commit", Process("catalog"), lambda: self._deliver(seconds))
        return fault

    def _deliver(self, seconds: float) -> None:
        self._scheduler.sleep(self._scheduler.draws.random() * seconds)
        with self._scheduler.judging():
            self.table.deliver()
            self.inspect()

    # ---- what must hold -------------------------------------------------------------------------------------------

    def inspect(self) -> None:
        """Check the snapshots that are new."""
        if self.table.is_dropped:
            return
        with self._scheduler.judging():
            gone = self.table.reachable() - self.table.stored()
            require(not gone, f"{self.desc.path}: the lake names files that are gone: {sorted(gone)}")
            version = self.table._known()
            for snapshot_id in self.table.snapshot_ids():
                if snapshot_id not in self._seen:
                    snapshot = version.snapshots[snapshot_id]
                    rows = self._seen[snapshot_id] = self.table.written(snapshot_id)
                    if snapshot.mark is not None:
                        self._check_round(snapshot.mark, rows)
                    else:
                        before = self._seen.get(snapshot.parent_id or 0, [])
                        same = self._owned(rows) == self._owned(before)
                        require(same, f"{self.desc.path}: a foreign commit changed rows")

    def has_landed(self, round_id: str) -> bool:
        """Whether a round is in the lake."""
        return round_id in self._rounds

    def refused(self, round_id: str) -> None:
        """A service was told that its round is not in the lake and never will be. Of one whose snapshot has expired
        since, after others came, it cannot know better, and may go on from there."""
        mark = self._rounds.get(round_id)
        known = mark is not None and mark.snapshot_id in self.table.snapshot_ids()
        require(not known, f"{self.desc.path}: round {round_id[:6]} was said not to have landed")
        self._refused.add(round_id)

    def _check_round(self, mark: LakeMark, rows: list[tuple[TableSchema, Row]]) -> None:
        name, round_id, offsets = str(self.desc.path), mark.round_id, mark.offsets
        require(round_id not in self._rounds, f"{name}: round {round_id[:6]} landed twice")
        require(round_id not in self._refused, f"{name}: round {round_id[:6]} landed, and was said not to have")
        newest = max((m.epoch for m in self._rounds.values()), default=0)
        require(mark.epoch >= newest, f"{name}: a round of epoch {mark.epoch} landed after one of {newest}")
        self._rounds[round_id] = mark
        found = self._owned(rows)
        known = {tablet.key for tablet in self._history.of(self.desc.table_id)}
        require(all(at[0] in known for at in found), f"{name}: the lake has rows of tablets that were never written")
        for tablet in self._history.of(self.desc.table_id):
            end = offsets.get(tablet.key, 0)
            require(end <= tablet.durable_end, f"{tablet.name}: the lake holds {end}, the disk {tablet.durable_end}")
            wanted = {
                (tablet.key, offset): (*row, tablet.timestamps[offset])
                for offset, row in tablet.live_at(end, self.table.now().desc.schemas.current).items()
            }
            mine = {at: row for at, row in found.items() if at[0] == tablet.key}
            require(mine == wanted, f"{tablet.name}: the lake has for [0, {end})\n  {mine}\nmust be\n  {wanted}")

    def _owned(self, rows: list[tuple[TableSchema, Row]]) -> dict[tuple[TabletKey, int], tuple[object, ...]]:
        """Rows with identity by tablet and offset, as the lake has them now, with their commit time.

        Raises:
            AssertionError: one is there twice.
        """
        out: dict[tuple[TabletKey, int], tuple[object, ...]] = {}
        now = self.table.now().desc.schemas.current
        for schema, row in rows:
            if row[OFFSET_COLUMN] is not None:
                at = (tablet_of_row(self.desc, row), row[OFFSET_COLUMN])
                require(at not in out, f"the lake has offset {at} twice")
                user = shown(held(tuple(row[f.name] for f in schema.fields), schema), now)
                out[at] = (*user, (row[TIMESTAMP_COLUMN] - _EPOCH) // dt.timedelta(microseconds=1))
        return out

    # ---- other engines --------------------------------------------------------------------------------------------

    def disturb(self) -> str:
        """Have another engine change the table; says what it did."""
        draws, table = self._scheduler.draws, self.table
        if table.is_dropped:
            return "nothing"
        what = draws.choice(["append", "compact", "compact", "expire", "orphans"])
        if what == "append" and not self.desc.keyed:
            fields = table.now().desc.schemas.current.fields
            strange = {
                i: v for i, v in zip(ids_of(self.desc.schemas.current), ("foreign", self.foreign_rows), strict=False)
            }
            table.append_foreign([{f.name: strange.get(field_id(f) or 0) for f in fields}], bucket=0)
            self.foreign_rows += 1
        elif what == "expire":
            # From the oldest on: with one left out, a lineage with a hole looks like that of a table rolled back.
            old = table.snapshot_ids()[:-1]
            if not old:
                return "nothing"
            named = table.reachable()
            table.forget(*old[: draws.randint(1, len(old))])
            self._remove(named)
        elif what == "orphans":
            self._remove_orphans()
        elif table.snapshot_ids():
            table.rewrite_foreign(backwards=draws.random() < 0.5)
        self.inspect()
        return what

    def _remove_orphans(self) -> None:
        """As `lakehead.iceberg.orphans` does, by a clock that is years ahead: files of any age count as old. Between
        its steps rounds go on."""
        listed = self.table.stored()
        self._scheduler.sleep(self._scheduler.draws.random() * 0.05)
        if listed <= self.table.reachable():
            return
        self.table.announce_cleanup()
        self.inspect()
        self._scheduler.sleep(self._scheduler.draws.random() * 0.05)
        self._remove(listed)

    def _remove(self, paths: set[str]) -> None:
        """Remove those of these files that nobody needs."""
        self.table.remove_orphans(paths - self.table.held(self.in_use()))


def tablet_of_row(desc: TableDescriptor, row: Mapping[str, Any]) -> TabletKey:
    """The tablet of a row that has its bucket."""
    return TabletKey(partition_name(desc.partition_by, tuple(row[c] for c in desc.partition_by)), row[BUCKET_COLUMN])


class SimulatedLakes:
    """The lakes of all tables, as their server's `LakeState`."""

    def __init__(self, make: Callable[[TableDescriptor], SimulatedLake]) -> None:
        self.by_table: dict[str, SimulatedLake] = {}
        self.versions: dict[str, LakeVersion] = {}
        self._make = make

    kinds = frozenset({"iceberg"})

    def serve(self, owner: LakeOwner) -> None:
        """See `LakeState.serve`."""

    def adopt(self, desc: TableDescriptor, ends: Mapping[TabletKey, int]) -> bool:
        """See `LakeState.adopt`."""
        raise NotImplementedError

    def create(self, desc: TableDescriptor) -> None:
        """See `LakeState.create`."""
        if desc.table_id not in self.by_table:
            self.by_table[desc.table_id] = self._make(desc)

    def require_alterable(self, desc: TableDescriptor) -> None:
        """See `LakeState.require_alterable`."""
        self.by_table[desc.table_id].table.now().load()

    def require_free(self, desc: TableDescriptor, *, besides: Sequence[str]) -> None:
        """See `LakeState.require_free`."""

    def drop(self, desc: TableDescriptor, *, purge: bool) -> None:
        """See `LakeState.drop`."""
        if desc.table_id in self.by_table:
            self.by_table[desc.table_id].drop()

    def info(self, desc: TableDescriptor, *, reading: bool = False) -> LakeReply:
        """See `LakeState.info`. The address stands for the version, whose files stay until `SimulatedLake.release`."""
        lake = self.by_table[desc.table_id]
        table = lake.table.under(desc)
        table.follow()
        version = table.load()
        location = f"{desc.table_id}/{len(self.versions)}"
        self.versions[location] = version
        lake.pin(version)
        return LakeReply(metadata_location=location, catalog_name="", catalog_properties={}, storage_properties={})

    def at(self, desc: TableDescriptor, info: LakeReply, moment: Moment | None) -> PinnedLake:
        """See `lakehead.lake.union_read.OpenLake`: the version that `info` has told."""
        assert moment is None
        version, lake = self.versions[info.metadata_location], self.by_table[desc.table_id]
        mark = mark_of(version)
        return PinnedLake(desc, lake.table.under(desc), version, version.current_id, mark.offsets if mark else {})

    def tiered_offsets(self, desc: TableDescriptor) -> Mapping[TabletKey, int]:
        """See `LakeState.tiered_offsets`."""
        # The mark is read under whatever definition the lake has; it may follow to a newer one meanwhile.
        while True:
            with contextlib.suppress(SchemaChangedError):
                mark = mark_of(self.by_table[desc.table_id].table.now().load())
                return mark.offsets if mark else {}

    def folders(self, desc: TableDescriptor) -> Sequence[str]:
        """See `LakeState.folders`."""
        return []

    def proven_offsets(
        self, desc: TableDescriptor, overwritten: Mapping[TabletKey, int] = {}
    ) -> Mapping[TabletKey, int]:
        """See `LakeState.proven_offsets`."""
        table = self.by_table[desc.table_id].table
        mark = mark_of(table.now().load())
        offsets = mark.held(overwritten) if mark else {}
        require(table.reachable() <= table.stored(), f"{desc.path}: the lake names files that are gone")
        return offsets
