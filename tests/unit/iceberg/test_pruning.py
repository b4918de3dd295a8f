"""A bound may only skip what cannot match."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.expressions import AlwaysTrue, In
from pyiceberg.expressions.visitors import bind
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

from lakehead.iceberg.pruning import row_filter
from lakehead.predicate import Bound

FIELDS = {
    "i": IntegerType(),
    "d": DoubleType(),
    "f": FloatType(),
    "dec": DecimalType(5, 2),
    "s": StringType(),
    "b": BooleanType(),
    "bin": BinaryType(),
    "fix": FixedType(2),
    "date": DateType(),
    "time": TimeType(),
    "ts": TimestampType(),
    "tz": TimestamptzType(),
    "a.b": IntegerType(),
    "st": StructType(NestedField(100, "x", IntegerType())),
}
SCHEMA = Schema(*(NestedField(i + 1, name, t) for i, (name, t) in enumerate(FIELDS.items())))
UTC = dt.UTC


@pytest.mark.parametrize(
    "bound",
    [
        Bound("i", "==", 1 << 62),
        Bound("i", "in", (1, 2)),
        Bound("d", "<", 1.5),
        Bound("dec", "==", Decimal("1.5")),
        Bound("dec", ">=", 3),
        Bound("s", ">=", "x"),
        Bound("b", "==", True),
        Bound("bin", "<", b"x"),
        Bound("fix", "==", b"xy"),
        Bound("date", "==", dt.date(2020, 1, 1)),
        Bound("time", "<=", dt.time(1)),
        Bound("ts", ">", dt.datetime(2020, 1, 1)),
        Bound("tz", ">", dt.datetime(2020, 1, 1, tzinfo=UTC)),
        Bound("s", "is_null", None),
        Bound("st", "not_null", None),
    ],
)
def test_these_skip_files(bound: Bound) -> None:
    condition = row_filter([bound], SCHEMA)
    assert condition != AlwaysTrue()
    bind(SCHEMA, condition, case_sensitive=True)


@pytest.mark.parametrize(
    ("column", "op", "value"),
    [
        ("d", "==", float("nan")),
        ("f", "==", float("inf")),  # PyIceberg: no float reaches it
        ("f", ">", 1e300),
        ("dec", "==", Decimal("1.005")),
        ("dec", "==", Decimal("1e9")),
        ("dec", "==", Decimal("NaN")),
        ("fix", "==", b"x"),
        ("i", "==", 1 << 70),
        ("i", "in", (1, None)),
        ("i", "==", "1"),
        ("b", "==", 1),
        ("a.b", "==", 1),
        ("st.x", "==", 1),
        ("unknown", "==", 1),
    ],
)
def test_these_skip_nothing(column: str, op: Any, value: object) -> None:
    assert row_filter([Bound(column, op, value)], SCHEMA) == AlwaysTrue()


@pytest.mark.parametrize("op", [">", ">="])
def test_files_that_count_nan_are_kept_for_what_is_greater(op: Any) -> None:
    assert repr(row_filter([Bound("d", op, 1.5)], SCHEMA)).count("IsNaN") == 1


def test_decimals_of_38_digits_are_exact() -> None:
    schema = Schema(NestedField(1, "big", DecimalType(38, 10)))
    for value in ("1234567890123456789012345678.0000000001", "-9999999999999999999999999999.9999999999", "1E+27"):
        condition = row_filter([Bound("big", "==", Decimal(value))], schema)
        assert condition.literal.value == Decimal(value)  # type: ignore[attr-defined]


def test_a_double_that_a_float_cannot_hold_keeps_its_neighbours() -> None:
    # 16777217.0 rounds down to the float 16777216.0, which is less than it.
    condition = row_filter([Bound("f", "<", 16777217.0)], SCHEMA)
    assert "LessThanOrEqual" in repr(condition)


def test_of_a_long_list_the_ends_are_compared() -> None:
    """PyIceberg skips no file by bounds with one of more than 200 members, and takes each of them into account."""
    numbers = Bound("i", "in", tuple(reversed(range(5, 1000))))
    assert row_filter([numbers], SCHEMA) == row_filter([Bound("i", ">=", 5), Bound("i", "<=", 999)], SCHEMA)
    few = Bound("i", "in", tuple(range(200)))
    assert isinstance(row_filter([few], SCHEMA), In)
    assert isinstance(row_filter([numbers], SCHEMA, parted=["i"]), In)
