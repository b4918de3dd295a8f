"""Marks: what a tiering commit says about itself, and so what the lake holds.

Each Lakehead commit writes its table id, epoch, round id and end offsets into the summary of its lake snapshot, and the
same, with the snapshot's id and sequence number, as a table property in the same transaction. The mark of the nearest
marked ancestor of a lake snapshot says which offsets that snapshot holds. The property stands in for it only once
expiry has removed that ancestor.

Pure, over `LakeVersion`: what one metadata file says, whoever keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lakehead.errors import LakeStateError, SnapshotNotFoundError
from lakehead.types import Epoch, TabletKey

TABLE_ID = "lakehead.table-id"
EPOCH = "lakehead.epoch"
ROUND_ID = "lakehead.round-id"
OFFSETS = "lakehead.offsets"
ROWS = "lakehead.rows"
OVERWRITTEN = "lakehead.overwritten"
MARK = "lakehead.mark"
"""Table property: the newest mark as JSON."""
OWNER = "lakehead.owner"
"""Table property: the incarnation that may commit; one of the folder that the table belongs to."""
INCARNATION = "lakehead.incarnation"
"""Table property, and in each snapshot's summary: the incarnation whose log a commit tiered."""

CLEANUP = "lakehead.cleanup"
"""Of the newest orphan clean-up: table property, and summary entry of the snapshot that announced it."""

COLLECTED = "gc.enabled"
"""Table property of Iceberg's: not true where other tables may share the files."""

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading such a text raises that others have written."""


@dataclass(frozen=True)
class LakeMark:
    """What one Lakehead commit left in the lake.

    Attributes:
        snapshot_id: lake snapshot that the commit made.
        table_id: id of the table whose rows they are.
        epoch: owner number of the tiering job.
        round_id: id of the round, unique for ever.
        offsets: exclusive end of what the lake holds, per tablet; tablets never tiered are missing.
        sequence_number: place of the snapshot in the order of the table's commits; None when not known.
        rows: live rows that the commit leaves, per tablet; None when it does not say.
        overwritten: of tablets of a log table whose partition was overwritten, the offset below which the commit leaves
            no rows; tablets where it never was are missing.
    """

    snapshot_id: int
    table_id: str
    epoch: Epoch
    round_id: str
    offsets: Mapping[TabletKey, int]
    sequence_number: int | None = None
    rows: Mapping[TabletKey, int] | None = None
    overwritten: Mapping[TabletKey, int] = field(default_factory=dict)

    def held(self, overwritten: Mapping[TabletKey, int]) -> dict[TabletKey, int]:
        """The offsets; of tablets that have no rows below these others any more, which the lake has yet to follow, no
        more than those."""
        behind = {t: before for t, before in overwritten.items() if before > self.overwritten.get(t, 0)}
        return {tablet: min(end, behind.get(tablet, end)) for tablet, end in self.offsets.items()}

    def to_summary(self) -> dict[str, str]:
        """The entries of the snapshot summary."""
        return {
            TABLE_ID: self.table_id,
            EPOCH: str(self.epoch),
            ROUND_ID: self.round_id,
            OFFSETS: _to_json(self.offsets),
            **({} if self.rows is None else {ROWS: _to_json(self.rows)}),
            **({OVERWRITTEN: _to_json(self.overwritten)} if self.overwritten else {}),
        }

    def to_properties(self) -> dict[str, str]:
        """The table property that outlives the snapshot."""
        place = {"snapshot-id": self.snapshot_id, "sequence-number": self.sequence_number}
        return {MARK: json.dumps({**place, **self.to_summary()})}


@dataclass(frozen=True)
class LakeSnapshot:
    """A lake snapshot as its table lists it.

    Attributes:
        parent_id: the snapshot it was made from; None for the first, and where expiry has erased it.
        sequence_number: its place in the order of the table's commits, from 1.
        summary: its own entries, marks among them.
        committed_us: when it was made, by the clock of who made it; microseconds since 1970.
        records: rows of its data files, those that were deleted too; None when it does not say.
    """

    snapshot_id: int
    parent_id: int | None
    sequence_number: int
    summary: Mapping[str, str]
    committed_us: int = 0
    records: int | None = None

    @property
    def foreign(self) -> bool:
        """Whether another engine made it."""
        return OFFSETS not in self.summary and CLEANUP not in self.summary

    @property
    def mark(self) -> LakeMark | None:
        """The mark that tiering left; None in snapshots of others.

        Raises:
            LakeStateError: it cannot be read.
        """
        if OFFSETS not in self.summary:
            return None
        try:
            return _mark(self.snapshot_id, self.sequence_number, self.summary)
        except UNREADABLE as e:
            raise LakeStateError(
                f"what lake snapshot {self.snapshot_id} says of tiering cannot be read ({e!r}): roll the lake table"
                " back to its parent, or restore its metadata",
                snapshot=self.snapshot_id,
            ) from e


@dataclass(frozen=True)
class LakeVersion:
    """What a lake table is between two changes of it.

    Attributes:
        name: the table's, for messages.
        table_uuid: tells it from a table that was dropped and made anew under its name.
        current_id: the current snapshot; None while there is none.
        snapshots: those listed, by id.
        properties: the table's.
        state: names it where two that differ in nothing else are two, and a commit lands on one of them.
        handle: the catalog's own form of it.
    """

    name: str
    table_uuid: str
    current_id: int | None
    snapshots: Mapping[int, LakeSnapshot]
    properties: Mapping[str, str]
    state: str = ""
    handle: Any = field(default=None, repr=False, compare=False)

    @property
    def stored_mark(self) -> LakeMark | None:
        """The newest mark, as the table property tells it.

        Raises:
            LakeStateError: that cannot be read.
        """
        text = self.properties.get(MARK)
        if text is None:
            return None
        try:
            values: dict[str, Any] = json.loads(text)
            number = values.get("sequence-number")
            return _mark(int(values["snapshot-id"]), None if number is None else int(number), values)
        except UNREADABLE as e:
            raise unreadable_property(self.name, MARK, e) from e

    def lineage(self, snapshot_id: int | None = None) -> Iterator[LakeSnapshot]:
        """A snapshot, None for the current one, and its listed ancestors, newest first."""
        at = self.current_id if snapshot_id is None else snapshot_id
        while at is not None and (snapshot := self.snapshots.get(at)) is not None:
            yield snapshot
            at = snapshot.parent_id


def unreadable_property(table: str, key: str, e: BaseException) -> LakeStateError:
    """The error for a property that Lakehead keeps in a lake table, which someone else has written."""
    lines = [line.strip() for line in repr(e).splitlines()]
    said = " ".join(line for line in lines if not line.startswith("For further information"))  # as pydantic adds
    return LakeStateError(
        f"property {key!r} of lake table {table} cannot be read ({said}), so someone else has set it: set it to what"
        " it is in the newest metadata file of the table in which it can be",
        table=table,
        name=key,
    )


def mark_of(version: LakeVersion, snapshot_id: int | None = None) -> LakeMark | None:
    """The mark that decides what a lake snapshot (the current one when None) holds; None before the first round.

    Raises:
        SnapshotNotFoundError: the lake snapshot is not listed.
        LakeStateError: the table was rolled back or replaced, or the deciding mark can no longer be known.
    """
    name = version.name
    if snapshot_id is not None and snapshot_id not in version.snapshots:
        raise SnapshotNotFoundError(
            f"lake table {name} has no snapshot {snapshot_id}: it never had, or it has expired",
            table=name,
            snapshot=snapshot_id,
        )
    stored = version.stored_mark
    oldest: LakeSnapshot | None = None
    mark: LakeMark | None = None
    for oldest in version.lineage(snapshot_id):
        if (mark := oldest.mark) is not None:
            break
    if mark is not None and stored is not None and mark.snapshot_id == stored.snapshot_id:
        return mark  # as nearly always: the rest of the lineage says no more
    current = {s.snapshot_id for s in version.lineage()}
    listed_aside = stored is not None and stored.snapshot_id in version.snapshots.keys() - current
    if snapshot_id is None and stored is not None and listed_aside:
        raise _rolled_back(name, stored, surely=mark is not None or not _comes_after(oldest, stored))
    if mark is not None:
        return mark
    if stored is None or (snapshot_id is not None and not _parent_expired(oldest)):
        return None
    # The property tells of the newest commit: an older snapshot, off the current lineage, it says nothing about.
    start = version.current_id if snapshot_id is None else snapshot_id
    if not _parent_expired(oldest) or (start is not None and start not in current):
        raise LakeStateError(
            f"lake table {name}: which offsets snapshot {start} holds cannot be known;"
            f" it is older than what tiering wrote last (snapshot {stored.snapshot_id}), or the snapshots between have"
            " expired",
            table=name,
            snapshot=stored.snapshot_id,
        )
    if not _comes_after(oldest, stored):
        raise _rolled_back(name, stored, surely=True)
    return stored


def _comes_after(oldest: LakeSnapshot | None, stored: LakeMark) -> bool:
    """Whether the stored mark's snapshot may be an ancestor that is no longer listed: all of those are older."""
    if oldest is None or not _parent_expired(oldest):
        return False
    return stored.sequence_number is None or oldest.sequence_number > stored.sequence_number


def _rolled_back(name: str, stored: LakeMark, *, surely: bool) -> LakeStateError:
    found, way_out = "was rolled back behind", "restore it, or drop and create the table again"
    if not surely:
        # A tag, say, kept the snapshot when those after it expired.
        found = "was perhaps rolled back, because expiry has cut its history after"
        way_out = f"if it was, restore it; if it surely was not, expire snapshot {stored.snapshot_id} too"
    return LakeStateError(
        f"lake table {name} {found} snapshot {stored.snapshot_id}, which tiering wrote: {way_out}",
        table=name,
        snapshot=stored.snapshot_id,
    )


def find_round(version: LakeVersion, round_id: str) -> LakeMark | None:
    """The mark of a round that landed, as long as its snapshot is listed or no later round has landed.

    Raises:
        LakeStateError: it landed, and the table was rolled back since.
    """
    for snapshot in version.lineage():
        if snapshot.summary.get(ROUND_ID) == round_id:
            return snapshot.mark
    stored = version.stored_mark
    if stored is None or stored.round_id != round_id:
        return None
    mark = mark_of(version)
    return mark if mark is not None and mark.round_id == round_id else None


def descends_from(version: LakeVersion, snapshot_id: int | None, *, untouched: bool = False) -> bool:
    """Whether the current lake snapshot surely came from that one (None: from an empty table), by listed parents; with
    ``untouched`` by none that another engine made."""
    oldest = None
    for oldest in version.lineage():
        if oldest.snapshot_id == snapshot_id:
            return True
        if untouched and oldest.foreign:
            return False
    return snapshot_id is None and not _parent_expired(oldest)


def next_epoch(version: LakeVersion) -> Epoch:
    """The epoch with which a new tiering job fences those before it."""
    mark = mark_of(version)
    return mark.epoch + 1 if mark else 1


def _parent_expired(oldest: LakeSnapshot | None) -> bool:
    # PyIceberg's expiry erases the parent's id from its children, so a missing parent does not mean the first snapshot.
    return oldest is not None and (oldest.parent_id is not None or oldest.sequence_number > 1)


def _mark(snapshot_id: int, sequence_number: int | None, values: Mapping[str, str]) -> LakeMark:
    offsets = _from_json(values[OFFSETS])
    rows = _from_json(values[ROWS]) if ROWS in values else None
    epoch, overwritten = int(values[EPOCH]), _from_json(values.get(OVERWRITTEN, "{}"))
    return LakeMark(snapshot_id, values[TABLE_ID], epoch, values[ROUND_ID], offsets, sequence_number, rows, overwritten)


def _from_json(text: str) -> dict[TabletKey, int]:
    return {TabletKey.parse(k): int(v) for k, v in json.loads(text).items()}


def _to_json(numbers: Mapping[TabletKey, int]) -> str:
    return json.dumps({str(k): v for k, v in sorted(numbers.items())}, separators=(",", ":"))
