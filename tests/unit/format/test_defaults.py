"""Defaults as texts of fields: one text for all types that a column can be widened to, refused where it is no value."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import InvalidSchemaError
from lakehead.format.defaults import (
    DEFAULT_BYTES_MAX,
    absent,
    absent_may_match,
    default_of,
    default_text,
    defaults_of,
    filled,
    first_schema,
    with_default,
)
from lakehead.format.schema import lake_type
from lakehead.predicate import Bound
from lakehead.types import DEFAULT, TableSchema, field_id

ZONED = dt.datetime(2026, 1, 31, 23, 59, 59, 999999, dt.UTC)
VALUES: list[tuple[pa.DataType, Any, bytes]] = [
    (pa.bool_(), True, b"true"),
    (pa.bool_(), False, b"false"),
    (pa.int8(), -128, b"-128"),
    (pa.int64(), -(2**63), b"-9223372036854775808"),
    (pa.float32(), 0.1, b"0.10000000149011612"),
    (pa.float64(), -0.0, b"-0.0"),
    (pa.float64(), math.inf, b"inf"),
    (pa.float64(), 3, b"3.0"),
    (pa.decimal128(9, 2), Decimal("1.5"), b"1.50"),
    (pa.decimal128(38, 0), -(10**37), b"-" + b"1" + 37 * b"0"),
    (pa.string(), "å'\n", "å'\n".encode()),
    (pa.large_string(), "", b""),
    (pa.binary(), b"\xff\x00", b"\xff\x00"),
    (pa.binary(3), b"abc", b"abc"),
    (pa.date32(), dt.date(1, 1, 1), b"-719162"),
    (pa.time32("s"), dt.time(1, 2, 3), b"3723000000"),
    (pa.time64("us"), dt.time(0, 0, 0, 7), b"7"),
    (pa.timestamp("s"), dt.datetime(1960, 1, 1), b"-315619200000000"),
    (pa.timestamp("ms", "Europe/Oslo"), ZONED.replace(microsecond=0), b"1769903999000000"),
    (pa.timestamp("us", "UTC"), ZONED, b"1769903999999999"),
]


@pytest.mark.parametrize(("t", "value", "text"), VALUES, ids=str)
def test_a_default_is_one_text_for_the_table_and_its_lake(t: pa.DataType, value: Any, text: bytes) -> None:
    f = pa.field("c", t, metadata={"a": "b"})
    assert default_text(value, f) == default_text(pa.scalar(value, t), f) == text
    made = with_default(f, text)
    assert made.metadata == {b"a": b"b", DEFAULT: text} and made.type == t
    for known in (made, made.with_type(lake_type(t))):
        default = default_of(known)
        assert default is not None and default.type == known.type
        column = absent(known, 3)
        column.validate(full=True)
        assert column.type == known.type and column.to_pylist() == [default.as_py()] * 3
    assert absent(made, 0).type == t
    stored = pa.array([value], t)[0]
    assert default_of(made) == stored or math.isnan(value)


def test_widening_keeps_the_text() -> None:
    for t, wide, value in [
        (pa.int8(), pa.int64(), -7),
        (pa.float32(), pa.float64(), 0.25),
        (pa.decimal128(5, 2), pa.decimal128(38, 2), Decimal("-1.25")),
    ]:
        made = with_default(pa.field("c", t), default_text(value, pa.field("c", t)))
        now = default_of(made.with_type(wide))
        assert now is not None and now.type == wide and now.as_py() == value


@pytest.mark.parametrize(
    ("t", "value", "match"),
    [
        (pa.int8(), 128, "is int8 and cannot have default=128: "),
        (pa.int32(), "x", "is int32 and cannot have default='x'"),
        (pa.int32(), 1.5, "not a whole number"),
        (pa.string(), 3, "cannot have default=3"),
        (pa.date32(), dt.datetime(2020, 1, 1), "a datetime has a time of day"),
        (pa.timestamp("us"), ZONED, "the column has no zone"),
        (pa.timestamp("us", "UTC"), dt.datetime(2020, 1, 1), "give the datetime one"),
        (pa.decimal128(3, 2), Decimal("10"), "is decimal128"),
        (pa.binary(3), b"ab", "fixed_size_binary"),
        (pa.string(), "x" * (DEFAULT_BYTES_MAX + 1), "has 1,025 bytes, over the limit of 1,024"),
        (pa.string(), "\ud800", "cannot have default"),
        (pa.list_(pa.int8()), [1], "of which there are no defaults"),
        (pa.struct([("x", pa.int8())]), {"x": 1}, "of which there are no defaults"),
        (pa.decimal128(5, 2), Decimal("1E-999999999"), "places behind the point"),
        pytest.param(pa.date32(), pa.scalar(10**8, pa.int32()).cast(pa.date32()), "the years 1 to 9999", id="date"),
        pytest.param(pa.timestamp("us"), pa.scalar(1 << 62, pa.timestamp("us")), "the years 1 to 9999", id="time"),
    ],
    ids=str,
)
def test_what_is_no_value_is_refused(t: pa.DataType, value: Any, match: str) -> None:
    with pytest.raises(InvalidSchemaError, match=match) as refused:
        default_text(value, pa.field("c", t))
    assert refused.value.context["column"] == "c"


def test_null_is_no_default() -> None:
    f = pa.field("c", pa.list_(pa.int8()))
    assert default_text(None, f) is default_text(pa.scalar(None, pa.int8()), f) is None
    assert with_default(f, None) is f and default_of(f) is None and absent(f, 2).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("t", "text"),
    [
        (pa.int8(), b"300"), (pa.int8(), b" 5"), (pa.int8(), b"five"), (pa.int8(), b"\xff"), (pa.bool_(), b"yes"),
        (pa.string(), b"\xff"), (pa.string(), b"x" * 1025), (pa.decimal128(5, 2), b"1.5"), (pa.date32(), b"99999999"),
        (pa.decimal128(5, 2), b"1e-999999999"), (pa.decimal128(5, 2), b"1e-41"), (pa.decimal128(5, 2), b"1E+99999999"),
        (pa.timestamp("s"), b"1"), (pa.timestamp("us"), b"999999999999999999"), (pa.float32(), b"0.1"),
        (pa.binary(3), b"ab"), (pa.list_(pa.int8()), b"1"), (pa.struct([("x", pa.int8())]), b"1"),
    ],
    ids=str,
)  # fmt: skip
def test_texts_that_nobody_makes_are_refused(t: pa.DataType, text: bytes) -> None:
    with pytest.raises(InvalidSchemaError, match="the default of column 'c'"):
        with_default(pa.field("c", t), text)


def test_rows_are_filled_and_copies_have_the_same() -> None:
    columns = pa.schema([("a", pa.int8()), ("b", pa.string()), ("c", pa.int8())])
    like = pa.schema([f if f.name != "b" else with_default(f, b"x") for f in columns])
    schema = first_schema(3, columns, like)
    assert schema.id == 3 and [field_id(f) for f in schema.fields] == [1, 2, 3]
    assert TableSchema.of(3, schema.stored) == schema and schema.columns == columns
    assert {n: v.as_py() for n, v in defaults_of(schema.fields).items()} == {"b": "x"}
    given = pa.table({"c": pa.array([1, None], pa.int8())})
    assert filled(given, schema).to_pydict() == {"a": [None, None], "b": ["x", "x"], "c": [1, None]}
    whole = given.append_column("a", given["c"]).append_column("b", pa.array([None, "y"])).select(columns.names)
    assert filled(whole, schema) is whole


@pytest.mark.parametrize(
    ("t", "value", "op", "bound", "found"),
    [
        (pa.int32(), 5, "==", 5, True),
        (pa.int32(), 5, "==", 6, False),
        (pa.int32(), 5, ">", 5, False),
        (pa.int32(), 5, "in", (1, 5), True),
        (pa.int32(), 5, "in", (1, 6), False),
        (pa.int32(), 5, "is_null", None, False),
        (pa.int32(), 5, "not_null", None, True),
        (pa.int32(), None, "is_null", None, True),
        (pa.int32(), None, "==", 5, False),
        (pa.int32(), None, "not_null", None, False),
        (pa.float64(), math.nan, ">", 5.0, True),
        (pa.string(), "abc", "<", "abd", True),
        (pa.string(), "abc", "<", "abc", False),
        (pa.decimal128(5, 2), Decimal("1.50"), "<=", Decimal("1.50"), True),
        (pa.timestamp("us", "UTC"), ZONED, "<", ZONED, False),
    ],
)
def test_bounds_on_what_is_absent(t: pa.DataType, value: Any, op: Any, bound: Any, found: bool) -> None:
    f = pa.field("c", t)
    assert absent_may_match(with_default(f, default_text(value, f)), Bound("c", op, bound)) is found
