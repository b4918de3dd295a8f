"""One owner per data folder: an advisory file lock, and a note of where the owner can be reached."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re

from lakehead.config import LakeConfig
from lakehead.env.storage import FOLDER_MODE, LocalStorage, storage_errors
from lakehead.errors import FencedError

_LOCK = "LOCK"
_ENDPOINT = "endpoint.json"
_USER = re.compile(r"//[^/@]*@")
"""Of an address."""
_LOCAL = re.compile(r"^file:(?://)?(?=/)")
_log = logging.getLogger("lakehead.env")


class FolderLock:
    """Exclusive ownership of a data folder by this process, until released or the process ends."""

    def __init__(self, folder: str, fd: int) -> None:
        self._folder = folder
        self._path = os.path.join(folder, _LOCK)
        self._fd = fd
        held = os.fstat(fd)
        self._held: dict[str, tuple[int, int] | None] = {self._path: (held.st_dev, held.st_ino)}

    @classmethod
    def try_acquire(cls, folder: str) -> FolderLock | None:
        """Own the folder, made when it is missing; None when a live process owns it.

        Raises:
            StorageError: the folder cannot be created or written.
        """
        LocalStorage().make_folder(folder)
        path = os.path.join(folder, _LOCK)
        with storage_errors(path, "open"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        _keep_private(folder)
        return cls(folder, fd)

    def require_held(self) -> None:
        """Return when no other process can have become the owner: the file that is locked, and those that are
        watched, still have their names.

        Raises:
            FencedError: it was removed or replaced, or the folder was moved, under its owner.
        """
        lost = next((path for path, file in self._held.items() if _file(path) != file), None)
        if lost is not None:
            raise FencedError(
                f"{lost} was removed, moved or replaced while this process served the folder: another may be its"
                " owner now: nothing more is written; close this connection, or stop this server, and connect again",
                path=lost,
            )

    def watch(self, path: str) -> None:
        """Have `require_held` look at this file, too, which is there and never replaced by its owner."""
        self._held[path] = _file(path)

    def announce(self, uri: str, folder_id: str, lake: LakeConfig) -> None:
        """Leave word where the owner listens, and which catalog its lakes are in."""
        note = json.dumps({"uri": uri, "folder_id": folder_id, "pid": os.getpid(), "lake": catalog_id(lake)}).encode()
        LocalStorage().write_atomic(os.path.join(self._folder, _ENDPOINT), note)

    def release(self) -> None:
        """Give the folder up.

        Raises:
            StorageError: the word of where the owner listens cannot be taken away; it is given up.
        """
        if self._fd < 0:
            return
        try:
            if _file(self._path) == self._held[self._path]:  # else the word is another's
                LocalStorage().remove(os.path.join(self._folder, _ENDPOINT))
        finally:
            os.close(self._fd)
            self._fd = -1

    def forget(self) -> None:
        """In a forked child: let go of the inherited lock; the parent keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _file(path: str) -> tuple[int, int] | None:
    """Which file has this name; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _keep_private(folder: str) -> None:
    """Let no other user into a folder that begins to be a data folder; one that is one already is its user's choice."""
    found = os.stat(folder)
    if found.st_uid != os.getuid() or not found.st_mode & 0o077:
        return
    if os.listdir(folder) == [_LOCK]:
        os.chmod(folder, FOLDER_MODE)
    else:
        _log.warning("other users of this machine can look into %s: chmod -R go= %s keeps them out", folder, folder)


def catalog_id(lake: LakeConfig) -> str:
    """Tells the catalogs of two configurations apart, without what they say of users; empty of one beside the data."""
    if not lake.catalog:
        return ""
    said = [lake.name, *(str(lake.catalog.get(key, "")) for key in ("type", "uri", "warehouse"))]
    said[-1] = _LOCAL.sub("", said[-1]).rstrip("/")
    return hashlib.sha256("\n".join(_USER.sub("//", part) for part in said).encode()).hexdigest()[:16]


def read_announcement(folder: str) -> dict[str, str] | None:
    """Where the folder's owner listens (``uri``, ``folder_id``), and more; None when it left no readable note, or
    another user did."""
    try:
        fd = os.open(os.path.join(folder, _ENDPOINT), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as f:
        if os.fstat(fd).st_uid != os.getuid():
            return None
        data = f.read()
    try:
        note = {k: str(v) for k, v in json.loads(data or b"{}").items()}
    except (ValueError, AttributeError):
        return None
    return note if note.keys() >= {"uri", "folder_id"} else None
