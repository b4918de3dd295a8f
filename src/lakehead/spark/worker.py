"""Code that Spark's Python workers run; a module of its own, so that they import it and keep its state between jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.errors import LakeheadError
from lakehead.spark.connections import planned_handle
from lakehead.types import TabletKey


class WorkerLog:
    """A table's log for tiering rounds: the driver's own on its side, that of the worker's connection in tasks."""

    def __init__(self, uri: str, handle: TableHandle) -> None:
        self._uri = uri
        self._name = str(handle.desc.path)
        self._table_id, self._schema_id = handle.desc.table_id, handle.desc.schema_id
        self._handle: TableHandle | None = handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def _opened(self) -> TableHandle:
        if self._handle is None:
            self._handle = planned_handle(self._uri, self._name, self._table_id, self._schema_id)
        return self._handle

    def watermarks(self) -> Mapping[TabletKey, tuple[int, int]]:
        """See `lakehead.tiering.round_plan.HotSource`."""
        return self._opened().log.watermarks()

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `lakehead.tiering.round_plan.HotSource`."""
        return self._opened().log.read(tablet, start, end, columns)


def guarded_call(call: tuple[Callable[[Any], Any], Any]) -> tuple[Any, LakeheadError | None]:
    """`guarded`, of a function and its item."""
    return guarded(*call)


def guarded(function: Callable[[Any], Any], item: Any) -> tuple[Any, LakeheadError | None]:
    """The result, or the typed error, which Spark would turn into the text of a Java exception."""
    try:
        return function(item), None
    except LakeheadError as e:
        return None, e
