"""Which repeats get their first answer, and which batches are refused."""

from __future__ import annotations

import pytest

from lakehead.errors import SequenceGapError, WriterFencedError
from lakehead.format.frame import WriterStamp
from lakehead.log import writers
from lakehead.log.writers import ANSWERS_KEPT, WriterTable

A, B = b"a" * 16, b"b" * 16


def test_new_batches_may_be_applied_and_repeats_get_the_first_answer() -> None:
    table = WriterTable()
    assert table.answer(WriterStamp(A, 0)) is None
    table.note(WriterStamp(A, 0), 0, 10)
    table.note(WriterStamp(A, 3, 0), 10, 10)
    assert table.answer(WriterStamp(A, 0)) == (0, 10)
    assert table.answer(WriterStamp(A, 3, 0)) == (10, 10)
    assert table.answer(WriterStamp(A, 4, 3)) is None
    assert table.answer(WriterStamp(B, 0)) is None
    assert len(table) == 1


@pytest.mark.parametrize("stamp", [WriterStamp(A, 5, 4), WriterStamp(A, 5, 2), WriterStamp(A, 1, 0), WriterStamp(A, 5)])
def test_gaps_are_refused(stamp: WriterStamp) -> None:
    table = WriterTable()
    table.note(WriterStamp(A, 0), 0, 1)
    table.note(WriterStamp(A, 3, 0), 1, 2)
    with pytest.raises(SequenceGapError, match="re-send"):
        table.answer(stamp)


def test_a_first_batch_that_follows_another_is_a_gap() -> None:
    with pytest.raises(SequenceGapError):
        WriterTable().answer(WriterStamp(A, 5, 4))


def test_answers_are_kept_for_more_batches_than_may_be_in_flight() -> None:
    table = WriterTable()
    for i in range(ANSWERS_KEPT + 10):
        table.note(WriterStamp(A, i, i - 1), i, i + 1)
    assert table.answer(WriterStamp(A, 10, 9)) == (10, 11)
    with pytest.raises(SequenceGapError):
        table.answer(WriterStamp(A, 9, 8))


def test_an_older_epoch_is_fenced_even_with_a_repeat() -> None:
    table = WriterTable()
    table.note(WriterStamp(A, 0, epoch=1), 0, 1)
    table.note(WriterStamp(A, 1, 0, epoch=2), 1, 2)
    with pytest.raises(WriterFencedError, match="taken over"):
        table.answer(WriterStamp(A, 1, 0, epoch=1))
    assert table.answer(WriterStamp(A, 0, epoch=3)) == (0, 1)


def test_what_a_successor_starts_from() -> None:
    table = WriterTable()
    assert table.acked_through(A) == -1 and table.last_sequence(A, 10) is None
    table.note(WriterStamp(A, 0), 0, 1)
    table.note(WriterStamp(A, 2, 0, acked_through=0), 1, 2)
    table.note(WriterStamp(A, 3, 2, acked_through=2), 2, 3)
    assert table.acked_through(A) == 2
    assert [table.last_sequence(A, n) for n in (-1, 0, 1, 2, 9)] == [None, 0, 0, 2, 3]


def test_idle_anonymous_writers_expire_and_named_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "ANONYMOUS_WRITERS_MAX", 3)
    table = WriterTable()
    table.note(WriterStamp(A, 0, epoch=1), 0, 1)
    for i in range(10):
        table.note(WriterStamp(bytes([i]) * 16, 0), i, i + 1)
    assert len(table) == 4
    assert table.answer(WriterStamp(A, 0, epoch=1)) == (0, 1)
    assert table.answer(WriterStamp(bytes([9]) * 16, 0)) == (9, 10)
    assert table.answer(WriterStamp(bytes([6]) * 16, 0)) is None, "forgotten"
