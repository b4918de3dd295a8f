"""Copying files and databases that others may be writing to."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from lakehead.env import LocalStorage
from lakehead.env.descriptors import open_descriptors, raise_descriptors
from lakehead.env.storage import make_private, open_private, storage_errors
from lakehead.errors import StorageError

_CHUNK = 1 << 20


class OpenFiles:
    """Files that are opened before it is their turn to be copied, so that who removes them takes nothing away: half as
    many as this process may still open; the others when they are copied.

    Args:
        held: what closes them.
    """

    def __init__(self, held: contextlib.ExitStack) -> None:
        self._held = held
        self._left = (raise_descriptors() - open_descriptors()) // 2
        self._names: dict[str, Sequence[str]] = {}
        self._files: dict[str, BinaryIO] = {}

    def open(self, path: str) -> None:
        """Raises: FileNotFoundError: it is gone."""
        if self._left <= 0:
            return
        try:
            self._files[path] = self._held.enter_context(os.fdopen(os.open(path, os.O_RDONLY), "rb"))
            self._left -= 1
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._left = 0

    def open_all(self, folder: str, suffixes: tuple[str, ...]) -> None:
        """Those of a folder that there are now; raises as `open`."""
        self._names[folder] = self.names(folder, suffixes)
        for name in self._names[folder]:
            self.open(os.path.join(folder, name))

    def names(self, folder: str, suffixes: tuple[str, ...]) -> Sequence[str]:
        """The files of a folder that there were when they were opened, or else are, by name."""
        if folder not in self._names:
            return sorted(name for name in os.listdir(folder) if name.endswith(suffixes))
        return self._names[folder]

    def copy(self, source: str, target: str) -> None:
        """See `copy_file`."""
        file = self._files.pop(source, None)
        if file is None:
            copy_file(source, target)
            return
        with file:
            _copy_open(file, target)


def copy_file(source: str, target: str) -> tuple[int, str]:
    """Copy what a file holds now, unsynced; size and checksum of the copy.

    Raises:
        FileNotFoundError: the source is gone.
    """
    with open(source, "rb") as read:
        return _copy_open(read, target)


def _copy_open(read: BinaryIO, target: str) -> tuple[int, str]:
    size, checksum = 0, hashlib.sha256()
    with storage_errors(target, "write"):
        _make_folder_of(target)
        with open_private(target) as write:
            while part := read.read(_CHUNK):
                write.write(part)
                checksum.update(part)
                size += len(part)
    return size, checksum.hexdigest()


def _make_folder_of(path: str) -> None:
    """Make a file's folder, and its name durable. One that is there was made by this run, as what others left was
    removed before: it need not be made durable for every file."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        LocalStorage().make_folder(folder)


def digest(path: str) -> tuple[int, str]:
    """Size and checksum of a file."""
    with storage_errors(path, "read"), open(path, "rb") as f:
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()


def copy_database(source: str, target: str) -> None:
    """One state of an SQLite database that others may be writing to, as a single file."""
    _make_folder_of(target)
    with storage_errors(target, "write"):
        make_private(target)
    with database(source) as read, database(target) as write:
        read.backup(write)
    with database(target) as db:
        db.execute("pragma journal_mode=delete")


@contextlib.contextmanager
def database(path: str) -> Iterator[sqlite3.Connection]:
    """An SQLite database, for a while.

    Raises:
        StorageError: from all that is done with it.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
            yield db
    except sqlite3.Error as e:
        raise StorageError(f"cannot copy the database {path}: {e}", path=path) from e
