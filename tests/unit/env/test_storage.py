"""Local files: the protocol of storage, and what happens to them under errors and beside readers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

import lakehead.env.storage as storage_module
from lakehead.env.storage import LocalStorage, make_private, storage_errors, sync_file
from lakehead.errors import ClosedError, StorageError
from lakehead.testing.conformance import check_storage


def test_keeps_the_protocol(tmp_path: Path) -> None:
    check_storage(LocalStorage(), str(tmp_path / "new"))


def test_errors_name_the_path_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as raised, storage_errors("/some/file", "write"):
        raise OSError(28, "No space left on device")
    assert raised.value.context["path"] == "/some/file"
    assert "/some/file" in str(raised.value) and "free some room" in str(raised.value)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot create"):
        LocalStorage().make_folder(str(tmp_path / "file" / "folder"))
    with pytest.raises(StorageError, match="cannot read"):
        LocalStorage().read_file(str(tmp_path))
    with pytest.raises(StorageError, match="cannot sync"):
        sync_file(str(tmp_path / "missing"))


def test_a_file_that_was_removed_while_it_is_written_is_not_synced(tmp_path: Path) -> None:
    file = LocalStorage().open_log(str(tmp_path / "a.log"))
    file.append([b"kept"])
    file.sync()
    (tmp_path / "a.log").unlink()
    file.append([b"lost"])
    with pytest.raises(StorageError, match=r"a\.log was removed"):
        file.sync()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_append_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    file = LocalStorage().open_log(str(tmp_path / "a.log"))
    file.append([b"kept"])
    real = os.writev

    def half(fd: int, views: list[memoryview]) -> int:
        if len(views) == 1:
            raise error
        return real(fd, views[:1])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", half)
        with pytest.raises((StorageError, KeyboardInterrupt)):
            file.append([b"first", b"second"])
    assert file.size == 4
    file.append([b", and more"])
    file.close()
    assert (tmp_path / "a.log").read_bytes() == b"kept, and more"


def test_what_is_appended_is_brought_to_the_disk_beside_the_appender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that who syncs at last, with others waiting, has little to wait for: a segment's end took a fifth of a second
    from all writers of a table of durability "os"."""
    real, begun, go_on = storage_module._sync_data, threading.Event(), threading.Event()
    synced: list[tuple[str, int, bool]] = []

    def sync_data(fd: int) -> None:
        thread = threading.current_thread().name
        synced.append((thread, os.fstat(fd).st_ino, fd == file._fd))
        if thread == "lakehead-write-back":
            begun.set()
            assert go_on.wait(WAIT_SECONDS)
        real(fd)

    monkeypatch.setattr(storage_module, "_sync_data", sync_data)
    file = LocalStorage().open_log(str(tmp_path / "a.log"))
    part = bytes(storage_module._WRITE_BACK_BYTES // 4)
    for _ in range(5):
        file.append([part])
        file.sync()
    inode = os.stat(tmp_path / "a.log").st_ino
    assert synced == [("MainThread", inode, True)] * 5
    for _ in range(12):  # appends wait for nothing, and no second thread begins beside the first
        file.append([part])
    assert begun.wait(WAIT_SECONDS)
    bringing = file._bringing
    assert bringing is not None and synced[5:] == [("lakehead-write-back", inode, False)]
    file.sync()
    assert synced[6:] == [("MainThread", inode, True)]
    file.close()
    go_on.set()
    bringing.join(WAIT_SECONDS)
    assert not bringing.is_alive()
    assert os.path.getsize(tmp_path / "a.log") == 17 * len(part)


def test_what_the_disk_refuses_beside_the_appender_the_next_sync_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage_module, "_sync_data", refuse)
    file = LocalStorage().open_log(str(tmp_path / "a.log"))
    file.append([bytes(storage_module._WRITE_BACK_BYTES)])
    bringing = file._bringing
    assert bringing is not None
    bringing.join(WAIT_SECONDS)
    file.append([b"more"])
    with pytest.raises(StorageError, match="cannot sync"):
        file.sync()
    file.close()
    os.unlink(tmp_path / "a.log")
    storage_module._bring(str(tmp_path / "a.log"))  # trimmed meanwhile


def test_readers_beside_close_see_the_bytes_or_that_it_is_closed(tmp_path: Path) -> None:
    storage = LocalStorage()
    for _ in range(20):
        file = storage.open_log(str(tmp_path / "a.log"))
        file.truncate(0)
        ready, seen = threading.Event(), []

        def read(file=file, ready=ready, seen=seen) -> None:  # type: ignore[no-untyped-def]
            size = 0
            while True:
                try:
                    size = max(size, file.size)
                    seen.append(file.read(0, size).to_pybytes().strip(b"x"))
                except ClosedError:
                    return
                ready.set()

        thread = threading.Thread(target=read)
        thread.start()
        ready.wait()
        for _ in range(20):
            file.append([b"x" * 5000])
        file.close()
        thread.join()
        assert set(seen) == {b""}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose names were synced."""
    folders: list[str] = []
    real = storage_module._sync_folder

    def sync(path: str) -> None:
        folders.append(path)
        real(path)

    monkeypatch.setattr(storage_module, "_sync_folder", sync)
    return folders


def test_names_of_folders_are_synced_once_by_whoever_comes_upon_them(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "a/b").mkdir(parents=True)  # by a process that died before it synced them
    storage = LocalStorage()
    storage.make_folder(str(tmp_path / "a/b/c"))
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= set(synced)
    assert len(synced) == len(set(synced))
    synced.clear()
    storage.make_folder(str(tmp_path / "a/b/c"))
    assert synced == []
    storage.make_folder(str(tmp_path / "a/b/d"))
    assert synced == [str(tmp_path / "a/b")]
    synced.clear()
    storage.remove_tree(str(tmp_path / "a/b"))
    storage.make_folder(str(tmp_path / "a/b/c"))
    assert synced == [str(tmp_path / "a"), str(tmp_path / "a"), str(tmp_path / "a/b")]


def test_nothing_is_remembered_of_folders_that_are_gone(tmp_path: Path) -> None:
    storage = LocalStorage()
    storage.make_folder(str(tmp_path / "staged"))
    known = set(storage._durable)
    for n in range(3):
        storage.make_folder(str(tmp_path / f"staged/{n}/deep"))
        storage.remove_tree(str(tmp_path / f"staged/{n}"))
    assert set(storage._durable) == known


def test_a_folder_that_somebody_else_removed_is_safely_gone(tmp_path: Path, synced: list[str]) -> None:
    storage = LocalStorage()
    storage.remove_tree(str(tmp_path / "a"))  # by a process that died before it synced that
    assert synced == [str(tmp_path)]
    storage.remove_tree(str(tmp_path / "b/c"))
    assert synced == [str(tmp_path)]


def test_a_new_file_whose_name_could_not_be_synced_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    path = str(tmp_path / "a.log")

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(StorageError, match="cannot sync"):
            LocalStorage().open_log(path)
    assert not os.path.exists(path)
    synced.clear()
    LocalStorage().open_log(path).close()
    assert synced == [str(tmp_path)]


_BEGIN = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute('begin immediate')"


def test_making_a_file_private_lets_go_of_no_lock_on_it(tmp_path: Path) -> None:
    """SQLite locks with POSIX locks, which end with the first descriptor of the file that the process closes."""
    path = str(tmp_path / "a.db")
    db = LocalStorage().open_database(path)
    db.execute("create table t (x)")

    def another_process() -> str:
        done = subprocess.run(
            [sys.executable, "-c", _BEGIN, path], capture_output=True, text=True, timeout=WAIT_SECONDS
        )
        return done.stderr

    assert another_process() == ""
    db.execute("begin immediate")
    make_private(path)
    LocalStorage().open_database(path).close()
    assert "database is locked" in another_process()
    db.execute("commit")
    db.close()
    assert another_process() == "" and os.stat(path).st_mode & 0o777 == 0o600


def mapped_bytes(path: Path) -> int:
    """How much of a file this process has in its memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
               for header in lines if header.endswith(str(path)))  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
def test_memory_that_reads_brought_in_is_given_back_and_what_was_given_out_stays(tmp_path: Path) -> None:
    file = LocalStorage().open_log(str(tmp_path / "log"))
    file.release()
    data = bytes(range(256)) * (1 << 14)
    file.append([data])
    given = file.read(0, len(data))
    assert given.to_pybytes() == data and mapped_bytes(tmp_path / "log") == len(data)
    file.release()
    assert mapped_bytes(tmp_path / "log") == 0
    assert given.to_pybytes() == data
    file.append([b"more"])
    assert file.read(len(data), 4).to_pybytes() == b"more"
    file.close()
    file.release()
    assert given.to_pybytes() == data
