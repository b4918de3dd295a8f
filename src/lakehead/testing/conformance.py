"""What every `Storage` must do, as checks that the real one and the fakes both pass."""

from __future__ import annotations

from lakehead.env.storage import Storage
from lakehead.errors import ClosedError


def check_storage(storage: Storage, folder: str) -> None:
    """Hold a storage to its protocol.

    Args:
        folder: a path that does not exist yet and may be created.

    Raises:
        AssertionError: it breaks a promise.
    """
    _check_log_file(storage, f"{folder}/logs")
    _check_files(storage, f"{folder}/files")
    _check_folders(storage, f"{folder}/deep/er")
    _check_database(storage, f"{folder}/data")


def _check_log_file(storage: Storage, folder: str) -> None:
    assert storage.list_files(folder) == []
    storage.make_folder(folder)
    storage.make_folder(folder)
    path = f"{folder}/a.log"
    file = storage.open_log(path)
    assert storage.list_files(folder) == ["a.log"]
    assert file.size == 0 and file.read(0, 0).size == 0
    file.append([b"abc", memoryview(b"defg"), b"", bytearray(b"h")])
    assert file.size == 8
    kept = file.read(1, 6)
    assert kept.to_pybytes() == b"bcdefg"
    file.append([b"x"] * 1500)
    file.sync()
    assert file.size == 1508 and file.read(8, 1500).to_pybytes() == b"x" * 1500
    file.truncate(3)
    assert file.size == 3 and file.read(0, 3).to_pybytes() == b"abc"
    file.append([b"new"])
    file.sync()
    assert file.read(0, 6).to_pybytes() == b"abcnew"
    last = file.read(3, 3)
    file.close()
    file.close()
    assert last.to_pybytes() == b"new", "buffers given out stay valid"
    _check_closed(storage, path)
    again = storage.open_log(path)
    assert again.size == 6 and again.read(2, 4).to_pybytes() == b"cnew"
    again.append([b"!"])
    assert again.read(0, 7).to_pybytes() == b"abcnew!"
    again.close()


def _check_closed(storage: Storage, path: str) -> None:
    """A reader that comes after the end is told so; it must never see other bytes."""
    file = storage.open_log(path)
    file.close()
    try:
        found = file.read(0, 3)
    except ClosedError:
        return
    raise AssertionError(f"read {found.to_pybytes()!r} from a closed file")


def _check_files(storage: Storage, folder: str) -> None:
    storage.make_folder(folder)
    path = f"{folder}/note.json"
    assert storage.read_file(path) is None
    storage.write_atomic(path, b"one")
    storage.write_atomic(path, b"two, longer")
    assert storage.read_file(path) == b"two, longer"
    assert storage.list_files(folder) == ["note.json"], "no temporary file stays"
    storage.write_atomic(path, b"")
    assert storage.read_file(path) == b""
    storage.remove(path)
    storage.remove(path)
    assert storage.read_file(path) is None and storage.list_files(folder) == []
    _check_rename(storage, folder)


def _check_rename(storage: Storage, folder: str) -> None:
    storage.write_atomic(f"{folder}/old", b"old")
    file = storage.open_log(f"{folder}/new.tmp")
    file.append([b"new"])
    file.sync()
    storage.rename(f"{folder}/new.tmp", f"{folder}/old")
    assert storage.list_files(folder) == ["old"] and storage.read_file(f"{folder}/old") == b"new"
    storage.remove(f"{folder}/old")
    assert file.read(0, 3).to_pybytes() == b"new", "who has a removed file open may go on reading it"
    file.close()


def _check_database(storage: Storage, folder: str) -> None:
    storage.make_folder(folder)
    path = f"{folder}/some.db"
    first = storage.open_database(path)
    first.executescript("create table t(n integer)")
    second = storage.open_database(path)
    for n, end in enumerate(("commit", "rollback", "commit")):
        first.execute("begin immediate")
        first.execute("insert into t values (?)", (n,))
        seen = second.execute("select count(*) from t").fetchone()
        assert seen == (min(n, 1),), "nobody sees what is not committed"
        first.execute(end)
    second.execute("begin immediate")
    second.execute("insert into t values (3)")
    second.execute("commit")
    for db in (first, second, storage.open_database(path)):
        assert db.execute("select n from t order by n").fetchall() == [(0,), (2,), (3,)]
        db.close()


def _check_folders(storage: Storage, folder: str) -> None:
    storage.make_folder(folder)
    storage.write_atomic(f"{folder}/b", b"b")
    storage.open_log(f"{folder}/a").close()
    assert storage.list_files(folder) == ["a", "b"], "sorted"
    storage.make_folder(f"{folder}/below")
    storage.write_atomic(f"{folder}/below/c", b"cc")
    assert storage.folder_bytes(folder) == 3 and storage.folder_bytes(f"{folder}/missing") == 0
    storage.remove_tree(folder)
    storage.remove_tree(folder)
    assert storage.list_files(folder) == [] and storage.read_file(f"{folder}/b") is None
