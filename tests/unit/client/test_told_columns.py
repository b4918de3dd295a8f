"""Columns that the headers of a stream tell are in its batches as if they had been sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from lakehead.client.told_columns import sent_columns, with_told_columns
from lakehead.errors import CorruptionError
from lakehead.protocol.messages import StreamHeader

NAMES = ["__offset", "x", "__bucket", "__timestamp"]
SENT = pa.schema([("x", pa.int8()), ("__timestamp", pa.timestamp("us", "UTC"))])


class Sent:
    def __init__(self, schema: pa.Schema, items: Sequence[tuple[StreamHeader, pa.RecordBatch]]) -> None:
        self.schema, self._items, self.closed = schema, items, False

    def __iter__(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch]]:
        return iter(self._items)

    def close(self) -> None:
        self.closed = True


def item(bucket: int, end: int | None, *xs: int) -> tuple[StreamHeader, pa.RecordBatch]:
    rows = [{"x": x, "__timestamp": None} for x in xs]
    header = StreamHeader(partition="", bucket=bucket, end_offset=end)
    return header, pa.RecordBatch.from_pylist(rows, schema=SENT)


def test_what_has_to_be_sent() -> None:
    assert sent_columns(NAMES, dense=True) == SENT.names
    assert sent_columns(NAMES, dense=False) == ["__offset", "x", "__timestamp"]
    for names in (["__offset"], ["__bucket"], ["__bucket", "__offset"], []):  # what says how many rows there are
        assert sent_columns(names, dense=True) == names


def test_the_others_come_from_headers_in_their_places() -> None:
    items = [item(3, 7, 1, 2), item(3, 10, 3, 4, 5), item(1, 1, 6), item(3, 11, 7), item(0, None), item(2, 40)]
    sent = Sent(SENT, items)
    stream = with_told_columns(sent, NAMES)
    assert stream.schema.names == NAMES and stream.schema.field("__offset").type == pa.int64()
    found = []
    for (header, rows), (same, _) in zip(stream, items, strict=True):
        rows.validate(full=True)
        assert header is same and rows.schema == stream.schema
        found += [(r["__bucket"], r["__offset"], r["x"]) for r in rows.to_pylist()]
    assert found == [(3, 5, 1), (3, 6, 2), (3, 7, 3), (3, 8, 4), (3, 9, 5), (1, 0, 6), (3, 10, 7)]
    stream.close()
    assert sent.closed
    assert with_told_columns(sent, SENT.names) is sent


@pytest.mark.parametrize("wrong", [item(0, None, 1), item(0, 1, 1, 2), item(-1, 9, 1), item(1 << 31, 9, 1)], ids=str)
def test_headers_that_cannot_be_are_an_error(wrong: tuple[StreamHeader, pa.RecordBatch]) -> None:
    with pytest.raises(CorruptionError):
        list(with_told_columns(Sent(SENT, [wrong]), NAMES))
