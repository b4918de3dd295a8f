"""Rows of a DataFrame, batch or stream, with what a keyed table has for them now: executors ask its key index, a batch
of keys at a time, so that there is no shuffle, no state, and no copy of the table."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql.types import StructType

from lakehead.api.table import Table, handle_of
from lakehead.errors import (
    ColumnNotFoundError,
    InvalidRequestError,
    SchemaChangedError,
    SchemaMismatchError,
    TableNotFoundError,
    WrongTableKindError,
)
from lakehead.format.arrays import to_arrow
from lakehead.format.joins import BYTES_MAX, join, largest, taken
from lakehead.format.per_schema import digest_of_schema
from lakehead.format.read_as import cast_to
from lakehead.format.rows import to_key_table
from lakehead.format.schema import nearest_name
from lakehead.spark.connections import connection_of, worker_address, worker_table
from lakehead.spark.map_in_arrow import map_in_arrow
from lakehead.spark.remembered import Positions, RememberedJoins
from lakehead.spark.types import arrow_schema, collations, require_bytewise, spark_schema
from lakehead.types import TableDescriptor, children, without_ids

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

How = Literal["left", "inner"]
_ROW, _AT = "__lakehead_row", "__lakehead_at"
_AGAIN = "make the join again with lhs.lookup_join, and start a streaming query from its checkpoint"
Alike: TypeAlias = Callable[[str], str]
"""The same for names that Spark takes for one."""


@dataclass(frozen=True)
class Planned:
    """What a join was planned with of its table. As long as that is so the join goes on, whatever else is altered, also
    with another table that has the name: one that is overwritten is a new one.

    Attributes:
        key: columns of the primary key.
        columns: those to add, with their ids.
    """

    table_id: str
    key: pa.Schema
    columns: pa.Schema

    @classmethod
    def of(cls, desc: TableDescriptor, columns: Sequence[str]) -> Planned:
        """For a table as it is now; columns that it does not have are left out."""
        fields = desc.schemas.current.fields
        there = [fields.field(c).with_nullable(True) for c in columns if c in fields.names]
        return cls(desc.table_id, desc.key_columns, pa.schema(there))

    def require(self, desc: TableDescriptor) -> None:
        """That a table still is what the join was planned with.

        Raises:
            WrongTableKindError: it has no keys.
            SchemaChangedError: it has another key, or a column that is wanted is gone, renamed or of another type.
        """
        if not desc.keyed:
            raise WrongTableKindError(
                f"table {desc.path}, in which a join looks up keys, was made anew as a log table, which has none: make"
                " the join again, with a keyed table",
                table=str(desc.path),
            )
        now = Planned.of(desc, self.columns.names)
        if now.table_id == self.table_id:
            same = now.columns.equals(self.columns, check_metadata=True)
        else:  # its ids are its own
            same = without_ids(list(now.columns)) == without_ids(list(self.columns))
        if not same or now.key != self.key:
            columns = ", ".join(f"{f.name} {f.type}" for f in desc.schema)
            raise SchemaChangedError(
                f"table {desc.path} was altered, or made anew, since a join was planned that looks up keys in it, and"
                f" has now the key {list(desc.primary_key)} and the columns {columns}: {_AGAIN}",
                table=str(desc.path),
                schema_id=desc.schema_id,
            )


def _given_back(keys: pa.Table, of_key: pa.Schema) -> npt.NDArray[np.bool_]:
    """Which keys the types of a table's key give back as they were, as far as Arrow tells."""
    same = np.ones(keys.num_rows, bool)
    for given, field in zip(keys.columns, of_key, strict=True):
        with contextlib.suppress(pa.ArrowException):
            back = given.cast(field.type, safe=False).cast(given.type, safe=False)
            same &= np.asarray(pc.fill_null(pc.equal(back, given), False))
    return same


@dataclass(frozen=True)
class LookupJoin:
    """A join as tasks carry it out.

    Attributes:
        on: columns of the DataFrame, in the order of the table's primary key.
        planned: the columns of the table to add, and its key.
        stale_ms: how long what a key had is taken to be what it has.
        schema: of the rows that come out.
    """

    uri: str
    table: str
    on: tuple[str, ...]
    planned: Planned
    how: How
    stale_ms: int
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Raises: TableNotFoundError, WrongTableKindError, SchemaChangedError: the table is not what it was."""
        table = self._opened()
        for batch in batches:
            try:
                rows = self.joined(table, batch)
            except TableNotFoundError:  # dropped since it was opened: another one may have its name
                table = self._opened()
                rows = self.joined(table, batch)
            yield from rows

    def _opened(self) -> Table:
        try:
            table = worker_table(self.uri, self.table, planned=True)
        except TableNotFoundError as e:
            raise TableNotFoundError(
                f"table {self.table}, in which a join looks up keys, is gone ({e.message}): {_AGAIN}", table=self.table
            ) from e
        self.planned.require(handle_of(table).desc)
        return table

    def joined(self, table: Table, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """A batch with what the table has for it now, in its order; in several where one would be too many bytes, as
        where many rows have one large one."""
        at, found = self._found(table, batch.select(list(self.on)).rename_columns(list(table.primary_key)))
        return self._with_found(batch, at, found)

    def _with_found(self, batch: pa.RecordBatch, at: Positions, found: pa.Table) -> Iterator[pa.RecordBatch]:
        if self.how == "inner":
            kept = np.flatnonzero(at >= 0)
            batch, at = batch.take(to_arrow(kept)), at[kept]
        start = 0
        for count, added in _rows_at(found, at):
            rows = [*batch.slice(start, count).columns, *added]
            yield cast_to(self.schema, pa.RecordBatch.from_arrays(rows, self.schema.names))
            start += count

    def _found(self, table: Table, keys: pa.RecordBatch) -> tuple[Positions, pa.Table]:
        """For each key the position of its row, -1 for none, and the rows. A key with a null has none, and one that the
        table could not have."""
        whole = np.ones(keys.num_rows, bool)
        for column in keys.columns:
            whole &= ~np.asarray(pc.is_null(column))
        asked = self._fitting(table, pa.Table.from_batches([keys]), np.flatnonzero(whole))
        places = np.concatenate([of for of, _ in asked])
        found, rows = self._places(table, pa.concat_tables([fitting for _, fitting in asked]))
        at = np.full(keys.num_rows, -1)
        at[places] = found
        return at, rows

    def _fitting(self, table: Table, keys: pa.Table, places: Positions) -> list[tuple[Positions, pa.Table]]:
        """The keys at these places as the table has them, without those that it cannot hold: what another type gives
        back as something else, and then, as decimals may have too many digits, what is found by halving."""
        of_key, what = handle_of(table).desc.key_columns, f"keys for {self.table} from {', '.join(self.on)}"
        asked = keys.take(pa.array(places))
        try:
            return [(places, to_key_table(asked, of_key, what=what))]
        except SchemaMismatchError:
            if not len(places):  # not a value, but the type
                raise
        kept = places[_given_back(asked, of_key)]
        if len(kept) < len(places):
            return self._fitting(table, keys, kept)
        half = len(places) // 2
        parts = (places[:half], places[half:]) if half else (places[:0],)
        return [found for part in parts for found in self._fitting(table, keys, part)]

    def _places(self, table: Table, keys: pa.Table) -> tuple[Positions, pa.Table]:
        columns = self.planned.columns.names

        def ask(unknown: pa.Table) -> tuple[Positions, pa.Table]:
            found, rows = places_of(table, unknown)
            self.planned.require(handle_of(table).desc)  # it may have been altered meanwhile
            return found, rows.select(columns)

        if not self.stale_ms:
            return ask(keys)
        handle = handle_of(table)
        desc = handle.desc
        join = (self.uri, desc.table_id, digest_of_schema(desc.schemas.current.fields), tuple(columns), self.stale_ms)
        return _remembered.of(join, self.stale_ms / 1000, handle.env.clock).places(keys, ask)


_remembered = RememberedJoins()


def _rows_at(rows: pa.Table, at: Positions) -> Iterator[tuple[int, list[pa.Array]]]:
    """The columns of the rows at these positions, of nulls for -1, in parts of bounded bytes; each with its length."""
    batches = rows.to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
    if len(batches) > 1 and rows.nbytes <= BYTES_MAX:
        batches = [join(batches)]
    if len(batches) == 1 and len(at) * sum(map(largest, batches[0].columns)) <= BYTES_MAX:
        places = pa.array(at, mask=at < 0)
        yield len(at), [column.take(places) for column in batches[0].columns]
        return
    absent = pa.RecordBatch.from_arrays([pa.nulls(1, t) for t in rows.schema.types], rows.schema.names)
    there = [pa.RecordBatch.from_arrays(b.columns, rows.schema.names) for b in batches]
    for part in taken([*there, absent], np.where(at < 0, rows.num_rows, at)):
        yield part.num_rows, part.columns


def places_of(table: Table, keys: pa.Table) -> tuple[Positions, pa.Table]:
    """The rows that a keyed table has for keys, which are of its types and may repeat; and for each key the position of
    its row among them, -1 for none."""
    names = keys.column_names
    once = keys.group_by(names, use_threads=False).aggregate([])
    rows = table.lookup(once)
    places = rows.select(names).append_column(_AT, pa.array(np.arange(rows.num_rows)))
    matched = keys.append_column(_ROW, pa.array(np.arange(len(keys)))).join(places, names, join_type="inner")
    at = np.full(len(keys), -1)
    at[matched[_ROW].to_numpy()] = matched[_AT].to_numpy()
    return at, rows


def lookup_join(
    df: DataFrame,
    name: str,
    on: str | Sequence[str] | Mapping[str, str],
    *,
    columns: Sequence[str] | None = None,
    how: How = "left",
    stale_ms: int = 0,
) -> DataFrame:
    """See `lakehead.spark.lookup_join`."""
    con = connection_of(df.sparkSession)
    table = con.table(name)
    if not table.primary_key:
        raise WrongTableKindError(f"{name} is a log table, which has no keys to look up: join it with lhs.table()")
    if how not in ("left", "inner"):
        raise InvalidRequestError(f"how={how!r} must be 'left' or 'inner'")
    desc, of_frame, alike = handle_of(table).desc, arrow_schema(df.schema), names_alike(df)
    _require_once(of_frame, alike)
    given = _on(table, of_frame.names, on, alike)
    require_bytewise(given, collations(df.schema), f"keys for {name}")
    of_key = of_frame.empty_table().select(list(given)).rename_columns(list(table.primary_key))
    to_key_table(of_key, desc.key_columns, what=f"keys for {name} from {', '.join(given)}")
    planned = Planned.of(desc, _columns(table, of_frame.names, columns, alike))
    added = spark_schema(pa.schema(without_ids(list(planned.columns))))
    out = StructType([*df.schema.fields, *added.fields])
    return map_in_arrow(
        df, LookupJoin(worker_address(con), name, given, planned, how, stale_ms, arrow_schema(out)), out
    )


def names_alike(df: DataFrame) -> Alike:
    """As the session of a DataFrame takes names: without regard to case, unless it is set to."""
    return str if df.sparkSession.conf.get("spark.sql.caseSensitive", "false").lower() == "true" else str.casefold


def _require_once(of_frame: pa.Schema, alike: Alike) -> None:
    """That a DataFrame has each column once, and each field in them.

    Raises:
        InvalidRequestError: it does not.
    """
    if twice := _repeated(of_frame.names, alike):
        raise InvalidRequestError(
            f"the DataFrame has columns {twice}, which Spark takes for one: rename or drop all but one of them"
        )
    for field in of_frame:
        if twice := _repeated_inside(field):
            raise InvalidRequestError(
                f"column {field.name!r} of the DataFrame has fields {twice}, which Arrow takes for one: rename or drop"
                " all but one of them"
            )


def _repeated(names: Sequence[str], alike: Alike) -> list[str]:
    folded = [alike(n) for n in names]
    counts = Counter(folded)
    return [n for n, f in zip(names, folded, strict=True) if counts[f] > 1]


def _repeated_inside(field: pa.Field) -> list[str]:
    """Names of fields in a column, at any depth, that another one beside it has; case tells them apart."""
    inside = children(field.type)
    return [*_repeated([f.name for f in inside], str), *(n for f in inside for n in _repeated_inside(f))]


def _there(names: Sequence[str], name: str, alike: Alike) -> str | None:
    """A name as it is among others, None if it is not."""
    return name if name in names else next((n for n in names if alike(n) == alike(name)), None)


def _listed(names: object) -> list[Any]:
    """What was given as a list; as one of itself where it is none, which is no name."""
    return list(names) if isinstance(names, Iterable) and not isinstance(names, Column) else [names]


def _on(
    table: Table, of_frame: Sequence[str], on: str | Sequence[str] | Mapping[str, str], alike: Alike
) -> tuple[str, ...]:
    """The DataFrame's columns, in the order of the primary key.

    Raises:
        ColumnNotFoundError: the DataFrame has no such column.
        InvalidRequestError: they are not the primary key: all of it, and each column once.
    """
    names = [on] if isinstance(on, str) else on
    pairs = list(names.items()) if isinstance(names, Mapping) else [(n, n) for n in _listed(names)]
    if not all(isinstance(n, str) for pair in pairs for n in pair):
        raise InvalidRequestError(f"on={on!r} must name columns: 'id', ['a', 'b'] or {{'its name': 'name in the key'}}")
    of_key = {_there(table.primary_key, key, alike) or key: own for own, key in pairs}
    if set(of_key) != set(table.primary_key) or len(of_key) < len(pairs):
        raise InvalidRequestError(
            f"on={on!r} must be the primary key of {table.name}, {list(table.primary_key)}, each column of it once;"
            " columns that are called something else in the DataFrame as {'its name': 'name in the key'}"
        )
    found = {own: _there(of_frame, own, alike) for own in of_key.values()}
    for own, there in found.items():
        if there is None:
            near = nearest_name(own, of_frame)
            raise ColumnNotFoundError(f"the DataFrame has no column {own!r}; {near}", column=own)
    given = tuple(found[of_key[key]] for key in table.primary_key)
    return tuple(c for c in given if c is not None)


def _columns(table: Table, of_frame: Sequence[str], columns: Sequence[str] | None, alike: Alike) -> list[str]:
    """Those of the table to add.

    Raises:
        ColumnNotFoundError: the table has no such column.
        InvalidRequestError: one is named twice, or the DataFrame has it already.
    """
    own = [c for c in table.schema.names if c not in table.primary_key]
    named = own if columns is None else [columns] if isinstance(columns, str) else _listed(columns)
    if not all(isinstance(c, str) for c in named):
        raise InvalidRequestError(f"columns={columns!r} must be a list of names of columns of {table.name}")
    wanted = [_there(table.schema.names, c, alike) or c for c in named]
    for c in wanted:
        if c not in table.schema.names:
            near = nearest_name(c, table.schema.names)
            raise ColumnNotFoundError(f"table {table.name} has no column {c!r}; {near}", column=c)
    if twice := _repeated(wanted, str):
        raise InvalidRequestError(f"columns={wanted} has {twice[0]!r} more than once: name each column once")
    folded = {alike(c) for c in of_frame}
    if twice := [c for c in wanted if alike(c) in folded]:
        raise InvalidRequestError(
            f"the DataFrame has columns {twice} already, as {table.name} has: rename them, or name the columns to add"
            " with columns="
        )
    return wanted
