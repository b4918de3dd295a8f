"""How batches are cut for sending, and which tablet each row belongs to: partition values and bucket hash."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.format.arrays import to_arrow, to_numbers
from lakehead.format.bucketing import bucket_ids, bucket_of
from lakehead.format.joins import rows_at, table_batches
from lakehead.types import UNPARTITIONED, TableDescriptor, TabletKey, partition_name

Rows = npt.NDArray[np.int64]
SHARE_ROWS = 1 << 13
"""Rows of an unkeyed batch that are worth a tablet of their own: with fewer, threads that wake each other take longer
than one that does it all."""
_FRAME_ROWS = 4096
_SLICE_ROWS = 1 << 16
_FEW_GROUPS = 8
_COMBINED_BYTES = 1 << 30
"""Up to here, to combine chunks and to take rows of one is quicker, and no column is too much for one."""
_CODES_MAX = 1 << 62


def route(
    desc: TableDescriptor, batch: pa.RecordBatch, *, unkeyed_bucket: int = 0
) -> Iterator[tuple[TabletKey, Rows | None]]:
    """Tablets of a batch's rows with the row positions that go there, ascending; None stands for all rows, and is then
    the only one.

    Args:
        batch: holds the partition columns and the bucket key.
        unkeyed_bucket: where a batch of a log table without a bucket key goes. One of `SHARE_ROWS` rows or more per
            bucket is cut into equal parts for this bucket and those that follow it.
    """
    names, codes = partition_codes(desc, batch)
    parts = 1 if desc.bucket_key else min(desc.buckets, batch.num_rows // SHARE_ROWS)
    if parts > 1:
        part = np.arange(batch.num_rows) * parts // batch.num_rows
        codes = np.zeros(batch.num_rows, np.int64) if codes is None else codes
        yield from _groups(names or [UNPARTITIONED], codes, (unkeyed_bucket + part) % desc.buckets, 0)
        return
    if not desc.bucket_key or desc.buckets == 1:
        buckets = np.zeros(batch.num_rows, np.int32) if names else None
        fixed = 0 if desc.bucket_key or desc.buckets == 1 else unkeyed_bucket
        if codes is None:
            yield TabletKey(UNPARTITIONED, fixed), None
            return
        yield from _groups(names, codes, buckets, fixed)
        return
    buckets = bucket_ids([batch.column(c) for c in desc.bucket_key], desc.buckets)
    if codes is None:
        codes, names = np.zeros(batch.num_rows, np.int64), [UNPARTITIONED]
    yield from _groups(names, codes, buckets, 0)


def tablet_of(desc: TableDescriptor, row: Mapping[str, int | str | bytes]) -> TabletKey:
    """Where `route` takes one row of plain values."""
    partition = partition_name(desc.partition_by, tuple(row[c] for c in desc.partition_by))
    if not desc.bucket_key or desc.buckets == 1:
        return TabletKey(partition, 0)
    return TabletKey(partition, bucket_of([row[c] for c in desc.bucket_key], desc.buckets))


def _groups(
    names: Sequence[str], codes: Rows, buckets: npt.NDArray[np.signedinteger[Any]] | None, first_bucket: int
) -> Iterator[tuple[TabletKey, Rows | None]]:
    span = int(buckets.max()) + 1 if buckets is not None and len(buckets) else 1
    group = codes * span + (buckets if buckets is not None else 0)
    groups = len(names) * span
    if groups <= _FEW_GROUPS:
        parts = [np.flatnonzero(group == g) for g in range(groups)]
    else:
        if groups <= 1 << 16:  # NumPy sorts so small numbers by their digits
            group = group.astype(np.uint16)
        order = np.argsort(group, kind="stable")
        cuts = (np.flatnonzero(np.diff(group[order])) + 1).tolist()
        parts = [order[start:end] for start, end in itertools.pairwise([0, *cuts, len(order)])]
    for rows in parts:
        if len(rows):
            code, bucket = divmod(int(group[rows[0]]), span)
            yield TabletKey(names[code], first_bucket + bucket), None if len(rows) == len(group) else rows


def partition_codes(desc: TableDescriptor, batch: pa.RecordBatch) -> tuple[list[str], Rows | None]:
    """Partition names, and per row the position of its name; ([], None) for unpartitioned tables."""
    if not desc.partition_by:
        return [], None
    code, codes_end = np.zeros(batch.num_rows, np.int64), 1
    parts: list[tuple[pa.Array, Rows]] = []
    for column in desc.partition_by:
        values = batch.column(column)
        if pa.types.is_timestamp(values.type) and values.type.tz:
            # Names are in UTC; Python cannot tell the first and the last day that it knows in every zone.
            values = values.cast(pa.timestamp(values.type.unit, "UTC"))
        if pa.types.is_boolean(values.type):
            encoded = pc.dictionary_encode(values.cast(pa.uint8()))
            dictionary = encoded.dictionary.cast(pa.bool_())
        else:
            encoded = pc.dictionary_encode(values)
            dictionary = encoded.dictionary
        if codes_end * len(dictionary) > _CODES_MAX:
            used, code = np.unique(code, return_inverse=True)
            codes_end = len(used)
        indices = to_numbers(encoded.indices)
        code, codes_end = code * len(dictionary) + indices, codes_end * len(dictionary)
        parts.append((dictionary, indices))
    used, codes = np.unique(code, return_inverse=True)
    rows = np.empty(len(used), np.int64)
    rows[codes] = np.arange(len(codes))  # any row of each: to find the first, a sort would have to be stable
    names = [
        partition_name(desc.partition_by, tuple(dictionary[at[row]].as_py() for dictionary, at in parts))
        for row in rows.tolist()
    ]
    return names, codes.reshape(-1).astype(np.int64)


def parts_of(batch: pa.RecordBatch, groups: Sequence[Rows | None]) -> list[pa.RecordBatch]:
    """The rows of each group that `route` made of this batch. All are gathered at once, as a part of a few rows costs
    what a call of Arrow costs; neighbours are not copied."""
    some = [rows for rows in groups if rows is not None]
    if all(int(rows[-1]) - int(rows[0]) == len(rows) - 1 for rows in some):
        return [batch if rows is None else batch.slice(int(rows[0]), len(rows)) for rows in groups]
    gathered = batch.take(to_arrow(np.concatenate(some)))
    lengths = [len(rows) for rows in some]
    return [gathered.slice(at, n) for at, n in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)]


def halves(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The first and the second half of the rows."""
    middle = batch.num_rows // 2
    return [batch.slice(0, middle), batch.slice(middle)]


def spreads(desc: TableDescriptor) -> bool:
    """Whether a slice of rows may come to many tablets, with few rows for each."""
    return bool(desc.partition_by) or (bool(desc.bucket_key) and desc.buckets > _SLICE_ROWS // _FRAME_ROWS)


def clustered(desc: TableDescriptor, rows: pa.Table) -> pa.Table:
    """The same rows, those of a tablet next to each other and in their order, where slices of them would have fewer
    than `_FRAME_ROWS` for a tablet: frames of many rows are read sooner, and have fewer headers and statistics."""
    if rows.num_rows <= _SLICE_ROWS or not spreads(desc):
        return rows
    routed = rows.select(list(dict.fromkeys((*desc.partition_by, *desc.bucket_key)))).combine_chunks().to_batches()
    if len(routed) > 1:  # more than Arrow joins
        return rows
    groups = [group for _, group in route(desc, routed[0]) if group is not None]
    if len(groups) * _FRAME_ROWS <= _SLICE_ROWS:
        return rows
    order = np.concatenate(groups)
    return rows.combine_chunks().take(to_arrow(order)) if rows.nbytes <= _COMBINED_BYTES else rows_at(rows, order)


def slices(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The table as record batches of at most 64 Ki rows and 64 MiB, or one larger row; at least one batch."""
    if rows.num_rows == 0:
        yield pa.RecordBatch.from_arrays([pa.array([], f.type) for f in rows.schema], schema=rows.schema)
        return
    yield from table_batches(rows, rows_max=_SLICE_ROWS)
