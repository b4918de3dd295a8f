"""The metadata store: what it keeps, across reopening and from threads."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from lakehead.config import TableProperties
from lakehead.env import Env
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import (
    ClosedError,
    FencedError,
    StorageError,
    TableExistsError,
    TableNotFoundError,
    UnsupportedFormatError,
)
from lakehead.server.metadata import FORMAT_VERSION, MetadataStore
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas, TableDescriptor, TablePath, TableSchema

DESC = TableDescriptor(
    table_id="t1",
    path=TablePath("shop", "orders"),
    schemas=Schemas.only(pa.schema([pa.field("id", pa.int64(), False), ("tags", pa.list_(pa.string()))])),
    primary_key=("id",),
    partition_by=(),
    bucket_key=("id",),
    buckets=3,
    lake=None,
    properties=TableProperties(durability="os", log_ttl_ms=5),
)


def named(name: str, table_id: str) -> TableDescriptor:
    return dataclasses.replace(DESC, table_id=table_id, path=TablePath.parse(name))


def env(seed: int) -> Env:
    return dataclasses.replace(Env.system(), randomness=SeededRandomness(seed))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.db")


def test_tables_come_back_as_they_were_given(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.create_table(DESC)
    store.create_table(named("shop.a", "t2"))
    store.create_table(named("b", "t3"))
    folder = store.incarnation.folder_id
    store.close()
    store = MetadataStore(path, env(2))
    assert store.incarnation.folder_id == folder and len(folder) == 32
    assert store.databases() == ["default", "shop"]
    assert [str(t.path) for t in store.tables("shop")] == ["shop.a", "shop.orders"]
    assert [str(t.path) for t in store.tables(None)] == ["default.b", "shop.a", "shop.orders"]
    assert store.tables("nope") == []
    assert store.table(DESC.path) == DESC == store.table_by_id("t1")
    store.close()


def test_a_table_knows_the_schemas_of_its_older_rows(path: str) -> None:
    [old] = DESC.schemas.known
    renamed = [f.with_name(f"{f.name}_2") for f in reversed(list(old.fields))]
    desc = dataclasses.replace(DESC, schemas=Schemas((old, TableSchema.of(1, pa.schema(renamed)))))
    store = MetadataStore(path, env(1))
    store.create_table(desc)
    store.create_table(named("b", "t3"))
    assert store.table_by_id("t1") == store.table(DESC.path) == desc
    assert store.tables(None) == [named("b", "t3"), desc]
    store.close()


def test_names_are_unique_and_errors_change_nothing(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.create_table(DESC)
    with pytest.raises(TableExistsError, match=r"shop\.orders"):
        store.create_table(dataclasses.replace(DESC, table_id="t2"))
    with pytest.raises(TableNotFoundError):
        store.table(TablePath("shop", "nope"))
    with pytest.raises(TableNotFoundError):
        store.table_by_id("t2")
    assert store.tables(None) == [DESC]
    store.close()


def test_dropping_forgets_partitions_and_writers(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.create_table(DESC)
    first = store.create_partition("t1", "day=1")
    assert store.create_partition("t1", "day=1") == first != store.create_partition("t1", "day=2")
    assert store.partitions("t1") == {"day=1": first, "day=2": store.create_partition("t1", "day=2")}
    assert [store.next_writer_epoch("t1", b"w", writers_max=9), store.next_writer_epoch("t1", b"w", writers_max=9)] == [
        1,
        2,
    ]
    assert (store.writer_epoch("t1", b"w"), store.writer_epoch("t1", b"other")) == (2, 0)
    store.drop_table("t1", "a.t-1")
    assert store.dropped_folders() == ["a.t-1"]
    store.folder_removed("a.t-1")
    assert store.dropped_folders() == []
    assert store.tables(None) == [] and store.partitions("t1") == {} and store.writer_epoch("t1", b"w") == 0
    store.create_table(DESC)
    assert store.create_partition("t1", "day=1") > first + 1, "a partition's folder is never used again"
    store.close()


def test_threads_share_it(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.create_table(DESC)
    epochs: list[int] = []
    threads = [
        threading.Thread(target=lambda: epochs.append(store.next_writer_epoch("t1", b"w", writers_max=9)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(epochs) == list(range(1, 17))
    store.close()


def test_a_newer_format_is_refused_and_left_alone(path: str) -> None:
    MetadataStore(path, env(1)).close()
    with sqlite3.connect(path) as db:
        db.execute("update meta set value = ? where name = 'format'", (str(FORMAT_VERSION + 1),))
    db.close()
    before = Path(path).read_bytes()
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        MetadataStore(path, env(1))
    assert Path(path).read_bytes() == before


def test_what_is_no_store(tmp_path: Path, path: str) -> None:
    with pytest.raises(StorageError, match="may write"):
        MetadataStore(str(tmp_path / "missing" / "metadata.db"), env(1))
    Path(path).write_bytes(b"hello, this is no database at all" * 100)
    with pytest.raises(StorageError, match="not a database"):
        MetadataStore(path, env(1))


class Disk(FaultyStorage):
    """One whose store is open."""

    def open(self) -> MetadataStore:
        self.make_folder("/data")
        return MetadataStore("/data/metadata.db", dataclasses.replace(env(1), storage=self))


def test_a_power_cut_takes_no_change_that_was_answered() -> None:
    disk = Disk()
    store = disk.open()
    store.create_table(DESC)
    assert [store.create_partition("t1", name) for name in ("a", "b")] == [1, 2]
    disk.crash()
    store = disk.open()
    assert store.table_by_id("t1").path == DESC.path and store.partitions("t1") == {"a": 1, "b": 2}
    assert store.incarnation.number == 2


@pytest.mark.parametrize("power", [True, False])
def test_a_change_that_the_disk_refused_is_not_there_before_the_next_start(power: bool) -> None:
    disk = Disk()
    store = disk.open()
    disk.full = True
    with pytest.raises(StorageError, match="cannot write the metadata"):
        store.create_table(DESC)
    disk.full = False
    assert store.tables(None) == []
    store.create_table(DESC)
    disk.sync_fails = True
    with pytest.raises(StorageError, match="cannot write the metadata"):
        store.create_partition("t1", "a")
    disk.sync_fails = False
    assert store.partitions("t1") == {}
    if power:
        disk.crash()
    # After a sync that failed only the next start can tell what is on the disk.
    assert disk.open().partitions("t1") == ({} if power else {"a": 1})


def test_of_two_stores_of_a_file_the_first_is_fenced() -> None:
    disk = Disk()
    first = disk.open()
    second = disk.open()
    second.create_table(DESC)
    with pytest.raises(FencedError, match="another process"):
        first.create_partition("t1", "a")
    assert second.create_partition("t1", "b") == 1 and first.partitions("t1") == {"b": 1}


def test_after_close_it_says_so(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.close()
    with pytest.raises(ClosedError):
        store.tables(None)
    with pytest.raises(ClosedError):
        store.create_table(DESC)


def test_a_store_that_another_process_has_locked(path: str) -> None:
    store = MetadataStore(path, env(1))
    store._db.execute("pragma busy_timeout = 0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(StorageError, match="cannot write the metadata"):
        store.create_table(DESC)
    other.execute("rollback")
    other.close()
    store.create_table(DESC)
    store.close()
