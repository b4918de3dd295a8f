"""How many rows of each tablet a lake snapshot holds, compared with what the newest mark says that it must.

Each mark counts the live rows that it leaves. While only tiering commits there is nothing to check; once another engine
did, its snapshot is counted, mostly from manifests: moved rows are the same number, rows that others deleted or copied
are not. Pure, but for `LakeTable.census`, which counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lakehead.errors import LakeStateError
from lakehead.lake.marks import LakeMark, LakeVersion
from lakehead.types import TabletKey


@dataclass(frozen=True)
class Census:
    """The live rows of a lake snapshot.

    Attributes:
        rows: those with an offset, per tablet; no tablet without any.
        strangers: those without: other engines added them.
        homeless: a data file with offsets that belongs to no tablet; None when there is none.
    """

    rows: Mapping[TabletKey, int]
    strangers: int = 0
    homeless: str | None = None


def changed_by_others(version: LakeVersion, snapshot_id: int | None = None) -> bool:
    """Whether another engine may have committed between a snapshot (None: the current one) and the newest mark."""
    snapshot = None
    for snapshot in version.lineage(snapshot_id):
        if snapshot.mark is not None:
            return False
        if snapshot.foreign:
            return True
    return snapshot is not None and (snapshot.parent_id is not None or snapshot.sequence_number > 1)


def check_rows(
    version: LakeVersion,
    mark: LakeMark | None,
    count: Callable[[], Census],
    *,
    keyed: bool,
    snapshot_id: int | None = None,
) -> None:
    """That a snapshot, None for the current one, holds what its mark says, whoever rewrote it.

    Args:
        count: counts it; called only when another engine may have changed it.

    Raises:
        LakeStateError: rows were deleted, copied or, in a keyed table, added; the message says what to undo.
    """
    if not changed_by_others(version, snapshot_id):
        return
    found = count()
    problem = _problem(mark, found, keyed=keyed)
    if problem is None:
        return
    undo = f"roll it back to snapshot {mark.snapshot_id}" if mark else "drop and create the table again"
    raise LakeStateError(
        f"another engine changed the rows of lake table {version.name}: {problem}. Only tiering may; {undo}, or undo"
        " the change otherwise",
        table=version.name,
        snapshot=mark.snapshot_id if mark else None,
    )


def _problem(mark: LakeMark | None, found: Census, *, keyed: bool) -> str | None:
    if found.homeless is not None:
        return f"{found.homeless} belongs to no tablet, so it was written under another partition spec"
    if keyed and found.strangers:
        return f"{found.strangers} rows have no offset, so no later write could replace them"
    known = {} if mark is None else mark.rows
    if known is None:
        return None
    for tablet in sorted({*known, *found.rows}):
        expected, there = known.get(tablet, 0), found.rows.get(tablet, 0)
        if expected != there:
            return f"tablet {tablet} has {there} rows, and tiering left {expected}"
    return None
