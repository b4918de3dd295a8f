"""What a lake table must still be: pinned by the first round, compared by field id, wherever it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, IntegerType, ListType, LongType, NestedField, StringType, StructType

from lakehead.errors import LakeStateError
from lakehead.iceberg.columns import FileColumns, column_name
from lakehead.iceberg.contract import CONTRACT, LakeContract, _column_breaches, check_contract
from lakehead.iceberg.live_rows import count_rows
from lakehead.lake.census import Census, changed_by_others, check_rows
from lakehead.lake.lake_table import Outcome
from lakehead.lake.marks import mark_of
from lakehead.types import TabletKey, without_ids

A, B = TabletKey("", 0), TabletKey("", 1)


def test_the_first_round_pins_what_later_ones_must_find(keyed: Any) -> None:
    created = LakeContract.of(keyed.load(), keyed.desc)
    assert CONTRACT not in keyed.load().properties
    keyed.write(1)
    keyed.round()
    table = keyed.load()
    assert CONTRACT in table.properties and LakeContract.of(table, keyed.desc) == created
    assert [f.name for f in created.columns.fields] == ["id", "code", "v", "__bucket", "__offset", "__timestamp"]
    with table.update_schema() as update:
        update.add_column("extra", LongType())
    assert check_contract(keyed.load(), keyed.desc) == created
    keyed.write(2)
    keyed.round()
    assert LakeContract.of(keyed.load(), keyed.desc) == created


def test_before_the_first_round_the_table_as_created_counts(keyed: Any) -> None:
    with keyed.load().update_schema() as update:
        update.rename_column("v", "w")
    keyed.write(1)
    with pytest.raises(LakeStateError, match="'v' was renamed to 'w': rename it back"):
        keyed.round()
    with keyed.load().update_schema() as update:
        update.rename_column("w", "v")
    keyed.round()
    assert keyed.values() == keyed.model_values()


@pytest.mark.parametrize("change", ["schema", "spec"])
def test_a_commit_lands_on_the_columns_and_partitions_it_was_planned_with(keyed: Any, change: str) -> None:
    keyed.write(1)
    keyed.round()
    keyed.write(2)

    def disturb(step: str) -> None:
        if step == "commit":
            keyed.on_step = lambda step: None
            if change == "schema":
                with keyed.load().update_schema() as update:
                    update.rename_column("v", "w")
            else:
                with keyed.load().update_spec() as update:
                    update.add_identity("v")

    keyed.on_step = disturb
    before = keyed.snapshot_ids()
    with pytest.raises(LakeStateError, match="someone changed"):
        keyed.round()
    assert keyed.snapshot_ids() == before


def fields(*given: tuple[int, str, Any], required: bool = False) -> Schema:
    return Schema(*(NestedField(i, n, t, required=required) for i, n, t in given))


OWN = fields(
    (1, "i", IntegerType()),
    (2, "d", DecimalType(9, 2)),
    (3, "s", StructType(NestedField(4, "x", IntegerType()), NestedField(5, "y", StringType()))),
    (6, "l", ListType(7, IntegerType(), element_required=False)),
)


def now(**changed: Any) -> Schema:
    by_name = {f.name: f for f in OWN.fields}
    return Schema(
        *(NestedField(f.field_id, n, changed.get(n, f.field_type), required=False) for n, f in by_name.items())
    )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (OWN, None),
        (now(i=LongType()), None),
        (now(d=DecimalType(12, 2)), None),
        (now(l=ListType(7, LongType(), element_required=False)), None),
        (Schema(*reversed(OWN.fields)), None),
        (Schema(*OWN.fields, NestedField(9, "new", LongType(), required=False)), None),
        (now(i=StringType()), "was int and is string now"),
        (now(d=DecimalType(12, 3)), "change it back"),
        (now(s=StructType(NestedField(4, "xx", IntegerType()), NestedField(5, "y", StringType()))), "'s' was struct"),
        (now(s=StructType(NestedField(5, "y", StringType()), NestedField(4, "x", IntegerType()))), "'s' was struct"),
        (now(s=StructType(NestedField(8, "x", IntegerType()), NestedField(5, "y", StringType()))), "'s' was struct"),
        (now(l=ListType(8, IntegerType(), element_required=False)), "'l' was list"),
        (Schema(*OWN.fields[1:]), "'i' with field id 1 was dropped"),
        (Schema(*OWN.fields[1:], NestedField(9, "i", IntegerType(), required=False)), "added anew with field id 9"),
        (Schema(*OWN.fields, NestedField(9, "new", LongType(), required=True)), "is required"),
        (fields((1, "i", IntegerType()), required=True), "made required"),
    ],
)
def test_columns_are_compared_by_id(schema: Schema, said: str | None) -> None:
    found = "; ".join(_column_breaches(OWN, schema))
    assert (said in found) if said else not found


def test_rows_are_counted_per_tablet_once_another_engine_was_there(make_any: Callable[..., Any]) -> None:
    lake = make_any(keyed=True, buckets=2)
    for step in range(3):
        lake.write(*range(10), v=step)
        lake.delete(step)
        lake.round()
    version = lake.table.load()
    mark = mark_of(version)
    assert mark is not None and mark.rows == lake.table.census(version).rows and sum(mark.rows.values()) == 7 + 2
    assert not changed_by_others(version)
    check_rows(version, mark, lambda: pytest.fail("counted for nothing"), keyed=True)
    lake.rewrite_foreign()
    version = lake.table.load()
    assert changed_by_others(version) and lake.table.census(version) == Census(mark.rows)
    lake.clean_up()
    assert changed_by_others(lake.table.load())
    lake.round()
    lake.delete_foreign(5)
    left = lake.table.census(lake.table.load())
    assert sum(left.rows.values()) == 8
    with pytest.raises(LakeStateError, match="tiering left"):
        check_rows(lake.table.load(), mark, lambda: left, keyed=True)


@pytest.mark.parametrize(
    ("census", "keyed", "said"),
    [
        (Census({A: 2, B: 1}), True, None),
        (Census({A: 2, B: 1}, strangers=3), False, None),
        (Census({A: 2, B: 1}, strangers=3), True, "3 rows have no offset"),
        (Census({A: 1, B: 2}), False, "tablet /0 has 1 rows, and tiering left 2"),
        (Census({A: 2}), False, "tablet /1 has 0 rows, and tiering left 1"),
        (Census({A: 2, B: 1, TabletKey("", 7): 1}), False, "tablet /7 has 1 rows, and tiering left 0"),
        (Census({A: 2, B: 1}, homeless="x.parquet"), False, "x.parquet belongs to no tablet"),
    ],
)
def test_every_difference_in_rows_is_said(log: Any, census: Census, keyed: bool, said: str | None) -> None:
    import dataclasses

    log.write(1)
    log.round()
    mark = mark_of(log.table.load())
    assert mark is not None
    log.append_foreign(9)
    mark = dataclasses.replace(mark, rows={A: 2, B: 1})
    if said is None:
        check_rows(log.table.load(), mark, lambda: census, keyed=keyed)
        return
    with pytest.raises(LakeStateError, match=f"{said}.*roll it back to snapshot {mark.snapshot_id}"):
        check_rows(log.table.load(), mark, lambda: census, keyed=keyed)


def test_strangers_that_were_compacted_with_rows_and_deleted_are_told_apart(log: Any) -> None:
    log.write(1, 2, 3)
    log.round()
    log.append_foreign(7, 8, bucket=0)
    log.rewrite_foreign()
    assert count_rows(log.load()) == Census({A: 3}, strangers=2)
    log.delete_foreign(7)
    assert count_rows(log.load()) == Census({A: 3}, strangers=1)
    log.round()
    log.delete_foreign(1, 8)
    assert count_rows(log.load()) == Census({A: 2})


def field(i: int, name: str, t: pa.DataType) -> pa.Field:
    return pa.field(name, t, metadata={"PARQUET:field_id": str(i)})


def lake_columns(names: Callable[[str], str]) -> pa.Schema:
    def inside(*parts: pa.Field) -> pa.DataType:
        return pa.struct(list(parts))

    inner = inside(field(3, names("x"), pa.int64()), field(4, names("y"), pa.string()))
    return pa.schema(
        [
            field(1, names("i"), pa.int64()),
            field(2, names("s"), inner),
            field(5, names("l"), pa.list_(field(6, "element", inside(field(7, names("z"), pa.int64()))))),
            field(8, names("m"), pa.map_(pa.string(), field(10, "value", inside(field(11, names("w"), pa.int64()))))),
        ]
    )


ROWS: list[dict[str, Any]] = [
    {"i": 1, "s": {"x": 1, "y": "a"}, "l": [{"z": 1}, {"z": 2}], "m": [("k", {"w": 1})]},
    {"i": None, "s": None, "l": None, "m": None},
    {"i": 3, "s": {"x": None, "y": "c"}, "l": [], "m": []},
    {"i": 4, "s": {"x": 4, "y": None}, "l": [None, {"z": None}], "m": [("k", None), ("l", {"w": 2})]},
]


def test_columns_of_files_are_found_by_id_at_every_level(tmp_path: Path) -> None:
    own, odd = lake_columns(lambda n: n), lake_columns(lambda n: f"_{n}_")
    rows = pa.Table.from_pylist(ROWS, own)
    path = tmp_path / "a.parquet"
    columns = FileColumns(lambda: own, ("", ""))
    renamed = odd_table(rows, odd).select([3, 0, 2, 1])
    pq.write_table(renamed, path)
    with pq.ParquetFile(path) as file:
        physical = file.schema_arrow
        assert columns.lacking(physical) is None and columns.lacking(own) == set()
        assert [physical.names[at] for at in columns.binding(physical, ["l", "i"]).read] == ["_l_", "_i_"]
        (batch,) = file.iter_batches()
        assert bound(columns, batch, physical, own.names).to_pylist() == rows.to_pylist()
        part = bound(columns, batch.slice(1, 3), physical, ["m", "l", "s"]).to_pylist()
        assert part == rows.select(["m", "l", "s"]).slice(1, 3).to_pylist()


def test_files_without_ids_are_found_by_name_at_every_level() -> None:
    own = lake_columns(lambda n: n)
    rows = pa.RecordBatch.from_pylist(ROWS, pa.schema(without_ids(list(own))))
    less = pa.RecordBatch.from_pylist([{"s": {"y": "a"}, "i": 1}], pa.schema([("s", pa.struct([("y", pa.string())]))]))
    columns = FileColumns(lambda: own, ("", ""))
    assert columns.lacking(rows.schema) == set()
    assert bound(columns, rows, rows.schema, own.names).to_pylist() == ROWS
    assert bound(columns, less, less.schema, ["i", "s"]).to_pylist() == [{"i": None, "s": {"x": None, "y": "a"}}]


def bound(columns: FileColumns, batch: pa.RecordBatch, physical: pa.Schema, names: list[str]) -> pa.RecordBatch:
    binding = columns.binding(physical, names)
    return binding.rows(batch.select(list(binding.read)))


def odd_table(rows: pa.Table, odd: pa.Schema) -> pa.Table:
    """The same rows, all fields called otherwise."""

    def spelled(value: Any, t: pa.DataType) -> Any:
        if value is None:
            return None
        if pa.types.is_struct(t):
            return {
                f.name: spelled(value[f.name.strip("_")], f.type) for f in (t.field(i) for i in range(t.num_fields))
            }
        if pa.types.is_map(t):
            return [(k, spelled(v, t.item_type)) for k, v in value]
        return [spelled(v, t.value_type) for v in value] if pa.types.is_list(t) else value

    return pa.Table.from_pylist(
        [{f.name: spelled(r[f.name.strip("_")], f.type) for f in odd} for r in rows.to_pylist()], odd
    )


def test_names_that_lie_are_not_believed() -> None:
    own = pa.schema([field(1, "a", pa.int64()), field(2, "b", pa.int64())])
    swapped = pa.schema([field(2, "a", pa.int64()), field(1, "b", pa.int64())])
    columns = FileColumns(lambda: own, ("", ""))
    assert columns.lacking(swapped) is None
    batch = pa.RecordBatch.from_pylist([{"a": 2, "b": 1}], swapped)
    assert bound(columns, batch, swapped, ["a", "b"]).to_pylist() == [{"a": 1, "b": 2}]
    anew = pa.schema([field(1, "a", pa.int64()), field(9, "b", pa.int64())])
    assert columns.lacking(anew) is None
    batch = pa.RecordBatch.from_pylist([{"a": 1, "b": 9}], anew)
    assert bound(columns, batch, anew, ["a", "b"]).to_pylist() == [{"a": 1, "b": None}]
    bare = pa.schema([("a", pa.int64())])
    assert columns.lacking(bare) == set()
    assert (column_name(bare, 1, "a"), column_name(bare, 2, "b"), column_name(anew, 2, "b")) == ("a", None, None)


def test_refused_schemas_are_refused_by_the_table_itself(keyed: Any) -> None:
    keyed.write(1)
    keyed.round()
    base = keyed.table.load()
    with keyed.load().update_schema() as update:
        update.add_column("extra", LongType())
    from lakehead.lake.lake_table import LakeChange

    answer = keyed.table.publish(keyed.table.stage(base, LakeChange("t1", 1, "r", {A: 1})))
    assert answer.outcome is Outcome.REFUSED
