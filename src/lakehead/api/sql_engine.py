"""The DuckDB behind `con.sql`."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import duckdb

from lakehead.api.copied_tables import CopiedTables
from lakehead.api.relation import Reading
from lakehead.api.sandbox import catalog_name, make_duckdb
from lakehead.env.clock import SystemClock
from lakehead.env.scratch_folders import ScratchFolder

_CLOSES_MAX, _CLOSE_EVERY_SECONDS = 50, 0.01


class SqlEngine:
    """The DuckDB of one connection's statements, those that are unrestricted or all others. Thread-safe.

    Attributes:
        unrestricted: its statements may do all that DuckDB can.
        copies: of tables, in it.
        readings: of its statements, as far as somebody has them.
    """

    def __init__(self, *, unrestricted: bool) -> None:
        self.unrestricted = unrestricted
        self._spill = ScratchFolder("lakehead-sql-")
        self._root = make_duckdb(self._spill, unrestricted=unrestricted)
        self._lock = threading.Lock()
        self._made = 0
        self._closed = False
        self.copies = CopiedTables(self.catalog)
        self.readings: weakref.WeakSet[Reading] = weakref.WeakSet()
        # Filled by the garbage collector, which may come at any instruction and so takes no lock.
        self._left: deque[str] = deque()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Something to run one statement on."""
        with self._lock:
            while self._left:
                self._root.execute(f"detach database if exists {self._left[0]}")
                self._left.popleft()
            return self._root.cursor()

    def alone(self) -> duckdb.DuckDBPyConnection:
        """The same in a DuckDB that has nothing else, about 13 ms."""
        return make_duckdb(self._spill, unrestricted=self.unrestricted)

    def catalog(self, cursor: duckdb.DuckDBPyConnection, owner: object) -> str:
        """The name of an empty catalog that lasts as long as the owner, about 1 ms."""
        with self._lock:
            self._made += 1
            name = catalog_name(self._made)
        weakref.finalize(owner, self._left.append, name).atexit = False  # first: an interrupt leaves none behind
        cursor.execute(f"attach ':memory:' as {name}")
        return name

    def reading(self, cursor: duckdb.DuckDBPyConnection) -> Reading:
        """What a statement on this cursor holds; of one that begins when this is closed already, nothing runs."""
        with self._lock:
            made = Reading(cursor, self, closed=self._closed)
            self.readings.add(made)
        return made

    def close(self) -> None:
        """End what its statements run now, which takes a moment, and give back what none of them holds: they may still
        be asked."""
        with self._lock:
            self._closed = True
            readings = list(self.readings)
        for _ in range(_CLOSES_MAX):
            # More than once: DuckDB forgets what it was told before it began.
            running = [reading.close() for reading in readings]
            if not any(running):
                break
            SystemClock().sleep(_CLOSE_EVERY_SECONDS)
        self.copies.clear()
