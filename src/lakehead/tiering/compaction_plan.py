"""Which lake files are to be written anew, as plain values: small neighbours, and files with many deleted rows.

Pure. What is small and new is joined with what is a little older and not larger, as log-structured trees do, so that a
row is written a few times at most, however many rounds there are; a file that has half its target size is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lakehead.lake.lake_table import LakeFile
from lakehead.types import TabletKey

NEIGHBOURS_MIN = 4
"""So many small files are joined, not fewer."""
TINY_BYTES = 1 << 20
"""Files up to this size are joined with any neighbours."""
DELETED_SHARE = 0.2
"""Share of a file's rows that may be deleted."""
DELETE_FILES_MAX = 8
"""Delete files that a small data file may have."""
BYTES_PER_DELETE_FILE = 2 << 20
"""For so many of its bytes a data file may have one more."""
TURN_BYTES = 128 << 20
"""What one commit writes anew, at most, unless one group is larger."""


@dataclass(frozen=True)
class Rewrite:
    """Files of one tablet, neighbours in offset order, whose live rows go to new files."""

    tablet: TabletKey
    files: tuple[LakeFile, ...]

    @property
    def size(self) -> int:
        """Bytes that are read."""
        return sum(f.size for f in self.files)


def plan_rewrites(
    files: Sequence[LakeFile], live: Callable[[LakeFile], int], *, target_bytes: int, bytes_max: int = TURN_BYTES
) -> tuple[list[Rewrite], bool]:
    """What one commit should write anew.

    Args:
        files: of one snapshot, in tablet and offset order.
        live: counts the rows of a file that are not deleted; asked of files with delete files only.

    Returns:
        Rewrites whose files are disjoint, and whether there is more to do than fits.
    """
    wanted: list[Rewrite] = []
    for tablet, of_tablet in groupby(filter(_is_ours, files), key=lambda f: f.tablet):
        assert tablet is not None
        wanted += (Rewrite(tablet, group) for group in _groups(list(of_tablet), live, target_bytes))
    # Many small files first: they cost every reader most.
    wanted.sort(key=lambda r: (-len(r.files), r.size))
    taken: list[Rewrite] = []
    for rewrite in wanted:
        if not taken or sum(r.size for r in taken) + rewrite.size <= bytes_max:
            taken.append(rewrite)
    return taken, len(taken) < len(wanted)


def _is_ours(file: LakeFile) -> bool:
    """Whether tiering, or a rewrite of what it wrote, made it: all rows have an offset, and a place in their tablet."""
    return file.tablet is not None and file.offsets is not None and file.null_offsets == 0


def _groups(
    files: list[LakeFile], live: Callable[[LakeFile], int], target_bytes: int
) -> Iterator[tuple[LakeFile, ...]]:
    """Of one tablet's files, newest first, those to join and those to clear of deleted rows."""
    left = files
    while left:
        group = [left.pop()]
        size = group[0].size
        while left and _joins(left[-1], group[-1], size, target_bytes):
            group.append(left.pop())
            size += group[-1].size
        if len(group) >= NEIGHBOURS_MIN:
            yield tuple(reversed(group))
        else:
            yield from ((f,) for f in group if _is_worn(f, live))


def _joins(older: LakeFile, newer: LakeFile, size: int, target_bytes: int) -> bool:
    in_order = older.offsets is not None and newer.offsets is not None and older.offsets[1] < newer.offsets[0]
    small = max(older.size, newer.size) < target_bytes // 2 and size + older.size <= target_bytes
    return in_order and small and older.size <= max(size, TINY_BYTES)


def _is_worn(file: LakeFile, live: Callable[[LakeFile], int]) -> bool:
    if not file.delete_files:
        return False
    if len(file.delete_files) > DELETE_FILES_MAX + file.size // BYTES_PER_DELETE_FILE:
        return True
    return file.record_count - live(file) >= DELETED_SHARE * file.record_count
