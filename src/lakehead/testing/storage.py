"""Storage in memory, and one that fails as disks do: no room, failed syncs, power cuts that tear the last write.

`MemoryStorage` keeps what `LocalStorage` promises (`lakehead.testing.conformance` holds both to it). `FaultyStorage`
also knows which bytes and which names were synced, so that a test can cut the power at any byte and open what is left.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence

import pyarrow as pa

from lakehead.env.storage import LogFile, storage_errors
from lakehead.env.threads import Lock
from lakehead.errors import ClosedError, CorruptionError, StorageError
from lakehead.testing.database import MemoryDatabase

_numbers = itertools.count()
_folder = functools.cache(os.path.dirname)


class _Bytes:
    """One file: its bytes, and how many of them are on the imagined disk."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = len(data)
        self.number = next(_numbers)
        self.changes = 0


class MemoryLogFile:
    """A `LogFile` over bytes in memory."""

    def __init__(self, storage: MemoryStorage, path: str, file: _Bytes) -> None:
        self._storage = storage
        self._path = path
        self._file = file
        self._open = True

    @property
    def size(self) -> int:
        return len(self._file.data)

    def append(self, parts: Sequence[object]) -> None:
        data = b"".join(bytes(memoryview(p)) for p in parts)  # type: ignore[arg-type]
        self._require_open()
        with storage_errors(self._path, "write"):
            self._storage._before("append", self._path)
        self._file.data += data
        self._file.changes += 1
        self._storage._last_written = self._path

    def sync(self) -> None:
        self._require_open()
        end = len(self._file.data)
        with storage_errors(self._path, "sync"):
            self._storage._before("sync", self._path)
        self._file.synced = max(self._file.synced, end)

    def truncate(self, size: int) -> None:
        self._require_open()
        del self._file.data[size:]
        self._file.changes += 1
        self._file.synced = min(self._file.synced, size)

    def read(self, start: int, length: int) -> pa.Buffer:
        self._require_open()
        if len(self._file.data) < start + length:
            size = len(self._file.data)
            raise CorruptionError(f"{self._path} was cut to {size} bytes: restore it", path=self._path, position=size)
        return pa.py_buffer(bytes(self._file.data[start : start + length]))

    def release(self) -> None:
        return

    def close(self) -> None:
        self._open = False

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError(f"{self._path} is closed")


class MemoryStorage:
    """A `Storage` in memory. Thread-safe as far as `Storage` asks: one appender a file, any readers."""

    def __init__(self) -> None:
        self._files: dict[str, _Bytes] = {}
        self._folders: set[str] = set()
        self._synced: dict[str, _Bytes] = {}
        """What each name of a file leads to on the imagined disk."""
        self._synced_folders: set[str] = set()
        self._names_lock = threading.Lock()  # nothing waits, and nothing else runs, while it is held
        self._handles: list[MemoryLogFile] = []
        self._database_locks: dict[str, Lock] = {}
        self._last_written: str | None = None

    def _before(self, action: str, path: str) -> None:
        """Called before bytes are appended, synced or replaced, and before a folder's names are synced, when they have
        changed already; raises `OSError` to refuse."""

    def open_log(self, path: str) -> LogFile:
        folder = os.path.dirname(path)
        with storage_errors(path, "open"):
            if folder not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if path not in self._files:
            self._files[path] = _Bytes()
            try:
                self.sync_folder(folder)
            except StorageError:
                del self._files[path]
                raise
        file = MemoryLogFile(self, path, self._files[path])
        self._handles.append(file)
        return file

    def list_files(self, folder: str) -> list[str]:
        inside = (path for path in (*list(self._files), *list(self._folders)) if _folder(path) == folder)
        return sorted(os.path.basename(path) for path in inside if path != folder)

    def folder_bytes(self, folder: str) -> int:
        return sum(len(file.data) for path, file in self._files.copy().items() if path.startswith(f"{folder}/"))

    def make_folder(self, path: str) -> None:
        chain = [path]
        while (parent := os.path.dirname(chain[-1])) != chain[-1]:
            chain.append(parent)
        self._folders.update(chain)
        for folder in reversed(chain):
            if folder not in self._synced_folders:
                self._sync_names(os.path.dirname(folder))
                self._synced_folders.add(folder)

    def sync_folder(self, path: str) -> None:
        self._sync_names(path)
        with self._names_lock:
            others = {n: f for n, f in self._synced.items() if _folder(n) != path}
            self._synced = others | {n: f for n, f in self._files.copy().items() if _folder(n) == path}

    def _sync_names(self, folder: str) -> None:
        with storage_errors(folder, "sync"):
            self._before("sync_folder", folder)

    def remove(self, path: str) -> None:
        if self._files.pop(path, None) is not None:
            self.sync_folder(os.path.dirname(path))

    def rename(self, path: str, to: str) -> None:
        with storage_errors(path, "rename"):
            self._before("rename", path)
            if path not in self._files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._files[to] = self._files.pop(path)
        if self._last_written == path:
            self._last_written = to
        self.sync_folder(os.path.dirname(to))

    def remove_tree(self, path: str) -> None:
        for name in [n for n in self._files.copy() if n.startswith(f"{path}/")]:
            self._files.pop(name, None)
        self._folders -= {f for f in self._folders.copy() if f == path or f.startswith(f"{path}/")}
        self._sync_names(os.path.dirname(path))
        with self._names_lock:
            self._synced = {n: f for n, f in self._synced.items() if not n.startswith(f"{path}/")}
            folders = self._synced_folders.copy()
            self._synced_folders -= {f for f in folders if f == path or f.startswith(f"{path}/")}

    def write_atomic(self, path: str, data: bytes) -> None:
        with storage_errors(path, "write"):
            self._before("write_atomic", path)
        self._files[path] = _Bytes(data)
        self.sync_folder(os.path.dirname(path))

    def replace_unsynced(self, path: str, data: bytes) -> None:
        """Have a file hold this; after a power cut what it held before, unless its folder was synced since."""
        with storage_errors(path, "write"):
            self._before("append", path)
        self._files[path] = _Bytes(data)

    def read_file(self, path: str) -> bytes | None:
        file = self._files.get(path)
        return None if file is None else bytes(file.data)

    def read_range(self, path: str, start: int, length: int) -> pa.Buffer | None:
        file = self._files.get(path)
        with storage_errors(path, "read"):
            self._before("read", path)
        return None if file is None else pa.py_buffer(bytes(file.data[start : start + length]))

    def open_database(self, path: str) -> sqlite3.Connection:
        if os.path.dirname(path) not in self._folders:
            raise sqlite3.OperationalError("unable to open database file")
        return MemoryDatabase(self, path, self._database_locks.setdefault(path, self._new_lock()))

    def _new_lock(self) -> Lock:
        return threading.Lock()

    def version(self, path: str) -> tuple[int, ...] | None:
        file = self._files.get(path)
        return None if file is None else (file.number, len(file.data), file.changes)


class FaultyStorage(MemoryStorage):
    """A `MemoryStorage` that a test can make fail.

    Attributes:
        full: while True, writes are refused as on a full disk.
        sync_fails: while True, syncs are refused, as by a dying disk.
        before: called with (action, path) before each "append", "sync", "write_atomic" and "rename", before each "read"
            of a range, and before each "sync_folder", without which a power cut takes new names; may wait or raise
            `OSError`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.sync_fails = False
        self.before: Callable[[str, str], None] | None = None
        self.syncs = 0
        self._count_lock = threading.Lock()

    def _before(self, action: str, path: str) -> None:
        if self.before is not None:
            self.before(action, path)
        if action == "sync":
            with self._count_lock:
                self.syncs += 1
        if self.sync_fails and action in ("sync", "sync_folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.full and action in ("append", "write_atomic"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def crash(self, *, torn_bytes: int = 0) -> None:
        """Cut the power: every file loses its unsynced bytes, but for the first ``torn_bytes`` of those of the file
        that was written last; new, changed and removed names that no folder sync kept are as before. Files that were
        open are dead; open them again."""
        for handle in self._handles:
            handle.close()
        self._handles.clear()
        self._database_locks.clear()
        self._folders = set(self._synced_folders)
        self._files = {n: f for n, f in self._synced.items() if os.path.dirname(n) in self._folders}
        self._synced = dict(self._files)
        for path, file in self._files.items():
            kept = torn_bytes if path == self._last_written else 0
            del file.data[file.synced + kept :]
            file.synced = len(file.data)
        self.full = self.sync_fails = False
        self.before = None

    def unsynced_bytes(self) -> int:
        """How many bytes of the file that was written last a power cut could take."""
        file = self._files.get(self._last_written or "")
        return 0 if file is None else len(file.data) - file.synced

    def flip_bit(self, path: str, position: int, bit: int = 0, *, by_a_program: bool = False) -> None:
        """Damage one bit of a file: as a disk does, which no one sees, or as a program does that writes it."""
        self._files[path].data[position] ^= 1 << bit
        self._files[path].changes += by_a_program

    def cut(self, path: str, size: int) -> None:
        """Cut a file, as a program does, under whoever has it open."""
        del self._files[path].data[size:]
        self._files[path].changes += 1
