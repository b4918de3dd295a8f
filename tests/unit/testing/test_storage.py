"""The fakes keep what they fake."""

from __future__ import annotations

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
