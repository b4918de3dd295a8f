"""What tasks of Spark read: lake files, live rows of the log, its records, or a listing; planned once, as plain values.

Whatever a part needs to know of the table's state stands in it, so that a task which is tried again reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.client.table import TableHandle
from lakehead.format.arrays import to_arrow
from lakehead.format.changes import named_changes
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.records import read_all_records
from lakehead.lake.union_read import Pin, UnionRead
from lakehead.log.netchange import Offsets, between
from lakehead.predicate import Predicate
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import (
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    SYSTEM_FIELDS,
    ChangeType,
    TableDescriptor,
    TabletKey,
)

if TYPE_CHECKING:
    from lakehead.lake.lake_table import LakeFile

Ranges: TypeAlias = Mapping[TabletKey, tuple[int, int]]

LAKE_BYTES = 32 << 20
"""Lake files of so many bytes together make a partition."""
HOT_ROWS = 512 << 10
"""Log records that make a partition; a keyed tablet is never cut."""
_SYSTEM = frozenset(f.name for f in SYSTEM_FIELDS)
_NEW_ROWS = to_arrow(np.array([ChangeType.APPEND, ChangeType.INSERT, ChangeType.UPDATE_AFTER], np.int8))


@dataclass(frozen=True, eq=False)
class LakePart:
    """Lake files to read, and offsets of rows to leave out, under the lease and the definition of the plan.

    Attributes:
        where: the rows wanted, as a `Predicate` in bytes; None for all.
    """

    table_id: str
    schema_id: int
    files: tuple[LakeFile, ...]
    superseded: Mapping[TabletKey, Offsets]
    lease: str | None = None
    where: bytes | None = None


@dataclass(frozen=True, eq=False)
class HotPart:
    """Log offsets to read, under the lease and the definition of the plan; whole tablets where the table is keyed.

    Attributes:
        where: the rows wanted, as a `Predicate` in bytes; None for all.
    """

    table_id: str
    schema_id: int
    ranges: Ranges
    lease: str | None = None
    where: bytes | None = None


@dataclass(frozen=True, eq=False)
class RecordsPart:
    """Records of the log to read as they were written, from the lake where the log has trimmed them.

    Attributes:
        where: those wanted, as a `Predicate` in bytes; None for all.
    """

    table_id: str
    schema_id: int
    ranges: Ranges
    where: bytes | None = None


@dataclass(frozen=True, eq=False)
class RowsPart:
    """The few rows that a key index had when the read was planned."""

    rows: tuple[pa.RecordBatch, ...]


# ---- planning -------------------------------------------------------------------------------------------------------


def union_parts(handle: TableHandle, pinned: Pin, wanted: Predicate | None = None) -> list[LakePart | HotPart]:
    """All rows of a pinned read that meet a condition; of a keyed table, those of the tablets that it has ranges of, or
    of the lake alone."""
    parts: list[LakePart | HotPart] = []
    view, where = pinned.lake, None if wanted is None else wanted.to_bytes()
    if view is not None and view.snapshot_id is not None:
        files = view.plan(() if wanted is None else wanted.bounds)
        superseded: Mapping[TabletKey, Offsets] = {}
        if handle.desc.keyed and pinned.ranges:
            superseded = UnionRead(handle, pinned, ReadSpec(())).superseded()
            files = [f for f in files if f.tablet is None or f.tablet in pinned.ranges]
        parts += lake_parts(handle.desc, files, superseded, pinned.lease, where)
    return [*parts, *hot_parts(handle.desc, pinned.ranges, pinned.lease, where)]


def rows_by_key(handle: TableHandle, pinned: Pin, wanted: Predicate, names: Sequence[str]) -> RowsPart | None:
    """The rows of a pinned read, where a condition says which keys they have, as the key index has them now; None where
    it does not, or the index cannot tell."""
    user = tuple(n for n in names if n not in _SYSTEM)
    found = UnionRead(handle, pinned, ReadSpec(user, wanted, system_columns=len(user) < len(names))).rows_by_key()
    if found is None:
        return None
    return RowsPart(tuple(batch.select(names) for batch in found))


def lake_parts(
    desc: TableDescriptor,
    files: Iterable[LakeFile],
    superseded: Mapping[TabletKey, Offsets],
    lease: str | None = None,
    where: bytes | None = None,
) -> Iterator[LakePart]:
    """Files in order, cut where `LAKE_BYTES` are reached; each part with the superseded offsets of its tablets."""
    for group in _grouped(files, lambda f: f.size, LAKE_BYTES):
        tablets = {f.tablet for f in group if f.tablet is not None}
        mine = {k: _within(superseded[k], [f for f in group if f.tablet == k]) for k in tablets if k in superseded}
        yield LakePart(desc.table_id, desc.schema_id, tuple(group), mine, lease, where)


def _within(offsets: Offsets, files: Sequence[LakeFile]) -> Offsets:
    bounds = [f.offsets for f in files if f.offsets is not None]
    if len(bounds) < len(files):
        return offsets
    return between(offsets, min(b[0] for b in bounds), max(b[1] for b in bounds) + 1)


def hot_parts(
    desc: TableDescriptor, ranges: Ranges, lease: str | None = None, where: bytes | None = None
) -> Iterator[HotPart]:
    """Log ranges, cut or gathered to about `HOT_ROWS` records."""
    for some in _cut(desc, ranges):
        yield HotPart(desc.table_id, desc.schema_id, some, lease, where)


def record_parts(desc: TableDescriptor, ranges: Ranges, wanted: Predicate | None = None) -> Iterator[RecordsPart]:
    """The same of records that meet a condition: changes of one key stay in order, because a keyed tablet is never
    cut."""
    where = None if wanted is None else wanted.to_bytes()
    for some in _cut(desc, ranges):
        yield RecordsPart(desc.table_id, desc.schema_id, some, where)


def _cut(desc: TableDescriptor, ranges: Ranges) -> Iterator[Ranges]:
    pieces: list[tuple[TabletKey, int, int]] = []
    for key, (start, end) in sorted(ranges.items()):
        step = max(end - start, 1) if desc.keyed else HOT_ROWS
        pieces += [(key, at, min(at + step, end)) for at in range(start, end, step)]
    for group in _grouped(pieces, lambda p: p[2] - p[1], HOT_ROWS):
        # A tablet's pieces are neighbours, so that those in one group are one range.
        joined: dict[TabletKey, tuple[int, int]] = {}
        for key, start, end in group:
            joined[key] = (joined[key][0] if key in joined else start, end)
        yield joined


def _grouped(items: Iterable[Any], size: Callable[[Any], int], limit: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


# ---- reading --------------------------------------------------------------------------------------------------------


def read_rows(handle: TableHandle, part: LakePart | HotPart, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Rows of a pinned read with these columns, perhaps among others; ``__change_type`` is +I of each."""
    wanted, where = [n for n in names if n != CHANGE_TYPE_COLUMN], _where(handle, part)
    batches: Iterator[pa.RecordBatch]
    if isinstance(part, LakePart):
        lake = PinnedLake.current(handle.desc, handle.lake())
        batches = lake.read(part.files, ReadSpec(tuple(wanted), where), part.superseded)
    else:
        user = [n for n in wanted if n not in _SYSTEM]
        spec = ReadSpec(tuple(user), where, system_columns=len(user) < len(wanted))
        batches = UnionRead(handle, Pin(None, part.ranges, part.lease), spec).batches()
    with handle.leases.used(part.lease):
        for batch in batches:
            yield batch if len(wanted) == len(names) else _all_of(ChangeType.INSERT, batch)


def read_changes(handle: TableHandle, part: RecordsPart, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Records with these columns, perhaps among others, each tablet's in offset order.

    Of a keyed table without ``__change_type`` among them, the new rows alone: what was deleted or replaced is left out.
    """
    keyed, told = handle.desc.keyed, CHANGE_TYPE_COLUMN in names
    wanted = [n for n in names if n != CHANGE_TYPE_COLUMN]
    needed = [*([CHANGE_TYPE_COLUMN] if keyed else []), *([] if OFFSET_COLUMN in wanted else [OFFSET_COLUMN])]
    spec = ReadSpec((*wanted, *needed), _where(handle, part))
    for batch in read_all_records(handle, part.ranges, spec):
        if not keyed:
            yield _all_of(ChangeType.APPEND, batch) if told else batch
        elif told:
            yield named_changes(batch)
        else:
            yield batch.filter(pc.is_in(batch.column(CHANGE_TYPE_COLUMN), _NEW_ROWS))


def _where(handle: TableHandle, part: LakePart | HotPart | RecordsPart) -> Predicate | None:
    return None if part.where is None else Predicate.from_bytes(part.where, handle.desc.schema)


def _all_of(change: ChangeType, batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column(CHANGE_TYPE_COLUMN, pa.repeat(change.symbol, batch.num_rows))
