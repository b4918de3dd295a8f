"""Idempotent writes: one writer's batches, numbered, sent again over reconnects until they are known to have landed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from lakehead.client import patience
from lakehead.client.routes import Routes, by_server
from lakehead.client.row_routing import Rows, parts_of, route
from lakehead.env.clock import Clock
from lakehead.errors import (
    ClosedError,
    FencedError,
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    NotLeaderError,
    OutcomeUnknownError,
    RequestTimeoutError,
    UnavailableError,
)
from lakehead.format.bucketing import unkeyed_bucket
from lakehead.format.frame import TABLETS_MAX, WriterStamp, encode_body
from lakehead.format.joins import within
from lakehead.protocol.messages import CloseWriter, Endpoint, OpenWriter, TabletRef, Write, WriteReply
from lakehead.types import TableDescriptor, TabletKey, WriteKind

_RETRY_FIRST_SECONDS = 0.02
_RETRY_MAX_SECONDS = 1.0


@dataclass(frozen=True)
class PreparedWrite:
    """One numbered batch, encoded: sending it again sends the same bytes. ``rows`` are the positions in the batch that
    go to each tablet of the request, ascending; None stands for all."""

    request: Write
    bodies: list[pa.Buffer]
    sequence: int
    rows: list[Rows | None]


def encoded_write(
    desc: TableDescriptor,
    kind: WriteKind,
    batch: pa.RecordBatch,
    parts: Sequence[tuple[TabletKey, Rows | None]],
    stamp: Callable[[TabletKey], WriterStamp],
    *,
    folder_id: str = "",
) -> tuple[Write, list[pa.Buffer]]:
    """The request that writes a batch, in the parts that `route` made of it, and its attachments."""
    checksums, bodies = [], []
    for (key, _), part in zip(parts, parts_of(batch, [rows for _, rows in parts]), strict=True):
        body = encode_body(
            part,
            schema_id=desc.schema_id,
            stamp=stamp(key),
            compression=desc.properties.compression if kind == "append" else "none",
            with_statistics=kind == "append",
        )
        checksums.append(body.crc)
        bodies.append(body.buffer)
    request = Write(
        table_id=desc.table_id,
        folder_id=folder_id,
        kind=kind,
        tablets=[TabletRef.of(key) for key, _ in parts],
        checksums=checksums,
        columns=batch.schema.names,
    )
    return request, bodies


def writer_bytes(name: str) -> bytes:
    """The 16 bytes that stand for a named writer in batch frames."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"lakehead-writer").digest()


class BatchWriter:
    """Numbers, routes and sends the batches of one writer to one table. One thread prepares at a time, and one sends.

    Args:
        writer_id: 16 bytes that no other live writer uses.
        folder_id: where its rows go: a server of another copy refuses them.
        retry_seconds: how long a batch is sent again while the server cannot be reached; None as long as reads are.

    Attributes:
        acked_through: sequence of the last batch that was answered.
        sent_again: whether the last batch was sent more than once.
    """

    def __init__(
        self,
        desc: TableDescriptor,
        routes: Routes,
        clock: Clock,
        *,
        writer_id: bytes,
        epoch: int = 0,
        last_sequence: int = -1,
        retry_seconds: float | None = None,
        batch_bytes_max: int = 256 << 20,
        folder_id: str = "",
    ) -> None:
        self._desc = desc
        self._folder_id = folder_id
        self._routes = routes
        self._clock = clock
        self._writer_id = writer_id
        # Batch n of an unkeyed writer goes to the bucket of its batch 0, plus n.
        self._first_bucket = 0 if desc.bucket_key else unkeyed_bucket(writer_id, 0, desc.buckets)
        self._epoch = epoch
        self._next = last_sequence + 1
        self._previous: dict[TabletKey, int] = {}
        self.acked_through = last_sequence
        self._retry_seconds = patience.PATIENCE_SECONDS if retry_seconds is None else retry_seconds
        self._batch_bytes_max = batch_bytes_max
        self._failed = False
        self.sent_again = False

    @classmethod
    def resume(
        cls, desc: TableDescriptor, routes: Routes, clock: Clock, name: str, *, folder_id: str = ""
    ) -> BatchWriter:
        """Take over a named writer: its predecessor is fenced, and numbering goes on after its last batch that is in
        every tablet it went to.

        Raises:
            InvalidRequestError: the table lives on several servers, of which none knows what the others have.
        """
        servers = routes.servers(desc.table_id)
        if len(servers) > 1:
            raise InvalidRequestError(f"{desc.path} lives on several servers: write without a writer_id")
        writer_id = writer_bytes(name)
        reply, _ = servers[0].call(OpenWriter(table_id=desc.table_id, folder_id=folder_id, writer_id=writer_id))
        epoch, last = reply.epoch, reply.last_sequence
        writer = cls(desc, routes, clock, writer_id=writer_id, epoch=epoch, last_sequence=last, folder_id=folder_id)
        writer._previous = {ref.key: sequence for ref, sequence in zip(reply.tablets, reply.sequences, strict=True)}
        return writer

    def prepare(self, kind: WriteKind, batch: pa.RecordBatch) -> PreparedWrite:
        """Number and encode a batch whose rows were checked. Batches are sent in the order in which they were prepared;
        while one is sent, others may be prepared.

        Raises:
            LimitExceededError: the batch is too large for one write.
        """
        self.require_small(batch)
        if self._failed:
            raise ClosedError("a batch of this writer failed: open the writer again and send on from last_sequence")
        sequence = self._next
        bucket = (self._first_bucket + sequence) % self._desc.buckets
        parts = list(route(self._desc, batch, unkeyed_bucket=bucket))
        # A server knows the parts that it gets: of several it is not told how many there are.
        alone = len(self._routes.servers(self._desc.table_id)) == 1
        tablets = len(parts) if alone and len(parts) <= TABLETS_MAX else 0

        acked_through = self.acked_through  # which a batch that is sent meanwhile moves: all parts say the same

        def stamp(key: TabletKey) -> WriterStamp:
            previous = self._previous.get(key, -1)
            return WriterStamp(self._writer_id, sequence, previous, acked_through, self._epoch, tablets)

        request, bodies = encoded_write(self._desc, kind, batch, parts, stamp, folder_id=self._folder_id)
        self._previous.update((key, sequence) for key, _ in parts)
        self._next += 1
        return PreparedWrite(request, bodies, sequence, [rows for _, rows in parts])

    def require_small(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Raises: LimitExceededError: the batch is too large for one write."""
        if not within(batch, self._batch_bytes_max):
            rows = "one row" if batch.num_rows == 1 else "a batch"
            raise LimitExceededError(
                f"{rows} of {batch.nbytes:,} bytes is over the limit of {self._batch_bytes_max:,}: write smaller ones",
                batch_bytes_max=self._batch_bytes_max,
            )

    def send(self, write: PreparedWrite) -> Sequence[tuple[TabletKey, tuple[int, int]]]:
        """Send until answered; returns each tablet's offsets ``[start, end)``, durable as the table promises.

        Raises:
            OutcomeUnknownError: there was no answer in time; whether the batch landed, and in which tablets, is open.
            WriterFencedError: a successor has taken over; its `acked_through` tells what landed.
            LakeheadError: the batch was refused; nothing of it was written.
        """
        self.sent_again = False
        try:
            offsets = self._offsets(write)
        except BaseException:
            self._failed = True
            raise
        self.acked_through = write.sequence
        return [(ref.key, part) for ref, part in zip(write.request.tablets, offsets, strict=True)]

    def _offsets(self, write: PreparedWrite) -> list[tuple[int, int]]:
        """The answers of all servers, in the order of the request's tablets."""
        request, bodies = write.request, write.bodies
        if len(servers := self._routes.servers(request.table_id)) == 1:
            return self._call(servers[0], write, request, bodies).offsets
        keys = [ref.key for ref in request.tablets]
        found: dict[int, tuple[int, int]] = {}
        while left := [i for i in range(len(keys)) if i not in found]:
            server, places = by_server(self._routes, request.table_id, [keys[i] for i in left])[0]
            mine = [left[place] for place in places]
            part = msgspec.structs.replace(
                request,
                tablets=[request.tablets[i] for i in mine],
                checksums=[request.checksums[i] for i in mine],
            )
            try:
                reply = self._call(server, write, part, [bodies[i] for i in mine])
            except LakeheadError as e:
                if isinstance(e, NotLeaderError) and self._routes.moved(e):
                    continue
                if not found:
                    raise
                done = "; ".join(f"{keys[i]}: {offsets}" for i, offsets in found.items())
                # What this server has of its part stands in its own error.
                context = {**e.context, "acknowledged": f"{done}; {e.context.get('acknowledged', '')}".strip("; ")}
                raise type(e)(f"{e} (other servers have their part: {done})", **context) from e
            found |= dict(zip(mine, reply.offsets, strict=True))
        return [found[i] for i in range(len(keys))]

    def close(self) -> None:
        """Leave word of what was acknowledged, so that a successor goes on after it. Only named writers have one."""
        if self._epoch:
            self._routes.servers(self._desc.table_id)[0].call(
                CloseWriter(
                    table_id=self._desc.table_id,
                    folder_id=self._folder_id,
                    writer_id=self._writer_id,
                    epoch=self._epoch,
                    acked_through=self.acked_through,
                )
            )

    @property
    def failed(self) -> bool:
        """True after a batch failed: its tablets may disagree on what came last, so that nothing may follow it."""
        return self._failed

    def _call(self, server: Endpoint, write: PreparedWrite, request: Write, bodies: list[pa.Buffer]) -> WriteReply:
        deadline = self._clock.monotonic() + self._retry_seconds
        pause = _RETRY_FIRST_SECONDS
        open_since: LakeheadError | None = None
        while True:
            try:
                reply, _ = server.call(request, bodies)
                return reply
            except FencedError:
                raise
            except NotLeaderError as e:
                # It was not written there now; an attempt before may have been.
                if open_since is None:
                    raise
                raise self._unknown(write, open_since) from e
            except LakeheadError as e:
                open_since = open_since or (e if _leaves_open(e) else None)
                again = isinstance(e, UnavailableError | OutcomeUnknownError)
                if not again or self._clock.monotonic() + pause > deadline:
                    # What a later attempt was refused for says nothing of an earlier one.
                    if open_since is None:
                        raise
                    raise self._unknown(write, open_since) from e
                self.sent_again = True
                self._clock.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX_SECONDS)

    def _unknown(self, write: PreparedWrite, e: LakeheadError) -> OutcomeUnknownError:
        ask = (
            "open the named writer again and send on from its last_sequence"
            if self._epoch
            else "look for its rows before you write it again, or use a named writer, whose successor is told"
        )
        return OutcomeUnknownError(
            f"a write on {self._desc.path} may or may not have landed: {ask} ({e})",
            **{**e.context, "table": str(self._desc.path), "sequence": write.sequence},
        )


def _leaves_open(e: LakeheadError) -> bool:
    """Whether a batch may have landed, in some of its tablets at least, in spite of this error."""
    known = (
        type(e) not in (UnavailableError, RequestTimeoutError, OutcomeUnknownError) or e.context.get("unsent") is True
    )
    # ``unread`` is an answer that nobody could read.
    return not known or e.context.get("unread") is True or (e.retryable and "acknowledged" in e.context)
