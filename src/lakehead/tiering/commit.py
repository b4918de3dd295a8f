"""The commit of a tiering round: files to add, rows to delete, and the mark, in one lake snapshot.

Each attempt is planned and checked on the version of the table that it lands on, and lands on no other: when anything
came between, everything is decided again. What an attempt came to is never guessed. The answer "landed" is believed;
after any other the lake is read, and the marks tell. Trying again is safe even while an earlier attempt may still be on
its way, because both begin at the same version and only one can land on it.

    landed, or found landed                      the outcome of the round
    the table moved on, a catalog does not answer  decide again, a few times
    fenced, marks moved, wrong table             typed error
    still not known                              `CommitUnknownError`; all files stay

Files are removed once it is proven that no snapshot names them and none ever will. All else is litter at worst, which
orphan clean-up finds.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from lakehead.env.clock import Clock
from lakehead.errors import (
    CommitConflictError,
    CommitUnknownError,
    LakeFileMissingError,
    LakeStateError,
    StorageError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.lake.census import check_rows
from lakehead.lake.lake_table import (
    CommitAnswer,
    LakeChange,
    LakeFile,
    LakeTable,
    Outcome,
    StagedCommit,
    WrittenFile,
    files_of,
)
from lakehead.lake.marks import (
    CLEANUP,
    TABLE_ID,
    LakeMark,
    LakeVersion,
    descends_from,
    find_round,
    mark_of,
)
from lakehead.log.netchange import NO_OFFSETS, Offsets, contains, union
from lakehead.predicate.read_spec import ReadSpec
from lakehead.tiering.round_plan import RoundPlan
from lakehead.types import OFFSET_COLUMN, TabletKey

CommitLock: TypeAlias = contextlib.AbstractContextManager[object]
"""A lock, for who runs rounds and maintenance of one table side by side."""
NO_LOCK: CommitLock = contextlib.nullcontext()
PAUSES_S = (0.0, 0.0, 0.1, 0.4, 1.6)
"""Seconds to wait before each attempt."""


@dataclass(frozen=True)
class CommitResult:
    """What a round did.

    Attributes:
        snapshot_id: the lake snapshot; None when there was nothing to tier.
        rows: rows added.
        deletes: older rows deleted.
        files: data files added.
        offsets: what the lake holds, per tablet.
        end: how far the lake has followed the log, as the server counts it in `FoundTable.end`.
        more: whether the log held more when the round was planned.
        records: of the log that were moved.
        bytes: of the files added.
        seconds: of the round's phases, in their order.
        cpu_seconds: of the threads and processes that worked on it, as far as they tell.
    """

    snapshot_id: int | None
    rows: int
    deletes: int
    files: int
    offsets: Mapping[TabletKey, int]
    more: bool = False
    records: int = 0
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    end: int = 0


def commit_round(
    lake: LakeTable, plan: RoundPlan, files: Sequence[WrittenFile], *, clock: Clock, commit_lock: CommitLock = NO_LOCK
) -> CommitResult:
    """Commit a resolved plan and the files its tasks wrote; a repeat of a round that landed returns its outcome.

    A range whose rows are all gone again still commits, so that the mark advances. After any error but
    `CommitUnknownError` the round's files are removed, if it is certain that nobody needs them.

    Args:
        commit_lock: held from the look at the lake to the commit. Who compacts files of many rounds looks longer than
            rounds are apart, and would never be in time.

    Raises:
        CommitConflictError, CommitUnknownError, TieringFencedError, LakeStateError: as `run_round`.
        UnavailableError: the catalog cannot be reached or refuses; nothing landed. `StorageError` where it was a disk.
    """
    if plan.changes_nothing:
        return CommitResult(None, 0, 0, 0, plan.offsets, end=plan.end)
    with commit_lock:
        return _Commit(lake, plan, files, clock).run()


@dataclass(frozen=True)
class _Attempt:
    """One that was sent.

    Attributes:
        staged: what was sent; attempts on the same version send the same.
    """

    staged: StagedCommit
    answer: CommitAnswer


class _Commit:
    def __init__(self, lake: LakeTable, plan: RoundPlan, files: Sequence[WrittenFile], clock: Clock) -> None:
        self._lake = lake
        self._plan = plan
        self._files = files
        self._clock = clock
        self._sent: list[_Attempt] = []
        self._staged: StagedCommit | None = None
        self._seen: LakeVersion | None = None

    def run(self) -> CommitResult:
        try:
            cause: Exception | None = None
            for pause in PAUSES_S:
                if pause:
                    self._clock.sleep(pause)
                try:
                    version = self._load()
                    if (landed := find_round(version, self._plan.round_id)) is not None:
                        return self._landed(landed)
                    check_plan(self._plan, version)
                    staged = self._stage(version)
                    answer = self._lake.publish(staged)
                except (UnavailableError, LakeFileMissingError) as e:
                    cause = e
                    continue
                self._sent.append(_Attempt(staged, answer))
                cause = answer.cause
                if answer.outcome is Outcome.LANDED:
                    return self._finish(staged.snapshot_id, self._plan.offsets)
            return self._give_up(cause)
        except CommitUnknownError:
            raise
        except Exception:
            self._clean_up()
            raise

    def _load(self) -> LakeVersion:
        self._seen = None
        self._seen = self._lake.load()
        return self._seen

    def _stage(self, version: LakeVersion) -> StagedCommit:
        """What an attempt on this version sends: what one on the same version sent, or else what is staged now."""
        if self._staged is None or self._staged.base != version:
            self._discard_unsent()
            self._staged = self._lake.stage(version, self._change(version))
        return self._staged

    def _change(self, version: LakeVersion) -> LakeChange:
        plan, mark = self._plan, mark_of(version)
        count = functools.partial(self._lake.census, version)
        check_rows(version, mark, count, keyed=plan.keyed)
        before = {} if mark is None else count().rows if mark.rows is None else mark.rows
        offsets, removed, stale = plan.offsets, plan.removed, dict[TabletKey, Offsets]()
        overwritten = {**(mark.overwritten if mark else {}), **plan.overwritten}
        if plan.cleared:
            removed = tuple(files_of(self._lake.plan(version), plan.cleared))
            before = {tablet: rows for tablet, rows in before.items() if tablet not in plan.cleared}
        elif plan.empties:
            removed = tuple(self._lake.plan(version))
        elif mark is not None and plan.removed:
            offsets = dict(mark.offsets)
            removed, stale = self._as_now(version)
        return LakeChange(
            plan.table_id,
            plan.epoch,
            plan.round_id,
            offsets,
            added=tuple(self._files),
            removed=removed,
            deleted=plan.deletes,
            stale=stale,
            rows={} if plan.empties else dict(before) if plan.removed else rows_after(plan, before, self._files),
            overwritten=overwritten,
        )

    def _as_now(self, version: LakeVersion) -> tuple[tuple[LakeFile, ...], dict[TabletKey, Offsets]]:
        """The files to take out as they are now, and their rows that were deleted since they were read: those are not
        live where they stand now, either."""
        now = {f.path: f for f in self._lake.plan(version)}
        removed: list[LakeFile] = []
        deleted: dict[TabletKey, Offsets] = {}
        for file in self._plan.removed:
            found = now.get(file.path)
            if found is not None and found != file:
                then, left = self._live_offsets(file), self._live_offsets(found)
                if file.tablet is not None and contains(then, left).all():
                    deleted[file.tablet] = union(deleted.get(file.tablet, NO_OFFSETS), then[~contains(left, then)])
                else:
                    found = None
            if found is None:
                raise CommitConflictError(
                    f"{file.path} of lake table {version.name} was changed while it was compacted: try again",
                    path=file.path,
                )
            removed.append(found)
        return tuple(removed), {tablet: gone for tablet, gone in deleted.items() if len(gone)}

    def _live_offsets(self, file: LakeFile) -> Offsets:
        batches = self._lake.read([file], ReadSpec((OFFSET_COLUMN,)))
        return union(*(np.asarray(b.column(0)) for b in batches))

    def _discard_unsent(self) -> None:
        """Remove what was staged for an attempt that was never made."""
        if self._staged is not None and not any(a.staged is self._staged for a in self._sent):
            self._lake.discard(self._staged.written)
        self._staged = None

    # ---- how it ends --------------------------------------------------------------------------------------------

    def _finish(self, snapshot_id: int, offsets: Mapping[TabletKey, int]) -> CommitResult:
        """This snapshot is the round's: what other attempts wrote is not needed."""
        self._discard_unsent()
        if self._seen is not None:
            self._discard_dead([a for a in self._sent if a.staged.snapshot_id != snapshot_id], self._seen)
        plan = self._plan
        rows = sum(f.record_count for f in self._files)
        return CommitResult(
            snapshot_id,
            rows,
            deletes=sum(map(len, plan.deletes.values())),
            files=len(self._files),
            offsets=offsets,
            more=plan.more or offsets != plan.offsets,
            records=plan.records,
            bytes=sum(f.size for f in self._files),
            end=plan.end,
        )

    def _landed(self, mark: LakeMark) -> CommitResult:
        """The round is in the lake: by one of these attempts, or by whoever ran it before, with files of his own."""
        if self._seen is not None and not any(a.staged.snapshot_id == mark.snapshot_id for a in self._sent):
            added = self._lake.added_paths(self._seen, mark.snapshot_id)
            if added is not None:
                self._discard_files(keep=added)
        return self._finish(mark.snapshot_id, mark.offsets)

    def _give_up(self, cause: Exception | None) -> CommitResult:
        """No attempt is known to have landed.

        Raises:
            LakeheadError: always, unless one has after all.
        """
        name, round_id = self._lake_name(), self._plan.round_id
        try:
            version = self._load()
        except UnavailableError as e:
            if not self._sent:
                raise
            raise CommitUnknownError(
                f"a round's commit to lake table {name} failed ({cause}), and reading the lake failed too ({e}):"
                " run the round again once the catalog answers",
                table=name,
                round_id=round_id,
            ) from e
        if (landed := find_round(version, round_id)) is not None:
            return self._landed(landed)
        check_plan(self._plan, version)
        if isinstance(cause, LakeFileMissingError):
            raise cause
        if not all(self._is_dead(a, version) for a in self._sent):
            raise CommitUnknownError(
                f"whether a round's commit to lake table {name} will land is not known ({cause}): run the round again",
                table=name,
                round_id=round_id,
            ) from cause
        if isinstance(cause, StorageError):
            raise cause
        if self._sent and self._sent[-1].answer.outcome is Outcome.REFUSED:
            raise CommitConflictError(
                f"rounds or other engines kept changing lake table {name} while this committed: run it again",
                table=name,
            ) from cause
        raise UnavailableError(f"lake table {name} could not be committed to: {cause}", table=name) from cause

    def _lake_name(self) -> str:
        return self._seen.name if self._seen else self._sent[-1].staged.base.name if self._sent else self._plan.table_id

    # ---- files that nobody needs --------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """After an error: remove what no snapshot names or will ever name; without a version to prove it by, keep."""
        self._discard_unsent()
        version = self._seen
        if version is None:
            return
        if self._discard_dead(self._sent, version):
            # Files that were given for the second time may be in the lake since the first.
            try:
                used = {f.path for f in self._lake.plan(version)}
            except Exception:  # the error that led here is the one to report
                return
            self._discard_files(keep=used)

    def _discard_dead(self, attempts: Sequence[_Attempt], version: LakeVersion) -> bool:
        """Remove what these attempts wrote and no other shares, where it is certain; whether it is for all."""
        dead = [a for a in attempts if self._is_dead(a, version)]
        needed = {p for a in self._sent if a not in dead for p in a.staged.written}
        self._lake.discard({p for a in dead for p in a.staged.written} - needed)
        return len(dead) == len(attempts)

    def _discard_files(self, keep: frozenset[str] | set[str]) -> None:
        self._lake.discard(f.path for f in self._files if f.path not in keep)

    def _is_dead(self, attempt: _Attempt, version: LakeVersion) -> bool:
        """Whether an attempt that this version's lineage does not show surely did not land and never will.

        One that may be on its way still is not, even if the table has moved on: someone could roll it back to there.
        """
        base = attempt.staged.base
        if version.table_uuid != base.table_uuid:
            return True
        if attempt.answer.outcome is Outcome.UNKNOWN and self._lake.lands_late:
            return False
        landed = attempt.staged.snapshot_id in version.snapshots
        return not landed and descends_from(version, base.current_id)


def rows_after(plan: RoundPlan, before: Mapping[TabletKey, int], files: Iterable[WrittenFile]) -> dict[TabletKey, int]:
    """Live rows per tablet once these files are added and what the plan deletes is gone."""
    rows = Counter(before)
    for f in files:
        rows[f.tablet] += f.record_count
    for tablet, gone in plan.deletes.items():
        rows[tablet] -= len(gone)
    return {tablet: n for tablet, n in rows.items() if n}


def check_plan(plan: RoundPlan, version: LakeVersion) -> None:
    """That a version is exactly where a plan begins, and the plan's to change.

    Raises:
        LakeStateError: it is another table's, was rolled back, or has rows that cannot be replaced.
        TieringFencedError: a newer job has taken over.
        CommitConflictError: another round has committed, or orphans were removed.
    """
    name = version.name
    found = version.properties.get(TABLE_ID)
    mark = mark_of(version)
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
    held = mark.offsets if mark else {}
    # A compaction moves no mark: rounds may have, but not back.
    as_planned = all(held.get(k, 0) >= at for k, at in plan.base.items()) if plan.removed else held == plan.base
    if not as_planned:
        raise CommitConflictError(
            f"another round has committed to lake table {name} since this one was planned: run the round again",
            table=name,
        )
    if version.properties.get(CLEANUP) != plan.cleanup:
        raise CommitConflictError(
            f"orphans of lake table {name} were removed since this round was planned, its own files perhaps among them:"
            " run the round again",
            table=name,
        )
