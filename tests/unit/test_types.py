"""Names of tables, tablets and partitions, as values and as text."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import CorruptionError, InvalidRequestError
from lakehead.format.schema import schema_from_bytes, schema_to_bytes
from lakehead.types import (
    PARTITIONS_KNOWN_MAX,
    ChangeType,
    Schemas,
    TableDescriptor,
    TablePath,
    TableSchema,
    TabletId,
    TabletKey,
    children,
    field_id,
    parse_partition_name,
    partition_name,
)

VALUES: list[tuple[pa.DataType, Any, str]] = [
    (pa.bool_(), True, "true"),
    (pa.int8(), -5, "-5"),
    (pa.int64(), 2**63 - 1, str(2**63 - 1)),
    (pa.decimal128(9, 2), decimal.Decimal("-1.50"), "-1.50"),
    (pa.string(), "a=b&c/d %é", "a%3Db%26c%2Fd%20%25%C3%A9"),
    (pa.large_string(), "", ""),
    (pa.binary(), b"\x00\xff", "00ff"),
    (pa.binary(2), b"ab", "6162"),
    (pa.date32(), dt.date(2024, 2, 29), "2024-02-29"),
    (pa.time32("ms"), dt.time(1, 2, 3, 4000), "01%3A02%3A03.004000"),
    (pa.time64("us"), dt.time(0), "00%3A00%3A00"),
    (pa.timestamp("s"), dt.datetime(2024, 1, 1), "2024-01-01T00%3A00%3A00.000000"),
    (pa.timestamp("us", "UTC"), dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "2024-01-01T00%3A00%3A00.000000%2B00%3A00"),
]


@pytest.mark.parametrize(("t", "value", "text"), VALUES, ids=lambda v: str(v) if isinstance(v, pa.DataType) else "")
def test_partition_names(t: pa.DataType, value: Any, text: str) -> None:
    assert partition_name(("p",), (value,)) == f"p={text}"
    [found] = parse_partition_name(f"p={text}", (t,))
    assert found == value and type(found) is type(value)
    key = TabletKey(f"p={text}", 7)
    assert TabletKey.parse(str(key)) == key


def test_partition_names_of_several_columns_and_of_none() -> None:
    columns, types = tuple("abc"), tuple(t for t, _, _ in VALUES[:3])
    values = tuple(v for _, v, _ in VALUES[:3])
    assert parse_partition_name(partition_name(columns, values), types) == values
    assert partition_name((), ()) == "" and parse_partition_name("", ()) == ()
    assert TabletKey.parse(str(TabletKey("", 0))) == TabletKey("", 0)


@pytest.mark.parametrize("text", ["1.5", "1E-999999999", "1.500", "NaN"])
def test_a_partition_is_called_by_a_decimal_of_its_column(text: str) -> None:
    with pytest.raises(ValueError, match="no value of decimal128"):
        parse_partition_name(f"p={text}", (pa.decimal128(9, 2),))


def test_one_moment_in_two_zones_is_one_partition() -> None:
    east = dt.timezone(dt.timedelta(hours=9))
    assert partition_name(("t",), (dt.datetime(2024, 1, 1, 9, tzinfo=east),)) == partition_name(
        ("t",), (dt.datetime(2024, 1, 1, tzinfo=dt.UTC),)
    )


def test_table_paths() -> None:
    assert TablePath.parse("shop.orders") == TablePath("shop", "orders")
    assert str(TablePath.parse("orders")) == "default.orders"
    for text in ("", ".", "a.", ".a", "a.b.c", "a b", "a-b", "1a", "__a", "a.__b", "a/b", "é", "a" * 129, "a\n", None):
        with pytest.raises(InvalidRequestError, match="not a table name"):
            TablePath.parse(text)  # type: ignore[arg-type]


def test_descriptors_translate_tablets_and_know_their_prefix() -> None:
    schema = pa.schema([("day", pa.date32()), ("u", pa.int32()), ("n", pa.int32())])
    desc = TableDescriptor(
        "t1", TablePath("a", "b"), Schemas.only(schema), ("day", "u", "n"), ("day",), ("u",), 4, None
    )  # fmt: skip
    tablet = TabletId((dt.date(2024, 1, 2),), 3)
    assert desc.tablet_key(tablet) == TabletKey("day=2024-01-02", 3)
    assert desc.tablet_id(TabletKey("day=2024-01-02", 3)) == tablet
    assert desc.keyed and desc.tablet_key_columns == ("u", "n") and desc.prefix_key == ("u",)
    with pytest.raises(ValueError, match=r"\(\) names no partition by day"):
        desc.tablet_key(TabletId((), 3))


def test_names_of_partitions_that_somebody_asks_for_take_no_memory_for_ever() -> None:
    """Whoever reaches a server can ask for any: the first ten thousand are known, all are judged."""
    schema = pa.schema([("name", pa.string()), ("n", pa.int32())])
    desc = TableDescriptor("t1", TablePath("a", "b"), Schemas.only(schema), (), ("name",), (), 1, None)
    long = "x" * 100_000
    assert desc.may_have(TabletKey(f"name={long}", 0))
    for _ in range(2):
        assert all(desc.may_have(TabletKey(f"name={n}", 0)) for n in range(PARTITIONS_KNOWN_MAX + 500))
        assert not desc.may_have(TabletKey("name=%", 0))
        assert desc.partition_values(f"name={PARTITIONS_KNOWN_MAX + 1}") == (str(PARTITIONS_KNOWN_MAX + 1),)
    assert len(desc._known_partitions) == PARTITIONS_KNOWN_MAX
    assert not any(long in name for name in desc._known_partitions)
    assert len(pickle.dumps(desc)) < 2000
    assert pickle.loads(pickle.dumps(desc)) == desc


def test_change_symbols() -> None:
    assert [c.symbol for c in ChangeType] == ["+A", "+I", "-U", "+U", "-D"]


NESTED = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        ("s", pa.struct([("a", pa.int8()), ("b", pa.list_(pa.struct([("c", pa.string())])))])),
        ("m", pa.map_(pa.string(), pa.large_list(pa.int16()))),
        ("last", pa.float32()),
    ]
)


def ids_in(fields: Any, path: str = "") -> dict[str, int | None]:
    found = {}
    for f in fields:
        found[path + f.name] = field_id(f)
        found |= ids_in(children(f.type), f"{path}{f.name}.")
    return found


def test_fields_without_ids_get_them_by_position() -> None:
    schema = TableSchema.of(0, NESTED)
    assert ids_in(schema.fields) == {
        "id": 1, "s": 2, "m": 3, "last": 4,  # 5 to 7 are the system columns
        "s.a": 8, "s.b": 9, "s.b.item": 10, "s.b.item.c": 11, "m.key": 12, "m.value": 13, "m.value.item": 14,
    }  # fmt: skip
    assert schema.columns.equals(NESTED, check_metadata=True)
    assert schema.stored.equals(NESTED, check_metadata=True)
    assert TableSchema.of(0, schema.fields) == schema == TableSchema.of(0, NESTED)
    assert TableSchema.of(1, NESTED) != schema != TableSchema.of(0, NESTED.remove(0))
    assert len({schema, TableSchema.of(0, NESTED)}) == 1 and schema != NESTED


def test_ids_that_do_not_follow_from_the_position_are_stored() -> None:
    moved = TableSchema.of(3, pa.schema([TableSchema.of(0, NESTED).fields.field(i) for i in (2, 0)]))
    assert moved.columns.names == ["m", "id"] and not moved.columns.field(0).metadata
    assert moved.stored.equals(moved.fields, check_metadata=True)
    assert TableSchema.of(3, schema_from_bytes(schema_to_bytes(moved.stored))) == moved
    for broken in ([("x", pa.int8())], [moved.fields.field(1).with_name("twin")]):
        with pytest.raises(CorruptionError, match="schema 3 has fields without an id, or with the same"):
            TableSchema.of(3, pa.schema([*moved.fields, *(pa.schema(broken))]))


def test_a_schema_is_found_by_its_id() -> None:
    one, two = TableSchema.of(0, NESTED), TableSchema.of(1, NESTED.remove(0))
    schemas = Schemas((one, two))
    assert (schemas.of(0), schemas.of(1), schemas.current) == (one, two, two)
    with pytest.raises(CorruptionError, match=r"schema 7, the table has only \[0, 1\]") as e:
        schemas.of(7)
    assert e.value.context["schema_id"] == 7
