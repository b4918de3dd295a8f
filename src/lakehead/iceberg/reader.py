"""Reading lake rows without Spark: projected, filtered exactly, without what is deleted or superseded.

Files that nothing was taken from are one parallel Arrow dataset scan. For the others, deleted positions are first
turned into dead offsets where the file's offsets allow, so that row groups can be skipped there too; only files with
rows that others added are read by position. Rows come in the table's own types, which the lake may have widened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from lakehead.errors import LakeStateError
from lakehead.format.read_as import cast_to
from lakehead.format.schema import lake_schema
from lakehead.iceberg.columns import FileColumns, plain_files, with_defaults
from lakehead.iceberg.data_files import lake_arrow_schema
from lakehead.iceberg.file_io import FILES_AT_ONCE, lake_files, locate_file
from lakehead.iceberg.positions import deleted_positions, find_offsets, offsets_at
from lakehead.iceberg.row_groups import row_group_filter
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.lake.superseded import superseded_in
from lakehead.log.netchange import NO_OFFSETS, Offsets, between, contains, union
from lakehead.predicate import Predicate
from lakehead.types import OFFSET_COLUMN, SYSTEM_FIELDS, TableDescriptor

_BATCH_ROWS = 128 << 10
_SMALL_FILE_BYTES = 16 << 20
_AT_ONCE = 16


def read_lake(
    table: Table,
    desc: TableDescriptor,
    files: Sequence[LakeFile],
    *,
    columns: Sequence[str] | None = None,
    predicate: Predicate | None = None,
    superseded: Superseded | None = None,
    system_columns: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Live rows of planned files; in no order across files, in the file's order within one.

    Args:
        files: from `lakehead.iceberg.planner.plan_files`.
        columns: columns to return, in this order, system columns too; None for all of the user's.
        predicate: exact condition on the table's columns.
        superseded: offsets per tablet, sorted, of rows to leave out. Rows without an offset always stay.
        system_columns: add those system columns that ``columns`` lacks, at the end.

    Yields:
        Batches with the table's own types.

    Raises:
        LakeStateError: a file holds values that do not fit the table's types, or rows that may be superseded but
            belong to no tablet.
        LakeFileMissingError: a file is gone.
    """
    own = pa.schema([*desc.schema, *SYSTEM_FIELDS])
    names = list(columns) if columns is not None else list(desc.schema.names)
    if system_columns:
        names += [f.name for f in SYSTEM_FIELDS if f.name not in names]
    lake = table.schema()
    in_files = FileColumns(with_defaults(lake_arrow_schema(lake), desc), lake.schema_id, desc.schema_id)
    reader = _Reader(table.io, own, names, predicate, in_files, _offset_id(table))
    whole, partial = _split(table, files, superseded or {})
    try:
        with lake_files():
            yield from reader.scan(whole)
            yield from reader.scan_partial(partial)
    except pa.ArrowInvalid as e:
        raise LakeStateError(
            f"lake table {'.'.join(table.name())} holds values that do not fit table {desc.path}: {e}",
            table=str(desc.path),
        ) from e


def count_lake(
    table: Table, desc: TableDescriptor, files: Sequence[LakeFile], *, superseded: Superseded | None = None
) -> int:
    """How many rows `read_lake` yields without a predicate: from metadata where nothing was taken away."""
    whole, partial = _split(table, files, superseded or {})

    def left(part: _Partial) -> int:
        positions = deleted_positions(table.io, part.file.path, part.file.delete_files)
        if len(part.superseded):
            found = find_offsets(table.io, part.file.path, part.superseded, _offset_id(table))
            positions = union(positions, found[0])
        return part.file.record_count - len(positions)

    total = sum(f.record_count for f in whole)
    if not partial:
        return total
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return total + sum(pool.map(left, partial))


@dataclass(frozen=True, eq=False)
class _Partial:
    """A file of which some rows may be gone: by its delete files, or by their offsets."""

    file: LakeFile
    superseded: Offsets


def _split(table: Table, files: Iterable[LakeFile], superseded: Superseded) -> tuple[list[LakeFile], list[_Partial]]:
    whole: list[LakeFile] = []
    partial: list[_Partial] = []
    some = any(len(v) for v in superseded.values())
    for f in files:
        dead = superseded_in(f, superseded, ".".join(table.name())) if some else NO_OFFSETS
        if len(dead) or f.delete_files:
            partial.append(_Partial(f, dead))
        else:
            whole.append(f)
    return whole, partial


class _Reader:
    """Reads files with one projection and one filter."""

    def __init__(
        self,
        io: FileIO,
        own: pa.Schema,
        names: Sequence[str],
        predicate: Predicate | None,
        columns: FileColumns,
        offset_id: int,
    ) -> None:
        self._io = io
        self._file_columns = columns
        self._offset_id = offset_id
        self._own = own
        self._names = list(names)
        self._out = pa.schema([own.field(n) for n in names])
        self._predicate = predicate
        self._columns = frozenset(predicate.columns if predicate else ())

    def scan(self, files: Sequence[LakeFile], *, extra: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """All rows of files that match the filter, with extra columns at the end."""
        names = [*self._names, *extra]
        read = list(dict.fromkeys([*names, *self._columns]))
        files, others = plain_files(self._io, files, self._file_columns, read)
        for f in others:
            for _, batch in self._scan_by_id(f, names):
                batch = batch if self._predicate is None else self._predicate.filter(batch)
                if batch.num_rows:
                    yield batch.select(names)
        schema = pa.schema([self._own.field(n) for n in read])
        for dataset, condition in self._datasets(files):
            for batch in dataset.scanner(columns=read, filter=condition, batch_size=_BATCH_ROWS).to_batches():
                if not batch.num_rows:
                    continue
                batch = cast_to(schema, batch)
                if self._predicate is not None:
                    batch = self._predicate.filter(batch).select(names)
                if batch.num_rows:
                    yield batch

    def _datasets(self, files: Sequence[LakeFile]) -> Iterator[tuple[ds.Dataset, pc.Expression | None]]:
        """The files in order, neighbours of which the same may be skipped together."""
        form, lake = ds.ParquetFileFormat(), lake_schema(self._own)
        placed = [(*locate_file(self._io, f.path), f.without_nan & self._columns) for f in files]
        for _, group in itertools.groupby(placed, key=lambda p: (id(p[0]), p[2])):
            same = list(group)
            fs, _, without_nan = same[0]
            condition = None
            if self._predicate is not None:
                condition = row_group_filter(self._predicate, self._own, without_nan=without_nan)
            yield ds.FileSystemDataset([form.make_fragment(p, fs) for _, p, _ in same], lake, form, fs), condition

    def scan_partial(self, parts: Sequence[_Partial]) -> Iterator[pa.RecordBatch]:
        """Rows of files that are still there; small files several at a time."""
        small = [p for p in parts if p.file.size <= _SMALL_FILE_BYTES]
        for part in parts:
            if part.file.size > _SMALL_FILE_BYTES:
                yield from self._scan_one(part)
        if not small:
            return
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            for some in _chunks(small):
                for batches in pool.map(_listed(self._scan_one), some):
                    yield from batches

    def _scan_one(self, part: _Partial) -> Iterator[pa.RecordBatch]:
        f = part.file
        positions = deleted_positions(self._io, f.path, f.delete_files)
        dead: Offsets | None = NO_OFFSETS
        if len(positions):
            dead = offsets_at(self._io, f.path, f.record_count, positions, self._offset_id)
        if dead is None:
            yield from self._scan_positions(part, positions)
            return
        dead = union(dead, part.superseded)
        extra = [] if OFFSET_COLUMN in self._names else [OFFSET_COLUMN]
        for batch in self.scan([f], extra=extra):
            offsets = batch.column(OFFSET_COLUMN)
            gone = contains(dead, offsets.fill_null(-1).to_numpy())
            if offsets.null_count:
                gone &= offsets.is_valid().to_numpy(zero_copy_only=False)
            live = batch.filter(pa.array(~gone)) if gone.any() else batch
            if live.num_rows:
                yield live.select(self._names) if extra else live

    def _scan_positions(self, part: _Partial, positions: Offsets) -> Iterator[pa.RecordBatch]:
        """Rows by position: for files whose rows have no offsets that tell them apart."""
        for start, batch in self._scan_by_id(part.file, [*self._names, OFFSET_COLUMN]):
            gone = np.zeros(batch.num_rows, np.bool_)
            gone[between(positions, start, start + batch.num_rows) - start] = True
            offsets = batch.column(OFFSET_COLUMN)
            hit = contains(part.superseded, offsets.fill_null(-1).to_numpy())
            gone |= hit & offsets.is_valid().to_numpy(zero_copy_only=False)
            live = batch.filter(pa.array(~gone))
            if self._predicate is not None:
                live = self._predicate.filter(live)
            if live.num_rows:
                yield live.select(self._names)

    def _scan_by_id(self, file: LakeFile, names: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All rows with these columns and those of the filter, found by field id, and the position of each first."""
        wanted = list(dict.fromkeys([*names, *(self._predicate.columns if self._predicate else ())]))
        schema = pa.schema([self._own.field(n) for n in wanted])
        fs, path = locate_file(self._io, file.path)
        start = 0
        with pq.ParquetFile(path, filesystem=fs) as parquet:
            physical = parquet.schema_arrow
            binding = self._file_columns.binding(physical, wanted)
            there = [physical.names[at] for at in binding.read]
            # Of a file that has none of them, any column says how many rows there are.
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=there or physical.names[:1]):
                yield start, cast_to(schema, binding.rows(batch.select(there)))
                start += batch.num_rows


def _offset_id(table: Table) -> int:
    field_id: int = table.schema().find_field(OFFSET_COLUMN).field_id
    return field_id


def _listed(read: Callable[[_Partial], Iterator[pa.RecordBatch]]) -> Callable[[_Partial], list[pa.RecordBatch]]:
    return lambda part: list(read(part))


def _chunks(parts: Sequence[_Partial]) -> Iterator[Sequence[_Partial]]:
    for at in range(0, len(parts), _AT_ONCE):
        yield parts[at : at + _AT_ONCE]
