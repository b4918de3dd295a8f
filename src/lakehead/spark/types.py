"""Arrow types as Spark's, with the field ids by which Spark finds lake columns."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as st
from pyspark.sql.pandas.types import to_arrow_schema

from lakehead.errors import InvalidSchemaError, LakeStateError, SchemaMismatchError
from lakehead.format.schema import is_wider, lake_type
from lakehead.spark.floats import quoted
from lakehead.types import field_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column

SPARK_ID = "parquet.field.id"
Kind = TypeVar("Kind", bound=st.DataType)
Writer: TypeAlias = Literal["us", "others"]
"""Whose files a column stands in."""


def columns_made_of(schema: pa.Schema) -> pa.Schema:
    """The columns of a table that is made for the rows of a DataFrame, which has these.

    All may be null, and what is in them, too, as in Spark's own tables: that a column of literals is never null is said
    of these rows, not of those to come. A time has microseconds, which are all that Spark's have.
    """
    return pa.schema([_made_of(field) for field in schema])


def _made_of(field: pa.Field) -> pa.Field:
    t = field.type
    if pa.types.is_struct(t):
        t = pa.struct([_made_of(t.field(i)) for i in range(t.num_fields)])
    elif pa.types.is_list(t):
        t = pa.list_(_made_of(t.value_field))
    elif pa.types.is_large_list(t):
        t = pa.large_list(_made_of(t.value_field))
    elif pa.types.is_map(t):
        t = pa.map_(_made_of(t.key_field).with_nullable(False), _made_of(t.item_field), t.keys_sorted)
    elif t == pa.time64("ns"):
        t = pa.time64("us")
    return field.with_type(t).with_nullable(True)


def spark_schema(schema: pa.Schema, lake: pa.Schema | None = None, *, as_stored: Writer | None = None) -> st.StructType:
    """The Spark schema of a table's columns.

    Args:
        schema: columns in the table's own types. Spark narrows what the lake widened (int8, int16) while it reads.
        lake: Arrow form of the Iceberg schema, with field ids; columns are matched by name.
        as_stored: what another engine widened has its type in the lake, which Spark does not narrow while it reads: see
            `narrowed`. In files of others int8 and int16 do, too, where Spark would make other numbers of what does not
            fit: see `fitted`.
    """
    return st.StructType([_struct_field(f, _named(lake, f.name), as_stored) for f in schema])


def _named(fields: pa.Schema | pa.StructType | None, name: str) -> pa.Field | None:
    if fields is None or fields.get_field_index(name) < 0:
        return None
    return fields.field(name)


def _struct_field(f: pa.Field, lake: pa.Field | None, as_stored: Writer | None) -> st.StructField:
    number = None if lake is None else field_id(lake)
    metadata = None if number is None else {SPARK_ID: number}
    t = spark_type(f.type, lake.type if lake is not None else None, as_stored=as_stored)
    return st.StructField(f.name, t, f.nullable, metadata)


def spark_type(t: pa.DataType, lake: pa.DataType | None = None, *, as_stored: Writer | None = None) -> st.DataType:
    """The Spark type of an Arrow type; ``lake`` is the same type with field ids inside, ``as_stored`` as there."""

    def of(t: pa.DataType, lake: pa.DataType | None) -> st.DataType:
        return spark_type(t, lake, as_stored=as_stored)

    if pa.types.is_struct(t):
        inner = lake if lake is not None and pa.types.is_struct(lake) else None
        fields = [t.field(i) for i in range(t.num_fields)]
        return st.StructType([_struct_field(f, _named(inner, f.name), as_stored) for f in fields])
    if pa.types.is_map(t):
        key, item = (lake.key_type, lake.item_type) if lake is not None and pa.types.is_map(lake) else (None, None)
        return st.MapType(of(t.key_type, key), of(t.item_type, item), t.item_field.nullable)
    if pa.types.is_list(t) or pa.types.is_large_list(t):
        inner = lake.value_type if lake is not None and pa.types.is_list(lake) else None
        return st.ArrayType(of(t.value_type, inner), t.value_field.nullable)
    if as_stored and lake is not None and is_wider(lake, t if as_stored == "others" else lake_type(t)):
        return _plain_type(lake)
    return _plain_type(t)


def narrowed(column: Column, own: st.DataType) -> Column:
    """A column as it stands in files of ours, whose values fit, in the type of its table."""
    return column.cast(nullable(own))


def fitted(column: Column, stored: st.DataType, own: pa.DataType, table: str) -> Column:
    """A column as it stands in files of other engines, in the type of its table.

    A value that does not fit, inside too, ends the query with `LakeStateError`, as it does any other read, whatever
    ``spark.sql.ansi.enabled`` says: Spark's casts make other values of it, or null.
    """
    to = nullable(spark_type(own))
    if not may_not_fit(stored, own):
        return column.cast(to)
    if isinstance(stored, st.StructType):
        parts = [fitted(column[f.name], f.dataType, own.field(i).type, table) for i, f in enumerate(stored)]
        return F.when(column.isNotNull(), F.struct(*parts)).cast(to)
    if isinstance(stored, st.ArrayType):
        of = stored.elementType
        return F.transform(column, lambda item: fitted(item, of, own.value_type, table)).cast(to)
    if isinstance(stored, st.MapType):
        key, value = (stored.keyType, own.key_type), (stored.valueType, own.item_type)
        entries = F.transform(
            F.map_entries(column),
            lambda e: F.struct(fitted(e["key"], *key, table), fitted(e["value"], *value, table)),
        )
        return F.map_from_entries(entries).cast(to)
    made = column.try_cast(to)
    if pa.types.is_float32(own):
        infinite = float("inf")
        fits = (F.abs(made) != infinite) | (F.abs(column) == infinite)
    elif pa.types.is_temporal(own):
        fits = F.date_part(F.lit("SECOND"), column) * _PER_SECOND[own.unit] % 1 == 0
    else:
        fits = made.isNotNull()
    text = (
        f"{LakeStateError.__module__}.LakeStateError: lake table {table} holds values that do not fit a column of type"
        f" {own}: another engine has written them, so change or delete them there\n"
    )
    return F.when(column.isNull() | fits, made).otherwise(F.raise_error(F.lit(text)))


_PER_SECOND = {"s": 1, "ms": 1000}


def may_not_fit(stored: st.DataType, own: pa.DataType) -> bool:
    """Whether a column of a file of this type, as of `spark_schema`, may hold values that another type has none of."""
    if isinstance(stored, st.StructType):
        return any(may_not_fit(f.dataType, own.field(i).type) for i, f in enumerate(stored))
    if isinstance(stored, st.ArrayType):
        return may_not_fit(stored.elementType, own.value_type)
    if isinstance(stored, st.MapType):
        return may_not_fit(stored.keyType, own.key_type) or may_not_fit(stored.valueType, own.item_type)
    if pa.types.is_timestamp(own) or pa.types.is_time(own):
        return own.unit in _PER_SECOND
    return not are_alike(stored, _plain_type(own))


def are_alike(a: st.DataType, b: st.DataType) -> bool:
    """Whether types differ in field ids and nulls alone: Spark reads all that stands in files as nullable."""
    return a.simpleString() == b.simpleString()


def nullable(t: Kind) -> Kind:
    """The type with nulls everywhere in it: Spark casts what may be null to nothing else, and takes it at its word."""
    if isinstance(t, st.StructType):
        return st.StructType([st.StructField(f.name, nullable(f.dataType), True, f.metadata) for f in t.fields])
    if isinstance(t, st.ArrayType):
        return st.ArrayType(nullable(t.elementType), True)
    if isinstance(t, st.MapType):
        return st.MapType(nullable(t.keyType), nullable(t.valueType), True)
    return t


_PLAIN = {
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
    pa.string(): st.StringType(),
    pa.large_string(): st.StringType(),
    pa.binary(): st.BinaryType(),
    pa.large_binary(): st.BinaryType(),
    pa.date32(): st.DateType(),
    pa.date64(): st.DateType(),
}


def _plain_type(t: pa.DataType) -> st.DataType:
    if t in _PLAIN:
        return _PLAIN[t]
    if pa.types.is_decimal(t):
        return st.DecimalType(t.precision, t.scale)
    if pa.types.is_fixed_size_binary(t):
        return st.BinaryType()
    if pa.types.is_time(t):
        return st.TimeType(6)
    if pa.types.is_timestamp(t):
        return st.TimestampType() if t.tz else st.TimestampNTZType()
    raise InvalidSchemaError(f"a column of type {t} cannot be read in Spark", type=str(t))


def arrow_schema(schema: st.StructType) -> pa.Schema:
    """The Arrow schema in which Spark gives and takes rows of this schema.

    Raises:
        InvalidSchemaError: a column is of a type that Arrow does not have.
    """
    try:
        try:
            return to_arrow_schema(schema, timezone="UTC")
        except TypeError as e:  # before Spark 4.2 timestamps are always UTC
            if isinstance(e, PySparkException):
                raise
            return to_arrow_schema(schema)
    except (PySparkException, ValueError) as e:
        if empty := next((f for f in schema if _holds_nothing(f.dataType)), None):
            raise _of_nothing(empty) from e
        column = next((f for f in schema if _holds(f.dataType, _WITHOUT_ARROW)), None)
        if column is None:
            raise
        raise InvalidSchemaError(
            f"column {column.name!r} has the type {column.dataType.simpleString()}, which is not supported: write its"
            " parts, such as extract(year from ...) * 12 + extract(month from ...)",
            column=column.name,
        ) from e


def written_schema(schema: st.StructType) -> pa.Schema:
    """The Arrow schema of rows that Spark writes.

    Raises:
        InvalidSchemaError: a column is of a type that tables do not have: Arrow has no word for it, or has it as a
            struct that nothing reads back as what it was.
    """
    for column in schema:
        if _holds_nothing(column.dataType):
            raise _of_nothing(column)
        for kind, instead in _STRUCTS_IN_ARROW.items():
            if _holds(column.dataType, (kind,)):
                raise InvalidSchemaError(
                    f"column {column.name!r} has the type {column.dataType.simpleString()}, which is not supported:"
                    f" write it as {instead.format(quoted(column.name))}",
                    column=column.name,
                )
    return arrow_schema(schema)


def collations(schema: st.StructType) -> dict[str, str]:
    """The columns of text that Spark compares by a collation, and by which: Arrow's types say nothing of it."""
    texts = {f.name: f.dataType for f in schema if isinstance(f.dataType, st.StringType)}
    return {name: t.collation for name, t in texts.items() if t.collation != "UTF8_BINARY"}


def require_bytewise(columns: Iterable[str], collated: Mapping[str, str], what: str) -> None:
    """That Spark tells values of these columns apart as tables do.

    Raises:
        SchemaMismatchError: it takes some for one that are two in a table.
    """
    for name in columns:
        if name in collated:
            raise SchemaMismatchError(
                f"{what}: column {name!r} has the collation {collated[name]}, by which Spark takes texts for one that"
                f" are two to a table, which compares bytes: give collate({quoted(name)}, 'UTF8_BINARY'), of lower(...)"
                " where case is not to matter",
                column=name,
            )


_STRUCTS_IN_ARROW = {
    st.VariantType: "text, to_json({0}), or the parts that are read, variant_get({0}, '$.path', 'type')",
    **{  # before Spark 4.2 there are none
        kind: "bytes, st_asbinary({0})"
        for name in ("GeometryType", "GeographyType")
        if (kind := getattr(st, name, None)) is not None
    },
}
_WITHOUT_ARROW = (st.YearMonthIntervalType, st.CalendarIntervalType)


def _holds(t: st.DataType, kinds: tuple[type[st.DataType], ...]) -> bool:
    if isinstance(t, st.StructType):
        return any(_holds(f.dataType, kinds) for f in t)
    if isinstance(t, st.ArrayType):
        return _holds(t.elementType, kinds)
    if isinstance(t, st.MapType):
        return _holds(t.keyType, kinds) or _holds(t.valueType, kinds)
    return isinstance(t, kinds)


def literal(value: pa.Scalar) -> Column:
    """A column that is this value everywhere; of a type that is cast to the value's."""
    plain = value.as_py()
    if isinstance(plain, str | bytes | float):
        return F.lit(bytearray(plain) if isinstance(plain, bytes) else plain)
    if isinstance(plain, dt.datetime) and plain.tzinfo is not None:
        return F.timestamp_micros(F.lit(value.cast(pa.timestamp("us", "UTC")).value))
    if isinstance(plain, dt.date | dt.time):
        return F.lit(plain.isoformat()).cast(_plain_type(value.type))
    return F.lit(str(plain).lower())


def _holds_nothing(t: st.DataType) -> bool:
    """Whether there are values inside of which each is null, of no type."""
    return not isinstance(t, st.NullType) and _holds(t, (st.NullType,))


def _of_nothing(column: st.StructField) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"column {column.name!r} has the type {column.dataType.simpleString()}, of values that are all null: cast it to"
        f" one, such as cast({quoted(column.name)} as array<string>)",
        column=column.name,
    )
