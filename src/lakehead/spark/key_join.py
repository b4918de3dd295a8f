"""Rows of a DataFrame, batch or stream, with what a keyed table has for them now: executors ask its key index, a batch
of keys at a time, so that there is no shuffle, no state, and no copy of the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from lakehead.api.table import Table, handle_of
from lakehead.errors import ColumnNotFoundError, InvalidRequestError, WrongTableKindError
from lakehead.format.joins import join
from lakehead.format.read_as import cast_to
from lakehead.format.rows import to_key_table
from lakehead.format.schema import nearest_name
from lakehead.spark.connections import connection_of, worker_table
from lakehead.spark.map_in_arrow import map_in_arrow
from lakehead.spark.remembered import Positions, RememberedJoins
from lakehead.spark.types import arrow_schema, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

How = Literal["left", "inner"]
_ROW, _AT = "__lakehead_row", "__lakehead_at"


@dataclass(frozen=True)
class LookupJoin:
    """A join as tasks carry it out.

    Attributes:
        on: columns of the DataFrame, in the order of the table's primary key.
        columns: those of the table to add.
        stale_ms: how long what a key had is taken to be what it has.
        schema: of the rows that come out.
    """

    uri: str
    table: str
    on: tuple[str, ...]
    columns: tuple[str, ...]
    how: How
    stale_ms: int
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = worker_table(self.uri, self.table)
        for batch in batches:
            yield self.joined(table, batch)

    def joined(self, table: Table, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch with the columns of the table, in its order."""
        at, found = self._found(table, batch.select(list(self.on)).rename_columns(list(table.primary_key)))
        if self.how == "inner":
            kept = pc.is_valid(at)
            batch, at = batch.filter(kept), at.filter(kept)
        added = found.take(at)
        return cast_to(self.schema, pa.RecordBatch.from_arrays([*batch.columns, *added.columns], self.schema.names))

    def _found(self, table: Table, keys: pa.RecordBatch) -> tuple[pa.Array, pa.RecordBatch]:
        """For each key the position of its row, null for none, and the rows. A key with a null has none."""
        whole = np.ones(keys.num_rows, bool)
        for column in keys.columns:
            whole &= ~np.asarray(pc.is_null(column))
        asked = to_key_table(
            pa.Table.from_batches([keys.filter(pa.array(whole))]),
            handle_of(table).desc.key_columns,
            what=f"keys for {self.table} from {', '.join(self.on)}",
        )
        found, rows = self._places(table, asked)
        at = np.full(keys.num_rows, -1)
        at[whole] = found
        return pa.array(at, mask=at < 0), rows

    def _places(self, table: Table, keys: pa.Table) -> tuple[Positions, pa.RecordBatch]:
        def ask(unknown: pa.Table) -> tuple[Positions, pa.RecordBatch]:
            found, rows = places_of(table, unknown)
            return found, rows.select(list(self.columns))

        if not self.stale_ms:
            return ask(keys)
        handle = handle_of(table)
        desc = handle.desc
        join = (self.uri, desc.table_id, desc.schema_id, self.columns, self.stale_ms)
        return _remembered.of(join, self.stale_ms / 1000, handle.env.clock).places(keys, ask)


_remembered = RememberedJoins()


def places_of(table: Table, keys: pa.Table) -> tuple[Positions, pa.RecordBatch]:
    """The rows that a keyed table has for keys, which are of its types and may repeat; and for each key the position of
    its row among them, -1 for none."""
    names = keys.column_names
    once = keys.group_by(names, use_threads=False).aggregate([])
    rows = join(table.lookup(once).combine_chunks().to_batches() or _none(table))
    places = pa.Table.from_batches([rows]).select(names).append_column(_AT, pa.array(np.arange(rows.num_rows)))
    matched = keys.append_column(_ROW, pa.array(np.arange(len(keys)))).join(places, names, join_type="inner")
    at = np.full(len(keys), -1)
    at[matched[_ROW].to_numpy()] = matched[_AT].to_numpy()
    return at, rows


def _none(table: Table) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist([], table.schema)]


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
    given = _on(table, df.columns, on)
    of_frame = dict(zip(df.columns, df.schema.fields, strict=True))
    of_key = (
        arrow_schema(StructType([of_frame[c] for c in given])).empty_table().rename_columns(list(table.primary_key))
    )
    to_key_table(of_key, handle_of(table).desc.key_columns, what=f"keys for {name} from {', '.join(given)}")
    wanted = _columns(table, df.columns, columns)
    fields = [table.schema.field(c).with_nullable(True) for c in wanted]
    schema = spark_schema(pa.schema(fields))
    out = StructType([*df.schema.fields, *schema.fields])
    joined = LookupJoin(con.uri, name, given, tuple(wanted), how, stale_ms, arrow_schema(out))
    return map_in_arrow(df, joined, out)


def _on(table: Table, of_frame: Sequence[str], on: str | Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    """The DataFrame's columns, in the order of the primary key.

    Raises:
        ColumnNotFoundError: the DataFrame has no such column.
        InvalidRequestError: they are not the whole primary key.
    """
    names = [on] if isinstance(on, str) else on
    of_key = {key: own for own, key in names.items()} if isinstance(names, Mapping) else {n: n for n in names}
    if set(of_key) != set(table.primary_key):
        raise InvalidRequestError(
            f"on={on!r} must be the primary key of {table.name}, {list(table.primary_key)}; columns that are called"
            " something else in the DataFrame as {'its name': 'name in the key'}"
        )
    for own in of_key.values():
        if own not in of_frame:
            near = nearest_name(own, of_frame)
            raise ColumnNotFoundError(f"the DataFrame has no column {own!r}; {near}", column=own)
    return tuple(of_key[key] for key in table.primary_key)


def _columns(table: Table, of_frame: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    own = [c for c in table.schema.names if c not in table.primary_key]
    wanted = own if columns is None else [columns] if isinstance(columns, str) else list(columns)
    for c in wanted:
        if c not in table.schema.names:
            near = nearest_name(c, table.schema.names)
            raise ColumnNotFoundError(f"table {table.name} has no column {c!r}; {near}", column=c)
    folded = {c.casefold() for c in of_frame}
    if twice := [c for c in wanted if c.casefold() in folded]:
        raise InvalidRequestError(
            f"the DataFrame has columns {twice} already, as {table.name} has: rename them, or name the columns to add"
            " with columns="
        )
    return wanted
