"""What a tiering round will do, as plain values: which offsets of which tablets, cut into tasks of similar size.

Pure: marks and watermarks in, a plan out. Reading the log, writing files and the commit are `lakehead.tiering.round`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from lakehead.errors import InvalidRequestError, LakeStateError
from lakehead.lake.lake_table import LakeFile
from lakehead.lake.marks import LakeMark
from lakehead.log.hot_range import HotRange
from lakehead.log.netchange import NO_OFFSETS, Offsets, between
from lakehead.types import CHANGE_TYPE_COLUMN, Epoch, Offset, TableDescriptor, TabletKey

ROWS_PER_TASK = 1 << 20


class HotSource(Protocol):
    """The log of one table, as rounds read it; picklable where tasks run in other processes."""

    def watermarks(self) -> Mapping[TabletKey, HotRange]:
        """Every tablet, each as it is at one moment; all below the watermark survives a power cut."""
        ...

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Every record in ``[start, end)``, in offset order.

        Args:
            columns: user columns and ``__offset`` (int64), ``__timestamp``, ``__change_type`` (int8 code),
                ``__prev_offset`` (int64, -1 for none); None for all of them.
        """
        ...


@dataclass(frozen=True, eq=False)
class TieringTask:
    """Log offsets ``[start, end)`` of one tablet to write to the lake.

    Attributes:
        keyed: whether the log is a changelog, of which the live rows are wanted.
        changes: whether every record is wanted, with its change type.
        superseded: offsets in ``[start, end)`` whose rows are replaced within the round; sorted.
    """

    tablet: TabletKey
    start: int
    end: int
    keyed: bool
    changes: bool = False
    superseded: Offsets = field(default_factory=lambda: NO_OFFSETS)


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """One round of one table.

    Attributes:
        table_id, epoch, round_id: what the commit will be marked with.
        keyed: whether the table has a primary key.
        base: tiered offsets that the plan begins at, of all tablets that have any.
        ranges: ``[start, end)`` per tablet with something to tier.
        tasks: the ranges, cut.
        deletes: offsets below the ranges whose rows are gone, per tablet; sorted. Filled in by `with_superseded`.
        cleanup: the newest orphan clean-up that was announced before any file was written; None for none.
        removed: lake files whose live rows the files of the commit hold; a compaction's, which has no ranges.
        empties: all that the lake holds goes; such a commit has neither tasks nor files.
        more: whether the log held more than the round takes.
        overwritten: of tablets whose partition was overwritten, the offset below which the commit leaves no rows.
        cleared: those of them that the lake has such rows of, or may have; all that it has of them goes.
        end: how far the lake then has followed the log, as the server counts that: what the log's tablets say, and not
            what the lake knows of others, or of a truncation, that the log does not count.
    """

    table_id: str
    epoch: Epoch
    round_id: str
    keyed: bool
    base: Mapping[TabletKey, int]
    ranges: Mapping[TabletKey, tuple[int, int]]
    tasks: tuple[TieringTask, ...]
    deletes: Mapping[TabletKey, Offsets]
    cleanup: str | None = None
    removed: tuple[LakeFile, ...] = ()
    empties: bool = False
    more: bool = False
    overwritten: Mapping[TabletKey, Offset] = field(default_factory=dict)
    cleared: frozenset[TabletKey] = frozenset()
    end: int = 0

    @property
    def changes_nothing(self) -> bool:
        """Whether the lake is where the round would bring it."""
        return not self.ranges and not self.removed and not self.empties and not self.cleared

    @property
    def records(self) -> int:
        """Log records that the round moves."""
        return sum(end - start for start, end in self.ranges.values())

    @property
    def offsets(self) -> dict[TabletKey, int]:
        """What the lake holds once the round is committed."""
        ends = {tablet: end for tablet, (_, end) in self.ranges.items()}
        return {**self.base, **{tablet: self.overwritten[tablet] for tablet in self.cleared}, **ends}

    def with_superseded(self, superseded: Mapping[TabletKey, Offsets]) -> RoundPlan:
        """The plan with what each tablet's range replaces (sorted), in the range and before it."""
        tasks = tuple(
            replace(t, superseded=between(superseded.get(t.tablet, NO_OFFSETS), t.start, t.end)) for t in self.tasks
        )
        deletes = {k: between(superseded[k], 0, start) for k, (start, _) in self.ranges.items() if k in superseded}
        return replace(self, tasks=tasks, deletes={k: v for k, v in deletes.items() if len(v)})


def plan_round(
    desc: TableDescriptor,
    mark: LakeMark | None,
    watermarks: Mapping[TabletKey, HotRange],
    *,
    epoch: Epoch,
    round_id: str,
    rows_per_task: int = ROWS_PER_TASK,
    records_max: int | None = None,
) -> RoundPlan:
    """Plan to tier everything between the lake's mark and the watermarks, or the oldest records of each tablet.

    Read the mark first, then the watermarks.

    Args:
        records_max: of the log in one round; None for all there are.

    Raises:
        LakeStateError: the lake holds more than the log, or the log no longer reaches back to where the lake ends.
    """
    if rows_per_task <= 0:
        raise InvalidRequestError(f"rows_per_task={rows_per_task}: a task has at least one row")
    if records_max is not None and records_max <= 0:
        raise InvalidRequestError(f"records_max={records_max}: a round has at least one record")
    base = dict(mark.offsets) if mark else {}
    ranges: dict[TabletKey, tuple[int, int]] = {}
    overwritten = dict(mark.overwritten) if mark else {}
    cleared: set[TabletKey] = set()
    for tablet, (log_start, high_watermark, before) in sorted(watermarks.items()):
        start = base.get(tablet, 0)
        if before > overwritten.get(tablet, 0):
            start = overwritten[tablet] = before
            cleared.add(tablet)
        if start > high_watermark:
            raise LakeStateError(
                f"the lake of table {desc.path} holds tablet {tablet} up to {start}, but its log ends at"
                f" {high_watermark}: the log was lost or replaced; restore it, or drop and create the table again",
                table=str(desc.path),
                tablet=str(tablet),
                tiered=start,
                end=high_watermark,
            )
        if log_start > start:
            raise LakeStateError(
                f"the log of table {desc.path} tablet {tablet} begins at {log_start}, but its lake ends at {start}:"
                " the rows between are in neither; restore the lake or the log",
                table=str(desc.path),
                tablet=str(tablet),
                tiered=start,
                log_start=log_start,
            )
        if high_watermark > start:
            ranges[tablet] = (start, high_watermark)
    taken = ranges if records_max is None else _oldest(ranges, records_max)
    tasks = tuple(
        TieringTask(tablet, at, until, desc.keyed, CHANGE_TYPE_COLUMN in desc.schema.names)
        for tablet, (start, end) in taken.items()
        for at, until in _cut(start, end, rows_per_task)
    )
    plan = RoundPlan(
        desc.table_id,
        epoch,
        round_id,
        desc.keyed,
        base,
        taken,
        tasks,
        {},
        more=taken != ranges,
        overwritten=overwritten,
        cleared=frozenset(cleared),
    )
    held = plan.offsets
    return replace(plan, end=sum(held.get(k, 0) + at.overwritten for k, at in watermarks.items()))


def _oldest(ranges: Mapping[TabletKey, tuple[int, int]], records_max: int) -> dict[TabletKey, tuple[int, int]]:
    """So many records at most, the same share of each tablet; what a short one leaves goes to the others."""
    ends: dict[TabletKey, int] = {}
    left, waiting = records_max, len(ranges)
    for tablet, (start, end) in sorted(ranges.items(), key=lambda r: r[1][1] - r[1][0]):
        ends[tablet] = min(end, start + -(-left // waiting))
        left, waiting = left - (ends[tablet] - start), waiting - 1
    return {tablet: (start, ends[tablet]) for tablet, (start, _) in ranges.items() if ends[tablet] > start}


def _cut(start: int, end: int, rows: int) -> Iterator[tuple[int, int]]:
    """Parts of similar size, none with more than so many rows."""
    parts = -(-(end - start) // rows)
    edges = [start + (end - start) * i // parts for i in range(parts + 1)]
    return itertools.pairwise(edges)
