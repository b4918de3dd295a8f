"""Code that Spark's Python workers run; a module of its own, so that they import it and keep its state between jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lakehead.client.table import TableHandle
from lakehead.errors import LakeheadError
from lakehead.lake.formats import format_of
from lakehead.lake.lake_table import LakeFile
from lakehead.log.hot_range import HotRange
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark.connections import planned_handle
from lakehead.types import TabletKey


class _OnWorkers:
    """A table that is the driver's own on its side, and that of the worker's connection in tasks."""

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


class WorkerLog(_OnWorkers):
    """A table's log for tiering rounds; implements `lakehead.tiering.round_plan.HotSource`."""

    def watermarks(self) -> Mapping[TabletKey, HotRange]:
        """See `HotSource.watermarks`."""
        return self._opened().log.watermarks()

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `HotSource.read`."""
        return self._opened().log.read(tablet, start, end, columns)


class WorkerLake(_OnWorkers):
    """A table's lake, or what it keeps of the changelog, for compactions; implements
    `lakehead.tiering.compaction.LakeSource`."""

    def __init__(self, uri: str, handle: TableHandle, *, changelog: bool) -> None:
        super().__init__(uri, handle)
        self._changelog = changelog

    def read(self, files: Sequence[LakeFile], spec: ReadSpec) -> Iterator[pa.RecordBatch]:
        """See `LakeSource.read`."""
        handle = self._opened()
        desc = handle.desc.require_changelog() if self._changelog else handle.desc
        return format_of(desc).at(desc, handle.lake(changelog=self._changelog)).read(files, spec)


def guarded_call(call: tuple[Callable[[Any], Any], Any]) -> tuple[Any, LakeheadError | None]:
    """`guarded`, of a function and its item."""
    return guarded(*call)


def guarded(function: Callable[[Any], Any], item: Any) -> tuple[Any, LakeheadError | None]:
    """The result, or the typed error, which Spark would turn into the text of a Java exception."""
    try:
        return function(item), None
    except LakeheadError as e:
        return None, e
