"""Statistics: the bounds of each type, and damaged bytes."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.errors import CorruptionError
from lakehead.format import statistics
from lakehead.format.statistics import TEXT_ROWS_MAX, decode_statistics, encode_statistics, may_match
from lakehead.predicate import Bound, parse_predicate


def _one(array: pa.Array) -> tuple[object, object, object]:
    batch = pa.record_batch([array], names=["c"])
    column = decode_statistics(encode_statistics(batch), batch.schema).column(0)
    return column.null_count, column.lower, column.upper


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (pa.array([3, None, -5, 7], pa.int8()), (1, -5, 7)),
        (pa.array([99, 3, 5, 99], pa.int64()).slice(1, 2), (0, 3, 5)),
        (pa.array([99, 3, None, *[5] * 9, 99], pa.int32()).slice(1, 11), (1, 3, 5)),
        (pa.array([0, 2**64 - 1], pa.uint64()), (0, None, None)),
        (pa.array([1, 2**63 - 1], pa.uint64()), (0, 1, 2**63 - 1)),
        (pa.array([1.5, None, -2.5]), (1, -2.5, 1.5)),
        (pa.array([1.5, float("nan")]), (0, None, None)),
        (pa.array([0.5, float("inf")], pa.float32()), (0, 0.5, float("inf"))),
        (pa.array([0.5, 2], pa.float16()), (0, 0.5, 2.0)),
        (pa.array([None, None], pa.int64()), (2, None, None)),
        (pa.array([], pa.int64()), (0, None, None)),
        (pa.array([True, True]), (0, 1, 1)),
        (pa.array([None, False]), (1, 0, 0)),
        (pa.array([True, False, True]).slice(1), (0, 0, 1)),
        (pa.array([dt.date(1970, 1, 2), None]), (1, 1, 1)),
        (pa.array([dt.time(0, 0, 1)], pa.time32("ms")), (0, 1000, 1000)),
        (pa.array([dt.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("us")), (0, 10**6, 10**6)),
        (pa.array([Decimal("1.25"), None, Decimal("-3.50")], pa.decimal128(12, 2)), (1, -350, 125)),
        (pa.array([Decimal(10) ** 30, Decimal(1)], pa.decimal128(38, 0)), (0, None, None)),
        (pa.array([Decimal(-5), Decimal(1)], pa.decimal128(38, 2)), (0, -500, 100)),
        (pa.array(["b", None, "a"]), (1, b"a", b"b")),
        (pa.array(["x" * 20, "y" * 20], pa.large_string()), (0, b"x" * 16, b"y" * 15 + b"z")),
        (pa.array([b"\xff" * 20, b""]), (0, b"", None)),
        (pa.array([b"a" + b"\xff" * 20, b"a"]), (0, b"a", b"b")),
        (pa.array([b"ab", b"cd"], pa.binary(2)), (0, b"ab", b"cd")),
        (pa.array(["a"] * (TEXT_ROWS_MAX + 1)), (0, None, None)),
        (pa.array([{"x": 1}, None]), (1, None, None)),
        (pa.array([[1], None]), (1, None, None)),
        (pa.array(["a", None]).dictionary_encode(), (None, None, None)),
        (pa.nulls(3), (3, None, None)),
    ],
)
def test_bounds_of_each_type(array: pa.Array, wanted: tuple[object, object, object]) -> None:
    assert _one(array) == wanted


def test_zeros_of_either_sign_are_one_value() -> None:
    batch = pa.record_batch([pa.array([-0.0])], names=["c"])
    data = encode_statistics(batch)
    for op in ("==", ">=", "<="):
        assert may_match(data, batch.schema, [Bound("c", op, 0.0)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "possible"),
    [
        ("a > 9", False),
        ("a >= 9", True),
        ("a < 1", False),
        ("a <= 1", True),
        ("a = 5", True),
        ("a = 10", False),
        ("a in (0, 10)", False),
        ("a in (0, 5)", True),
        ("a is null", False),
        ("a is not null", True),
        ("n is null", True),
        ("n is not null", False),
        ("n = 3", False),
        ("f > 9", False),
        ("x > 9", True),
        ("s like 'b%'", True),
        ("s like 'z%'", False),
        ("s >= 'm' and a > 3", False),
        ("day = '2026-01-02'", False),
        ("at >= '2026-01-01' and at < '2026-01-02'", True),
        ("at > '2026-01-01 00:00:00'", False),
        ("t = '10:00:01'", False),
        ("d = 1.25", True),
        ("d > 1.25", False),
        ("d > 1.2499", True),
        ("ok", True),
        ("not ok", False),
    ],
)
def test_batches_are_skipped_by_what_they_cannot_hold(where: str, possible: bool) -> None:
    batch = pa.record_batch(
        {
            "a": pa.array([1, 9], pa.int32()),
            "n": pa.array([None, None], pa.int32()),
            "f": [1.0, 9.0],
            "x": [1.0, float("nan")],
            "s": ["a", "c"],
            "day": [dt.date(2026, 1, 1)] * 2,
            "at": pa.array([dt.datetime(2026, 1, 1)] * 2, pa.timestamp("us", "UTC")),
            "t": [dt.time(10)] * 2,
            "d": pa.array([Decimal("1.25")] * 2, pa.decimal128(12, 2)),
            "ok": [True, True],
        }
    )
    data = encode_statistics(batch)
    bounds = parse_predicate(where, batch.schema).bounds
    for form in (data, memoryview(data), pa.py_buffer(data)):
        assert may_match(form, batch.schema, bounds) is possible


def test_values_of_other_types_and_unknown_columns_never_skip() -> None:
    batch = pa.record_batch({"a": [1], "s": ["a"], "at": pa.array([0], pa.timestamp("s"))})
    data = encode_statistics(batch)
    wider = batch.schema.append(pa.field("later", pa.int64()))
    for bound in (
        Bound("a", "==", "x"),
        Bound("s", "==", 5),
        Bound("nope", "==", 5),
        Bound("later", "==", 5),
        Bound("a", "==", None),
        Bound("at", "==", dt.datetime(1990, 1, 1, tzinfo=dt.UTC)),
        Bound("at", "==", dt.datetime(1990, 1, 1, 0, 0, 0, 5)),
        Bound("a", "==", Decimal(9)),
        Bound("a", "==", object()),
        Bound("a", ">", float("nan")),
    ):
        assert may_match(data, wider, [bound])


def test_of_a_long_list_few_members_are_looked_at_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were, so that many batches and a long list took minutes."""
    looked: list[object] = []
    stored = statistics._stored

    def noted(value: object, t: pa.DataType) -> object:
        looked.append(value)
        return stored(value, t)

    monkeypatch.setattr(statistics, "_stored", noted)
    batch = pa.record_batch([pa.array([20_001, 20_005])], names=["c"])
    data = encode_statistics(batch)
    for members, possible in (
        (range(0, 40_000, 2), True),
        (range(0, 20_001), False),
        (range(20_006, 40_000), False),
        ([*range(9_000), 20_003, *range(30_000, 40_000)], True),
        ([*range(9_000), *range(30_000, 40_000)], False),
    ):
        where = pc.field("c").isin(pa.array(members)[::-1])
        [bound] = parse_predicate(where, batch.schema).bounds
        assert may_match(data, batch.schema, [bound]) is possible
    assert len(looked) < 200


def test_cut_off_bytes_are_corruption() -> None:
    batch = pa.record_batch({"a": [1], "s": ["abc"]})
    data = encode_statistics(batch)
    for size in range(len(data)):
        with pytest.raises(CorruptionError):
            decode_statistics(data[:size], batch.schema).column(1)


def test_the_layout_is_the_documented_one() -> None:
    batch = pa.record_batch({"a": pa.array([1, None], pa.int32()), "s": ["b", "a"]})
    assert encode_statistics(batch).hex() == (
        "0200000002000000"
        "01000000"
        "01000000"
        "0100000000000000"
        "0100000000000000"
        "00000000"
        "03010100"
        "38000000"
        "39000000"
        "0000000000000000"
        "6162"
    )
    assert len(encode_statistics(pa.record_batch({"a": np.arange(5)}))) == 32
