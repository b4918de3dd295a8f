"""One owner per folder, in this process and across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakehead.config import LakeConfig
from lakehead.env.folder_lock import FolderLock, catalog_id, read_announcement
from lakehead.env.storage import LocalStorage
from lakehead.errors import FencedError, StorageError

TRY = (
    "import sys; from lakehead.env.folder_lock import FolderLock;"
    " print(FolderLock.try_acquire(sys.argv[1]) is not None)"
)


def other_process_gets(folder: str) -> bool:
    out = subprocess.run([sys.executable, "-c", TRY, folder], capture_output=True, text=True, check=True)
    return out.stdout.strip() == "True"


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    folder = str(tmp_path / "made" / "new")
    lock = FolderLock.try_acquire(folder)
    assert lock is not None
    assert FolderLock.try_acquire(folder) is None
    assert not other_process_gets(folder)
    lock.release()
    lock.release()
    assert other_process_gets(folder), "its end released the lock"
    again = FolderLock.try_acquire(folder)
    assert again is not None
    again.release()


def test_forked_child_holds_nothing(tmp_path: Path) -> None:
    lock = FolderLock.try_acquire(str(tmp_path))
    assert lock is not None
    inherited = FolderLock(str(tmp_path), os.dup(lock._fd))  # what a fork leaves: the same open file, twice
    inherited.forget()
    inherited.forget()
    assert FolderLock.try_acquire(str(tmp_path)) is None, "the parent still holds it"
    lock.release()


def test_announcement_lives_as_long_as_the_owner_says(tmp_path: Path) -> None:
    lock = FolderLock.try_acquire(str(tmp_path))
    assert lock is not None
    assert read_announcement(str(tmp_path)) is None
    lock.announce("lakehead://127.0.0.1:9123", "f" * 32, LakeConfig())
    note = read_announcement(str(tmp_path))
    assert note is not None
    assert (note["uri"], note["folder_id"], note["pid"]) == ("lakehead://127.0.0.1:9123", "f" * 32, str(os.getpid()))
    lock.release()
    assert read_announcement(str(tmp_path)) is None


def test_catalogs_are_told_apart_and_their_users_are_not() -> None:
    def of(user: str, table: str = "lake") -> str:
        return catalog_id(LakeConfig(catalog={"type": "sql", "uri": f"postgresql://{user}@host/{table}"}))

    assert catalog_id(LakeConfig(name="other")) == ""
    assert of("a:b") == of("c:d") != of("a:b", "lake2") != ""
    spelled = [{"uri": "x", "warehouse": at} for at in ("file:///b/w", "file:///b/w/", "/b/w", "file:/b/w", "/b/w2")]
    assert [len({catalog_id(LakeConfig(catalog=c)) for c in some}) for some in (spelled[:4], spelled)] == [1, 2]


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'"uri"', json.dumps({"uri": "lakehead://x:1"}).encode()])
def test_an_announcement_that_makes_no_sense_is_none(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "endpoint.json").write_bytes(note)
    assert read_announcement(str(tmp_path)) is None


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_watched_is_part_of_what_is_owned(tmp_path: Path, how: str) -> None:
    lock = FolderLock.try_acquire(str(tmp_path))
    assert lock is not None
    watched = tmp_path / "metadata.db"
    watched.write_bytes(b"x")
    lock.watch(str(watched))
    lock.require_held()
    (tmp_path / "other").write_bytes(b"x")
    watched.unlink() if how == "removed" else (tmp_path / "other").replace(watched)
    with pytest.raises(FencedError, match=r"metadata\.db was removed"):
        lock.require_held()
    lock.release()


def test_what_cannot_be_tidied_keeps_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system that has become read-only, say."""
    lock = FolderLock.try_acquire(str(tmp_path))
    assert lock is not None
    with monkeypatch.context() as patched:

        def refused(storage: LocalStorage, path: str) -> None:
            raise StorageError("read-only", path=path)

        patched.setattr(LocalStorage, "remove", refused)
        with pytest.raises(StorageError, match="read-only"):
            lock.release()
    lock.release()
    assert other_process_gets(str(tmp_path))


def test_impossible_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        FolderLock.try_acquire(str(tmp_path / "file"))
