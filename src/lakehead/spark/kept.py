"""What statements of a session found out, kept for the next ones: which rows of the lake are dead, the hot rows and the
live rows of worn lake files as files. It is of offsets, with the time when the last one was written, and of lake
snapshots, which never change: what is pinned as it was before is read as it was. Bounded; what was used longest ago
goes first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lakehead.spark import scratch
from lakehead.spark.connections import application_of
from lakehead.spark.scratch import ScratchFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENTRIES_MAX = 512
BYTES_MAX = 1 << 30
V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class _Entry:
    value: Any
    file: ScratchFile | None
    nbytes: int


class Kept:
    """Values of one Spark application, some of which have a file. Thread-safe."""

    def __init__(self, application: str) -> None:
        self.application = application
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, find: Callable[[], tuple[V, ScratchFile | None, int]]) -> tuple[V, ScratchFile | None]:
        """What is kept, or else found: a value, its file, to be read once, and the bytes that the value takes."""
        with self._lock:
            entry = self._entries.get(key)
            lost = None
            if entry is not None and entry.file is not None and not os.path.exists(entry.file.path):
                entry, lost = None, self._entries.pop(key)  # others tidied up
            if entry is not None:
                self._entries.move_to_end(key)
                if entry.file is not None:
                    entry.file.wanted += 1
        self._let_go([] if lost is None else [lost])
        if entry is None:
            value, file, size = find()
            entry = _Entry(value, file, size + (0 if file is None else file.size))
            self._keep(key, entry)
        return entry.value, entry.file

    def value(self, key: Hashable) -> Any:
        """What is kept, None where nothing is."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def noted(self, key: Hashable) -> bool:
        """Whether this was asked before, and is kept."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return True
        self.put(key, None, 0)
        return False

    def put(self, key: Hashable, value: object, nbytes: int) -> None:
        """Keep a value without a file, in place of what is kept by this key."""
        self._keep(key, _Entry(value, None, nbytes))

    def _keep(self, key: Hashable, entry: _Entry) -> None:
        over = []
        with self._lock:
            if key in self._entries:
                over.append(self._entries.pop(key))  # found by two at once
            if entry.nbytes > BYTES_MAX:  # all others would go for it
                over.append(entry)
            else:
                self._entries[key] = entry
            held = sum(e.nbytes for e in self._entries.values())
            while self._entries and (len(self._entries) > ENTRIES_MAX or held > BYTES_MAX):
                _, oldest = self._entries.popitem(last=False)
                over.append(oldest)
                held -= oldest.nbytes
        self._let_go(over)

    def _let_go(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.file is not None:
                entry.file.kept = False
        if entries:
            scratch.sweep()

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        self._let_go(entries)


_lock = threading.Lock()
_kept: Kept | None = None


def kept_of(spark: SparkSession) -> Kept:
    """What is kept for a session's application; what was kept for one before it goes."""
    global _kept
    application = application_of(spark)
    with _lock:
        before, now = _kept, _kept
        if now is None or now.application != application:
            now = _kept = Kept(application)
    if before is not None and before is not now:
        before.clear()
    return now
