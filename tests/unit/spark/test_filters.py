"""Pushed filters mean in Arrow what they mean in Spark, or stay with Spark."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as sd

from lakehead.format.predicate import Predicate, parse_predicate
from lakehead.spark.filters import translate_filters

UTC = dt.UTC
ROWS = pa.table(
    {
        "id": pa.array([0, 1, 2, 3], pa.int64()),
        "n": pa.array([1, 2, None, 3], pa.int32()),
        "tiny": pa.array([1, 2, None, 3], pa.int8()),
        "s": pa.array(["buy", "bus", None, "søk"]),
        "f": pa.array([1.0, float("nan"), None, 2.0]),
        "b": pa.array([True, False, None, True]),
        "d": pa.array([Decimal("1.10"), Decimal("2.00"), None, Decimal("3.25")], pa.decimal128(9, 2)),
        "day": pa.array([dt.date(2026, 1, i) if i else None for i in (1, 2, 0, 4)]),
        "at": pa.array([dt.datetime(2026, 1, i, tzinfo=UTC) if i else None for i in (1, 2, 0, 4)]),
        "x": pa.array([b"a", b"\xff", None, b"c"]),
    }
)


def apply(*filters: sd.Filter) -> list[int]:
    condition, left = translate_filters(filters, ROWS.schema)
    assert not left
    predicate = Predicate.from_bytes(parse_predicate(condition, ROWS.schema).to_bytes(), ROWS.schema)
    return predicate.filter(ROWS)["id"].to_pylist()


@pytest.mark.parametrize(
    ("spark_filter", "ids"),
    [
        (sd.EqualTo(("n",), 2), [1]),
        (sd.Not(sd.EqualTo(("n",), 2)), [0, 3]),
        (sd.EqualNullSafe(("n",), None), [2]),
        (sd.EqualNullSafe(("n",), 2), [1]),
        (sd.Not(sd.EqualNullSafe(("n",), 2)), [0, 2, 3]),
        (sd.Not(sd.EqualNullSafe(("n",), None)), [0, 1, 3]),
        (sd.GreaterThan(("tiny",), 1), [1, 3]),
        (sd.LessThanOrEqual(("d",), Decimal("2.00")), [0, 1]),
        (sd.In(("n",), (1, 3)), [0, 3]),
        (sd.Not(sd.In(("n",), (1,))), [1, 3]),
        (sd.In(("n",), (1, None)), [0]),
        (sd.Not(sd.In(("n",), (1, None))), []),
        (sd.IsNull(("s",)), [2]),
        (sd.Not(sd.IsNull(("s",))), [0, 1, 3]),
        (sd.IsNotNull(("f",)), [0, 1, 3]),
        (sd.StringStartsWith(("s",), "bu"), [0, 1]),
        (sd.Not(sd.StringStartsWith(("s",), "bu")), [3]),
        (sd.StringEndsWith(("s",), "øk"), [3]),
        (sd.StringContains(("s",), "u"), [0, 1]),
        (sd.EqualTo(("b",), True), [0, 3]),
        (sd.GreaterThanOrEqual(("day",), dt.date(2026, 1, 2)), [1, 3]),
        (sd.LessThan(("at",), dt.datetime(2026, 1, 2, tzinfo=UTC)), [0]),
        (sd.GreaterThan(("x",), b"c"), [1]),
    ],
    ids=str,
)
def test_translated(spark_filter: sd.Filter, ids: list[int]) -> None:
    assert apply(spark_filter) == ids


def test_all_must_hold() -> None:
    assert apply(sd.GreaterThan(("n",), 1), sd.EqualTo(("b",), True)) == [3]


@pytest.mark.parametrize(
    "spark_filter",
    [
        sd.EqualTo(("f",), 1.0),
        sd.GreaterThan(("f",), 1.0),
        sd.EqualTo(("s", "inner"), 1),
        sd.EqualTo(("nope",), 1),
        sd.EqualTo(("tiny",), 300),
        sd.EqualTo(("d",), Decimal("1.234")),
        sd.LessThan(("at",), dt.datetime(2026, 1, 2)),
        sd.In(("n",), (1, 2**40)),
    ],
    ids=str,
)
def test_left_to_spark(spark_filter: Any) -> None:
    assert translate_filters([spark_filter], ROWS.schema) == (None, [spark_filter])
