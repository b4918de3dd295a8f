"""What a log is read as: rows of neighbouring offsets, with what the log says of each.

They are those of one frame, as it lies in the file, or of many small ones that were joined: to decode a frame costs as
much as to read thousands of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.format.arrays import constant
from lakehead.format.frame import CHANGES, COMPRESSED, Frame
from lakehead.format.joins import join
from lakehead.format.read_as import may_match_as, read_as, rows_as
from lakehead.predicate import Bound
from lakehead.types import Offset, Schemas


class Records(Protocol):
    """Rows of offsets ``[base_offset, end_offset)``, all written under one schema."""

    @property
    def base_offset(self) -> Offset: ...

    @property
    def end_offset(self) -> Offset: ...

    @property
    def schema_id(self) -> int: ...

    @property
    def change_types(self) -> npt.NDArray[np.int8]:
        """Per row its `ChangeType`."""
        ...

    @property
    def prev_offsets(self) -> npt.NDArray[np.int64]:
        """Per row the offset it replaces, -1 for none."""
        ...

    @property
    def timestamps_us(self) -> npt.NDArray[np.int64]:
        """Per row when it was committed."""
        ...

    def read_as(self, schemas: Schemas, columns: Sequence[int] | None = None) -> pa.RecordBatch:
        """See `lakehead.format.read_as.read_as`."""
        ...

    def may_match(self, schemas: Schemas, bounds: Iterable[Bound]) -> bool:
        """False only when no row satisfies all bounds; see `may_match_as`."""
        ...

    def bytes_of(self, batch: pa.RecordBatch) -> int:
        """About how many bytes a batch of columns of these rows takes, or more; soon found."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class FrameRecords:
    """Those of one frame."""

    frame: Frame

    @property
    def base_offset(self) -> Offset:
        return self.frame.base_offset

    @property
    def end_offset(self) -> Offset:
        return self.frame.end_offset

    @property
    def schema_id(self) -> int:
        return self.frame.body.schema_id

    @property
    def change_types(self) -> npt.NDArray[np.int8]:
        return self.frame.body.change_types

    @property
    def prev_offsets(self) -> npt.NDArray[np.int64]:
        return _previous(self.frame)

    @property
    def timestamps_us(self) -> npt.NDArray[np.int64]:
        return constant(self.frame.timestamp_us, self.frame.body.row_count, np.int64)

    def read_as(self, schemas: Schemas, columns: Sequence[int] | None = None) -> pa.RecordBatch:
        return read_as(self.frame.body, schemas, columns)

    def may_match(self, schemas: Schemas, bounds: Iterable[Bound]) -> bool:
        body = self.frame.body
        return not body.statistics_length or may_match_as(body, schemas, bounds)

    def bytes_of(self, batch: pa.RecordBatch) -> int:
        # To measure a tiny batch costs more than to read it.
        return batch.nbytes if self.frame.body.flags & COMPRESSED else self.frame.length


@dataclass(frozen=True, eq=False, slots=True)
class JoinedRecords:
    """Those of one frame or of several that follow one another, in memory.

    Attributes:
        rows: all columns, as they were written.
        changes: `change_types` and `prev_offsets`; None for rows that were appended.
        size_bytes: about what all of it takes.
        level: how often rows of it were joined.
    """

    base_offset: Offset
    schema_id: int
    rows: pa.RecordBatch
    timestamps_us: npt.NDArray[np.int64]
    changes: tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]] | None
    size_bytes: int
    level: int = 0

    @classmethod
    def of_frames(cls, frames: Sequence[Frame], rows: pa.RecordBatch, *, level: int = 0) -> JoinedRecords:
        """The frames' rows, written under one schema."""
        first = frames[0]
        alone = len(frames) == 1 and not first.body.flags & COMPRESSED
        size = first.length if alone else rows.get_total_buffer_size() + 17 * rows.num_rows
        changes = None
        if len(frames) == 1:
            times = constant(first.timestamp_us, rows.num_rows, np.int64)
            if first.body.flags & CHANGES:
                changes = first.body.change_types, first.body.prev_offsets
        else:
            times = np.repeat([f.timestamp_us for f in frames], [f.body.row_count for f in frames])
            if any(f.body.flags & CHANGES for f in frames):
                changes = (
                    np.concatenate([f.body.change_types for f in frames]),
                    np.concatenate([_previous(f) for f in frames]),
                )
        return cls(first.base_offset, first.body.schema_id, rows, times, changes, size, level)

    @classmethod
    def joined(cls, parts: Sequence[JoinedRecords]) -> JoinedRecords:
        """The same rows in one; the parts follow one another, and are of one schema and one kind of table."""
        first = parts[0]
        rows = join([p.rows for p in parts])
        times = np.concatenate([p.timestamps_us for p in parts])
        changes = None
        if first.changes is not None:
            types, prev = zip(*(p.changes for p in parts if p.changes is not None), strict=True)
            changes = np.concatenate(types), np.concatenate(prev)
        size = rows.get_total_buffer_size() + (17 if changes else 8) * len(times)
        return cls(first.base_offset, first.schema_id, rows, times, changes, size, first.level + 1)

    def within(self, start: Offset, end: Offset) -> JoinedRecords:
        """Those with offsets in ``[start, end)``, uncopied."""
        if start <= self.base_offset and self.end_offset <= end:
            return self
        low, high = max(start - self.base_offset, 0), min(end, self.end_offset) - self.base_offset
        changes = None if self.changes is None else (self.changes[0][low:high], self.changes[1][low:high])
        rows, times = self.rows.slice(low, high - low), self.timestamps_us[low:high]
        return JoinedRecords(self.base_offset + low, self.schema_id, rows, times, changes, self.size_bytes, self.level)

    @property
    def end_offset(self) -> Offset:
        return self.base_offset + self.rows.num_rows

    @property
    def change_types(self) -> npt.NDArray[np.int8]:
        return self.changes[0] if self.changes is not None else np.zeros(self.rows.num_rows, np.int8)

    @property
    def prev_offsets(self) -> npt.NDArray[np.int64]:
        return self.changes[1] if self.changes is not None else np.full(self.rows.num_rows, -1, np.int64)

    def read_as(self, schemas: Schemas, columns: Sequence[int] | None = None) -> pa.RecordBatch:
        return rows_as(self.rows, self.schema_id, schemas, columns)

    def may_match(self, schemas: Schemas, bounds: Iterable[Bound]) -> bool:
        return True

    def bytes_of(self, batch: pa.RecordBatch) -> int:
        return self.size_bytes


def _previous(frame: Frame) -> npt.NDArray[np.int64]:
    body = frame.body
    return body.prev_offsets if body.flags & CHANGES else np.full(body.row_count, -1, np.int64)
