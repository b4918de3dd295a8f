"""Where the columns of a streamed batch lie in its message.

gRPC gives a large message to its receiver as one run of bytes that begins at a multiple of eight; Arrow's columns lie
in it wherever what goes before them ends. Engines warn of columns that are not aligned to their type, or refuse them,
so a receiver copies those. The sender spares it that: it fills up the metadata, which goes before the columns.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from lakehead.protocol.codec import encode
from lakehead.protocol.messages import StreamHeader

_ALIGNED_BYTES_MIN = 1 << 16
"""Smaller messages lie anywhere in what gRPC received, and cost little to copy."""
_WIDTH = 8
_PREFIX_BYTES = 8  # before the header of an Arrow message: a mark and a length, which Flight leaves out
_BODY_TAG_BYTES = 2  # of Flight's message, as its other fields' tags are of 1


class StreamHeaders:
    """The metadata of the batches of one stream."""

    def __init__(self, schema: pa.Schema) -> None:
        # Of as many fields and buffers, and so as large, whatever the rows, if there is one.
        message = pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in schema], schema=schema).serialize()
        self._header_bytes = int.from_bytes(message[4:8].to_pybytes(), "little")

    def encode(self, header: StreamHeader, batch: pa.RecordBatch) -> pa.Buffer:
        """The header as bytes, as many as place the batch's columns at a multiple of eight."""
        data = encode(header)
        size = pa.ipc.get_record_batch_size(batch) - _PREFIX_BYTES - self._header_bytes
        if size >= _ALIGNED_BYTES_MIN:
            data = encode(msgspec.structs.replace(header, fill=bytes(self._missing(len(data), size))))
        return pa.py_buffer(data)

    def _missing(self, metadata: int, body: int) -> int:
        before = 1 + _varint_bytes(self._header_bytes) + self._header_bytes + 1 + _BODY_TAG_BYTES + _varint_bytes(body)
        n = -(before + _varint_bytes(metadata) + metadata) % _WIDTH
        # One byte more tells how long it is.
        return n if _varint_bytes(metadata + n) == _varint_bytes(metadata) else n + _WIDTH - 1


def _varint_bytes(n: int) -> int:
    return max(1, -(-n.bit_length() // 7))
