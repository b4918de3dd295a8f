"""What other engines write into a lake table, through Spark: the rows that every other reader has, or its error."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.types import DecimalType, DoubleType, IcebergType, LongType
from tests.integration.conftest import embedded_only

import lakehead as lh
import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, embedded_only]

I8 = pa.int8()
# Of each type that has fewer values than the lake's: one that fits, one that does not, what the lake was widened to.
CASES: dict[str, tuple[pa.DataType, Any, Any, IcebergType | None]] = {
    "int8": (I8, 5, 300, None),
    "int16": (pa.int16(), 5, 70_000, None),
    "int32": (pa.int32(), 5, 3_000_000_000, LongType()),
    "decimal": (pa.decimal128(9, 2), Decimal("5.00"), Decimal("12345678901.00"), DecimalType(18, 2)),
    "float32": (pa.float32(), 0.5, 1e300, DoubleType()),
    "infinite": (pa.float32(), float("-inf"), -1e300, DoubleType()),
    "seconds": (pa.timestamp("s"), dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, 0, 0, 0, 1), None),
    "time": (pa.time32("ms"), dt.time(1, 2, 3, 4000), dt.time(1, 2, 3, 4), None),
    "struct": (pa.struct([("a", I8), ("b", pa.string())]), {"a": 5, "b": "x"}, {"a": 300, "b": "x"}, None),
    "list": (pa.list_(I8), [5, None], [1, 300], None),
    "map": (pa.map_(I8, I8), [(5, 6)], [(1, 300)], None),
}


@pytest.mark.parametrize("kind", CASES)
def test_values_that_do_not_fit_end_a_read(con: lh.Connection, spark: SparkSession, kind: str) -> None:
    """Spark would take 300 for 44 in a column of bytes."""
    t, fits, wrong, wide = CASES[kind]
    name = f"y.fits_{kind}"
    table = con.create_table(name, pa.schema([("k", pa.int64()), ("v", t)]), lake="iceberg")
    table.append([{"k": 1, "v": fits}])
    con.tier(name)
    if wide is not None:
        with table.lake.iceberg().update_schema() as update:
            update.update_column("v", wide)

    def reads() -> list[Any]:
        frames = [lhs.table(spark, name), lhs.table(spark, f"{name}$lake"), lhs.sql(spark, f"select k, v from {name}")]
        return [frame.where("k >= 1").select("v") for frame in frames]

    def add(value: Any) -> None:
        lake = table.lake.iceberg()
        lake.append(pa.Table.from_pylist([{"k": 100, "v": value}], lake.schema().as_arrow()))

    add(fits)
    add(None)
    table.append([{"k": 2, "v": fits}])
    for hot, frame in zip((1, 0, 1), reads(), strict=True):
        found = frame.toArrow()["v"].to_pylist()
        assert found.count(None) == 1 and len(found) == 3 + hot
        assert all(v == next(v for v in found if v is not None) for v in found if v is not None)
    assert lhs.table(spark, name).where("v is not null").count() == table.scan(where="v is not null").count() == 3
    add(wrong)
    with pytest.raises(lh.LakeStateError, match="do not fit"):
        table.scan().to_arrow()
    for ansi in ("true", "false"):
        spark.conf.set("spark.sql.ansi.enabled", ansi)
        try:
            for frame in reads():
                with pytest.raises(Exception, match="do not fit") as told:
                    frame.collect()
                error = lhs.raised(told.value)
                assert isinstance(error, lh.LakeStateError) and "another engine has written" in str(error)
        finally:
            spark.conf.unset("spark.sql.ansi.enabled")


def test_nulls_of_others_are_rows_as_all_are(con: lh.Connection, spark: SparkSession) -> None:
    """Where another engine made a column optional that is none here, Spark must not be told that it has no nulls."""
    schema = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.int32())])
    table = con.create_table("y.optional", schema, lake="iceberg")
    table.append([{"k": 1, "v": 1}])
    con.tier("y.optional")
    with table.lake.iceberg().update_schema() as update:
        update.make_column_optional("k")
    lake = table.lake.iceberg()
    lake.append(pa.Table.from_pylist([{"v": 5}], lake.schema().as_arrow()))
    read = spark.read.format("lakehead").options(uri=con.uri, table="y.optional").load()
    for frame in (read, lhs.table(spark, "y.optional"), lhs.sql(spark, "select * from y.optional")):
        assert [tuple(r) for r in frame.where("k is null").collect()] == [(None, 5)]
        assert {tuple(r) for r in frame.collect()} == {(1, 1), (None, 5)}
        assert frame.where("k is null").count() == 1
