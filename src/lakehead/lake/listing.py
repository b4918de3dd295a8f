"""A lake's snapshots and files as Arrow tables, for people and for ``$lake$snapshots``."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lakehead.lake.lake_table import LakeFile
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
"""``epoch``, ``round_id`` and ``offsets`` (JSON) are null in snapshots that tiering did not write."""
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


def files_table(files: Sequence[LakeFile]) -> pa.Table:
    """Data files of a lake snapshot; `FILES_SCHEMA`.

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
        for f in files
    ]
    return pa.Table.from_pylist(rows, FILES_SCHEMA)
