"""What a later read of a table finds that an earlier one did not: the log between the two, as its net change.

Whoever keeps the rows of an earlier read, with their tablets and offsets, has those of the later one by taking away
what is superseded and adding what is new: net changes compose (`lakehead.log.netchange`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.lake.marks import descends_from
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import Pin
from lakehead.log.netchange import NO_OFFSETS, Offsets, net_rows
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import CHANGE_TYPE_COLUMN, OFFSET_COLUMN, PREV_OFFSET_COLUMN, TabletKey

_CHANGE_COLUMNS = (CHANGE_TYPE_COLUMN, PREV_OFFSET_COLUMN)


@dataclass(frozen=True)
class ReadBefore:
    """A union read that was carried out, as far as a later one goes on from it; it holds no lease.

    Attributes:
        pinned: what it covered.
        rows: which rows these were, with times.
    """

    pinned: Pin
    rows: PinnedRows

    @classmethod
    def of(cls, pinned: Pin, rows: PinnedRows) -> ReadBefore:
        return cls(pinned.unheld(), rows)


@dataclass(frozen=True, eq=False)
class LaterRows:
    """The net change of one tablet between two reads.

    Attributes:
        superseded: offsets of rows of the earlier read that are gone; sorted, each once.
        rows: those that came, with the columns that were asked for and their offsets.
    """

    tablet: TabletKey
    superseded: Offsets
    rows: Sequence[pa.RecordBatch]


def ranges_between(handle: TableHandle, before: Pin, now: Pin) -> Mapping[TabletKey, tuple[int, int]] | None:
    """Of each tablet the log offsets that a union read has which an earlier one had not; None where it may be another
    read than that and what came since: an older one, or rows went that no record of the log tells of."""
    if not now.ranges or not _same_lake(handle, before, now):
        return None
    alone = now.lake is None  # a log that forgets rows is all there is of them
    found = {}
    for key, (start, end) in now.ranges.items():
        was = before.ranges.get(key)
        if was is None:
            found[key] = (start if alone else 0, end)
        elif was[1] > end or (alone and was[0] != start):
            return None
        else:
            found[key] = (was[1], end)
    return found if found.keys() >= before.ranges.keys() else None


def _same_lake(handle: TableHandle, before: Pin, now: Pin) -> bool:
    """Whether what the two lakes have besides what the log says between them is the same."""
    was, lake = before.lake, now.lake
    if was is None or lake is None:
        return was is lake
    if was.gone != lake.gone or was.overwritten != lake.overwritten:
        return False
    if was.snapshot_id == lake.snapshot_id:
        return True
    if was.gone or not descends_from(lake.version, was.snapshot_id, untouched=True):
        return False
    if handle.desc.keyed:
        return True
    # A log table's lake may have been emptied, which its log does not tell.
    tiered = sum(lake.offsets.values()) - sum(was.offsets.values())
    rows = 0 if was.snapshot_id is None else was.rows
    return rows is not None and lake.rows is not None and lake.rows - rows == tiered


def rows_between(
    handle: TableHandle,
    before: ReadBefore,
    now: Pin,
    rows: PinnedRows,
    ranges: Mapping[TabletKey, tuple[int, int]],
    columns: Sequence[str],
    *,
    bytes_max: int,
) -> list[LaterRows] | None:
    """Read what came between two reads; None where the log has others now at the offsets of the earlier one, and where
    it is more than so many bytes.

    Args:
        ranges: what `ranges_between` tells of them.
        rows: those of the later read, with times.
        columns: of the table, or system columns.

    Raises:
        LakeheadError: it cannot be read any more.
    """
    known = {(key, end): time for key, _, end, time in rows.ranges}
    times = {(key, end): time for key, _, end, time in before.rows.ranges}
    asked = {key: end - 1 for key, end in times.keys() - known.keys()}
    if asked:
        known |= {(key, asked[key] + 1): time for key, time in handle.log.timestamps_at(asked)[1].items()}
    if any(known[at] != time for at, time in times.items()):
        return None
    names = tuple(dict.fromkeys((*columns, OFFSET_COLUMN, *(_CHANGE_COLUMNS if handle.desc.keyed else ()))))
    parts: dict[TabletKey, list[pa.RecordBatch]] = {}
    for key, batch in handle.log.read_ranges(ranges, ReadSpec(names), lease=now.lease):
        parts.setdefault(key, []).append(batch)
        bytes_max -= batch.nbytes
        if bytes_max < 0:
            return None
    return [_net(key, ranges[key][0], batches) for key, batches in parts.items()]


def _net(tablet: TabletKey, start: int, batches: Sequence[pa.RecordBatch]) -> LaterRows:
    if CHANGE_TYPE_COLUMN not in batches[0].schema.names:
        return LaterRows(tablet, NO_OFFSETS, batches)
    columns = [c for c in batches[0].schema.names if c not in _CHANGE_COLUMNS]
    return LaterRows(tablet, *net_rows(batches, start, columns))
