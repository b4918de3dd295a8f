"""Folders of this user alone, outside of any data folder, where this user's processes find each other."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from lakehead.errors import StorageError


@dataclass(frozen=True)
class OwnFolder:
    """A folder that is made, or found to be this user's alone, when it is needed.

    Attributes:
        base: a folder that is there, in which nobody else can put another in the place of this user's.
        below: the names from there on.
    """

    base: str
    below: tuple[str, ...]

    @property
    def path(self) -> str:
        return os.path.join(self.base, *self.below)

    def keep_private(self, what: str) -> None:
        """Make it when it is missing, and close it to others.

        Args:
            what: is to be kept there, for messages.

        Raises:
            StorageError: another user could look into it, or put files there.
        """
        at = self.base
        for name in self.below:
            at = os.path.join(at, name)
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(at, 0o700)
                found = os.lstat(at)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o077:
                    os.chmod(at, 0o700)  # made by an earlier version, or by a shell
            except OSError as e:
                raise StorageError(
                    f"cannot keep {what} in {at}: {e.strerror}: set HOME to a folder of yours", path=at
                ) from e
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise StorageError(f"{at} belongs to another user: {what} would not be safe there; remove it", path=at)


def own_folders(name: str) -> Iterator[OwnFolder]:
    """Where something of this name can be kept, the best place first: in the home folder, which stays when the user
    logs out, in what the system gives a user who is logged in, in a folder for temporary files."""
    home = os.path.expanduser("~")
    if home != "~" and os.access(home, os.W_OK):
        yield OwnFolder(home, (".lakehead", name))
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        yield OwnFolder(runtime, ("lakehead", name))
    yield OwnFolder(tempfile.gettempdir(), (f"lakehead-{os.getuid()}", "lakehead", name))
