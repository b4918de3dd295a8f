"""SQLite on a `MemoryStorage`: it works in memory, and its file is the image of what was committed last.

So a full disk refuses a commit, a failed sync leaves open whether it is on the disk, and a power cut takes what was not
synced, as for any other file. What SQLite does to be atomic on a real disk is taken for granted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Protocol

from lakehead.env.threads import Lock
from lakehead.errors import StorageError


class _Files(Protocol):
    def read_file(self, path: str) -> bytes | None: ...

    def write_atomic(self, path: str, data: bytes) -> None: ...

    def replace_unsynced(self, path: str, data: bytes) -> None: ...

    def version(self, path: str) -> tuple[int, ...] | None: ...


class MemoryDatabase(sqlite3.Connection):
    """A connection in autocommit mode; ``lock`` is held by the one of a file's connections that is in a transaction."""

    def __init__(self, files: _Files, path: str, lock: Lock) -> None:
        super().__init__(":memory:", check_same_thread=False, isolation_level=None)
        self._files = files
        self._path = path
        self._lock = lock
        self._holds = False
        self._ending = False
        self._waits_for_disk = True
        self._image = b""
        self._seen: tuple[int, ...] | None = None
        self._follow()

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "begin immediate":
            return self._begin(lambda: super(MemoryDatabase, self).execute(sql))
        if sql in ("commit", "rollback"):
            return self._end(lambda: super(MemoryDatabase, self).execute(sql))
        if sql.startswith("pragma synchronous="):
            self._waits_for_disk = sql.endswith("full")
            return super().execute(sql)
        if not self.in_transaction:
            self._follow()
        return super().execute(sql, parameters)

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        self._follow()
        cursor = super().executescript(script)
        self._write()
        return cursor

    def close(self) -> None:
        super().close()
        self._let_go()

    def __del__(self) -> None:
        """A process that is cut off closes nothing, which Python 3.13 warns of; what was in memory is gone with it."""
        super().close()

    def _begin(self, begin: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        self._lock.__enter__()
        self._holds = True
        try:
            self._follow()
            return begin()
        except BaseException:
            self._let_go()
            raise

    def _end(self, end: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        self._ending = True
        try:
            cursor = end()
            self._write()
            return cursor
        finally:
            self._ending = False
            self._let_go()

    def _let_go(self) -> None:
        if self._holds:
            self._holds = False
            self._lock.__exit__(None, None, None)

    def _follow(self) -> None:
        """Take over what another connection has committed; nothing while this one commits, which may fail yet."""
        if self._ending:
            return
        version = self._files.version(self._path)
        if version != self._seen:
            self._take(self._files.read_file(self._path) or b"")

    def _take(self, image: bytes) -> None:
        self._image, self._seen = image, self._files.version(self._path)
        if image:
            self.deserialize(image)

    def _write(self) -> None:
        image = self.serialize()
        if image == self._image:
            return
        write = self._files.write_atomic if self._waits_for_disk else self._files.replace_unsynced
        try:
            write(self._path, image)
        except StorageError as e:
            self._take(self._image)  # it may be on the disk all the same, and found there after a restart
            raise sqlite3.OperationalError(f"disk I/O error: {e}") from e
        self._image, self._seen = image, self._files.version(self._path)
