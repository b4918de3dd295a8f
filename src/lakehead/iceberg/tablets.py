"""Tablets and lake partitions: the same sets of rows under two names.

A lake table is partitioned by the identity of the partition columns and then by the bucket: Iceberg's ``bucket(N)`` of
the bucket key when that is one column, else the identity of ``__bucket``. So each data file that Lakehead writes holds
rows of one tablet, and the file's partition says which.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform, Transform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, IcebergType, TimestampType, TimestamptzType, TimeType

from lakehead.types import BUCKET_COLUMN, PartitionValue, TableDescriptor, TabletKey, parse_partition_name
from lakehead.types import partition_name as name_partition

_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


def partition_spec(desc: TableDescriptor, schema: Schema) -> PartitionSpec:
    """The partition spec of a table's lake, for an Iceberg schema with the system columns."""
    fields = [
        PartitionField(schema.find_field(name).field_id, 1000 + i, IdentityTransform(), name)
        for i, name in enumerate(desc.partition_by)
    ]
    transform: Transform[Any, Any] = IdentityTransform()
    name = source = BUCKET_COLUMN
    if len(desc.bucket_key) == 1:
        source = desc.bucket_key[0]
        transform = BucketTransform(desc.buckets)
        name = f"{source}_bucket"
        while name in desc.schema.names:
            name = f"_{name}"
    fields.append(PartitionField(schema.find_field(source).field_id, 1000 + len(fields), transform, name))
    return PartitionSpec(*fields)


def parted_by(spec: PartitionSpec, schema: Schema) -> frozenset[str]:
    """The columns of which each file has one value."""
    fields = (f for f in spec.fields if isinstance(f.transform, IdentityTransform))
    return frozenset(name for f in fields if (name := schema.find_column_name(f.source_id)) is not None)


def partition_values(types: Sequence[pa.DataType], tablet: TabletKey) -> tuple[object, ...]:
    """The partition values, as Iceberg holds them, of a tablet's files; the partition columns have these types."""
    values = parse_partition_name(tablet.partition, tuple(types))
    return (*map(_to_iceberg, values), tablet.bucket)


def tablet_of(partition: Record, spec: PartitionSpec, schema: Schema) -> TabletKey | None:
    """The tablet whose rows a file of this partition holds; None when it may hold rows of none or of several.

    None means rows without identity (a foreign writer left system columns null) or a partition spec that someone
    changed.
    """
    name = partition_of(partition, spec, schema)
    bucket = None if name is None else partition[len(spec.fields) - 1]
    return None if name is None or bucket is None else TabletKey(name, int(bucket))


def partition_of(partition: Record, spec: PartitionSpec, schema: Schema) -> str | None:
    """The partition of the table that all rows of a file of this one are of, also when they belong to no tablet; None
    when it may hold rows of several."""
    if not spec.fields or not _is_bucket(spec.fields[-1], schema):
        return None
    *fields, _ = spec.fields
    if any(not isinstance(f.transform, IdentityTransform) for f in fields):
        return None
    values = [partition[i] for i in range(len(fields))]
    if any(v is None for v in values):
        return None
    names = tuple(schema.find_column_name(f.source_id) or "" for f in fields)
    typed = tuple(_from_iceberg(v, schema.find_type(f.source_id)) for f, v in zip(fields, values, strict=True))
    return name_partition(names, typed)


def _is_bucket(field: PartitionField, schema: Schema) -> bool:
    if isinstance(field.transform, BucketTransform):
        return True
    return isinstance(field.transform, IdentityTransform) and schema.find_column_name(field.source_id) == BUCKET_COLUMN


def _to_iceberg(value: PartitionValue) -> object:
    """Dates as days, times and timestamps as microseconds; all else as it is."""
    if isinstance(value, dt.datetime):
        naive = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        return (naive - _EPOCH) // _MICROSECOND
    if isinstance(value, dt.date):
        return (value - _EPOCH.date()).days
    if isinstance(value, dt.time):
        return (dt.datetime.combine(_EPOCH, value) - _EPOCH) // _MICROSECOND
    return value


def _from_iceberg(value: PartitionValue, t: IcebergType) -> PartitionValue:
    if isinstance(value, int) and not isinstance(value, bool):
        if isinstance(t, DateType):
            return (_EPOCH + dt.timedelta(days=value)).date()
        if isinstance(t, TimeType):
            return (_EPOCH + value * _MICROSECOND).time()
        if isinstance(t, TimestampType):
            return _EPOCH + value * _MICROSECOND
        if isinstance(t, TimestamptzType):
            return (_EPOCH + value * _MICROSECOND).replace(tzinfo=dt.UTC)
    return value
