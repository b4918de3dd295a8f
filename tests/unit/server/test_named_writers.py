"""Named writers and their successors: what landed in part, what was under way, and who comes first."""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.client.batch_writer import BatchWriter, writer_bytes
from lakehead.client.routes import OneServer
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.env import Env, SystemClock, SystemThreads
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import (
    InvalidRequestError,
    OutcomeUnknownError,
    SequenceConflictError,
    StorageError,
    WriterFencedError,
)
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.protocol import messages as m
from lakehead.server.catalog import RegisterWriter
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.metadata import MetadataStore
from lakehead.server.service import Service
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas, TableDescriptor, TablePath, WriteKind

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("v", pa.string())])
BUCKETS = 4


class Deployment:
    """A service over a faulty storage that can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = FaultyStorage()
        self.clock = SystemClock()
        self.env = Env(self.clock, self.storage, SeededRandomness(1), SystemThreads())
        self.service = self.start()

    def start(self) -> Service:
        return Service(str(self.folder), env=self.env, limits=Limits(), lake=None)

    def restart(self) -> None:
        self.service.close()
        self.service = self.start()

    def table(self, *, keyed: bool = True, buckets: int = BUCKETS) -> TableDescriptor:
        key = ("k",) if keyed else ()
        desc = TableDescriptor("", TablePath("a", "t"), Schemas.only(SCHEMA), key, (), ("k",), buckets, None)
        reply, _ = LocalEndpoint(self.service).call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
        return reply.info.descriptor()

    def writer(self, desc: TableDescriptor) -> BatchWriter:
        writer = BatchWriter.resume(desc, OneServer(LocalEndpoint(self.service)), self.clock, "etl")
        writer._retry_seconds = 0
        return writer

    def refuse(self, bucket: int) -> None:
        """Let the disk refuse what is appended to one tablet."""

        def before(action: str, path: str) -> None:
            if action == "append" and f"bucket-{bucket}/" in path:
                raise OSError(errno.ENOSPC, "no room", path)

        self.storage.before = before

    def rows(self, desc: TableDescriptor) -> list[tuple[int, str | None]]:
        table = self.service._tables.get(desc.table_id)
        frames = [f for _, t in sorted(table.tablets.items()) for f in t.frames(0, t.high_watermark)]
        return sorted(tuple(r.values()) for f in frames for r in f.body.rows(SCHEMA).to_pylist())


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    made.storage.before = None
    made.service.close()


def batch(*keys: int, v: str | None = "x") -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": k, "v": v} for k in keys], schema=SCHEMA)


def keys_of(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["k"])


def send(writer: BatchWriter, rows: pa.RecordBatch, kind: WriteKind = "upsert") -> Any:
    return writer.send(writer.prepare(kind, rows))


EVERYWHERE = tuple(range(40))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_successor_goes_on_after_what_is_in_every_tablet(deployment: Deployment, keyed: bool, restart: bool) -> None:
    kind: WriteKind = "upsert" if keyed else "append"
    desc = deployment.table(keyed=keyed)
    for n in range(5):
        writer = deployment.writer(desc)
        assert writer.acked_through == n - 1
        send(writer, batch(*range(n * 100, n * 100 + 7 * n + 1)), kind)
        if restart:
            deployment.restart()
    assert len(deployment.rows(desc)) == sum(7 * n + 1 for n in range(5))


@pytest.mark.parametrize("restart", [False, True])
def test_a_batch_that_landed_in_part_is_sent_again_and_completed(deployment: Deployment, restart: bool) -> None:
    desc = deployment.table()
    first = deployment.writer(desc)
    send(first, batch(*EVERYWHERE, v="before"))
    deployment.refuse(2)
    with pytest.raises(OutcomeUnknownError, match="other tablets have their part"):
        send(first, batch(*EVERYWHERE, v="in part"))
    deployment.storage.before = None
    if restart:
        deployment.restart()
    second = deployment.writer(desc)
    assert second.acked_through == 0
    before = len(deployment.rows(desc))
    send(second, batch(*EVERYWHERE, v="in part"))
    landed = deployment.rows(desc)
    assert before < len(landed) == 40 + 2 * 40, "each update once"
    send(second, batch(1, v="after"))
    assert deployment.writer(desc).acked_through == 2


OTHERS: dict[str, tuple[WriteKind, pa.RecordBatch]] = {
    "other values": ("upsert", batch(*EVERYWHERE, v="other")),
    "fewer rows": ("upsert", batch(*EVERYWHERE[1:])),
    "one tablet only": ("upsert", batch(0)),
    "other columns": ("upsert", keys_of(batch(*EVERYWHERE))),
    "a delete": ("delete", keys_of(batch(*EVERYWHERE))),
    "other order": ("upsert", batch(*reversed(EVERYWHERE))),
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_data_under_a_number_that_landed_in_part_is_refused_whole(
    deployment: Deployment, name: str, restart: bool
) -> None:
    desc = deployment.table()
    first = deployment.writer(desc)
    deployment.refuse(2)
    with pytest.raises(OutcomeUnknownError):
        send(first, batch(*EVERYWHERE))
    deployment.storage.before = None
    if restart:
        deployment.restart()
    before = deployment.rows(desc)
    second = deployment.writer(desc)
    with pytest.raises(SequenceConflictError, match="number 0"):
        send(second, OTHERS[name][1], OTHERS[name][0])
    assert deployment.rows(desc) == before
    send(deployment.writer(desc), batch(*EVERYWHERE))
    assert len(deployment.rows(desc)) == 40


def test_rows_that_go_to_tablets_that_have_nothing_of_the_batch_conflict_too(deployment: Deployment) -> None:
    desc = deployment.table()
    buckets = {k: send(deployment.writer(desc), batch(k))[0][0].bucket for k in range(12)}
    here, there = next((a, b) for a in buckets for b in buckets if buckets[a] != buckets[b])
    first = deployment.writer(desc)
    deployment.refuse(buckets[there])
    with pytest.raises(OutcomeUnknownError):
        send(first, batch(here, there, v="in part"))
    deployment.storage.before = None
    with pytest.raises(SequenceConflictError):
        send(deployment.writer(desc), batch(there, v="in part"))


def test_a_batch_without_rows_is_no_batch_that_landed_in_part(deployment: Deployment) -> None:
    desc = deployment.table()
    writer = deployment.writer(desc)
    send(writer, batch(1))
    send(writer, batch())
    assert deployment.writer(desc).acked_through in (0, 1)
    send(writer := deployment.writer(desc), batch())
    send(writer, batch(2))
    assert deployment.writer(desc).acked_through == writer.acked_through


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_writer_had_seen_answered_when_it_closed_counts(deployment: Deployment, closed: bool) -> None:
    """Older clients do not say to how many tablets a batch goes: of their last one only they know that it is whole."""
    desc = deployment.table()
    name = writer_bytes("etl")
    opened, _ = LocalEndpoint(deployment.service).call(m.OpenWriter(table_id=desc.table_id, writer_id=name))
    for sequence in range(2):
        stamp = WriterStamp(name, sequence, sequence - 1, sequence - 1, opened.epoch)
        body = encode_body(batch(sequence), schema_id=0, stamp=stamp, with_statistics=False)
        ref = m.TabletRef(partition="", bucket=0)
        request = m.Write(
            table_id=desc.table_id, kind="upsert", tablets=[ref], checksums=[body.crc], columns=SCHEMA.names
        )
        LocalEndpoint(deployment.service).call(request, [body.buffer])
    if closed:
        LocalEndpoint(deployment.service).call(
            m.CloseWriter(table_id=desc.table_id, writer_id=name, epoch=opened.epoch, acked_through=1)
        )
    deployment.restart()
    assert deployment.writer(desc).acked_through == (1 if closed else 0)


def test_a_successor_is_told_nothing_while_a_predecessors_batch_is_under_way(deployment: Deployment) -> None:
    desc = deployment.table()
    first = deployment.writer(desc)
    syncing, go_on = threading.Event(), threading.Event()

    def wait_in_sync(action: str, path: str) -> None:
        if action == "sync" and "bucket-1/" in path:
            syncing.set()
            assert go_on.wait(WAIT_SECONDS)

    deployment.storage.before = wait_in_sync
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(send, first, batch(*EVERYWHERE))
        assert syncing.wait(WAIT_SECONDS)
        opening = pool.submit(deployment.writer, desc)
        key = (desc.table_id, writer_bytes("etl"))
        while deployment.service._writes._writers._names[key].epoch == 1:
            assert not opening.done()
        assert not opening.done()
        go_on.set()
        writing.result(WAIT_SECONDS)
        second = opening.result(WAIT_SECONDS)
    assert second.acked_through == 0
    with pytest.raises(WriterFencedError):
        send(first, batch(7))


def test_of_two_that_open_at_once_the_later_epoch_stays(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    desc = deployment.table()
    real, given, go_on = MetadataStore.submit, threading.Event(), threading.Event()

    def preempted(self: MetadataStore, command: Any) -> Any:
        planned = real(self, command)
        if isinstance(planned, RegisterWriter) and planned.epoch == 1:
            given.set()
            assert go_on.wait(WAIT_SECONDS)
        return planned

    monkeypatch.setattr(MetadataStore, "submit", preempted)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(deployment.writer, desc)
        assert given.wait(WAIT_SECONDS)
        new = deployment.writer(desc)
        go_on.set()
        old = opening.result(WAIT_SECONDS)
    send(new, batch(1, v="new"))
    with pytest.raises(WriterFencedError):
        send(old, batch(2, v="old"))
    assert deployment.rows(desc) == [(1, "new")]


def test_an_epoch_that_is_read_late_does_not_replace_a_later_one(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    desc = deployment.table()
    old = deployment.writer(desc)
    deployment.restart()
    old._routes = OneServer(LocalEndpoint(deployment.service))
    real, read, go_on = MetadataStore.writer_epoch, threading.Event(), threading.Event()

    def preempted(self: MetadataStore, *args: Any) -> int:
        epoch = real(self, *args)
        read.set()
        assert go_on.wait(WAIT_SECONDS)
        return epoch

    monkeypatch.setattr(MetadataStore, "writer_epoch", preempted)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(send, old, batch(1))
        assert read.wait(WAIT_SECONDS)
        new = deployment.writer(desc)
        go_on.set()
        with pytest.raises(WriterFencedError):
            late.result(WAIT_SECONDS)
    send(new, batch(2))
    assert deployment.rows(desc) == [(2, "x")]


def test_a_successor_is_told_nothing_by_a_tablet_that_does_not_know_what_is_on_disk(deployment: Deployment) -> None:
    desc = deployment.table(buckets=1)
    first = deployment.writer(desc)
    deployment.storage.sync_fails = True
    with pytest.raises(OutcomeUnknownError):
        send(first, batch(1))
    deployment.storage.sync_fails = False
    with pytest.raises(StorageError, match="restart"):
        deployment.writer(desc)
    deployment.restart()
    second = deployment.writer(desc)
    for n in range(second.acked_through + 1, 2):
        send(second, batch(n + 1))
    assert deployment.rows(desc) == [(1, "x"), (2, "x")]


class Restarting:
    """An endpoint whose server is started anew after each answer that it does not know what became of a write."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.restarts = 0

    def call(self, request: m.Request[Any], attachments: Sequence[pa.Buffer] = ()) -> tuple[Any, list[pa.Buffer]]:
        try:
            return LocalEndpoint(self._deployment.service).call(request, attachments)
        except OutcomeUnknownError:
            self._deployment.storage.sync_fails = False
            self._deployment.restart()
            self.restarts += 1
            raise

    def stream(self, request: m.Request[m.Stream]) -> m.Stream:
        raise NotImplementedError

    def close(self) -> None:
        return


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("buckets", [1, BUCKETS])
def test_a_write_whose_outcome_was_unknown_lands_once_when_its_writer_sends_it_again(
    deployment: Deployment, named: bool, buckets: int
) -> None:
    desc, endpoint = deployment.table(buckets=buckets), Restarting(deployment)
    client = TableHandle(desc, OneServer(endpoint), dataclasses.replace(deployment.env, randomness=SeededRandomness(2)))
    writer = client.writers.named("etl") if named else client.writers.anonymous()
    for n in range(3):
        deployment.storage.sync_fails = n == 1
        send(writer, batch(*range(40 * n, 40 * n + 40)))
    assert endpoint.restarts == 1
    assert [k for k, _ in deployment.rows(desc)] == list(range(120))
    client.writers.write("delete", pa.Table.from_batches([keys_of(batch(*range(119)))]))
    assert len(deployment.rows(desc)) == 120 + 119


def test_parts_of_different_batches_are_no_write(deployment: Deployment) -> None:
    desc = deployment.table()
    deployment.writer(desc)

    def write(*stamps: WriterStamp) -> None:
        bodies = [encode_body(batch(1), schema_id=0, stamp=s, with_statistics=False) for s in stamps]
        refs = [m.TabletRef(partition="", bucket=i) for i in range(len(stamps))]
        sums = [b.crc for b in bodies]
        request = m.Write(table_id=desc.table_id, kind="upsert", tablets=refs, checksums=sums, columns=SCHEMA.names)
        LocalEndpoint(deployment.service).call(request, [b.buffer for b in bodies])

    name = writer_bytes("etl")
    for other in (WriterStamp(name, 1, epoch=1), WriterStamp(name, 0), WriterStamp(b"o" * 16, 0, epoch=1)):
        with pytest.raises(InvalidRequestError, match="one batch"):
            write(WriterStamp(name, 0, epoch=1), other)
    with pytest.raises(InvalidRequestError, match="one batch"):
        write(WriterStamp(name, 0, epoch=1, tablets=2))
    assert deployment.rows(desc) == []
