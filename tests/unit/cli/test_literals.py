"""Values as people type them: every type, and what is refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lakehead.cli.literals import from_json, parse_start, parse_text
from lakehead.errors import InvalidRequestError, SchemaMismatchError

UTC = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("text", "t", "value"),
    [
        ("-5", pa.int8(), -5),
        ("1.5", pa.float32(), 1.5),
        ("1.50", pa.decimal128(8, 2), Decimal("1.50")),
        ("true", pa.bool_(), True),
        ("False", pa.bool_(), False),
        ("", pa.string(), ""),
        ("søk", pa.large_string(), "søk"),
        ("00fF", pa.binary(), b"\x00\xff"),
        ("00ff", pa.binary(2), b"\x00\xff"),
        ("2026-01-31", pa.date32(), dt.date(2026, 1, 31)),
        ("12:00:01.5", pa.time64("us"), dt.time(12, 0, 1, 500_000)),
        ("2026-01-31T12:00:00", pa.timestamp("us"), dt.datetime(2026, 1, 31, 12)),
        ("2026-01-31T12:00:00Z", UTC, dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)),
        ("[1, null]", pa.list_(pa.int64()), [1, None]),
        ('{"1": "2026-01-31"}', pa.map_(pa.int64(), pa.date32()), [(1, dt.date(2026, 1, 31))]),
        ('[[1, "2026-01-31"], [2, null]]', pa.map_(pa.int64(), pa.date32()), [(1, dt.date(2026, 1, 31)), (2, None)]),
        ('[["k", {"00ff": 1}]]', pa.map_(pa.string(), pa.map_(pa.binary(), pa.int8())), [("k", [(b"\x00\xff", 1)])]),
        (
            '{"a": {"b": "1.5"}}',
            pa.struct([("a", pa.struct([("b", pa.decimal128(3, 1))]))]),
            {"a": {"b": Decimal("1.5")}},
        ),
    ],
)
def test_text_of_each_type(text: str, t: pa.DataType, value: Any) -> None:
    found = parse_text(text, pa.field("c", t))
    assert found == value and type(found) is type(value)
    pa.array([found], t)


@pytest.mark.parametrize(
    ("text", "t", "hint"),
    [
        ("x", pa.int64(), "write a number"),
        ("1.5", pa.int64(), "write a number"),
        ("yes", pa.bool_(), "true or false"),
        ("xyz", pa.binary(), "hexadecimal"),
        ("31.1.2026", pa.date32(), "2026-01-31"),
        ("noon", pa.time64("us"), "12:00:00"),
        ("2026-01-31T12:00:00Z", pa.timestamp("us"), "2026-01-31T12:00:00"),
        ("2026-01-31T12:00:00", UTC, "2026-01-31T12:00:00Z"),
        ("1,5", pa.decimal128(8, 2), "write a number"),
        ("{", pa.list_(pa.int64()), "write JSON"),
        ("{}", pa.list_(pa.int64()), "write JSON"),
    ],
)
def test_other_text_is_refused_with_an_example(text: str, t: pa.DataType, hint: str) -> None:
    with pytest.raises(SchemaMismatchError) as e:
        parse_text(text, pa.field("c", t))
    assert hint in str(e.value) and "'c'" in str(e.value) and e.value.context == {"column": "c"}


def test_null_stays_null_everywhere() -> None:
    t = pa.struct([("a", pa.list_(pa.date32())), ("b", pa.map_(pa.string(), pa.binary()))])
    assert from_json(t)(None) is None
    assert from_json(t)({"a": [None], "b": {"k": None}}) == {"a": [None], "b": [("k", None)]}


def test_a_float_is_no_decimal() -> None:
    with pytest.raises(ValueError):
        from_json(pa.decimal128(8, 2))(0.1)


def test_starts() -> None:
    assert [parse_start(s) for s in ("latest", "earliest", "full")] == ["latest", "earliest", "full"]
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    assert parse_start("2026-01-31T12:00:00") == parse_start("2026-01-31T14:00:00+02:00") == noon
    assert parse_start("2026-01-31 12:00") == noon
    for wrong in ("yesterday", "2026-01-31+09:00", "2026-01-31Z"):
        with pytest.raises(InvalidRequestError, match="latest, earliest, full"):
            parse_start(wrong)
    with pytest.raises(SchemaMismatchError):
        parse_text("2026-01-31+09:00", pa.field("t", pa.timestamp("us")))


def test_a_number_beyond_a_double_is_refused_and_not_infinite() -> None:
    field = pa.field("f", pa.float64())
    assert parse_text("1.5", field) == 1.5 and parse_text("-inf", field) == float("-inf")
    for text, t in {"1e400": pa.float64(), "[1.5, -1e400]": pa.list_(pa.float64())}.items():
        with pytest.raises(SchemaMismatchError, match="no value of column"):
            parse_text(text, pa.field("f", t))
    assert parse_text("[1.50]", pa.field("d", pa.list_(pa.decimal128(5, 2)))) == [Decimal("1.50")]
