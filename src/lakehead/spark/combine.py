"""Rows that are added to what a keyed table has: one a key, of sums, least and greatest values.

What comes out does not depend on how rows fall into batches, tasks and micro-batches. Whole numbers and decimals are
added exactly and become a value of the column at the end, or an error; so does a sum of decimals that has more than 38
digits in one batch, which neither Arrow's decimals nor Spark's hand on.
Floats are ordered as Spark orders them: NaN is greater than all else, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from lakehead.api.table import Table, handle_of
from lakehead.errors import (
    ColumnNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
    WrongTableKindError,
)
from lakehead.format.rows import conform, to_key_table
from lakehead.format.schema import nearest_name
from lakehead.spark.failures import as_lakeheads
from lakehead.spark.map_in_arrow import map_in_arrow
from lakehead.spark.staged_rows import with_floats
from lakehead.spark.types import arrow_schema, spark_schema

_DIGITS, _DIGITS_ON_THE_WAY = 38, 76


def require_combinable(table: str, columns: pa.Schema, how: Mapping[str, str]) -> None:
    """Refuse what cannot be summed or compared.

    Raises:
        ColumnNotFoundError: there is no such column.
        SchemaMismatchError: it is there twice, or of a type that has no sum or no order.
    """
    for name, way in how.items():
        _require_once(table, name, columns.names)
        t = columns.field(name).type
        if not _has(way, t.value_type if pa.types.is_dictionary(t) else t):
            needs = "sum numbers" if way == "sum" else "take out of it a number, string or time to compare"
            raise SchemaMismatchError(
                f"column {name!r} for {table} is of type {t}, which has no {way}: {needs}", column=name, actual=str(t)
            )


def _require_once(table: str, name: str, columns: Sequence[str]) -> None:
    if name not in columns:
        near = nearest_name(name, columns)
        raise ColumnNotFoundError(f"the rows for {table} have no column {name!r}; {near}", column=name)
    if columns.count(name) > 1:
        raise SchemaMismatchError(f"the rows for {table} have column {name!r} twice: rename or drop one", column=name)


def _has(way: str, t: pa.DataType) -> bool:
    if way == "sum":
        number = pa.types.is_integer(t) or pa.types.is_decimal(t) or pa.types.is_null(t)
        return number or pa.types.is_float32(t) or pa.types.is_float64(t)
    return not (pa.types.is_nested(t) or pa.types.is_duration(t) or pa.types.is_interval(t) or pa.types.is_float16(t))


@dataclass(frozen=True)
class Combine:
    """One row a key: what tasks, and then the driver, do with rows that are accumulated.

    Attributes:
        table: its name.
        keys: its primary key.
        how: ``sum``, ``min`` or ``max`` of each other column.
        decimals: columns that the rows have decimals for, which are floats where the table has those; whole numbers
            that no float holds are refused.
    """

    table: str
    keys: tuple[str, ...]
    how: Mapping[str, str]
    decimals: frozenset[str] = frozenset()

    @classmethod
    def of(cls, table: Table, given: pa.Schema, how: Mapping[str, str]) -> Combine:
        """For a table and what its rows are.

        Raises:
            WrongTableKindError: the table has no keys.
            ColumnNotFoundError, InvalidRequestError: the columns are not the key and what ``how`` names.
            SchemaMismatchError: a column of the table has no sum or no order.
        """
        keys, columns = tuple(table.primary_key), given.names
        if not keys:
            raise WrongTableKindError(f"{table.name} is a log table: what accumulates needs keys")
        if of_key := [c for c in how if c in keys]:
            raise InvalidRequestError(f"columns {of_key} are the key of {table.name}: name other columns to accumulate")
        for name in (*keys, *how):
            _require_once(table.name, name, columns)
        if more := [c for c in columns if c not in keys and c not in how]:
            raise InvalidRequestError(
                f"columns {more} for {table.name} are no keys, and neither summed nor the min or max: leave them out"
            )
        require_combinable(table.name, table.schema, how)
        return cls(table.name, keys, how, frozenset(f.name for f in given if pa.types.is_decimal(f.type)))

    def collected(self, given: DataFrame | pa.Table, small: bool) -> pa.Table:
        """Rows, combined; the tasks of a DataFrame begin with that unless there are few."""
        if not isinstance(given, DataFrame):
            return self.rows(given)
        if small:
            return self.rows(given.toArrow())
        combined = self.rows(arrow_schema(given.schema).empty_table()).schema
        with as_lakeheads():
            return self.rows(map_in_arrow(given, self, spark_schema(combined)).toArrow())

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held: list[pa.Table] = [self.rows(pa.Table.from_batches([batch])) for batch in batches]
        if held:
            yield from self.rows(pa.concat_tables(held)).to_batches()

    def rows(self, given: pa.Table) -> pa.Table:
        """Rows, combined: one a key, which has its columns and then the others. A sum is of the type `_summed`.

        Raises:
            SchemaMismatchError: a sum has more digits than any column.
        """
        # By number: Arrow calls a sum of "n" "n_sum", as a key may be called.
        columns = {str(n): given[key] for n, key in enumerate(self.keys)}
        of_key, ways = list(columns), list[tuple[str, str]]()
        greatest_if_any = list[int]()
        for n, (name, way) in enumerate(self.how.items(), len(of_key)):
            column = given[name]
            columns[str(n)] = self._cast(column, _on_the_way(column.type), name) if way == "sum" else column
            ways.append((str(n), way))
            if way == "max" and pa.types.is_floating(column.type):  # Arrow's own leaves NaN out
                columns[f"nan {n}"] = pc.is_nan(column)
                ways.append((f"nan {n}", "any"))
                greatest_if_any.append(n)
        # A task has one core, and threads take long to wake.
        found = pa.table(columns).group_by(of_key, use_threads=False).aggregate(ways)
        out = [found[n] for n in of_key]
        for n, (name, way) in enumerate(self.how.items(), len(of_key)):
            value = found[f"{n}_{way}"]
            if way == "sum":
                value = self._cast(value, _summed(given.schema.field(name).type), name)
            elif n in greatest_if_any:
                value = pc.if_else(found[f"nan {n}_any"], pa.scalar(float("nan"), value.type), value)
            out.append(value)
        return pa.table(out, names=[*self.keys, *self.how])

    def added(self, table: Table, given: pa.Table) -> pa.Table:
        """Rows, which are combined, together with what a table has for their keys.

        Raises:
            SchemaMismatchError: a value does not fit its column.
            NullKeyError: a key is null.
        """
        desc = handle_of(table).desc
        what = f"rows for {desc.path}"
        columns = {c: desc.schema.field(c) for c in (*self.keys, *self.how)}
        compared, sums = [[c for c in self.how if (self.how[c] == "sum") == summed] for summed in (False, True)]
        keys = to_key_table(given.select(list(self.keys)), desc.key_columns, what=what)
        comparing = with_floats(desc.schema, given.select(compared))
        fitting = conform(comparing, desc.schema, columns_required=(), what=what) if compared else keys
        old = table.lookup(keys)
        new = {c: (keys if c in self.keys else given if c in sums else fitting)[c] for c in columns}
        both = [
            pa.table({c: self._as_column(rows[c], f) if c in sums else rows[c] for c, f in columns.items()})
            for rows in (old, new)
        ]
        total = self.rows(pa.concat_tables(both))
        return pa.table({c: self._cast(total[c], f.type, c) if c in sums else total[c] for c, f in columns.items()})

    def _as_column(self, summed: Any, field: pa.Field) -> Any:
        """A sum as one of values of a column: with all digits of whole numbers and decimals."""
        if pa.types.is_floating(field.type) and field.name in self.decimals:
            summed = with_floats(pa.schema([field]), pa.table([summed], names=[field.name]))[field.name]
        elif pa.types.is_floating(field.type) and pa.types.is_decimal(summed.type):
            whole = pa.table([self._cast(summed, pa.int64(), field.name)], names=[field.name])
            summed = conform(whole, pa.schema([field]), what=f"rows for {self.table}")[field.name]
        return self._cast(summed, _summed(field.type), field.name)

    def _cast(self, column: Any, t: pa.DataType, name: str) -> Any:
        try:
            return column.cast(t)
        except pa.ArrowInvalid as e:
            raise SchemaMismatchError(
                f"a sum of column {name!r} does not fit {t} for {self.table} ({e}): have the column be double, or a"
                " decimal of more digits, and cast to that what is summed",
                column=name,
                expected=str(t),
            ) from e


def plain(table: Table, given: pa.Table) -> pa.Table:
    """The same rows without dictionaries and views, which Arrow does not compare; of these, types as in the table.

    Raises:
        ColumnNotFoundError, SchemaMismatchError, NullKeyError: as of `lakehead.Table.upsert`.
    """
    encoded = [f.name for f in given.schema if _is_encoded(f.type)]
    if not encoded:
        return given
    desc = handle_of(table).desc
    fitting = conform(given.select(encoded), desc.schema, columns_required=(), what=f"rows for {desc.path}")
    return pa.table({c: fitting[c] if c in encoded else given[c] for c in given.column_names})


def _is_encoded(t: pa.DataType) -> bool:
    return pa.types.is_dictionary(t) or pa.types.is_string_view(t) or pa.types.is_binary_view(t)


def _summed(t: pa.DataType) -> pa.DataType:
    """What sums of values of a type are kept in, until they are a column's."""
    if pa.types.is_floating(t):
        return pa.float64()
    return pa.decimal128(_DIGITS, t.scale if pa.types.is_decimal(t) else 0)


def _on_the_way(t: pa.DataType) -> pa.DataType:
    """What they are added in: no number of rows overflows it."""
    # 2^63 whole numbers of 64 bits have 38 digits.
    return pa.decimal256(_DIGITS_ON_THE_WAY, t.scale) if pa.types.is_decimal(t) else _summed(t)
