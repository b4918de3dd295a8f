"""Numbers between numpy and Arrow, uncopied where both hold them alike.

`pa.array` and `to_numpy` load pandas first, where it is installed: most of what a process takes until its first row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_FROM_ZERO = np.arange(1 << 13)
Bools = npt.NDArray[np.bool_]


def to_arrow(values: npt.NDArray[Any], t: pa.DataType | None = None, valid: Bools | None = None) -> pa.Array:
    """These values as an array.

    Args:
        values: one dimension; what it holds may not change as long as the array lives.
        t: of values as wide as these; None for numpy's own.
        valid: false where there is none; None: there are all.
    """
    if t is None:
        t = pa.from_numpy_dtype(values.dtype)
    bitmap = None if valid is None or valid.all() else _packed(valid)
    data = _packed(values) if pa.types.is_boolean(t) else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(t, len(values), [bitmap, data])


def _packed(bits: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits.view(np.uint8), bitorder="little"))


def to_bools(values: pa.BooleanArray) -> Bools:
    """What these are, a byte each; false for nulls."""
    validity, stored = values.buffers()
    bits = np.frombuffer(stored, np.uint8)
    if values.null_count:
        bits = bits & np.frombuffer(validity, np.uint8)[: len(bits)]
    return np.unpackbits(bits, bitorder="little")[values.offset :][: len(values)].view(np.bool_)


def to_numbers(values: pa.Array) -> npt.NDArray[Any]:
    """The integers of an array; read-only.

    Raises:
        ValueError: it has nulls.
    """
    if values.null_count:
        raise ValueError(f"{values.null_count} of {len(values)} numbers are not there")
    t = values.type
    dtype = np.dtype(f"<{'i' if pa.types.is_signed_integer(t) else 'u'}{t.bit_width // 8}")
    return np.frombuffer(values.buffers()[1], dtype, len(values), values.offset * dtype.itemsize)


def _pooled(rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Room for numbers of which many batches are handed out: memory of Arrow's pool, which keeps what was given back.
    That of numpy is the system's anew, a page at a time, which takes several times as long as to fill it."""
    held = np.dtype(dtype)
    return np.frombuffer(pa.allocate_buffer(rows * held.itemsize), held)


def ascending(start: int, end: int) -> npt.NDArray[np.int64]:
    """All int64 from one up to another, in memory as of `_pooled`."""
    out = _pooled(end - start, np.int64)
    for at in range(0, len(out), len(_FROM_ZERO)):
        part = out[at : at + len(_FROM_ZERO)]
        np.add(_FROM_ZERO[: len(part)], start + at, out=part)
    return out


def constant(value: int, rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """One number, so many times, in memory as of `_pooled`."""
    out = _pooled(rows, dtype)
    out.fill(value)
    return out


def places_of(values: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Where each number below ``size`` stands among the values, without those that are not among them: what sorts
    values that differ."""
    at = np.full(size, -1, np.int64)
    at[values] = np.arange(len(values))
    return at[at >= 0]
