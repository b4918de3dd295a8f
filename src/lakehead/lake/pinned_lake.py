"""One lake snapshot of a table, as readers see it: pinned by its metadata file, with the offsets that it holds."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from lakehead.errors import InvalidRequestError, SnapshotNotFoundError
from lakehead.protocol.messages import LakeReply
from lakehead.types import TableDescriptor, TabletKey

if TYPE_CHECKING:
    from lakehead.iceberg.version import IcebergTable
    from lakehead.lake.marks import LakeMark


@dataclass(frozen=True)
class PinnedLake:
    """A lake snapshot.

    Attributes:
        table: the Iceberg table at a fixed metadata file; reading it needs no catalog.
        snapshot_id: the snapshot to read; None while nothing was ever committed.
        offsets: exclusive end of what the snapshot holds, per tablet; tablets not named hold nothing.
    """

    desc: TableDescriptor
    table: IcebergTable
    snapshot_id: int | None
    offsets: Mapping[TabletKey, int]

    @classmethod
    def current(cls, desc: TableDescriptor, info: LakeReply) -> PinnedLake:
        """The lake as the server saw it.

        Raises:
            LakeStateError: it was rolled back or replaced, or others changed what tiering relies on.
        """
        return cls.at(desc, info, None)

    @classmethod
    def at(cls, desc: TableDescriptor, info: LakeReply, snapshot: int | dt.datetime | None) -> PinnedLake:
        """The lake at one of its snapshots, at the one that was current at a time, or None for the current one.

        Raises:
            SnapshotNotFoundError: there is no such snapshot (any more).
            LakeStateError: it was rolled back or replaced, or others changed what tiering relies on.
        """
        table = _open(info)
        snapshot_id = _as_of(desc, table, snapshot) if isinstance(snapshot, dt.datetime) else snapshot
        mark = checked_mark(table, desc, snapshot_id)
        current = table.metadata.current_snapshot_id
        return cls(desc, table, current if snapshot_id is None else snapshot_id, mark.offsets if mark else {})

    def snapshots(self) -> pa.Table:
        """See `lakehead.iceberg.listing.snapshots_table`."""
        from lakehead.iceberg.listing import snapshots_table

        return snapshots_table(self.table)

    def files(self) -> pa.Table:
        """See `lakehead.iceberg.listing.files_table`."""
        from lakehead.iceberg.listing import files_table

        return files_table(self.table)


def lake_snapshots(info: LakeReply) -> pa.Table:
    """See `lakehead.iceberg.listing.snapshots_table`; of a lake that others broke, too."""
    from lakehead.iceberg.listing import snapshots_table

    return snapshots_table(_open(info))


def checked_mark(table: IcebergTable, desc: TableDescriptor, snapshot_id: int | None = None) -> LakeMark | None:
    """The mark that decides what a lake snapshot (the current one when None) holds, once it was checked that the table
    is still what tiering relies on.

    Raises:
        SnapshotNotFoundError: there is no such snapshot (any more).
        LakeStateError: it was rolled back or replaced, or others changed what tiering relies on.
    """
    from lakehead.iceberg.contract import check_contract
    from lakehead.iceberg.live_rows import count_rows
    from lakehead.iceberg.version import lake_version
    from lakehead.lake.census import check_rows
    from lakehead.lake.marks import mark_of

    version = replace(lake_version(table), name=str(desc.path))
    mark = mark_of(version, snapshot_id)
    check_contract(table, desc)
    check_rows(version, mark, lambda: count_rows(table, snapshot_id), keyed=desc.keyed, snapshot_id=snapshot_id)
    return mark


def _open(info: LakeReply) -> IcebergTable:
    return _static_table(info.metadata_location, tuple(sorted(info.storage_properties.items())))


def _as_of(desc: TableDescriptor, table: IcebergTable, time: dt.datetime) -> int:
    if time.tzinfo is None:
        raise InvalidRequestError("snapshot= needs a datetime with a time zone: datetime(..., tzinfo=timezone.utc)")
    found = table.snapshot_as_of_timestamp(int(time.timestamp() * 1000))
    if found is None or table.snapshot_by_id(found.snapshot_id) is None:
        raise SnapshotNotFoundError(
            f"the lake of {desc.path} has no snapshot of {time.isoformat()}: it began later, or that one has expired",
            table=str(desc.path),
        )
    return found.snapshot_id


@functools.lru_cache(maxsize=64)
def _static_table(metadata_location: str, properties: tuple[tuple[str, str], ...]) -> IcebergTable:
    from lakehead.iceberg.catalog import open_metadata

    return open_metadata(metadata_location, dict(properties))


def open_for_writing(desc: TableDescriptor, info: LakeReply) -> IcebergTable:
    """The Iceberg table through its catalog, as a tiering round needs it.

    Raises:
        UnavailableError: the catalog cannot be opened from here.
        LakeStateError: the catalog holds another table of that name.
    """
    from lakehead.iceberg.iceberg_table import open_lake_table

    return open_lake_table(desc, info).table
