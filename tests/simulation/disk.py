"""The disk of a simulated server: slow, full at times, and with a memory that a power cut takes away."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.threads import TaskLock

from lakehead.env.storage import LogFile
from lakehead.testing.storage import FaultyStorage, _Bytes

OnAppend = Callable[[str, bytes, int], None]
OnChange = Callable[[str], None]
_SECONDS = {"append": 0.0, "rename": 0.0, "sync": 0.004, "write_atomic": 0.002, "sync_folder": 0.002}
"""How long each kind of call takes at most; others take no time."""


@dataclass
class DiskFaults:
    """Chances, each per call."""

    sync_fails: float = 0.0
    refused: float = 0.0


class Disk(FaultyStorage):
    """What outlives the server's processes.

    Attributes:
        on_append: told of all bytes that were appended to a file: path, bytes, and the file's size after them.
        on_remove: told of files before they are removed.
        on_replace: told of files whose bytes were replaced.
    """

    def __init__(self, scheduler: Scheduler, on_append: OnAppend, on_remove: OnChange, on_replace: OnChange) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.faults = DiskFaults()
        self.on_append = on_append
        self.on_remove = on_remove
        self.on_replace = on_replace
        self.before = self._work
        self._removed: set[str] = set()

    def _work(self, action: str, path: str) -> None:
        """Take time, then perhaps refuse. What a call does, it does when this returns, at once; so what is appended
        while the disk syncs need not be on it after that, and a name that is new or gone is so before it is synced."""
        seconds = _SECONDS.get(action)
        if seconds is None:
            return
        if seconds:
            self.scheduler.sleep(self.scheduler.draws.random() * seconds)
        else:
            self.scheduler.pause()
        self.scheduler.check_alive()
        faults, draws = self.faults, self.scheduler.draws
        if action in ("sync", "sync_folder") and faults.sync_fails and draws.random() < faults.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if action in ("append", "write_atomic") and faults.refused and draws.random() < faults.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def holds(self, path: str, size: int, *, durably: bool = False) -> bool:
        """Whether a file has these many bytes (that a power cut would spare), or had them when it was removed."""
        file = self._files.get(path)
        if file is None:
            return path in self._removed
        if durably:
            return self._synced.get(path) is file and file.synced >= size
        return len(file.data) >= size

    def copied(
        self, on_append: OnAppend, on_remove: OnChange, on_replace: OnChange, moved: Callable[[str], str]
    ) -> Disk:
        """Another disk, with all that is on this one now, under other names, and synced."""
        made = Disk(self.scheduler, on_append, on_remove, on_replace)
        made._files = {moved(path): _Bytes(bytes(file.data)) for path, file in self._files.items()}
        made._folders = {moved(path) for path in self._folders}
        made._removed = {moved(path) for path in self._removed}
        made._synced, made._synced_folders = dict(made._files), set(made._folders)
        return made

    def _new_lock(self) -> TaskLock:
        return TaskLock(self.scheduler, reentrant=False)

    def present(self, path: str) -> bool:
        """Whether there is such a file now."""
        return path in self._files

    def remove(self, path: str) -> None:
        if path in self._files:
            self.on_remove(path)
            self._removed.add(path)
        super().remove(path)

    def write_atomic(self, path: str, data: bytes) -> None:
        super().write_atomic(path, data)
        self.on_replace(path)

    def replace_unsynced(self, path: str, data: bytes) -> None:
        super().replace_unsynced(path, data)
        self.on_replace(path)

    @property
    def in_transaction(self) -> bool:
        """Whether anybody is in a transaction of a database."""
        return any(isinstance(lock, TaskLock) and lock.held for lock in self._database_locks.values())

    def remove_tree(self, path: str) -> None:
        self._removed |= {name for name in self._files if name.startswith(f"{path}/")}
        super().remove_tree(path)

    def crash(self, *, torn_bytes: int = 0) -> None:
        super().crash(torn_bytes=torn_bytes)
        self.before = self._work

    def paths(self) -> list[str]:
        """All files, sorted."""
        return sorted(self._files)


class MountedDisk:
    """A disk as one server process sees it: calls take time, may fail, and end with the process."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._scheduler = disk.scheduler

    def open_log(self, path: str) -> LogFile:
        self._scheduler.check_alive()
        return _MountedFile(self, self._disk.open_log(path), path)

    def list_files(self, folder: str) -> list[str]:
        self._scheduler.check_alive()
        return self._disk.list_files(folder)

    def folder_bytes(self, folder: str) -> int:
        self._scheduler.check_alive()
        return self._disk.folder_bytes(folder)

    def make_folder(self, path: str) -> None:
        self._scheduler.check_alive()
        self._disk.make_folder(path)

    def sync_folder(self, path: str) -> None:
        self._scheduler.check_alive()
        self._disk.sync_folder(path)

    def remove(self, path: str) -> None:
        self._scheduler.pause()
        self._scheduler.check_alive()
        self._disk.remove(path)

    def rename(self, path: str, to: str) -> None:
        self._scheduler.check_alive()
        self._disk.rename(path, to)

    def remove_tree(self, path: str) -> None:
        self._scheduler.check_alive()
        self._disk.remove_tree(path)

    def write_atomic(self, path: str, data: bytes) -> None:
        self._scheduler.check_alive()
        self._disk.write_atomic(path, data)

    def read_file(self, path: str) -> bytes | None:
        self._scheduler.check_alive()
        return self._disk.read_file(path)

    def read_range(self, path: str, start: int, length: int) -> pa.Buffer | None:
        self._scheduler.check_alive()
        return self._disk.read_range(path, start, length)

    def open_database(self, path: str) -> sqlite3.Connection:
        self._scheduler.check_alive()
        return self._disk.open_database(path)

    def version(self, path: str) -> tuple[int, ...] | None:
        self._scheduler.check_alive()
        return self._disk.version(path)


class _MountedFile:
    def __init__(self, mounted: MountedDisk, file: LogFile, path: str) -> None:
        self._mounted = mounted
        self._file = file
        self._path = path

    @property
    def size(self) -> int:
        return self._file.size

    def append(self, parts: Sequence[object]) -> None:
        disk = self._mounted._disk
        self._file.append(parts)
        disk.on_append(self._path, b"".join(bytes(memoryview(p)) for p in parts), self._file.size)  # type: ignore[arg-type]

    def sync(self) -> None:
        self._file.sync()

    def truncate(self, size: int) -> None:
        self._mounted._scheduler.check_alive()
        self._file.truncate(size)

    def read(self, start: int, length: int) -> pa.Buffer:
        self._mounted._scheduler.check_alive()
        return self._file.read(start, length)

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        self._file.close()
