"""The metadata of a streamed batch says what it says, and has the length that places the columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lakehead.protocol.alignment import StreamHeaders
from lakehead.protocol.codec import decode_stream_header
from lakehead.protocol.messages import StreamHeader

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.struct([("x", pa.decimal128(9, 2))])))])


def varint(n: int) -> bytes:
    """Protobuf's."""
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def columns_at(batch: pa.RecordBatch, metadata: pa.Buffer) -> int:
    """Where the columns begin in Flight's message, a Protobuf of header, metadata and body."""
    message = batch.serialize()
    header = int.from_bytes(message[4:8].to_pybytes(), "little")
    before = [b"t", varint(header), bytes(header), b"t", varint(metadata.size), metadata.to_pybytes()]
    return len(b"".join([*before, b"tt", varint(message.size - 8 - header)]))


@pytest.mark.parametrize("rows", [0, 1, 5_000, 70_000])
def test_metadata_places_the_columns(rows: int) -> None:
    whole = pa.table({"k": range(rows), "s": ["x"] * rows, "l": [[{"x": None}]] * rows}, schema=SCHEMA)
    batch = whole.to_batches()[0] if rows else pa.RecordBatch.from_pylist([], schema=SCHEMA)
    headers = StreamHeaders(SCHEMA)
    for length in range(150):  # the metadata's length takes one byte, then two
        header = StreamHeader(partition="p" * length, bucket=1, end_offset=2 * length)
        metadata = headers.encode(header, batch)
        found = decode_stream_header(metadata.to_pybytes())
        assert (found.partition, found.bucket, found.end_offset) == (header.partition, 1, 2 * length)
        if rows >= 5_000:
            assert columns_at(batch, metadata) % 8 == 0
        else:
            assert found == header
