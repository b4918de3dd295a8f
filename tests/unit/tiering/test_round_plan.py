"""Plans: what is between mark and watermark, cut by size, or a clear refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lakehead.errors import InvalidRequestError, LakeStateError
from lakehead.lake.marks import LakeMark
from lakehead.log.hot_range import HotRange
from lakehead.tiering.round_plan import plan_round
from lakehead.types import TabletKey

A, B = TabletKey("", 0), TabletKey("", 1)


def plan(
    lake: Any,
    tiered: dict[TabletKey, int],
    marks: dict[TabletKey, tuple[int, int]],
    rows: int = 10,
    records_max: int | None = None,
) -> Any:
    mark = LakeMark(1, "t1", 1, "r0", tiered) if tiered else None
    hot = {tablet: HotRange(*at) for tablet, at in marks.items()}
    return plan_round(lake.desc, mark, hot, epoch=1, round_id="r1", rows_per_task=rows, records_max=records_max)


def test_ranges_are_cut_evenly_and_completely(keyed: Any) -> None:
    made = plan(keyed, {A: 5}, {A: (0, 30), B: (0, 1)})
    assert made.ranges == {A: (5, 30), B: (0, 1)} and made.offsets == {A: 30, B: 1}
    assert [(t.tablet, t.start, t.end) for t in made.tasks] == [(A, 5, 13), (A, 13, 21), (A, 21, 30), (B, 0, 1)]


def test_nothing_new_plans_nothing(keyed: Any) -> None:
    made = plan(keyed, {A: 5, B: 7}, {A: (2, 5)})
    assert not made.ranges and not made.tasks and made.offsets == {A: 5, B: 7}


def test_superseded_offsets_go_to_the_tasks_that_write_them_and_to_deletes(keyed: Any) -> None:
    made = plan(keyed, {A: 5}, {A: (0, 25)}).with_superseded({A: np.array([1, 4, 5, 14, 15, 24], np.int64)})
    assert [t.superseded.tolist() for t in made.tasks] == [[5, 14], [15, 24]]
    assert {k: v.tolist() for k, v in made.deletes.items()} == {A: [1, 4]}


@pytest.mark.parametrize(("marks", "word"), [({A: (0, 4)}, "up to 5"), ({A: (6, 9)}, "begins at 6")])
def test_lake_and_log_that_do_not_meet_are_refused(keyed: Any, marks: Any, word: str) -> None:
    with pytest.raises(LakeStateError, match=word):
        plan(keyed, {A: 5}, marks)


def test_a_round_takes_no_more_than_it_may_and_the_same_share_of_each_tablet(keyed: Any) -> None:
    c = TabletKey("", 2)
    marks = {A: (0, 105), B: (0, 3), c: (0, 50)}
    made = plan(keyed, {A: 5}, marks, records_max=43)
    assert made.ranges == {A: (5, 25), B: (0, 3), c: (0, 20)} and made.more and made.records == 43
    assert sum(t.end - t.start for t in made.tasks) == 43
    assert not plan(keyed, {A: 5}, marks, records_max=153).more
    assert plan(keyed, {}, dict.fromkeys([A, B, c], (0, 9)), records_max=2).records <= 2
    with pytest.raises(InvalidRequestError):
        plan(keyed, {}, marks, records_max=0)
