"""What an Iceberg metadata file says, in the form in which marks are read."""

from __future__ import annotations

from collections.abc import Mapping

from pyiceberg.table import Table
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.snapshots import Snapshot

from lakehead.env.recently_used import RecentlyUsed
from lakehead.lake.marks import LakeMark, LakeSnapshot, LakeVersion, mark_of

__all__ = ["IcebergTable", "lake_version", "read_mark"]

_known: RecentlyUsed[str, tuple[list[Snapshot], dict[int, LakeSnapshot]]] = RecentlyUsed(64)
"""Of lake tables by their ids, the snapshots of the version that was looked at last, in both forms."""


def lake_version(table: Table) -> LakeVersion:
    """The version at which a PyIceberg table is loaded; its handle is the table."""
    metadata = table.metadata
    name, uuid = ".".join(table.name()), str(metadata.table_uuid)
    listed, known = _known.get(uuid) or ([], {})
    now = metadata.snapshots
    if now[: len(listed)] == listed:  # a commit adds one: those before it are the same objects
        snapshots = known | {s.snapshot_id: _snapshot(s, None) for s in now[len(listed) :]}
    else:
        snapshots = {s.snapshot_id: _snapshot(s, known.get(s.snapshot_id)) for s in now}
    _known.note(uuid, (now, snapshots))
    state = table.metadata_location
    return LakeVersion(name, uuid, metadata.current_snapshot_id, snapshots, metadata.properties, state, table)


def _snapshot(s: Snapshot, known: LakeSnapshot | None) -> LakeSnapshot:
    """Snapshots stay what they are, but that the one before them may be forgotten."""
    if known is not None and known.parent_id == s.parent_snapshot_id:
        return known
    summary = s.summary.additional_properties if s.summary else {}
    number, committed_us = s.sequence_number or 0, s.timestamp_ms * 1000
    return LakeSnapshot(s.snapshot_id, s.parent_snapshot_id, number, summary, committed_us, _records(summary))


def _records(summary: Mapping[str, str]) -> int | None:
    told = summary.get("total-records", "")
    return int(told) if told.isdecimal() else None


def read_mark(table: Table, snapshot_id: int | None = None) -> LakeMark | None:
    """`mark_of` for a PyIceberg table as it is loaded."""
    return mark_of(lake_version(table), snapshot_id)
