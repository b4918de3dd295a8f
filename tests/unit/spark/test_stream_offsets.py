"""Offsets of streaming queries: their text, how far micro-batches go, and what lies between two."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehead.errors import InvalidRequestError, OffsetOutOfRangeError
from lakehead.spark.stream_offsets import (
    LiveRows,
    StreamOffset,
    live_between,
    records_between,
    rows_between,
    shared,
)
from lakehead.types import TabletKey

A, B, C = (TabletKey("day=x%2F1", i) for i in range(3))
COUNTS = st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 1000))


def offset(at: dict[TabletKey, int], live: LiveRows | None = None) -> StreamOffset:
    return StreamOffset("a.t", "id", 3, at, live)


def test_equal_offsets_are_equal_texts() -> None:
    live = LiveRows(7, "lease", {B: (3, 5), A: (0, 2)})
    one, other = offset({C: 1, A: 2}, live), offset({A: 2, C: 1}, LiveRows(7, "lease", {A: (0, 2), B: (3, 5)}))
    text = json.dumps(one.to_json())
    assert text == json.dumps(other.to_json())
    assert StreamOffset.from_json(json.loads(text)) == one
    for bad in ({}, [], {"offsets": {"x": 1}}, {**one.to_json(), "live": {}}):
        with pytest.raises(InvalidRequestError, match="another checkpointLocation"):
            StreamOffset.from_json(bad)  # type: ignore[arg-type]


@given(COUNTS, st.integers(1, 2000))
def test_tablets_share_a_limit(waiting: dict[TabletKey, int], rows_max: int) -> None:
    taken = shared(waiting, rows_max)
    assert sum(taken.values()) == min(rows_max, sum(waiting.values()))
    assert all(0 <= taken[k] <= n for k, n in waiting.items())


@given(COUNTS, st.integers(1, 200))
def test_steps_reach_the_end_and_leave_nothing_out(ends: dict[TabletKey, int], rows_max: int) -> None:
    at, seen = offset({}), {k: 0 for k in ends}
    while (step := at.advanced(ends, rows_max, {})) is not at:
        ranges = records_between(at, step)
        assert 0 < sum(e - s for s, e in ranges.values()) <= rows_max
        for k, (start, end) in ranges.items():
            assert start == seen[k]
            seen[k] = end
        at = step
    assert seen == ends and rows_between(offset({}), at) == sum(ends.values())


def test_live_rows_come_first_whole_tablets_at_a_time() -> None:
    start = offset({C: 4}, LiveRows(7, None, {A: (0, 2), B: (3, 5)}))
    ends, rows = {A: 9, B: 5, C: 6}, {A: 10, B: 10}
    one = start.advanced(ends, 5, rows)
    assert one.at == {C: 4, A: 2} and live_between(start, one) == LiveRows(7, None, {A: (0, 2)})
    assert not records_between(start, one)
    two = one.advanced(ends, 5, rows)
    assert two.live is None and live_between(one, two) == LiveRows(7, None, {B: (3, 5)})
    assert start.advanced(ends, None, rows) == two
    three = two.advanced(ends, None, rows)
    assert records_between(two, three) == {A: (2, 9), C: (4, 6)} and live_between(two, three) is None
    assert records_between(start, three) == {A: (2, 9), C: (4, 6)} and live_between(start, three) == start.live
    assert rows_between(start, three) == 9 + 5 + 2


def test_a_log_that_ends_earlier_is_another_one() -> None:
    offset({A: 5}).require_within({A: 5, B: 1})
    for ends in ({A: 4}, {}):
        with pytest.raises(OffsetOutOfRangeError, match="restored to an earlier state"):
            offset({A: 5}).require_within(ends)
