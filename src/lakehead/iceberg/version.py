"""What an Iceberg metadata file says, in the form in which marks are read."""

from __future__ import annotations

from collections.abc import Mapping

from pyiceberg.table import Table
from pyiceberg.table import Table as IcebergTable

from lakehead.lake.marks import LakeMark, LakeSnapshot, LakeVersion, mark_of

__all__ = ["IcebergTable", "lake_version", "read_mark"]


def lake_version(table: Table) -> LakeVersion:
    """The version at which a PyIceberg table is loaded; its handle is the table."""
    metadata = table.metadata
    snapshots = {
        s.snapshot_id: LakeSnapshot(
            s.snapshot_id,
            s.parent_snapshot_id,
            s.sequence_number or 0,
            s.summary.additional_properties if s.summary else {},
            s.timestamp_ms * 1000,
            _records(s.summary.additional_properties if s.summary else {}),
        )
        for s in metadata.snapshots
    }
    name, uuid = ".".join(table.name()), str(metadata.table_uuid)
    state = table.metadata_location
    return LakeVersion(name, uuid, metadata.current_snapshot_id, snapshots, metadata.properties, state, table)


def _records(summary: Mapping[str, str]) -> int | None:
    told = summary.get("total-records", "")
    return int(told) if told.isdecimal() else None


def read_mark(table: Table, snapshot_id: int | None = None) -> LakeMark | None:
    """`mark_of` for a PyIceberg table as it is loaded."""
    return mark_of(lake_version(table), snapshot_id)
