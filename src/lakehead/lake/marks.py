"""Marks: what a tiering commit says about itself, and so what the lake holds.

Each Lakehead commit writes its table id, epoch, round id and end offsets into the summary of its lake snapshot, and the
same, with the snapshot's id, as a table property in the same transaction. The mark of the nearest marked ancestor of a
lake snapshot says which offsets that snapshot holds. The property stands in for it only once expiry has removed that
ancestor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakehead.errors import LakeStateError, SnapshotNotFoundError
from lakehead.types import TabletKey

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

TABLE_ID = "lakehead.table-id"
EPOCH = "lakehead.epoch"
ROUND_ID = "lakehead.round-id"
OFFSETS = "lakehead.offsets"
MARK = "lakehead.mark"
"""Table property: the newest mark as JSON."""


@dataclass(frozen=True)
class LakeMark:
    """What one Lakehead commit left in the lake.

    Attributes:
        snapshot_id: lake snapshot that the commit made.
        table_id: id of the table whose rows they are.
        epoch: owner number of the tiering job.
        round_id: id of the round, unique for ever.
        offsets: exclusive end of what the lake holds, per tablet; tablets never tiered are missing.
    """

    snapshot_id: int
    table_id: str
    epoch: int
    round_id: str
    offsets: Mapping[TabletKey, int]

    def to_summary(self) -> dict[str, str]:
        """The entries of the snapshot summary."""
        return {
            TABLE_ID: self.table_id,
            EPOCH: str(self.epoch),
            ROUND_ID: self.round_id,
            OFFSETS: _offsets_to_json(self.offsets),
        }

    def to_properties(self) -> dict[str, str]:
        """The table property that outlives the snapshot."""
        return {MARK: json.dumps({"snapshot-id": self.snapshot_id, **self.to_summary()})}


def read_mark(table: Table, snapshot_id: int | None = None) -> LakeMark | None:
    """The mark that decides what a lake snapshot (the current one when None) holds; None before the first round.

    Raises:
        SnapshotNotFoundError: the lake snapshot is not listed.
        LakeStateError: the table was rolled back or replaced, or the deciding mark can no longer be known.
    """
    return mark_of(table.metadata, snapshot_id, name=".".join(table.name()))


def mark_of(metadata: TableMetadata, snapshot_id: int | None = None, *, name: str) -> LakeMark | None:
    """`read_mark` on metadata that is perhaps not committed yet; ``name`` is the table's, for messages."""
    by_id = {s.snapshot_id: s for s in metadata.snapshots}
    if snapshot_id is not None and snapshot_id not in by_id:
        raise SnapshotNotFoundError(
            f"lake table {name} has no snapshot {snapshot_id}: it never had, or it has expired",
            table=name,
            snapshot=snapshot_id,
        )
    stored = _stored_mark(metadata)
    lineage = {s.snapshot_id for s in _ancestors(by_id, metadata.current_snapshot())}
    if snapshot_id is None and stored is not None and stored.snapshot_id in by_id.keys() - lineage:
        raise LakeStateError(
            f"lake table {name} was rolled back behind snapshot {stored.snapshot_id}, which tiering wrote: restore it,"
            " or drop and create the table again",
            table=name,
            snapshot=stored.snapshot_id,
        )
    start = metadata.current_snapshot() if snapshot_id is None else by_id[snapshot_id]
    oldest: Snapshot | None = None
    for oldest in _ancestors(by_id, start):
        if (mark := _snapshot_mark(oldest)) is not None:
            return mark
    if stored is None or (snapshot_id is not None and not _parent_expired(oldest)):
        return None
    # The property tells of the newest commit: an older snapshot, off the current lineage, it says nothing about.
    if not _parent_expired(oldest) or (start is not None and start.snapshot_id not in lineage):
        raise LakeStateError(
            f"lake table {name}: which offsets snapshot {start.snapshot_id if start else None} holds cannot be known;"
            f" it is older than what tiering wrote last (snapshot {stored.snapshot_id}), or the snapshots between have"
            " expired",
            table=name,
            snapshot=stored.snapshot_id,
        )
    return stored


def marked_ancestors(metadata: TableMetadata) -> Iterator[LakeMark]:
    """Marks of the current lake snapshot and its listed ancestors, newest first."""
    by_id = {s.snapshot_id: s for s in metadata.snapshots}
    for snapshot in _ancestors(by_id, metadata.current_snapshot()):
        if (mark := _snapshot_mark(snapshot)) is not None:
            yield mark


def find_round(metadata: TableMetadata, round_id: str) -> LakeMark | None:
    """The mark of a round if it landed and its snapshot is still listed."""
    return next((m for m in marked_ancestors(metadata) if m.round_id == round_id), None)


def has_foreign_commits(metadata: TableMetadata) -> bool:
    """True unless every listed ancestor of the current lake snapshot, back to the first, is Lakehead's."""
    by_id = {s.snapshot_id: s for s in metadata.snapshots}
    oldest = None
    for oldest in _ancestors(by_id, metadata.current_snapshot()):
        if _snapshot_mark(oldest) is None:
            return True
    return _parent_expired(oldest)


def next_epoch(table: Table) -> int:
    """The epoch with which a new tiering job fences those before it."""
    mark = read_mark(table)
    return mark.epoch + 1 if mark else 1


def _ancestors(by_id: Mapping[int, Snapshot], snapshot: Snapshot | None) -> Iterator[Snapshot]:
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = by_id.get(parent) if parent is not None else None


def _parent_expired(oldest: Snapshot | None) -> bool:
    # PyIceberg's expiry erases the parent's id from its children, so a missing parent does not mean the first snapshot.
    if oldest is None:
        return False
    return oldest.parent_snapshot_id is not None or (oldest.sequence_number or 0) > 1


def _snapshot_mark(snapshot: Snapshot) -> LakeMark | None:
    values = snapshot.summary.additional_properties if snapshot.summary else {}
    return _mark(snapshot.snapshot_id, values) if OFFSETS in values else None


def _stored_mark(metadata: TableMetadata) -> LakeMark | None:
    text = metadata.properties.get(MARK)
    if text is None:
        return None
    values: dict[str, Any] = json.loads(text)
    return _mark(int(values["snapshot-id"]), values)


def _mark(snapshot_id: int, values: Mapping[str, str]) -> LakeMark:
    offsets = {TabletKey.parse(k): int(v) for k, v in json.loads(values[OFFSETS]).items()}
    return LakeMark(snapshot_id, values[TABLE_ID], int(values[EPOCH]), values[ROUND_ID], offsets)


def _offsets_to_json(offsets: Mapping[TabletKey, int]) -> str:
    return json.dumps({str(k): v for k, v in sorted(offsets.items())}, separators=(",", ":"))
