"""Definitions and columns as texts: Arrow IPC schema messages, base64."""

from __future__ import annotations

import base64
import functools

import pyarrow as pa

from lakehead.errors import InvalidRequestError
from lakehead.format.schema import schema_from_bytes, schema_to_bytes
from lakehead.types import TableSchema


def schema_to_text(schema: TableSchema) -> str:
    """A definition as it is stored and sent, beside its id: an Arrow IPC schema message, base64."""
    return base64.b64encode(schema_to_bytes(schema.stored)).decode()


def schema_from_text(schema_id: int, text: str) -> TableSchema:
    """Inverse of `schema_to_text`; for errors see `lakehead.protocol.table_info.TableInfo.descriptor`. What was read
    last is remembered, and with it what follows from the columns."""
    return _remembered(schema_id, text) if len(text) <= _REMEMBERED_MAX else _read(schema_id, text)


def _read(schema_id: int, text: str) -> TableSchema:
    try:
        data = base64.b64decode(text)
    except ValueError as e:
        raise InvalidRequestError(f"a table's definition cannot be read: {e}") from e
    return TableSchema.of(schema_id, schema_from_bytes(data))


_remembered = functools.lru_cache(256)(_read)
_REMEMBERED_MAX = 1 << 16
"""Characters of a definition that is remembered."""


def field_to_text(f: pa.Field) -> str:
    """A field as changes name its type."""
    return base64.b64encode(schema_to_bytes(pa.schema([f]))).decode()


def field_from_text(text: str) -> pa.Field:
    """Inverse of `field_to_text`.

    Raises:
        InvalidRequestError: it is none.
        CorruptionError: it cannot be read.
    """
    try:
        schema = schema_from_bytes(base64.b64decode(text))
    except ValueError as e:
        raise InvalidRequestError(f"a column's type cannot be read: {e}") from e
    if len(schema) != 1:
        raise InvalidRequestError("a column's type must be a schema of one field")
    return schema.field(0)
