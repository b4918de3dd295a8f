"""The folder that the demo leaves behind: made, known by its marker, and replaced when a demo made it."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from lakehead.demo.feed import TABLES
from lakehead.env import LocalStorage
from lakehead.env.folder_lock import FolderLock
from lakehead.env.storage import storage_errors
from lakehead.errors import InvalidRequestError

_MARKER = "lakehead-demo.json"


def prepare_folder(folder: str, *, fresh: bool) -> bool:
    """Make an empty folder for a demo; True when an earlier demo was there and is gone.

    Args:
        fresh: replace an earlier demo even when someone has added tables to it.

    Raises:
        InvalidRequestError: the folder holds something else, is in use, or holds tables that no demo made.
        StorageError: it cannot be made or emptied.
    """
    found = _listed(folder)
    replace = bool(set(found) - {"LOCK"})
    if replace:
        _check_replaceable(folder, found, fresh=fresh)
        with storage_errors(folder, "empty"):
            for name in found:
                path = os.path.join(folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.remove(path)
    LocalStorage().make_folder(folder)
    write_marker(folder, None)
    return replace


def write_marker(folder: str, summary: dict[str, Any] | None) -> None:
    """Say that this is a demo's folder, with the summary once there is one."""
    note = json.dumps({"made_by": "lakehead demo", "summary": summary}, indent=2)
    LocalStorage().write_atomic(os.path.join(folder, _MARKER), note.encode())


def _listed(folder: str) -> list[str]:
    with storage_errors(folder, "read"):
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []


def _check_replaceable(folder: str, found: list[str], *, fresh: bool) -> None:
    if _MARKER not in found:
        raise InvalidRequestError(
            f"{folder} is not empty and no earlier demo made it: name another folder, for example"
            f" 'lakehead demo {folder.rstrip('/')}-2'",
            path=folder,
        )
    lock = FolderLock.try_acquire(folder)
    if lock is None:
        raise InvalidRequestError(
            f"{folder} is in use by another process: stop it, or name another folder", path=folder
        )
    lock.release()
    tables = {name.rpartition("-")[0] for name in _listed(os.path.join(folder, "tables"))}
    if (added := sorted(tables - set(TABLES))) and not fresh:
        raise InvalidRequestError(
            f"{folder} holds tables that the demo did not make ({', '.join(added)}): name another folder, or replace"
            " them with --fresh",
            path=folder,
        )
