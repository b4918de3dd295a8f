"""Which rows a pin reads: two pins with the same read the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lakehead.client.table import TableHandle
from lakehead.format.per_schema import digest_of_schema
from lakehead.lake.union_read import Pin
from lakehead.types import TabletKey


@dataclass(frozen=True)
class PinnedRows:
    """What is pinned, as far as it decides which rows there are.

    Attributes:
        columns: what tells the table's columns from others. A folder that was put back to what it was gives others the
            same ids.
        gone: see `PinnedLake`.
        ranges: of each tablet the offsets that are read, and when the last of them was written, in microseconds; None
            where that was not asked. A folder that was put back gives the same offsets to other rows, too.
    """

    table_id: str
    columns: str
    snapshot: int | None
    gone: frozenset[TabletKey]
    ranges: tuple[tuple[TabletKey, int, int, int | None], ...]

    @classmethod
    def untimed(cls, handle: TableHandle, pinned: Pin) -> PinnedRows:
        """Without the times: what differs in it reads other rows, what does not may."""
        ranges = tuple((key, start, end, None) for key, (start, end) in sorted(pinned.ranges.items()) if start < end)
        lake = pinned.lake
        snapshot, gone = (None, frozenset[TabletKey]()) if lake is None else (lake.snapshot_id, lake.gone)
        columns = digest_of_schema(handle.desc.schemas.current.fields)
        return cls(handle.desc.table_id, columns, snapshot, gone, ranges)

    @classmethod
    def of(cls, handle: TableHandle, pinned: Pin) -> PinnedRows:
        """Of a pin that was just made. Errors are those of the servers."""
        found = cls.untimed(handle, pinned)
        if not found.ranges:
            return found
        written = handle.log.timestamps_at({key: end - 1 for key, _, end, _ in found.ranges})[1]
        return replace(found, ranges=tuple((key, start, end, written[key]) for key, start, end, _ in found.ranges))
