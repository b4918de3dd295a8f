"""The metadata store: what it keeps, across reopening and from threads."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakehead.config import TableProperties
from lakehead.env import Env
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import (
    ClosedError,
    CorruptionError,
    FencedError,
    LimitExceededError,
    PermissionDeniedError,
    StorageError,
    TableExistsError,
    TableNotFoundError,
    UnsupportedFormatError,
)
from lakehead.protocol.table_info import TableInfo
from lakehead.server.catalog import (
    AddToken,
    AlterTable,
    Command,
    CreatePartition,
    CreateTable,
    DropTable,
    EndWriter,
    ForgetFolder,
    GiveRole,
    GrantPrivileges,
    RegisterWriter,
    RemoveToken,
    RenameTables,
    RevokePrivileges,
    SetQuota,
    TakeRole,
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
    store.submit(CreateTable.of(DESC))
    store.submit(CreateTable.of(named("shop.a", "t2")))
    store.submit(CreateTable.of(named("b", "t3")))
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
    store.submit(CreateTable.of(desc))
    store.submit(CreateTable.of(named("b", "t3")))
    assert store.table_by_id("t1") == store.table(DESC.path) == desc
    assert store.tables(None) == [named("b", "t3"), desc]
    store.close()


def test_names_are_unique_and_errors_change_nothing(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.submit(CreateTable.of(DESC))
    with pytest.raises(TableExistsError, match=r"shop\.orders"):
        store.submit(CreateTable.of(dataclasses.replace(DESC, table_id="t2")))
    with pytest.raises(TableNotFoundError):
        store.table(TablePath("shop", "nope"))
    with pytest.raises(TableNotFoundError):
        store.table_by_id("t2")
    assert store.tables(None) == [DESC]
    store.close()


def test_dropping_forgets_partitions_and_writers(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.submit(CreateTable.of(DESC))
    first = store.submit(CreatePartition("t1", "day=1")).number
    assert (
        store.submit(CreatePartition("t1", "day=1")).number
        == first
        != store.submit(CreatePartition("t1", "day=2")).number
    )
    assert store.partitions("t1") == {"day=1": first, "day=2": store.submit(CreatePartition("t1", "day=2")).number}
    assert [store.submit(RegisterWriter("t1", b"w", 9)).epoch, store.submit(RegisterWriter("t1", b"w", 9)).epoch] == [
        1,
        2,
    ]
    assert (store.writer_epoch("t1", b"w"), store.writer_epoch("t1", b"other")) == (2, 0)
    store.submit(DropTable("t1", "a.t-1"))
    assert store.dropped_folders() == ["a.t-1"]
    store.submit(ForgetFolder("a.t-1"))
    assert store.dropped_folders() == []
    assert store.tables(None) == [] and store.partitions("t1") == {} and store.writer_epoch("t1", b"w") == 0
    store.submit(CreateTable.of(DESC))
    assert store.submit(CreatePartition("t1", "day=1")).number > first + 1, "a partition's folder is never used again"
    store.close()


def test_threads_share_it(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.submit(CreateTable.of(DESC))
    epochs: list[int] = []
    threads = [
        threading.Thread(target=lambda: epochs.append(store.submit(RegisterWriter("t1", b"w", 9)).epoch))
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
    with closing(sqlite3.connect(path)) as db, db:
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
    store.submit(CreateTable.of(DESC))
    assert [store.submit(CreatePartition("t1", name)).number for name in ("a", "b")] == [1, 2]
    disk.crash()
    store = disk.open()
    assert store.table_by_id("t1").path == DESC.path and store.partitions("t1") == {"a": 1, "b": 2}
    assert store.incarnation.number == 2


def test_a_power_cut_may_take_a_change_that_nobody_waits_for_unless_another_came_after_it() -> None:
    for another in (False, True):
        disk = Disk()
        store = disk.open()
        store.submit(CreateTable.of(DESC))
        store.submit_all([CreatePartition("t1", "a")], synced=False)
        assert store.partitions("t1") == {"a": 1}
        if another:
            store.submit(CreatePartition("t1", "b"))
        disk.crash()
        assert disk.open().partitions("t1") == ({"a": 1, "b": 2} if another else {})


def test_changes_that_nobody_waits_for_are_the_only_ones(path: str) -> None:
    store = MetadataStore(path, env(1))
    synced = lambda: store._db.execute("pragma synchronous").fetchone()  # noqa: E731
    before = synced()
    store.submit(CreateTable.of(DESC))
    store.submit_all([CreatePartition("t1", "a")], synced=False)
    assert synced() == before == (2,)
    with pytest.raises(TableExistsError):
        store.submit_all([CreateTable.of(DESC)], synced=False)
    assert synced() == before and store.partitions("t1") == {"a": 1}
    store.close()
    with pytest.raises(ClosedError):
        store.submit_all([CreatePartition("t1", "b")], synced=False)


@pytest.mark.parametrize("power", [True, False])
def test_a_change_that_the_disk_refused_is_not_there(power: bool) -> None:
    disk = Disk()
    store = disk.open()
    disk.full = True
    with pytest.raises(StorageError, match="cannot write the metadata"):
        store.submit(CreateTable.of(DESC))
    disk.full = False
    assert store.tables(None) == []
    store.submit(CreateTable.of(DESC))
    disk.sync_fails = True
    with pytest.raises(StorageError, match="cannot write the metadata"):
        store.submit(CreatePartition("t1", "a"))
    disk.sync_fails = False
    assert store.partitions("t1") == {}
    if power:
        disk.crash()
    # What the store wrote after it lies over it, synced or not.
    assert disk.open().partitions("t1") == {}


def test_of_two_stores_of_a_file_the_first_is_fenced() -> None:
    disk = Disk()
    first = disk.open()
    second = disk.open()
    second.submit(CreateTable.of(DESC))
    with pytest.raises(FencedError, match="another process"):
        first.submit(CreatePartition("t1", "a"))
    assert second.submit(CreatePartition("t1", "b")).number == 1 and first.partitions("t1") == {"b": 1}


def test_after_close_it_says_so(path: str) -> None:
    store = MetadataStore(path, env(1))
    store.close()
    with pytest.raises(ClosedError):
        store.tables(None)
    with pytest.raises(ClosedError):
        store.submit(CreateTable.of(DESC))


def test_what_cannot_be_opened_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []
    (tmp_path / "no.db").write_bytes(b"no database at all" * 100)
    newer = str(tmp_path / "newer.db")
    MetadataStore(newer, env(1)).close()
    with closing(sqlite3.connect(newer)) as db, db:
        db.execute("update meta set value = '99' where name = 'format'")
    real = sqlite3.connect

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        opened.append(real(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(StorageError, match="cannot open the metadata"):
        MetadataStore(str(tmp_path / "no.db"), env(1))
    with pytest.raises(UnsupportedFormatError):
        MetadataStore(newer, env(1))
    assert len(opened) == 2
    for db in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            db.execute("select 1")


def test_a_store_that_another_process_has_locked(path: str) -> None:
    store = MetadataStore(path, env(1))
    store._db.execute("pragma busy_timeout = 0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(StorageError, match="cannot write the metadata"):
        store.submit(CreateTable.of(DESC))
    other.execute("rollback")
    other.close()
    store.submit(CreateTable.of(DESC))
    store.close()


def tables_of(path: str) -> dict[str, list[tuple[object, ...]]]:
    """What the catalog holds, but for which folder it is of."""
    with closing(sqlite3.connect(path)) as db:
        names = ("databases", "tables", "schemas", "partitions", "writers", "dropped")
        names += ("writer_owners", "tokens", "grants", "roles", "quotas", "makers")
        kept = {name: sorted(db.execute(f"select * from {name}").fetchall()) for name in names}
        return kept | {"position": db.execute("select value from meta where name = 'position'").fetchall()}


@pytest.mark.parametrize("seed", range(5))
def test_planned_commands_make_the_same_catalog_anywhere(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    leader, standby = (MetadataStore(str(tmp_path / f"{name}.db"), env(seed)) for name in ("leader", "standby"))
    planned: list[Command] = []
    for n in range(200):
        table = f"t{draws.randrange(4)}"
        command = draws.choice([
            msgspec.structs.replace(CreateTable.of(named(f"d{n % 2}.{table}", table)), maker=f"m{n % 2}"),
            DropTable(table, f"folder-{n}"),
            ForgetFolder(f"folder-{draws.randrange(60)}"),
            CreatePartition(table, f"p={draws.randrange(3)}"),
            RegisterWriter(table, bytes([draws.randrange(3)]), 2),
            EndWriter(table, bytes([draws.randrange(3)]), draws.randrange(3), n),
            RegisterWriter(table, bytes([draws.randrange(3)]), 2, owner=f"p{n % 2}", taking=n % 3 > 0),
            AddToken(f"token-{n}", f"p{n % 2}", bytes(32), n, None if n % 3 else n + 1, 5),
            RemoveToken(f"token-{draws.randrange(60)}"),
            GrantPrivileges(f"p{n % 2}", *draws.choice([("*", ""), ("d1", ""), ("", table)]), ["read", "tier"], 50),
            RevokePrivileges(f"p{n % 2}", *draws.choice([("*", ""), ("d1", ""), ("", table)]), ["tier"]),
            GiveRole(f"p{n % 2}", "role:r", 50),
            TakeRole(f"p{n % 2}", "role:r"),
            SetQuota(f"p{n % 3}", {"streams": n} if n % 2 else {}, 2),
        ])  # fmt: skip
        with contextlib.suppress(TableExistsError, LimitExceededError, StorageError, PermissionDeniedError):
            planned.append(leader.submit(command))
    for position, command in enumerate(planned, 1):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command)
        standby.apply(position, again)
    for position in (len(planned), len(planned) + 2):
        with pytest.raises(CorruptionError, match="to follow"):
            standby.apply(position, planned[-1])
    for store in (leader, standby):
        store.close()
    assert tables_of(str(tmp_path / "leader.db")) == tables_of(str(tmp_path / "standby.db"))
    assert len(planned) > 30


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_commit_that_failed_does_not_come_back(power_cut: bool) -> None:
    """Its sync failed, so that it may be on the disk all the same, for a restart to find."""
    storage = FaultyStorage()
    storage.make_folder("/data")
    world = dataclasses.replace(env(1), storage=storage)
    store = MetadataStore("/data/metadata.db", world)
    failures = iter([True])

    def before(action: str, path: str) -> None:
        if action == "sync_folder" and next(failures, False):
            raise OSError(errno.EIO, "the disk cannot sync", path)

    storage.before = before
    with pytest.raises(StorageError, match="cannot write the metadata") as refused:
        store.submit(CreateTable.of(DESC))
    assert "Whether it is done" not in refused.value.message
    if power_cut:
        storage.crash()
    found = MetadataStore("/data/metadata.db", world)
    assert found.tables(None) == []
    found.close()


def test_while_a_failed_commit_may_come_back_it_is_said() -> None:
    storage = FaultyStorage()
    storage.make_folder("/data")
    world = dataclasses.replace(env(1), storage=storage)
    store = MetadataStore("/data/metadata.db", world)
    storage.sync_fails = True
    with pytest.raises(StorageError, match="Whether it is done shows"):
        store.submit(CreateTable.of(DESC))
    storage.sync_fails = False
    store.submit(CreateTable.of(named("b", "t3")))
    found = MetadataStore("/data/metadata.db", world)
    assert found.tables(None) == [named("b", "t3")], "the next change settles it"
    found.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_of_all_tables_is_what_each_of_them_says(path: str, seed: int) -> None:
    """Whatever was changed since it was asked last, also by commands that failed."""
    chance = random.Random(seed)
    store = MetadataStore(path, env(seed))
    names = [f"{database}.{name}" for database in ("a", "A") for name in ("x", "X", "y", "z")]

    def free() -> str:
        return chance.choice([*names, f"a.t{chance.randrange(99)}"])

    for number in range(120):
        tables = store.tables(None)
        one = chance.choice(tables) if tables else DESC
        new = dataclasses.replace(one, path=TablePath.parse(free()), former=(*one.former, one.path))
        parted = ("id",) if chance.random() < 0.3 else ()
        made = dataclasses.replace(named(free(), f"t{number}"), buckets=chance.randrange(1, 5), partition_by=parted)
        asked: list[Command] = [
            CreateTable.of(made),
            CreateTable.of(made),
            CreatePartition(table_id=one.table_id, name=f"p{number}"),
            AlterTable.of(dataclasses.replace(one, properties=TableProperties(log_ttl_ms=number))),
            RenameTables(infos=[TableInfo.of(new)]),
            DropTable(one.table_id, folder=f"f{number}"),
        ]
        with contextlib.suppress(TableExistsError):
            store.submit(chance.choice(asked))
        if chance.random() < 0.1:
            store.close()
            store = MetadataStore(path, env(seed))
        if chance.random() < 0.3:
            continue
        tables = store.tables(None)
        parts = {t.table_id: len(store.partitions(t.table_id)) for t in tables}
        assert store.tablet_count() == sum(t.buckets * (parts[t.table_id] if t.partition_by else 1) for t in tables)
        assert store.paths() == {t.table_id: t.path for t in tables}
        assert list(store.paths("a").values()) == [t.path for t in tables if t.path.database == "a"]
        for name in (*names, "a.b.c", "", "nope.x", "a.%"):
            called = [t.path for t in tables if str(t.path).lower() == name.lower()]
            assert list(store.paths_called([name, name.upper()]).values()) == called
        gone = TablePath.parse(chance.choice(names))
        now = sorted(str(t.path) for t in tables if gone in t.former)
        if gone not in {t.path for t in tables}:
            with pytest.raises(TableNotFoundError) as e:
                store.table(gone)
            assert e.value.context.get("now") == (now[0] if now else None)
    assert len({t.path for t in store.tables(None)}) > 3
    store.close()
