"""Records of a table by their offsets, from wherever they are: the log, or the lake where the log has trimmed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.errors import LakeFileMissingError, LakeStateError, OffsetOutOfRangeError
from lakehead.format.changes import coded_changes
from lakehead.lake.history import read_history
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.union_read import OpenLake, Pin
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol.messages import LakeReply, TabletState
from lakehead.types import CHANGE_TYPE_COLUMN, OFFSET_COLUMN, ChangeType, Offset, TableDescriptor, TabletKey


def outlives_log(desc: TableDescriptor) -> bool:
    """Whether the lake of a table holds every record of its log: one of a keyed table holds live rows, and its
    changelog if it was made so."""
    return desc.lake is not None and (not desc.keyed or desc.changelog is not None)


def first_record(desc: TableDescriptor, tablet: TabletState) -> Offset:
    """Of which offset on the records of a tablet are there, in the log or in the lake."""
    return tablet.overwritten if outlives_log(desc) else tablet.log_start


def records_lake(handle: TableHandle) -> PinnedLake:
    """The lake that holds every record of the log of such a table, as it is now."""
    return PinnedLake.current(handle.desc.changelog or handle.desc, _records_info(handle))


def _records_info(handle: TableHandle) -> LakeReply:
    return handle.lake(changelog=handle.desc.changelog is not None)


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
        info = _records_info(handle)
        lake = open_lake(handle.desc.changelog or handle.desc, info, None)
        held = min(lake.offsets.get(tablet, 0), end)
        if held <= at:
            raise LakeStateError(
                f"offsets of {handle.desc.path} tablet {tablet} from {at} on are neither in the log nor in the lake:"
                f" restore one of them ({trimmed})",
                table=str(handle.desc.path),
            ) from trimmed
        began = at
        try:
            for batch in _history(lake, tablet, at, held, spec):
                at = _after(batch)
                yield batch
        except LakeFileMissingError:
            # A reader that takes its time outlasts the version it began with; a newer one holds the same records.
            if at == began and _records_info(handle).metadata_location == info.metadata_location:
                raise
            continue
        at = held


def _history(lake: PinnedLake, tablet: TabletKey, start: int, end: int, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
    """`read_history` with change types as logs have them; each row of a log table's was appended."""
    if CHANGE_TYPE_COLUMN not in spec.columns or CHANGE_TYPE_COLUMN in lake.desc.schema.names:
        yield from map(coded_changes, read_history(lake, tablet, start, end, spec))
        return
    at = spec.columns.index(CHANGE_TYPE_COLUMN)
    kept = replace(spec, columns=(*spec.columns[:at], *spec.columns[at + 1 :]))
    for batch in read_history(lake, tablet, start, end, kept):
        appended = pa.repeat(pa.scalar(ChangeType.APPEND, pa.int8()), batch.num_rows)
        yield batch.add_column(at, CHANGE_TYPE_COLUMN, appended)


def read_log(handle: TableHandle, pinned: Pin, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
    """All records as of a pin: what the log had trimmed by then from a lake that outlives it, then what is pinned."""
    for tablet, (start, _) in pinned.log.items():
        if outlives_log(handle.desc):
            yield from read_records(handle, tablet, 0, start, spec)
    for _, batch in handle.log.read_ranges(pinned.log, spec, lease=pinned.lease):
        yield batch


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
