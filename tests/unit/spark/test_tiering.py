"""When a table is due again."""

from __future__ import annotations

from lakehead.spark.tiering import IDLE_SHARE, budget


def test_next_round_ends_before_rows_are_too_old() -> None:
    for freshness in (1.0, 5.0, 30.0):
        for took in (0.05, 0.2, 0.4):
            assert budget(freshness, took) + took <= freshness


def test_slow_rounds_leave_a_pause() -> None:
    assert budget(5.0, 60.0) == IDLE_SHARE * 5.0
