"""Arrow types in Spark, with field ids at every level."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql import types as st

from lakehead.errors import InvalidSchemaError
from lakehead.spark.types import spark_schema, spark_type, written_schema


@pytest.mark.parametrize(
    ("arrow", "spark"),
    [
        (pa.int8(), st.ByteType()),
        (pa.int16(), st.ShortType()),
        (pa.decimal128(12, 2), st.DecimalType(12, 2)),
        (pa.large_string(), st.StringType()),
        (pa.binary(4), st.BinaryType()),
        (pa.timestamp("ms"), st.TimestampNTZType()),
        (pa.timestamp("us", "UTC"), st.TimestampType()),
        (pa.time32("s"), st.TimeType(6)),
        (pa.list_(pa.field("element", pa.int32(), False)), st.ArrayType(st.IntegerType(), False)),
        (pa.map_(pa.string(), pa.int64()), st.MapType(st.StringType(), st.LongType())),
    ],
)
def test_type(arrow: pa.DataType, spark: st.DataType) -> None:
    assert spark_type(arrow) == spark


def test_field_ids() -> None:
    def ided(name: str, t: pa.DataType, number: int) -> pa.Field:
        return pa.field(name, t, metadata={"PARQUET:field_id": str(number)})

    own = pa.schema([("small", pa.int8()), ("s", pa.struct([("x", pa.int16())])), ("l", pa.list_(pa.int8()))])
    lake = pa.schema(
        [
            ided("s", pa.struct([ided("x", pa.int32(), 4)]), 2),
            ided("small", pa.int32(), 1),
            ided("l", pa.list_(ided("element", pa.int32(), 5)), 3),
        ]
    )
    got = spark_schema(own, lake)
    assert [f.metadata["parquet.field.id"] for f in got] == [1, 2, 3]
    assert got["small"].dataType == st.ByteType()
    inner = got["s"].dataType
    assert isinstance(inner, st.StructType)
    assert (inner["x"].metadata, inner["x"].dataType) == ({"parquet.field.id": 4}, st.ShortType())


WITHOUT_COLUMNS = [
    st.YearMonthIntervalType(),
    st.CalendarIntervalType(),
    st.VariantType(),
    # Before Spark 4.2 there are none.
    *(getattr(st, name)(4326) for name in ("GeometryType", "GeographyType") if hasattr(st, name)),
]


@pytest.mark.parametrize("within", [lambda t: t, st.ArrayType, lambda t: st.MapType(st.StringType(), t)])
@pytest.mark.parametrize("kind", WITHOUT_COLUMNS, ids=str)
def test_what_tables_do_not_have_is_said_of_the_column(
    kind: st.DataType, within: Callable[[st.DataType], st.DataType]
) -> None:
    inner = st.StructType([st.StructField("at", within(kind))])
    for t in (within(kind), inner):
        rows = st.StructType([st.StructField("id", st.LongType()), st.StructField("odd", t)])
        with pytest.raises(InvalidSchemaError, match=r"column 'odd' has the type .* not supported: write"):
            written_schema(rows)


@pytest.mark.parametrize(
    "t", [st.ArrayType(st.NullType(), False), st.MapType(st.NullType(), st.NullType(), False)], ids=["array", "map"]
)
def test_values_that_are_all_null_are_of_no_type(t: st.DataType) -> None:
    with pytest.raises(InvalidSchemaError, match=r"column 'odd' has the type .*void.*: cast it"):
        written_schema(st.StructType([st.StructField("odd", t)]))
