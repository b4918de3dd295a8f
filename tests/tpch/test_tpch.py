"""The 22 queries of TPC-H over tables that are half hot find what they find in plain files, by DuckDB and by Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from tests.tpch.data import KEYS, fill, generate, same_rows, write_plain

import lakehead as lh
import lakehead.spark as lhs

SCALE = 0.01
Data = tuple[dict[str, pa.Table], list[str]]


@pytest.fixture(scope="module")
def data() -> Data:
    return generate(SCALE)


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory, data: Data) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("data") / "data") as made:
        fill(made, data[0])
        for name, rows in data[0].items():
            table = made.table(name)
            in_lake, hot = table.scan(tier="lake").count(), table.scan(tier="hot").count()
            assert in_lake > rows.num_rows // 2 <= hot and table.scan().count() == rows.num_rows
        yield made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, data: Data) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_plain(data[0], folder)
    return folder


@pytest.fixture(scope="module")
def wanted(plain: Path, data: Data) -> list[list[tuple[object, ...]]]:
    """What each query finds in plain files."""
    with duckdb.connect() as other:
        for name in KEYS:
            other.execute(f"create view {name} as from '{plain}/{name}.parquet'")
        answers = [other.execute(query).fetchall() for query in data[1]]
    assert len(answers) == 22 and sum(map(bool, answers)) > 20
    return answers


def test_duckdb_finds_the_same(con: lh.Connection, data: Data, wanted: list[list[tuple[object, ...]]]) -> None:
    found = [con.sql(query).fetchall() for query in data[1]]
    assert not [n for n, (a, b) in enumerate(zip(found, wanted, strict=True), 1) if not same_rows(a, b)]


@pytest.mark.spark
def test_spark_finds_the_same(con: lh.Connection, data: Data, wanted: list[list[tuple[object, ...]]]) -> None:
    spark = lhs.session(con)
    found = [[tuple(row) for row in lhs.sql(spark, query).collect()] for query in data[1]]
    assert not [n for n, (a, b) in enumerate(zip(found, wanted, strict=True), 1) if not same_rows(a, b)]
