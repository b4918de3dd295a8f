"""The union read: lake rows at one snapshot, and the log from exactly the offsets where that snapshot ends.

A read is pinned by `pin`: first the lake snapshot S, then the watermarks, so that per tablet the lake's
``[0, offset(S))`` and the log's ``[offset(S), high watermark)`` join without gap or overlap. For keyed tables the hot
range is reduced to its net change; what it supersedes is taken out of the lake rows by offset. Predicates and limits
apply after that.
"""

from __future__ import annotations

import datetime as dt
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

import pyarrow as pa

from lakehead.client.received import told_tablets
from lakehead.client.table import TableHandle
from lakehead.errors import (
    LakeFileMissingError,
    LakeStateError,
    OffsetOutOfRangeError,
    SchemaChangedError,
    UnavailableError,
)
from lakehead.lake.known_changes import KnownOf, known_changes, note_changes
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.log.netchange import NO_CHANGE, change_of, kept_rows
from lakehead.predicate import Predicate
from lakehead.predicate.bounds import keys_of, may_meet
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeReply, LakeUse, TabletState
from lakehead.types import (
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    PREV_OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TableDescriptor,
    TabletKey,
    Tier,
)

Moment = int | dt.datetime
"""A lake snapshot's id, or a time."""
OpenLake = Callable[[TableDescriptor, LakeReply, Moment | None], PinnedLake]
"""A lake as the server saw it, at a moment or, for None, at its current snapshot; see `PinnedLake.at`."""
_CHANGE_COLUMNS = (CHANGE_TYPE_COLUMN, PREV_OFFSET_COLUMN)
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Pin:
    """What a read covers.

    Attributes:
        lake: the lake snapshot to read; None for none.
        ranges: log offsets ``[start, end)`` to read, per tablet; of a keyed table without a lake, the rows that are
            live at each end.
        lease: what the server holds it by.
        log: all log offsets ``[start, end)`` that were readable, per tablet.
        of: the pin that this one is a part of, and whose lease it reads under.
        live_rows: how many rows the whole read of a keyed table has; None where that is not known.
        incarnation: of the servers: what they have at these offsets stays the same while it does; empty: not known.
    """

    lake: PinnedLake | None
    ranges: Mapping[TabletKey, tuple[int, int]]
    lease: str | None = None
    log: Mapping[TabletKey, tuple[int, int]] = field(default_factory=dict)
    of: Pin | None = None
    live_rows: int | None = None
    incarnation: str = ""

    def unheld(self) -> Pin:
        """What it covers, for who keeps that longer than its lease."""
        return replace(self, lease=None, of=None)

    def of_lake(self) -> Pin:
        """What the lake holds of it alone."""
        lake = self.lake and self.lake.as_committed()
        return replace(self, lake=lake, ranges={}, of=self, live_rows=None)


def pin(
    handle: TableHandle,
    *,
    tier: Tier = "union",
    snapshot: Moment | None = None,
    held: bool = True,
    planned: bool = False,
    open_lake: OpenLake = PinnedLake.at,
) -> Pin:
    """Pin a read of a table as of now, under a lease: nothing is deleted under it.

    Args:
        held: the lease lasts as long as the `Pin`; False: until it is released, or some time after its last use.
        planned: others carry the read out and nobody holds the lease: it lasts for a while after its last use, unless
            the server has no room.
        open_lake: what finds the snapshot.

    Raises:
        NoLakeError: the lake is asked for and the table has none.
        SnapshotNotFoundError: there is no such lake snapshot.
        LakeStateError: the log no longer reaches back to where the lake ends.
    """
    desc = handle.desc
    if tier == "lake" or snapshot is not None:
        desc.require_lake()
    (pinned,) = _pinned(
        [handle], snapshot, with_log=tier != "lake" and snapshot is None, planned=planned, open_lake=open_lake
    )
    if tier == "hot":
        pinned = replace(pinned, lake=None, live_rows=None)
    elif tier == "lake" and pinned.lake is not None:
        pinned = replace(pinned, lake=pinned.lake.as_committed())
    return _held(handle, pinned) if held and not planned else pinned


def pin_together(handles: Sequence[TableHandle]) -> list[Pin]:
    """Pin union reads of several tables of one connection as of one moment: who sees a write in one of them sees every
    write that was acknowledged before it in the others.

    Raises:
        LakeStateError: as `pin`.
    """
    return [_held(h, p) for h, p in zip(handles, _pinned(handles, None, with_log=True), strict=True)]


def _held(handle: TableHandle, pinned: Pin) -> Pin:
    if pinned.lease is not None:
        handle.leases.keep(pinned.lease)
        weakref.finalize(pinned, handle.leases.release, pinned.lease).atexit = False
    return pinned


def _pinned(
    handles: Sequence[TableHandle],
    snapshot: Moment | None,
    *,
    with_log: bool,
    planned: bool = False,
    open_lake: OpenLake = PinnedLake.at,
) -> list[Pin]:
    seen: list[list[int | None]] = []
    while handles:
        # The lake first: a round that commits in between only makes the log's part longer than needed.
        infos = [h.lake() if h.desc.lake is not None else None for h in handles]
        views = [None if i is None else open_lake(h.desc, i, snapshot) for h, i in zip(handles, infos, strict=True)]
        leases = handles[0].leases.open(
            [h.leased(_use(i, v)) for h, i, v in zip(handles, infos, views, strict=True)],
            planned=planned,
        )
        pins, gaps, behind = [], [], False
        for handle, view, lease in zip(handles, views, leases, strict=True):
            desc = handle.desc
            told_tablets(desc, lease.tablets)
            log = {t.key: (t.log_start, t.high_watermark) for t in lease.tablets}
            ranges = {t.key: (_hot_start(desc, view, t), t.high_watermark) for t in lease.tablets} if with_log else {}
            # What is live at the end of the log is all of it, the lake's rows too.
            live_rows = sum(t.rows for t in lease.tablets) if desc.keyed and with_log else None
            pins.append(Pin(view, ranges, lease.lease, log, live_rows=live_rows, incarnation=lease.incarnation))
            if view is not None and with_log:  # a partition was overwritten after we read the lake
                behind |= any(t.overwritten > view.overwritten.get(t.key, 0) for t in lease.tablets)
            if not desc.keyed or view is not None:
                gaps += [(desc, key) for key, (start, _) in ranges.items() if start < log[key][0]]
        if not gaps and not behind:
            return pins
        for lease in leases:
            handles[0].leases.release(lease.lease)
        if behind:
            continue
        read = [None if v is None else v.snapshot_id for v in views]
        if read in seen or not any(v is not None for v in views):
            raise _gap(*gaps[0], pins[[h.desc for h in handles].index(gaps[0][0])])
        # A round was committed and the log trimmed after we read the lake: once more.
        seen.append(read)
    return []


def _use(info: LakeReply | None, view: PinnedLake | None) -> LakeUse | None:
    # Of a lake that was empty a read needs no file: its metadata goes some commits later, and who cleans up would wait.
    if info is None or view is None or view.snapshot_id is None:
        return None
    return LakeUse(metadata=info.metadata_location, snapshot=view.snapshot_id)


def _gap(desc: TableDescriptor, key: TabletKey, pinned: Pin) -> LakeStateError:
    return LakeStateError(
        f"the log of {desc.path} tablet {key} begins at {pinned.log[key][0]}, but its lake ends at"
        f" {pinned.ranges[key][0]}: rows between are in neither, restore the lake or the log",
        table=str(desc.path),
    )


def _hot_start(desc: TableDescriptor, view: PinnedLake | None, tablet: TabletState) -> int:
    if view is not None:
        return view.offsets.get(tablet.key, 0)
    return 0 if desc.keyed else tablet.log_start


class UnionRead:
    """Carries out a pinned read; may be repeated."""

    def __init__(
        self,
        handle: TableHandle,
        pinned: Pin,
        spec: ReadSpec,
    ) -> None:
        self.handle = handle
        self._desc = handle.desc
        self.pinned = pinned
        self._columns = list(spec.columns)
        self.predicate = spec.predicate
        self._limit = spec.limit
        self.spec = spec
        fields = [self._desc.schema.field(c) for c in self._columns]
        self.schema = pa.schema([*fields, *(SYSTEM_FIELDS if spec.system_columns else ())])

    # ---- rows -------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Rows with the columns of `schema`, the lake's first.

        Raises:
            TableNotFoundError: the table was dropped, and what is left to read with it.
        """
        left = self._limit
        for batch in self._there(self._all_batches()):
            if left is not None:
                batch = batch.slice(0, left)
                left -= batch.num_rows
            if batch.num_rows:
                yield batch
            if left == 0:
                return

    def _there(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except LakeFileMissingError:
            self.handle.now()  # raises where they are not lost, but were dropped with the table
            raise

    def _all_batches(self) -> Iterator[pa.RecordBatch]:
        by_key = self.rows_by_key()
        if by_key is not None:
            yield from (batch.select(self.schema.names) for batch in by_key)
            return
        if not self._changes_lake:
            yield from self._lake_rows({})
            yield from self.hot_rows()[1]
            return
        begun, lake, hot = self._of_one_server(self._begun)
        if begun is not None:
            yield begun
            yield from lake
        yield from hot

    def _begun(self, of: KnownOf) -> tuple[pa.RecordBatch | None, Iterator[pa.RecordBatch], list[pa.RecordBatch]]:
        """The first lake rows, all others, and the hot rows: while these are read, the lake's files are read on."""
        superseded, rows = self._changes_of(of, self._read_columns)
        lake = self._lake_rows(superseded)
        begun = next(lake, None)
        return begun, lake, list(self._met(rows))

    @functools.cached_property
    def _keys(self) -> pa.RecordBatch | None:
        """The keys of all rows that can match, where the whole table is read and they are few."""
        union = bool(self.pinned.ranges) and (self.pinned.lake is None) == (self._desc.lake is None)
        if not self._desc.keyed or not union or self.spec.system_columns:
            return None
        return keys_of(self.spec.bounds, self._desc.key_columns)

    def rows_by_key(self) -> list[pa.RecordBatch] | None:
        """The rows, with all columns, from the key index of the servers; None when it cannot tell them as they were
        pinned."""
        if self._keys is None or self.predicate is None:
            return None
        try:
            found = self.handle.lookups.as_of(self._keys, {key: end for key, (_, end) in self.pinned.ranges.items()})
        except SchemaChangedError:
            return None
        return None if found is None else [self.predicate.filter(batch) for batch in found.to_batches()]

    def _log_rows(
        self,
        columns: Sequence[str],
        predicate: Predicate | None = None,
        ranges: Mapping[TabletKey, tuple[int, int]] | None = None,
        incarnation: str = "",
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        """What the server sends of the pinned ranges, or of parts of them: records; of a keyed table without a lake,
        live rows. One that has another ``incarnation`` than the one that is asked for refuses."""
        live = self._desc.keyed and self._desc.lake is None
        pinned, ranges = self.pinned, self._ranges if ranges is None else ranges
        try:
            yield from self.handle.log.read_ranges(
                ranges, ReadSpec(tuple(columns), predicate), live=live, lease=pinned.lease, incarnation=incarnation
            )
        except OffsetOutOfRangeError as e:
            raise UnavailableError(
                f"what a read of {self._desc.path} was pinned to is no longer held, because its server was started"
                f" again or the read rested for too long, and was trimmed since: read again ({e})",
                table=str(self._desc.path),
            ) from e

    @functools.cached_property
    def _ranges(self) -> Mapping[TabletKey, tuple[int, int]]:
        """The pinned ranges of tablets whose partition may hold matching rows: a row never leaves its partition."""
        desc, ranges = self._desc, self.pinned.ranges
        bounds = [b for b in self.spec.bounds if b.column in desc.partition_by]
        if not bounds:
            return ranges
        read = {
            name
            for name in {key.partition for key in ranges}
            if may_meet(bounds, dict(zip(desc.partition_by, desc.partition_values(name), strict=True)))
        }
        return {key: at for key, at in ranges.items() if key.partition in read}

    @functools.cached_property
    def _lake_files(self) -> Sequence[LakeFile]:
        """Files of the lake that may hold rows: planned once, however often they are read."""
        lake = self.pinned.lake
        return [] if lake is None else lake.plan(self.spec.bounds)

    def _lake_rows(self, superseded: Superseded) -> Iterator[pa.RecordBatch]:
        lake = self.pinned.lake
        if lake is not None and lake.snapshot_id is not None:
            yield from lake.read(self._lake_files, self.spec, superseded)

    def hot_rows(self) -> tuple[Superseded, Iterator[pa.RecordBatch]]:
        """Lake offsets that the hot range supersedes, and the hot rows that meet the predicate, with the columns of
        `schema`."""
        if not self._changes_lake:
            return {}, (b for _, b in self._log_rows(self.schema.names, self.predicate))
        superseded, hot = self._hot_changes(self._read_columns)
        return superseded, self._met(hot)

    @property
    def _read_columns(self) -> list[str]:
        return list(dict.fromkeys((*self.schema.names, *(self.predicate.columns if self.predicate else ()))))

    def _met(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Those that meet the predicate, with the columns of `schema`."""
        met = (b if self.predicate is None else self.predicate.filter(b) for b in rows)
        return (b.select(self.schema.names) for b in met)

    def superseded(self) -> Superseded:
        """Lake offsets that the hot range supersedes, as who reads its rows elsewhere has them now."""
        return self._changes_of(KnownOf("", self._desc.table_id), [])[0] if self._changes_lake else {}

    @property
    def _changes_lake(self) -> bool:
        return self._desc.keyed and self._desc.lake is not None

    def _hot_changes(self, columns: list[str]) -> tuple[Superseded, Iterator[pa.RecordBatch]]:
        """Lake offsets that the hot range supersedes, and all hot rows to add, with these columns."""

        def read(of: KnownOf) -> tuple[Superseded, Iterator[pa.RecordBatch]]:
            superseded, rows = self._changes_of(of, columns)
            return superseded, iter(list(rows))

        return self._of_one_server(read)

    def _of_one_server(self, read: Callable[[KnownOf], _Read]) -> _Read:
        """Read with what is known of the server that the read was pinned on, or, where it was started again since, all
        as it is there: where it lost rows, others may be by now."""
        of = KnownOf(self.pinned.incarnation, self._desc.table_id)
        try:
            return read(of)
        except UnavailableError as e:
            if not of.incarnation or not isinstance(e.__cause__, OffsetOutOfRangeError):
                raise
        return read(of._replace(incarnation=""))

    def _changes_of(self, of: KnownOf, columns: list[str]) -> tuple[Superseded, Iterator[pa.RecordBatch]]:
        """As `_hot_changes`; the rows of which it is known what they change are read when they are asked for."""
        ranges = self._ranges
        known = known_changes(of, ranges)
        ends = {key: ranges[key][0] + len(change.keep) for key, change in known.items()}
        later: dict[TabletKey, list[pa.RecordBatch]] = {}
        rest = {key: (ends.get(key, start), end) for key, (start, end) in ranges.items()}
        asked = list(dict.fromkeys((*columns, *_CHANGE_COLUMNS)))
        for key, batch in self._log_rows(asked, ranges=rest, incarnation=of.incarnation):
            later.setdefault(key, []).append(batch)
        changes = dict(known)
        for key, batches in later.items():
            changes[key] = change_of(batches, ranges[key][0], known.get(key, NO_CHANGE))
        note_changes(of, {key: (ranges[key][0], changes[key]) for key in later})

        def rows() -> Iterator[pa.RecordBatch]:
            before = {key: (ranges[key][0], end) for key, end in ends.items()}
            for key, found in groupby(self._known_rows(of, columns, before), key=itemgetter(0)):
                yield from kept_rows((batch for _, batch in found), changes[key].keep, columns)
            for key, batches in later.items():
                yield from kept_rows(batches, changes[key].keep[-sum(b.num_rows for b in batches) :], columns)

        return {key: change.superseded for key, change in changes.items()}, rows()

    def _known_rows(
        self, of: KnownOf, columns: list[str], ranges: Mapping[TabletKey, tuple[int, int]]
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        """Rows of ranges whose net change is known; without columns these are not asked for."""
        if columns and ranges:
            yield from self._log_rows(columns, ranges=ranges, incarnation=of.incarnation)
            return
        for key, (start, end) in ranges.items():
            yield key, pa.record_batch({"": pa.nulls(end - start)}).select([])

    # ---- counts -----------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Number of rows that `batches` yields."""
        if self.predicate is None:
            total = self._count_all()
        elif (by_key := self.rows_by_key()) is not None:
            total = sum(b.num_rows for b in by_key)
        else:
            narrow = UnionRead(self.handle, self.pinned, ReadSpec((), self.predicate, system_columns=True))
            total = sum(b.num_rows for b in narrow.batches())
        return total if self._limit is None else min(total, self._limit)

    def _count_all(self) -> int:
        if self.pinned.live_rows is not None:
            return self.pinned.live_rows
        superseded: Superseded = {}
        if self._desc.keyed and self._desc.lake is None:
            total = sum(b.num_rows for _, b in self._log_rows([OFFSET_COLUMN]))
        elif self._desc.keyed:
            superseded, hot = self._hot_changes([])
            total = sum(b.num_rows for b in hot)
        else:
            total = sum(end - start for start, end in self.pinned.ranges.values())
        lake = self.pinned.lake
        if lake is None or lake.snapshot_id is None:
            return total
        if lake.rows is not None and not superseded:
            return total + lake.rows
        return total + lake.table.count(self._lake_files, superseded)

    def explain(self) -> str:
        """What is read from where, as text."""
        view = self.pinned.lake
        hot = sum(end - start for start, end in self.pinned.ranges.values())
        lines = [
            f"union read of {self._desc.path} ({'primary-key' if self._desc.keyed else 'log'} table)",
            f"  columns: {', '.join(self.schema.names) or '(none)'}",
            f"  where:   {self.predicate.arrow if self.predicate else '(all rows)'}",
        ]
        if self._limit is not None:
            lines.append(f"  limit:   {self._limit}")
        if self._keys is not None:
            lines.append(
                f"  keys:    {self._keys.num_rows:,}, asked of the key index; read as below if they changed since"
            )
        if view is None:
            lines.append("  lake:    not read")
        elif view.snapshot_id is None:
            lines.append("  lake:    empty (no round has committed)")
        else:
            lines.append(f"  lake:    snapshot {view.snapshot_id}, {len(self._lake_files)} data files")
        lines.append(f"  log:     {hot:,} records in {len(self.pinned.ranges)} tablets")
        lines += [f"    {key}: [{start}, {end})" for key, (start, end) in sorted(self.pinned.ranges.items())]
        return "\n".join(lines)
