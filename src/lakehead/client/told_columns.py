"""Columns of a stream that its headers tell: the server does not send them, and whoever reads gets them all the same.

A batch is of one bucket. Where no row is left out, the offsets of its rows are those before its ``end_offset``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from lakehead.errors import CorruptionError
from lakehead.format.arrays import ascending, constant, to_arrow
from lakehead.protocol.messages import Stream, StreamHeader
from lakehead.types import BUCKET_COLUMN, OFFSET_COLUMN

_BUCKET = pa.field(BUCKET_COLUMN, pa.int32())
_OFFSET = pa.field(OFFSET_COLUMN, pa.int64())
_BUCKET_MAX = (1 << 31) - 1


def sent_columns(names: Sequence[str], *, dense: bool) -> list[str]:
    """Those of the columns that have to be sent: one at least, which says how many rows there are.

    Args:
        dense: each batch has all records between two offsets.
    """
    told = (BUCKET_COLUMN, OFFSET_COLUMN) if dense else (BUCKET_COLUMN,)
    sent = [name for name in names if name not in told]
    return sent or list(names)


def with_told_columns(stream: Stream, names: Sequence[str]) -> Stream:
    """A stream of these columns, where the given one brings what `sent_columns` left of them."""
    return stream if stream.schema.names == list(names) else _ToldColumns(stream, names)


class _ToldColumns:
    def __init__(self, stream: Stream, names: Sequence[str]) -> None:
        sent = {f.name: f for f in stream.schema}
        self._stream = stream
        self._told = [name for name in names if name not in sent]
        self.schema = pa.schema([sent.get(name) or (_BUCKET if name == BUCKET_COLUMN else _OFFSET) for name in names])
        self._buckets = pa.nulls(0, _BUCKET.type)

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        for header, batch in self._stream:
            yield header, self._with_all(header, batch)

    def _with_all(self, header: StreamHeader, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in self._told:
            columns[name] = self._told_column(name, header, batch.num_rows)
        return pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)

    def _told_column(self, name: str, header: StreamHeader, rows: int) -> pa.Array:
        if name == BUCKET_COLUMN:
            if not 0 <= header.bucket <= _BUCKET_MAX:
                raise CorruptionError(f"the server sent rows of bucket {header.bucket}, which no table has")
            held = self._buckets
            if len(held) < rows or not rows or held[0].as_py() != header.bucket:
                held = self._buckets = to_arrow(constant(header.bucket, rows, np.int32))
            return held.slice(0, rows)
        if not rows:
            return pa.nulls(0, _OFFSET.type)
        end = header.end_offset
        if end is None or end < rows:
            raise CorruptionError("the server sent rows, and does not say which offsets they have")
        return to_arrow(ascending(end - rows, end))

    def close(self) -> None:
        """End the stream."""
        self._stream.close()
