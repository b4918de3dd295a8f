"""Reading lake rows without Spark: projected, filtered exactly, without what is deleted or superseded.

Files are a parallel Arrow dataset scan; with a filter those that nothing was taken from are one, and the rest another.
Where in these the rows stand that are deleted or superseded is found first, and row groups that hold no row of the
filter are left out before the scan, so that it counts positions. Rows come in the table's own types, which the lake may
have widened.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import FileSystem, LocalFileSystem
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from lakehead.env.threads import WorkerPool
from lakehead.errors import CorruptionError, LakeStateError
from lakehead.format.arrays import to_arrow
from lakehead.format.read_as import cast_to
from lakehead.format.schema import lake_schema
from lakehead.iceberg.columns import FileColumns, plain_files
from lakehead.iceberg.file_io import (
    FILES_AT_ONCE,
    PARQUET,
    RenewedFileIO,
    damaged_file,
    lake_files,
    locate_file,
    open_parquet,
)
from lakehead.iceberg.positions import deleted_positions, find_positions, known_group_sizes
from lakehead.iceberg.pruning import rounded_columns
from lakehead.iceberg.row_groups import row_group_filter
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.lake.superseded import superseded_in
from lakehead.log.netchange import NO_OFFSETS, Offsets, between, union
from lakehead.predicate import Predicate
from lakehead.types import OFFSET_COLUMN, SYSTEM_FIELDS, TableDescriptor

_BATCH_ROWS = 128 << 10
_AT_ONCE = 64
_FEW = 8
_MANY_GONE = 16
_OpenDataset: TypeAlias = Callable[[], ds.Dataset]
_Part = TypeVar("_Part")


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
        CorruptionError: a file is damaged.
    """
    own = pa.schema([*desc.schema, *SYSTEM_FIELDS])
    names = list(columns) if columns is not None else list(desc.schema.names)
    if system_columns:
        names += [f.name for f in SYSTEM_FIELDS if f.name not in names]
    in_files = FileColumns.of(table, desc)
    rounded = rounded_columns(table.schema(), desc.schema)
    reader = _Reader(table.io, own, names, predicate, in_files, _offset_id(table), rounded)
    whole, partial = _split(table, files, superseded or {})
    if predicate is None and partial:  # then one scan is enough
        whole, partial = [], [*partial, *(_Partial(f, NO_OFFSETS) for f in whole)]
    try:
        with lake_files():
            yield from reader.scan(whole)
            yield from reader.scan_partial(partial)
    except CorruptionError as e:
        if e.context.get("path") != "" or (path := _damaged(table.io, files)) is None:
            raise
        raise damaged_file(path, e.__cause__ or e) from e
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as e:
        raise LakeStateError(
            f"lake table {'.'.join(table.name())} holds values that do not fit table {desc.path} ({e}): another engine"
            " has written them, so change or delete them there",
            table=str(desc.path),
        ) from e


def _damaged(io: FileIO, files: Iterable[LakeFile]) -> str | None:
    """Which of the files cannot be read, as those who read several at once are not told."""
    for f in files:
        fs, path = locate_file(io, f.path)
        try:
            with open_parquet(path, fs) as parquet:
                for _ in parquet.iter_batches():
                    continue
        except (OSError, ValueError):
            return f.path
    return None


def count_lake(
    table: Table, desc: TableDescriptor, files: Sequence[LakeFile], *, superseded: Superseded | None = None
) -> int:
    """How many rows `read_lake` yields without a predicate: from metadata where nothing was taken away."""
    whole, partial = _split(table, files, superseded or {})

    def left(part: _Partial) -> int:
        positions = deleted_positions(table.io, part.file.path, part.file.delete_files)
        if len(part.superseded):
            positions = union(positions, find_positions(table.io, part.file.path, part.superseded, _offset_id(table)))
        return part.file.record_count - len(between(positions, 0, part.file.record_count))

    total = sum(f.record_count for f in whole)
    if not partial:
        return total
    with WorkerPool(FILES_AT_ONCE) as pool:
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


@dataclass(frozen=True, eq=False)
class _Kept:
    """Row groups of one file that are to be read.

    Attributes:
        groups: their numbers; None: all.
        rows: in them; of files of which none is gone, which come last, as the manifest says.
        gone: which of these are gone, counted through all of the groups.
    """

    file: str
    fs: FileSystem
    fragment: ds.Fragment
    groups: Sequence[int] | None
    rows: int
    gone: Offsets


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
        rounded: frozenset[str],
    ) -> None:
        self._io = io
        self._file_columns = columns
        self._offset_id = offset_id
        self._rounded = rounded
        self._own = own
        self._names = list(names)
        self._out = pa.schema([own.field(n) for n in names])
        self._predicate = predicate
        self._columns = frozenset(predicate.columns if predicate else ())
        self._read = list(dict.fromkeys([*self._names, *self._columns]))
        lake = lake_schema(pa.schema([own.field(n) for n in self._read or [OFFSET_COLUMN]]))
        # Arrow's readers take what is too large for a float for infinite.
        self._lake = pa.schema(columns.field(f.name) if f.name in rounded else f for f in lake)

    def scan(self, files: Sequence[LakeFile]) -> Iterator[pa.RecordBatch]:
        """All rows of files that match the filter."""
        names = self._names
        read = self._read
        files, others = plain_files(self._io, files, self._file_columns, read)
        for f in others:
            for _, batch in self._scan_by_id(f, names):
                batch = batch if self._predicate is None else self._predicate.filter(batch)
                if batch.num_rows:
                    yield batch.select(names)
        schema = pa.schema([self._own.field(n) for n in read])
        for dataset, condition in self._datasets(files):
            for batch in self._resumed(dataset, columns=read, filter=condition):
                batch = cast_to(schema, batch)
                if self._predicate is not None:
                    batch = self._predicate.filter(batch).select(names)
                if batch.num_rows:
                    yield batch

    def _datasets(self, files: Sequence[LakeFile]) -> Iterator[tuple[_OpenDataset, pc.Expression | None]]:
        """The files in order, neighbours of which the same may be skipped together."""
        for some in _chunks(files) if isinstance(self._io, RenewedFileIO) else [files]:
            places = [locate_file(self._io, f.path)[0] for f in some]
            placed = zip(some, places, strict=True)
            for key, group in itertools.groupby(placed, key=lambda p: (id(p[1]), p[0].without_nan & self._columns)):
                condition = None
                if self._predicate is not None:
                    condition = self._necessary(self._predicate, key[1])
                yield functools.partial(self._dataset, [f for f, _ in group]), condition

    def _necessary(self, predicate: Predicate, without_nan: frozenset[str]) -> pc.Expression | None:
        return row_group_filter(predicate, self._own, without_nan=without_nan, rounded=self._rounded)

    def _dataset(self, files: Sequence[LakeFile]) -> ds.Dataset:
        fs, paths = self._located(f.path for f in files)
        fragments = [PARQUET.make_fragment(p, fs) for p in paths]
        return ds.FileSystemDataset(fragments, self._lake, PARQUET, fs)

    def _located(self, files: Iterable[str]) -> tuple[FileSystem, list[str]]:
        """Files of one storage as they are opened now."""
        located = [locate_file(self._io, path) for path in files]
        return located[-1][0], [path for _, path in located]

    def _resumed(self, dataset: _OpenDataset, **how: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a scan in order, without empty batches; when credentials end in it, it goes on with others."""
        yield from self._again(lambda: dataset().scanner(batch_size=_BATCH_ROWS, **how).to_batches())

    def _again(self, begin: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Rows that come in the same order each time; those that were there when credentials ended are passed over."""
        given = 0
        while True:
            seen = 0
            try:
                for batch in begin():
                    seen += batch.num_rows
                    if seen > given:
                        new = batch.slice(batch.num_rows - (seen - given))
                        given = seen
                        yield new
                return
            except OSError as e:
                if not (isinstance(self._io, RenewedFileIO) and self._io.renewed_after(e)):
                    raise

    def scan_partial(self, parts: Sequence[_Partial]) -> Iterator[pa.RecordBatch]:
        """Rows of files that are still there, by their positions."""
        read = self._read or [OFFSET_COLUMN]
        with WorkerPool(FILES_AT_ONCE) as pool:
            each = map if self._are_near(parts) else pool.map
            for some in _chunks(parts):
                named, _ = plain_files(self._io, [p.file for p in some], self._file_columns, read)
                plain = {f.path for f in named}
                found = zip(some, each(self._gone, some), strict=True)
                whole: list[tuple[_Partial, Offsets]] = []
                for part, gone in found:
                    if part.file.path in plain:
                        whole.append((part, gone))
                    else:
                        yield from self._scan_without(part.file, gone)
                yield from self._scan_kept(list(each(self._kept, whole)), read)

    def _are_near(self, parts: Sequence[_Partial]) -> bool:
        """Whether to begin a thread takes longer than to look into these files one after the other."""
        return len(parts) <= _FEW and all(
            isinstance(locate_file(self._io, part.file.path)[0], LocalFileSystem) for part in parts
        )

    def _gone(self, part: _Partial) -> Offsets:
        """Positions of the rows that are deleted or superseded."""
        f = part.file
        deleted = deleted_positions(self._io, f.path, f.delete_files)
        if not len(part.superseded):
            return deleted
        return union(deleted, find_positions(self._io, f.path, part.superseded, self._offset_id))

    def _kept(self, part: tuple[_Partial, Offsets]) -> _Kept:
        """The row groups of a file that may hold rows of the filter and are not gone as a whole, and which of their
        rows are gone."""
        file, gone = part[0].file, part[1]
        fs, path = locate_file(self._io, file.path)
        fragment = PARQUET.make_fragment(path, fs)
        condition = None
        if self._predicate is not None:
            condition = self._necessary(self._predicate, file.without_nan & self._columns)
        elif not len(gone):
            return _Kept(file.path, fs, fragment, None, file.record_count, gone)
        sizes = known_group_sizes(file, self._offset_id) if condition is None else None
        opened = sizes is None
        if sizes is None:
            sizes = [group.num_rows for group in fragment.row_groups]
        met: Collection[int] = range(len(sizes))
        if condition is not None:
            met = {group.id for group in fragment.subset(condition, schema=self._lake).row_groups}
        left: list[int] = []
        pieces = [NO_OFFSETS]
        position = rows = 0
        for number, size in enumerate(sizes):
            of_group = between(gone, position, position + size)
            if number in met and len(of_group) < size:
                left.append(number)
                pieces.append(of_group + (rows - position) if rows < position else of_group)
                rows += size
            position += size
        if len(left) == len(sizes):
            return _Kept(file.path, fs, fragment, None, rows, gone)
        if opened:
            fragment = fragment.subset(row_group_ids=left)
        else:  # which the scan does, beside other things
            fragment = PARQUET.make_fragment(path, fs, row_groups=left)
        return _Kept(file.path, fs, fragment, left, rows, np.concatenate(pieces))

    def _scan_kept(self, parts: Sequence[_Kept], read: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self._own.field(n) for n in read])
        for _, group in itertools.groupby((p for p in parts if p.rows), key=lambda p: id(p.fs)):
            same = list(group)
            left = iter(same)
            part, at = next(left), 0
            for batch in self._resumed(functools.partial(self._kept_dataset, same), columns=read):
                if at == part.rows:  # no batch is of two files
                    part, at = next(left, part), 0
                at += batch.num_rows
                gone = between(part.gone, at - batch.num_rows, at) + batch.num_rows - at
                rows = self._left(cast_to(schema, batch), gone)
                if rows.num_rows:
                    yield rows.select(self._names)

    def _left(self, batch: pa.RecordBatch, gone: Offsets) -> pa.RecordBatch:
        """Rows that match the filter and are not at these positions."""
        live = None
        if len(gone):
            live = np.ones(batch.num_rows, np.bool_)
            live[gone] = False
        if self._predicate is not None:
            return self._predicate.filter(batch, None if live is None else to_arrow(live, pa.bool_()))
        if live is None:
            return batch
        if len(gone) * _MANY_GONE > batch.num_rows:  # then a filter, which looks for runs, takes longer
            return batch.take(to_arrow(np.flatnonzero(live)))
        return batch.filter(to_arrow(live, pa.bool_()))

    def _kept_dataset(self, parts: Sequence[_Kept]) -> ds.Dataset:
        fs, paths = self._located(p.file for p in parts)
        fragments = [p.fragment for p in parts]
        if fs is not parts[0].fs:  # with what ended, those that are not open yet do not tell their groups any more
            fragments = [PARQUET.make_fragment(at, fs, row_groups=p.groups) for at, p in zip(paths, parts, strict=True)]
        return ds.FileSystemDataset(fragments, self._lake, PARQUET, fs)

    def _scan_without(self, file: LakeFile, gone: Offsets) -> Iterator[pa.RecordBatch]:
        """The other rows of a file whose columns do not have the table's names."""
        for start, batch in self._scan_by_id(file, self._names or [OFFSET_COLUMN]):
            rows = self._left(batch, between(gone, start, start + batch.num_rows) - start)
            if rows.num_rows:
                yield rows.select(self._names)

    def _scan_by_id(self, file: LakeFile, names: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All rows with these columns and those of the filter, found by field id, and the position of each first."""
        wanted = list(dict.fromkeys([*names, *(self._predicate.columns if self._predicate else ())]))
        schema = pa.schema([self._own.field(n) for n in wanted])

        def rows() -> Iterator[pa.RecordBatch]:
            fs, path = locate_file(self._io, file.path)
            with open_parquet(path, fs) as parquet:
                physical = parquet.schema_arrow
                binding = self._file_columns.binding(physical, wanted)
                there = [physical.names[at] for at in binding.read]
                # Of a file that has none of them, any column says how many rows there are.
                for batch in parquet.iter_batches(_BATCH_ROWS, columns=there or physical.names[:1]):
                    yield cast_to(schema, binding.rows(batch.select(there)))

        start = 0
        for batch in self._again(rows):
            yield start, batch
            start += batch.num_rows


def _offset_id(table: Table) -> int:
    field_id: int = table.schema().find_field(OFFSET_COLUMN).field_id
    return field_id


def _chunks(parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    for at in range(0, len(parts), _AT_ONCE):
        yield parts[at : at + _AT_ONCE]
