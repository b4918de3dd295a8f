"""What `lakehead.Connection.create_table` is told, as the definition of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lakehead.config import Limits, TableProperties
from lakehead.errors import InvalidPropertyError, InvalidSchemaError
from lakehead.format.schema import normalize_schema, validate_definition
from lakehead.types import Schemas, TableDescriptor, TablePath

Names = list[str] | tuple[str, ...] | str | None
DEFINITION = ("primary_key", "partition_by", "buckets", "bucket_key", "lake", *TableProperties().to_user())
"""What else than name and columns defines a table."""


def definition_of(
    name: str,
    schema: object,
    *,
    primary_key: Names = None,
    partition_by: Names = None,
    buckets: int = 1,
    bucket_key: Names = None,
    lake: str | None = None,
    freshness: str | float = "30s",
    **properties: Any,
) -> TableDescriptor:
    """A table that nobody has made; arguments and errors as of `lakehead.Connection.create_table`."""
    path = TablePath.parse(name)
    if not (lake is None or is_text(lake)):
        raise InvalidPropertyError(f"lake={lake!r} is no lake format: use 'iceberg', or None")
    plain, key, partitions, bucketing = validate_definition(
        normalize_schema(schema),
        primary_key=_names(primary_key),
        partition_by=_names(partition_by),
        buckets=buckets,
        bucket_key=_names(bucket_key) or None,
        limits=Limits(),
    )
    return TableDescriptor(
        table_id="",
        path=path,
        schemas=Schemas.only(plain),
        primary_key=key,
        partition_by=partitions,
        bucket_key=bucketing,
        buckets=buckets,
        lake=lake,
        properties=TableProperties.from_user({"freshness": freshness, **properties}),
    )


def is_text(value: object) -> bool:
    """Whether this is a text that can be written as UTF-8, as every name is."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _names(value: Names) -> tuple[str, ...]:
    if not isinstance(value, str | Iterable | None):
        raise InvalidSchemaError(f"{value!r} names no columns: give a list of names")
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    return tuple(str(name) if isinstance(name, str) else name for name in names)  # numpy's texts are no plain ones
