"""Rows from Arrow IPC messages that someone else made: every value checked, and no more memory than is allowed.

A few hundred bytes of LZ4 or ZSTD can stand for gigabytes, and Arrow believes the sizes that a message claims. So they
are read first from the message's header, a FlatBuffers table of ``Message`` with a ``RecordBatch`` inside: a table
begins with the distance back to its vtable, which holds for each field the distance from the table, 0 for absent.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from lakehead.errors import CorruptionError, LimitExceededError

UNREADABLE = (pa.ArrowException, OSError, EOFError, LookupError, MemoryError)
"""What pyarrow raises for bytes that are no record batch message of a schema."""

_HEADER, _BUFFERS, _COMPRESSION = 2, 2, 3  # fields of Message, of RecordBatch and of RecordBatch
_DICTIONARIES, _BATCHES = 2, 3  # fields of Footer
_END = b"ARROW1"  # of a file, after its footer and the footer's length
_PREFIX_BYTES = 8  # before each compressed buffer: its decompressed length, -1 for one stored as it is
_CONTINUATION = 0xFFFFFFFF
_u16, _u32, _i32 = (struct.Struct(number).unpack_from for number in ("<H", "<I", "<i"))


def read_received(message: pa.Buffer, schema: pa.Schema, *, bytes_max: int) -> pa.RecordBatch:
    """The rows of a message that a peer sent; safe to store, to compute with and to hand on.

    Costs about 3 ns for each text, next to nothing for other types.

    Raises:
        LimitExceededError: they take more than ``bytes_max`` once they are decompressed.
        CorruptionError: they are not rows of this schema, or hold values that cannot be.
    """
    size = decoded_bytes(message)
    if size > bytes_max:
        raise LimitExceededError(
            f"a batch of {size:,} bytes, decompressed, is over the limit of {bytes_max:,}: split it",
            batch_bytes_max=bytes_max,
        )
    try:
        rows = pa.ipc.read_record_batch(message, schema)
        rows.validate(full=True)
    except UNREADABLE as e:
        raise CorruptionError(f"an Arrow message does not hold rows of the schema expected: {e}") from e
    return rows


def decoded_bytes(message: pa.Buffer) -> int:
    """Bytes of the buffers of a record batch message after decompression.

    Raises:
        CorruptionError: it is no record batch message.
    """
    data = memoryview(message)
    try:
        return _decoded_bytes(data)
    except struct.error as e:
        raise CorruptionError(f"an Arrow message's header is damaged: {e}") from e


def require_small_file(data: bytes, *, bytes_max: int) -> None:
    """Return if an Arrow file of one record batch that a peer sent takes no more memory than that once it is read.

    Raises:
        LimitExceededError: it takes more.
        CorruptionError: it is no such file, or has dictionaries.
    """
    view = memoryview(data)
    try:
        (length,) = _i32(view, len(view) - len(_END) - 4)
        begins = len(view) - len(_END) - 4 - length
        if data[-len(_END) :] != _END or not 0 < length <= begins:
            raise CorruptionError("there is no Arrow file")
        footer = view[begins : begins + length]
        dictionaries, batches = _fields(footer, _u32(footer)[0], _DICTIONARIES, _BATCHES)
        if batches is None or _u32(footer, batches) != (1,) or (dictionaries and _u32(footer, dictionaries) != (0,)):
            raise CorruptionError("an Arrow file does not hold one batch of plain values")
        (at,) = struct.unpack_from("<q", footer, batches + 4)
        if not 0 <= at < len(view):
            raise CorruptionError("an Arrow file's batch lies outside of it")
        size = _decoded_bytes(view[at:])
    except struct.error as e:
        raise CorruptionError(f"an Arrow file's footer is damaged: {e}") from e
    if size > bytes_max:
        raise LimitExceededError(f"{size:,} bytes, decompressed, are over the limit of {bytes_max:,}")


def _decoded_bytes(data: memoryview) -> int:
    mark, length = struct.unpack_from("<Ii", data)
    if mark != _CONTINUATION or not 0 <= length <= len(data) - 8:
        raise CorruptionError("there is no Arrow message at this place")
    header, body = data[8 : 8 + length], data[8 + length :]
    (batch,) = _fields(header, _u32(header)[0], _HEADER)
    buffers, compression = _fields(header, batch, _BUFFERS, _COMPRESSION) if batch else (None, None)
    if buffers is None:
        raise CorruptionError("an Arrow message's header is not that of a record batch")
    (count,) = _u32(header, buffers)
    places = struct.unpack_from(f"<{2 * count}q", header, buffers + 4) if 16 * count <= len(header) else None
    if places is None:
        raise CorruptionError(f"an Arrow message claims {count} buffers, more than it has room for")
    if compression is None:
        return sum(places[1::2])
    total = 0
    for at, size in zip(places[::2], places[1::2], strict=True):
        if size:
            claimed = _length(body, at)
            total += size - _PREFIX_BYTES if claimed == -1 else claimed
            if claimed < -1 or at + size > len(body):
                raise CorruptionError("an Arrow message's buffers contradict its size")
    return total


def _fields(header: memoryview, table: int, *numbers: int) -> list[int | None]:
    """Where these fields of a table point, None for those that are absent."""
    vtable = table - _i32(header, table)[0]
    if vtable < 0:  # struct counts negative places from the end
        raise CorruptionError("an Arrow message's header points outside of it")
    (size,) = _u16(header, vtable)
    found: list[int | None] = []
    for number in numbers:
        (distance,) = _u16(header, vtable + 4 + 2 * number) if size >= 6 + 2 * number else (0,)
        found.append(table + distance + _u32(header, table + distance)[0] if distance else None)
    return found


def _length(body: memoryview, at: int) -> int:
    if at < 0:
        raise CorruptionError("an Arrow message's buffers lie outside of it")
    number: int = struct.unpack_from("<q", body, at)[0]
    return number
