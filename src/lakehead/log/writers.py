"""Which batches of which writers a tablet holds: what makes a retried batch count once.

State is a function of the frames applied, so replaying a log rebuilds it. Each writer keeps the answers of its last
`ANSWERS_KEPT` batches, more than a writer may have in flight; a repeat gets the first answer, if it is one: a batch of
other content under a known number is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from lakehead.errors import SequenceConflictError, SequenceGapError, WriterFencedError
from lakehead.format.frame import UNKNOWN_CONTENT, Content, Frame, WriterStamp
from lakehead.types import Epoch

ANSWERS_KEPT = 64
ANONYMOUS_WRITERS_MAX = 10_000


class Answer(NamedTuple):
    """What a batch got, the offsets ``[start, end)``; what it was, and to how many tablets it went (0: not known)."""

    start: int
    end: int
    content: Content
    tablets: int


@dataclass
class _Writer:
    epoch: Epoch = 0
    last_sequence: int = -1
    acked_through: int = -1
    answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)


class WriterState(msgspec.Struct, frozen=True, array_like=True):
    """One writer of a `WriterTable`, as checkpoints keep it: ``answers`` are sequence, start and end of each answer,
    one after the other, oldest first; ``contents`` are checksum, kind and tablets of each, of named
    writers since format 3."""

    writer_id: bytes
    epoch: Epoch
    last_sequence: int
    acked_through: int
    answers: list[int]
    contents: list[int] = []


class WriterTable:
    """Writer id -> last sequence, epoch and recent answers, of one tablet."""

    def __init__(self) -> None:
        self._named: dict[bytes, _Writer] = {}
        self._anonymous: OrderedDict[bytes, _Writer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._named) + len(self._anonymous)

    def _get(self, writer_id: bytes) -> _Writer | None:
        return self._named.get(writer_id) or self._anonymous.get(writer_id)

    def answer(self, stamp: WriterStamp, content: Content = UNKNOWN_CONTENT) -> tuple[int, int] | None:
        """The offsets ``[start, end)`` a batch got before, or None when it is new and may be applied.

        Raises:
            WriterFencedError: a newer writer with this id has written.
            SequenceConflictError: the batch that landed under this number was another one.
            SequenceGapError: the batch before this one never arrived, or its answer is forgotten.
        """
        writer = self._get(stamp.writer_id)
        if writer is None:
            if stamp.previous_sequence >= 0:
                raise SequenceGapError(
                    f"batch {stamp.sequence} follows batch {stamp.previous_sequence} of this writer, which this tablet"
                    " does not hold: re-send from the last acknowledged one",
                    sequence=stamp.sequence,
                )
            return None
        if stamp.epoch < writer.epoch:
            raise WriterFencedError(
                f"a newer writer (epoch {writer.epoch}) with the same writer_id has taken over: stop this one",
                epoch=stamp.epoch,
            )
        known = writer.answers.get(stamp.sequence)
        if known is not None:
            if known.content.contradicts(content):
                raise sequence_conflict(stamp.sequence)
            return known.start, known.end
        if stamp.sequence <= writer.last_sequence or stamp.previous_sequence != writer.last_sequence:
            raise SequenceGapError(
                f"batch {stamp.sequence} says it follows {stamp.previous_sequence}, but this tablet's last batch of"
                f" this writer is {writer.last_sequence}: re-send from the last acknowledged one",
                sequence=stamp.sequence,
                last_sequence=writer.last_sequence,
            )
        return None

    def apply(self, frame: Frame) -> None:
        """Remember a frame that is in the log."""
        self.note(frame.body.stamp, frame.base_offset, frame.end_offset, frame.content)

    def note(self, stamp: WriterStamp, start: int, end: int, content: Content = UNKNOWN_CONTENT) -> None:
        """Remember that a batch got the offsets ``[start, end)``."""
        writer = self._known(stamp)
        writer.epoch = max(writer.epoch, stamp.epoch)
        writer.last_sequence = stamp.sequence
        writer.acked_through = max(writer.acked_through, stamp.acked_through)
        writer.answers[stamp.sequence] = Answer(start, end, content, stamp.tablets)
        while len(writer.answers) > ANSWERS_KEPT:
            writer.answers.popitem(last=False)

    def _known(self, stamp: WriterStamp) -> _Writer:
        """The batch's writer, made when it is new. Only named ones have an epoch, and only they are kept for ever."""
        writers = self._named if stamp.epoch else self._anonymous
        writer = writers.get(stamp.writer_id)
        if writer is None:
            writer = writers[stamp.writer_id] = _Writer()
        if stamp.epoch:
            return writer
        self._anonymous.move_to_end(stamp.writer_id)
        while len(self._anonymous) > ANONYMOUS_WRITERS_MAX:
            self._anonymous.popitem(last=False)
        return writer

    def state(self) -> list[WriterState]:
        """All writers, the anonymous ones in the order in which they wrote last."""
        return [
            WriterState(
                name,
                w.epoch,
                w.last_sequence,
                w.acked_through,
                [n for s, a in w.answers.items() for n in (s, a.start, a.end)],
                [n for a in w.answers.values() for n in (a.content.checksum, a.content.kind, a.tablets)]
                if w.epoch
                else [],
            )
            for writers in (self._named, self._anonymous)
            for name, w in writers.items()
        ]

    def restore(self, state: Iterable[WriterState]) -> None:
        """Become the table that `state` was taken from; frames that it has seen may be applied once more."""
        for s in state:
            known = s.contents or [0] * len(s.answers)
            parts = (*(s.answers[i::3] for i in range(3)), *(known[i::3] for i in range(3)))
            answers = OrderedDict(
                (n, Answer(start, end, Content(checksum, kind), tablets))
                for n, start, end, checksum, kind, tablets in zip(*parts, strict=True)
            )
            writer = _Writer(s.epoch, s.last_sequence, s.acked_through, answers)
            (self._named if s.epoch else self._anonymous)[s.writer_id] = writer

    def acked_through(self, writer_id: bytes) -> int:
        """Sequence up to which this writer is known to have seen every answer; -1 for none."""
        writer = self._get(writer_id)
        return -1 if writer is None else writer.acked_through

    def last_sequence(self, writer_id: bytes, through: int) -> int | None:
        """The writer's last sequence in this tablet that is not greater than ``through``; None when there is none."""
        writer = self._get(writer_id)
        known = [s for s in list(writer.answers) if s <= through] if writer else []
        return max(known, default=None)

    def known(self, writer_id: bytes, sequence: int) -> Answer | None:
        """What this batch got; None when it never came, or is forgotten."""
        writer = self._get(writer_id)
        return None if writer is None else writer.answers.get(sequence)


def sequence_conflict(sequence: int) -> SequenceConflictError:
    """Other rows, columns or kind than those that landed under a number."""
    return SequenceConflictError(
        f"another batch landed under number {sequence} of this writer: send exactly that one again (the same rows in"
        " the same order, columns and kind), or write under another writer_id",
        sequence=sequence,
    )
