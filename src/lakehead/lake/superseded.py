"""Which rows of a lake file the log replaces: by offset, within the file's tablet."""

from __future__ import annotations

from lakehead.errors import LakeStateError
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.log.netchange import NO_OFFSETS, Offsets, between
from lakehead.types import TabletKey


def superseded_in(file: LakeFile, superseded: Superseded, table: str) -> Offsets:
    """The superseded offsets that the file may hold; ``table`` is named in errors.

    Raises:
        LakeStateError: the file has offsets, but its partition names no tablet.
    """
    if file.null_offsets == file.record_count:
        return NO_OFFSETS
    members = superseded.get(require_tablet(file.tablet, file.path, table), NO_OFFSETS)
    return members if file.offsets is None else between(members, file.offsets[0], file.offsets[1] + 1)


def require_tablet(tablet: TabletKey | None, path: str, table: str) -> TabletKey:
    """The tablet of a data file whose rows must have one.

    Raises:
        LakeStateError: the file's partition names no tablet.
    """
    if tablet is None:
        raise LakeStateError(
            f"lake table {table}: the rows of {path} belong to no bucket, so someone else wrote them or changed the"
            " partition spec; a primary-key table's lake may only be written by tiering: remove them or restore it",
            table=table,
            path=path,
        )
    return tablet
