"""A log in memory: what tiering rounds read, beside a plain model of the table that the log makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lakehead.format.bucketing import bucket_ids, unkeyed_bucket
from lakehead.log.hot_range import HotRange
from lakehead.types import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    PREV_OFFSET_COLUMN,
    SYSTEM_FIELDS,
    TIMESTAMP_COLUMN,
    ChangeType,
    Offset,
    TableDescriptor,
    TabletKey,
    partition_name,
)

Row = dict[str, Any]
_LOG_FIELDS = (
    *SYSTEM_FIELDS[1:],
    pa.field(CHANGE_TYPE_COLUMN, pa.int8()),
    pa.field(PREV_OFFSET_COLUMN, pa.int64()),
)


@dataclass
class _Log:
    records: list[Row] = field(default_factory=list)
    live: dict[object, Row] = field(default_factory=dict)
    log_start: Offset = 0
    overwritten: Offset = 0


class MemoryHotSource:
    """The log of one table, kept as Python rows; implements `lakehead.tiering.round_plan.HotSource`.

    Timestamps count microseconds from 1970, one per record.
    """

    def __init__(self, desc: TableDescriptor, *, batch_rows: int = 7) -> None:
        self.desc = desc
        self.batch_rows = batch_rows
        self._logs: dict[TabletKey, _Log] = {}

    def write(self, rows: Sequence[Row]) -> None:
        """Append to a log table, upsert into a keyed one, in order."""
        for row, tablet in zip(rows, self._tablets(rows), strict=True):
            log = self._logs.setdefault(tablet, _Log())
            if not self.desc.keyed:
                self._log(log, tablet, ChangeType.APPEND, row, -1)
                continue
            key = tuple(row[c] for c in self.desc.primary_key)
            old = log.live.get(key)
            if old is None:
                self._log(log, tablet, ChangeType.INSERT, row, -1, key)
            else:
                self._log(log, tablet, ChangeType.UPDATE_BEFORE, old, old[OFFSET_COLUMN])
                self._log(log, tablet, ChangeType.UPDATE_AFTER, row, old[OFFSET_COLUMN], key)

    def delete(self, keys: Sequence[Row]) -> None:
        """Delete by key; keys that do not exist change nothing."""
        for row, tablet in zip(keys, self._tablets(keys), strict=True):
            log = self._logs.setdefault(tablet, _Log())
            old = log.live.pop(tuple(row[c] for c in self.desc.primary_key), None)
            if old is not None:
                self._log(log, tablet, ChangeType.DELETE, old, old[OFFSET_COLUMN])

    def rows(self) -> list[Row]:
        """The model: live rows with their system columns."""
        return [row for log in self._logs.values() for row in log.live.values()]

    def overwrite(self, partition: str, rows: Sequence[Row]) -> None:
        """These rows in place of all others of a partition of a log table."""
        for tablet, log in self._logs.items():
            if tablet.partition == partition:
                log.live.clear()
                log.log_start = log.overwritten = len(log.records)
        self.write(rows)

    def trim(self, tablet: TabletKey, log_start: Offset) -> None:
        """Forget the records of a tablet below an offset."""
        self._logs[tablet].log_start = log_start

    def watermarks(self) -> Mapping[TabletKey, HotRange]:
        return {
            tablet: HotRange(log.log_start, len(log.records), log.overwritten) for tablet, log in self._logs.items()
        }

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        fields = [*self.desc.schema, *(_LOG_FIELDS if self.desc.keyed else _LOG_FIELDS[:-1])]
        schema = pa.schema([f for f in fields if columns is None or f.name in columns])
        records = self._logs[tablet].records
        for at in range(start, end, self.batch_rows):
            part = records[at : min(at + self.batch_rows, end)]
            yield pa.RecordBatch.from_pylist([{n: r[n] for n in schema.names} for r in part], schema)

    def _tablets(self, rows: Sequence[Row]) -> list[TabletKey]:
        partitions = [partition_name(self.desc.partition_by, tuple(r[c] for c in self.desc.partition_by)) for r in rows]
        if self.desc.bucket_key:
            columns = [pa.array([r[c] for r in rows], self.desc.schema.field(c).type) for c in self.desc.bucket_key]
            buckets = bucket_ids(columns, self.desc.buckets).tolist() if rows else []
        else:
            start = sum(len(log.records) for log in self._logs.values())
            buckets = [unkeyed_bucket(b"memory", start + i, self.desc.buckets) for i in range(len(rows))]
        return [TabletKey(p, b) for p, b in zip(partitions, buckets, strict=True)]

    def _log(self, log: _Log, tablet: TabletKey, change: ChangeType, row: Row, prev: int, key: object = None) -> None:
        offset = len(log.records)
        whole = {c: row.get(c) for c in self.desc.schema.names}
        system = {BUCKET_COLUMN: tablet.bucket, OFFSET_COLUMN: offset, TIMESTAMP_COLUMN: offset}
        log.records.append({**whole, **system, CHANGE_TYPE_COLUMN: int(change), PREV_OFFSET_COLUMN: prev})
        if change in (ChangeType.APPEND, ChangeType.INSERT, ChangeType.UPDATE_AFTER):
            log.live[offset if key is None else key] = {**whole, **system}
