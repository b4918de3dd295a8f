"""`Writer`: many batches in flight, in order, each applied once, with back-pressure."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

import pyarrow as pa

from lakehead.api.display import Handle
from lakehead.api.input import rows_for_append, rows_for_delete, rows_for_upsert
from lakehead.client.batch_writer import BatchWriter, PreparedWrite
from lakehead.client.table import TableHandle
from lakehead.config import Limits
from lakehead.env.interrupts import Changes, shielded
from lakehead.errors import ClosedError, LakeheadError, WrongTableKindError
from lakehead.format.joins import join
from lakehead.types import WriteKind

_REQUEST_ROWS_MAX = 1 << 16
_REQUEST_BYTES_MAX = 2 << 20
_LOOK_AGAIN_SECONDS = 1.0
_CONNECTION_CLOSED = "the connection of this writer is closed: connect again, and open another writer"


class _Sender:
    """The thread of a writer, and what it is to send. It does not keep the writer: once that one is let go of, the
    thread sends what was accepted, and ends soon. One thread gives; `close` is for any.

    While batches queue up there is a second thread: one encodes a request while the other sends the request before.

    The first looks itself whether the writer is there, as no code runs when that one goes: an interrupt there would be
    lost.
    """

    def __init__(self, writer: weakref.ref[Writer], batches: BatchWriter, *, named: bool) -> None:
        self._writer = writer
        self._batches = batches
        self._named = named
        self._limits = Limits()
        self._pending: deque[tuple[WriteKind, pa.RecordBatch]] = deque()
        # Batches that were taken to be sent, and of these those that are acknowledged.
        self._taken = self._acknowledged = 0
        # Bytes given in all, and bytes acknowledged in all; only who sends changes the second.
        self._given_bytes = self._sent_bytes = 0
        self._changed = Changes()
        # Held by the thread that takes batches and encodes them. Requests are sent in the order of their turns.
        self._taking = threading.Lock()
        self._turns = self._turn = 0
        self._sent = Changes()
        self._helped = False
        self._pid = os.getpid()
        self._closing = self._over = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="lakehead-writer", daemon=True)

    @property
    def unacknowledged(self) -> int:
        """Batches that were given and are not known to have landed."""
        return len(self._pending) + self._taken - self._acknowledged

    def require_own(self) -> None:
        """Raises: ClosedError: this is a forked child, without the thread, and perhaps with a lock that is held."""
        if self._pid != os.getpid():
            raise ClosedError(
                "this writer was opened before the process was forked: start children by multiprocessing's 'spawn', and"
                " connect there"
            )

    def put(self, kind: WriteKind, batch: pa.RecordBatch) -> None:
        """Queue a batch; waits for room.

        Raises:
            LakeheadError: the thread has ended; nothing is queued.
        """
        size = batch.nbytes
        self._changed.wait_for(lambda: self._has_room(size) or self._ended)
        self.check()
        if self._over:
            raise ClosedError(_CONNECTION_CLOSED)
        if self.idle:
            self._given_bytes = self._sent_bytes
        # One step: whatever interrupts this call, the batch is queued whole or not at all.
        self._given_bytes += size
        self._pending.append((kind, batch))
        self._changed.notify_all()

    def wait(self) -> None:
        """Until everything given is acknowledged. Raises as `check` does."""
        self._changed.notify_all()
        self._changed.wait_for(lambda: self.idle or self._ended)
        self.check()

    def check(self) -> None:
        """Raises: LakeheadError: a batch failed."""
        if self.error is not None:
            raise self.error
        if self._over and not self.idle:  # it was given at the moment at which the connection was closed
            raise ClosedError(_CONNECTION_CLOSED)

    def close(self) -> None:
        """The thread ends when it has sent what it holds; waits for nothing. A forked child has none to end."""
        if self._pid == os.getpid():
            self._closing = True
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Nothing is unacknowledged."""
        # In this order: a thread says that it is busy before it takes what is pending.
        return not self._pending and self._taken == self._acknowledged

    @property
    def _ended(self) -> bool:
        return self._over or self.error is not None

    def _has_room(self, size: int) -> bool:
        if self.idle:
            return True
        room = self._given_bytes - self._sent_bytes + size <= self._limits.writer_bytes_max
        return room and self.unacknowledged < self._limits.writer_batches_max

    def _run(self) -> None:
        while self._more():
            self._send_next()
        self._sent.wait_for(lambda: not self._helped)
        self._over = True
        self._changed.notify_all()

    def _more(self) -> bool:
        """Wait for something to send; False when nothing comes any more."""
        # An interrupt may keep a caller from waking this thread.
        self._changed.wait_for(lambda: bool(self._pending) or self._last(), _LOOK_AGAIN_SECONDS)
        return bool(self._pending) and self.error is None

    def _help(self) -> None:
        while self._send_next(helping=True):
            continue
        self._sent.notify_all()

    def _send_next(self, *, helping: bool = False) -> bool:
        """Encode the next request, and send it when it is its turn; False when there is none, or none may follow."""
        with self._taking:
            if not self._pending or self.error is not None:
                self._helped = self._helped and not helping
                return False
            turn, self._turns = self._turns, self._turns + 1
            kind, group = self._take()
            if self._pending and not self._helped:
                # Without a thread to have it goes on alone.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._help, name="lakehead-writer-ahead", daemon=True).start()
                    self._helped = True
            write = self._encoded(kind, group)
        self._sent.wait_for(lambda: self._turn == turn)
        if self.error is None:
            self._send(write, group)
        self._turn += 1
        self._sent.notify_all()
        self._changed.notify_all()
        return True

    def _encoded(self, kind: WriteKind, group: list[pa.RecordBatch]) -> PreparedWrite | BaseException:
        try:
            return self._batches.prepare(kind, join(group))
        except BaseException as e:
            return e  # it is raised to the caller after what was given before has landed

    def _send(self, write: PreparedWrite | BaseException, group: list[pa.RecordBatch]) -> None:
        try:
            if isinstance(write, BaseException):
                raise write
            self._batches.send(write)
        except BaseException as e:
            with self._taking:
                self.error = e
                self._pending.clear()
            return
        self._sent_bytes += sum(b.nbytes for b in group)
        self._acknowledged += len(group)

    def _last(self) -> bool:
        return self._closing or self._writer() is None or self.error is not None

    def _take(self) -> tuple[WriteKind, list[pa.RecordBatch]]:
        """The next request: one batch, or for unnamed writers the following ones of the same kind and columns too."""
        self._taken += 1
        kind, batch = self._pending.popleft()
        group, rows, size = [batch], batch.num_rows, batch.nbytes
        while self._pending and not self._named:
            next_kind, following = self._pending[0]
            rows, size = rows + following.num_rows, size + following.nbytes
            if next_kind != kind or following.schema != batch.schema:
                break
            if rows > _REQUEST_ROWS_MAX or size > _REQUEST_BYTES_MAX:
                break
            self._taken += 1
            group.append(self._pending.popleft()[1])
        return kind, group


class Writer(Handle):
    """Writes batches to one table in the background, in the order given. One thread at a time; a context manager.

    A call returns once the batch is checked and queued, and waits while the writer holds `Limits.writer_batches_max`
    batches or `Limits.writer_bytes_max` bytes that are not acknowledged. While one request is under way, what queues up
    becomes the next one. A named writer sends each batch on its own, numbered, so that its successor can tell what
    landed. Errors of the server are raised by the next call or by `flush`; nothing after the failed batch is written.

    A writer that is let go of without `close` still sends what it accepted, as long as its connection is open and the
    process lives, and nobody is told whether that succeeded. The connection's `close` ends its writers: what is not
    acknowledged by then is lost, with `ClosedError`. So do `flush` and `close` in a forked child.
    """

    def __init__(self, handle: TableHandle, batches: BatchWriter, *, named: bool) -> None:
        self._desc = handle.desc
        self._batches = batches
        self._named = named
        self._closed = self._ended = False
        self._sender = _Sender(weakref.ref(self), batches, named=named)
        shielded(self._sender.thread.start)
        handle.ends(self._sender)

    def _facts(self) -> Mapping[str, object]:
        return {
            "table": repr(str(self._desc.path)),
            "named": self._named,
            "unacknowledged": self._sender.unacknowledged,
            "state": "closed" if self._closed else None,
        }

    def append(self, data: object) -> None:
        """Queue rows for a log table; see `Table.append` for what is accepted and refused."""
        self._check_kind(keyed=False, verb="append")
        self._put("append", rows_for_append(self._desc, data))

    def upsert(self, data: object, *, columns: Sequence[str] | None = None) -> None:
        """Queue an upsert, full or partial; see `Table.upsert`."""
        self._check_kind(keyed=True, verb="upsert")
        self._put("upsert", rows_for_upsert(self._desc, data, columns))

    def delete(self, keys: object) -> None:
        """Queue deletes by primary key; see `Table.delete`."""
        self._check_kind(keyed=True, verb="delete")
        self._put("delete", rows_for_delete(self._desc, keys))

    def flush(self) -> None:
        """Wait until everything given so far is acknowledged, durable as the table promises.

        Raises:
            LakeheadError: a batch failed; it and all after it were not written.
            ClosedError: the connection was closed before, or this is a forked child.
        """
        self._sender.require_own()
        self._sender.wait()

    @property
    def last_sequence(self) -> int:
        """Of a named writer: number of the last batch known to be acknowledged, counting from 0; -1 for none. A resumed
        writer starts with its predecessor's last batch that is in every tablet it went to: send on from the one after
        it, unchanged, as some tablets may have it."""
        return self._batches.acked_through

    def close(self) -> None:
        """Flush and stop. Raises as `flush` does."""
        if self._ended:
            return
        self._sender.require_own()
        self._closed = True
        self._sender.close()
        self._sender.thread.join()
        self._ended = True
        self._sender.check()
        self._batches.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except LakeheadError:
            return

    def _check_kind(self, *, keyed: bool, verb: str) -> None:
        if self._desc.keyed != keyed:
            use = "upsert or delete" if self._desc.keyed else "append"
            raise WrongTableKindError(f"cannot {verb} on {self._desc.path}: use {use}", table=str(self._desc.path))

    def _put(self, kind: WriteKind, rows: pa.Table) -> None:
        if self._closed:
            raise ClosedError("the writer is closed: open another one")
        self._sender.require_own()
        self._sender.check()
        self._batches.require_small(rows)
        chunks = rows.to_batches()
        self._sender.put(kind, _own(join(chunks)) if chunks else _empty(rows.schema))


def _own(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows in memory of ours: what was given may be a program's own arrays, which it fills with other rows before
    these are sent."""
    return pa.ipc.read_record_batch(rows.serialize(), rows.schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
