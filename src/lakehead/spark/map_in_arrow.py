"""`DataFrame.mapInArrow` for columns of whatever name: Spark's takes a dot in one for a field of a struct."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

Task: TypeAlias = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(df: DataFrame, task: Task, schema: StructType | str) -> DataFrame:
    """What a task makes of the rows of each partition, which come with the names that ``df`` has for them."""
    names = df.columns
    if not any("." in name or "`" in name for name in names):
        return df.mapInArrow(task, schema)
    return df.toDF(*(f"c{n}" for n in range(len(names)))).mapInArrow(_Named(task, tuple(names)), schema)


@dataclass(frozen=True)
class _Named:
    """A task that is given columns by their own names."""

    task: Task
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from self.task(batch.rename_columns(list(self.names)) for batch in batches)
