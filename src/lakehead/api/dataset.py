"""A pinned union read as an Arrow dataset, into which DuckDB pushes columns and filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from lakehead.api.pushdown import as_duckdb_means
from lakehead.api.scan import Scan
from lakehead.errors import SqlError
from lakehead.format.read_as import cast_to
from lakehead.format.schema import map_children, twin_names
from lakehead.predicate import tree_of
from lakehead.predicate.nodes import Field, walk

_ROW = "__row"
SHOWN = f"* exclude ({_ROW})"
"""What of a `CountedDataset` users see, in SQL."""
_ROWS_AT_ONCE = 1 << 20
ReadRows = Callable[[list[str] | None, "pc.Expression | None"], Iterator[pa.RecordBatch]]
FRAMES = (pa.Table, pa.RecordBatch, ds.Dataset, Scan)


class PushdownDataset(ds.Dataset):
    """Looks like a `pyarrow.dataset.Dataset` to engines that ask it for a scanner.

    Args:
        schema: all columns. The engine sees instants in microseconds, because DuckDB has no others: it would round its
            own values to a column's seconds.
        read: rows of these columns for which this expression is true; may be called any number of times.

    Raises:
        SqlError: names of columns or fields are equal but for case, as they can be in tables of the first releases.
    """

    def __init__(self, schema: pa.Schema, read: ReadRows) -> None:
        twins = twin_names(schema)
        if twins is not None and twins[0] != twins[1]:
            raise SqlError(
                f"SQL cannot tell columns {twins[0]!r} and {twins[1]!r} apart: read this table with table.scan()"
            )
        self._all = pa.schema([f.with_type(_in_microseconds(f.type)) for f in schema])
        self._read = read

    @property
    def schema(self) -> pa.Schema:
        return self._all

    def scanner(
        self, columns: list[str] | None = None, filter: pc.Expression | None = None, **options: Any
    ) -> PushdownScanner:
        """What the engine reads: ``columns`` in this order, rows for which ``filter`` is true."""
        names = self._all.names if columns is None else list(columns)
        schema = pa.schema([self._all.field(c) for c in names])
        return PushdownScanner(schema, lambda: (cast_to(schema, b) for b in self._read(names, filter)))


class CountedDataset(PushdownDataset):
    """One whose rows can be counted without being read.

    An engine that wants no column reads the first one, to count rows. That is one of its own here, before the others:
    show it the columns of `SHOWN`.

    Args:
        count: yields the number of all rows.
    """

    def __init__(self, schema: pa.Schema, read: ReadRows, count: Callable[[], Iterator[int]]) -> None:
        super().__init__(schema, read)
        self._all = pa.schema([pa.field(_ROW, pa.int8()), *self._all])
        self._count = count

    def scanner(
        self, columns: list[str] | None = None, filter: pc.Expression | None = None, **options: Any
    ) -> PushdownScanner:
        if columns == [_ROW] and filter is None:
            return PushdownScanner(pa.schema([self._all.field(0)]), self._counted)
        names = self._all.names if columns is None else list(columns)
        if _ROW not in names:
            return super().scanner(names, filter)
        schema, wanted = pa.schema([self._all.field(c) for c in names]), [c for c in names if c != _ROW]
        return PushdownScanner(schema, lambda: (_with_row(schema, b) for b in self._read(wanted, filter)))

    def _counted(self) -> Iterator[pa.RecordBatch]:
        for left in self._count():
            zeros = _zeros(min(left, _ROWS_AT_ONCE))
            for n in range(0, left, _ROWS_AT_ONCE):
                yield pa.record_batch([zeros.slice(0, left - n)], [_ROW])


class FrameDataset(PushdownDataset):
    """Arrow data of the caller, whose rows are filtered as DuckDB means it too.

    Args:
        rows: one of `FRAMES`, which can be read any number of times.
        noted: wraps what reads.
    """

    def __init__(self, rows: Any, noted: Callable[[ReadRows], ReadRows]) -> None:
        given = rows.schema
        shown = pa.schema([f.with_type(_as_plain(f.type)) for f in given])

        def read(names: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
            meant = None if where is None else as_duckdb_means(where, shown)
            wanted = names or []
            needed = set() if where is None else {n.path[0] for n in walk(tree_of(where)) if isinstance(n, Field)}
            if isinstance(rows, ds.Dataset) and all(shown.field(n).type == given.field(n).type for n in needed):
                yield from (_shown(shown, wanted, b) for b in rows.to_batches(columns=names, filter=meant))
                return
            both = list(dict.fromkeys((*wanted, *sorted(needed))))
            batches = rows.to_batches(columns=both) if isinstance(rows, ds.Dataset) else _batches_of(rows)
            for batch in batches:
                made = _shown(shown, both, batch)
                yield (made if meant is None else made.filter(meant)).select(wanted)

        self._all = shown
        self._read = noted(read)


def _as_plain(t: pa.DataType) -> pa.DataType:
    """The type as which the engine sees a frame's column: it would read others alike, but compare them otherwise."""
    if pa.types.is_string_view(t):
        return pa.large_string()
    if pa.types.is_binary_view(t):
        return pa.large_binary()
    if pa.types.is_run_end_encoded(t):
        return _as_plain(t.value_type)
    if pa.types.is_dictionary(t) and (pa.types.is_floating(t.value_type) or pa.types.is_temporal(t.value_type)):
        return _as_plain(t.value_type)
    return _in_microseconds(t)


def _shown(schema: pa.Schema, names: list[str], batch: pa.RecordBatch) -> pa.RecordBatch:
    """These columns of a frame, as the engine sees them: what it has no room for in an instant is cut off, as there."""
    if not names or all(batch.schema.field(n).type == schema.field(n).type for n in names):
        return batch.select(names)
    columns = []
    for name in names:
        column, t = batch.column(name), schema.field(name).type
        if pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        if pa.types.is_dictionary(column.type) and column.type != t:
            column = column.dictionary_decode()
        if column.type != t:
            column = column.cast(options=pc.CastOptions(t, allow_time_truncate=True))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=names)


def _batches_of(rows: Any) -> Iterable[pa.RecordBatch]:
    return [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()


def _in_microseconds(t: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(t) and t.tz is not None:
        return pa.timestamp("us", t.tz)
    return map_children(t, lambda child, _: _in_microseconds(child))


class PushdownScanner:
    """One read of a `PushdownDataset`."""

    def __init__(self, schema: pa.Schema, read: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self.projected_schema = schema
        self._read = read

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._read())


def _zeros(rows: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int8(), rows, [None, pa.py_buffer(bytes(rows))])


def _with_row(schema: pa.Schema, batch: pa.RecordBatch) -> pa.RecordBatch:
    return cast_to(schema, batch.append_column(_ROW, _zeros(batch.num_rows)))
