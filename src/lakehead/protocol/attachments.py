"""How one message with its attachments travels over Flight.

Each message begins with metadata: ``u32 count`` of attachments, ``u32 inside``, the number of those that come with it,
which is all or none; their sizes, as u32, and their bytes; then the encoded message. What is small travels so, without
a record batch. Else attachment i is batch i, of one binary value that shares the attachment's memory, and the first
batch has the metadata. The schema with which each side begins says which version of the protocol it speaks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from lakehead.errors import CorruptionError, LimitExceededError, ProtocolVersionError
from lakehead.protocol.messages import PROTOCOL_VERSION

_VERSION = b"lakehead.protocol"
ATTACHMENT_SCHEMA = pa.schema(
    [pa.field("attachment", pa.large_binary(), nullable=False)], metadata={_VERSION: str(PROTOCOL_VERSION)}
)
PROCESS_HEADER = "lakehead-process"
"""Metadata of a call by which a client says which process it is: those of one token have shares of the server."""
ATTACHMENTS_MAX = 1 << 20
INSIDE_BYTES = 1 << 14
"""Attachments that together are no larger travel with their message."""
_HEAD = struct.Struct("<II")
_EMPTY = pa.py_buffer(b"")


def require_same_version(begun: pa.Schema) -> None:
    """Return if a peer that begins with this schema speaks this version of the protocol.

    Raises:
        ProtocolVersionError: it speaks another.
    """
    spoken = (begun.metadata or {}).get(_VERSION, b"2 or less").decode(errors="replace")
    if spoken != str(PROTOCOL_VERSION):
        raise version_error(spoken)


def version_error(spoken: str) -> ProtocolVersionError:
    """What it means to this side that the other one speaks another version."""
    return ProtocolVersionError(
        f"this side speaks version {PROTOCOL_VERSION} of the protocol, the other one version {spoken}: install the"
        " same version of Lakehead at both ends",
        version=PROTOCOL_VERSION,
        other=spoken,
    )


def size_error(bytes_max: int) -> LimitExceededError:
    """What it means that the attachments of a message hold more than they may."""
    return LimitExceededError(
        f"a message of more than {bytes_max:,} bytes is over the limit: split it", message_bytes_max=bytes_max
    )


def wrap(message: bytes, attachments: Sequence[pa.Buffer]) -> list[tuple[pa.RecordBatch | None, pa.Buffer]]:
    """(batch, metadata) pairs to `send`, in order."""
    count, sizes = len(attachments), [buffer.size for buffer in attachments]
    if sum(sizes) + 4 * count <= INSIDE_BYTES:
        parts = (_HEAD.pack(count, count), struct.pack(f"<{count}I", *sizes), *attachments, message)
        return [(None, pa.py_buffer(b"".join(parts)))]
    metadata = pa.py_buffer(_HEAD.pack(count, 0) + message)
    pairs = []
    for buffer in attachments:
        offsets = pa.py_buffer(struct.pack("<qq", 0, buffer.size))
        value = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
        pairs.append((pa.RecordBatch.from_arrays([value], schema=ATTACHMENT_SCHEMA), metadata))
        metadata = _EMPTY
    return pairs


def send(writer: Any, pairs: Sequence[tuple[pa.RecordBatch | None, pa.Buffer]]) -> None:
    """Write what `wrap` made of a message to a Flight stream."""
    for batch, metadata in pairs:
        if batch is None:
            writer.write_metadata(metadata)
        else:
            writer.write_with_metadata(batch, metadata)


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
    if metadata is None or metadata.size < _HEAD.size:
        raise CorruptionError("a message without its envelope: the peer does not speak this protocol")
    data = metadata.to_pybytes()
    count, inside = _HEAD.unpack_from(data)
    if count > ATTACHMENTS_MAX:
        raise LimitExceededError(f"a message of {count:,} attachments is over the limit of {ATTACHMENTS_MAX:,}")
    found: list[pa.Buffer] = []
    at = _HEAD.size
    if inside:
        at, found = _inside(data, count, inside)
    held = sum(value.size for value in found)
    while True:
        if bytes_max is not None and held > bytes_max:
            raise size_error(bytes_max)
        if len(found) >= count:
            return data[at:], found
        found.append(_value(first.data if not found else read_chunk().data))
        held += found[-1].size


def _inside(data: bytes, count: int, inside: int) -> tuple[int, list[pa.Buffer]]:
    """Where the message begins, and the attachments before it, copied to where columns may lie."""
    at = _HEAD.size + 4 * count
    sizes = struct.unpack_from(f"<{count}I", data, _HEAD.size) if at <= len(data) else ()
    if inside != count or len(sizes) < count or at + sum(sizes) > len(data):
        raise CorruptionError("an attachment is larger than its message: the peer does not speak this protocol")
    found = []
    for size in sizes:
        value = pa.allocate_buffer(size)
        memoryview(value).cast("B")[:] = data[at : at + size]
        found.append(value)
        at += size
    return at, found


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
