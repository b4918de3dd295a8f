"""The lake as the older part of a log: rows of one tablet in offset order, for readers whose offsets were trimmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.format.joins import taken
from lakehead.lake.lake_table import LakeFile
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import OFFSET_COLUMN, TabletKey


def read_history(view: PinnedLake, tablet: TabletKey, start: int, end: int, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
    """Rows of a log table's tablet with offsets in ``[start, end)``, in offset order.

    Rows that other engines deleted in the lake are gone; rows that they added have no offset and are left out.

    Args:
        spec: ``__offset`` is among its columns.
    """
    if view.snapshot_id is None or start >= end:
        return
    at = start
    for files in _groups(view.plan(), tablet, start, end):
        ordered = _in_order(view.read(files, ReadSpec((OFFSET_COLUMN,))))
        batches = view.read(files, spec)
        for batch in batches if ordered else _sorted(batches):
            offsets = batch.column(OFFSET_COLUMN)
            wanted = batch.filter(pc.and_(pc.greater_equal(offsets, at), pc.less(offsets, end)))
            if wanted.num_rows:
                at = wanted.column(OFFSET_COLUMN)[-1].as_py() + 1
                yield wanted


def _groups(files: Iterable[LakeFile], tablet: TabletKey, start: int, end: int) -> Iterator[list[LakeFile]]:
    """The tablet's files that may hold such offsets, in order; overlapping ones, which only others write, together."""
    group: list[LakeFile] = []
    last = -1
    for f in files:
        if f.tablet != tablet or f.offsets is None or f.offsets[1] < start or f.offsets[0] >= end:
            continue
        if group and f.offsets[0] > last:
            yield group
            group = []
        group.append(f)
        last = max(last, f.offsets[1])
    if group:
        yield group


def _in_order(batches: Iterable[pa.RecordBatch]) -> bool:
    last = -1
    for batch in batches:
        offsets = np.asarray(batch.column(0).drop_null())
        if len(offsets):
            if offsets[0] <= last or (np.diff(offsets) <= 0).any():
                return False
            last = int(offsets[-1])
    return True


def _sorted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    some = list(batches)
    if some:
        # Rows without an offset, which no reader of a log wants, come last.
        offsets = [np.asarray(b.column(OFFSET_COLUMN).fill_null(np.iinfo(np.int64).max)) for b in some]
        yield from taken(some, np.argsort(np.concatenate(offsets), kind="stable"))
