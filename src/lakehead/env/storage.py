"""Files as logs, checkpoints and metadata need them: append, sync, map, replace atomically; SQLite databases.

`LocalStorage` is the real one. Errors of the operating system become `StorageError` with the path and a hint, here and
nowhere else.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, Protocol

import pyarrow as pa

from lakehead.errors import ClosedError, CorruptionError, StorageError

_HINTS = {
    errno.ENOSPC: "the disk is full: free some room, writing resumes by itself",
    errno.EDQUOT: "the disk quota is used up: free some room, writing resumes by itself",
    errno.EACCES: "permission denied: use a folder that this user may write",
    errno.EPERM: "permission denied: use a folder that this user may write",
    errno.EROFS: "the file system is read-only",
    errno.EEXIST: "a file of that name is in the way: name a folder",
    errno.ENOTDIR: "a file of that name is in the way: name a folder",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
}
_IOV_MAX = 512
_WRITE_BACK_BYTES = 8 << 20
"""Appended and not synced, of one file, before they are brought to the disk: about 15 ms of a slow one."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""What is written is for this user alone."""


@contextmanager
def storage_errors(path: str, action: str) -> Iterator[None]:
    """Turn `OSError` into `StorageError` that names the path and says what to do."""
    try:
        yield
    except OSError as e:
        raise _refused(path, action, e) from e


def require_files(count: int, name: str) -> None:
    """Return when so many more files can be opened now, for a library that ends the process when they cannot.

    Args:
        name: of the library.

    Raises:
        StorageError: they cannot.
    """
    held: list[int] = []
    try:
        with storage_errors(name, "start"):
            while len(held) < count:
                held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in held:
            os.close(fd)


def _refused(path: str, action: str, e: OSError) -> StorageError:
    hint = _HINTS.get(e.errno or 0, e.strerror or str(e))
    return StorageError(f"cannot {action} {path}: {hint}", path=path, errno=e.errno)


class LogFile(Protocol):
    """An append-only file that can be read through memory maps while it grows."""

    @property
    def size(self) -> int:
        """Bytes that readers may see."""
        ...

    def append(self, parts: Sequence[object]) -> None:
        """Write buffers at the end, all or nothing: after an error the file has its former size.

        Raises:
            StorageError: the disk refused; nothing was added.
        """
        ...

    def sync(self) -> None:
        """Return once all appended bytes survive a power cut."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file. Only before anything of it was read."""
        ...

    def read(self, start: int, length: int) -> pa.Buffer:
        """Bytes ``[start, start + length)``, shared with the file, not copied; valid as long as the buffer lives, and
        as long as no one cuts the file.

        Raises:
            ClosedError: the file was closed.
            CorruptionError: someone cut it.
        """
        ...

    def release(self) -> None:
        """Give the memory back that reads brought in; whoever reads there again, in a buffer that was given out, too,
        has the system load it again."""
        ...

    def close(self) -> None:
        """Release the descriptor; buffers given out stay valid."""
        ...


class Storage(Protocol):
    """A file system, as far as logs, checkpoints and the metadata need one."""

    def open_log(self, path: str) -> LogFile:
        """Open a file for appending and reading, creating it durably when it is missing."""
        ...

    def list_files(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty when the folder is missing."""
        ...

    def folder_bytes(self, folder: str) -> int:
        """Sizes of all files in a folder and those below it, together; 0 when it is missing. Files that come and go
        meanwhile may be in it or not."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, durably; also when a process that died made some of them."""
        ...

    def sync_folder(self, path: str) -> None:
        """Return once the names of all files in a folder survive a power cut: those that a process that died has left
        may not yet."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file durably; nothing happens when it is missing. Whoever has it open may go on reading it."""
        ...

    def rename(self, path: str, to: str) -> None:
        """Give a file of the same folder another name, durably; a file that has that name is replaced."""
        ...

    def remove_tree(self, path: str) -> None:
        """Delete a folder and all in it, durably; nothing happens when it is missing."""
        ...

    def write_atomic(self, path: str, data: bytes) -> None:
        """Replace a file durably: after a crash it holds either the old or the new bytes."""
        ...

    def read_file(self, path: str) -> bytes | None:
        """All bytes of a file, None when it is missing."""
        ...

    def read_range(self, path: str, start: int, length: int) -> pa.Buffer | None:
        """Bytes ``[start, start + length)`` of a file, copied, fewer where it ends; None when it is missing.

        Raises:
            StorageError: the disk cannot read them.
        """
        ...

    def open_database(self, path: str) -> sqlite3.Connection:
        """Open a SQLite database, which is made when it is missing, in autocommit mode: what stands between
        ``begin immediate`` and ``commit`` survives a power cut once ``commit`` returns, whole or not at all. Any thread
        may use it, one at a time.

        Raises:
            sqlite3.Error: it cannot be opened; a statement raises it, too.
        """
        ...

    def version(self, path: str) -> tuple[int, ...] | None:
        """A value that changes when someone writes, cuts or replaces a file; None when it is missing.
        The first number is the same for the same file."""
        ...


class LocalLogFile:
    """A `LogFile` on a local file system. One appender at a time; reads from any thread.

    What is appended and not synced is brought to the disk now and then, beside the appender: a `sync` that comes at
    last, with a lock held perhaps that others wait for, has little left to wait for.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with storage_errors(path, "open"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
            self._size = os.fstat(self._fd).st_size
        self._brought = self._size
        self._bringing: threading.Thread | None = None
        self._map: pa.Buffer | None = None
        self._mapped: mmap.mmap | None = None
        # A reader that maps while another thread closes could map whatever file gets the descriptor's number next.
        self._map_lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    def append(self, parts: Sequence[object]) -> None:
        before = self._size
        views = [memoryview(p).cast("B") for p in parts]  # type: ignore[arg-type]
        total = sum(v.nbytes for v in views)
        try:
            self._write_all(views, total)
        except BaseException as e:
            # Also when the user interrupts: what is half written must not lie below the next frame.
            os.ftruncate(self._fd, before)
            if isinstance(e, OSError):
                raise _refused(self.path, "write", e) from e
            raise
        self._size = before + total
        if self._size - self._brought >= _WRITE_BACK_BYTES:
            self._write_back()

    def _write_back(self) -> None:
        if self._bringing is not None and self._bringing.is_alive():
            return
        self._brought = self._size
        self._bringing = threading.Thread(target=_bring, args=(self.path,), name="lakehead-write-back", daemon=True)
        with suppress(RuntimeError):  # there can be no more threads: the next sync does it
            self._bringing.start()

    def _write_all(self, views: list[memoryview], total: int) -> None:
        while total:
            written = os.writev(self._fd, views[:_IOV_MAX])
            total -= written
            while views and written >= views[0].nbytes:
                written -= views.pop(0).nbytes
            if views and written:
                views[0] = views[0][written:]

    def sync(self) -> None:
        with storage_errors(self.path, "sync"):
            _sync_data(self._fd)
            names = os.fstat(self._fd).st_nlink
        if names == 0:
            raise StorageError(
                f"{self.path} was removed while it was written: nothing that is in it would be there after a restart;"
                " what is in memory can still be read: save it, and restore the file",
                path=self.path,
            )
        self._brought = self._size

    def truncate(self, size: int) -> None:
        with storage_errors(self.path, "truncate"):
            os.ftruncate(self._fd, size)
        self._size = size
        self._map = self._mapped = None

    def read(self, start: int, length: int) -> pa.Buffer:
        if length == 0:
            return pa.py_buffer(b"")
        mapped = self._map
        if mapped is None or mapped.size < start + length:
            mapped = self._map_all()
        # A read beyond the file's end would kill the process.
        with self._map_lock:
            self._require_length(start + length)
        return mapped.slice(start, length)

    def _require_length(self, length: int) -> None:
        if self._fd < 0:
            raise ClosedError(f"{self.path} is closed")
        size = os.fstat(self._fd).st_size
        if size < length:
            raise CorruptionError(
                f"{self.path} was cut to {size} bytes of {self._size}: restore it", path=self.path, position=size
            )

    def _map_all(self) -> pa.Buffer:
        with self._map_lock:
            self._require_length(self._size)
            with storage_errors(self.path, "map"):
                self._mapped = mmap.mmap(self._fd, self._size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            self._map = pa.py_buffer(self._mapped)
            return self._map

    def release(self) -> None:
        mapped = self._mapped
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        with self._map_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self._map = self._mapped = None

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # the process gives all back, and what this would call may be gone
            return
        # A file that was trimmed while readers held it is closed when the last of them lets go.
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)


def _sync_data(fd: int) -> None:
    os.fdatasync(fd) if hasattr(os, "fdatasync") else os.fsync(fd)


def _bring(path: str) -> None:
    """Have the disk take what a file holds. That it did is for a sync to say, which is told of a failure, too: by a
    descriptor of its own, as the system tells each descriptor once."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync_data(fd)
        finally:
            os.close(fd)


class LocalStorage:
    """The machine's file system."""

    def __init__(self) -> None:
        self._durable: dict[str, tuple[int, int]] = {}  # folders whose names are safe, by device and inode

    def open_log(self, path: str) -> LocalLogFile:
        existed = os.path.exists(path)
        file = LocalLogFile(path)
        if not existed:
            try:
                _sync_folder(os.path.dirname(path))
            except BaseException:
                # The next attempt must not take it for a file whose name is durable.
                file.close()
                with suppress(OSError):
                    os.unlink(path)
                raise
        return file

    def list_files(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def folder_bytes(self, folder: str) -> int:
        total = 0
        for top, _, names in os.walk(folder):
            for name in names:
                with storage_errors(top, "read"), suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(top, name)).st_size
        return total

    def make_folder(self, path: str) -> None:
        path = os.path.abspath(path)
        with storage_errors(path, "create"):
            at, missing = path, []
            while not os.path.isdir(at) and os.path.dirname(at) != at:
                self._durable.pop(at, None)
                missing.append(at)
                at = os.path.dirname(at)
            for folder in reversed(missing):
                with suppress(FileExistsError):  # another made it meanwhile; a file in the way is found below
                    os.mkdir(folder, FOLDER_MODE)
            os.makedirs(path, exist_ok=True)
            self._sync_name(path)

    def _sync_name(self, folder: str) -> None:
        """Make the names of a folder and of all above it durable, once each. Names end
        where this user may not look and where another file system begins."""
        found = os.stat(folder)
        parent = os.path.dirname(folder)
        if self._durable.get(folder) == (found.st_dev, found.st_ino) or parent == folder:
            return
        if os.stat(parent).st_dev == found.st_dev and os.access(parent, os.R_OK):
            self._sync_name(parent)
            _sync_folder(parent)
        self._durable[folder] = (found.st_dev, found.st_ino)

    def sync_folder(self, path: str) -> None:
        _sync_folder(path)

    def remove(self, path: str) -> None:
        with storage_errors(path, "remove"):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            _sync_folder(os.path.dirname(path))

    def rename(self, path: str, to: str) -> None:
        with storage_errors(path, "rename"):
            os.replace(path, to)
            _sync_folder(os.path.dirname(to))

    def remove_tree(self, path: str) -> None:
        path = os.path.abspath(path)
        with storage_errors(path, "remove"):
            for folder in [path, *(os.path.join(top, name) for top, names, _ in os.walk(path) for name in names)]:
                self._durable.pop(folder, None)
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
            # Also when it is gone: its remover may have died before the removal was durable.
            if os.path.isdir(os.path.dirname(path)):
                _sync_folder(os.path.dirname(path))

    def write_atomic(self, path: str, data: bytes) -> None:
        temporary = f"{path}.tmp"
        with storage_errors(path, "write"):
            with open_private(temporary) as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
            _sync_folder(os.path.dirname(path))

    def read_file(self, path: str) -> bytes | None:
        try:
            with storage_errors(path, "read"), open(path, "rb") as f:
                return f.read()
        except StorageError as e:
            if e.context.get("errno") == errno.ENOENT:
                return None
            raise

    def read_range(self, path: str, start: int, length: int) -> pa.Buffer | None:
        with storage_errors(path, "read"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                buffer = pa.allocate_buffer(max(0, min(length, os.fstat(fd).st_size - start)))
                view, at = memoryview(buffer), 0
                while at < buffer.size and (got := os.preadv(fd, [view[at:]], start + at)):
                    at += got
                return buffer.slice(0, at)
            finally:
                os.close(fd)

    def open_database(self, path: str) -> sqlite3.Connection:
        with suppress(OSError):  # which SQLite says better
            make_private(path)
        db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            db.execute("pragma synchronous=full")
        except BaseException:
            db.close()
            raise
        return db

    def version(self, path: str) -> tuple[int, ...] | None:
        try:
            with storage_errors(path, "read"):
                found = os.stat(path)
        except StorageError as e:
            if e.context.get("errno") == errno.ENOENT:
                return None
            raise
        return found.st_ino, found.st_dev, found.st_size, found.st_mtime_ns


def open_private(path: str) -> BinaryIO:
    """A file to write, which only this user can read; one that is there is emptied."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb")


def make_private(path: str) -> None:
    """Make a file that only this user can read, for whoever would make it for everyone; one that is there is left."""
    # Not opened where it is there: with the first descriptor of a file that a process closes, POSIX lets go of all its
    # locks on it, those of SQLite in other threads among them.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def _sync_folder(path: str) -> None:
    with storage_errors(path, "sync"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_file(path: str) -> None:
    """Return once a file that is written and closed, and its name in its folder, survive a power cut.

    Raises:
        StorageError: the disk refused; the file may be lost.
    """
    with storage_errors(path, "sync"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    _sync_folder(os.path.dirname(path))
