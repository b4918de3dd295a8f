"""Copies of tables that stand still, as DuckDB's own tables, which it reads as quickly as it can.

Whoever asks many questions of a table that does not change meanwhile had each of them read lake and log anew. A copy is
made by the statement that comes when reading the table has taken as long as copying it would: so nobody waits twice as
long as without, whatever he does next. It serves until the table is found changed, which every statement asks first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.dataset import CountedDataset, ReadRows
from lakehead.client.table import TableHandle
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import Pin, UnionRead
from lakehead.predicate.read_spec import ReadSpec

TABLE_BYTES_MAX = 256 << 20
BYTES_MAX = 512 << 20
"""Of all copies of an engine; those that were used longest ago go first."""
TABLES_MAX = 256
CELLS_MAX = 64 << 20
READS_LEAST = 3
COPY_SECONDS = 0.006
CELLS_PER_SECOND = 30e6
"""What copying is taken to cost: so much, and as long as so many values take."""


@dataclass(eq=False)
class StillTable:
    """Rows of a table as of one moment, in a catalog of DuckDB's that lasts as long as this.

    Attributes:
        source: what a statement selects from.
        rows: which they are.
        nbytes: about what they take.
    """

    source: str
    rows: PinnedRows
    nbytes: int = 0


@dataclass(eq=False)
class _Seen:
    """A table as some statements in a row have found it.

    Attributes:
        rows: without times.
        reads: how many there were; the first, which loads code as well, does not count.
        seconds: how long the others took.
        cells: how many values there are, once that was asked.
        too_large: it was not copied, and will not be.
    """

    rows: PinnedRows
    reads: int = 0
    seconds: float = 0.0
    cells: int | None = None
    copy: StillTable | None = None
    too_large: bool = False
    copying: threading.Lock = field(default_factory=threading.Lock)

    def note(self, seconds: float) -> None:
        """Of threads that do so at once, one may be lost."""
        self.seconds += seconds if self.reads else 0.0
        self.reads += 1


class _TooLargeError(Exception):
    pass


class StillTables:
    """The copies of one DuckDB. Thread-safe.

    Args:
        attach: makes an empty catalog that lasts as long as an object, and returns its name.
    """

    def __init__(self, attach: Callable[[duckdb.DuckDBPyConnection, object], str]) -> None:
        self._attach = attach
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, bool], _Seen] = OrderedDict()

    def timed(self, handle: TableHandle, pinned: Pin, read: ReadRows) -> ReadRows:
        """The same, noting how long it takes."""
        seen, clock = self._found(handle, pinned), handle.env.clock

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
                seen.note(took)

        return reading

    def copy(
        self, cursor: duckdb.DuckDBPyConnection, handle: TableHandle, pinned: Pin, dataset: CountedDataset
    ) -> StillTable | None:
        """What a pin reads, copied by now or before; None where that does not pay.

        Raises:
            duckdb.Error: the table could not be read.
        """
        seen = self._found(handle, pinned)
        if seen.copy is None and not self._pays(seen, handle, pinned):
            return None
        rows = PinnedRows.of(handle, pinned)
        found = seen.copy
        if found is not None and found.rows == rows:
            return found
        if not seen.copying.acquire(blocking=False):
            return None  # others do
        try:
            seen.copy = None
            seen.copy = self._made(cursor, rows, dataset)
            seen.too_large = seen.copy is None
        finally:
            seen.copying.release()
        self._make_room()
        return seen.copy

    def _found(self, handle: TableHandle, pinned: Pin) -> _Seen:
        rows = PinnedRows.untimed(handle, pinned)
        name = (rows.table_id, bool(pinned.ranges))
        with self._lock:
            seen = self._seen.get(name)
            if seen is None or seen.rows != rows:
                seen = self._seen[name] = _Seen(rows)
            self._seen.move_to_end(name)
            while len(self._seen) > TABLES_MAX:
                self._seen.popitem(last=False)
            return seen

    def _pays(self, seen: _Seen, handle: TableHandle, pinned: Pin) -> bool:
        if seen.too_large or seen.reads < READS_LEAST or seen.seconds < COPY_SECONDS:
            return False
        if seen.cells is None:
            count = UnionRead(handle, pinned, ReadSpec(())).count()
            seen.cells = count * len(handle.desc.schema)
        return seen.cells <= CELLS_MAX and seen.seconds >= COPY_SECONDS + seen.cells / CELLS_PER_SECOND

    def _made(self, cursor: duckdb.DuckDBPyConnection, rows: PinnedRows, dataset: CountedDataset) -> StillTable | None:
        made, too_large = StillTable("", rows), False
        catalog = self._attach(cursor, made)
        made.source = f"{catalog}.main.rows"
        reader = dataset.scanner(dataset.shown).to_reader()

        def bounded() -> Iterator[pa.RecordBatch]:
            nonlocal too_large
            for batch in reader:
                made.nbytes += batch.nbytes
                if made.nbytes > TABLE_BYTES_MAX:
                    too_large = True
                    raise _TooLargeError
                yield batch

        try:
            relation = cursor.from_arrow(pa.RecordBatchReader.from_batches(reader.schema, bounded()))
            relation.query("copied", f"create table {made.source} as from copied")
        except duckdb.OutOfMemoryException:
            return None
        except (duckdb.Error, pa.ArrowException, _TooLargeError):
            if too_large:
                return None
            raise
        return made

    def _make_room(self) -> None:
        with self._lock:
            copies = [seen for seen in self._seen.values() if seen.copy is not None]
            held = sum(seen.copy.nbytes for seen in copies if seen.copy is not None)
            for seen in copies:
                if held <= BYTES_MAX or seen.copy is None:
                    break
                held -= seen.copy.nbytes
                seen.copy, seen.reads, seen.seconds = None, 0, 0.0
