"""Where a data folder lies: what tells a folder that was moved from one that was copied, also into its place."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
from dataclasses import asdict, dataclass

from lakehead.env.storage import storage_errors
from lakehead.errors import InvalidRequestError, StorageError

_MACHINE_ID = "/etc/machine-id"
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES, _BTIME_AT = -100, 0x800, 256, 80
"""From `statx(2)` of Linux, and how it lays out ``struct statx``, the same on all machines."""


def real_path(folder: str) -> str:
    """The full name of a folder that a user names, which need not exist; `os.path.realpath` of it.

    Raises:
        InvalidRequestError: nothing can have this name.
    """
    try:
        path = os.path.realpath(os.path.expanduser(folder))
        path.encode()
        return path
    except ValueError as e:  # a NUL, half a character, or bytes that are none
        raise InvalidRequestError(f"{folder!r} is no name of a folder ({e})", path=repr(folder)) from e


def require_working_folder(who: str) -> None:
    """Return where this process's working directory is there, which somebody asks for.

    Raises:
        StorageError: it was removed.
    """
    try:
        os.getcwd()
    except OSError as e:
        raise StorageError(
            f"the working directory of this process is gone ({e.strerror}), and {who} asks for it: change to one that"
            " is there, with os.chdir()"
        ) from e


def born_ns(path: str) -> int:
    """When a file was made, which no program changes and no copy has, in nanoseconds; 0 where that is not kept."""
    try:
        statx = ctypes.CDLL(None).statx
    except (AttributeError, OSError):  # not Linux: elsewhere Python tells it
        return int(getattr(os.stat(path), "st_birthtime", 0) * 1e9)
    found = ctypes.create_string_buffer(_STATX_BYTES)
    failed = statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found)
    (kept,) = struct.unpack_from("=I", found)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BTIME_AT)
    return 0 if failed or not kept & _STATX_BTIME else int(seconds) * 10**9 + int(nanoseconds)


@dataclass(frozen=True)
class Place:
    """A folder's name, and the file system's own numbers for it.

    Attributes:
        path: real path.
        inode: unique on the device, and kept when the folder is renamed.
        device: changes when disks are numbered anew, so it tells nothing where the path is the same.
        machine: whose devices those are; empty when the machine does not say.
        file: the inode of one file of it; what was put into the folder in its place has another, unless the file
            system gave it the number that became free. 0 is not known.
        born: when that file was made; 0 is not known.
    """

    path: str
    inode: int
    device: int
    machine: str
    file: int = 0
    born: int = 0

    @classmethod
    def of(cls, folder: str, file: str = "") -> Place:
        """The place of a folder that exists.

        Args:
            file: one that lasts as long as the folder, and exists.

        Raises:
            StorageError: it cannot be looked at.
        """
        with storage_errors(folder, "look at"):
            path = os.path.realpath(folder)
            found = os.stat(path)
            there = os.path.join(path, file)
            number, born = (os.stat(there).st_ino, born_ns(there)) if file else (0, 0)
        machine = ""
        with contextlib.suppress(OSError, UnicodeDecodeError), open(_MACHINE_ID, encoding="ascii") as f:
            machine = f.read().strip()
        return cls(path, found.st_ino, found.st_dev, machine, number, born)

    def is_copy_of(self, former: Place) -> bool:
        """Whether a folder that was at ``former`` cannot have been renamed to here: it was copied, or moved across
        disks, which looks the same, or what is in it was put there later."""
        if self.inode != former.inode:
            return True
        if _differ(self.file, former.file) or _differ(self.born, former.born):
            return True
        return self.path != former.path and (self.device, self.machine) != (former.device, former.machine)

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Place | None:
        """None for a text that tells no place; what lies there is then a copy."""
        try:
            values = json.loads(text)
            path, inode, device = str(values["path"]), int(values["inode"]), int(values["device"])
            file, born = int(values.get("file", 0)), int(values.get("born", 0))
            return cls(path, inode, device, str(values["machine"]), file, born)
        except (ValueError, KeyError, TypeError):
            return None


def _differ(a: int, b: int) -> bool:
    """Whether both are known, and are not the same."""
    return bool(a and b and a != b)
