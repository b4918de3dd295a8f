"""How one message with its attachments travels as Flight record batches.

Attachment i is batch i, of one binary value that shares the attachment's memory; a message without attachments sends
one batch with an empty value. The first batch's metadata is ``u32 count`` followed by the encoded message. The schema
with which each side begins says which version of the protocol it speaks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from lakehead.errors import CorruptionError, LimitExceededError, ProtocolVersionError
from lakehead.protocol.messages import PROTOCOL_VERSION

_VERSION = b"lakehead.protocol"
ATTACHMENT_SCHEMA = pa.schema(
    [pa.field("attachment", pa.large_binary(), nullable=False)], metadata={_VERSION: str(PROTOCOL_VERSION)}
)
ATTACHMENTS_MAX = 1 << 20
_COUNT = struct.Struct("<I")
_EMPTY = pa.py_buffer(b"")


def require_same_version(begun: pa.Schema) -> None:
    """Return if a peer that begins with this schema speaks this version of the protocol.

    Raises:
        ProtocolVersionError: it speaks another.
    """
    spoken = (begun.metadata or {}).get(_VERSION, b"2 or less").decode(errors="replace")
    if spoken != str(PROTOCOL_VERSION):
        raise ProtocolVersionError(
            f"this side speaks version {PROTOCOL_VERSION} of the protocol, the other one version {spoken}: install the"
            " same version of Lakehead at both ends",
            version=PROTOCOL_VERSION,
            other=spoken,
        )


def wrap(message: bytes, attachments: Sequence[pa.Buffer]) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
    """(batch, metadata) pairs to send, in order."""
    metadata = pa.py_buffer(_COUNT.pack(len(attachments)) + message)
    for buffer in attachments or [_EMPTY]:
        offsets = pa.py_buffer(struct.pack("<qq", 0, buffer.size))
        value = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
        yield pa.RecordBatch.from_arrays([value], schema=ATTACHMENT_SCHEMA), metadata
        metadata = _EMPTY


def unwrap(read_chunk: Callable[[], Any], *, bytes_max: int | None = None) -> tuple[bytes, list[pa.Buffer]]:
    """Read one message and its attachments; whatever ``read_chunk`` raises at the end of the stream passes through.

    Args:
        bytes_max: what all attachments together may hold; None for peers that are trusted to know.

    Raises:
        CorruptionError: what is read is no message.
        LimitExceededError: it is larger than allowed; the rest of it is still to be read.
    """
    first = read_chunk()
    metadata = first.app_metadata
    if metadata is None or metadata.size < _COUNT.size:
        raise CorruptionError("a message without its envelope: the peer does not speak this protocol")
    data = metadata.to_pybytes()
    (count,) = _COUNT.unpack_from(data)
    if count > ATTACHMENTS_MAX:
        raise LimitExceededError(f"a message of {count:,} attachments is over the limit of {ATTACHMENTS_MAX:,}")
    found: list[pa.Buffer] = []
    held = 0
    while True:
        value = _value(first.data if not found else read_chunk().data)
        found.append(value)
        held += value.size
        if bytes_max is not None and held > bytes_max:
            raise LimitExceededError(
                f"a message of more than {bytes_max:,} bytes is over the limit: split it", message_bytes_max=bytes_max
            )
        if len(found) >= count:
            return data[_COUNT.size :], found if count else []


def _value(batch: pa.RecordBatch) -> pa.Buffer:
    # The schema is the peer's own, and Arrow does not look at offsets before they are used.
    try:
        if batch is None or batch.schema.types != ATTACHMENT_SCHEMA.types or batch.num_rows != 1:
            raise CorruptionError("an attachment is not one binary value: the peer does not speak this protocol")
        batch.validate(full=True)
    except pa.ArrowException as e:
        raise CorruptionError(f"an attachment is damaged: {e}") from e
    value = batch.column(0)[0].as_buffer()
    return value if value is not None else _EMPTY
