"""How a table stands: watermarks, tiered offsets and lag, per tablet."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa

from lakehead.client.table import TableHandle

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
    tiered = {}
    if handle.desc.lake is not None:
        from lakehead.lake.pinned_lake import PinnedLake

        tiered = dict(PinnedLake.current(handle.desc, handle.lake()).offsets)
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
                "lag_rows": max(t.high_watermark - at, 0) if has_lake else None,
                "lag_seconds": lag if has_lake else None,
                "damage": t.damage,
            }
        )
    return pa.Table.from_pylist(rows, STATUS_SCHEMA)
