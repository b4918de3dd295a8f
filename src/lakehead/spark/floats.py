"""Comparisons of floats are kept out of Spark's Parquet reader, which would skip rows that they select.

In Spark NaN equals NaN and is greater than all else, and -0.0 equals 0.0. The statistics of a Parquet file leave NaN
out, and its dictionary tells -0.0 from 0.0; Spark trusts both, whoever wrote the file. A float read as an expression is
filtered after it was read; filters on other columns are pushed down as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as st

from lakehead.spark.frame_steps import select

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def unprunable_floats(rows: DataFrame, fields: Sequence[st.StructField]) -> DataFrame:
    """The same rows, read from Parquet files, with floats, also those in structs, that Spark pushes no filter on.

    Args:
        fields: all columns of the rows.
    """
    if any(isinstance(f.dataType, st.StructType) and _paths(f.dataType) for f in fields):
        return rows.withColumns(
            {f.name: _rebuilt(F.col(quoted(f.name)), f.dataType) for f in fields if _paths(f.dataType)}
        )
    return select(rows, map(_as_text, fields)) if any(_paths(f.dataType) for f in fields) else rows


def _as_text(f: st.StructField) -> str:
    name = quoted(f.name)
    return f"nanvl({name}, cast('NaN' as {f.dataType.simpleString()})) as {name}" if _paths(f.dataType) else name


def quoted(name: str) -> str:
    """A column name as Spark's resolver reads it back."""
    return "`" + name.replace("`", "``") + "`"


def _rebuilt(column: Column, t: st.DataType) -> Column:
    if not isinstance(t, st.StructType):
        return _same(column, t)
    out = column
    for names, leaf in _paths(t):
        value = column
        for name in names:
            value = value.getField(name)
        out = out.withField(".".join(map(quoted, names)), _same(value, leaf))
    return out


def _same(column: Column, t: st.DataType) -> Column:
    """The value itself; NaN where it is NaN."""
    return F.nanvl(column, F.lit(float("nan")).cast(t))


def _paths(t: st.DataType, before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], st.DataType]]:
    """Where floats are in a column, by names of struct fields. Spark pushes nothing on elements of lists and maps."""
    if isinstance(t, st.FloatType | st.DoubleType):
        return [(before, t)]
    if isinstance(t, st.StructType):
        return [path for f in t.fields for path in _paths(f.dataType, (*before, f.name))]
    return []
