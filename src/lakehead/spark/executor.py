"""Rounds whose tasks run as Spark jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from lakehead.errors import UnavailableError
from lakehead.spark.worker import guarded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")


class SparkExecutor:
    """An `Executor`: one job for all items, a task each."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def run(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        undo: Callable[[Iterable[Result]], None] | None = None,
    ) -> list[Result]:
        """See `Executor.run`; what a job that Spark itself fails has made is not undone."""
        if not items:
            return []
        context = self._spark.sparkContext
        try:
            done = context.parallelize(items, len(items)).map(functools.partial(guarded, task)).collect()
        except (Py4JError, PySparkException) as e:
            raise UnavailableError(f"the Spark job of a round failed: {_cause(e)}") from e
        errors = [e for _, e in done if e is not None]
        if errors:
            if undo is not None:
                undo([result for result, e in done if e is None])
            raise errors[0]
        return [result for result, _ in done]


def _cause(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "Exception" in line]
    return (named or lines or [type(e).__name__])[-1][:500]
