"""Defects of Spark that we work around: a test fails when a Spark release has mended one, so that the detour may go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, GreaterThan

import lakehead as lh
import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with lh.connect(tmp_path_factory.mktemp("upstream") / "data") as con:
        yield lhs.session(con)


def test_a_filter_pushed_into_a_python_source_sticks_to_its_relation(spark: SparkSession) -> None:
    """RFC 0014 holds the report; it is why `lakehead.spark.source` takes no filters."""

    class TenReader(DataSourceReader):
        low = -1

        def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
            for f in filters:
                if isinstance(f, GreaterThan):
                    self.low = f.value
                else:
                    yield f

        def read(self, partition: object) -> Iterator[tuple[int]]:
            return iter([(i,) for i in range(10) if i > self.low])

    class Ten(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ten"

        def schema(self) -> str:
            return "id int"

        def reader(self, schema: object) -> DataSourceReader:
            return TenReader()

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(Ten)
    ten = spark.read.format("ten").load()
    assert [ten.count(), ten.where("id > 6").count(), ten.count()] == [10, 3, 3], "10, 3, 10 would be right"
    assert spark.read.format("ten").load().where("id > 6").count() == 3


def test_parquet_statistics_hide_nan_and_dictionaries_minus_zero(spark: SparkSession, tmp_path: Path) -> None:
    """Why floats are read as expressions; see `lakehead.spark.floats`."""
    pq.write_table(pa.table({"f": [0.5, float("nan")]}), tmp_path / "nan.parquet")
    pq.write_table(pa.table({"f": [-0.0, -0.0]}), tmp_path / "zero.parquet")
    rows = spark.read.parquet(str(tmp_path / "nan.parquet"), str(tmp_path / "zero.parquet"))
    assert [rows.where(w).count() for w in ("f > 1", "f = double('NaN')", "f = 0.0")] == [0, 0, 0], "1, 1, 2 are right"
    spark.conf.set("spark.sql.parquet.filterPushdown", "false")
    try:
        assert [rows.where(w).count() for w in ("f > 1", "f = double('NaN')", "f = 0.0")] == [1, 1, 2]
    finally:
        spark.conf.set("spark.sql.parquet.filterPushdown", "true")
