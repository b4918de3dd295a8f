"""The numbered writer: what it sends, sends again, and refuses to go on after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from lakehead.client import batch_writer
from lakehead.client.batch_writer import BatchWriter, writer_bytes
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.env import Env
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import (
    ClosedError,
    LakeheadError,
    LimitExceededError,
    NullKeyError,
    OutcomeUnknownError,
    OverloadedError,
    RequestTimeoutError,
    SequenceGapError,
    StorageError,
    UnavailableError,
    WriterFencedError,
)
from lakehead.format.frame import FrameBody, WriterStamp, decode_body
from lakehead.protocol import messages as m
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA = pa.schema([pa.field("k", pa.int64(), False)])


class ManualClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_us(self) -> int:
        return int(self.now * 1e6)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Answers:
    """An endpoint that keeps what it was sent and answers each write, or fails as told."""

    def __init__(self) -> None:
        self.sent: list[tuple[m.Write, list[FrameBody]]] = []
        self.fail: Callable[[int], Exception | None] = lambda attempt: None

    def call(self, request: m.Request[Any], attachments: Sequence[pa.Buffer] = ()) -> tuple[Any, list[pa.Buffer]]:
        if isinstance(request, m.OpenWriter):
            return m.WriterReply(
                epoch=3, last_sequence=4, tablets=[m.TabletRef(partition="", bucket=1)], sequences=[2]
            ), []
        assert isinstance(request, m.Write)
        self.sent.append((request, [decode_body(b, c) for b, c in zip(attachments, request.checksums, strict=True)]))
        if error := self.fail(len(self.sent)):
            raise error
        return m.WriteReply(offsets=[(0, b.row_count) for b in self.sent[-1][1]]), []

    def stream(self, request: m.Request[m.Stream]) -> m.Stream:
        raise NotImplementedError

    def close(self) -> None:
        return


def table(buckets: int = 1, **how: Any) -> TableDescriptor:
    return TableDescriptor(
        "t", TablePath("a", "t"), Schemas.only(SCHEMA), (), (), how.pop("bucket_key", ()), buckets, None
    )


def writer(endpoint: Answers, clock: ManualClock, desc: TableDescriptor | None = None, **how: Any) -> BatchWriter:
    return BatchWriter(desc or table(), OneServer(endpoint), clock, writer_id=b"w" * 16, **how)


def rows(*keys: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"k": list(keys)}, schema=SCHEMA)


def test_batches_are_numbered_per_writer_and_chained_per_tablet() -> None:
    endpoint = Answers()
    w = writer(endpoint, ManualClock(), table(2))
    for i in range(4):
        w.send(w.prepare("append", rows(i)))
    stamps = [b.stamp for _, bodies in endpoint.sent for b in bodies]
    assert [s.sequence for s in stamps] == [0, 1, 2, 3]
    assert [s.previous_sequence for s in stamps] == [-1, -1, 0, 1], "buckets in turn"
    assert [s.acked_through for s in stamps] == [-1, 0, 1, 2] and w.acked_through == 3
    buckets = [r.tablets[0].bucket for r, _ in endpoint.sent]
    assert buckets[:2] == buckets[2:] and set(buckets) == {0, 1}


def test_all_parts_of_a_batch_say_the_same_though_others_are_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server takes parts that do not for those of several batches."""
    w = writer(Answers(), ManualClock(), table(4, bucket_key=("k",)), epoch=1)
    stamps: list[WriterStamp] = []
    encode = batch_writer.encode_body

    def answered_meanwhile(batch: pa.RecordBatch, *, stamp: WriterStamp, **given: Any) -> FrameBody:
        stamps.append(stamp)
        w.acked_through += 1
        return encode(batch, stamp=stamp, **given)

    monkeypatch.setattr(batch_writer, "encode_body", answered_meanwhile)
    w.prepare("append", rows(*range(100)))
    assert len(stamps) > 1 and len({s.acked_through for s in stamps}) == 1


def test_a_batch_is_sent_again_with_the_same_bytes_until_it_is_answered() -> None:
    endpoint, clock = Answers(), ManualClock()
    endpoint.fail = lambda attempt: UnavailableError("down") if attempt < 5 else None
    w = writer(endpoint, clock)
    assert len(w.send(w.prepare("append", rows(1, 2)))) == 1
    first, *others = [[b.buffer.to_pybytes() for b in bodies] for _, bodies in endpoint.sent]
    assert len(others) == 4 and all(o == first for o in others)
    assert 0 < clock.now < 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UnavailableError("down"), OutcomeUnknownError),
        (RequestTimeoutError("silence"), OutcomeUnknownError),
        (OutcomeUnknownError("a sync failed"), OutcomeUnknownError),
        (StorageError("disk is full"), StorageError),
        (StorageError("disk is full", acknowledged="/1: (0, 3)"), OutcomeUnknownError),
        (OverloadedError("enough to do"), OverloadedError),
    ],
)
def test_it_gives_up_at_the_deadline(error: Exception, raised: type[Exception]) -> None:
    endpoint, clock = Answers(), ManualClock()
    endpoint.fail = lambda attempt: error
    w = writer(endpoint, clock, retry_seconds=5)
    with pytest.raises(raised):
        w.send(w.prepare("append", rows(1)))
    assert 3 < clock.now <= 5 and w.failed
    with pytest.raises(ClosedError, match="last_sequence"):
        w.prepare("append", rows(2))


@pytest.mark.parametrize(
    "later",
    [StorageError("disk is full"), SequenceGapError("forgotten"), ClosedError("closed"), OverloadedError("busy")],
)
def test_a_later_refusal_says_nothing_of_an_earlier_attempt(later: Exception) -> None:
    endpoint = Answers()
    endpoint.fail = lambda attempt: UnavailableError("the connection broke") if attempt == 1 else later
    w = writer(endpoint, ManualClock())
    with pytest.raises(OutcomeUnknownError, match=r"may or may not.*the connection broke") as unknown:
        w.send(w.prepare("append", rows(1)))
    assert not unknown.value.retryable and unknown.value.context["sequence"] == 0 and unknown.value.__cause__ is later


def test_a_fenced_writer_is_told_to_stop_whatever_came_before() -> None:
    endpoint = Answers()
    endpoint.fail = lambda attempt: UnavailableError("down") if attempt == 1 else WriterFencedError("taken over")
    w = writer(endpoint, ManualClock())
    with pytest.raises(WriterFencedError):
        w.send(w.prepare("append", rows(1)))


def test_an_outcome_that_was_unknown_is_resolved_by_sending_again() -> None:
    endpoint = Answers()
    endpoint.fail = lambda attempt: [OutcomeUnknownError("?"), StorageError("restarting"), None][attempt - 1]
    w = writer(endpoint, ManualClock())
    assert len(w.send(w.prepare("append", rows(1)))) == 1 and w.sent_again and not w.failed


def test_a_refused_batch_is_not_sent_again() -> None:
    endpoint = Answers()
    endpoint.fail = lambda attempt: NullKeyError("no")
    w = writer(endpoint, ManualClock())
    with pytest.raises(NullKeyError):
        w.send(w.prepare("append", rows(1)))
    assert len(endpoint.sent) == 1 and w.acked_through == -1


def test_a_batch_over_the_limit_is_refused_and_leaves_the_writer_usable() -> None:
    endpoint = Answers()
    w = writer(endpoint, ManualClock(), batch_bytes_max=100)
    with pytest.raises(LimitExceededError, match="smaller"):
        w.prepare("append", rows(*range(100)))
    w.send(w.prepare("append", rows(1)))
    assert endpoint.sent[0][1][0].stamp.sequence == 0


def test_resuming_goes_on_where_the_server_says() -> None:
    endpoint = Answers()
    w = BatchWriter.resume(table(2, bucket_key=("k",)), OneServer(endpoint), ManualClock(), "etl")
    assert w.acked_through == 4
    w.send(w.prepare("append", rows(*range(100))))
    request, bodies = endpoint.sent[0]
    chained = {ref.bucket: b.stamp.previous_sequence for ref, b in zip(request.tablets, bodies, strict=True)}
    assert chained == {0: -1, 1: 2}
    assert {(b.stamp.sequence, b.stamp.epoch, b.stamp.writer_id) for b in bodies} == {(5, 3, writer_bytes("etl"))}


def test_names_become_different_ids() -> None:
    assert len({writer_bytes(n) for n in ("", "a", "b", "etl-7", "é")}) == 5
    assert all(len(writer_bytes(n)) == 16 for n in ("", "a"))


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_forgotten_writer_begins_anew_only_when_nothing_of_its_batch_can_be_there(acknowledged: bool) -> None:
    endpoint, clock = Answers(), ManualClock()
    client = TableHandle(
        table(), OneServer(endpoint), dataclasses.replace(Env.system(), clock=clock, randomness=SeededRandomness(1))
    )
    client.writers.write("append", pa.Table.from_batches([rows(1)]))
    context = {"acknowledged": "bucket 1: (0, 1)"} if acknowledged else {}
    endpoint.fail = lambda attempt: SequenceGapError("who are you?", **context) if attempt == 2 else None
    if acknowledged:
        with pytest.raises(SequenceGapError):
            client.writers.write("append", pa.Table.from_batches([rows(2)]))
        assert len(endpoint.sent) == 2
    else:
        client.writers.write("append", pa.Table.from_batches([rows(2)]))
        writers = [bodies[0].stamp.writer_id for _, bodies in endpoint.sent]
        assert len(writers) == 3 and writers[0] == writers[1] != writers[2]


def test_a_gap_after_an_answer_that_was_lost_does_not_make_the_batch_anew() -> None:
    endpoint, clock = Answers(), ManualClock()
    client = TableHandle(
        table(), OneServer(endpoint), dataclasses.replace(Env.system(), clock=clock, randomness=SeededRandomness(1))
    )
    client.writers.write("append", pa.Table.from_batches([rows(1)]))
    errors = {2: UnavailableError("down"), 3: SequenceGapError("who are you?")}
    endpoint.fail = errors.get
    with pytest.raises(LakeheadError):
        client.writers.write("append", pa.Table.from_batches([rows(2)]))
    assert len({bodies[0].stamp.writer_id for _, bodies in endpoint.sent}) == 1, "it may have landed"
