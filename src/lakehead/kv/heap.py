"""Columns of the live rows, addressed by slot.

Fixed-width columns are plain numpy arrays, and so are strings and binaries as long as all are short. Longer ones and
nested types are Arrow chunks addressed by a running row number that each slot refers to; chunks are merged as they grow
and rewritten when most of their rows are dead. Which of these a column is, is decided here alone.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.format.arrays import to_arrow, to_bools
from lakehead.format.joins import largest, range_bytes
from lakehead.kv import kernels
from lakehead.kv.growing import GrowingArray
from lakehead.kv.keys import fixed_bytes, value_bytes

Slots = npt.NDArray[np.int64]
_MERGE_ROWS_MAX = 1 << 20
_MERGE_BYTES_MAX = 256 << 20
_GATHER_ROWS = 1 << 16


@dataclass(frozen=True)
class Sources:
    """Where values come from: those at places ``old_at`` from the slots ``old``, those at ``new_at`` from the rows
    ``new`` of a batch; ``image`` says both, a slot or ``~row`` a place."""

    image: Slots
    old_at: Slots
    old: Slots
    new_at: Slots
    new: Slots

    @classmethod
    def of(cls, image: Slots) -> Sources:
        """Of slots, and ``~row`` for rows."""
        old_at, new_at = np.flatnonzero(image >= 0), np.flatnonzero(image < 0)
        return cls(image, old_at, image[old_at], new_at, ~image[new_at])

    def merged(self, old: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Both in their places."""
        out = np.empty(len(old) + len(new), old.dtype)
        out[self.old_at], out[self.new_at] = old, new
        return out


class HeapColumn(Protocol):
    """One column of the heap."""

    def resize(self, slots: int) -> None:
        """Make room for this many slots; existing values stay."""
        ...

    @property
    def keeps_given(self) -> bool:
        """Whether `scatter` keeps what it is given, and all that this is part of, and does not copy it."""
        ...

    def scatter(self, slots: Slots, values: pa.Array) -> None:
        """Set ``values[i]`` at ``slots[i]``; slots are unique."""
        ...

    def clear(self, slots: Slots) -> None:
        """Forget the values at these slots."""
        ...

    def gather(self, slots: Slots, *, none_absent: bool = False) -> pa.Array:
        """The values at these slots, in this order; slot -1 reads as null, and ``none_absent`` says that there is no
        such. The caller sees to it that they are not too many bytes for one array."""
        ...

    def merge(self, sources: Sources, given: pa.Array) -> pa.Array:
        """Values of the heap and of ``given`` in their places; bounds as in `gather`."""
        ...

    def value(self, slot: int) -> Any:
        """The value at this slot, plain (`lakehead.format.plain`); for types that have plain values."""
        ...

    @property
    def bytes_max(self) -> int:
        """No value that it holds takes more bytes."""
        ...

    def sizes(self, slots: Slots) -> Slots:
        """About how many bytes the value at each of these slots takes."""
        ...


def heap_column(t: pa.DataType) -> HeapColumn:
    """The column that stores values of this type."""
    if pa.types.is_boolean(t):
        return FixedColumn(t, 1)
    if pa.types.is_fixed_size_binary(t):
        return FixedColumn(t, t.byte_width)
    if pa.types.is_primitive(t) or pa.types.is_decimal(t):
        return FixedColumn(t, t.bit_width // 8)
    return ShortColumn(t) if _is_variable(t) else ChunkedColumn(t)


def _is_variable(t: pa.DataType) -> bool:
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_one(t) for is_one in kinds)


def _valid(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    if values.null_count == 0:
        return None
    return to_bools(values.is_valid())


def _plain_dtype(t: pa.DataType, width: int) -> np.dtype[Any] | None:
    if pa.types.is_boolean(t):
        return np.dtype(np.bool_)
    if pa.types.is_floating(t):
        return np.dtype(f"<f{width}")
    return np.dtype(f"<i{width}") if pa.types.is_integer(t) or pa.types.is_temporal(t) else None


class FixedColumn:
    """Values of 1, 2, 4, 8, 16 or any other fixed number of bytes, and a byte that says null once a null was stored."""

    def __init__(self, t: pa.DataType, width: int) -> None:
        self._type = t
        self._width = width
        self._dtype = np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}.get(width, f"V{width}"))
        self._values = GrowingArray(self._dtype)
        self._plain_dtype = _plain_dtype(t, width) or self._dtype
        self._plain = self._values.array.view(self._plain_dtype)
        self._is_null: GrowingArray | None = None

    keeps_given = False

    def resize(self, slots: int) -> None:
        del self._plain
        try:
            self._values.grow(slots)
        finally:
            self._plain = self._values.array.view(self._plain_dtype)
        if self._is_null is not None:
            self._is_null.grow(slots)

    def _numpy(self, values: pa.Array) -> npt.NDArray[np.generic]:
        if pa.types.is_boolean(self._type):
            return to_bools(values).view(np.uint8)
        raw = fixed_bytes(values, self._width)
        return np.ascontiguousarray(raw).view(self._dtype).reshape(-1)

    def scatter(self, slots: Slots, values: pa.Array) -> None:
        valid = _valid(values)
        if valid is not None and self._is_null is None:
            self._is_null = GrowingArray(np.bool_)
            self._is_null.grow(len(self._values))
        self._values.array[slots] = self._numpy(values)
        if self._is_null is not None:
            self._is_null.array[slots] = False if valid is None else ~valid

    def clear(self, slots: Slots) -> None:
        return

    def value(self, slot: int) -> Any:
        if self._is_null is not None and self._is_null.array[slot]:
            return None
        return self._plain.item(slot)

    @property
    def bytes_max(self) -> int:
        return self._width + 1

    def sizes(self, slots: Slots) -> Slots:
        return np.full(len(slots), self.bytes_max, np.int64)

    def gather(self, slots: Slots, *, none_absent: bool = False) -> pa.Array:
        held = self._values.array
        if len(slots) == 1 and slots[0] >= 0 and self._is_null is None and not pa.types.is_boolean(self._type):
            at = int(slots[0])
            return pa.Array.from_buffers(self._type, 1, [None, pa.py_buffer(held[at : at + 1].tobytes())])
        valid = None if self._is_null is None else ~self._is_null.array.take(slots)
        if not none_absent:
            there = slots >= 0
            valid = there if valid is None else valid & there
        if len(held) == 0:
            return pa.nulls(len(slots), self._type)
        return to_arrow(held.take(slots), self._type, valid)

    def merge(self, sources: Sources, given: pa.Array) -> pa.Array:
        held, values = self._values.array, self._numpy(given)
        if self._dtype.kind == "V":  # which kernels do not take
            data = sources.merged(held.take(sources.old), values[sources.new])
        else:
            data = np.empty(len(sources.image), self._dtype)
            kernels.merge(sources.image, held, values, data)
        new = _valid(given)
        if self._is_null is None and new is None:
            return to_arrow(data, self._type)
        old = np.ones(len(sources.old), np.bool_) if self._is_null is None else ~self._is_null.array.take(sources.old)
        new = np.ones(len(sources.new), np.bool_) if new is None else new[sources.new]
        return to_arrow(data, self._type, sources.merged(old, new))


_SHORT_MAX = 40
"""Bytes of a value that is short: a UUID's text is."""
_NO_OFFSETS = np.zeros(0, np.int64)
_NO_BYTES = np.zeros(0, np.uint8)
_ALL_VALID = np.zeros(0, np.bool_)


class ShortColumn:
    """Strings or binaries in a matrix of words of eight bytes that is as wide as the longest so far. Its first value
    that is not short makes it a `ChunkedColumn` for good.

    Nothing dies in it, so that rows which are updated again and again leave nothing behind.
    """

    def __init__(self, t: pa.DataType) -> None:
        self._type = t
        self._large = pa.types.is_large_string(t) or pa.types.is_large_binary(t)
        self._words = GrowingArray(np.uint64, 1)
        self._lengths = GrowingArray(np.uint8)  # one more than the bytes, 0 for null
        self._chunked: ChunkedColumn | None = None

    @property
    def keeps_given(self) -> bool:
        return self._chunked is not None

    def resize(self, slots: int) -> None:
        if self._chunked is not None:
            self._chunked.resize(slots)
            return
        self._words.grow(slots)
        self._lengths.grow(slots)

    @property
    def _width(self) -> int:
        return int(self._words.array.shape[1])

    def _widen(self, width: int) -> None:
        wider = GrowingArray(np.uint64, width)
        wider.grow(len(self._words))
        wider.array[:, : self._width] = self._words.array
        self._words = wider

    def scatter(self, slots: Slots, values: pa.Array) -> None:
        if len(slots) == 0:
            return
        if self._chunked is None:
            offsets, data = value_bytes(values)
            longest = int(np.diff(offsets).max())
            if longest <= _SHORT_MAX:
                if longest > 8 * self._width:
                    self._widen(-(-longest // 8))
                valid = _valid(values)
                given = _ALL_VALID if valid is None else valid
                kernels.scatter_short(self._words.array, self._lengths.array, slots, offsets, data, given)
                return
            self._chunked = self._as_chunks()
        self._chunked.scatter(slots, values)

    def _as_chunks(self) -> ChunkedColumn:
        column = ChunkedColumn(self._type)
        column.resize(len(self._lengths))
        used = np.flatnonzero(self._lengths.array)
        for at in range(0, len(used), _MERGE_ROWS_MAX):
            some = used[at : at + _MERGE_ROWS_MAX]
            column.scatter(some, self.gather(some))
        self._words, self._lengths = GrowingArray(np.uint64, 1), GrowingArray(np.uint8)
        return column

    def clear(self, slots: Slots) -> None:
        if self._chunked is not None:
            self._chunked.clear(slots)
        else:
            self._lengths.array[slots] = 0

    def value(self, slot: int) -> Any:
        if self._chunked is not None:
            return self._chunked.value(slot)
        n = int(self._lengths.array[slot]) - 1
        if n < 0:
            return None
        value = self._words.array[slot].tobytes()[:n]
        return value if pa.types.is_binary(self._type) or pa.types.is_large_binary(self._type) else value.decode()

    @property
    def bytes_max(self) -> int:
        return 8 * self._width + 9 if self._chunked is None else self._chunked.bytes_max

    def sizes(self, slots: Slots) -> Slots:
        if self._chunked is not None:
            return self._chunked.sizes(slots)
        lengths = np.where(slots < 0, 0, self._lengths.array.take(slots)).astype(np.int64)
        return np.maximum(lengths - 1, 0) + (9 if self._large else 5)

    def gather(self, slots: Slots, *, none_absent: bool = False) -> pa.Array:
        if self._chunked is not None:
            return self._chunked.gather(slots, none_absent=none_absent)
        return self._made(slots, _NO_OFFSETS, _NO_BYTES, _ALL_VALID)

    def merge(self, sources: Sources, given: pa.Array) -> pa.Array:
        if self._chunked is not None:
            return self._chunked.merge(sources, given)
        valid = _valid(given)
        return self._made(sources.image, *value_bytes(given), _ALL_VALID if valid is None else valid)

    def _made(
        self, image: Slots, offsets: Slots, data: npt.NDArray[np.uint8], valid: npt.NDArray[np.bool_]
    ) -> pa.Array:
        n = len(image)
        ends = np.empty(n + 1, np.int64 if self._large else np.int32)
        present = np.empty(n, np.bool_)
        nulls = kernels.short_offsets(self._lengths.array, image, offsets, valid, ends, present)
        size = int(ends[-1])
        out = np.empty(size + 8 * self._width, np.uint8)
        kernels.short_bytes(self._words.array, image, offsets, data, ends, out)
        bitmap = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
        return pa.Array.from_buffers(self._type, n, [bitmap, pa.py_buffer(ends), pa.py_buffer(out[:size])], nulls)


class ChunkedColumn:
    """Values of any Arrow type in chunks of consecutive row numbers."""

    def __init__(self, t: pa.DataType) -> None:
        self._type = t
        self._places = GrowingArray(np.int64)  # one more than the row, 0 for none
        self._chunks: list[pa.Array] = []
        self._bases: list[int] = []
        self._dead: list[int] = []
        self._next = 0
        self.bytes_max = 1

    keeps_given = True

    def resize(self, slots: int) -> None:
        self._places.grow(slots)

    def _rows(self, slots: Slots) -> Slots:
        """The row of each slot, -1 where there is none."""
        return np.where(slots < 0, -1, self._places.array.take(slots) - 1)

    def scatter(self, slots: Slots, values: pa.Array) -> None:
        if len(slots) == 0:
            return
        self.clear(slots)
        self._places.array[slots] = self._append(values) + 1

    def clear(self, slots: Slots) -> None:
        rows = self._rows(slots)
        self._places.array[slots] = 0  # first: what slots refer to outlives a rewrite
        self._bury(rows)

    def sizes(self, slots: Slots) -> Slots:
        rows = self._rows(slots)
        chunk = np.searchsorted(self._bases, rows, "right") - 1
        out = np.ones(len(slots), np.int64)
        for c in np.unique(chunk[rows >= 0]):
            at = np.flatnonzero(chunk == c)
            first = rows[at] - self._bases[c]
            out[at] = range_bytes(self._chunks[c], first, first + 1)
        return out

    def _append(self, values: pa.Array) -> Slots:
        self.bytes_max = max(self.bytes_max, largest(values))
        base = self._next
        self._chunks.append(values)
        self._bases.append(base)
        self._dead.append(0)
        self._next += len(values)
        while len(self._chunks) > 1 and self._mergeable():
            self._merge_last_two()
        return np.arange(base, self._next)

    def _mergeable(self) -> bool:
        a, b = self._chunks[-2:]
        adjacent = self._bases[-2] + len(a) == self._bases[-1]
        small = len(a) + len(b) <= _MERGE_ROWS_MAX and len(a) <= 4 * len(b)
        return adjacent and small and a.nbytes + b.nbytes <= _MERGE_BYTES_MAX

    def _merge_last_two(self) -> None:
        self._chunks[-2:] = [pa.concat_arrays(self._chunks[-2:])]
        self._dead[-2:] = [sum(self._dead[-2:])]
        self._bases.pop()

    def _bury(self, rows: Slots) -> None:
        """Count rows that no slot refers to any more, and rewrite chunks that are mostly dead."""
        rows = rows[rows >= 0]
        if len(rows) == 0:
            return
        if len(rows) == 1:
            self._dead[bisect.bisect_right(self._bases, int(rows[0])) - 1] += 1
        else:
            for c, n in enumerate(np.bincount(np.searchsorted(self._bases, rows, "right") - 1).tolist()):
                self._dead[c] += n
        worn = [i for i, c in enumerate(self._chunks) if self._dead[i] * 2 > len(c) > 2 * _GATHER_ROWS]
        for i in reversed(worn):
            self._rewrite(i)

    def _rewrite(self, i: int) -> None:
        chunk, base = self._chunks.pop(i), self._bases.pop(i)
        self._dead.pop(i)
        places = self._places.array
        slots = np.flatnonzero((places > base) & (places <= base + len(chunk)))
        if len(slots):
            places[slots] = self._append(chunk.take(to_arrow(places[slots] - 1 - base))) + 1

    def gather(self, slots: Slots, *, none_absent: bool = False) -> pa.Array:
        n = len(slots)
        if n == 0 or not self._chunks:
            return pa.nulls(n, self._type)
        if n == 1:
            return self._gather_one(int(slots[0]))
        rows = self._rows(slots)
        missing = rows < 0
        if missing.all():
            return pa.nulls(n, self._type)
        if len(self._chunks) == 1:
            return self._chunks[0].take(to_arrow(np.where(missing, 0, rows - self._bases[0]), valid=~missing))
        chunk, used = self._chunks_of(rows)
        if len(used) == 1:
            c = int(used[0])
            return self._chunks[c].take(to_arrow(np.where(missing, 0, rows - self._bases[c]), valid=~missing))
        pieces, place = self._pieces(rows, chunk, used)
        return pa.concat_arrays(pieces).take(to_arrow(place, valid=~missing))

    def merge(self, sources: Sources, given: pa.Array) -> pa.Array:
        rows = self._rows(sources.old)
        pieces, place = self._pieces(rows, *self._chunks_of(rows))
        held = sum(map(len, pieces))
        order = sources.merged(place, held + sources.new)
        valid = sources.merged(rows >= 0, np.ones(len(sources.new), np.bool_)) if rows.min(initial=0) < 0 else None
        return pa.concat_arrays([*pieces, given]).take(to_arrow(order, valid=valid))

    def _chunks_of(self, rows: Slots) -> tuple[Slots, Slots]:
        """The chunk of each row, -1 for a row that is none, and the chunks that there are."""
        chunk = np.searchsorted(self._bases, rows, "right") - 1
        return chunk, np.flatnonzero(np.bincount(chunk + 1, minlength=1)[1:])

    def _pieces(self, rows: Slots, chunk: Slots, used: Slots) -> tuple[list[pa.Array], Slots]:
        """The rows' values, chunk by chunk, and the place of each row among them."""
        pieces, place, done = [], np.zeros(len(rows), np.int64), 0
        for c in used:
            at = np.flatnonzero(chunk == c)
            pieces.append(self._chunks[c].take(to_arrow(rows[at] - self._bases[c])))
            place[at] = np.arange(done, done + len(at))
            done += len(at)
        return pieces, place

    def value(self, slot: int) -> Any:
        return self._gather_one(slot)[0].as_py()

    def _gather_one(self, slot: int) -> pa.Array:
        row = -1 if slot < 0 else int(self._places.array[slot]) - 1
        if row < 0:
            return pa.nulls(1, self._type)
        c = bisect.bisect_right(self._bases, row) - 1
        return self._chunks[c].slice(row - self._bases[c], 1)
