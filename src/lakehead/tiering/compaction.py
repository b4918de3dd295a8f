"""Compaction: live rows of small or worn lake files are written to new files, in one commit that moves no mark.

Rows keep their offsets and their order, so that every read, at any snapshot, finds what it found. What rounds delete
while files are written anew is deleted in the new files by the same commit; one whose files another engine took out
meanwhile is refused, and nothing of it remains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from lakehead.env import Env
from lakehead.errors import (
    CommitConflictError,
    LakeFileMissingError,
    LakeheadError,
    LakeStateError,
    TieringFencedError,
)
from lakehead.lake.census import check_rows
from lakehead.lake.lake_table import DataWriter, LakeFile, LakeTable
from lakehead.lake.marks import CLEANUP, LakeVersion, mark_of
from lakehead.predicate.read_spec import ReadSpec
from lakehead.tiering.commit import NO_LOCK, CommitLock, commit_round
from lakehead.tiering.compaction_plan import TURN_BYTES, Rewrite, plan_rewrites
from lakehead.tiering.executor import Executor, here
from lakehead.tiering.round import TaskResult, discard, written_by
from lakehead.tiering.round_plan import RoundPlan
from lakehead.types import Epoch, TableDescriptor


@dataclass(frozen=True)
class CompactionResult:
    """What a compaction did.

    Attributes:
        snapshot_id: the lake snapshot; None when there was nothing to do.
        rows: rows that were written anew.
        files_before, files_after: data files that were taken out, and those in their place.
        more: whether there is more to do.
    """

    snapshot_id: int | None
    rows: int
    files_before: int
    files_after: int
    more: bool


class LakeSource(Protocol):
    """The lake table, as the tasks of a compaction read it; picklable where they run in other processes."""

    def read(self, files: Sequence[LakeFile], spec: ReadSpec) -> Iterator[pa.RecordBatch]:
        """See `LakeTable.read`."""
        ...


def compact(
    lake: LakeTable,
    desc: TableDescriptor,
    env: Env,
    *,
    source: LakeSource | None = None,
    executor_of: Callable[[int], Executor] = here,
    epoch: Epoch | None = None,
    bytes_max: int = TURN_BYTES,
    commit_lock: CommitLock = NO_LOCK,
) -> CompactionResult:
    """Write anew what is worth it, as one lake commit; no commit when nothing is, or when other engines added columns,
    whose values a rewrite would lose. Rows that rounds delete meanwhile are deleted in the new files.

    Args:
        source: what tasks read of the lake; None: what is read here.
        executor_of: where the tasks of so many rows run.
        epoch: owner number of the job; None takes the lake's own, which fences nobody.
        bytes_max: of files that are read, at most, unless one group is larger.
        commit_lock: see `commit_round`.

    Raises:
        CommitConflictError: others changed or expired the files meanwhile, or kept committing; run again.
        CommitUnknownError: whether it landed cannot be known; running again is safe.
        TieringFencedError: a newer job tiers this table; stop. Without an ``epoch`` it is a conflict like any other.
        LakeStateError: the lake is damaged, or was changed as only tiering may.
        UnavailableError: the catalog cannot be reached; nothing landed.
    """
    version = lake.load()
    try:
        return _compacted(lake, version, desc, env, source or lake, executor_of, epoch, bytes_max, commit_lock)
    except LakeFileMissingError as e:
        if lake.load() == version:
            raise
        raise CommitConflictError(
            f"files of the lake of {desc.path} were expired while it was compacted: try again ({e})",
            table=str(desc.path),
        ) from e


def _compacted(
    lake: LakeTable,
    version: LakeVersion,
    desc: TableDescriptor,
    env: Env,
    source: LakeSource,
    executor_of: Callable[[int], Executor],
    epoch: Epoch | None,
    bytes_max: int,
    commit_lock: CommitLock,
) -> CompactionResult:
    """`compact` of this version."""
    mark = mark_of(version)
    if mark is None or lake.foreign_columns(version):
        return CompactionResult(None, 0, 0, 0, False)
    check_rows(version, mark, functools.partial(lake.census, version), keyed=desc.keyed)
    target = desc.properties.target_file_bytes
    rewrites, more = plan_rewrites(
        lake.plan(version), lambda f: lake.count([f]), target_bytes=target, bytes_max=bytes_max
    )
    if not rewrites:
        return CompactionResult(None, 0, 0, 0, False)
    spec = ReadSpec(tuple(desc.schema.names), system_columns=True)
    writer = lake.writer(version, target_file_bytes=target)
    task = functools.partial(rewrite_files, source=source, writer=writer, spec=spec)
    executor = executor_of(sum(f.record_count for r in rewrites for f in r.files))
    results = executor.run(task, rewrites, name=f"compaction of {desc.path}", undo=functools.partial(discard, lake))
    try:
        _require_all(lake, rewrites, results)
    except LakeheadError:
        discard(lake, results)
        raise
    plan = RoundPlan(
        desc.table_id,
        epoch if epoch is not None else mark.epoch,
        env.randomness.uuid_hex(),
        desc.keyed,
        base=dict(mark.offsets),
        ranges={},
        tasks=(),
        deletes={},
        cleanup=version.properties.get(CLEANUP),
        removed=tuple(f for r in rewrites for f in r.files),
    )
    written = [f for r in results for f in r.files]
    try:
        result = commit_round(lake, plan, written, clock=env.clock, commit_lock=commit_lock)
    except TieringFencedError as e:
        if epoch is not None:
            raise
        raise CommitConflictError(
            f"a tiering service took over table {desc.path} while it was compacted: try again", table=str(desc.path)
        ) from e
    return CompactionResult(result.snapshot_id, result.rows, len(plan.removed), len(written), more)


def rewrite_files(rewrite: Rewrite, source: LakeSource, writer: DataWriter, spec: ReadSpec) -> TaskResult:
    """Write the live rows of files, in their order, as new ones. May run anywhere; a repeat writes other files."""
    rows = (batch for file in rewrite.files for batch in source.read([file], spec))
    return written_by(writer, rows, rewrite.tablet)


def _require_all(lake: LakeTable, rewrites: Sequence[Rewrite], results: Sequence[TaskResult]) -> None:
    for rewrite, result in zip(rewrites, results, strict=True):
        expected = lake.count(rewrite.files)
        if result.rows != expected:
            raise LakeStateError(
                f"lake files of tablet {rewrite.tablet} hold {expected} rows, but {result.rows} were read: they stay",
                tablet=str(rewrite.tablet),
            )
