"""What conditions demand of single columns."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.predicate import tree_of
from lakehead.predicate.bounds import bounds_of, value_for

LISTS = [
    pa.array([3, None, 1], pa.int8()),
    pa.array([3, 2**62, -1]),
    pa.array([1.5, -0.0]),
    pa.array([1.5, float("nan")]),
    pa.array([1.5, 2.0], pa.float32()),
    pa.array([True]),
    pa.array(["b", "\U0001f600", ""]),
    pa.array(["b"], pa.large_string()),
    pa.array([b"b", b"\xff"]),
    pa.array([b"bb"], pa.binary(2)),
    pa.array([Decimal("1.50"), None]),
    pa.array([dt.date(2024, 2, 29)]),
    pa.array([dt.datetime(2024, 2, 29, 1), None], pa.timestamp("s")),
    pa.array([dt.datetime(2024, 2, 29, 1)], pa.timestamp("us", "Asia/Kathmandu")),
    pa.array([1 << 62], pa.int64()).view(pa.timestamp("us")),
    pa.array([], pa.int64()),
    pa.array([None, None], pa.int64()),
]
TYPES = [
    *{members.type: None for members in LISTS},
    pa.decimal128(30, 2),
    pa.timestamp("ms", "UTC"),
]


@pytest.mark.parametrize("members", LISTS, ids=lambda a: str(a.type))
def test_members_of_a_list_are_what_each_would_be_alone(members: pa.Array) -> None:
    for t in TYPES:
        wanted = [value_for(m, t) for m in members if m.is_valid]
        found = bounds_of(tree_of(pc.is_in(pc.field("c"), members, skip_nulls=True)), pa.schema([("c", t)]))
        assert repr([b.value for b in found]) == repr([] if None in wanted else [tuple(wanted)])
