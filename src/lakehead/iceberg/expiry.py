"""Taking snapshots out of an Iceberg table, and the files that only they named off its storage.

PyIceberg's expiry takes them out of the list alone. The list is committed first: a process that ends before the files
are gone leaves orphans, which `lakehead.iceberg.orphans` finds, and never a snapshot without its files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import AssertRefSnapshotId, RemoveSnapshotsUpdate

from lakehead.errors import CommitConflictError, UnavailableError
from lakehead.iceberg.data_files import discard_files
from lakehead.iceberg.orphans import Reached, metadata_in_use
from lakehead.iceberg.own_place import removable, require_collectable, require_own_place
from lakehead.iceberg.staging import StagingTransaction
from lakehead.lake.lake_table import Expired
from lakehead.protocol.messages import LakeUse


def expire_snapshots(
    table: Table,
    snapshot_ids: Collection[int],
    in_use: Callable[[], Iterable[LakeUse]],
    load_table: Callable[[], Table],
) -> Expired:
    """See `lakehead.lake.lake_table.LakeTable.expire`. Heads of branches and tags stay, and what somebody reads: files
    that stay for him when their snapshot has left the list would be nobody's afterwards.

    Raises:
        LakeStateError: others may need the files, or have had them written out of the data folder.
    """
    require_collectable(table)
    require_own_place(table)
    stay = {ref.snapshot_id for ref in table.metadata.refs.values()}
    for use in in_use():
        stay |= _used(table, use)
    going = [s for s in table.metadata.snapshots if s.snapshot_id in set(snapshot_ids) - stay]
    if not going:
        return Expired(0, 0)
    named = _files_of(table, going)
    _commit(table, [s.snapshot_id for s in going], load_table)
    reached = Reached(table.io)
    left = reached.add_current(load_table)
    for use in in_use():
        reached.add_use(use, left.metadata)
    gone = removable(table, (path for path in named if path.rpartition("/")[2] not in reached.names))
    discard_files(table.io, gone)
    return Expired(len(going), len(gone))


def _used(table: Table, use: LakeUse) -> set[int]:
    """Snapshots that a read needs; what is not known now will not be known when the list is committed."""
    if use.snapshot is not None:
        return {use.snapshot}
    return {s.snapshot_id for s in metadata_in_use(table.io, use.metadata).snapshots}


def _files_of(table: Table, snapshots: Iterable[Snapshot]) -> set[str]:
    """Addresses of all that these snapshots name."""
    reached = Reached(table.io)
    reached.add_snapshots(list(snapshots), may_lack=True)
    return reached.addresses


def _commit(table: Table, snapshot_ids: list[int], load_table: Callable[[], Table]) -> None:
    transaction = StagingTransaction(table)
    current = table.metadata.current_snapshot_id
    transaction._apply(
        (RemoveSnapshotsUpdate.model_validate({"snapshot-ids": snapshot_ids}),),
        (AssertRefSnapshotId.model_validate({"ref": "main", "snapshot-id": current}),),
    )
    staged = transaction.staged()
    name = ".".join(table.name())
    try:
        staged.publish()
    except CommitFailedException as e:
        # A request that was delivered twice is refused the second time: the table may be what was staged.
        if {s.snapshot_id for s in load_table().metadata.snapshots}.isdisjoint(snapshot_ids):
            return
        discard_files(table.io, staged.written)
        raise CommitConflictError(f"others changed lake table {name} while snapshots expired: try again") from e
    except Exception as e:
        raise UnavailableError(f"the catalog of lake table {name} did not answer while snapshots expired: {e}") from e
