"""Rounds whose tasks run as Spark jobs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from lakehead.env.threads import Threads
from lakehead.errors import LakeheadError
from lakehead.spark.failures import job_error
from lakehead.spark.worker import guarded, guarded_call

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")
Ended = tuple[Any, LakeheadError | None]
_log = logging.getLogger("lakehead.tiering")
_DESCRIPTION = "spark.job.description"
_NAMES_SHOWN = 3


class SparkExecutor:
    """An `Executor`: one job for all items, a task each."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def run(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        name: str = "",
        undo: Callable[[Iterable[Result]], None] | None = None,
    ) -> list[Result]:
        """See `Executor.run`; what a job that Spark itself fails has made is not undone."""
        if not items:
            return []
        return _results(run_job(self._spark, name, functools.partial(guarded, task), items, len(items)), undo)


class SharedJobs:
    """An `Executor`: what rounds ask for while a job runs goes with the next one, as one job.

    So that fifty small rounds cost two or three jobs, whose start is most of what one of them takes.
    """

    def __init__(self, spark: SparkSession, threads: Threads) -> None:
        self._spark = spark
        self._job = threads.lock()
        self._lock = threads.lock()
        self._waiting: list[_Waiting] = []

    def run(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        name: str = "",
        undo: Callable[[Iterable[Result]], None] | None = None,
    ) -> list[Result]:
        """See `SparkExecutor.run`. A job that fails is nobody's who shared it: each then has its own."""
        if not items:
            return []
        mine = _Waiting(name, [(task, item) for item in items])
        with self._lock:
            self._waiting.append(mine)
        with self._job:
            # Whoever had it before may have had this done.
            if not mine.taken:
                self._run_waiting()
        ended = self._run([mine]) if mine.ended is None else mine.ended
        return _results(ended, undo)

    def _run_waiting(self) -> None:
        with self._lock:
            together, self._waiting = self._waiting, []
        for waiting in together:
            waiting.taken = True
        try:
            ended = self._run(together)
        except Exception as e:
            if len(together) == 1:
                raise
            _log.warning("the Spark job that %d rounds shared failed, each has its own now: %s", len(together), e)
            return
        for waiting in together:
            waiting.ended, ended = ended[: len(waiting.calls)], ended[len(waiting.calls) :]

    def _run(self, together: Sequence[_Waiting]) -> list[Ended]:
        calls = [call for waiting in together for call in waiting.calls]
        slices = min(len(calls), 2 * self._spark.sparkContext.defaultParallelism)
        names = list(dict.fromkeys(waiting.name for waiting in together))
        name = ", ".join(names[:_NAMES_SHOWN]) + (
            f" and {more} more" if (more := len(names) - _NAMES_SHOWN) > 0 else ""
        )
        return run_job(self._spark, name, guarded_call, calls, slices)


@dataclass
class _Waiting:
    name: str
    calls: Sequence[tuple[Callable[[Any], Any], Any]]
    taken: bool = False
    ended: list[Ended] | None = None


def run_job(
    spark: SparkSession, name: str, function: Callable[[Item], Ended], items: Sequence[Item], slices: int
) -> list[Ended]:
    """What a function that does not raise returns for each item, from one Spark job, by whose name its UI shows it.

    Raises:
        MissingDependencyError: the Python of the executors lacks a module.
        UnavailableError: the job failed.
    """
    context = spark.sparkContext
    described = context.getLocalProperty(_DESCRIPTION)
    try:
        context.setLocalProperty(_DESCRIPTION, f"lakehead: {name}")
        try:
            return context.parallelize(items, slices).map(function).collect()
        finally:
            context.setLocalProperty(_DESCRIPTION, described)
    except (Py4JError, PySparkException) as e:
        raise job_error(str(e) or type(e).__name__) from e


def _results(ended: Sequence[Ended], undo: Callable[[Iterable[Any]], None] | None) -> list[Any]:
    errors = [e for _, e in ended if e is not None]
    if errors:
        if undo is not None:
            undo([result for result, e in ended if e is None])
        raise errors[0]
    return [result for result, _ in ended]
