"""Which bucket a row belongs to: the one implementation for client, server, tiering and Spark.

A single bucket-key column is hashed exactly as Iceberg's ``bucket[N]`` transform does (murmur3_x86_32, seed 0, over the
single-value bytes of the specification's Appendix B), so that tablets and lake partitions are the same sets of rows and
no shuffle is ever needed between them. Stored data depends on every value computed here: nothing in this module may
ever change, and the tests hold golden values for it.

    type of the column                         bytes that are hashed
    int8 int16 int32 int64                     8, little-endian two's complement
    date32, date64                             8, days since 1970-01-01 as a long
    time32, time64                             8, microseconds since midnight as a long
    timestamp[s, ms, us], any zone or none     8, microseconds since 1970-01-01T00:00:00 (UTC) as a long
    decimal128(p, s)                           1 to 16, unscaled value, big-endian two's complement of minimal length
    string, large_string                       the UTF-8 bytes
    binary, large_binary, fixed_size_binary    the bytes

Several columns (ours; Iceberg's transform takes one column): the row's hash is murmur3_x86_32, seed 0, of the
concatenation of the columns' hashes in bucket-key order, each as 4 bytes little-endian. The classic ``31*h + hash_i``
was rejected: rows whose two columns are equal would get ``32*h``, whose low five bits are zero, and so all fall into
bucket 0 of any table with 2, 4, 8, 16 or 32 buckets.

    bucket = (hash & 0x7fffffff) % buckets
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.errors import InvalidSchemaError, NullKeyError, SchemaMismatchError
from lakehead.format.arrays import to_numbers

Hashes: TypeAlias = npt.NDArray[np.uint32]

_C1, _C2, _FIVE, _ADD = (np.uint32(c) for c in (0xCC9E2D51, 0x1B873593, 5, 0xE6546B64))
_F1, _F2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_MASK = 0xFFFFFFFF
_ROWS_PER_PASS = 1 << 14
"""Rows hashed at a time, so that the temporaries of one pass stay in the CPU's cache."""
_SCALAR_ROWS_MAX = 32
"""With so few rows still holding a block, plain integers are faster than numpy calls on tiny arrays."""


def can_hash(t: pa.DataType) -> bool:
    """True for the types that a bucket key may have."""
    return (
        pa.types.is_signed_integer(t)
        or pa.types.is_date(t)
        or (pa.types.is_time(t) and t.unit != "ns")
        or (pa.types.is_timestamp(t) and t.unit != "ns")
        or pa.types.is_decimal128(t)
        or _is_bytes(t)
    )


def hash_column(array: pa.Array | pa.ChunkedArray) -> Hashes:
    """Iceberg's 32-bit bucket hash of each value, in order.

    Cast the column to the table's own type first: the hash of a decimal depends on its scale.

    Raises:
        NullKeyError: the column holds a null.
        InvalidSchemaError: `can_hash` is false for the column's type.
        SchemaMismatchError: a timestamp in s or ms is out of the range of microseconds.
    """
    t = array.type
    if not can_hash(t):
        raise InvalidSchemaError(f"a column of type {t} cannot be a bucket key", type=str(t))
    if array.null_count:
        raise NullKeyError("a bucket-key column holds a null: give every row a value")
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    parts = [
        _hash_chunk(chunk.slice(at, _ROWS_PER_PASS)) for chunk in chunks for at in range(0, len(chunk), _ROWS_PER_PASS)
    ]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def bucket_ids(columns: Sequence[pa.Array | pa.ChunkedArray], buckets: int) -> npt.NDArray[np.int32]:
    """The bucket, in ``[0, buckets)``, of each row of the bucket-key columns, which come in bucket-key order.

    Raises:
        NullKeyError, InvalidSchemaError, SchemaMismatchError: as `hash_column`.
    """
    assert columns and buckets >= 1, (len(columns), buckets)
    assert len({len(c) for c in columns}) == 1, [len(c) for c in columns]
    hashes = _combine([hash_column(c) for c in columns])
    return ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(buckets)).astype(np.int32)


def bucket_of(values: Sequence[int | str | bytes], buckets: int) -> int:
    """`bucket_ids` of one row, whose bucket-key columns hold these integers, texts and binaries."""
    hashes = [
        _murmur3(
            value.to_bytes(8, "little", signed=True)
            if isinstance(value, int)
            else value.encode()
            if isinstance(value, str)
            else value
        )
        for value in values
    ]
    found = hashes[0] if len(hashes) == 1 else _murmur3(struct.pack(f"<{len(hashes)}I", *hashes))
    return (found & 0x7FFFFFFF) % buckets


def unkeyed_bucket(writer_id: bytes, sequence: int, buckets: int) -> int:
    """The bucket of a writer's batch ``sequence`` on a table without a bucket key: round robin, a start per writer.

    A pure function, so that a batch sent again goes where it went before:
    ``((murmur3(writer_id) & 0x7fffffff) + sequence) % buckets``.
    """
    assert sequence >= 0 and buckets >= 1, (sequence, buckets)
    return ((_murmur3(writer_id) & 0x7FFFFFFF) + sequence) % buckets


def _is_bytes(t: pa.DataType) -> bool:
    return (
        pa.types.is_string(t)
        or pa.types.is_large_string(t)
        or pa.types.is_binary(t)
        or pa.types.is_large_binary(t)
        or pa.types.is_fixed_size_binary(t)
    )


def _combine(hashes: list[Hashes]) -> Hashes:
    if len(hashes) == 1:
        return hashes[0]
    state = np.zeros(len(hashes[0]), np.uint32)
    for column in hashes:
        state = _mix(state, column)
    return _finish(state, np.uint32(4 * len(hashes)))


def _hash_chunk(array: pa.Array) -> Hashes:
    if pa.types.is_decimal128(array.type):
        return _hash_bytes(*_decimal_bytes(array))
    if _is_bytes(array.type):
        return _hash_bytes(*_value_bytes(array))
    return _hash_longs(_longs(array))


def _longs(array: pa.Array) -> npt.NDArray[np.int64]:
    """The value that Iceberg stores for an integer, date, time or timestamp, as int64."""
    t = array.type
    try:
        if pa.types.is_date64(t):
            array = array.cast(pa.date32())
        elif pa.types.is_time(t) and t.unit != "us":
            array = array.cast(pa.time64("us"))
        elif pa.types.is_timestamp(t) and t.unit != "us":
            array = array.cast(pa.timestamp("us", t.tz))
    except pa.ArrowInvalid as e:
        raise SchemaMismatchError(f"a bucket-key value does not fit the lake's type: {e}", type=str(t)) from e
    if not pa.types.is_integer(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    values: npt.NDArray[np.int64] = to_numbers(array).astype(np.int64, copy=False)
    return values


def _value_bytes(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes of all values and the ``len + 1`` offsets of the values in them; the first offset is 0."""
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        offsets = np.arange(len(array) + 1, dtype=np.int64) * width
        start = array.offset * width
        return _bytes_of(array.buffers()[1], start, start + int(offsets[-1])), offsets
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, data = array.buffers()
    stored = np.frombuffer(offset_buffer, np.int64 if large else np.int32)
    offsets = stored[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return _bytes_of(data, int(offsets[0]), int(offsets[-1])), offsets - offsets[0]


def _bytes_of(buffer: pa.Buffer | None, start: int, end: int) -> npt.NDArray[np.uint8]:
    # numpy refuses a buffer without bytes, which is what a column of empty strings has.
    return np.frombuffer(buffer, np.uint8)[start:end] if buffer and end > start else np.zeros(0, np.uint8)


def _decimal_bytes(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """As `_value_bytes`, of the unscaled values in minimal big-endian two's complement."""
    stored = _bytes_of(array.buffers()[1], 16 * array.offset, 16 * (array.offset + len(array)))
    big_endian = stored.reshape(-1, 16)[:, ::-1]
    negative = big_endian[:, 0] >> 7
    differs = big_endian != (negative * np.uint8(255))[:, None]
    # Leading bytes that only repeat the sign may go, all but the last byte of the value.
    leading = np.where(differs.any(axis=1), differs.argmax(axis=1), 15)
    # One comes back when the first byte that stays would show the other sign: 128 is 00 80, not 80.
    leading -= (big_endian[np.arange(len(leading)), leading] >> 7) != negative
    offsets = np.zeros(len(leading) + 1, np.int64)
    np.cumsum(16 - leading, out=offsets[1:])
    return big_endian[np.arange(16)[None, :] >= leading[:, None]], offsets


def _hash_longs(values: npt.NDArray[np.int64]) -> Hashes:
    bits = values.view(np.uint64)
    state = _mix(np.zeros(len(bits), np.uint32), bits.astype(np.uint32))
    state = _mix(state, (bits >> np.uint64(32)).astype(np.uint32))
    return _finish(state, np.uint32(8))


def _hash_bytes(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Hashes:
    """murmur3 of each value, a block of four bytes of all rows at a time."""
    lengths, starts = np.diff(offsets), offsets[:-1]
    padded = np.concatenate([data, np.zeros(4, np.uint8)])
    # A four-byte word at every byte position, without a copy; every x86 and ARM core reads these unaligned.
    words: Hashes = np.ndarray((len(data) + 1,), "<u4", padded, strides=(1,))
    blocks = lengths >> 2
    state = np.zeros(len(lengths), np.uint32)
    common = int(blocks.min()) if len(blocks) > _SCALAR_ROWS_MAX else 0
    for b in range(common):
        state = _mix(state, words[starts + 4 * b])
    for b, rows in _rows_with_block(blocks, common):
        if len(rows) <= _SCALAR_ROWS_MAX:
            for row in rows.tolist():
                state[row] = _mix_rest(int(state[row]), padded, int(starts[row]) + 4 * b, int(blocks[row]) - b)
            break
        state[rows] = _mix(state[rows], words[starts[rows] + 4 * b])
    rest = (lengths & 3).astype(np.uint32)
    tail = words[starts + 4 * blocks] & ((np.uint32(1) << (np.uint32(8) * rest)) - np.uint32(1))
    return _finish(state ^ _scramble(tail), lengths.astype(np.uint32))


def _rows_with_block(blocks: npt.NDArray[np.int64], first: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Block number and the rows that have that block, from ``first`` until no row has one."""
    rows = np.flatnonzero(blocks > first)
    while len(rows):
        yield first, rows
        first += 1
        rows = rows[blocks[rows] > first]


def _scramble(k: Hashes) -> Hashes:
    k = k * _C1
    return ((k << np.uint32(15)) | (k >> np.uint32(17))) * _C2


def _mix(state: Hashes, block: Hashes) -> Hashes:
    """The state after one more block of four bytes."""
    h = state ^ _scramble(block)
    return ((h << np.uint32(13)) | (h >> np.uint32(19))) * _FIVE + _ADD


def _finish(state: Hashes, length: np.uint32 | Hashes) -> Hashes:
    h = state ^ length
    h = (h ^ (h >> np.uint32(16))) * _F1
    h = (h ^ (h >> np.uint32(13))) * _F2
    return h ^ (h >> np.uint32(16))


def _mix_rest(state: int, padded: npt.NDArray[np.uint8], start: int, blocks: int) -> int:
    """`_mix` over the consecutive blocks of one long value."""
    return _mix_all(state, np.frombuffer(padded[start : start + 4 * blocks].tobytes(), "<u4").tolist())


def _mix_all(state: int, blocks: Sequence[int]) -> int:
    for k in blocks:
        state ^= _scramble_one(k)
        state = ((state << 13 | state >> 19) & _MASK) * 5 + 0xE6546B64 & _MASK
    return state


def _scramble_one(k: int) -> int:
    k = k * 0xCC9E2D51 & _MASK
    return (k << 15 | k >> 17) * 0x1B873593 & _MASK


def _murmur3(value: bytes) -> int:
    """murmur3 of one value, in plain integers."""
    whole = len(value) & ~3
    h = _mix_all(0, struct.unpack(f"<{whole >> 2}I", value[:whole]))
    h ^= _scramble_one(int.from_bytes(value[whole:], "little")) ^ len(value)
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return h ^ h >> 16
