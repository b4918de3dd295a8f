"""A copy of a table as DuckDB's own table, which goes on with the log: it has the rows of several moments at once.

Each row says of which versions of the copy it is, so that statements of different moments read one table, also while
it goes on. Rows of keyed tables are found by their offsets.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.dataset import PushdownDataset
from lakehead.api.relation import require_uninterrupted
from lakehead.client.table import TableHandle
from lakehead.errors import LakeheadError, OffsetOutOfRangeError
from lakehead.format.arrays import to_arrow, to_numbers
from lakehead.lake.later_rows import LaterRows, ReadBefore, ranges_between, rows_between
from lakehead.lake.pinned_rows import PinnedRows
from lakehead.lake.union_read import Pin, UnionRead
from lakehead.predicate.read_spec import ReadSpec
from lakehead.types import BUCKET_COLUMN, OFFSET_COLUMN, TableDescriptor

VERSIONS_MAX = 32
"""Of so many moments, the last ones, statements that pinned them still get rows."""
LATER_PART_MAX = 0.25
LATER_LEAST = 10_000
"""A copy goes on where no more records came than this part of its rows, or these; and keeps twice as many rows as it
was made with, at most."""
LATER_BYTES_MAX = 64 << 20
OLDER_MAX = 16
"""So many statements in a row that pinned an older moment than the copy's are not just other threads': the table was
put back."""
BUCKETS_MAX = 1 << 15
_ROW_BYTES = 16
"""What a row takes beside its values."""
_COLUMN_BYTES = 1 << 20
"""What DuckDB takes for a column, however few rows there are: blocks of 256 KiB for values and for which of them are
null, and others for what is inserted later."""
_FROM, _UNTIL, _AT = "__from", "__until", "__at"
_FOREVER = np.iinfo(np.int32).max
_OFFSET_BITS = 48
_NAMED_MAX = 8


@dataclass(frozen=True, eq=False)
class CopiedRows:
    """Those of one moment.

    Attributes:
        text: the statement that selects them.
        table: holds them as long as it is held.
    """

    text: str
    table: CopiedTable


class CopiedTable:
    """Rows of a table in a catalog of DuckDB's that lasts as long as this. Thread-safe.

    Args:
        attach: makes that catalog, given how long it is to last.

    Attributes:
        nbytes: about what it takes.
        outdated: it cannot go on to where its table is now: another copy may be made.
    """

    def __init__(self, attach: Callable[[object], str], handle: TableHandle, rows: PinnedRows) -> None:
        self.catalog = attach(self)
        self._source = f"{self.catalog}.main.rows"
        self._columns = pa.schema([*handle.desc.schema])
        leaves = sum(_leaves(f.type) for f in self._columns)
        self.nbytes, self._row_bytes = _COLUMN_BYTES * leaves, leaves + _ROW_BYTES
        self._lock = threading.RLock()  # a signal's handler may ask, too
        self._versions: OrderedDict[PinnedRows, int] = OrderedDict({rows: 0})
        self._before: ReadBefore
        self._older = 0
        self._half_done = False
        self.outdated = False
        self._made = self._rows = 0

    def fill(
        self,
        cursor: duckdb.DuckDBPyConnection,
        handle: TableHandle,
        pinned: Pin,
        bounded: Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    ) -> None:
        """Take the rows of the moment that it is made of; once.

        Args:
            bounded: what raises where that takes too long, or too much.
        """
        (rows,) = self._versions
        names = tuple(self._columns.names)

        def read(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
            found = UnionRead(handle, pinned, ReadSpec(names, system_columns=handle.desc.keyed)).batches()
            for batch in bounded(map(self._counted, found)):
                yield _placed(batch, names) if handle.desc.keyed else batch

        keyed = handle.desc.keyed
        until = f", {_FOREVER}::integer as {_UNTIL}" if keyed else ""
        with _rows_of(cursor, self._schema(placed=keyed), read) as relation:
            relation.query(
                "copied", f"create table {self._source} as select *, 0::integer as {_FROM}{until} from copied"
            )
        self._made, self._before = self._rows, ReadBefore.of(pinned, rows)

    def at(
        self, cursor: duckdb.DuckDBPyConnection, handle: TableHandle, pinned: Pin, rows: PinnedRows
    ) -> CopiedRows | None:
        """The rows of a moment; None where it cannot tell them: it is ``outdated``, or the moment is older than the
        newest and not known any more, or what came cannot be read now."""
        version = self._versions.get(rows)  # for a moment that is known nobody waits
        if version is None:
            with self._lock:
                version = self._versions.get(rows)
                if version is None and not self._is_outdated():
                    version = self._later(cursor, handle, pinned, rows)
        if version is None:
            return None
        columns = ", ".join(_quoted(name) for name in self._columns.names)
        later = f" and {_UNTIL} > {version}" if handle.desc.keyed else ""
        return CopiedRows(f"select {columns} from {self._source} where {_FROM} <= {version}{later}", self)

    def _is_outdated(self) -> bool:
        self.outdated |= self._half_done
        return self.outdated

    def _later(
        self, cursor: duckdb.DuckDBPyConnection, handle: TableHandle, pinned: Pin, rows: PinnedRows
    ) -> int | None:
        """Go on to a moment; its version."""
        ranges = ranges_between(handle, self._before.pinned, pinned)
        if ranges is None:
            is_older = ranges_between(handle, pinned, self._before.pinned) is not None
            self._older += 1
            self.outdated = not is_older or self._older > OLDER_MAX
            return None
        came = sum(end - start for start, end in ranges.values())
        allowed = max(LATER_LEAST, int(LATER_PART_MAX * self._rows))
        if came > allowed or self._rows + came > 2 * self._made + LATER_LEAST:
            self.outdated = True
            return None
        try:
            names, bytes_max = self._columns.names, LATER_BYTES_MAX
            changes = rows_between(handle, self._before, pinned, rows, ranges, names, bytes_max=bytes_max)
        except OffsetOutOfRangeError:
            changes = None
        except LakeheadError:
            return None
        if changes is None:
            self.outdated = True
            return None
        version = next(reversed(self._versions.values())) + bool(changes)
        # What ends here, be it by an interrupt, leaves rows that the next version would have: there is none then.
        self._half_done = True
        if changes:
            self._change(cursor, handle.desc, changes, version)
        if not self.outdated:
            self._before, self._older = ReadBefore.of(pinned, rows), 0
            self._versions[rows] = version
            while len(self._versions) > VERSIONS_MAX:
                self._versions.popitem(last=False)
            self._half_done = False
        return None if self.outdated else version

    def _change(
        self, cursor: duckdb.DuckDBPyConnection, desc: TableDescriptor, changes: Sequence[LaterRows], version: int
    ) -> None:
        try:
            with contextlib.closing(cursor.cursor()) as own:
                if desc.keyed and not self._take_away(own, desc, changes, version):
                    self.outdated = True
                else:
                    self._add(own, desc, changes, version)
        except (LakeheadError, duckdb.Error, pa.ArrowException) as e:
            self.outdated = True
            require_uninterrupted(e)

    def _take_away(
        self, own: duckdb.DuckDBPyConnection, desc: TableDescriptor, changes: Sequence[LaterRows], version: int
    ) -> bool:
        """Whether all that is superseded was there."""
        gone = {change.tablet: change.superseded for change in changes if len(change.superseded)}
        count = sum(map(len, gone.values()))
        if not count:
            return True
        keys = [_place(tablet.bucket, offsets) for tablet, offsets in gone.items()]
        update = f"update {self._source} set {_UNTIL} = {version}"
        if count <= _NAMED_MAX and not desc.partition_by:
            found = own.execute(f"{update} where {_AT} in ({', '.join(str(n) for k in keys for n in k)})").fetchone()
        else:
            types = desc.partition_types
            values = [desc.partition_values(tablet.partition) for tablet in gone]
            columns = [to_arrow(np.concatenate(keys))]
            columns += [
                pa.concat_arrays([pa.repeat(pa.scalar(v[i], t), len(k)) for v, k in zip(values, keys, strict=True)])
                for i, t in enumerate(types)
            ]
            names = [_AT, *desc.partition_by]
            dead = pa.record_batch(columns, names)
            own.register("dead", PushdownDataset(dead.schema, lambda *_: iter([dead])).scanner().to_reader())
            same = " and ".join(f"rows.{_quoted(name)} = dead.{_quoted(name)}" for name in names)
            found = own.execute(f"{update} from dead where {same}").fetchone()
        return found == (count,)

    def _add(
        self, own: duckdb.DuckDBPyConnection, desc: TableDescriptor, changes: Sequence[LaterRows], version: int
    ) -> None:
        batches = [(change.tablet, batch) for change in changes for batch in change.rows]
        if not batches:
            return
        names, versioned = self._columns.names, self._schema(placed=desc.keyed, versioned=True)

        def read(columns: list[str] | None, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
            for tablet, batch in batches:
                held = [*self._counted(batch).select(names).columns]
                if desc.keyed:
                    held.append(to_arrow(_place(tablet.bucket, to_numbers(batch.column(OFFSET_COLUMN)))))
                marks = [version, _FOREVER] if desc.keyed else [version]
                held += [pa.repeat(pa.scalar(mark, pa.int32()), batch.num_rows) for mark in marks]
                yield pa.RecordBatch.from_arrays(held, schema=versioned).select(columns or versioned.names)

        with _rows_of(own, versioned, read) as relation:
            relation.insert_into(self._source)

    def _schema(self, *, placed: bool, versioned: bool = False) -> pa.Schema:
        fields = [*self._columns]
        fields += [pa.field(_AT, pa.int64())] if placed else []
        fields += [pa.field(_FROM, pa.int32())] if versioned else []
        fields += [pa.field(_UNTIL, pa.int32())] if versioned and placed else []
        return pa.schema(fields)

    def _counted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self._rows += batch.num_rows
        self.nbytes += batch.nbytes + self._row_bytes * batch.num_rows
        return batch


@contextlib.contextmanager
def _rows_of(
    cursor: duckdb.DuckDBPyConnection,
    schema: pa.Schema,
    read: Callable[[list[str] | None, pc.Expression | None], Iterator[pa.RecordBatch]],
) -> Iterator[duckdb.DuckDBPyRelation]:
    """What is read, on a cursor of its own, as DuckDB keeps the names of relations as views of its session."""
    with contextlib.closing(cursor.cursor()) as own:
        yield own.from_arrow(PushdownDataset(schema, read).scanner().to_reader())


def _placed(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The columns, and which row of its partition each is."""
    buckets, offsets = (to_numbers(batch.column(c)) for c in (BUCKET_COLUMN, OFFSET_COLUMN))
    return batch.select(names).append_column(_AT, to_arrow(_place(buckets, offsets)))


def _place(bucket: int | npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (np.asarray(bucket, np.int64) << _OFFSET_BITS) | offsets


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _leaves(t: pa.DataType) -> int:
    return max(1, sum(_leaves(t.field(i).type) for i in range(t.num_fields)))
