"""The batch frame: how one batch of rows lies in a log, in memory and on the wire.

::

      0  4s   magic "LHF1"
      4  u32  length of the whole frame, a multiple of 64
      8  u32  crc32c of bytes [12, 64)
     12  u32  crc32c of the body, bytes [64, length)
     16  i64  base offset                                     \\
     24  i64  commit timestamp, microseconds since the epoch   |  set by the server; outside
     32  i64  synced end of the log when this was written      |  the body's checksum
     40  u32  epoch of the tablet's owner                      |
     44  u32  checksum of what the client sent (`Content`)     |
     48  u8   its kind (`WRITE_KINDS`), 0 before format 3      |
     49  15x  zero                                            /
    ---- body: written once, by the client for appends, by the server for changelogs ----
     64  u32  schema id
     68  u16  flags: bit 0 = change types and previous offsets are present, bit 1 = buffers are compressed
     70  u16  tablets that the batch went to; 0 for not known
     72  16s  writer id
     88  i64  batch sequence of the writer
     96  i64  the writer's previous sequence for this tablet, -1 for none
    104  i64  acked through: the sequence up to which the writer has seen all answers, -1 for none
    112  u32  row count
    116  u32  statistics length
    120  u32  message length
    124  u32  epoch of the writer
    128  i64 x rows  previous offsets, -1 for none            (only with flag bit 0)
      .  u8  x rows  change types (`ChangeType`)              (only with flag bit 0)
      .       statistics (format.statistics; small batches have none), padded so that what follows starts at a
              multiple of 64
      .       one Arrow IPC record batch message; the schema is the table's, by schema id
      .       zeros up to a multiple of 64

All integers are little-endian. Rows of a frame have the offsets ``[base, base + row count)``. A frame with no rows is
legal: it records the sequence of a batch that changed nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.errors import ChecksumError, CorruptionError, LimitExceededError, UnsupportedFormatError
from lakehead.format.ipc_message import UNREADABLE, read_received
from lakehead.format.statistics import decode_statistics, encode_statistics
from lakehead.types import Epoch, Offset

MAGIC = b"LHF1"
HEADER_BYTES = 64
BODY_HEADER_BYTES = 64
ALIGNMENT = 64
FRAME_BYTES_MAX = 1 << 30
STATISTICS_ROWS_MIN = 256
"""Smaller batches carry no statistics: to make and to keep them costs more than reading the rows."""
WRITER_ID_BYTES = 16
PUBLISHERS = b"\xff\xff\xff\xff"
"""How the ids begin under which a server writes what jobs publish; no client's do."""
CHANGES = 1
COMPRESSED = 2

WRITE_KINDS = {"append": 1, "upsert": 2, "delete": 3}
TABLETS_MAX = (1 << 16) - 1
"""A batch that goes to more tablets does not say to how many."""

_HEADER = struct.Struct("<4sIIIqqqIIB15x")
_HEADER_TAIL = struct.Struct("<IqqqIIB15x")
_BODY = struct.Struct("<IHH16sqqqIIII")
assert _HEADER.size == HEADER_BYTES and _BODY.size == BODY_HEADER_BYTES


class WriterStamp(msgspec.Struct, frozen=True):
    """Who wrote a batch, and which of its batches it is.

    ``previous_sequence`` is the writer's last sequence *for this tablet* and ``acked_through`` the sequence up to which
    it has seen every answer; -1 stands for none in both. ``tablets`` is the number of tablets that the whole batch went
    to, 0 when it does not say.
    """

    writer_id: bytes
    sequence: int
    previous_sequence: int = -1
    acked_through: int = -1
    epoch: Epoch = 0
    tablets: int = 0


class Content(msgspec.Struct, frozen=True):
    """What a client sent as one batch: the checksum of its content and its kind, one of `WRITE_KINDS`. Zeros stand for
    not known, as in frames before format 3."""

    checksum: int = 0
    kind: int = 0

    def contradicts(self, other: Content) -> bool:
        """Whether both are known and not the same."""
        return bool(
            (self.kind and other.kind and self.kind != other.kind)
            or (self.checksum and other.checksum and self.checksum != other.checksum)
        )


UNKNOWN_CONTENT = Content()


class FrameBody(msgspec.Struct, frozen=True):
    """A decoded body header, with the body's bytes."""

    buffer: pa.Buffer
    schema_id: int
    flags: int
    stamp: WriterStamp
    row_count: int
    statistics_length: int
    message_length: int
    crc: int

    @property
    def _statistics_at(self) -> int:
        return BODY_HEADER_BYTES + (9 * self.row_count if self.flags & CHANGES else 0)

    @property
    def prev_offsets(self) -> npt.NDArray[np.int64]:
        """Per row the offset it replaces, -1 for none; only of changelog frames."""
        return np.frombuffer(self.buffer, np.int64, self.row_count, BODY_HEADER_BYTES)

    @property
    def change_types(self) -> npt.NDArray[np.int8]:
        """Per row its `ChangeType`; of an append frame all zero (+A)."""
        if not self.flags & CHANGES:
            return np.zeros(self.row_count, np.int8)
        return np.frombuffer(self.buffer, np.int8, self.row_count, BODY_HEADER_BYTES + 8 * self.row_count)

    @property
    def statistics(self) -> pa.Buffer:
        return self.buffer.slice(self._statistics_at, self.statistics_length)

    def rows(self, schema: pa.Schema, columns: Sequence[int] | None = None) -> pa.RecordBatch:
        """The rows, zero-copy where the buffers are uncompressed.

        Args:
            schema: the table's schema of this frame's schema id.
            columns: positions of the columns to read, in the order wanted; None reads all. Of a compressed frame only
                these columns' buffers are decompressed.

        Raises:
            CorruptionError: the Arrow message cannot be decoded.
        """
        try:
            if columns is not None and self.flags & COMPRESSED:
                return _read_projected(self._message, schema, columns)
            batch = pa.ipc.read_record_batch(self._message, schema)
        except UNREADABLE as e:
            raise CorruptionError(f"a batch frame holds an Arrow message that cannot be read: {e}") from e
        return batch if columns is None else batch.select(list(columns))

    @property
    def _message(self) -> pa.Buffer:
        return self.buffer.slice(_align(self._statistics_at + self.statistics_length), self.message_length)

    def received_rows(self, schema: pa.Schema, *, bytes_max: int) -> pa.RecordBatch:
        """The rows of a body that a writer sent, every value checked: safe to store, to compute with and to hand on.

        Costs about 3 ns for each text, next to nothing for other types.

        Raises:
            LimitExceededError: they take more than ``bytes_max`` once they are decompressed.
            CorruptionError: they are not rows of this schema, or contradict the body's header.
        """
        stamp = self.stamp
        if self.flags & ~COMPRESSED:
            raise CorruptionError(f"a batch has flags {self.flags:#x}: changes are made by the server alone")
        if stamp.sequence < 0 or not -1 <= stamp.previous_sequence < stamp.sequence or stamp.acked_through < -1:
            raise CorruptionError(f"a batch has impossible sequences: {stamp}")
        rows = read_received(self._message, schema, bytes_max=bytes_max)
        if rows.num_rows != self.row_count:
            raise CorruptionError(f"a batch of {rows.num_rows} rows says that it has {self.row_count}")
        if self.statistics_length:
            decode_statistics(self.statistics, schema).check(self.row_count)
        return rows


class Frame(msgspec.Struct, frozen=True):
    """One frame of a log: the server's fields and the body."""

    base_offset: Offset
    timestamp_us: int
    synced_end: int
    epoch: Epoch
    body: FrameBody
    length: int
    content: Content = UNKNOWN_CONTENT

    @property
    def end_offset(self) -> Offset:
        """Offset after the last row."""
        return self.base_offset + self.body.row_count

    @property
    def header(self) -> bytes:
        """The server's 64 bytes that go before the body."""
        return encode_header(
            self.body,
            base_offset=self.base_offset,
            timestamp_us=self.timestamp_us,
            synced_end=self.synced_end,
            epoch=self.epoch,
            content=self.content,
        )


def _align(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _read_projected(message: pa.Buffer, schema: pa.Schema, columns: Sequence[int]) -> pa.RecordBatch:
    wanted = sorted(set(columns))
    stream = pa.py_buffer(b"".join((schema.serialize(), message)))
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    batch = pa.ipc.open_stream(stream, options=options).read_next_batch()
    return batch.select([wanted.index(c) for c in columns])


def encode_body(
    batch: pa.RecordBatch,
    *,
    schema_id: int,
    stamp: WriterStamp,
    compression: str = "none",
    change_types: npt.NDArray[np.int8] | None = None,
    prev_offsets: npt.NDArray[np.int64] | None = None,
    with_statistics: bool = True,
) -> FrameBody:
    """Lay out a batch as the body of a frame; everything but the server's fields.

    Args:
        batch: rows in the table's column order and types.
        change_types: with ``prev_offsets``, makes this a changelog frame; both have one entry a row.
        compression: of the Arrow buffers, "none", "lz4" or "zstd".
        with_statistics: False for bodies that never reach a log, as those of upserts.

    Raises:
        LimitExceededError: the frame would be larger than any reader takes.
    """
    flags = 0 if compression == "none" else COMPRESSED
    changes: list[object] = []
    if change_types is not None and prev_offsets is not None:
        flags |= CHANGES
        changes = [np.ascontiguousarray(prev_offsets).data, np.ascontiguousarray(change_types).data]
    message = batch.serialize() if compression == "none" else _compressed_message(batch, compression)
    statistics = encode_statistics(batch) if with_statistics and batch.num_rows >= STATISTICS_ROWS_MIN else b""
    rows = batch.num_rows
    header = _BODY.pack(
        schema_id,
        flags,
        stamp.tablets,
        stamp.writer_id,
        stamp.sequence,
        stamp.previous_sequence,
        stamp.acked_through,
        rows,
        len(statistics),
        message.size,
        stamp.epoch,
    )
    used = BODY_HEADER_BYTES + (9 * rows if changes else 0) + len(statistics)
    gap = _align(used) - used
    tail = _align(message.size) - message.size
    length = HEADER_BYTES + used + gap + message.size + tail
    if length > FRAME_BYTES_MAX:
        raise LimitExceededError(
            f"a batch makes a log frame of {length:,} bytes, over the limit of {FRAME_BYTES_MAX:,}: split it",
            frame_bytes_max=FRAME_BYTES_MAX,
        )
    joined = b"".join((header, *changes, statistics, bytes(gap), message, bytes(tail)))  # type: ignore[arg-type]
    buffer = pa.py_buffer(joined)
    return FrameBody(buffer, schema_id, flags, stamp, rows, len(statistics), message.size, crc32c.crc32c(joined))


def _compressed_message(batch: pa.RecordBatch, compression: str) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()  # the schema, which the log does not repeat
    return messages.read_next_message().serialize()


def decode_body(buffer: pa.Buffer, crc: int | None = None) -> FrameBody:
    """Read a body's header; with ``crc`` given, check the whole body against it first.

    Raises:
        ChecksumError: the bytes are not those that were written.
        CorruptionError: the lengths in the header contradict the buffer.
    """
    if crc is not None and crc32c.crc32c(buffer) != crc:
        raise ChecksumError("the body of a batch frame does not match its checksum")
    if buffer.size < BODY_HEADER_BYTES:
        raise CorruptionError(f"a batch frame's body has only {buffer.size} bytes")
    return decode_body_unchecked(buffer, crc32c.crc32c(buffer) if crc is None else crc)


def encode_header(
    body: FrameBody,
    *,
    base_offset: Offset,
    timestamp_us: int,
    synced_end: int,
    epoch: Epoch,
    content: Content = UNKNOWN_CONTENT,
) -> bytes:
    """The server's 64 bytes that go before a body."""
    length = HEADER_BYTES + body.buffer.size
    tail = _HEADER_TAIL.pack(body.crc, base_offset, timestamp_us, synced_end, epoch, content.checksum, content.kind)
    return struct.pack("<4sII", MAGIC, length, crc32c.crc32c(tail)) + tail


class FrameHeader(msgspec.Struct, frozen=True):
    """The server's fields of a frame, before its body is looked at."""

    length: int
    crc: int
    base_offset: Offset
    timestamp_us: int
    synced_end: int
    epoch: Epoch
    content: Content = UNKNOWN_CONTENT


def decode_header(buffer: pa.Buffer) -> FrameHeader:
    """Read and check the first 64 bytes of a frame.

    Raises:
        ChecksumError: they are not a frame header.
        UnsupportedFormatError: they are one of a newer version.
    """
    data = buffer[:HEADER_BYTES].to_pybytes()
    if len(data) < HEADER_BYTES:
        raise ChecksumError("a batch frame's header is cut off")
    magic, length, header_crc, crc, base, timestamp, synced, epoch, checksum, kind = _HEADER.unpack(data)
    if crc32c.crc32c(data[12:]) != header_crc:
        raise ChecksumError("a batch frame's header does not match its checksum")
    if magic != MAGIC:
        if magic[:3] == MAGIC[:3]:
            raise UnsupportedFormatError(
                f"a log holds frames of format {magic!r}, this version reads {MAGIC!r}: upgrade Lakehead"
            )
        raise ChecksumError("there is no batch frame at this place")
    if length % ALIGNMENT or not HEADER_BYTES + BODY_HEADER_BYTES <= length <= FRAME_BYTES_MAX or base < 0:
        raise ChecksumError("a batch frame's header has impossible lengths")
    return FrameHeader(length, crc, base, timestamp, synced, epoch, Content(checksum, kind))


def decode_frame(buffer: pa.Buffer, *, check: bool, header: FrameHeader | None = None) -> Frame:
    """Read a whole frame that starts at the buffer's beginning; ``check`` verifies the body's checksum too, ``header``
    is its header where that was read already.

    Raises:
        ChecksumError: header, or with ``check`` body, are not what was written.
        CorruptionError: the frame is cut off or contradicts itself.
    """
    header = header or decode_header(buffer)
    if buffer.size < header.length:
        raise CorruptionError("a batch frame is cut off", base_offset=header.base_offset)
    body_buffer = buffer.slice(HEADER_BYTES, header.length - HEADER_BYTES)
    if check and crc32c.crc32c(body_buffer) != header.crc:
        raise ChecksumError("the body of a batch frame does not match its checksum", base_offset=header.base_offset)
    body = decode_body_unchecked(body_buffer, header.crc)
    return Frame(
        header.base_offset, header.timestamp_us, header.synced_end, header.epoch, body, header.length, header.content
    )


def decode_body_unchecked(buffer: pa.Buffer, crc: int) -> FrameBody:
    """`decode_body` for bytes whose checksum is known and was verified when they were written."""
    fields = _BODY.unpack_from(buffer)
    schema_id, flags, tablets, writer_id, sequence, previous, acked, rows, statistics, message, epoch = fields
    used = BODY_HEADER_BYTES + (9 * rows if flags & CHANGES else 0) + statistics
    if _align(used) + _align(message) != buffer.size:
        raise CorruptionError("a batch frame's lengths contradict its size", rows=rows, size=buffer.size)
    stamp = WriterStamp(writer_id, sequence, previous, acked, epoch, tablets)
    return FrameBody(buffer, schema_id, flags, stamp, rows, statistics, message, crc)
