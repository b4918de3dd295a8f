"""What is asked of all tables at once, kept as they change: who makes one of thousands waits for none of the others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lakehead.protocol.table_info import TableInfo
from lakehead.types import TablePath


class TableTotals:
    """Of the tables that it was told of. Not thread-safe."""

    def __init__(self) -> None:
        self._buckets: dict[str, int] = {}
        self._partitioned: set[str] = set()
        self._renamed: dict[str, list[str]] = {}
        self._unpartitioned_buckets = 0

    def tell(self, table_id: str, info: bytes | None) -> None:
        """A table's definition as it is stored now; None: it is gone."""
        before = self._buckets.pop(table_id, 0)
        if table_id not in self._partitioned:
            self._unpartitioned_buckets -= before
        self._partitioned.discard(table_id)
        self._renamed.pop(table_id, None)
        if info is None:
            return
        table = msgspec.msgpack.decode(info, type=TableInfo)
        self._buckets[table_id] = table.buckets
        if table.partition_by:
            self._partitioned.add(table_id)
        else:
            self._unpartitioned_buckets += table.buckets
        if table.names:
            self._renamed[table_id] = [f"{table.database}.{table.table}", *table.names]

    def tablets(self, partitions: Mapping[str, int]) -> int:
        """How many tablets they have, where each partitioned table has so many partitions."""
        of_partitions = (self._buckets[i] * partitions.get(i, 0) for i in self._partitioned)
        return self._unpartitioned_buckets + sum(of_partitions)

    def called_before(self, path: TablePath) -> list[str]:
        """What tables that once had this name are called now, sorted."""
        return sorted(names[-1] for names in self._renamed.values() if str(path) in names[:-1])
