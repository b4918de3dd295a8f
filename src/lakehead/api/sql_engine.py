"""The DuckDB behind `con.sql`."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import duckdb

from lakehead.api.copied_tables import CopiedTables
from lakehead.api.relation import Reading
from lakehead.api.sandbox import catalog_name, make_duckdb
from lakehead.env.scratch_folders import ScratchFolder


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
        """What a statement on this cursor holds."""
        made = Reading(cursor, self)
        self.readings.add(made)
        return made

    def close(self) -> None:
        """End what its statements run now, and give back what none of them holds: they may still be asked."""
        for reading in list(self.readings):
            reading.close()
        self.copies.clear()
