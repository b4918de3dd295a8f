"""Joining and cutting Arrow batches within bounds of rows and bytes.

Rows may be of a few bytes or of megabytes, and Arrow's texts and lists hold at most 2 GiB a batch: whoever joins, cuts
or gathers batches does it by the functions and the bounds here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.errors import LimitExceededError
from lakehead.format.arrays import places_of, to_arrow

BYTES_MAX = 64 << 20
"""Bytes that joined batches, slices and answers hold at most; one row may hold more."""
ROWS_MAX = 1 << 16
CHANGE_BYTES_MAX = 513 << 20
"""Bytes of the old and new rows that one write to one tablet may log; two rows of the largest batch are within it."""

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")


def gathered(
    items: Iterable[T], measure: Callable[[T], tuple[int, int]], *, rows_max: int, rows_enough: int
) -> Iterator[list[T]]:
    """Neighbours that are worth joining: together within ``rows_max`` and `BYTES_MAX`; what has ``rows_enough`` rows or
    a quarter of the bytes stands alone. ``measure`` gives the rows and bytes of one item, or more."""
    held: list[T] = []
    held_rows = held_bytes = 0
    for item in items:
        rows, size = measure(item)
        alone = rows >= rows_enough or size * 4 >= BYTES_MAX
        if held and (alone or held_rows + rows > rows_max or held_bytes + size > BYTES_MAX):
            yield held
            held, held_rows, held_bytes = [], 0, 0
        held.append(item)
        held_rows, held_bytes = held_rows + rows, held_bytes + size
        if alone:
            yield held
            held, held_rows, held_bytes = [], 0, 0
    if held:
        yield held


def join(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of neighbours that `gathered` or `table_batches` found small enough."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def rows_without_columns(rows: int) -> pa.RecordBatch:
    """So many rows of which nothing was asked but that they are there; made of no columns, a batch would have none."""
    return pa.RecordBatch.from_arrays([pa.nulls(rows)], names=["none"]).select([])


def fits(size: int) -> bool:
    """Whether one batch may hold so many bytes, of more rows than one."""
    return size <= BYTES_MAX


def table_batches(table: pa.Table, *, rows_max: int) -> Iterator[pa.RecordBatch]:
    """The rows in batches of at most ``rows_max`` rows and `BYTES_MAX` bytes; neighbouring small chunks are joined."""
    whole: list[pa.RecordBatch] = table.to_batches() if 0 < table.num_rows <= rows_max else []
    if len(whole) == 1 and within(whole[0], BYTES_MAX):
        yield whole[0]
        return
    for group in gathered(
        (part for chunk in table.to_batches(max_chunksize=rows_max) for part in cut(chunk)),
        lambda batch: (batch.num_rows, batch.nbytes),
        rows_max=rows_max,
        rows_enough=rows_max,
    ):
        yield join(group)


def within(batch: pa.RecordBatch | pa.Table, bytes_max: int) -> bool:
    """Whether the rows take at most so many bytes."""
    # What it holds as a whole, which columns may share, is told fifty times as fast as what of it the rows take.
    return batch.get_total_buffer_size() * batch.num_columns <= bytes_max or batch.nbytes <= bytes_max


def cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in slices of at most `BYTES_MAX` bytes, or of one row; uncopied."""
    if within(batch, BYTES_MAX):
        yield batch
        return
    for start, end in within_bytes(row_bytes(batch)):
        yield batch.slice(start, end - start)


def taken(batches: Sequence[pa.RecordBatch], order: Numbers) -> Iterator[pa.RecordBatch]:
    """The rows at these positions of all batches together, in this order, in batches of bounded rows and bytes."""
    bases = np.cumsum([0, *(b.num_rows for b in batches)])
    sizes = np.concatenate([row_bytes(b) for b in batches])[order]
    for start, end in within_bytes(np.maximum(sizes, BYTES_MAX // ROWS_MAX)):
        chosen = order[start:end]
        source = np.searchsorted(bases, chosen, "right") - 1
        pieces, places = [], []
        for i in np.unique(source).tolist():
            at = np.flatnonzero(source == i)
            pieces.append(batches[i].take(to_arrow(chosen[at] - bases[i])))
            places.append(at)
        joined = join(pieces)
        yield joined.take(to_arrow(places_of(np.concatenate(places), end - start))) if len(pieces) > 1 else joined


def rows_at(table: pa.Table, order: Numbers) -> pa.Table:
    """The rows at these positions, in this order. Arrow's own ``take`` joins the chunks of a column first, and fails
    where these are texts of 2 GiB."""
    batches = table.to_batches()
    return pa.Table.from_batches(taken(batches, order) if batches else [], table.schema)


def row_bytes(batch: pa.RecordBatch) -> Numbers:
    """About how many bytes each row takes."""
    at = np.arange(batch.num_rows, dtype=np.int64)
    return sum((range_bytes(c, at, at + 1) for c in batch.columns), np.zeros(batch.num_rows, np.int64))


def within_bytes(sizes: Numbers, bytes_max: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of rows that take at most so many bytes, `BYTES_MAX` unless told, or are one row."""
    ends = np.cumsum(sizes)
    start, limit = 0, BYTES_MAX if bytes_max is None else bytes_max
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, before + limit, "right")), start + 1)
        yield start, end
        start = end


class AnswerSize:
    """How many bytes the batches of one answer take: as whole buffers, which are told at once and which batches may
    share, and only where these are too many as their rows do."""

    def __init__(self, bytes_max: int | None) -> None:
        self._bytes_max = bytes_max
        self._limit = BYTES_MAX if bytes_max is None else min(bytes_max, BYTES_MAX)
        self._size = 0
        self._untold: list[tuple[pa.RecordBatch, int]] = []

    def add(self, batch: pa.RecordBatch, rows_asked: int) -> None:
        """Count one more of an answer to so many questions.

        Raises:
            LimitExceededError: as `require_answer`.
        """
        held = batch.get_total_buffer_size()
        self._untold.append((batch, held))
        self._size += held
        if self._size > self._limit:
            self._size += sum(b.nbytes - held for b, held in self._untold)
            self._untold.clear()
            require_answer(rows_asked, self._size, self._bytes_max)


def require_answer(rows: int, size: int, bytes_max: int | None = None) -> None:
    """Refuse more bytes than one answer may hold, or than who asks wants; one row never is too many.

    Raises:
        LimitExceededError: ``context`` has ``answer_bytes_max``.
    """
    limit = BYTES_MAX if bytes_max is None else min(bytes_max, BYTES_MAX)
    if rows > 1 and size > limit:
        raise LimitExceededError(
            f"the rows asked for are more than {limit:,} bytes, the limit of one answer: ask for fewer keys at once, or"
            " scan",
            answer_bytes_max=limit,
        )


def largest(array: pa.Array) -> int:
    """About how many bytes the largest value takes; cheap to find for texts and binaries."""
    if len(array) == 0:
        return 0
    t = array.type
    large = pa.types.is_large_string(t) or pa.types.is_large_binary(t)
    if large or pa.types.is_string(t) or pa.types.is_binary(t):
        stored = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)
        ends = stored[array.offset : array.offset + len(array) + 1]
        return int(np.diff(ends).max()) + 9
    at = np.arange(len(array))
    return int(range_bytes(array, at, at + 1).max())


def range_bytes(array: pa.Array, starts: Numbers, ends: Numbers) -> Numbers:
    """About how many bytes the values ``[starts[i], ends[i])`` of an array take, for each i."""
    t = array.type
    if pa.types.is_struct(t):
        parts = [range_bytes(array.field(i), starts, ends) for i in range(t.num_fields)]
        return sum(parts, ends - starts)
    large = pa.types.is_large_list(t) or pa.types.is_large_string(t) or pa.types.is_large_binary(t)
    if large or pa.types.is_string(t) or pa.types.is_binary(t) or pa.types.is_list(t) or pa.types.is_map(t):
        if len(array) == 0:
            return ends - starts
        stored = np.frombuffer(array.buffers()[1], np.int64 if large else np.int32)[array.offset :]
        low, high = stored[starts].astype(np.int64), stored[ends].astype(np.int64)
        own = (ends - starts) * (9 if large else 5)
        if pa.types.is_map(t):
            return own + range_bytes(array.keys, low, high) + range_bytes(array.items, low, high)
        return own + (range_bytes(array.values, low, high) if pa.types.is_nested(t) else high - low)
    return (ends - starts) * (1 + t.bit_width // 8)
