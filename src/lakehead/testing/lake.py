"""A lake table in memory: what `LakeTable` promises, with the faults that catalogs, networks and other engines have.

One `MemoryLake` is the catalog, the storage and the table; any number of services may use it. Nothing here is random or
waits: faults are asked for, at each commit, and `MemoryLake.on_step` is called between steps, so that whoever tests may
raise there, or let others change the table.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from lakehead.env.randomness import Randomness
from lakehead.errors import CommitConflictError, LakeStateError, UnavailableError
from lakehead.lake.census import Census
from lakehead.lake.deleted_rows import find_deleted_rows
from lakehead.lake.lake_table import (
    CommitAnswer,
    Expired,
    LakeChange,
    LakeFile,
    Outcome,
    StagedCommit,
    Superseded,
    WrittenFile,
    missing_file,
)
from lakehead.lake.listing import SNAPSHOTS_SCHEMA
from lakehead.lake.marks import CLEANUP, OFFSETS, TABLE_ID, LakeMark, LakeSnapshot, LakeVersion
from lakehead.lake.superseded import superseded_in
from lakehead.log.netchange import NO_OFFSETS, Offsets, contains, union
from lakehead.predicate import Bound
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeUse
from lakehead.testing.lake_parts import Content, Data, Deletes, Row, State, row_as
from lakehead.types import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TableDescriptor,
    TableSchema,
    TabletKey,
)


class Fault(enum.Enum):
    """What goes wrong with one commit."""

    REQUEST_LOST = "request lost"
    """It does not land, and nobody knows."""
    ANSWER_LOST = "answer lost"
    """It lands, and nobody knows."""
    DELAYED = "delayed"
    """Nobody knows; it is on its way until `MemoryLake.deliver`, which lands it if nothing came between."""
    REFUSED = "refused"
    """It is refused for no reason."""
    REPEATED = "repeated"
    """It is delivered twice, and the second answer is the one that comes back."""


class MemoryLake:
    """Implements `lakehead.lake.lake_table.LakeTable`.

    Args:
        randomness: names files and snapshots.
        lands_late: whether the catalog is one where commits may be on their way after their caller has given up.

    Attributes:
        fault: asked at each commit of files and rows.
        expiry_fault: asked at each commit that takes snapshots out of the list.
        on_step: called with ``"load"``, ``"write data"``, ``"write deletes"``, ``"commit"`` (sent next) and
            ``"committed"`` (answered next). An exception that it raises is one of that step; at ``"committed"`` only a
            `BaseException` is, for a process that ends there.
    """

    def __init__(self, desc: TableDescriptor, randomness: Randomness, *, lands_late: bool = True) -> None:
        self.desc = desc
        self.lands_late = lands_late
        self.fault: Callable[[LakeChange], Fault | None] = lambda change: None
        self.expiry_fault: Callable[[], Fault | None] = lambda: None
        self.on_step: Callable[[str], None] = lambda step: None
        self._randomness = randomness
        self._files: dict[str, Data | Deletes | None] = {}
        self._delayed: list[Callable[[], bool]] = []
        self._told: dict[str, dict[int, Content]] = {}
        self._states: list[State | None] = [None]
        self.create(desc.table_id)

    @property
    def _state(self) -> State | None:
        return self._states[0]

    @_state.setter
    def _state(self, state: State | None) -> None:
        self._states[0] = state

    # ---- definitions --------------------------------------------------------------------------------------------

    def under(self, desc: TableDescriptor) -> MemoryLake:
        """The same table for who knows it under this definition."""
        made = copy.copy(self)
        made.desc = desc
        return made

    def now(self) -> MemoryLake:
        """The same table under the definition that the lake has."""
        return self if self._state is None else self.under(self._state.desc)

    def follow(self) -> bool:
        """Give the lake the definition that this is under, in one commit; False when it has it.

        Raises:
            SchemaChangedError: it has a newer one.
        """
        if not self._lags():
            return False
        self.on_step("commit")
        if lags := self._lags():
            self._known().desc = self.desc
        self.on_step("committed")
        return lags

    def _lags(self) -> bool:
        if self._state is None:
            return False
        has = self._state.desc.schema_id
        self.desc.require_schema(max(has, self.desc.schema_id))
        return has < self.desc.schema_id

    # ---- LakeTable ----------------------------------------------------------------------------------------------

    def load(self) -> LakeVersion:
        """See `LakeTable.load`."""
        self.on_step("load")
        state = self._state
        if state is None or state.properties.get(TABLE_ID) != self.desc.table_id:
            raise LakeStateError(f"table {self.desc.path} has no lake table of its own any more")
        if self._lags():
            raise LakeStateError(f"the lake table of {self.desc.path} has an older definition than its table")
        told = state.name
        self._told.setdefault(told, {}).update(state.contents)
        return LakeVersion(
            str(self.desc.path),
            state.table_uuid,
            state.current_id,
            dict(state.snapshots),
            dict(state.properties),
            state=told,
            handle=dict(state.contents),
        )

    def writer(self, version: LakeVersion, *, target_file_bytes: int) -> MemoryWriter:
        """See `LakeTable.writer`; all rows go to one file."""
        return MemoryWriter(self)

    def plan(
        self, version: LakeVersion, bounds: Sequence[Bound] = (), *, snapshot_id: int | None = None
    ) -> list[LakeFile]:
        """See `LakeTable.plan`; bounds skip no file."""
        content = _content(version, snapshot_id)
        deletes: dict[str, list[str]] = {}
        for path in content.deletes:
            deletes.setdefault(self._deletes(path).target, []).append(path)
        files = [self._lake_file(path, tuple(deletes.get(path, ()))) for path in content.data]
        return sorted(files, key=lambda f: (str(f.tablet), f.offsets or (-1, -1), f.path))

    def _lake_file(self, path: str, deletes: tuple[str, ...]) -> LakeFile:
        data = self._data(path)
        known = [r[OFFSET_COLUMN] for r in data.rows if r.get(OFFSET_COLUMN) is not None]
        bounds = (min(known), max(known)) if known else None
        rows = len(data.rows)
        partition = None if data.tablet is None else data.tablet.partition
        return LakeFile(path, rows, rows, data.tablet, bounds, rows - len(known), deletes, partition=partition)

    def read(
        self, files: Sequence[LakeFile], spec: ReadSpec, superseded: Superseded | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `LakeTable.read`; a batch per file."""
        own = pa.schema([*self.desc.schema, *SYSTEM_FIELDS])
        wanted = pa.schema([own.field(n) for n in spec.names])
        for f in files:
            batch = pa.RecordBatch.from_pylist(
                [{n: r.get(n) for n in own.names} for r in self._left(f, superseded)], own
            )
            rows = batch if spec.predicate is None else spec.predicate.filter(batch)
            if rows.num_rows:
                yield rows.select(wanted.names)

    def count(self, files: Sequence[LakeFile], superseded: Superseded | None = None) -> int:
        """See `LakeTable.count`."""
        return sum(len(self._left(f, superseded)) for f in files)

    def _left(self, file: LakeFile, superseded: Superseded | None) -> list[Row]:
        """Live rows of a file that the log does not replace."""
        replaced = superseded_in(file, superseded, str(self.desc.path)) if superseded else NO_OFFSETS
        gone = set(replaced.tolist())
        dead = union(*(self._deletes(p).positions for p in file.delete_files), NO_OFFSETS)
        deleted = set(dead.tolist())
        data, now = self._data(file.path), self.desc.schemas.current
        left = [r for i, r in enumerate(data.rows) if i not in deleted]
        return [row_as(r, data.schema, now) for r in left if r[OFFSET_COLUMN] is None or r[OFFSET_COLUMN] not in gone]

    def snapshot_at(self, version: LakeVersion, time_us: int) -> int | None:
        """See `LakeTable.snapshot_at`; the n-th commit is made at n microseconds."""
        then = [s for s in version.snapshots.values() if s.sequence_number == time_us]
        known = [s for s in version.lineage() if s.sequence_number <= time_us]
        return next((s.snapshot_id for s in (*then, *known)), None)

    def snapshots(self) -> pa.Table:
        """See `LakeTable.snapshots`."""
        state = self._known()
        listed = [
            {
                "snapshot_id": s.snapshot_id,
                "parent_id": s.parent_id,
                "committed_at": s.sequence_number,
                "is_current": s.snapshot_id == state.current_id,
                "epoch": s.mark.epoch if s.mark else None,
                "round_id": s.mark.round_id if s.mark else None,
                "offsets": s.summary.get(OFFSETS),
                "summary": list(s.summary.items()),
            }
            for s in map(state.snapshots.__getitem__, self.snapshot_ids())
        ]
        return pa.Table.from_pylist(listed, SNAPSHOTS_SCHEMA)

    def census(self, version: LakeVersion, *, snapshot_id: int | None = None) -> Census:
        """See `LakeTable.census`."""
        content = _content(version, snapshot_id)
        rows: Counter[TabletKey] = Counter()
        strangers = 0
        for path in content.data:
            live = self._live(content, path)
            known = sum(r.get(OFFSET_COLUMN) is not None for _, r in live)
            strangers += len(live) - known
            if (tablet := self._data(path).tablet) is not None and known:
                rows[tablet] += known
        return Census(dict(rows), strangers)

    def foreign_columns(self, version: LakeVersion) -> tuple[str, ...]:
        """See `LakeTable.foreign_columns`; nobody adds any."""
        return ()

    def stage(self, base: LakeVersion, change: LakeChange) -> StagedCommit:
        """See `LakeTable.stage`."""
        old, gone = _content(base), {f.path for f in change.removed}
        for lost in [f.path for f in change.added if f.path not in self._files]:
            raise CommitConflictError(f"{lost} was removed before the round that wrote it committed")
        stay = [f for f in self.plan(base) if f.path not in gone] if change.deleted else []
        added = [f.as_added() for f in change.added]
        hits = find_deleted_rows(stay, change.deleted, self._find_offsets, name=base.name)
        hits += find_deleted_rows(added, change.stale, self._find_offsets, name=base.name)
        made: list[str] = []
        try:
            for hit in hits:
                self.on_step("write deletes")
                made.append(self._put("deletes", Deletes(hit.file.path, hit.positions)))
        except Exception:
            self.discard(made)
            raise
        manifest = self._put("manifest", None)
        content = Content(
            (*(p for p in old.data if p not in gone), *(f.path for f in change.added)),
            (*(p for p in old.deletes if self._deletes(p).target not in gone), *made),
            (*old.manifests, manifest),
        )
        return StagedCommit(base, self._new_snapshot_id(), (*made, manifest), (change, content))

    def _find_offsets(self, wanted: Sequence[tuple[LakeFile, Offsets]]) -> list[tuple[Offsets, Offsets]]:
        out = []
        for file, offsets in wanted:
            held = self._data(file.path).offsets
            at = np.flatnonzero(contains(offsets, held))
            out.append((at, held[at]))
        return out

    def publish(self, staged: StagedCommit) -> CommitAnswer:
        """See `LakeTable.publish`."""
        self.on_step("commit")
        change, _ = staged.own
        answer = self._send(self.fault(change), lambda: self._land(staged))
        self.on_step("committed")
        return answer

    def _send(self, fault: Fault | None, land: Callable[[], bool]) -> CommitAnswer:
        """What the catalog makes of one commit, and what it says of it."""
        outcome = Outcome.UNKNOWN
        if fault is Fault.DELAYED:
            self._delayed.append(land)
        elif fault is Fault.REFUSED:
            outcome = Outcome.REFUSED
        elif fault is not Fault.REQUEST_LOST:
            landed = land()
            if fault is Fault.REPEATED:
                landed = land()
            if fault is not Fault.ANSWER_LOST:
                outcome = Outcome.LANDED if landed else Outcome.REFUSED
        cause = None if outcome is Outcome.LANDED else ConnectionError(str(fault.value if fault else "conflict"))
        return CommitAnswer(outcome, cause)

    def added_paths(self, version: LakeVersion, snapshot_id: int) -> frozenset[str] | None:
        """See `LakeTable.added_paths`."""
        state = self._known()
        if snapshot_id not in state.snapshots:
            return None
        parent = state.snapshots[snapshot_id].parent_id
        before = state.contents.get(parent, Content()) if parent is not None else Content()
        return frozenset(state.contents[snapshot_id].paths - before.paths)

    def expire(
        self, version: LakeVersion, snapshot_ids: Collection[int], in_use: Callable[[], Iterable[LakeUse]]
    ) -> Expired:
        """See `LakeTable.expire`."""
        uses = list(in_use())
        self.held(uses)
        stay = {i for u in uses for i in ([u.snapshot] if u.snapshot is not None else self._told[u.metadata])}
        snapshot_ids = [i for i in snapshot_ids if i not in stay]
        if not snapshot_ids:
            return Expired(0, 0)
        self.on_step("commit")
        named = {p for i in snapshot_ids for p in self._content_of(i).paths}
        answer = self._send(self.expiry_fault(), lambda: self._land_expiry(version, snapshot_ids))
        self.on_step("committed")
        if answer.outcome is Outcome.UNKNOWN:
            raise UnavailableError("the catalog did not answer while snapshots expired") from answer.cause
        if answer.outcome is Outcome.REFUSED and (
            self._state is None or not self._state.snapshots.keys().isdisjoint(snapshot_ids)
        ):
            raise CommitConflictError("others changed the table while snapshots expired") from answer.cause
        gone = named - self.reachable() - self.held(in_use())
        self.discard(gone)
        return Expired(len(snapshot_ids), len(gone))

    def discard(self, paths: Iterable[str]) -> None:
        """See `LakeTable.discard`.

        Raises:
            AssertionError: a snapshot that is listed names the file.
        """
        for path in paths:
            assert path not in self.reachable(), f"{path} is removed, but a snapshot names it"
            self._files.pop(path, None)

    def _land(self, staged: StagedCommit) -> bool:
        state, base = self._state, staged.base
        if state is None or state.table_uuid != base.table_uuid or state.name != base.state:
            return False
        change: LakeChange
        change, content = staged.own
        assert content.paths <= self._files.keys(), f"files are gone: {content.paths - self._files.keys()}"
        mark = LakeMark(
            staged.snapshot_id,
            change.table_id,
            change.epoch,
            change.round_id,
            change.offsets,
            state.sequence_number + 1,
            change.rows,
            change.overwritten,
        )
        self._add_snapshot(content, mark.to_summary(), staged.snapshot_id)
        state.properties.update(mark.to_properties())
        return True

    def _content_of(self, snapshot_id: int) -> Content:
        return self._state.contents.get(snapshot_id, Content()) if self._state else Content()

    def _land_expiry(self, version: LakeVersion, snapshot_ids: Collection[int]) -> bool:
        state = self._state
        if state is None or (state.table_uuid, state.current_id) != (version.table_uuid, version.current_id):
            return False
        if not state.snapshots.keys() >= set(snapshot_ids):
            return False
        self.forget(*snapshot_ids)
        return True

    def _add_snapshot(self, content: Content, summary: Mapping[str, str], snapshot_id: int | None = None) -> int:
        state = self._known()
        state.sequence_number += 1
        made = snapshot_id or self._new_snapshot_id()
        number = state.sequence_number
        state.snapshots[made] = LakeSnapshot(made, state.current_id, number, dict(summary), committed_us=number)
        state.contents[made] = content
        state.current_id = made
        return made

    # ---- what others do -----------------------------------------------------------------------------------------

    def deliver(self) -> bool:
        """Let the oldest delayed commit arrive; whether it landed. False when there is none."""
        return self._delayed.pop(0)() if self._delayed else False

    def create(self, table_id: str) -> None:
        """The table, new and empty, in the place of any other."""
        self._state = State(self._randomness.uuid_hex(), {TABLE_ID: table_id}, self.desc)

    def drop(self) -> None:
        """Take the table out of the catalog; its files stay."""
        self._state = None

    def append_foreign(self, rows: Sequence[Row], bucket: int | None = None) -> int:
        """Rows that another engine adds: they have no offset. Returns the snapshot, as all of these do."""
        tablet = None if bucket is None else TabletKey("", bucket)
        schema = self._known().desc.schemas.current
        data = Data(tablet, tuple({**r, BUCKET_COLUMN: bucket, OFFSET_COLUMN: None} for r in rows), schema)
        content = self._known().content
        return self._foreign(replace(content, data=(*content.data, self._put("data", data))))

    def delete_foreign(self, gone: Callable[[Row], bool]) -> int:
        """Delete rows by position."""
        content = self._known().content
        made = []
        for path in content.data:
            hit = [i for i, r in enumerate(self._data(path).rows) if gone(r)]
            if hit:
                made.append(self._put("deletes", Deletes(path, np.array(hit, np.int64))))
        return self._foreign(replace(content, deletes=(*content.deletes, *made)))

    def rewrite_foreign(self, *, backwards: bool = False) -> int:
        """Compact each tablet's files into one, without what was deleted; ``backwards`` leaves rows out of order."""
        content = self._known().content
        by_tablet: dict[TabletKey | None, list[str]] = {}
        for path in content.data:
            by_tablet.setdefault(self._data(path).tablet, []).append(path)
        made = []
        for paths in by_tablet.values():
            now = self._known().desc.schemas.current
            rows = tuple(row_as(r, schema, now) for p in paths for schema, r in self._live(content, p))
            if rows:
                data = Data(self._data(paths[0]).tablet, rows[::-1] if backwards else rows, now)
                made.append(self._put("data", data))
        return self._foreign(Content(tuple(made), (), ()))

    def forget(self, *snapshot_ids: int, files: bool = False) -> None:
        """Take snapshots out of the list, and, with ``files``, remove what only they name."""
        state = self._known()
        assert state.current_id not in snapshot_ids
        before = self.reachable()
        for i in snapshot_ids:
            del state.snapshots[i], state.contents[i]
        for s in list(state.snapshots.values()):
            if s.parent_id in snapshot_ids:
                state.snapshots[s.snapshot_id] = replace(s, parent_id=None)
        for path in before - self.reachable() if files else ():
            self._files.pop(path, None)

    def clean_up(self) -> None:
        """Remove orphans, however young."""
        self.announce_cleanup()
        self.remove_orphans(self.stored())

    def announce_cleanup(self) -> None:
        """From now on no round that was planned before commits."""
        values = {CLEANUP: self._randomness.uuid_hex()}
        content = self._known().content
        self._add_snapshot(replace(content, manifests=(*content.manifests, self._put("manifest", None))), values)
        self._known().properties.update(values)

    def remove_orphans(self, listed: set[str]) -> None:
        """Remove those of these files that no snapshot names."""
        for path in listed - self.reachable():
            self._files.pop(path, None)

    def lose(self, paths: Iterable[str]) -> None:
        """Remove files, whoever names them."""
        for path in paths:
            del self._files[path]

    def roll_back(self, snapshot_id: int) -> None:
        """Make an older snapshot the current one."""
        self._known().current_id = snapshot_id

    def _foreign(self, content: Content) -> int:
        return self._add_snapshot(replace(content, manifests=(self._put("manifest", None),)), {})

    @property
    def is_dropped(self) -> bool:
        """Whether the catalog has no such table."""
        return self._state is None

    # ---- what there is ------------------------------------------------------------------------------------------

    def rows(self, snapshot_id: int | None = None) -> list[Row]:
        """Live rows of a snapshot, None for the current one, with their system columns."""
        return [row_as(r, schema, self.desc.schemas.current) for schema, r in self.written(snapshot_id)]

    def written(self, snapshot_id: int | None = None) -> list[tuple[TableSchema, Row]]:
        """`rows` as they were written, with the definition of each."""
        state = self._known()
        content = state.content if snapshot_id is None else state.contents[snapshot_id]
        return [r for path in content.data for r in self._live(content, path)]

    def snapshot_ids(self) -> list[int]:
        """Snapshots that are listed, oldest first."""
        return sorted(self._known().snapshots, key=lambda i: self._known().snapshots[i].sequence_number)

    def stored(self) -> set[str]:
        """Addresses of all files."""
        return set(self._files)

    def reachable(self) -> set[str]:
        """Addresses that listed snapshots name."""
        return {p for c in self._state.contents.values() for p in c.paths} if self._state else set()

    def held(self, uses: Iterable[LakeUse]) -> set[str]:
        """Addresses that these reads need, though their snapshots may not be listed any more.

        Raises:
            UnavailableError: no version of such a state was ever loaded.
        """
        out: set[str] = set()
        for use in uses:
            if use.metadata not in self._told:
                raise UnavailableError(f"nobody knows what version {use.metadata} of {self.desc.path} names")
            told = self._told[use.metadata]
            contents = told.values() if use.snapshot is None else [told[use.snapshot]]
            out.update(p for content in contents for p in content.paths)
        return out

    def _live(self, content: Content, path: str) -> list[tuple[TableSchema, Row]]:
        dead = union(*(d.positions for d in map(self._deletes, content.deletes) if d.target == path), NO_OFFSETS)
        data, gone = self._data(path), set(dead.tolist())
        return [(data.schema, r) for i, r in enumerate(data.rows) if i not in gone]

    def _known(self) -> State:
        assert self._state is not None, "the table was dropped"
        return self._state

    def _data(self, path: str) -> Data:
        data = self._files.get(path)
        if not isinstance(data, Data):
            raise missing_file(path)
        return data

    def _deletes(self, path: str) -> Deletes:
        deletes = self._files.get(path)
        if not isinstance(deletes, Deletes):
            raise missing_file(path)
        return deletes

    def _put(self, kind: str, file: Data | Deletes | None) -> str:
        path = f"memory:///{kind}-{self._randomness.uuid_hex()}"
        self._files[path] = file
        return path

    def _new_snapshot_id(self) -> int:
        return int(self._randomness.uuid_hex()[:15], 16)


@dataclass(frozen=True)
class MemoryWriter:
    """Writes rows to a `MemoryLake`."""

    lake: MemoryLake

    def write(self, batches: Iterable[pa.RecordBatch], tablet: TabletKey) -> list[WrittenFile]:
        """See `lakehead.lake.lake_table.DataWriter`."""
        rows = [r for b in batches for r in b.to_pylist()]
        self.lake.on_step("write data")
        if not rows:
            return []
        path = self.lake._put("data", Data(tablet, tuple(rows), self.lake.desc.schemas.current))
        return [WrittenFile(path, len(rows), len(rows), tablet)]


def _content(version: LakeVersion, snapshot_id: int | None = None) -> Content:
    at = version.current_id if snapshot_id is None else snapshot_id
    return version.handle[at] if at is not None else Content()
