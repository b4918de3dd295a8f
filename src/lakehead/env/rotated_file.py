"""A file of lines that is put aside when it is large, so that only the newest are kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading

from lakehead.env.storage import storage_errors
from lakehead.errors import InvalidPropertyError


class RotatedFile:
    """Appends lines to ``path``, for this user alone. Thread-safe.

    A file that would get longer than ``bytes_max`` becomes ``path.1``, that one ``path.2``, and so on up to ``kept``;
    the oldest goes. Lines are in the system's hands when `write` returns, not on the disk.
    """

    def __init__(self, path: str, *, bytes_max: int, kept: int) -> None:
        """Open it, or make it.

        Raises:
            InvalidPropertyError: another process writes it, or it is no file of this user.
            StorageError: it cannot be written.
        """
        self._path = path
        self._bytes_max = bytes_max
        self._kept = kept
        self._lock = threading.Lock()
        self._fd, self._size = self._opened(path)

    def _opened(self, path: str) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with storage_errors(path, "open"):
            fd = os.open(path, flags, 0o600)
            try:
                found = os.fstat(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found.st_uid == os.getuid():
                    os.fchmod(fd, 0o600)
            except BlockingIOError as e:
                os.close(fd)
                raise InvalidPropertyError(f"another process writes {path}: give each a file of its own") from e
            except BaseException:
                os.close(fd)
                raise
        return fd, found.st_size

    def write(self, line: bytes) -> None:
        """Append a line; nothing happens once the file is closed.

        Raises:
            StorageError: it could not be written; nothing of it is there.
        """
        line += b"\n"
        with self._lock:
            if self._fd < 0:
                return
            if self._size and self._size + len(line) > self._bytes_max:
                self._put_aside()
            with storage_errors(self._path, "write"):
                written = os.write(self._fd, line)
                if written < len(line):
                    os.ftruncate(self._fd, self._size)  # else the next line would go on with it
                    raise OSError(errno.ENOSPC, "the line is not complete")
            self._size += written

    def _put_aside(self) -> None:
        # First what may fail: none of those that are kept leaves before the next one is there.
        fd, size = self._opened(f"{self._path}.new")
        names = [self._path, *(f"{self._path}.{n}" for n in range(1, self._kept + 1))]
        try:
            with storage_errors(self._path, "rename"):
                for older, newer in reversed(list(itertools.pairwise(names))):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(older, newer)
                os.replace(f"{self._path}.new", self._path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._size = fd, size

    def close(self) -> None:
        """Let go of it. A second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def forget(self) -> None:
        """In a forked child: the parent goes on with it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
