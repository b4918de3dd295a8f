"""From log frames to the batches that readers asked for: skip, decode, project, add system columns, filter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.errors import ColumnNotFoundError, InvalidRequestError, SchemaChangedError
from lakehead.format.arrays import ascending, constant, to_arrow
from lakehead.format.joins import gathered, join
from lakehead.log.records import Records
from lakehead.predicate import Predicate
from lakehead.server.filtering import at_once, soon_done
from lakehead.types import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    PREV_OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE,
    Schemas,
)

_JOIN_ROWS_MAX, _JOIN_ROWS_ENOUGH = 1 << 16, 1 << 12
_SYSTEM_TYPES = {
    BUCKET_COLUMN: pa.int32(),
    OFFSET_COLUMN: pa.int64(),
    TIMESTAMP_COLUMN: TIMESTAMP_TYPE,
    CHANGE_TYPE_COLUMN: pa.int8(),
    PREV_OFFSET_COLUMN: pa.int64(),
}


class Projection:
    """The columns of one read, user and system ones, in the order asked; the predicate's columns are read beside them.

    Attributes:
        schemas: rows are read as the current one of them.

        soon_done: whether a few thousand rows are filtered in a few milliseconds.

    Raises:
        ColumnNotFoundError: a column does not exist.
        InvalidRequestError: one is named twice.
    """

    def __init__(
        self,
        schemas: Schemas,
        columns: Sequence[str],
        predicate: Predicate | None,
        by: Callable[[Predicate, pa.RecordBatch], pa.RecordBatch] = at_once,
    ) -> None:
        """``by`` computes the predicate."""
        self.schemas = schemas
        self.soon_done = soon_done(predicate)
        self._by = by
        self._table_schema = schema = schemas.current.columns
        self._predicate = predicate
        self._columns = list(columns)
        if len(set(columns)) < len(columns):
            raise InvalidRequestError(f"columns={self._columns} names a column twice: name it once")
        fields = []
        for name in columns:
            if name in _SYSTEM_TYPES:
                fields.append(pa.field(name, _SYSTEM_TYPES[name]))
            elif schema.get_field_index(name) >= 0:
                fields.append(schema.field(name))
            else:
                known = ", ".join(schema.names)
                raise ColumnNotFoundError(f"there is no column {name!r}; columns: {known}", column=name)
        self.schema = pa.schema(fields)
        self._extra = [c for c in (predicate.columns if predicate else ()) if c not in columns]
        self._read = [c for c in columns if c not in _SYSTEM_TYPES] + self._extra
        self.positions = [schema.get_field_index(c) for c in self._read]

    def at_once(self) -> Projection:
        """The same, which waits for no turn."""
        same = copy.copy(self)
        same._by = at_once
        return same

    def records(self, records: Records, bucket: int, start: int, end: int) -> pa.RecordBatch | None:
        """Rows with offsets in ``[start, end)``; None when statistics show that none can match."""
        if records.schema_id > self.schemas.current.id:
            # These definitions may be of before it was made, which is no damage; for the rest see `Schemas.written`.
            raise SchemaChangedError(
                "the table was altered while it was read: open it again", schema_id=records.schema_id
            )
        bounds = self._predicate.bounds if self._predicate is not None else ()
        if bounds and not records.may_match(self.schemas, bounds):
            return None
        low = max(start - records.base_offset, 0)
        first = records.base_offset + low
        count = min(end, records.end_offset) - first
        rows = records.read_as(self.schemas, self.positions).slice(low, count)
        system: dict[str, pa.Array] = {}
        if OFFSET_COLUMN in self._columns:
            system[OFFSET_COLUMN] = to_arrow(ascending(first, first + count))
        if TIMESTAMP_COLUMN in self._columns:
            system[TIMESTAMP_COLUMN] = to_arrow(records.timestamps_us[low : low + count], TIMESTAMP_TYPE)
        if CHANGE_TYPE_COLUMN in self._columns:
            system[CHANGE_TYPE_COLUMN] = to_arrow(records.change_types[low : low + count], pa.int8())
        if PREV_OFFSET_COLUMN in self._columns:
            system[PREV_OFFSET_COLUMN] = to_arrow(records.prev_offsets[low : low + count], pa.int64())
        return self._finish(rows, system, bucket)

    def live(
        self,
        offsets: npt.NDArray[np.int64],
        timestamps: pa.Array | None,
        rows: pa.RecordBatch,
        bucket: int,
        change_type: int,
    ) -> pa.RecordBatch:
        """Live rows as records with this change type; without ``timestamps`` their commit time is null."""
        n = rows.num_rows
        system = {
            OFFSET_COLUMN: to_arrow(offsets, pa.int64()),
            TIMESTAMP_COLUMN: pa.nulls(n, TIMESTAMP_TYPE) if timestamps is None else timestamps,
            CHANGE_TYPE_COLUMN: to_arrow(np.full(n, change_type, np.int8), pa.int8()),
            PREV_OFFSET_COLUMN: to_arrow(np.full(n, -1, np.int64), pa.int64()),
        }
        return self._finish(rows, system, bucket)

    def _finish(self, rows: pa.RecordBatch, system: dict[str, pa.Array], bucket: int) -> pa.RecordBatch:
        if BUCKET_COLUMN in self._columns:
            system[BUCKET_COLUMN] = to_arrow(constant(bucket, rows.num_rows, np.int32))
        read = dict(zip(self._read, rows.columns, strict=True))
        arrays = [system[name] if name in system else read[name] for name in self._columns]
        arrays += [read[name] for name in self._extra]
        if arrays:  # without columns, nothing else tells how many rows these are
            asked = pa.schema([*self.schema, *(rows.schema.field(name) for name in self._extra)])
            rows = pa.RecordBatch.from_arrays(arrays, schema=asked)
        if self._predicate is None:
            return rows
        rows = self._by(self._predicate, rows)
        return rows.select(self._columns) if self._extra else rows


def coalesce(batches: Iterable[tuple[int, pa.RecordBatch, int]]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Join small neighbours among (end offset, batch, bytes at most), so that a backlog of tiny frames costs few
    messages; larger batches pass uncopied."""
    for group in gathered(batches, _measured, rows_max=_JOIN_ROWS_MAX, rows_enough=_JOIN_ROWS_ENOUGH):
        yield group[-1][0], join([batch for _, batch, _ in group])


def _measured(item: tuple[int, pa.RecordBatch, int]) -> tuple[int, int]:
    return item[1].num_rows, item[2]
