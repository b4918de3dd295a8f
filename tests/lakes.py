"""Small lake tables, real ones and the model, logs in memory that feed them, and what can go wrong between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSelector
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table, Transaction

from lakehead.config import LakeConfig
from lakehead.env import Env
from lakehead.env.clock import SystemClock
from lakehead.env.randomness import SeededRandomness
from lakehead.iceberg import staging
from lakehead.iceberg.data_files import LakeWriteSpec, write_data_files, write_position_deletes
from lakehead.iceberg.file_io import locate_file
from lakehead.iceberg.iceberg_table import IcebergLakeTable
from lakehead.iceberg.lake_catalog import LakeCatalog
from lakehead.iceberg.orphans import remove_orphans
from lakehead.iceberg.planner import plan_files
from lakehead.iceberg.reader import read_lake
from lakehead.iceberg.rowdelta import RowDelta, to_data_file
from lakehead.lake.lake_table import CommitAnswer, Expired, LakeChange, LakeTable, StagedCommit
from lakehead.lake.marks import LakeVersion
from lakehead.protocol.messages import LakeUse
from lakehead.testing.hot import MemoryHotSource
from lakehead.testing.lake import Fault, MemoryLake
from lakehead.tiering.commit import CommitResult
from lakehead.tiering.round import run_round
from lakehead.types import OFFSET_COLUMN, Schemas, TableDescriptor, TablePath, TabletKey

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("code", pa.int64(), False), pa.field("v", pa.int8())])


def describe(*, keyed: bool = True, table_id: str = "t1", buckets: int = 1) -> TableDescriptor:
    """Partitioned by the identity of ``__bucket``, so that PyIceberg itself can write to it too."""
    key = ("id", "code") if keyed else ()
    return TableDescriptor(table_id, TablePath("db", "t"), Schemas.only(SCHEMA, 1), key, (), key, buckets, "iceberg")


class InstantClock(SystemClock):
    """Nobody waits; what was asked for is remembered."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class Tiered:
    """One table: its log, its lake, and what goes wrong with commits.

    Attributes:
        table: the lake as a tiering service uses it.
        faults: what goes wrong with the next commits, one each; None is nothing.
        on_step: called between the steps of a round; see `MemoryLake`.
    """

    table: LakeTable

    def __init__(self, desc: TableDescriptor) -> None:
        self.desc = desc
        self.hot = MemoryHotSource(desc)
        self.clock = InstantClock()
        self.env = dataclasses.replace(Env.system(), clock=self.clock)
        self.faults: list[Fault | None] = []
        self.on_step: Callable[[str], None] = lambda step: None

    def write(self, *ids: int, v: int = 0) -> None:
        self.hot.write([{"id": i, "code": i, "v": v} for i in ids])

    def delete(self, *ids: int) -> None:
        self.hot.delete([{"id": i, "code": i} for i in ids])

    def round(self, *, epoch: int | None = None, round_id: str | None = None) -> CommitResult:
        return run_round(self.table, self.desc, self.hot, self.env, epoch=epoch, round_id=round_id)

    def model_ids(self) -> list[int]:
        return sorted(r["id"] for r in self.hot.rows())

    def model_values(self) -> list[tuple[int, int]]:
        return sorted((r["id"], r["v"]) for r in self.hot.rows())

    def ids(self) -> list[int]:
        return [i for i, _ in self.values()]

    def values(self) -> list[tuple[int, int]]:
        """``(id, v)`` of each row that readers of the lake see."""
        raise NotImplementedError

    def next_fault(self) -> Fault | None:
        return self.faults.pop(0) if self.faults else None

    def fail_always(self, fault: Fault) -> None:
        self.faults = [fault] * 100


class Lake(Tiered):
    """The real thing: a catalog, by default SQLite's, real files, and other engines that use both."""

    def __init__(
        self, folder: Path, desc: TableDescriptor, *, lands_late: bool = False, config: LakeConfig | None = None
    ) -> None:
        super().__init__(desc)
        self.folder = folder
        self.catalog = LakeCatalog(config or LakeConfig(), str(folder))
        self.io = self.catalog.create_table(desc).io
        self.table = SteppedTable(self, lands_late)
        self._sends_updates = isinstance(self.catalog.iceberg, RestCatalog)
        self._land: Callable[..., Any] = (
            staging.MetadataUpdates.publish if self._sends_updates else staging.swap_metadata
        )
        self._delayed: list[tuple[Any, ...]] = []

    def load(self) -> Table:
        return self.catalog.load(self.desc)

    def values(self) -> list[tuple[int, int]]:
        rows = self.load().scan().to_arrow()
        return sorted(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True))

    def commit_faultily(self, *args: Any) -> Any:
        """What a catalog does with one commit of tiering."""
        fault = self.next_fault()
        broken = ConnectionError(fault.value if fault else "")
        if fault is Fault.REFUSED:
            raise CommitFailedException
        if fault is Fault.DELAYED:
            self._delayed.append(args)
        if fault in (Fault.DELAYED, Fault.REQUEST_LOST):
            raise broken
        answer = self._land(*args)
        if fault is Fault.ANSWER_LOST:
            raise broken
        return self._land(*args) if fault is Fault.REPEATED else answer

    @contextmanager
    def committing(self, commit: Callable[..., Any]) -> Iterator[None]:
        """Have the catalog asked by way of ``commit``."""
        with pytest.MonkeyPatch.context() as patch:
            if self._sends_updates:
                patch.setattr(staging.MetadataUpdates, "publish", lambda updates: commit(updates))
            else:
                patch.setattr(staging, "swap_metadata", commit)
            yield

    def deliver(self) -> bool:
        if not self._delayed:
            return False
        try:
            self._land(*self._delayed.pop(0))
        except CommitFailedException:
            return False
        return True

    # ---- what others do -----------------------------------------------------------------------------------------

    def append_foreign(self, *ids: int, bucket: int | None = None) -> None:
        """Rows that another engine adds: they have no offset."""
        rows = [{"id": i, "code": i, "v": 0, "__bucket": bucket} for i in ids]
        lake = self.load().schema().as_arrow()
        self.load().append(pa.Table.from_pylist(rows, pa.schema([f.remove_metadata() for f in lake])))

    def delete_foreign(self, *ids: int) -> None:
        """What an engine that merges on read does: position deletes for rows of any file."""
        table = self.load()
        spec = LakeWriteSpec.of(table, target_file_bytes=0)
        transaction = Transaction(table)
        delta = RowDelta(transaction, {})
        for task in table.scan().plan_files():
            f = task.file
            fs, path = locate_file(self.io, f.file_path)
            held = pq.read_table(path, filesystem=fs, columns=["id"], partitioning=None)["id"]
            at = np.flatnonzero(np.isin(held.to_numpy(), ids))
            if len(at):
                written = write_position_deletes(
                    spec, {f.file_path: at}, spec_id=f.spec_id, partition=(f.partition[0],)
                )
                delta.add_deletes(to_data_file(written))
        delta.commit()
        transaction.commit_transaction()

    def rewrite_foreign(self, *, backwards: bool = False) -> None:
        """Compact all files into one per bucket; ``backwards`` leaves rows out of order."""
        self.stage_rewrite(backwards=backwards).commit_transaction()

    def stage_rewrite(self, *, backwards: bool = False) -> Transaction:
        """A compaction that is written, and not committed."""
        table = self.load()
        transaction = Transaction(table)
        delta = RowDelta(transaction, {})
        tasks = list(table.scan().plan_files())
        for task in tasks:
            delta.delete_data_file(task.file)
        for file in {d for t in tasks for d in t.delete_files}:
            delta.remove_deletes(file)
        spec = LakeWriteSpec.of(table, target_file_bytes=1 << 30)
        rows = pa.Table.from_batches(read_lake(table, self.desc, plan_files(table), system_columns=True))
        rows = rows.sort_by([(OFFSET_COLUMN, "descending" if backwards else "ascending")])
        for bucket in rows["__bucket"].unique().to_pylist():
            part = rows.filter(pc.equal(rows["__bucket"], bucket))
            for written in write_data_files(spec, part.to_batches(), (bucket,)):
                delta.append_data_file(to_data_file(written))
        delta.commit()
        return transaction

    def snapshot_ids(self) -> list[int]:
        return [s.snapshot_id for s in sorted(self.load().metadata.snapshots, key=lambda s: s.sequence_number or 0)]

    def expire(self, *snapshot_ids: int) -> None:
        """As engines do that remove what only these snapshots name."""
        strays = self.stray_files()
        self.load().maintenance.expire_snapshots().by_ids(list(snapshot_ids)).commit()
        self.lose(*(self.stray_files() - strays))

    def roll_back(self, snapshot_id: int) -> None:
        self.load().manage_snapshots().set_current_snapshot(snapshot_id).commit()

    def clean_up(self) -> None:
        """Orphan clean-up that takes every file for old."""
        remove_orphans(self.load, older_than_ms=-60_000, clock=SystemClock())

    def drop(self) -> None:
        self.catalog.iceberg.drop_table((self.desc.path.database, self.desc.path.table))

    def recreate(self, table_id: str) -> None:
        self.drop()
        self.catalog.create_table(dataclasses.replace(self.desc, table_id=table_id))

    # ---- files --------------------------------------------------------------------------------------------------

    def data_files(self) -> set[str]:
        """Every data and delete file in the table's folder."""
        return {str(p) for p in self.folder.rglob("*.parquet")}

    def used_files(self) -> set[str]:
        """Data and delete files of the current lake snapshot."""
        tasks = list(self.load().scan().plan_files())
        files = {t.file.file_path for t in tasks} | {d.file_path for t in tasks for d in t.delete_files}
        return {f.removeprefix("file://") for f in files}

    def stray_files(self) -> set[str]:
        """Addresses of data files, delete files and manifests that no listed snapshot names."""
        table = self.load()
        used: set[str] = set()
        for snapshot in table.metadata.snapshots:
            manifests = snapshot.manifests(table.io)
            used |= {snapshot.manifest_list, *(m.manifest_path for m in manifests)}
            used |= {e.data_file.file_path for m in manifests for e in m.fetch_manifest_entry(table.io)}
        there = self.all_files()
        assert used <= there, "a snapshot names files that are gone"
        return there - used

    def all_files(self) -> set[str]:
        """Addresses of every data file, delete file and manifest in the table's folder."""
        root = f"{self.catalog.properties['warehouse']}/{self.desc.path.database}"
        fs, path = locate_file(self.io, root)
        found = fs.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
        return {root + i.path[len(path) :] for i in found if i.base_name.endswith((".parquet", ".avro"))}

    def lose(self, *addresses: str) -> None:
        """Files go though snapshots name them."""
        for address in addresses:
            self.io.delete(address)


class SteppedTable(IcebergLakeTable):
    """A table whose steps tests see, and whose commits fail as they ask."""

    def __init__(self, lake: Lake, late: bool) -> None:
        super().__init__(lake.load, lake.desc)
        self._lake = lake
        self._late = late

    @property
    def lands_late(self) -> bool:
        return self._late

    def load(self) -> LakeVersion:
        self._lake.on_step("load")
        return super().load()

    def writer(self, version: LakeVersion, *, target_file_bytes: int) -> Any:
        lake, writer = self._lake, super().writer(version, target_file_bytes=target_file_bytes)

        class Writer:
            def write(self, batches: Any, tablet: TabletKey) -> Any:
                lake.on_step("write data")
                return writer.write(batches, tablet)

        return Writer()

    def stage(self, base: LakeVersion, change: LakeChange) -> StagedCommit:
        if change.deleted:
            self._lake.on_step("write deletes")
        return super().stage(base, change)

    def publish(self, staged: StagedCommit) -> CommitAnswer:
        self._lake.on_step("commit")
        with self._lake.committing(self._lake.commit_faultily):
            answer = super().publish(staged)
        self._lake.on_step("committed")
        return answer

    def expire(
        self, version: LakeVersion, snapshot_ids: Collection[int], in_use: Callable[[], Iterable[LakeUse]]
    ) -> Expired:
        def commit(*args: Any) -> Any:
            self._lake.on_step("commit")
            try:
                return self._lake.commit_faultily(*args)
            finally:
                self._lake.on_step("committed")

        with self._lake.committing(commit):
            return super().expire(version, snapshot_ids, in_use)


class ModelLake(Tiered):
    """The model, driven like the real thing."""

    def __init__(self, desc: TableDescriptor, *, lands_late: bool = False) -> None:
        super().__init__(desc)
        self.table = self.memory = MemoryLake(desc, SeededRandomness(7), lands_late=lands_late)
        self.memory.fault = lambda change: self.next_fault()
        self.memory.expiry_fault = self.next_fault
        self.memory.on_step = lambda step: self.on_step(step)
        self.deliver = self.memory.deliver
        self.roll_back = self.memory.roll_back
        self.drop = self.memory.drop
        self.clean_up = self.memory.clean_up
        self.recreate = self.memory.create
        self.snapshot_ids = self.memory.snapshot_ids
        self.rewrite_foreign = self.memory.rewrite_foreign

    def values(self) -> list[tuple[int, int]]:
        return sorted((r["id"], r["v"]) for r in self.memory.rows())

    def expire(self, *snapshot_ids: int) -> None:
        self.memory.forget(*snapshot_ids, files=True)

    def append_foreign(self, *ids: int, bucket: int | None = None) -> None:
        self.memory.append_foreign([{"id": i, "code": i, "v": 0} for i in ids], bucket)

    def delete_foreign(self, *ids: int) -> None:
        self.memory.delete_foreign(lambda row: row["id"] in ids)

    def stray_files(self) -> set[str]:
        assert self.memory.reachable() <= self.memory.stored(), "a snapshot names files that are gone"
        return self.memory.stored() - self.memory.reachable()

    def all_files(self) -> set[str]:
        return self.memory.stored()

    def lose(self, *addresses: str) -> None:
        self.memory.lose(addresses)


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


@pytest.fixture(params=["iceberg", "model"])
def make_any(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Lake | ModelLake]:
    """Makes the one lake of a test, real or the model's; both keep the same promises."""

    def make(*, keyed: bool = True, buckets: int = 1, lands_late: bool = False) -> Lake | ModelLake:
        desc = describe(keyed=keyed, buckets=buckets)
        if request.param == "model":
            return ModelLake(desc, lands_late=lands_late)
        return Lake(tmp_path, desc, lands_late=lands_late)

    return make


@pytest.fixture
def any_keyed(make_any: Callable[..., Lake | ModelLake]) -> Lake | ModelLake:
    return make_any()


@pytest.fixture
def any_log(make_any: Callable[..., Lake | ModelLake]) -> Lake | ModelLake:
    return make_any(keyed=False)


@pytest.fixture(params=["keyed", "log"])
def any_lake(request: pytest.FixtureRequest, make_any: Callable[..., Lake | ModelLake]) -> Lake | ModelLake:
    return make_any(keyed=request.param == "keyed")


def is_exact(lake: Tiered) -> bool:
    """Whether readers of the lake see the rows that the log makes."""
    return lake.values() == lake.model_values()
