"""What users give to a table, in any form, becomes exactly its columns, or an error before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager

import pyarrow as pa

from lakehead.errors import ColumnNotFoundError, InvalidRequestError, SchemaMismatchError
from lakehead.format.defaults import filled, plain_defaults
from lakehead.format.nulls import required_columns
from lakehead.format.rows import conform, to_arrow_table, to_key_table
from lakehead.format.storable import check_partition_values
from lakehead.types import TableDescriptor


def rows_for_append(desc: TableDescriptor, data: object) -> pa.Table:
    """User's rows as the table's columns; see `Table.append` for errors."""
    what = f"rows for {desc.path}"
    required = required_columns(desc.schema)
    with a_dict_is_a_row(data):
        given = to_arrow_table(data, desc.schema, what=what, fill=plain_defaults(desc.schemas.current.fields))
    table = filled(conform(given, desc.schema, columns_required=required, what=what), desc.schemas.current)
    return in_partitions(desc, table, what)


def rows_for_upsert(desc: TableDescriptor, data: object, columns: Sequence[str] | None) -> pa.Table:
    """User's rows as all or some of the table's columns, the non-null ones among them; see `Table.upsert`."""
    what = f"rows for {desc.path}"
    with a_dict_is_a_row(data):
        table = to_arrow_table(data, desc.schema, what=what)
    if not isinstance(columns, str | Iterable | None):
        raise InvalidRequestError(f"columns={columns!r} names no columns: give a list of names")
    if columns is not None:
        columns = [columns] if isinstance(columns, str) else list(columns)
        missing = [c for c in columns if c not in table.column_names]
        if missing:
            raise ColumnNotFoundError(f"columns={columns}: the data has no {missing}", column=missing[0])
        table = table.select(columns)
    required = required_columns(desc.schema)
    lacking = [c for c in required if c not in table.column_names]
    if lacking:
        raise SchemaMismatchError(
            f"{what}: an upsert must hold the non-null columns {required}; {lacking} missing", columns=str(lacking)
        )
    return in_partitions(desc, conform(table, desc.schema, columns_required=required, what=what), what)


def rows_for_delete(desc: TableDescriptor, keys: object) -> pa.Table:
    """User's keys as the table's key columns; see `Table.delete`."""
    what = f"keys of {desc.path}"
    with a_dict_is_a_row(keys):
        table = to_key_table(keys, desc.key_columns, what=what, allow_extra=True)
    return in_partitions(desc, table, what)


@contextmanager
def a_dict_is_a_row(data: object) -> Iterator[None]:
    """Say so where a value of the only dict that was given did not fit and has values in it, as a column would."""
    try:
        yield
    except SchemaMismatchError as e:
        value = data.get(e.context.get("column")) if isinstance(data, dict) else None
        if not isinstance(value, Sized) or isinstance(value, str | bytes | bytearray | dict):
            raise
        raise SchemaMismatchError(
            f"{e.message}. A dict is one row: give a list of dicts, or columns as pa.table(...)", **e.context
        ) from e


def in_partitions(desc: TableDescriptor, table: pa.Table, what: str) -> pa.Table:
    """The table, once every row of it has a partition; see `check_partition_values`."""
    if desc.partition_by:
        columns = [table.column(c) for c in desc.partition_by]
        check_partition_values(columns, [desc.schema.field(c) for c in desc.partition_by], what)
    return table
