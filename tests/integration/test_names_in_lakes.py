"""What columns are called in the lake: in files without field ids, beside partition fields, where others came first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import IcebergType, IntegerType, ListType, MapType, NestedField, StringType, StructType

import lakehead as lh
import lakehead.spark as lhs

PLACE = pa.struct([("zip", pa.int32()), ("city", pa.string())])
SCHEMA = pa.schema(
    [("id", pa.int64()), ("v", pa.string()), ("place", PLACE), ("tags", pa.list_(pa.struct([("k", pa.string())])))]
)
OURS = {"id": 1, "v": "ours", "place": {"zip": 1, "city": "A"}, "tags": [{"k": "x"}]}
THEIRS = {"id": 9, "v": "theirs", "place": {"zip": 9, "city": "Z"}, "tags": [{"k": "y"}]}
SYSTEM = pa.schema([("__bucket", pa.int32()), ("__offset", pa.int64()), ("__timestamp", pa.timestamp("us", "UTC"))])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def with_a_file_without_ids(con: lh.Connection, tmp_path: Path) -> lh.Table:
    """A lake table that has a row of ours, and one that another engine brought in a file of its own."""
    table = con.create_table("a.t", SCHEMA, lake="iceberg")
    table.append([OURS])
    con.tier("a.t")
    path = tmp_path / "theirs.parquet"
    pq.write_table(pa.Table.from_pylist([{**THEIRS, "__bucket": 0}], pa.schema([*SCHEMA, *SYSTEM])), path)
    table.lake.iceberg().add_files([str(path)])
    return table


def read(table: lh.Table) -> dict[str, Any]:
    """The other engine's row, as all who read it find it."""
    (row,) = table.scan(where="id = 9").to_arrow().to_pylist()
    assert next(r for r in table.scan().to_arrow().to_pylist() if r["id"] == 9) == row
    iceberg = table.lake.iceberg()
    assert [r for r in iceberg.scan(selected_fields=tuple(row)).to_arrow().to_pylist() if r["id"] == 9] == [row]
    found: dict[str, Any] = row
    return found


ALTERED: list[tuple[str, str, dict[str, Any]]] = [
    ("rename v", "alter table a.t rename column v to w", {"v": None, "w": "theirs"}),
    ("another v", "alter table a.t add column v varchar", {"w": "theirs", "v": None}),
    ("drop w", "alter table a.t drop column w", {"w": None}),
    ("another w", "alter table a.t add column w varchar", {"w": None}),
]


def test_columns_of_files_without_ids_are_the_same_for_ever(con: lh.Connection, tmp_path: Path) -> None:
    table = with_a_file_without_ids(con, tmp_path)
    assert read(table) == THEIRS
    for what, statement, values in ALTERED:
        con.sql(statement)
        row = read(con.table("a.t"))
        assert {name: row.get(name) for name in values} == values, what
    with con.table("a.t").alter() as a:
        a.rename_column("place.city", "town").rename_column("tags.element.k", "key")
    with con.table("a.t").alter() as a:
        a.add_column("place.city", pa.string())
    row = read(con.table("a.t"))
    assert (row["place"], row["tags"]) == ({"zip": 9, "town": "Z", "city": None}, [{"key": "y"}])


@pytest.mark.spark
def test_spark_reads_files_without_ids(con: lh.Connection, tmp_path: Path) -> None:
    with_a_file_without_ids(con, tmp_path)
    spark = lhs.session(con)
    for statement in [None, *(text for _, text, _ in ALTERED[:2])]:
        if statement is not None:
            con.sql(statement)
        table = con.table("a.t")
        name = "v" if statement is None else "w"
        expected = sorted(table.scan().to_arrow().to_pylist(), key=lambda r: r["id"])
        for frame in (lhs.table(spark, "a.t"), lhs.sql(spark, "select * from a.t")):
            found = [row.asDict(recursive=True) for row in frame.orderBy("id").collect()]
            assert found == expected
            assert frame.where(f"{name} = 'theirs'").count() == 1
        assert lhs.sql(spark, "select place.zip z from a.t where place.city = 'Z'").collect() == [(9,)]


@pytest.mark.parametrize("change", ["add column id_bucket varchar", "rename column v to id_bucket"])
def test_no_column_has_the_name_of_a_partition_field(con: lh.Connection, change: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    table = con.create_table("a.p", schema, bucket_key="id", buckets=2, lake="iceberg")
    table.append([{"id": 1, "v": "a"}])
    con.tier("a.p")
    with pytest.raises(lh.InvalidSchemaError, match=r"cannot be called 'id_bucket'.*choose another name"):
        con.sql(f"alter table a.p {change}")
    table.append([{"id": 2, "v": "b"}])
    con.tier("a.p")
    with table.lake.iceberg().update_schema() as theirs:
        theirs.add_column("theirs", StringType())
    assert con.table("a.p").scan().count() == 2


@pytest.mark.parametrize(
    ("theirs", "ours", "value"),
    [
        (ListType(1, IntegerType(), element_required=False), pa.list_(pa.int32()), [1, 2]),
        (
            MapType(1, StringType(), 2, IntegerType(), value_required=False),
            pa.map_(pa.string(), pa.int32()),
            [("a", 1)],
        ),
        (
            StructType(NestedField(1, "zip", IntegerType(), required=False)),
            pa.struct([("zip", pa.int32())]),
            {"zip": 1},
        ),
    ],
    ids=["list", "map", "struct"],
)
def test_a_nested_column_of_others_becomes_the_tables(
    con: lh.Connection, theirs: IcebergType, ours: pa.DataType, value: Any
) -> None:
    table = con.create_table("a.t", pa.schema([("n", pa.int64())]), lake="iceberg")
    table.append([{"n": 1}])
    con.tier("a.t")
    with table.lake.iceberg().update_schema() as change:
        change.add_column("more", theirs)
    arrow = pa.schema([("n", pa.int64()), ("more", ours), *SYSTEM])
    table.lake.iceberg().append(pa.Table.from_pylist([{"n": 2, "more": value, "__bucket": 0}], arrow))
    with pytest.raises(lh.LakeStateError, match="another engine has added column 'more'"), table.alter() as a:
        a.add_column("more", pa.list_(pa.string()))
    with con.table("a.t").alter() as a:
        a.add_column("more", ours)
    table = con.table("a.t")
    table.append([{"n": 3, "more": value}])
    expected = [{"n": 1, "more": None}, {"n": 2, "more": value}, {"n": 3, "more": value}]
    assert table.scan().to_arrow().sort_by("n").to_pylist() == expected
    con.tier("a.t")
    assert table.scan(tier="lake").to_arrow().sort_by("n").to_pylist() == expected
    assert table.lake.iceberg().scan(selected_fields=("n", "more")).to_arrow().sort_by("n").to_pylist() == expected
