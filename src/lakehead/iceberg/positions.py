"""Rows of data files by position: where offsets stand, and which rows are deleted.

Lakehead's files are sorted by ``__offset``, one tablet each, so an offset leads to a file by its bounds and to a
position by binary search, and no key is read. Files that others rewrote need not be sorted, may overlap, and may hold
an offset twice, dead and live: every position of an offset counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileType

from lakehead.env.recently_used import RecentlyUsed
from lakehead.env.threads import WorkerPool
from lakehead.iceberg.columns import column_name
from lakehead.iceberg.file_io import (
    FILES_AT_ONCE,
    FileStamp,
    damaged_file,
    file_stamps,
    lake_files,
    locate_file,
    open_parquet,
    path_of,
)
from lakehead.lake.lake_table import LakeFile, missing_file
from lakehead.log.netchange import NO_OFFSETS, Mask, Offsets, between, contains, union
from lakehead.types import OFFSET_COLUMN

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile

_statistics: RecentlyUsed[tuple[str, FileStamp], tuple[tuple[int, int] | None, int]] = RecentlyUsed(4096)
"""Offsets of files whose manifests do not tell. A name may be used again, for another file."""


def offset_bounds(file: DataFile, field_id: int) -> tuple[int, int] | None:
    """Least and greatest ``__offset`` of a data file; None when its manifest does not say."""
    lower, upper = (file.lower_bounds or {}).get(field_id), (file.upper_bounds or {}).get(field_id)
    if lower is None or upper is None:
        return None
    return int.from_bytes(lower, "little", signed=True), int.from_bytes(upper, "little", signed=True)


def with_offsets(io: FileIO, files: Iterable[LakeFile], field_id: int) -> list[LakeFile]:
    """The files with bounds of their offsets, which engines may leave out of manifests."""

    def known(file: LakeFile) -> LakeFile:
        stamp = None if stamps is None else stamps[file.path]
        found = None if stamp is None else _statistics.get((file.path, stamp))
        if found is None:
            found = offset_statistics(io, file.path, field_id)
            if stamp is not None:
                _statistics.note((file.path, stamp), found)
        return replace(file, offsets=found[0], null_offsets=found[1])

    all_files = list(files)
    untold = [
        f for f in all_files if f.null_offsets != f.record_count and (f.offsets is None or f.null_offsets is None)
    ]
    if not untold:
        return all_files
    with lake_files():
        stamps = file_stamps(io, [f.path for f in untold])
    with WorkerPool(FILES_AT_ONCE) as pool:
        told = dict(zip((f.path for f in untold), pool.map(known, untold), strict=True))
    return [told.get(f.path, f) for f in all_files]


def offset_statistics(io: FileIO, path: str, field_id: int) -> tuple[tuple[int, int] | None, int]:
    """Least and greatest ``__offset`` of a data file (None for none), and how many rows have none, from its footer, or
    from the column where that does not say."""
    fs, inner = locate_file(io, path)
    with lake_files(path), open_parquet(inner, fs) as file:
        name = column_name(file.schema_arrow, field_id, OFFSET_COLUMN)
        if name is None:
            return None, file.metadata.num_rows
        leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path == name)
        groups = [file.metadata.row_group(i).column(leaf) for i in range(file.num_row_groups)]
        said = [(s, c.num_values) for c in groups if (s := c.statistics) is not None and s.has_null_count]
        if len(said) == len(groups) and all(s.has_min_max or s.null_count == n for s, n in said):
            known = [s for s, _ in said if s.has_min_max]
            bounds = (min(s.min for s in known), max(s.max for s in known)) if known else None
            return bounds, sum(s.null_count for s, _ in said)
        values = file.read(columns=[name]).column(0)
    found = pc.min_max(values).as_py()
    return (None if found["min"] is None else (found["min"], found["max"])), values.null_count


@dataclass(frozen=True, eq=False)
class GroupOffsets:
    """The ``__offset`` column of a row group.

    Attributes:
        first: position in the file of its first row.
        values: of its rows; null ones read -1. Those that are one after the other are a range.
        valid: which are not null; None: all.
        ascending: each is greater than the one before it, and none is null.
    """

    first: int
    values: Offsets | range
    valid: Mask | None
    ascending: bool

    @staticmethod
    def of(first: int, column: pa.Array) -> GroupOffsets:
        """What a column says."""
        if column.null_count:
            return GroupOffsets(first, pc.fill_null(column, -1).to_numpy(), column.is_valid().to_numpy(False), False)
        values = column.to_numpy()
        ascending = bool((values[1:] > values[:-1]).all())
        if ascending and len(values) and values[-1] - values[0] == len(values) - 1:
            return GroupOffsets(first, range(int(values[0]), int(values[-1]) + 1), None, True)
        return GroupOffsets(first, values, None, ascending)

    @property
    def end(self) -> int:
        """Position after its last row."""
        return self.first + len(self.values)

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        values = 0 if isinstance(self.values, range) else self.values.nbytes
        return values + (0 if self.valid is None else self.valid.nbytes) + 100

    def at(self, positions: Offsets) -> Offsets:
        """The offsets of rows at these positions in the file, all of this group."""
        values = self.values
        return positions - self.first + values.start if isinstance(values, range) else values[positions - self.first]

    def positions_of(self, wanted: Offsets) -> Offsets:
        """Positions in the file, sorted, of the rows with these offsets (sorted)."""
        values = self.values
        if isinstance(values, range):
            return between(wanted, values.start, values.stop) + (self.first - values.start)
        if self.ascending and len(values) > len(wanted):
            found = np.searchsorted(values, wanted)
            inside = found < len(values)
            found, sought = found[inside], wanted[inside]
            return found[values[found] == sought] + self.first
        hit = contains(wanted, values)
        return np.flatnonzero(hit if self.valid is None else hit & self.valid) + self.first


def find_offsets(io: FileIO, path: str, wanted: Offsets, field_id: int) -> tuple[Offsets, Offsets]:
    """Positions in a data file, sorted, of the rows whose offset is in ``wanted`` (sorted), and their offsets.

    Args:
        field_id: of ``__offset``, here and below; names in files are their writers' choice.
    """
    positions, values = [], []
    for group in iterate_offsets(io, path, field_id, within=wanted):
        at = group.positions_of(wanted)
        positions.append(at)
        values.append(group.at(at))
    if not positions:
        return NO_OFFSETS, NO_OFFSETS
    return np.concatenate(positions), np.concatenate(values)


def find_positions(io: FileIO, path: str, wanted: Offsets, field_id: int) -> Offsets:
    """As `find_offsets`, the positions alone."""
    groups = iterate_offsets(io, path, field_id, within=wanted)
    return np.concatenate([NO_OFFSETS, *(group.positions_of(wanted) for group in groups)])


_Key = tuple[str, int]
"""A file's address, and the id of the field that is the offset's."""
_Bounds = tuple[int, int] | None
_bounds: RecentlyUsed[_Key, tuple[FileStamp, Sequence[tuple[int, _Bounds]]]] = RecentlyUsed(4096)
"""Of each row group, how many rows it has, and its least and greatest offset as far as the footer says."""
_groups: RecentlyUsed[tuple[_Key, FileStamp, int], GroupOffsets] = RecentlyUsed(64 << 20, lambda group: group.bytes)
"""Row groups that were read."""


def iterate_offsets(io: FileIO, path: str, field_id: int, *, within: Offsets | None = None) -> Iterator[GroupOffsets]:
    """The ``__offset`` column of a data file, a row group at a time. Files do not change: what was read last is not
    read again, once the file was seen to be there.

    Args:
        within: skips row groups whose bounds hold none of these (sorted).

    Yields:
        What is in each; nothing for a file without the column.
    """
    with lake_files(path), ExitStack() as stack:
        fs, inner = locate_file(io, path)
        there = fs.get_file_info(inner)
        if there.type is not FileType.File:
            raise missing_file(path)
        key, stamp = (path, field_id), (there.size, there.mtime_ns)

        @functools.cache
        def opened() -> pq.ParquetFile:
            return stack.enter_context(open_parquet(inner, fs))

        known_bounds = _bounds.get(key)
        if known_bounds is None or known_bounds[0] != stamp:  # a name may be used again, for another file
            known_bounds = stamp, _bounds_of_groups(opened(), field_id)
            _bounds.note(key, known_bounds)
        bounds = known_bounds[1]
        first = 0
        for number, (rows, known) in enumerate(bounds):
            if within is None or known is None or len(between(within, known[0], known[1] + 1)):
                group = _groups.get((key, stamp, number))
                if group is None:
                    name = column_name(opened().schema_arrow, field_id, OFFSET_COLUMN)
                    column = opened().read_row_group(number, columns=[name]).column(0).combine_chunks()
                    group = GroupOffsets.of(first, column)
                    _groups.note((key, stamp, number), group)
                yield group
            first += rows


def known_group_sizes(file: LakeFile, field_id: int) -> list[int] | None:
    """How many rows each row group of a data file has; None where that cannot be said without opening it, as it was
    never asked for offsets."""
    known = _bounds.get((file.path, field_id))
    sizes = [rows for rows, _ in known[1]] if known is not None and known[0][0] == file.size else []
    return sizes if sum(sizes) == file.record_count else None


def _bounds_of_groups(file: pq.ParquetFile, field_id: int) -> list[tuple[int, _Bounds]]:
    name = column_name(file.schema_arrow, field_id, OFFSET_COLUMN)
    if name is None:
        return []
    leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path == name)
    groups = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
    said = [(g.num_rows, g.column(leaf).statistics) for g in groups]
    return [(rows, (s.min, s.max) if s is not None and s.has_min_max else None) for rows, s in said]


def deleted_positions(io: FileIO, data_path: str, delete_files: Sequence[str]) -> Offsets:
    """Positions of a data file that position-delete files delete; sorted, each once."""
    if not delete_files:
        return NO_OFFSETS
    target = path_of(io, data_path)
    return union(*(_rows_deleted_by(io, path).get(target, NO_OFFSETS) for path in delete_files))


_deletes: RecentlyUsed[tuple[str, FileStamp], Mapping[str, Offsets]] = RecentlyUsed(
    64 << 20, lambda found: 200 + sum(at.nbytes + 200 for at in found.values())
)
"""By position-delete files. Each may be for many data files, and each of these have many."""


def _rows_deleted_by(io: FileIO, path: str) -> Mapping[str, Offsets]:
    """Positions that a position-delete file deletes, by where each data file lies: sorted, each once. Files do not
    change: what was read last is not read again, once the file was seen to be there."""
    with lake_files(path):
        fs, inner = locate_file(io, path)
        there = fs.get_file_info(inner)
        if there.type is not FileType.File:
            raise missing_file(path)
        key = path, (there.size, there.mtime_ns)
        found = _deletes.get(key)
        if found is None:
            found = _read_deletes(io, path, functools.partial(open_parquet, inner, fs, read_dictionary=["file_path"]))
            _deletes.note(key, found)
        return found


def _read_deletes(io: FileIO, path: str, opened: Callable[[], pq.ParquetFile]) -> Mapping[str, Offsets]:
    """What a delete file says. Rows that name no file, or no position, delete nothing, and so do those that name a file
    of a storage that is not known here: the table has none there."""
    try:
        with opened() as file:
            rows = file.read(columns=["file_path", "pos"])
        if "pos" not in rows.schema.names:
            raise KeyError("it has no column pos")
        rows = rows.drop_null().combine_chunks()
        paths = rows.column("file_path").combine_chunks().cast(pa.dictionary(pa.int32(), pa.string()))
        positions = rows.column("pos").cast(pa.int64()).to_numpy()
    except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise damaged_file(path, e) from e
    codes = paths.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(paths.dictionary) + 1))
    found: dict[str, list[Offsets]] = {}
    for code, name in enumerate(paths.dictionary.to_pylist()):
        # Writers spell addresses differently (file:/x, file:///x): what they lead to counts.
        found.setdefault(path_of(io, name), []).append(positions[order[ends[code] : ends[code + 1]]])
    return {inner: union(*parts) for inner, parts in found.items()}


def offsets_at(io: FileIO, path: str, record_count: int, positions: Offsets, field_id: int) -> Offsets | None:
    """Offsets of the rows at these positions (sorted); None where offsets do not tell the file's rows apart: one is
    null, they do not strictly ascend, or the file does not have ``record_count`` rows."""
    parts: list[Offsets] = []
    last, rows = -1, 0
    for group in iterate_offsets(io, path, field_id):
        rows += len(group.values)
        if not len(group.values):
            continue
        if not group.ascending or group.values[0] <= last:
            return None
        last = int(group.values[-1])
        parts.append(group.at(between(positions, group.first, group.end)))
    return union(*parts) if rows == record_count else None
