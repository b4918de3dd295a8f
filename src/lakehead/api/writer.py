"""`Writer`: many batches in flight, in order, each applied once, with back-pressure."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import TracebackType

import pyarrow as pa

from lakehead.client.writer import BatchWriter, WriteKind
from lakehead.config import Limits
from lakehead.errors import ClosedError, LakeheadError, WrongTableKindError
from lakehead.types import TableDescriptor


class Writer:
    """Writes batches to one table in the background, in the order given. One thread at a time; a context manager.

    Each call is one batch with one sequence number. A call returns once the batch is checked and queued, and waits
    while `Limits.inflight_max` batches are unacknowledged. Errors of the server are raised by the next call or by
    `flush`; nothing after the failed batch is written.
    """

    def __init__(self, desc: TableDescriptor, batches: BatchWriter) -> None:
        self._desc = desc
        self._batches = batches
        self._queue: queue.Queue[tuple[WriteKind, pa.RecordBatch] | None] = queue.Queue(Limits().inflight_max)
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lakehead-writer", daemon=True)
        self._thread.start()

    def append(self, data: object) -> None:
        """Queue rows for a log table; see `Table.append` for what is accepted and refused."""
        from lakehead.api.table import rows_for_append

        self._check_kind(keyed=False, verb="append")
        self._put("append", rows_for_append(self._desc, data))

    def upsert(self, data: object, *, columns: Sequence[str] | None = None) -> None:
        """Queue an upsert, full or partial; see `Table.upsert`."""
        from lakehead.api.table import rows_for_upsert

        self._check_kind(keyed=True, verb="upsert")
        self._put("upsert", rows_for_upsert(self._desc, data, columns))

    def delete(self, keys: object) -> None:
        """Queue deletes by primary key; see `Table.delete`."""
        from lakehead.api.table import rows_for_delete

        self._check_kind(keyed=True, verb="delete")
        self._put("delete", rows_for_delete(self._desc, keys))

    def flush(self) -> None:
        """Wait until everything given so far is acknowledged, durable as the table promises.

        Raises:
            LakeheadError: a batch failed; it and all after it were not written.
        """
        self._queue.join()
        self._raise()

    @property
    def last_sequence(self) -> int:
        """Number of the last batch known to be acknowledged, counting from 0; -1 for none. A resumed writer starts
        with what its predecessor had acknowledged: send on from the batch after it."""
        return self._batches.acked_through

    def close(self) -> None:
        """Flush and stop. Raises as `flush` does."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._raise()

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
        self._raise()
        chunks = rows.to_batches()
        batch = chunks[0] if len(chunks) == 1 else pa.concat_batches(chunks) if chunks else _empty(rows.schema)
        self._queue.put((kind, batch))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                if self._error is None:
                    self._batches.send(self._batches.prepare(*item))
            except BaseException as e:
                self._error = e
            finally:
                self._queue.task_done()


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
