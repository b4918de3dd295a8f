"""Small lake tables, and logs in memory that feed them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.table import Table

from lakehead.config import LakeConfig
from lakehead.lake.catalog import LakeCatalog
from lakehead.lake.commit import CommitResult
from lakehead.lake.iceberg_table import IcebergLakeTable
from lakehead.lake.round import run_round
from lakehead.testing.hot import MemoryHotSource
from lakehead.types import TableDescriptor, TablePath

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("code", pa.int64(), False), pa.field("v", pa.int8())])


def describe(*, keyed: bool = True, table_id: str = "t1", buckets: int = 1) -> TableDescriptor:
    """Partitioned by the identity of ``__bucket``, so that PyIceberg itself can write to it too."""
    key = ("id", "code") if keyed else ()
    return TableDescriptor(table_id, TablePath("db", "t"), SCHEMA, 1, key, (), key, buckets, "iceberg")


class Lake:
    """One table: its log, its catalog, and what another engine does to its lake."""

    def __init__(self, folder: Path, desc: TableDescriptor) -> None:
        self.desc = desc
        self.folder = folder
        self.catalog = LakeCatalog(LakeConfig(), str(folder))
        self.catalog.create_table(desc)
        self.hot = MemoryHotSource(desc)
        self.table = IcebergLakeTable(self.load)

    def write(self, *ids: int, v: int = 0) -> None:
        self.hot.write([{"id": i, "code": i, "v": v} for i in ids])

    def delete(self, *ids: int) -> None:
        self.hot.delete([{"id": i, "code": i} for i in ids])

    def load(self) -> Table:
        return self.catalog.load(self.desc)

    def round(self, *, epoch: int | None = None, round_id: str | None = None) -> CommitResult:
        return run_round(self.table, self.desc, self.hot, epoch=epoch, round_id=round_id)

    def append_foreign(self, *ids: int, bucket: int | None = None) -> None:
        """Rows that another engine adds: they have no offset."""
        rows = [{"id": i, "code": i, "v": 0, "__bucket": bucket} for i in ids]
        lake = self.load().schema().as_arrow()
        self.load().append(pa.Table.from_pylist(rows, pa.schema([f.remove_metadata() for f in lake])))

    def ids(self, table: Table | None = None) -> list[int]:
        """What PyIceberg reads."""
        return sorted((table or self.load()).scan().to_arrow()["id"].to_pylist())

    def model_ids(self) -> list[int]:
        return sorted(r["id"] for r in self.hot.rows())

    def data_files(self) -> set[str]:
        """Every file under the table's data folder."""
        return {str(p) for p in self.folder.rglob("*.parquet")}

    def used_files(self) -> set[str]:
        """Data and delete files of the current lake snapshot."""
        tasks = list(self.load().scan().plan_files())
        files = {t.file.file_path for t in tasks} | {d.file_path for t in tasks for d in t.delete_files}
        return {f.removeprefix("file://") for f in files}


@pytest.fixture
def make_lake(tmp_path: Path) -> Callable[..., Lake]:
    def make(**options: object) -> Lake:
        return Lake(tmp_path, describe(**options))  # type: ignore[arg-type]

    return make


@pytest.fixture
def keyed(tmp_path: Path) -> Lake:
    return Lake(tmp_path, describe())


@pytest.fixture
def log(tmp_path: Path) -> Lake:
    return Lake(tmp_path, describe(keyed=False))
