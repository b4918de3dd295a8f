"""Change types as people and lakes have them (``+I``), and as logs do: a byte."""

from __future__ import annotations

import functools

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.types import CHANGE_SYMBOLS, CHANGE_TYPE_COLUMN


def named_changes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows with change types as the field writes them; others as they are."""
    at = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if at < 0:
        return rows
    return rows.set_column(at, CHANGE_TYPE_COLUMN, _symbols().take(rows.column(at)))


def coded_changes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Inverse of `named_changes`."""
    at = rows.schema.get_field_index(CHANGE_TYPE_COLUMN)
    if at < 0:
        return rows
    codes = pc.index_in(rows.column(at), _symbols()).cast(pa.int8())
    return rows.set_column(at, CHANGE_TYPE_COLUMN, codes)


@functools.cache
def _symbols() -> pa.Array:
    # Made when first used: Arrow loads pandas, which takes most of a second, for the first array of Python values.
    return pa.array(CHANGE_SYMBOLS)
