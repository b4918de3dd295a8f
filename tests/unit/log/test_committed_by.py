"""Notes of when rows had been committed: in steady time, few, and of no use to whom timestamps tell."""

from __future__ import annotations

from lakehead.log.committed_by import NOTES_MAX, CommittedBy

S = 1_000_000
FUTURE = 10**15


def notes(*seen: tuple[int, int]) -> CommittedBy:
    """Ends seen at seconds of a clock that is right and began with 0."""
    made = CommittedBy()
    for end, at in seen:
        made.observe(0, end, FUTURE, at * S, at * S)
    return made


def test_without_notes_timestamps_tell() -> None:
    made = CommittedBy()
    made.observe(0, 10, 5 * S, 7 * S, 7 * S)
    assert made.time_us(10, 5 * S) == 5 * S and made.state() == []


def test_rows_were_committed_when_they_were_first_seen() -> None:
    made = notes((10, 100), (20, 200), (20, 250), (30, 300))
    assert [made.time_us(end, FUTURE) // S for end in (1, 10, 11, 20, 30)] == [100, 100, 200, 200, 300]
    assert made.time_us(31, FUTURE) == FUTURE
    assert made.time_us(5, 40 * S) == 40 * S, "before the first note a timestamp may be right"
    assert made.time_us(15, 40 * S) == 200 * S, "after it, it is one that stood still"


def test_leaps_change_no_age() -> None:
    made = notes((10, 100), (20, 200))
    made.observe(0, 30, FUTURE, 5000 * S, 300 * S)
    assert [made.time_us(end, FUTURE) // S for end in (10, 20, 30)] == [4800, 4900, 5000]


def test_notes_are_some_time_apart_and_not_many() -> None:
    made = notes(*[(end, 100 + end // 4) for end in range(400)])
    assert len(made.state()) == 100
    made = notes(*[(end, 10 * end) for end in range(1, 5 * NOTES_MAX)])
    assert len(made.state()) <= NOTES_MAX
    for end in range(1, made.state()[-1][0] + 1):
        assert 10 * end <= made.time_us(end, FUTURE) // S <= 10 * end + 50_000 // NOTES_MAX * 4
    assert made.state()[-1][0] > 4.9 * NOTES_MAX


def test_notes_of_what_was_trimmed_go() -> None:
    made = notes(*[(end, 10 * end) for end in range(1, 11)])
    made.observe(7, 10, FUTURE, 200 * S, 200 * S)
    assert [end for end, _ in made.state()] == [7, 8, 9, 10]
    assert made.time_us(8, FUTURE) == 80 * S


def test_notes_outlive_a_stop_where_they_tell_more_than_timestamps() -> None:
    state = notes((10, 100), (20, 200)).state()
    again = CommittedBy()
    again.restore(state)
    again.observe(0, 30, FUTURE, 1000 * S, 3 * S)
    assert [again.time_us(end, FUTURE) // S for end in (10, 20, 30)] == [100, 200, 1000]
    behind = CommittedBy()
    behind.restore(state)
    behind.observe(0, 30, FUTURE, 150 * S, 3 * S)
    assert [behind.time_us(end, FUTURE) // S for end in (10, 20, 30)] == [100, 150, 150], "none of a time to come"
    right = CommittedBy()
    right.restore(state)
    right.observe(0, 30, 900 * S, 1000 * S, 3 * S)
    assert right.time_us(15, 700 * S) == 700 * S
