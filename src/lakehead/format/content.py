"""A checksum of what a batch says, whatever memory it lies in: how a repeat is told from another batch.

Equal are batches of the same columns with the same rows in the same order, each value bit for bit: 0.0 is not -0.0. It
does not matter how Arrow holds them: slices, padding, what lies under nulls, missing validity bitmaps. Logs and
checkpoints keep these checksums, so nothing here may change the value for any batch; the tests hold golden ones.

::

    array     = the number of nulls as i64; if there are any, the validity as bits; then the values that are not null:
    numbers, dates, times, decimals, fixed binary    their bytes, little-endian
    booleans                                         bits, least significant first
    strings, binary (large or not)                   the lengths as i64, then the bytes
    lists, maps                                      the lengths as i64, then the array of all items
    structs, items of maps                           the array of each field in turn

A batch is the names of its columns, each ended by a zero byte, its row count as i64, and each column's array.
"""

from __future__ import annotations

import struct

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.format.arrays import to_bools


def content_checksum(batch: pa.RecordBatch, crc: int = 0) -> int:
    """crc32c of a batch's content, going on from ``crc``."""
    names = b"".join(name.encode() + b"\0" for name in batch.schema.names)
    crc = crc32c.crc32c(names + struct.pack("<q", batch.num_rows), crc)
    for column in batch.columns:
        crc = _array(column, crc)
    return crc


def _array(array: pa.Array, crc: int) -> int:
    crc = crc32c.crc32c(struct.pack("<q", array.null_count), crc)
    if array.null_count:
        crc = _bits(array.is_valid(), crc)
        array = array.drop_null()
    t = array.type
    if len(array) == 0:
        return crc
    if pa.types.is_boolean(t):
        return _bits(array, crc)
    if pa.types.is_string(t) or pa.types.is_binary(t) or pa.types.is_large_string(t) or pa.types.is_large_binary(t):
        return _texts(array, crc)
    if pa.types.is_struct(t):
        for i in range(t.num_fields):
            crc = _array(array.field(i), crc)
        return crc
    if pa.types.is_nested(t):
        return _lists(array, crc)
    width = t.bit_width // 8
    return crc32c.crc32c(array.buffers()[1].slice(array.offset * width, len(array) * width), crc)


def _bits(array: pa.BooleanArray, crc: int) -> int:
    return crc32c.crc32c(np.packbits(to_bools(array), bitorder="little").data, crc)


def _texts(array: pa.Array, crc: int) -> int:
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    crc = crc32c.crc32c(np.diff(offsets).data, crc)
    data = array.buffers()[2]
    first, end = int(offsets[0]), int(offsets[-1])
    return crc32c.crc32c(data.slice(first, end - first), crc) if end > first else crc


def _lists(array: pa.Array, crc: int) -> int:
    if pa.types.is_map(array.type):
        t = array.type
        items = pa.struct([t.key_field, t.item_field])
        array = array.cast(pa.list_(pa.field("entries", items, False)))
    lengths = pc.list_value_length(array).cast(pa.int64())
    return _array(array.flatten(), crc32c.crc32c(np.asarray(lengths).data, crc))
