"""Code that Spark's Python workers run; a module of its own, so that they import it and keep its state between jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lakehead.client.table import TableClient
from lakehead.errors import LakeheadError, TableNotFoundError
from lakehead.spark.connections import worker_table
from lakehead.types import TabletKey


class RemoteLog:
    """A table's log for tiering rounds: the driver's client there, the worker's own connection in tasks."""

    def __init__(self, uri: str, client: TableClient) -> None:
        self._uri = uri
        self._name = str(client.desc.path)
        self._table_id = client.desc.table_id
        self._client: TableClient | None = client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def _opened(self) -> TableClient:
        if self._client is None:
            client = worker_table(self._uri, self._name)._client
            if client.desc.table_id != self._table_id:
                raise TableNotFoundError(f"table {self._name} was dropped and created again", table=self._name)
            self._client = client
        return self._client

    def watermarks(self) -> Mapping[TabletKey, tuple[int, int]]:
        """See `lakehead.tiering.round_plan.HotSource`."""
        return self._opened().watermarks()

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `lakehead.tiering.round_plan.HotSource`."""
        return self._opened().read(tablet, start, end, columns)


def guarded(function: Callable[[Any], Any], item: Any) -> tuple[Any, LakeheadError | None]:
    """The result, or the typed error, which Spark would turn into the text of a Java exception."""
    try:
        return function(item), None
    except LakeheadError as e:
        return None, e
