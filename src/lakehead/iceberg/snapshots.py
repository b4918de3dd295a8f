"""The snapshots of an Iceberg table as an Arrow table."""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.table import Table

from lakehead.lake.listing import SNAPSHOTS_SCHEMA
from lakehead.lake.marks import EPOCH, OFFSETS, ROUND_ID


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
                "added_rows": _number(summary.get("added-records")) or 0,
                "total_files": _number(summary.get("total-data-files")),
                "total_delete_files": _number(summary.get("total-delete-files")),
                "epoch": _number(summary.get(EPOCH)),
                "round_id": summary.get(ROUND_ID),
                "offsets": summary.get(OFFSETS),
                "summary": list(summary.items()),
            }
        )
    return pa.Table.from_pylist(rows, SNAPSHOTS_SCHEMA)


def _number(text: str | None) -> int | None:
    """What a summary says, which any engine may write; None where that is no number."""
    try:
        number = int(text or "")
    except ValueError:
        return None
    return number if abs(number) < 1 << 63 else None
