"""The union read of a table that statements of a session ask again and again, on a local master.

What the table was at one moment is kept, its *base*: lake files without dead rows, and all its other rows as files of
the session. Statements of that moment read plain files. Those of a later one read the same files without the rows that
are gone since, and one small file more of those that came: nobody reads and writes all hot rows anew because one of
them has changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from lakehead.api.table import Table, handle_of
from lakehead.errors import LakeheadError
from lakehead.lake.lake_table import LakeFile, Superseded
from lakehead.lake.later_rows import ReadBefore, ranges_between, rows_between
from lakehead.lake.pinned_lake import PinnedLake
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import Pin, UnionRead
from lakehead.predicate.read_spec import ReadSpec
from lakehead.spark.dead_rows import Dead, dead_in_plan, dead_table, split_files, without_offsets
from lakehead.spark.floats import quoted
from lakehead.spark.frame_steps import broadcast, select
from lakehead.spark.held_pins import hold_pin
from lakehead.spark.kept import Kept, kept_of
from lakehead.spark.lake_files import LakeScan, lake_columns
from lakehead.spark.scratch import ScratchFile, is_shared, scratch_file, scratch_frame, scratch_rows
from lakehead.spark.types import spark_schema
from lakehead.types import SYSTEM_FIELDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

COPIED_ROWS_MAX, COPIED_BYTES_MAX = 1 << 19, 64 << 20
"""So many log records, and so many rows and bytes of lake files with dead rows, are worth files of the session's."""
LATER_ROWS_MAX = 1 << 14
"""Where more log records came, a base is made anew by the second statement that comes."""
BASE_BYTES_MAX = 256 << 20
"""So many bytes of hot rows, too, and of what came since a quarter."""
_FILE_BYTES, _SEEN_BYTES = 4096, 4096
"""About what is known of a lake file and of a table."""


class Seen(NamedTuple):
    """What is known of a pin.

    Attributes:
        still: the table is as it was when this was asked before, so that statements after this one may find it so, too:
            its rows are worth files of the session's own.
        base: the table as this or a statement before has found it, of which rows are in such files, or going to be;
            what is pinned is that and what came since.
    """

    moment: PinnedRows
    still: bool
    base: ReadBefore | None


@dataclass(frozen=True, eq=False)
class _Known:
    """The newest moment that statements found a table at, as it was before and what came since; once rows of it are in
    files, the first of those moments.

    Attributes:
        unfit: what would be in files is too much.
    """

    read: ReadBefore
    based: bool = False
    unfit: bool = False


def look(spark: SparkSession, table: Table, pinned: Pin) -> Seen:
    """Find out, once for each statement."""
    moment = PinnedRows.of(handle_of(table), pinned)
    if sum(end - start for start, end in pinned.ranges.values()) > COPIED_ROWS_MAX or not is_shared(spark):
        return Seen(moment, False, None)
    kept, name = kept_of(spark), _name(moment, pinned)
    known: _Known | None = kept.value(name)
    now = ReadBefore.of(pinned, moment)
    if known is None or not _goes_on(table, known.read, moment, pinned):
        kept.put(name, _Known(now), _SEEN_BYTES)
        return Seen(moment, False, None)
    still = known.read.rows == moment
    if known.unfit or not known.based:
        known = replace(known, read=now, based=not known.unfit)
        kept.put(name, known, _SEEN_BYTES)
    return Seen(moment, still, known.read if known.based else None)


def _name(moment: PinnedRows, pinned: Pin) -> Hashable:
    """Of what goes on as one: the table with and without its lake, and each snapshot of that."""
    of = ("lake", moment.snapshot) if not pinned.ranges else ("union", pinned.lake is None)
    return "seen", moment.table_id, moment.columns, of


def _goes_on(table: Table, before: ReadBefore, moment: PinnedRows, pinned: Pin) -> bool:
    """Whether that is the table as it was and little more."""
    if before.rows == moment:
        return True
    if before.rows.snapshot != moment.snapshot:
        return False
    ranges = ranges_between(handle_of(table), before.pinned, pinned)
    return ranges is not None and sum(end - start for start, end in ranges.values()) <= LATER_ROWS_MAX


def kept_frame(spark: SparkSession, table: Table, pinned: Pin, seen: Seen, spec: ReadSpec) -> DataFrame | None:
    """All rows of a pin with these columns, from its base and what came since; None where it has none, or one that
    cannot be read any more: the next statements find another one.

    Each is a frame of its own: those of two statements that shared columns could not be joined.
    """
    if seen.base is None:
        return None
    kept, name = kept_of(spark), _name(seen.moment, pinned)
    read = _KeptRead(spark, kept, table, pinned, seen.moment, seen.base, spec)
    try:
        found = read.frame()
    except _TooLargeError:
        found, read.unfit = None, True
    except LakeheadError:
        if seen.base.rows == seen.moment:
            raise
        found = None
    if found is None:
        kept.put(name, _Known(ReadBefore.of(pinned, seen.moment), unfit=read.unfit), _SEEN_BYTES)
    return found


class _TooLargeError(Exception):
    pass


def _bounded(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    size = 0
    for batch in rows:
        size += batch.nbytes
        if size > BASE_BYTES_MAX:
            raise _TooLargeError
        yield batch


class _KeptRead:
    """One read of a base and what came since.

    Attributes:
        unfit: what would be in files is too much.
    """

    def __init__(
        self,
        spark: SparkSession,
        kept: Kept,
        table: Table,
        pinned: Pin,
        moment: PinnedRows,
        base: ReadBefore,
        spec: ReadSpec,
    ) -> None:
        self.unfit = False
        self._spark, self._kept, self._pinned, self._moment, self._base = spark, kept, pinned, moment, base
        self._handle = handle_of(table)
        self._desc = self._handle.desc
        self._lake = pinned.lake if pinned.lake is not None and pinned.lake.snapshot_id is not None else None
        self._names = spec.names
        # What is in files has the offsets of its rows, too, by which some are taken out later.
        self._in_files = spec
        if self._desc.keyed:
            columns = tuple(dict.fromkeys((*spec.columns, *self._desc.partition_by)))
            self._in_files = ReadSpec(columns, system_columns=True)
        self._columns = pa.schema([*self._desc.schema, *SYSTEM_FIELDS])

    def frame(self) -> DataFrame | None:
        """See `kept_frame`."""
        files: list[ScratchFile] = []
        with ExitStack() as reading:

            def taken(file: ScratchFile | None) -> None:
                files.extend([] if file is None else [reading.enter_context(file.reading())])

            superseded, file = self._hot()
            taken(file)
            whole: Sequence[LakeFile] = ()
            if self._lake is not None:
                live, file = self._live(self._lake, superseded)
                taken(file)
                if live is None:
                    self.unfit = True
                    return None
                whole = live
            of_base = bool(files or whole)
            dead: Dead = ()
            if self._base.rows != self._moment:
                gone, file = self._since()
                taken(file)
                if gone is None:
                    return None
                # What came since is live, and has no offsets; a base without rows has none that could be gone.
                dead = self._dead(gone) if of_base else ()
            if not files and not whole:
                return self._spark.createDataFrame([], self._spark_schema(self._names))
            rows, reads = self._plain(whole, files)
            found = select(without_offsets(rows, self._desc, dead), map(quoted, self._names))
        if reads:
            hold_pin(self._spark, self._handle.leases, self._pinned, reads)
        return found  # what is in files of ours is read under no pin

    def _hot(self) -> tuple[Superseded, ScratchFile | None]:
        """The hot rows of the base, and what they supersede in the lake."""
        base = self._base.rows
        if not base.ranges:
            return {}, None

        def find() -> tuple[Superseded, ScratchFile | None, int]:
            ranges = self._base.pinned.ranges  # within those that are pinned
            read = UnionRead(self._handle, Pin(None, ranges, self._pinned.lease), self._in_files)
            superseded, rows = read.hot_rows()
            file = self._file(self._in_files.names, _bounded(rows))
            return superseded, file, sum(offsets.nbytes for offsets in superseded.values())

        return self._kept.get(("base", base, self._in_files.names), find)

    def _live(self, view: PinnedLake, superseded: Superseded) -> tuple[tuple[LakeFile, ...] | None, ScratchFile | None]:
        """Lake files without dead rows, and the live rows of all others as a file of the session's; None where those
        are too many."""

        def find() -> tuple[tuple[LakeFile, ...] | None, ScratchFile | None, int]:
            parts = split_files(view, view.plan(), superseded)
            worn = [*parts.by_offset, *(f for f, _ in parts.by_position)]
            if sum(f.size for f in worn) > COPIED_BYTES_MAX or sum(f.record_count for f in worn) > COPIED_ROWS_MAX:
                return None, None, 0
            file = self._file(self._in_files.names, view.read(worn, self._in_files, superseded))
            return parts.whole, file, _FILE_BYTES * len(parts.whole)

        return self._kept.get(("live", self._base.rows, self._in_files.names), find)

    def _since(self) -> tuple[pa.Table | None, ScratchFile | None]:
        """What is gone since the base, None where the log has others in its place now, and the rows that came."""

        def find() -> tuple[pa.Table | None, ScratchFile | None, int]:
            handle, base, now = self._handle, self._base, self._pinned
            ranges = ranges_between(handle, base.pinned, now)
            if ranges is None:
                return None, None, 0
            bytes_max = BASE_BYTES_MAX // 4
            later = rows_between(handle, base, now, self._moment, ranges, self._names, bytes_max=bytes_max)
            if later is None:
                return None, None, 0
            gone = dead_table(self._desc, {c.tablet: c.superseded for c in later if len(c.superseded)})
            file = self._file(self._names, (batch for change in later for batch in change.rows))
            return gone, file, gone.nbytes

        return self._kept.get(("since", self._base.rows, self._moment, self._names), find)

    def _dead(self, gone: pa.Table) -> Dead:
        if (few := dead_in_plan(self._desc, gone)) is not None:
            return few
        frame = scratch_frame(self._spark, gone.schema, gone.to_batches())
        return None if frame is None else broadcast(frame)

    def _plain(self, whole: Sequence[LakeFile], files: Sequence[ScratchFile]) -> tuple[DataFrame, list[Any]]:
        """All rows of these files, and weak references to what reads those of the lake."""
        if self._lake is not None:
            scan = LakeScan(self._spark, self._lake)
            return scan(whole, beside=files), scan.reads if whole else []
        return scratch_rows(self._spark, files), []

    def _file(self, names: Sequence[str], rows: Iterable[pa.RecordBatch]) -> ScratchFile | None:
        schema = pa.schema([self._columns.field(name) for name in names])
        stored = None if self._pinned.lake is None else lake_columns(self._pinned.lake, names)
        return scratch_file(self._spark, schema, rows, kept=True, stored=stored)

    def _spark_schema(self, names: Sequence[str]) -> StructType:
        return spark_schema(pa.schema([self._columns.field(name) for name in names]))
