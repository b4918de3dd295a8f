"""Rows of data files by position: where offsets stand, and which rows are deleted.

Lakehead's files are sorted by ``__offset``, one tablet each, so an offset leads to a file by its bounds and to a
position by binary search, and no key is read. Files that others rewrote need not be sorted, may overlap, and may hold
an offset twice, dead and live: every position of an offset counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakehead.iceberg.columns import column_name
from lakehead.iceberg.file_io import FILES_AT_ONCE, lake_files, locate_file
from lakehead.lake.lake_table import LakeFile
from lakehead.log.netchange import NO_OFFSETS, Mask, Offsets, between, contains, union
from lakehead.types import OFFSET_COLUMN

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile

_KNOWN_MAX = 4096
_known: dict[str, tuple[tuple[int, int] | None, int]] = {}
"""Offsets of files whose manifests do not tell; files do not change."""
_known_lock = threading.Lock()


def offset_bounds(file: DataFile, field_id: int) -> tuple[int, int] | None:
    """Least and greatest ``__offset`` of a data file; None when its manifest does not say."""
    lower, upper = (file.lower_bounds or {}).get(field_id), (file.upper_bounds or {}).get(field_id)
    if lower is None or upper is None:
        return None
    return int.from_bytes(lower, "little", signed=True), int.from_bytes(upper, "little", signed=True)


def with_offsets(io: FileIO, files: Iterable[LakeFile], field_id: int) -> list[LakeFile]:
    """The files with bounds of their offsets, which engines may leave out of manifests."""

    def known(file: LakeFile) -> LakeFile:
        if file.null_offsets == file.record_count or (file.offsets is not None and file.null_offsets is not None):
            return file
        with _known_lock:
            found = _known.get(file.path)
        if found is None:
            found = offset_statistics(io, file.path, field_id)
            with _known_lock:
                while len(_known) >= _KNOWN_MAX:
                    del _known[next(iter(_known))]
                _known[file.path] = found
        return replace(file, offsets=found[0], null_offsets=found[1])

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return list(pool.map(known, files))


def offset_statistics(io: FileIO, path: str, field_id: int) -> tuple[tuple[int, int] | None, int]:
    """Least and greatest ``__offset`` of a data file (None for none), and how many rows have none, from its footer, or
    from the column where that does not say."""
    fs, inner = locate_file(io, path)
    with lake_files(path), pq.ParquetFile(inner, filesystem=fs) as file:
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


def find_offsets(io: FileIO, path: str, wanted: Offsets, field_id: int) -> tuple[Offsets, Offsets]:
    """Positions in a data file, sorted, of the rows whose offset is in ``wanted`` (sorted), and their offsets.

    Args:
        field_id: of ``__offset``, here and below; names in files are their writers' choice.
    """
    positions, values = [], []
    for start, offsets, valid in iterate_offsets(io, path, field_id, within=wanted):
        at = _positions_of(offsets, valid, wanted)
        positions.append(at + start)
        values.append(offsets[at])
    if not positions:
        return NO_OFFSETS, NO_OFFSETS
    return np.concatenate(positions), np.concatenate(values)


def iterate_offsets(
    io: FileIO, path: str, field_id: int, *, within: Offsets | None = None
) -> Iterator[tuple[int, Offsets, Mask | None]]:
    """The ``__offset`` column of a data file, a row group at a time.

    Args:
        within: skips row groups whose bounds hold none of these (sorted).

    Yields:
        Position of the group's first row, offsets, and which of them are not null (None: all; null ones read -1).
        Nothing for a file without the column.
    """
    fs, inner = locate_file(io, path)
    with lake_files(path), pq.ParquetFile(inner, filesystem=fs) as file:
        name = column_name(file.schema_arrow, field_id, OFFSET_COLUMN)
        if name is None:
            return
        leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path == name)
        start = 0
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            s = metadata.column(leaf).statistics
            skip = within is not None and s is not None and s.has_min_max and not len(between(within, s.min, s.max + 1))
            if not skip:
                values = file.read_row_group(group, columns=[name]).column(0).combine_chunks()
                valid = values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None
                yield start, pc.fill_null(values, -1).to_numpy(), valid
            start += metadata.num_rows


def _positions_of(offsets: Offsets, valid: Mask | None, wanted: Offsets) -> Offsets:
    if valid is None and len(offsets) > len(wanted) and bool((offsets[1:] > offsets[:-1]).all()):
        at = np.searchsorted(offsets, wanted)
        inside = at < len(offsets)
        at, sought = at[inside], wanted[inside]
        return at[offsets[at] == sought]
    hit = contains(wanted, offsets)
    return np.flatnonzero(hit if valid is None else hit & valid)


def deleted_positions(io: FileIO, data_path: str, delete_files: Sequence[str]) -> Offsets:
    """Positions of a data file that position-delete files delete; sorted, each once."""
    if not delete_files:
        return NO_OFFSETS
    target = locate_file(io, data_path)[1]
    parts = []
    for path in delete_files:
        fs, inner = locate_file(io, path)
        with lake_files(path), pq.ParquetFile(inner, filesystem=fs, read_dictionary=["file_path"]) as file:
            rows = file.read(columns=["file_path", "pos"]).combine_chunks()
        paths = rows.column("file_path").combine_chunks()
        # Writers spell addresses differently (file:/x, file:///x): compare what they lead to.
        same = [locate_file(io, p.as_py())[1] == target for p in paths.dictionary]
        if all(same):
            parts.append(rows.column("pos").to_numpy())
        else:
            codes = paths.indices.to_numpy()
            parts.append(rows.column("pos").to_numpy()[np.array(same, np.bool_)[codes]])
    return union(*parts)


def offsets_at(io: FileIO, path: str, record_count: int, positions: Offsets, field_id: int) -> Offsets | None:
    """Offsets of the rows at these positions (sorted); None where offsets do not tell the file's rows apart: one is
    null, they do not strictly ascend, or the file does not have ``record_count`` rows."""
    parts: list[Offsets] = []
    last, rows = -1, 0
    for start, offsets, valid in iterate_offsets(io, path, field_id):
        rows += len(offsets)
        if not len(offsets):
            continue
        if valid is not None or offsets[0] <= last or not bool((offsets[1:] > offsets[:-1]).all()):
            return None
        last = int(offsets[-1])
        parts.append(offsets[between(positions, start, start + len(offsets)) - start])
    return union(*parts) if rows == record_count else None
