"""Which repeats get their first answer, and which batches are refused."""

from __future__ import annotations

import msgspec
import pytest

from lakehead.errors import SequenceConflictError, SequenceGapError, WriterFencedError
from lakehead.format.frame import Content, WriterStamp
from lakehead.log import writers
from lakehead.log.writers import ANSWERS_KEPT, Answer, WriterState, WriterTable

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


def test_a_late_repeat_of_each_of_the_last_64_batches_is_answered() -> None:
    table = WriterTable()
    for i in range(80):
        table.note(WriterStamp(A, i, i - 1), i, i + 1)
    assert all(table.answer(WriterStamp(A, i, i - 1)) == (i, i + 1) for i in range(16, 80))


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


@pytest.mark.parametrize("other", [Content(8, 2), Content(7, 3), Content(8, 3), Content(0, 3), Content(8, 0)])
def test_another_batch_under_a_known_number_is_refused(other: Content) -> None:
    table = WriterTable()
    table.note(WriterStamp(A, 0, epoch=1), 0, 10, Content(7, 2))
    assert table.answer(WriterStamp(A, 0, epoch=2), Content(7, 2)) == (0, 10)
    with pytest.raises(SequenceConflictError, match="another writer_id") as refused:
        table.answer(WriterStamp(A, 0, epoch=2), other)
    assert refused.value.context == {"sequence": 0}


@pytest.mark.parametrize("known", [Content(), Content(7, 0), Content(0, 2)])
def test_what_older_versions_did_not_note_matches_anything(known: Content) -> None:
    table = WriterTable()
    table.note(WriterStamp(A, 0, epoch=1), 0, 10, known)
    assert table.answer(WriterStamp(A, 0, epoch=1), Content(7, 2)) == (0, 10)


def test_what_was_sent_is_kept_of_named_writers() -> None:
    table, again = WriterTable(), WriterTable()
    table.note(WriterStamp(A, 4, epoch=3, tablets=2), 0, 10, Content(7, 2))
    table.note(WriterStamp(A, 5, 4, acked_through=4, epoch=3, tablets=1), 10, 11, Content(9, 3))
    table.note(WriterStamp(B, 0, tablets=1), 11, 12, Content(5, 1))
    again.restore(table.state())
    assert again.known(A, 4) == Answer(0, 10, Content(7, 2), 2) == table.known(A, 4)
    assert again.known(A, 5) == Answer(10, 11, Content(9, 3), 1)
    assert again.known(B, 0) == Answer(11, 12, Content(), 0) and again.answer(WriterStamp(B, 0)) == (11, 12)
    assert again.known(A, 6) is None and again.known(b"c" * 16, 0) is None


def test_checkpoints_of_format_2_are_restored() -> None:
    old = msgspec.msgpack.encode([A, 3, 7, 6, [6, 0, 4, 7, 4, 9]])
    table = WriterTable()
    table.restore([msgspec.msgpack.decode(old, type=WriterState)])
    assert table.known(A, 6) == Answer(0, 4, Content(), 0) and table.known(A, 7) == Answer(4, 9, Content(), 0)
