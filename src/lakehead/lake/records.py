"""Records of a table by their offsets, from wherever they are: the log, or the lake where the log has trimmed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.errors import LakeFileMissingError, LakeStateError, OffsetOutOfRangeError
from lakehead.lake.history import read_history
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import OpenLake
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import OFFSET_COLUMN, TableDescriptor, TabletKey


def outlives_log(desc: TableDescriptor) -> bool:
    """Whether the lake of a table holds every record of its log: one of a keyed table holds live rows."""
    return desc.lake is not None and not desc.keyed


def read_records(
    handle: TableHandle,
    tablet: TabletKey,
    start: int,
    end: int,
    spec: ReadSpec,
    *,
    open_lake: OpenLake = PinnedLake.at,
) -> Iterator[pa.RecordBatch]:
    """Records of one tablet with offsets in ``[start, end)``, in offset order, whatever is trimmed meanwhile.

    Args:
        end: not beyond the high watermark.
        spec: ``__offset`` is among its columns.
        open_lake: what finds the lake.

    Raises:
        OffsetOutOfRangeError: the log does not hold them all, and the table has no lake that outlives it.
        LakeStateError: neither log nor lake holds them all.
        LakeFileMissingError: a file of the newest version is gone.
    """
    at = start
    while at < end:
        try:
            for _, batch in handle.log.read_ranges({tablet: (at, end)}, spec):
                at = _after(batch)
                yield batch
            return
        except OffsetOutOfRangeError as e:
            if not outlives_log(handle.desc):
                raise
            trimmed = e
        info = handle.lake()
        lake = open_lake(handle.desc, info, None)
        held = min(lake.offsets.get(tablet, 0), end)
        if held <= at:
            raise LakeStateError(
                f"offsets of {handle.desc.path} tablet {tablet} from {at} on are neither in the log nor in the lake:"
                f" restore one of them ({trimmed})",
                table=str(handle.desc.path),
            ) from trimmed
        began = at
        try:
            for batch in read_history(lake, tablet, at, held, spec):
                at = _after(batch)
                yield batch
        except LakeFileMissingError:
            # A reader that takes its time outlasts the version it began with; a newer one holds the same records.
            if at == began and handle.lake().metadata_location == info.metadata_location:
                raise
            continue
        at = held


def read_all_records(
    handle: TableHandle, ranges: Mapping[TabletKey, tuple[int, int]], spec: ReadSpec
) -> Iterator[pa.RecordBatch]:
    """`read_records` of several tablets, one after the other; with one request while the log holds them all."""
    left = dict(ranges)
    try:
        for tablet, batch in handle.log.read_ranges(ranges, spec):
            left[tablet] = _after(batch), left[tablet][1]
            yield batch
    except OffsetOutOfRangeError:
        for tablet, (start, end) in left.items():
            yield from read_records(handle, tablet, start, end, spec)


def _after(batch: pa.RecordBatch) -> int:
    return int(batch.column(OFFSET_COLUMN)[-1].as_py()) + 1
