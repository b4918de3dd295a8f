"""How one message with its attachments travels as Flight record batches.

Attachment i is batch i, of one binary value that shares the attachment's memory; a message without attachments sends
one batch with an empty value. The first batch's metadata is ``u32 count`` followed by the encoded message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from lakehead.errors import CorruptionError

ATTACHMENT_SCHEMA = pa.schema([pa.field("attachment", pa.large_binary(), nullable=False)])
_COUNT = struct.Struct("<I")
_EMPTY = pa.py_buffer(b"")


def wrap(message: bytes, attachments: Sequence[pa.Buffer]) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
    """(batch, metadata) pairs to send, in order."""
    metadata = pa.py_buffer(_COUNT.pack(len(attachments)) + message)
    for buffer in attachments or [_EMPTY]:
        offsets = pa.py_buffer(struct.pack("<qq", 0, buffer.size))
        value = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
        yield pa.RecordBatch.from_arrays([value], schema=ATTACHMENT_SCHEMA), metadata
        metadata = _EMPTY


def unwrap(read_chunk: Callable[[], Any]) -> tuple[bytes, list[pa.Buffer]]:
    """Read one message and its attachments; whatever ``read_chunk`` raises at the end of the stream passes through."""
    first = read_chunk()
    metadata = first.app_metadata
    if metadata is None or metadata.size < _COUNT.size:
        raise CorruptionError("a message without its envelope: the peer does not speak this protocol")
    data = metadata.to_pybytes()
    (count,) = _COUNT.unpack_from(data)
    chunks = [first, *(read_chunk() for _ in range(count - 1))]
    return data[_COUNT.size :], [_value(c.data) for c in chunks] if count else []


def _value(batch: pa.RecordBatch) -> pa.Buffer:
    value = batch.column(0)[0].as_buffer()
    return value if value is not None else _EMPTY
