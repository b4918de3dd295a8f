"""Copies of tables as DuckDB's own tables, which it reads as quickly as it can.

Whoever asks many questions of a table that changes little meanwhile had each of them read lake and log anew. A copy is
made by the statement that comes when reading the table has taken as long as copying it would, and given up where that
takes much longer: so nobody waits for long for what he may not need. Each statement has it go on to the moment that the
statement pins, which takes as long as what came since; where that is much, or no log tells of it, the copy is done.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.copied_table import BUCKETS_MAX, CopiedRows, CopiedTable
from lakehead.api.dataset import ReadRows
from lakehead.api.relation import require_uninterrupted
from lakehead.client.table import TableHandle
from lakehead.env.clock import Clock
from lakehead.errors import LakeheadError
from lakehead.lake.later_rows import ranges_between
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import Pin, UnionRead
from lakehead.predicate.read_spec import ReadSpec

TABLE_BYTES_MAX = 256 << 20
BYTES_MAX = 512 << 20
"""Of all copies of an engine; those that were used longest ago go first."""
TABLES_MAX = 256
CELLS_MAX = 64 << 20
"""Values of a table that is copied."""
READS_LEAST = 3
COPY_SECONDS = 0.006
CELLS_PER_SECOND = 30e6
"""What copying is taken to cost: so much, and as long as so many values take."""
COPY_TIMES_MAX = 2.0
COPY_LEAST = 0.1
"""Copying is given up when it takes so many times as long as reading has taken, which counts as so much at least, and
is tried again when reading has taken twice as long."""
EXCESS_MAX = 0.5
"""Seconds by which having a copy go on may take longer, all in all, than reading without one took, as of a wide table
of which little is read."""


@dataclass(eq=False)
class SeenTable:
    """A table as some statements in a row have found it, each as it was before and what came since, which could have
    read a copy.

    Attributes:
        pinned: what the newest of them read, under no lease.
        rows: which these are, without times.
        reads: how many statements there were; the first, which loads code as well, does not count.
        seconds: how long the others took.
        cells: how many values there are, once they were counted, and of which rows.
        again: a copy was not made, or was given up, and is tried again when they have taken so long.
        excess: how much longer having the copy go on took than reading without it, all in all.
        per_cell: seconds that copying took for each value when it was done or given up last, before it changed, too.
    """

    pinned: Pin
    rows: PinnedRows
    reads: int = 0
    seconds: float = 0.0
    cells: tuple[int, PinnedRows] | None = None
    again: float = 0.0
    per_cell: float = 0.0
    excess: float = 0.0
    copy: CopiedTable | None = None
    copying: threading.Lock = field(default_factory=threading.Lock)

    def begin_anew(self) -> None:
        """Read as before there was a copy, until that has taken as long as another one is taken to take."""
        self.copy, self.reads, self.seconds, self.excess = None, 0, 0.0, 0.0

    def timed(self, read: ReadRows, clock: Clock) -> ReadRows:
        """The same, noting how long it takes; of threads that do so at once, one may be lost."""

        def reading(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
            batches, took = read(columns, where), 0.0
            try:
                while True:
                    since = clock.monotonic()
                    batch = next(batches, None)
                    took += clock.monotonic() - since
                    if batch is None:
                        return
                    yield batch
            finally:
                self.seconds += took if self.reads else 0.0
                self.reads += 1

        return reading


class _TooLargeError(Exception):
    pass


class _TooSlowError(Exception):
    pass


class CopiedTables:
    """The copies of one DuckDB. Thread-safe.

    Args:
        attach: makes an empty catalog that lasts as long as an object, and returns its name.
    """

    def __init__(self, attach: Callable[[duckdb.DuckDBPyConnection, object], str]) -> None:
        self._attach = attach
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, bool], SeenTable] = OrderedDict()

    def seen(self, handle: TableHandle, pinned: Pin) -> SeenTable:
        """What is known of a table, which is nothing where it is not what it was and what came since."""
        rows = PinnedRows.untimed(handle, pinned)
        name = (rows.table_id, bool(pinned.ranges))
        with self._lock:
            seen = self._seen.get(name)
            if seen is None or not self._is_of(seen, handle, pinned, rows):
                per_cell = 0.0
                if seen is not None:
                    seen.copy, per_cell = None, seen.per_cell  # what reads the table as it was may hold the rest
                seen = self._seen[name] = SeenTable(pinned.unheld(), rows, per_cell=per_cell)
            self._seen.move_to_end(name)
            while len(self._seen) > TABLES_MAX:
                self._seen.popitem(last=False)[1].copy = None
            return seen

    @staticmethod
    def _is_of(seen: SeenTable, handle: TableHandle, pinned: Pin, rows: PinnedRows) -> bool:
        if seen.rows == rows:
            return True
        if (seen.rows.table_id, seen.rows.columns) != (rows.table_id, rows.columns):
            return False
        if ranges_between(handle, seen.pinned, pinned) is None:  # what others have pinned a little before is as good
            return ranges_between(handle, pinned, seen.pinned) is not None
        seen.pinned, seen.rows = pinned.unheld(), rows
        return True

    def copy(
        self, cursor: duckdb.DuckDBPyConnection, seen: SeenTable, handle: TableHandle, pinned: Pin
    ) -> CopiedRows | None:
        """What a pin reads, copied by now or before; None where that does not pay, or cannot be done: who reads less
        than all of it may be able to."""
        made = seen.copy
        if made is None and not self._pays(seen, handle, pinned):
            return None
        rows = PinnedRows.of(handle, pinned)
        if made is not None:
            since = handle.env.clock.monotonic()
            found = made.at(cursor, handle, pinned, rows)
            seen.excess += handle.env.clock.monotonic() - since - seen.seconds / max(seen.reads - 1, 1)
            seen.excess = max(seen.excess, 0.0)
            if made.outdated or made.nbytes > TABLE_BYTES_MAX:
                self._give_up(seen, made)
            elif seen.excess > EXCESS_MAX:
                self._give_up(seen, made, again=2 * max(seen.again, EXCESS_MAX))
        else:
            if not seen.copying.acquire(blocking=False):
                return None  # others do
            try:
                made = seen.copy or self._made(cursor, seen, rows, handle, pinned)
            finally:
                seen.copying.release()
            with self._lock:
                if made is not None and seen in self._seen.values():
                    seen.copy = made
            found = None if made is None else made.at(cursor, handle, pinned, rows)
        self._make_room()
        if found is not None:
            weakref.finalize(cursor, _let_go, found).atexit = False
        return found

    def _give_up(self, seen: SeenTable, made: CopiedTable, again: float = 0.0) -> None:
        with self._lock:
            if seen.copy is made:
                seen.begin_anew()
                seen.again = again

    def clear(self) -> None:
        """Keep no copy but those that somebody reads."""
        with self._lock:
            for seen in self._seen.values():
                seen.copy = None
            self._seen.clear()

    def _pays(self, seen: SeenTable, handle: TableHandle, pinned: Pin) -> bool:
        if seen.reads < READS_LEAST or seen.seconds < max(COPY_SECONDS, seen.again):
            return False
        rows = seen.rows
        if seen.cells is None or (seen.cells[1] != rows and self._pays_for(seen, seen.cells[0])):
            seen.cells = UnionRead(handle, pinned, ReadSpec(())).count() * len(handle.desc.schema), rows
        if seen.cells[0] > CELLS_MAX or (handle.desc.keyed and handle.desc.buckets > BUCKETS_MAX):
            self._later(seen)
            return False
        return self._pays_for(seen, seen.cells[0])

    @staticmethod
    def _pays_for(seen: SeenTable, cells: int) -> bool:
        return seen.seconds >= COPY_SECONDS + cells * max(1 / CELLS_PER_SECOND, seen.per_cell)

    @staticmethod
    def _later(seen: SeenTable) -> None:
        """It cannot be copied as it is, and is counted and tried again after twice the time."""
        seen.again, seen.cells = 2 * max(seen.seconds, COPY_LEAST), None

    def _made(
        self, cursor: duckdb.DuckDBPyConnection, seen: SeenTable, rows: PinnedRows, handle: TableHandle, pinned: Pin
    ) -> CopiedTable | None:
        clock, (cells, _) = handle.env.clock, seen.cells or (0, None)
        made = CopiedTable(functools.partial(self._attach, cursor), handle, rows)
        since = clock.monotonic()
        until = since + COPY_TIMES_MAX * max(seen.seconds, COPY_LEAST)

        def bounded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                if made.nbytes > TABLE_BYTES_MAX:
                    raise _TooLargeError
                if clock.monotonic() > until:
                    raise _TooSlowError
                yield batch

        try:
            made.fill(cursor, handle, pinned, bounded)
        except (duckdb.Error, pa.ArrowException, LakeheadError, _TooLargeError, _TooSlowError) as e:
            require_uninterrupted(e)
            self._later(seen)
            return None
        finally:
            seen.per_cell = _per_cell(clock.monotonic() - since, cells)
        return made

    def _make_room(self) -> None:
        with self._lock:
            copies = [seen for seen in self._seen.values() if seen.copy is not None]
            held = sum(seen.copy.nbytes for seen in copies if seen.copy is not None)
            for seen in copies:
                if held <= BYTES_MAX or seen.copy is None:
                    break
                held -= seen.copy.nbytes
                seen.begin_anew()


def _let_go(rows: CopiedRows) -> None:
    """What the end of a statement's cursor does: until then the copy is there."""


def _per_cell(seconds: float, cells: int) -> float:
    return seconds / max(cells, 1)
