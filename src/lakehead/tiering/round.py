"""One tiering round: read a range of the log, write it as Parquet where tasks run, commit it to the lake once.

`run_round` is the whole: plan, resolve what the range replaces, execute the tasks (where an `Executor` runs them), and
commit. A round lands once or not at all: the commit carries the round's id and its end offsets, and is refused unless
the newest mark is exactly where the plan begins. Whoever gets `CommitConflictError` plans anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from lakehead.env import Env
from lakehead.env.clock import Clock
from lakehead.env.usage import CpuTime
from lakehead.errors import (
    CommitConflictError,
    CorruptionError,
    LakeStateError,
    OffsetOutOfRangeError,
    TieringFencedError,
)
from lakehead.format.arrays import to_arrow
from lakehead.format.changes import named_changes
from lakehead.lake.census import check_rows
from lakehead.lake.lake_table import DataWriter, LakeTable, WrittenFile
from lakehead.lake.marks import CLEANUP, LakeVersion, mark_of
from lakehead.log.hot_range import HotRange
from lakehead.log.netchange import Offsets, live_rows, superseded_offsets, union
from lakehead.tiering.commit import NO_LOCK, CommitLock, CommitResult, commit_round
from lakehead.tiering.executor import Executor, here
from lakehead.tiering.round_plan import ROWS_PER_TASK, HotSource, RoundPlan, TieringTask, plan_round
from lakehead.types import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    PREV_OFFSET_COLUMN,
    Epoch,
    TableDescriptor,
    TabletKey,
)

_PLANS_MAX = 4


@dataclass(frozen=True)
class TaskResult:
    """Files that a task wrote, the rows in them, and the CPU that it took."""

    rows: int
    files: tuple[WrittenFile, ...]
    cpu: CpuTime


@dataclass(frozen=True)
class HeldBack:
    """A `HotSource` that ends at these offsets, where it does not end before."""

    source: HotSource
    ends: Mapping[TabletKey, int]

    def watermarks(self) -> Mapping[TabletKey, HotRange]:
        """See `HotSource.watermarks`."""
        held = self.source.watermarks()
        return {k: at._replace(high_watermark=min(at.high_watermark, self.ends.get(k, 0))) for k, at in held.items()}

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `HotSource.read`."""
        return self.source.read(tablet, start, end, columns)


class _Stopwatch:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        at = self._clock.monotonic()
        self.laps[name], self._at = at - self._at, at


def run_round(
    lake: LakeTable,
    desc: TableDescriptor,
    source: HotSource,
    env: Env,
    *,
    executor_of: Callable[[int], Executor] = here,
    epoch: Epoch | None = None,
    round_id: str | None = None,
    rows_per_task: int = ROWS_PER_TASK,
    records_max: int | None = None,
    commit_lock: CommitLock = NO_LOCK,
) -> CommitResult:
    """Tier what the log holds beyond the lake, as one lake commit; no commit when there is nothing.

    Args:
        executor_of: where the tasks of a round of so many records run.
        epoch: owner number of the job; None takes the lake's own, which fences nobody.
        round_id: unique for ever, the same when a round is repeated; None makes a new one.
        records_max: of the log in one round; None for all there are.
        commit_lock: see `commit_round`.

    Raises:
        CommitConflictError: another round or engine changed the lake first; run again.
        CommitUnknownError: whether it landed cannot be known; running again is safe.
        TieringFencedError: a newer job tiers this table; stop. Without an ``epoch`` it is a conflict like any other.
        LakeStateError: lake and log contradict each other.
        UnavailableError: the catalog cannot be reached; nothing landed.
    """
    watch, began = _Stopwatch(env.clock), CpuTime.now()
    version, plan = _plan(
        lake,
        desc,
        source,
        epoch=epoch,
        round_id=round_id or env.randomness.uuid_hex(),
        rows_per_task=rows_per_task,
        records_max=records_max,
    )
    if plan.changes_nothing:
        return CommitResult(None, 0, 0, 0, plan.offsets, end=plan.end)
    watch.lap("plan")
    executor = executor_of(plan.records)
    writer = lake.writer(version, target_file_bytes=desc.properties.target_file_bytes)
    try:
        plan = resolve(plan, source, executor, name=f"round of {desc.path}, what it replaces")
        watch.lap("resolve")
        execute = functools.partial(execute_task, source=source, writer=writer)
        results = executor.run(execute, plan.tasks, name=f"round of {desc.path}", undo=functools.partial(discard, lake))
    except OffsetOutOfRangeError as e:
        raise CommitConflictError(
            f"the log of table {desc.path} was trimmed while a round read it, so another round has tiered that range:"
            " run the round again",
            table=str(desc.path),
        ) from e
    watch.lap("write")
    try:
        result = commit_round(
            lake, plan, [f for r in results for f in r.files], clock=env.clock, commit_lock=commit_lock
        )
        watch.lap("commit")
        mine = CpuTime.now().since(began)
        elsewhere = sum(r.cpu.seconds for r in results if r.cpu.thread != mine.thread)
        return replace(result, seconds=watch.laps, cpu_seconds=mine.seconds + elsewhere)
    except TieringFencedError as e:
        if epoch is not None:
            raise
        raise CommitConflictError(
            f"a tiering service took over table {desc.path} while a round ran: run the round again",
            table=str(desc.path),
        ) from e


def _plan(
    lake: LakeTable,
    desc: TableDescriptor,
    source: HotSource,
    *,
    epoch: Epoch | None,
    round_id: str,
    rows_per_task: int,
    records_max: int | None,
) -> tuple[LakeVersion, RoundPlan]:
    """Plan from the mark and, read after it, the watermarks.

    Another round may commit between the two and the server trim what it tiered: only a mark that stands still tells
    that lake and log do not meet.
    """
    version = lake.load()
    for _ in range(_PLANS_MAX):
        mark = mark_of(version)
        check_rows(version, mark, functools.partial(lake.census, version), keyed=desc.keyed)
        try:
            plan = plan_round(
                desc,
                mark,
                source.watermarks(),
                epoch=epoch if epoch is not None else mark.epoch if mark else 1,
                round_id=round_id,
                rows_per_task=rows_per_task,
                records_max=records_max,
            )
            return version, replace(plan, cleanup=version.properties.get(CLEANUP))
        except LakeStateError:
            version = lake.load()
            if mark_of(version) == mark:
                raise
    raise CommitConflictError(
        f"other rounds kept committing to lake table {version.name} while this one was planned: run the round again",
        table=version.name,
    )


def resolve(plan: RoundPlan, source: HotSource, executor: Executor, *, name: str = "") -> RoundPlan:
    """Read which rows the whole range replaces, so that tasks and deletes know; log tables replace none."""
    if not plan.keyed:
        return plan
    parts = executor.run(functools.partial(read_superseded, source=source), plan.tasks, name=name)
    by_tablet: dict[TabletKey, list[Offsets]] = {}
    for task, part in zip(plan.tasks, parts, strict=True):
        by_tablet.setdefault(task.tablet, []).append(part)
    return plan.with_superseded({tablet: union(*parts) for tablet, parts in by_tablet.items()})


def read_superseded(task: TieringTask, source: HotSource) -> Offsets:
    """Offsets that the records of a task's range replace, sorted; reads two columns of the log."""
    columns = (CHANGE_TYPE_COLUMN, PREV_OFFSET_COLUMN)
    batches = list(source.read(task.tablet, task.start, task.end, columns))
    _require_rows(task, sum(b.num_rows for b in batches))
    return union(*(superseded_offsets(*(_numbers(b, c) for c in columns)) for b in batches))


def execute_task(task: TieringTask, source: HotSource, writer: DataWriter) -> TaskResult:
    """Write a task's live rows as data files. May run anywhere; a repeat writes other files.

    Raises:
        OffsetOutOfRangeError: the log no longer has the range.
        LakeStateError: the log lacks part of the range, or the lake table's columns do not fit.
    """
    return written_by(writer, _live_batches(task, source), task.tablet)


def written_by(writer: DataWriter, rows: Iterable[pa.RecordBatch], tablet: TabletKey) -> TaskResult:
    """Write rows of a tablet as data files."""
    began = CpuTime.now()
    files = writer.write(rows, tablet)
    return TaskResult(sum(f.record_count for f in files), tuple(files), CpuTime.now().since(began))


def _live_batches(task: TieringTask, source: HotSource) -> Iterator[pa.RecordBatch]:
    at = task.start
    for batch in source.read(task.tablet, task.start, task.end):
        offsets = _numbers(batch, OFFSET_COLUMN)
        dense = len(offsets) == 0 or (offsets[0] == at and offsets[-1] - offsets[0] == len(offsets) - 1)
        if not dense:
            raise CorruptionError(
                f"the log of tablet {task.tablet} returned {len(offsets)} records, {offsets[0]} to {offsets[-1]},"
                f" where {at} is next: restore it",
                tablet=str(task.tablet),
                offset=at,
            )
        at += len(offsets)
        if task.keyed:
            live = live_rows(_numbers(batch, CHANGE_TYPE_COLUMN), offsets, task.superseded)
            batch = batch if live.all() else batch.filter(to_arrow(live, pa.bool_()))
        told = (PREV_OFFSET_COLUMN,) if task.changes else (CHANGE_TYPE_COLUMN, PREV_OFFSET_COLUMN)
        rows = named_changes(batch.drop_columns([c for c in told if c in batch.schema.names]))
        if BUCKET_COLUMN not in rows.schema.names:
            rows = rows.append_column(BUCKET_COLUMN, pa.repeat(pa.scalar(task.tablet.bucket, pa.int32()), len(rows)))
        yield rows
    _require_rows(task, at - task.start)


def _numbers(batch: pa.RecordBatch, column: str) -> Any:
    return np.asarray(batch.column(column))


def _require_rows(task: TieringTask, rows: int) -> None:
    if rows != task.end - task.start:
        raise LakeStateError(
            f"the log of tablet {task.tablet} returned {rows} records of [{task.start}, {task.end}): it was cut while a"
            " round read it; run the round again",
            tablet=str(task.tablet),
            start=task.start,
            end=task.end,
        )


def discard(lake: LakeTable, results: Iterable[TaskResult]) -> None:
    """Remove the files of tasks whose round is given up."""
    lake.discard(f.path for r in results for f in r.files)
