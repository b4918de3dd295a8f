"""The lake's snapshots and files as Arrow tables, for people and for ``$lake$snapshots``."""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.table import Table

from lakehead.iceberg.planner import plan_files
from lakehead.lake.marks import EPOCH, OFFSETS, ROUND_ID
from lakehead.types import TIMESTAMP_TYPE

SNAPSHOTS_SCHEMA = pa.schema(
    [
        pa.field("snapshot_id", pa.int64(), False),
        pa.field("parent_id", pa.int64()),
        pa.field("committed_at", TIMESTAMP_TYPE, False),
        pa.field("operation", pa.string()),
        pa.field("is_current", pa.bool_(), False),
        pa.field("added_rows", pa.int64()),
        pa.field("total_files", pa.int64()),
        pa.field("total_delete_files", pa.int64()),
        pa.field("epoch", pa.int64()),
        pa.field("round_id", pa.string()),
        pa.field("offsets", pa.string()),
        pa.field("summary", pa.map_(pa.string(), pa.string()), False),
    ]
)
FILES_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), False),
        pa.field("partition", pa.string()),
        pa.field("bucket", pa.int32()),
        pa.field("bytes", pa.int64(), False),
        pa.field("rows", pa.int64(), False),
        pa.field("min_offset", pa.int64()),
        pa.field("max_offset", pa.int64()),
        pa.field("delete_files", pa.list_(pa.string()), False),
    ]
)


def snapshots_table(table: Table) -> pa.Table:
    """Every listed lake snapshot, oldest first; `SNAPSHOTS_SCHEMA`.

    ``epoch``, ``round_id`` and ``offsets`` (JSON) are null in snapshots that tiering did not write.
    """
    rows = []
    for s in sorted(table.metadata.snapshots, key=lambda s: s.sequence_number or 0):
        summary = dict(s.summary.additional_properties) if s.summary else {}
        rows.append(
            {
                "snapshot_id": s.snapshot_id,
                "parent_id": s.parent_snapshot_id,
                "committed_at": s.timestamp_ms * 1000,
                "operation": s.summary.operation.value if s.summary else None,
                "is_current": s.snapshot_id == table.metadata.current_snapshot_id,
                "added_rows": int(summary.get("added-records", 0)),
                "total_files": _number(summary.get("total-data-files")),
                "total_delete_files": _number(summary.get("total-delete-files")),
                "epoch": _number(summary.get(EPOCH)),
                "round_id": summary.get(ROUND_ID),
                "offsets": summary.get(OFFSETS),
                "summary": list(summary.items()),
            }
        )
    return pa.Table.from_pylist(rows, SNAPSHOTS_SCHEMA)


def files_table(table: Table, snapshot_id: int | None = None) -> pa.Table:
    """Data files of a lake snapshot, None for the current one, in tablet and offset order; `FILES_SCHEMA`.

    ``rows`` counts deleted rows too; ``partition`` and ``bucket`` are null where rows belong to no tablet.
    """
    rows = [
        {
            "path": f.path,
            "partition": f.tablet.partition if f.tablet else None,
            "bucket": f.tablet.bucket if f.tablet else None,
            "bytes": f.size,
            "rows": f.record_count,
            "min_offset": f.offsets[0] if f.offsets else None,
            "max_offset": f.offsets[1] if f.offsets else None,
            "delete_files": list(f.delete_files),
        }
        for f in plan_files(table, snapshot_id)
    ]
    return pa.Table.from_pylist(rows, FILES_SCHEMA)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None
