"""Folders for temporary files that no killed process leaves behind for good: the next one that makes such a folder
removes those whose process is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import weakref

from lakehead.errors import StorageError


class ScratchFolder:
    """A folder that this user alone can enter; gone with this object, at the latest with a later process.

    It is locked as long as its process lives, or one that was forked from it.
    """

    def __init__(self, prefix: str) -> None:
        """Make one, among temporary files, after those of ended processes are removed.

        Args:
            prefix: how the names of its kind begin.

        Raises:
            StorageError: there is no place for it.
        """
        try:
            _remove_abandoned(tempfile.gettempdir(), prefix)
            made = tempfile.mkdtemp(prefix=f".{prefix}")
            fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self.path = os.path.join(os.path.dirname(made), os.path.basename(made)[1:])
            os.rename(made, self.path)  # found by others only now, as it is locked
        except OSError as e:
            # No other place helps where no file can be opened.
            how = "raise the limit (ulimit -n)" if e.errno in (errno.EMFILE, errno.ENFILE) else "set TMPDIR"
            raise StorageError(f"cannot make a folder for temporary files: {e.strerror}: {how}") from e
        self.remove = weakref.finalize(self, _remove, self.path, fd, os.getpid())


def _remove(path: str, fd: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child's copy is the parent's
        shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def _remove_abandoned(folder: str, prefix: str) -> None:
    for name in os.listdir(folder):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(os.path.join(folder, name))


def _remove_if_abandoned(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
