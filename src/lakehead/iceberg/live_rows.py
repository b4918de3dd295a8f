"""Counting the live rows of a lake snapshot: from manifests, and from delete files where there are some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from lakehead.env.recently_used import RecentlyUsed
from lakehead.env.threads import WorkerPool
from lakehead.iceberg.file_io import FILES_AT_ONCE
from lakehead.iceberg.planner import plan_files
from lakehead.iceberg.positions import deleted_positions, iterate_offsets
from lakehead.lake.census import Census
from lakehead.lake.lake_table import LakeFile
from lakehead.log.netchange import between
from lakehead.types import OFFSET_COLUMN, TabletKey

_known: RecentlyUsed[tuple[str, int], Census] = RecentlyUsed(256)
"""By table and snapshot."""


def count_rows(
    table: Table, snapshot_id: int | None = None, files: Callable[[], Sequence[LakeFile]] | None = None
) -> Census:
    """Live rows of a lake snapshot, None for the current one.

    Args:
        files: gives all files of the snapshot, if it has to be counted; None plans them.

    Raises:
        LakeFileMissingError: a manifest, a delete file or a file that has to be looked into is gone.
    """
    snapshot = snapshot_id if snapshot_id is not None else table.metadata.current_snapshot_id
    if snapshot is None:
        return Census({})
    key = (str(table.metadata.table_uuid), snapshot)
    found = _known.get(key)
    if found is None:
        found = _count(table, files() if files is not None else plan_files(table, snapshot))
        _known.note(key, found)
    return found


def _count(table: Table, files: Sequence[LakeFile]) -> Census:
    field_id = table.schema().find_field(OFFSET_COLUMN).field_id
    rows: Counter[TabletKey] = Counter()
    strangers = 0
    homeless = None
    with WorkerPool(FILES_AT_ONCE) as pool:
        for f, (known, others) in zip(files, pool.map(lambda f: _live(table.io, f, field_id), files), strict=True):
            strangers += others
            if f.tablet is not None:
                rows[f.tablet] += known
            elif known:
                homeless = f.path
    return Census({k: n for k, n in rows.items() if n}, strangers, homeless)


def _live(io: FileIO, file: LakeFile, field_id: int) -> tuple[int, int]:
    """Rows that are not deleted, with an offset and without."""
    nulls = file.null_offsets or 0
    dead = between(deleted_positions(io, file.path, file.delete_files), 0, file.record_count)
    if nulls == file.record_count:
        return 0, nulls - len(dead)
    if not nulls or not len(dead):
        return file.record_count - nulls - len(dead), nulls
    known = 0
    for group in iterate_offsets(io, file.path, field_id):
        at = between(dead, group.first, group.end) - group.first
        known += len(at) if group.valid is None else int(np.count_nonzero(group.valid[at]))
    return file.record_count - nulls - known, nulls - (len(dead) - known)
