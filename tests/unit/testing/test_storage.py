"""The fakes keep what they fake."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from lakehead.errors import ClosedError, StorageError
from lakehead.testing.conformance import check_storage
from lakehead.testing.storage import FaultyStorage, MemoryStorage


@pytest.mark.parametrize("storage", [MemoryStorage(), FaultyStorage()])
def test_keeps_the_protocol(storage: MemoryStorage) -> None:
    check_storage(storage, "/data/new")


def test_crash_takes_what_was_not_synced() -> None:
    storage = FaultyStorage()
    storage.make_folder("/d")
    first, last = storage.open_log("/d/first"), storage.open_log("/d/last")
    first.append([b"synced"])
    first.sync()
    first.append([b"lost"])
    last.append([b"torn here"])
    assert storage.unsynced_bytes() == 9
    storage.crash(torn_bytes=4)
    with pytest.raises(ClosedError):
        last.append([b"from before"])
    assert (storage.read_file("/d/first"), storage.read_file("/d/last")) == (b"synced", b"torn")
    assert storage.unsynced_bytes() == 0


def test_what_threads_sync_at_once_is_all_kept() -> None:
    storage = FaultyStorage()
    errors: list[BaseException] = []
    switching = sys.getswitchinterval()

    def fill(folder: str) -> None:
        try:
            storage.make_folder(folder)
            for n in range(40):
                storage.open_log(f"{folder}/{n}").close()
            storage.make_folder(f"{folder}/gone")
            storage.remove_tree(f"{folder}/gone")
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=fill, args=(f"/d/{n}",)) for n in range(12)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert not errors
    storage.crash()
    assert [len(storage.list_files(f"/d/{n}")) for n in range(12)] == [40] * 12


def test_a_folder_whose_removal_was_not_synced_comes_back_unless_it_is_removed_again() -> None:
    for again in (False, True):
        storage = FaultyStorage()
        storage.make_folder("/d/e")
        storage.open_log("/d/e/a").close()
        storage.sync_fails = True
        with pytest.raises(StorageError):
            storage.remove_tree("/d/e")
        storage.sync_fails = False
        if again:
            storage.remove_tree("/d/e")
        storage.crash()
        assert storage.list_files("/d/e") == ([] if again else ["a"])


def test_full_disk_refuses_and_adds_nothing() -> None:
    storage = FaultyStorage()
    storage.make_folder("/d")
    file = storage.open_log("/d/a")
    storage.full = True
    with pytest.raises(StorageError, match="disk is full"):
        file.append([b"more"])
    with pytest.raises(StorageError, match="disk is full"):
        storage.write_atomic("/d/b", b"more")
    assert file.size == 0 and storage.read_file("/d/b") is None
    storage.full = False
    file.append([b"more"])
    assert file.size == 4


def test_failed_sync_leaves_bytes_unsynced() -> None:
    storage = FaultyStorage()
    storage.make_folder("/d")
    file = storage.open_log("/d/a")
    file.append([b"lost"])
    storage.sync_fails = True
    with pytest.raises(StorageError, match="cannot sync"):
        file.sync()
    storage.crash()
    assert storage.read_file("/d/a") == b""


def test_crash_takes_names_that_no_folder_sync_kept() -> None:
    storage = FaultyStorage()
    storage.make_folder("/d")
    for name in ("old", "renamed", "removed"):
        storage.write_atomic(f"/d/{name}", name.encode())

    def power_cut(action: str, path: str) -> None:
        if action == "sync_folder":
            raise KeyboardInterrupt

    def interrupted(call: Callable[..., object], *args: object) -> None:
        storage.before = power_cut
        with pytest.raises(KeyboardInterrupt):
            call(*args)
        storage.before = None

    interrupted(storage.open_log, "/d/new")
    interrupted(storage.write_atomic, "/d/old", b"other")
    interrupted(storage.rename, "/d/renamed", "/d/to")
    interrupted(storage.remove, "/d/removed")
    interrupted(storage.make_folder, "/d/folder")
    storage.open_log("/d/folder/file").close()
    assert storage.list_files("/d") == ["folder", "new", "old", "to"]
    storage.crash()
    assert storage.list_files("/d") == ["old", "removed", "renamed"] and storage.read_file("/d/old") == b"old"
    assert storage.list_files("/d/folder") == [], "a folder whose name is lost takes all in it"
    with pytest.raises(StorageError, match="No such file"):
        storage.open_log("/d/folder/file")
    storage.write_atomic("/d/old", b"kept")
    storage.crash()
    assert storage.read_file("/d/old") == b"kept"
