"""One lake snapshot of a table, as readers see it: pinned at one version, with the offsets that it holds."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from lakehead.client.received import told_tablets
from lakehead.errors import InvalidRequestError, SnapshotNotFoundError
from lakehead.lake.census import check_rows
from lakehead.lake.formats import format_of
from lakehead.lake.lake_table import LakeFile, LakeTable, Superseded, files_of
from lakehead.lake.marks import LakeMark, LakeVersion, mark_of
from lakehead.predicate import Bound
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeReply
from lakehead.types import TableDescriptor, TabletKey


@dataclass(frozen=True)
class PinnedLake:
    """A lake snapshot.

    Attributes:
        table: fixed at a version; reading it needs no catalog.
        snapshot_id: the snapshot to read; None while nothing was ever committed.
        offsets: exclusive end of what the snapshot holds, per tablet; tablets not named hold nothing.
        rows: how many rows it has; None where they have to be counted.
        overwritten: of tablets whose partition was overwritten, the offset below which no row is there any more.
        gone: tablets of which the snapshot still has such rows: nothing of it is read of them.
    """

    desc: TableDescriptor
    table: LakeTable
    version: LakeVersion
    snapshot_id: int | None
    offsets: Mapping[TabletKey, int]
    rows: int | None = None
    overwritten: Mapping[TabletKey, int] = field(default_factory=dict)
    gone: frozenset[TabletKey] = frozenset()

    @classmethod
    def current(cls, desc: TableDescriptor, info: LakeReply) -> PinnedLake:
        """The lake as the server saw it.

        Raises:
            LakeStateError: it was rolled back or replaced, or others changed what tiering relies on.
        """
        return cls.at(desc, info, None)

    @classmethod
    def at(cls, desc: TableDescriptor, info: LakeReply, snapshot: int | dt.datetime | None) -> PinnedLake:
        """The lake at one of its snapshots, at the one that was current at a time, or None for the current one.

        Raises:
            SnapshotNotFoundError: there is no such snapshot (any more).
            LakeStateError: it was rolled back or replaced, or others changed what tiering relies on.
        """
        found = cls.of(desc, format_of(desc).at(desc, info), snapshot)
        if snapshot is not None or not info.overwritten:
            return found
        return found.without({t.key: t.end for t in told_tablets(desc, info.overwritten)})

    @classmethod
    def of(cls, desc: TableDescriptor, table: LakeTable, snapshot: int | dt.datetime | None = None) -> PinnedLake:
        """`at`, of a lake table as it is loaded now."""
        version = table.load()
        snapshot_id = _as_of(desc, table, version, snapshot) if isinstance(snapshot, dt.datetime) else snapshot
        mark = checked_mark(desc, table, version, snapshot_id)
        found = version.current_id if snapshot_id is None else snapshot_id
        held, rows = mark.offsets if mark else {}, _rows(desc, version, mark, found)
        return cls(desc, table, version, found, held, rows, mark.overwritten if mark else {})

    def without(self, overwritten: Mapping[TabletKey, int]) -> PinnedLake:
        """The same once the rows of these tablets below these offsets are gone, in so far as it has them."""
        gone = {tablet for tablet, before in overwritten.items() if before > self.overwritten.get(tablet, 0)}
        if not gone:
            return self
        new = {tablet: overwritten[tablet] for tablet in gone}
        return replace(
            self,
            offsets={**self.offsets, **new},  # what the lake has from above is in its files that are not read
            rows=None,
            overwritten={**self.overwritten, **new},
            gone=self.gone | gone,
        )

    def as_committed(self) -> PinnedLake:
        """All that the snapshot itself has."""
        return replace(self, gone=frozenset())

    def plan(self, bounds: Sequence[Bound] = ()) -> Sequence[LakeFile]:
        """See `LakeTable.plan`; none where nothing was ever committed."""
        if self.snapshot_id is None:
            return []
        files = self.table.plan(self.version, bounds, snapshot_id=self.snapshot_id)
        if not self.gone:
            return files
        over = {f.path for f in files_of(files, self.gone)}
        return [f for f in files if f.path not in over]

    def read(
        self, files: Sequence[LakeFile], spec: ReadSpec, superseded: Superseded | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `LakeTable.read`."""
        return self.table.read(files, spec, superseded)


def checked_mark(
    desc: TableDescriptor, table: LakeTable, version: LakeVersion, snapshot_id: int | None = None
) -> LakeMark | None:
    """The mark that decides what a lake snapshot (the current one when None) holds, once it was checked that it has the
    rows that tiering left.

    Raises:
        SnapshotNotFoundError: there is no such snapshot (any more).
        LakeStateError: it was rolled back or replaced, or others changed what tiering relies on.
    """
    mark = mark_of(version, snapshot_id)
    count = functools.partial(table.census, version, snapshot_id=snapshot_id)
    check_rows(version, mark, count, keyed=desc.keyed, snapshot_id=snapshot_id)
    return mark


def _rows(desc: TableDescriptor, version: LakeVersion, mark: LakeMark | None, snapshot_id: int | None) -> int | None:
    """What the mark says of the tablets' rows, if there are no others: a log table's lake takes those of other engines,
    which no mark counts."""
    if mark is None or mark.rows is None or snapshot_id is None:
        return None
    rows, snapshot = sum(mark.rows.values()), version.snapshots[snapshot_id]
    return rows if desc.keyed or snapshot.records == rows else None


def _as_of(desc: TableDescriptor, table: LakeTable, version: LakeVersion, time: dt.datetime) -> int:
    if time.tzinfo is None:
        raise InvalidRequestError("snapshot= needs a datetime with a time zone: datetime(..., tzinfo=timezone.utc)")
    found = table.snapshot_at(version, int(time.timestamp() * 1_000_000))
    if found is None:
        raise SnapshotNotFoundError(
            f"the lake of {desc.path} has no snapshot of {time.isoformat()}: it began later, or that one has expired;"
            " lake.snapshots() lists those that are there, whose ids snapshot= takes, too",
            table=str(desc.path),
        )
    return found
