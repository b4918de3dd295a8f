"""The commit of a tiering round: position deletes for older rows, and one lake snapshot with everything.

Whatever happens, a round is in the lake once or not at all, and the caller learns which:

    refused (fenced, marks moved, wrong table)  nothing landed, the round's files are removed, typed error
    files moved under our deletes               deletes are located and written anew, a few times
    any other failure                           the lake is read again; its marks tell
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata

from lakehead.errors import (
    CommitConflictError,
    CommitUnknownError,
    LakeheadError,
    LakeStateError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.lake.files import LakeWriteSpec, WrittenFile, discard_files, write_position_deletes
from lakehead.lake.marks import TABLE_ID, LakeMark, find_round, has_foreign_commits, mark_of
from lakehead.lake.positions import Hit, locate
from lakehead.lake.round_plan import RoundPlan
from lakehead.lake.rowdelta import Guard, RowDelta, to_data_file
from lakehead.lake.tablets import require_tablet, tablet_of
from lakehead.types import OFFSET_COLUMN, TabletKey

_ATTEMPTS = 4
_THREADS = 4


@dataclass(frozen=True)
class CommitResult:
    """What a round did.

    Attributes:
        snapshot_id: the lake snapshot; None when there was nothing to tier.
        rows: rows added.
        deletes: older rows deleted.
        files: data files added.
        offsets: what the lake holds, per tablet.
    """

    snapshot_id: int | None
    rows: int
    deletes: int
    files: int
    offsets: Mapping[TabletKey, int]


class _LandedError(Exception):
    """The round is in the lake already."""

    def __init__(self, mark: LakeMark) -> None:
        super().__init__(mark)
        self.mark = mark


class _MovedError(Exception):
    """Data files changed since the deletes were located."""


def commit_round(table: Table, plan: RoundPlan, files: Sequence[WrittenFile], spec: LakeWriteSpec) -> CommitResult:
    """Commit a resolved plan and the files its tasks wrote; a repeat of a round that landed returns its outcome.

    A range whose rows are all gone again still commits, so that the mark advances. After any error but
    `CommitUnknownError` the round's files are removed.

    Raises:
        CommitConflictError, CommitUnknownError, TieringFencedError, LakeStateError: as `run_round`.
        UnavailableError: the catalog refused; nothing landed.
    """
    rows = sum(f.record_count for f in files)
    if not plan.ranges:
        return CommitResult(None, 0, 0, 0, plan.offsets)
    deleted = sum(map(len, plan.deletes.values()))
    try:
        for _ in range(_ATTEMPTS):
            try:
                snapshot_id = _attempt(table, plan, files, spec)
                return CommitResult(snapshot_id, rows, deleted, len(files), plan.offsets)
            except _MovedError:
                table.refresh()
        raise CommitConflictError(
            f"other engines kept changing lake table {_name(table)} while a round committed: run the round again",
            table=_name(table),
        )
    except _LandedError as e:
        _discard_unused(table, e.mark, files)
        return CommitResult(e.mark.snapshot_id, rows, deleted, len(files), e.mark.offsets)
    except CommitUnknownError:
        raise
    except Exception:
        discard_files(table.io, (f.path for f in files))
        raise


def _attempt(table: Table, plan: RoundPlan, files: Sequence[WrittenFile], spec: LakeWriteSpec) -> int:
    """One commit on the table's metadata as it is loaded now; PyIceberg repeats it on newer metadata.

    Raises:
        _LandedError, _MovedError, LakeheadError: nothing of this attempt is left, except after CommitUnknownError.
    """
    guard = _guard(plan, table)
    guard(table.metadata)
    if plan.keyed:
        _refuse_foreign_rows(table)
    hits = _locate(table, plan)
    deletes = _write_deletes(table, spec, hits)
    transaction = Transaction(table)
    mark = LakeMark(0, plan.table_id, plan.epoch, plan.round_id, plan.offsets)
    delta = RowDelta(transaction, mark.to_summary(), guard)
    sent = False
    try:
        for file in files:
            delta.append_data_file(to_data_file(file))
        for hit, file in zip(hits, deletes, strict=True):
            delta.add_deletes(to_data_file(file), hit.file)
        delta.commit()
        mark = LakeMark(delta.snapshot_id, plan.table_id, plan.epoch, plan.round_id, plan.offsets)
        transaction.set_properties(mark.to_properties())
        sent = True
        transaction.commit_transaction()
        return delta.snapshot_id
    except Exception as e:
        refused = isinstance(e, LakeheadError | ValidationException | _LandedError) or not sent
        error = e if refused else _outcome(table, plan, delta.snapshot_id, e)
        if error is None:
            return delta.snapshot_id
        if not isinstance(error, CommitUnknownError):
            delta.discard()
            discard_files(table.io, (f.path for f in deletes))
        if isinstance(error, ValidationException):
            raise _MovedError from e
        raise error from e


def _guard(plan: RoundPlan, table: Table) -> Guard:
    """Checks that metadata is exactly where the plan begins; run before each attempt."""
    name, planned = _name(table), table.metadata.current_snapshot_id

    def check(metadata: TableMetadata) -> None:
        if (landed := find_round(metadata, plan.round_id)) is not None:
            raise _LandedError(landed)
        found = metadata.properties.get(TABLE_ID)
        mark = mark_of(metadata, name=name)
        if found != plan.table_id or (mark and mark.table_id != plan.table_id):
            raise LakeStateError(
                f"lake table {name} now belongs to table id {found}, not to {plan.table_id}: it was replaced;"
                " drop and create the table again",
                table=name,
            )
        if mark and mark.epoch > plan.epoch:
            raise TieringFencedError(
                f"a tiering job with epoch {mark.epoch} has taken over table {name}; stop this one, whose epoch is"
                f" {plan.epoch}",
                table=name,
                epoch=plan.epoch,
                newer=mark.epoch,
            )
        if dict(mark.offsets if mark else {}) != dict(plan.base):
            raise CommitConflictError(
                f"another round has committed to lake table {name} since this one was planned: run the round again",
                table=name,
            )
        if plan.keyed and metadata.current_snapshot_id != planned:
            raise ValidationException("rows may have moved since their positions were looked up")

    return check


def _locate(table: Table, plan: RoundPlan) -> list[Hit]:
    hits, found = locate(table, plan.deletes)
    wanted = sum(map(len, plan.deletes.values()))
    if found < wanted and not has_foreign_commits(table.metadata):
        raise LakeStateError(
            f"lake table {_name(table)} lacks {wanted - found} of {wanted} rows that the log replaces, and nobody else"
            " wrote to it: lake and log do not belong together; restore one of them",
            table=_name(table),
        )
    return hits


def _write_deletes(table: Table, spec: LakeWriteSpec, hits: Sequence[Hit]) -> list[WrittenFile]:
    def write(hit: Hit) -> WrittenFile:
        f = hit.file
        partition = tuple(f.partition[i] for i in range(len(f.partition)))
        return write_position_deletes(spec, f.file_path, hit.positions, spec_id=f.spec_id, partition=partition)

    written: list[WrittenFile] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(write, h) for h in hits]
        try:
            written = [f.result() for f in futures]
        except Exception:
            done = [f.result() for f in futures if f.exception() is None]
            discard_files(table.io, (f.path for f in done))
            raise
    return written


def _refuse_foreign_rows(table: Table) -> None:
    """Rows of a primary-key table that others added have no offset, so no later write could replace them.

    Raises:
        LakeStateError: there are such rows.
    """
    if not has_foreign_commits(table.metadata):
        return
    schema, specs, name = table.schema(), table.specs(), _name(table)
    offset_id = schema.find_field(OFFSET_COLUMN).field_id
    for task in table.scan().plan_files():
        f: DataFile = task.file
        tablet = tablet_of(f.partition, specs[f.spec_id], schema)
        if (f.null_value_counts or {}).get(offset_id, 0):
            tablet = None
        require_tablet(tablet, f.file_path, name)


def _outcome(table: Table, plan: RoundPlan, snapshot_id: int, cause: Exception) -> Exception | None:
    """What a failed commit call came to, read from the lake: None when it landed, else the error to raise."""
    from pyiceberg.catalog.sql import SqlCatalog

    name = _name(table)
    try:
        table.refresh()
    except Exception as e:
        return CommitUnknownError(
            f"a round's commit to lake table {name} failed ({cause}), and reading the lake failed too ({e}):"
            " run the round again once the catalog answers",
            table=name,
            round_id=plan.round_id,
        )
    landed = find_round(table.metadata, plan.round_id)
    if landed is not None:
        return None if landed.snapshot_id == snapshot_id else _LandedError(landed)
    if isinstance(cause, CommitFailedException):
        return CommitConflictError(
            f"other commits to lake table {name} came first each time: run the round again ({cause})", table=name
        )
    if isinstance(table.catalog, SqlCatalog) and table.catalog.engine.dialect.name == "sqlite":
        # No server can still be at work on it: what did not land by now never will.
        return UnavailableError(f"lake table {name} could not be committed to: {cause}", table=name)
    return CommitUnknownError(
        f"whether a round's commit to lake table {name} will land is not known ({cause}): run the round again",
        table=name,
        round_id=plan.round_id,
    )


def _discard_unused(table: Table, landed: LakeMark, files: Sequence[WrittenFile]) -> None:
    """Remove the files of a repeat, except those that the commit which landed has in the lake."""
    table.refresh()
    snapshot = table.metadata.snapshot_by_id(landed.snapshot_id)
    if snapshot is None:
        return
    used = {
        e.data_file.file_path
        for m in snapshot.manifests(table.io)
        if m.added_snapshot_id == landed.snapshot_id
        for e in m.fetch_manifest_entry(table.io)
    }
    discard_files(table.io, (f.path for f in files if f.path not in used))


def _name(table: Table) -> str:
    return ".".join(table.name())
