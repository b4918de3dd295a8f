"""Rows of data files by position: where offsets stand, and which rows are deleted.

Lakehead's files are sorted by ``__offset``, one tablet each, so an offset leads to a file by its bounds and to a
position by binary search, and no key is read. Files that others rewrote need not be sorted, may overlap, and may hold
an offset twice, dead and live: every position of an offset counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakehead.lake.lake_table import Hit, LakeFile, LakeTable
from lakehead.lake.marks import LakeVersion
from lakehead.log.netchange import NO_OFFSETS, Mask, Offsets, between, contains, union
from lakehead.types import OFFSET_COLUMN, TabletKey

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile


def locate(lake: LakeTable, version: LakeVersion, offsets: Mapping[TabletKey, Offsets]) -> tuple[list[Hit], int]:
    """Find rows by (tablet, offset) in a version's current snapshot; deleted rows are found too.

    Args:
        offsets: sorted offsets per tablet.

    Returns:
        One hit per data file with any of them, and how many of the offsets were found.

    Raises:
        LakeStateError: a data file belongs to no tablet.
        LakeFileMissingError: a data file is gone.
    """
    from lakehead.lake.tablets import require_tablet

    if not any(map(len, offsets.values())):
        return [], 0
    candidates: list[tuple[LakeFile, Offsets]] = []
    for file in lake.files(version):
        part = offsets.get(require_tablet(file.tablet, file.path, version.name), NO_OFFSETS)
        if file.offsets is not None:
            part = between(part, file.offsets[0], file.offsets[1] + 1)
        if len(part):
            candidates.append((file, part))
    hits: list[Hit] = []
    found: dict[TabletKey | None, list[Offsets]] = {}
    for (file, _), (positions, values) in zip(candidates, lake.find_offsets(candidates), strict=True):
        if len(positions):
            hits.append(Hit(file, positions))
            found.setdefault(file.tablet, []).append(values)
    return hits, sum(len(union(*values)) for values in found.values())


def offset_bounds(file: DataFile, field_id: int) -> tuple[int, int] | None:
    """Least and greatest ``__offset`` of a data file; None when its manifest does not say."""
    lower, upper = (file.lower_bounds or {}).get(field_id), (file.upper_bounds or {}).get(field_id)
    if lower is None or upper is None:
        return None
    return int.from_bytes(lower, "little", signed=True), int.from_bytes(upper, "little", signed=True)


def find_offsets(io: FileIO, path: str, wanted: Offsets) -> tuple[Offsets, Offsets]:
    """Positions in a data file, sorted, of the rows whose offset is in ``wanted`` (sorted), and their offsets."""
    positions, values = [], []
    for start, offsets, valid in iterate_offsets(io, path, within=wanted):
        at = _positions_of(offsets, valid, wanted)
        positions.append(at + start)
        values.append(offsets[at])
    if not positions:
        return NO_OFFSETS, NO_OFFSETS
    return np.concatenate(positions), np.concatenate(values)


def iterate_offsets(
    io: FileIO, path: str, *, within: Offsets | None = None
) -> Iterator[tuple[int, Offsets, Mask | None]]:
    """The ``__offset`` column of a data file, a row group at a time.

    Args:
        within: skips row groups whose bounds hold none of these (sorted).

    Yields:
        Position of the group's first row, offsets, and which of them are not null (None: all; null ones read -1).
        Nothing for a file without the column.
    """
    from lakehead.lake.file_io import lake_files, locate_file

    fs, inner = locate_file(io, path)
    with lake_files(path), pq.ParquetFile(inner, filesystem=fs) as file:
        column = file.schema_arrow.get_field_index(OFFSET_COLUMN)
        if column < 0:
            return
        leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path == OFFSET_COLUMN)
        start = 0
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            s = metadata.column(leaf).statistics
            skip = within is not None and s is not None and s.has_min_max and not len(between(within, s.min, s.max + 1))
            if not skip:
                values = file.read_row_group(group, columns=[OFFSET_COLUMN]).column(0).combine_chunks()
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
    from lakehead.lake.file_io import lake_files, locate_file

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


def offsets_at(io: FileIO, path: str, record_count: int, positions: Offsets) -> Offsets | None:
    """Offsets of the rows at these positions (sorted); None where offsets do not tell the file's rows apart: one is
    null, they do not strictly ascend, or the file does not have ``record_count`` rows."""
    parts: list[Offsets] = []
    last, rows = -1, 0
    for start, offsets, valid in iterate_offsets(io, path):
        rows += len(offsets)
        if not len(offsets):
            continue
        if valid is not None or offsets[0] <= last or not bool((offsets[1:] > offsets[:-1]).all()):
            return None
        last = int(offsets[-1])
        parts.append(offsets[between(positions, start, start + len(offsets)) - start])
    return union(*parts) if rows == record_count else None
