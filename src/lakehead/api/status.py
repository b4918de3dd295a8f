"""How a table stands: watermarks, tiered offsets and lag, per tablet."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.types import TabletKey

STATUS_SCHEMA = pa.schema(
    [
        ("partition", pa.string()),
        ("bucket", pa.int32()),
        ("start_offset", pa.int64()),
        ("high_watermark", pa.int64()),
        ("tiered_offset", pa.int64()),
        ("rows", pa.int64()),
        ("lag_rows", pa.int64()),
        ("lag_seconds", pa.float64()),
        ("damage", pa.string()),
    ]
)


def status_table(handle: TableHandle) -> pa.Table:
    """See `Table.status`."""
    tablets = handle.log.tablets()
    tiered: dict[TabletKey, int] = {}
    gone: frozenset[TabletKey] = frozenset()
    if handle.desc.lake is not None:
        from lakehead.lake.pinned_lake import PinnedLake

        lake = PinnedLake.current(handle.desc, handle.lake())
        tiered, gone = dict(lake.offsets), lake.gone
    now, times = handle.log.timestamps_at({t.key: tiered.get(t.key, t.log_start) for t in tablets})
    rows = []
    for t in tablets:
        has_lake = handle.desc.lake is not None
        at = tiered.get(t.key, 0)
        committed = times[t.key]
        lag = max(now - committed, 0) / 1e6 if committed is not None else 0.0
        rows.append(
            {
                "partition": unquote(t.partition),
                "bucket": t.bucket,
                "start_offset": t.log_start,
                "high_watermark": t.high_watermark,
                "tiered_offset": at if has_lake else None,
                "rows": t.rows,
                # That rows are gone is to follow, too, where none came in their place.
                "lag_rows": max(t.high_watermark - at, int(t.key in gone)) if has_lake else None,
                "lag_seconds": lag if has_lake else None,
                "damage": t.damage,
            }
        )
    return pa.Table.from_pylist(rows, STATUS_SCHEMA)
