"""Rules of table definitions, the lake's types, and schemas as bytes and text."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest

from lakehead.config import Limits
from lakehead.errors import CorruptionError, InvalidSchemaError
from lakehead.format.schema import (
    NESTING_MAX,
    lake_schema,
    nearest_name,
    normalize_schema,
    parse_schema_text,
    schema_from_bytes,
    schema_to_bytes,
    validate_definition,
)

SUPPORTED = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(12, 2),
    pa.date32(),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.timestamp("s"),
    pa.timestamp("ms", "Europe/Oslo"),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.binary(16),
    pa.list_(pa.int8()),
    pa.large_list(pa.field("item", pa.string(), nullable=False)),
    pa.map_(pa.string(), pa.struct([("a", pa.list_(pa.int16()))])),
    pa.struct([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.timestamp("s", "UTC"))]),
]
REFUSED = [
    pa.uint8(),
    pa.uint64(),
    pa.float16(),
    pa.time64("ns"),
    pa.decimal256(40, 2),
    pa.decimal128(5, -2),
    pa.null(),
    pa.duration("us"),
    pa.month_day_nano_interval(),
    pa.list_(pa.int32(), 3),
    pa.binary(0),
    pa.struct([]),
    pa.struct([("a", pa.int32()), ("a", pa.int32())]),
    pa.struct([("", pa.int32())]),
    pa.run_end_encoded(pa.int32(), pa.int64()),
    pa.dense_union([pa.field("a", pa.int32())]),
    pa.uuid(),
    pa.dictionary(pa.int8(), pa.uint32()),
    pa.list_(pa.uint8()),
    pa.map_(pa.string(), pa.time64("ns")),
    pa.struct([("a", pa.struct([("b", pa.null())]))]),
]


@pytest.mark.parametrize("t", SUPPORTED, ids=str)
def test_supported_types_stay_as_they_are(t: pa.DataType) -> None:
    assert normalize_schema(pa.schema([pa.field("x", t, nullable=False)])) == pa.schema([pa.field("x", t, False)])


@pytest.mark.parametrize("t", REFUSED, ids=str)
def test_other_types_are_refused_with_what_to_use(t: pa.DataType) -> None:
    with pytest.raises(InvalidSchemaError, match=r"'x.*: (use|rename|name it)"):
        normalize_schema(pa.schema([("x", t)]))


def test_refusals_name_the_nested_column_and_the_replacement() -> None:
    with pytest.raises(InvalidSchemaError, match=r"'m\.value'.*use microseconds: time64\(\"us\"\)"):
        normalize_schema(pa.schema([("m", pa.map_(pa.string(), pa.time64("ns")))]))
    with pytest.raises(InvalidSchemaError, match=r"use decimal128\(20, 0\)"):
        normalize_schema(pa.schema([("u", pa.uint64())]))


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.dictionary(pa.uint32(), pa.string_view()), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.binary_view(), pa.binary()),
        (pa.date64(), pa.date32()),
        (pa.timestamp("ns", "UTC"), pa.timestamp("us", "UTC")),
        (pa.decimal64(9, 2), pa.decimal128(9, 2)),
        (pa.list_view(pa.int8()), pa.list_(pa.int8())),
        (pa.large_list_view(pa.string_view()), pa.large_list(pa.string())),
        (
            pa.struct([("a", pa.list_(pa.dictionary(pa.int8(), pa.date64())))]),
            pa.struct([("a", pa.list_(pa.date32()))]),
        ),
        (pa.map_(pa.string_view(), pa.list_view(pa.string_view())), pa.map_(pa.string(), pa.list_(pa.string()))),
    ],
    ids=str,
)
def test_encodings_become_their_plain_types(given: pa.DataType, canonical: pa.DataType) -> None:
    assert normalize_schema(pa.schema([("x", given)])).field("x").type == canonical


def test_metadata_and_list_item_names_are_dropped() -> None:
    child = pa.field("element", pa.int32(), False, metadata={"PARQUET:field_id": "3"})
    schema = pa.schema([pa.field("x", pa.list_(child), metadata={"a": "b"})], metadata={"pandas": "{}"})
    found = normalize_schema(schema)
    assert found.metadata is None and found.field(0).metadata is None
    assert found.field(0).type.value_field.equals(pa.field("item", pa.int32(), False), check_metadata=True)


def test_everything_that_has_an_arrow_schema_is_accepted() -> None:
    expected = pa.schema([("a", pa.int64()), ("b.c", pa.string())])
    table = pa.table({"a": [1], "b.c": ["x"]})

    class Foreign:
        def __arrow_c_schema__(self) -> object:
            return expected.__arrow_c_schema__()

    class Stream:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return table.__arrow_c_stream__(requested_schema)

    pairs = [("a", pa.int64()), ("b.c", pa.string())]
    for given in (expected, table, table.to_batches()[0], table.to_reader(), Foreign(), Stream(), pairs, dict(pairs)):
        assert normalize_schema(given) == expected


@pytest.mark.parametrize("given", [None, 5, "id bigint", [("a", 7)], [], pa.schema([]), pa.int64()], ids=repr)
def test_what_is_no_schema(given: object) -> None:
    with pytest.raises(InvalidSchemaError):
        normalize_schema(given)


@pytest.mark.parametrize("names", [["a", "a"], [""], [" "], ["__offset"], ["a", "__"]], ids=repr)
def test_bad_column_names(names: list[str]) -> None:
    with pytest.raises(InvalidSchemaError):
        normalize_schema(pa.schema([pa.field(n, pa.int32()) for n in names]))


# Definitions

ORDERS = pa.schema(
    [
        ("day", pa.date64()),
        ("id", pa.int64()),
        ("region", pa.dictionary(pa.int8(), pa.string())),
        ("price", pa.float64()),
        ("paid", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("a=b", pa.string()),
    ]
)


def define(**given: Any) -> tuple[pa.Schema, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    values: dict[str, Any] = {"primary_key": None, "partition_by": None, "buckets": 1, "bucket_key": None, **given}
    return validate_definition(values.pop("schema", ORDERS), limits=values.pop("limits", Limits()), **values)


def required(schema: pa.Schema) -> set[str]:
    return {f.name for f in schema if not f.nullable}


def test_defaults_of_a_log_table() -> None:
    schema, *keys = define()
    assert keys == [(), (), ()]
    assert schema == normalize_schema(ORDERS)
    schema, *keys = define(partition_by="day", bucket_key=["region"], buckets=1024)
    assert keys == [(), ("day",), ("region",)]
    assert required(schema) == {"day", "region"}


def test_defaults_of_a_keyed_table() -> None:
    schema, *keys = define(primary_key=["day", "region", "id"], partition_by=["day"])
    assert keys == [("day", "region", "id"), ("day",), ("region", "id")]
    assert required(schema) == {"day", "region", "id"}
    assert schema.names == ORDERS.names
    _, *keys = define(primary_key=["region", "id"], bucket_key=["id"])
    assert keys == [("region", "id"), (), ("id",)]
    _, *keys = define(primary_key=["paid", "id"], partition_by=["paid"], bucket_key=[])
    assert keys == [("paid", "id"), ("paid",), ("id",)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"primary_key": ["idd"]}, "did you mean 'id'"),
        ({"partition_by": ["dya"]}, "did you mean 'day'"),
        ({"bucket_key": ["nope"]}, "bucket_key names column 'nope'"),
        ({"primary_key": ["id", "id"]}, "twice"),
        ({"primary_key": ["price"]}, "primary_key column 'price' has the type double"),
        ({"primary_key": ["paid"]}, "primary_key column 'paid' has the type bool"),
        ({"primary_key": ["tags"]}, "list<item: string>"),
        ({"partition_by": ["price"]}, "partition_by column 'price'"),
        ({"partition_by": ["tags"]}, "partition_by column 'tags'"),
        ({"partition_by": ["a=b"]}, "rename"),
        ({"bucket_key": ["paid"]}, "bucket_key column 'paid'"),
        ({"primary_key": ["id"], "partition_by": ["day"]}, "not part of primary_key"),
        ({"primary_key": ["day"], "partition_by": ["day"]}, "partition columns only"),
        ({"primary_key": ["id"], "bucket_key": ["region"]}, "must share a bucket"),
        ({"primary_key": ["day", "id"], "partition_by": ["day"], "bucket_key": ["day"]}, "leave it out"),
        ({"partition_by": ["day"], "bucket_key": ["day"]}, "leave it out"),
        ({"buckets": 0}, "from 1 to 1024"),
        ({"buckets": 1025}, "from 1 to 1024"),
        ({"buckets": True}, "whole number"),
        ({"buckets": 2.0}, "whole number"),
        ({"buckets": "4"}, "whole number"),
        ({"limits": Limits(columns_max=3)}, "at most 3"),
        ({"primary_key": [5]}, "names column 5"),
    ],
    ids=str,
)
def test_broken_rules(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSchemaError) as error:
        define(**given)
    assert message in str(error.value)


def test_nearest_name_lists_columns_when_nothing_is_near() -> None:
    assert nearest_name("zzz", ["a", "b"]) == "columns: a, b"
    assert nearest_name("prise", ["price", "b"]) == "did you mean 'price'?"


# The lake's types, bytes


def test_lake_types_and_the_way_back() -> None:
    schema = pa.schema(
        [
            pa.field("a", pa.int8(), nullable=False),
            ("b", pa.int16()),
            ("c", pa.large_string()),
            ("d", pa.large_binary()),
            ("e", pa.time32("s")),
            ("f", pa.timestamp("s")),
            ("g", pa.timestamp("ms", "Europe/Oslo")),
            ("h", pa.large_list(pa.int8())),
            ("i", pa.map_(pa.large_string(), pa.struct([pa.field("x", pa.timestamp("s"), nullable=False)]))),
            ("j", pa.decimal128(9, 2)),
            ("k", pa.binary(3)),
            ("l", pa.int64()),
        ]
    )
    lake = pa.schema(
        [
            pa.field("a", pa.int32(), nullable=False),
            ("b", pa.int32()),
            ("c", pa.string()),
            ("d", pa.binary()),
            ("e", pa.time64("us")),
            ("f", pa.timestamp("us")),
            ("g", pa.timestamp("us", "UTC")),
            ("h", pa.list_(pa.int32())),
            ("i", pa.map_(pa.string(), pa.struct([pa.field("x", pa.timestamp("us"), nullable=False)]))),
            ("j", pa.decimal128(9, 2)),
            ("k", pa.binary(3)),
            ("l", pa.int64()),
        ]
    )
    assert lake_schema(schema) == lake
    assert lake_schema(lake) == lake
    row = {
        "a": -7, "b": 300, "c": "ø", "d": b"\x00", "e": 5, "f": 6, "g": 7_000, "h": [1, None], "i": [("k", {"x": 9})],
        "j": None, "k": b"abc", "l": 2**60,
    }  # fmt: skip
    table = pa.Table.from_pylist([row], schema)
    assert table.cast(lake).cast(schema).equals(table)


def test_schemas_survive_bytes() -> None:
    schema = normalize_schema(pa.schema([pa.field(f"c{i}", t, i % 2 == 0) for i, t in enumerate(SUPPORTED)]))
    assert schema_from_bytes(schema_to_bytes(schema)) == schema


BAD_NAME = schema_to_bytes(pa.schema([("plain_name", pa.int64())])).replace(b"plain_name", b"plain\xb3name")
BAD_CHILD = schema_to_bytes(pa.schema([("s", pa.struct([("plain_name", pa.int64())]))]))
BAD_CHILD = BAD_CHILD.replace(b"plain_name", b"plain\xb3name")


@pytest.mark.parametrize("data", [b"", b"junk", schema_to_bytes(ORDERS)[:40], BAD_NAME, BAD_CHILD], ids=len)
def test_bytes_that_are_no_schema(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        schema_from_bytes(data)


# Text


def test_every_type_of_the_text_form() -> None:
    text = """
        id bigint NOT NULL, a boolean, b bool, c tinyint, d smallint, e int, f integer, g long, h float, i real,
        j double, k decimal(12,2), l decimal(9), m date, n time, o timestamp, p timestamptz, q string, r varchar,
        s text, t binary, u fixed(16), v list<string not null>, w map<string,int>,
        x struct<a int not null, b: list<struct<c string>>>, "odd name" int, `y` map<int, list<int> not null>, ø.z int64
    """
    struct_x = pa.struct(
        [pa.field("a", pa.int32(), False), ("b", pa.list_(pa.struct([("c", pa.string())])))],
    )
    assert parse_schema_text(text) == pa.schema(
        [
            pa.field("id", pa.int64(), False), ("a", pa.bool_()), ("b", pa.bool_()), ("c", pa.int8()),
            ("d", pa.int16()), ("e", pa.int32()), ("f", pa.int32()), ("g", pa.int64()), ("h", pa.float32()),
            ("i", pa.float32()), ("j", pa.float64()), ("k", pa.decimal128(12, 2)), ("l", pa.decimal128(9, 0)),
            ("m", pa.date32()), ("n", pa.time64("us")), ("o", pa.timestamp("us")), ("p", pa.timestamp("us", "UTC")),
            ("q", pa.string()), ("r", pa.string()), ("s", pa.string()), ("t", pa.binary()), ("u", pa.binary(16)),
            ("v", pa.list_(pa.field("item", pa.string(), False))), ("w", pa.map_(pa.string(), pa.int32())),
            ("x", struct_x), ("odd name", pa.int32()),
            ("y", pa.map_(pa.int32(), pa.field("value", pa.list_(pa.int32()), False))), ("ø.z", pa.int64()),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column name at position 1, found the end"),
        ("id", "expected a type"),
        ("id bigin", "did you mean 'bigint'?) at position 4"),
        ("id bigint,", "expected a column name at position 11, found the end"),
        ("id bigint name string", "expected ',' or the end at position 11, found 'name string'"),
        ("id bigint not", "expected 'null' at position 14"),
        ("p decimal", "expected '(' at position 10"),
        ("p decimal(x)", "expected a number at position 11"),
        ("p decimal(99,2)", "decimal at position 3"),
        ("p decimal(3,7)", "scale from 0 to the precision"),
        ("f fixed(0)", "use binary"),
        ("f fixed(99999999999999999999)", "fixed at position 3"),
        ("t list<string", "expected '>' at position 14"),
        ("t list string", "expected '<'"),
        ("m map<string>", "expected ','"),
        ("s struct<>", "expected a column name at position 10"),
        ("a int; b int", "position 6, found '; b int'"),
        ("a int, a int", "two columns named 'a'"),
        ("__a int", "reserved"),
        ("varchar(20)", "expected a type"),
        ("a varchar(20)", "expected ',' or the end at position 10"),
    ],
)
def test_text_errors_say_where(text: str, message: str) -> None:
    with pytest.raises(InvalidSchemaError) as error:
        parse_schema_text(text)
    assert message in str(error.value)


def nested(t: pa.DataType, levels: int, wrap: str) -> pa.DataType:
    for _ in range(levels):
        t = {"list": pa.list_(t), "map": pa.map_(pa.string(), t), "struct": pa.struct([("a", t)])}[wrap]
    return t


@pytest.mark.parametrize("wrap", ["list", "map", "struct"])
def test_nesting_ends_before_what_can_be_read_does(wrap: str) -> None:
    deep = pa.schema([("c", nested(pa.int8(), NESTING_MAX, wrap))])
    assert normalize_schema(deep) == schema_from_bytes(schema_to_bytes(normalize_schema(deep)))
    for levels in (NESTING_MAX + 1, 2000):
        with pytest.raises(InvalidSchemaError, match="levels deep"):
            normalize_schema(pa.schema([("c", nested(pa.int8(), levels, wrap))]))
    with pytest.raises(InvalidSchemaError, match="deep"):
        parse_schema_text("c " + "list<" * 5000 + "int" + ">" * 5000)


@pytest.mark.parametrize(
    ("fields", "twin"),
    [
        ([("a", pa.int64()), ("A", pa.int64())], "'a' and 'A'"),
        ([("stra\u00dfe", pa.int64()), ("STRASSE", pa.int64())], "equal but for case"),
        ([("i", pa.int64()), ("\u0130", pa.int64())], "equal but for case"),
        ([("p", pa.struct([("x", pa.int64()), ("X", pa.int64())]))], "'p.x' and 'p.X'"),
        ([("l", pa.list_(pa.struct([("x", pa.int64()), ("X", pa.int64())])))], "'l.element.x'"),
        ([("a", pa.struct([("b", pa.int64())])), ("a.b", pa.int64())], "'a.b' twice"),
        ([("m", pa.map_(pa.string(), pa.int64())), ("m.value", pa.int64())], "'m.value' twice"),
    ],
)
def test_names_that_sql_takes_for_one_are_refused(fields: list[tuple[str, pa.DataType]], twin: str) -> None:
    with pytest.raises(InvalidSchemaError, match=re.escape(twin)):
        normalize_schema(pa.schema(fields))


def test_names_that_differ_by_more_than_case_are_fine() -> None:
    inner = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    fields = [("x", pa.int64()), ("p", inner), ("q", inner), ("p_x", pa.int64()), ("\u00e9", pa.int64())]
    assert normalize_schema(pa.schema(fields)) == pa.schema(fields)
