"""Primary keys as the index needs them: 64-bit values, with the encoded bytes where 64 bits do not tell keys apart.

A single key column of at most eight fixed bytes is an exact 64-bit key. Every other key is encoded as bytes (fixed
columns as they lie in memory, variable ones with a 4-byte length before them), which is unique per key, and hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.kv import kernels

_NO_BYTES = np.zeros(0, np.uint8)
_NO_OFFSETS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class KeyBatch:
    """Keys of n rows: ``keys`` uint64[n] as of `lakehead.kv.kernels`; unless ``exact``, encoded bytes
    ``data[offsets[i]:offsets[i + 1]]``."""

    keys: npt.NDArray[np.uint64]
    exact: bool
    offsets: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]

    def slice(self, start: int, end: int) -> KeyBatch:
        """Some of them, uncopied."""
        offsets = self.offsets if self.exact else self.offsets[start : end + 1]
        return KeyBatch(self.keys[start:end], self.exact, offsets, self.data)


def _exact(numbers: npt.NDArray[np.int64], seed: np.uint64) -> KeyBatch:
    keys = np.empty(len(numbers), np.uint64)
    kernels.mix_keys(numbers, seed, keys)
    return KeyBatch(keys, True, _NO_OFFSETS, _NO_BYTES)


def _hashed(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], seed: np.uint64) -> KeyBatch:
    keys = np.empty(len(offsets) - 1, np.uint64)
    kernels.hash_keys(offsets, data, seed, keys)
    return KeyBatch(keys, False, offsets, data)


def is_exact(types: Sequence[pa.DataType]) -> bool:
    """True when 64 bits tell all keys of these column types apart."""
    return len(types) == 1 and _fixed_width(types[0]) in (1, 2, 4, 8)


def _fixed_width(t: pa.DataType) -> int | None:
    if pa.types.is_fixed_size_binary(t):
        return int(t.byte_width)
    if pa.types.is_decimal(t):
        return 16
    return int(t.bit_width) // 8 if pa.types.is_primitive(t) else None


def fixed_bytes(array: pa.Array, width: int) -> npt.NDArray[np.uint8]:
    """Values of a fixed-width array as a byte matrix [rows, width], shared with the array."""
    data = array.buffers()[1]
    if len(array) == 0 or data is None:
        return np.zeros((len(array), width), np.uint8)
    return np.frombuffer(data, np.uint8)[array.offset * width :][: len(array) * width].reshape(-1, width)


def value_bytes(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets int64[n + 1] and bytes of a string or binary array, small or large."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, ends, data = array.buffers()
    if len(array) == 0:
        return np.zeros(1, np.int64), _NO_BYTES
    offsets = np.frombuffer(ends, np.int64 if large else np.int32)[array.offset : array.offset + len(array) + 1]
    return offsets.astype(np.int64), np.frombuffer(data, np.uint8) if data is not None else _NO_BYTES


def encode_key(types: Sequence[pa.DataType], values: Sequence[int | str | bytes], seed: np.uint64) -> KeyBatch:
    """`encode_keys` of one row, whose key columns of these types hold these integers, texts and binaries."""
    widths = [_fixed_width(t) for t in types]
    if len(widths) == 1 and widths[0] is not None:
        return _exact(np.array(values, np.int64), seed)
    data = bytearray()
    for width, value in zip(widths, values, strict=True):
        if isinstance(value, int):
            data += value.to_bytes(width or 8, "little", signed=True)
        else:
            text = value.encode() if isinstance(value, str) else value
            data += len(text).to_bytes(4, "little") + text
    return _hashed(np.array([0, len(data)]), np.frombuffer(data, np.uint8), seed)


def encode_keys(columns: Sequence[pa.Array], seed: np.uint64) -> KeyBatch:
    """Keys of rows given by their key columns, which hold no nulls, in primary-key order; ``seed`` is what
    they are mixed with: only keys of one seed can be compared."""
    n = len(columns[0])
    if is_exact([c.type for c in columns]):
        width = _fixed_width(columns[0].type)
        raw = fixed_bytes(columns[0], width or 8)
        keys = np.ascontiguousarray(raw).view(f"<i{width}").reshape(-1).astype(np.int64, copy=False)
        return _exact(keys, seed)
    lengths = np.zeros(n, np.int64)
    for column in columns:
        width = _fixed_width(column.type)
        lengths += width if width is not None else 4 + np.diff(value_bytes(column)[0])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    data = np.empty(int(offsets[-1]), np.uint8)
    cursor = offsets[:-1].copy()
    for column in columns:
        width = _fixed_width(column.type)
        if width is not None:
            kernels.scatter_fixed(data, cursor, np.ascontiguousarray(fixed_bytes(column, width)))
        else:
            kernels.scatter_bytes(data, cursor, *value_bytes(column))
    return _hashed(offsets, data, seed)
