"""Where the rows stand that a change deletes, for formats that delete rows by their place in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lakehead.errors import LakeStateError
from lakehead.lake.lake_table import LakeFile
from lakehead.lake.superseded import require_tablet
from lakehead.log.netchange import NO_OFFSETS, Offsets, between, union
from lakehead.types import TabletKey


@dataclass(frozen=True, eq=False)
class Hit:
    """Rows of one data file, by position; sorted, each once."""

    file: LakeFile
    positions: Offsets


def find_deleted_rows(
    files: Sequence[LakeFile],
    deleted: Mapping[TabletKey, Offsets],
    find: Callable[[Sequence[tuple[LakeFile, Offsets]]], list[tuple[Offsets, Offsets]]],
    *,
    name: str,
) -> list[Hit]:
    """One hit per data file with rows of these offsets (sorted, per tablet).

    Args:
        find: per file, where rows with these offsets stand, and their offsets; deleted rows are found too.
        name: the lake table's, for messages.

    Raises:
        LakeStateError: the files lack some, or one belongs to no tablet.
        LakeFileMissingError: a data file is gone.
    """
    wanted = sum(map(len, deleted.values()))
    if not wanted:
        return []
    candidates: list[tuple[LakeFile, Offsets]] = []
    for file in files:
        part = deleted.get(require_tablet(file.tablet, file.path, name), NO_OFFSETS)
        if file.offsets is not None:
            part = between(part, file.offsets[0], file.offsets[1] + 1)
        if len(part):
            candidates.append((file, part))
    hits: list[Hit] = []
    found: dict[TabletKey | None, list[Offsets]] = {}
    for (file, _), (positions, values) in zip(candidates, find(candidates), strict=True):
        if len(positions):
            hits.append(Hit(file, positions))
            found.setdefault(file.tablet, []).append(values)
    lacking = wanted - sum(len(union(*values)) for values in found.values())
    if lacking:
        raise LakeStateError(
            f"lake table {name} lacks {lacking} of {wanted} rows that the log replaces: lake and log do not belong"
            " together; restore one of them",
            table=name,
        )
    return hits
