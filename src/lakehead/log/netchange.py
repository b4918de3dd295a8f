"""Net change of a range of log offsets: which rows to add, and which earlier rows they replace.

The offset is a row's identity, and every ``+U`` and ``-D`` carries the offset of the row that it replaces. So what a
range of the log does to a table is set algebra on integers; no key is read. Tiering and union reads both stand on it:

    superseded = prev_offset of +U and -D in the range
    rows to add = offsets of +A, +I and +U in the range, without superseded
    rows to take away = superseded offsets below the range

Ranges compose: applying the net change of ``[a, b)`` and then of ``[b, c)`` equals applying that of ``[a, c)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.errors import CorruptionError
from lakehead.format.arrays import to_arrow, to_numbers
from lakehead.types import CHANGE_TYPE_COLUMN, PREV_OFFSET_COLUMN, ChangeType

Offsets: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

NO_OFFSETS: Offsets = np.zeros(0, np.int64)
NO_OFFSETS.flags.writeable = False

_MANY = 512
_SPAN_MAX = 16

_ADDS = np.zeros(256, np.bool_)
_ADDS[[ChangeType.APPEND, ChangeType.INSERT, ChangeType.UPDATE_AFTER]] = True
_REPLACES = np.zeros(256, np.bool_)
_REPLACES[[ChangeType.UPDATE_AFTER, ChangeType.DELETE]] = True


@dataclass(frozen=True, eq=False)
class NetChange:
    """What a range of one tablet's log adds and takes away.

    Attributes:
        keep: one flag per row of the range; true for the rows to add.
        superseded: offsets below the range's start whose rows are gone; sorted, each once.
    """

    keep: Mask
    superseded: Offsets


NO_CHANGE = NetChange(np.zeros(0, np.bool_), NO_OFFSETS)
"""Of a range without rows."""


def net_change(
    parts: Sequence[tuple[npt.NDArray[np.int8], Offsets]], start: int, known: NetChange = NO_CHANGE
) -> NetChange:
    """The net change of one tablet's whole range from ``start`` on.

    Args:
        parts: of the range, one after the other: the code of each row (`ChangeType`), and the offset of the row that a
            ``+U`` or ``-D`` replaces, ignored in other rows. The offsets of the rows themselves are dense.
        start: first offset of the range.
        known: the net change of the range's first rows, which ``parts`` leave out.

    Raises:
        CorruptionError: a record replaces a row and does not say which, or one that comes after all of them.
    """
    keep = np.concatenate([known.keep, *(_ADDS.take(types) for types, _ in parts)])
    before = [known.superseded]
    for types, prev in parts:
        replaced = prev[_REPLACES.take(types)]
        _require_told(replaced, start + len(keep))
        if len(replaced) and replaced.max() >= start:
            within = replaced >= start
            keep[replaced[within] - start] = False
            replaced = replaced[~within]
        before.append(replaced)
    return NetChange(keep, union(*before))


def net_rows(
    batches: Sequence[pa.RecordBatch], start: int, columns: Sequence[str]
) -> tuple[Offsets, list[pa.RecordBatch]]:
    """The net change of one tablet's whole range, in batches with the columns of changes among others: the superseded
    offsets, and the rows to add, with these columns. Raises as `net_change`."""
    net = change_of(batches, start)
    return net.superseded, list(kept_rows(batches, net.keep, columns))


def change_of(batches: Iterable[pa.RecordBatch], start: int, known: NetChange = NO_CHANGE) -> NetChange:
    """As `net_change`, of batches with the columns of changes among others."""
    parts = [(to_numbers(b.column(CHANGE_TYPE_COLUMN)), to_numbers(b.column(PREV_OFFSET_COLUMN))) for b in batches]
    return net_change(parts, start, known)


def kept_rows(batches: Iterable[pa.RecordBatch], keep: Mask, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of batches that are to be added, with these columns; ``keep`` begins with a flag for each row."""
    end = 0
    for batch in batches:
        start, end = end, end + batch.num_rows
        at = np.flatnonzero(keep[start:end])
        if len(at):
            rows = batch.select(columns)
            yield rows if len(at) == batch.num_rows else rows.take(to_arrow(at))  # half of what a filter takes


def superseded_offsets(change_types: npt.NDArray[np.int8], prev_offsets: Offsets) -> Offsets:
    """Offsets of the rows that these records replace, in the range or before it; sorted, each once.

    Raises:
        CorruptionError: a record replaces a row and does not say which.
    """
    replaced = prev_offsets[_REPLACES.take(change_types)]
    _require_told(replaced)
    return _sorted_once(replaced)


def _require_told(replaced: Offsets, end: int | None = None) -> None:
    if len(replaced) and (replaced.min() < 0 or (end is not None and replaced.max() >= end)):
        raise CorruptionError("a log record replaces a row and does not say which: restore the log")


def live_rows(change_types: npt.NDArray[np.int8], offsets: Offsets, superseded: Offsets) -> Mask:
    """True for rows that add a row which is not in ``superseded`` (sorted)."""
    adds = _ADDS.take(change_types)
    return adds & ~contains(superseded, offsets) if len(superseded) else adds


def contains(members: Offsets, values: Offsets) -> Mask:
    """Whether each value is one of ``members``, which are sorted."""
    if not len(members) or not len(values):
        return np.zeros(len(values), np.bool_)
    low, high = int(members[0]), int(members[-1])
    if len(values) >= len(members) and _is_dense(len(members), low, high):
        beyond = high - low + 1  # negative differences are greater still, as unsigned ones
        return _flags(members, low, beyond + 1)[np.minimum((values - low).view(np.uint64), np.uint64(beyond))]
    at = np.searchsorted(members, values)
    at[at == len(members)] = 0
    return members[at] == values


def union(*sets: Offsets) -> Offsets:
    """All offsets of the sets; sorted, each once. What is so already may be returned itself."""
    filled = [s for s in sets if len(s)]
    if not filled:
        return NO_OFFSETS
    return _sorted_once(filled[0] if len(filled) == 1 else np.concatenate(filled))


def _sorted_once(offsets: Offsets) -> Offsets:
    """Sorted, each once, as they may be already; where they lie close together, as offsets mostly do, it takes less
    than sorting."""
    if bool((offsets[1:] > offsets[:-1]).all()):
        return offsets
    if len(offsets):
        low, high = int(offsets.min()), int(offsets.max())
        if _is_dense(len(offsets), low, high):
            found = np.flatnonzero(_flags(offsets, low, high - low + 1))
            found += low
            return found
    members = np.sort(offsets)
    fresh = np.ones(len(members), np.bool_)
    np.not_equal(members[1:], members[:-1], out=fresh[1:])
    return members if fresh.all() else members[fresh]


def _is_dense(count: int, low: int, high: int) -> bool:
    """Whether a flag for each number from low to high is less work than to look for the numbers by value."""
    return count >= _MANY and high - low < _SPAN_MAX * count


def _flags(offsets: Offsets, low: int, size: int) -> Mask:
    flags = np.zeros(size, np.bool_)
    flags[offsets - low] = True
    return flags


def between(members: Offsets, start: int, end: int) -> Offsets:
    """The part in ``[start, end)`` of a sorted set; shares its memory."""
    low, high = np.searchsorted(members, (start, end))
    return members[low:high]
