"""The writers of one table: those that are named, and those that carry single calls."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import pyarrow as pa

from lakehead.client.batch_writer import BatchWriter
from lakehead.client.routes import Routes
from lakehead.client.row_routing import halves, slices
from lakehead.client.small_appends import SentPart, SmallAppends
from lakehead.env import Env
from lakehead.errors import LakeheadError, LimitExceededError, SchemaMismatchError, SequenceGapError
from lakehead.format.storable import check_valid
from lakehead.types import TableDescriptor, TabletKey, WriteKind


class Writers:
    """Thread-safe. Rows given here were conformed to the table's schema; errors are those of the servers."""

    def __init__(self, desc: TableDescriptor, routes: Routes, env: Env, folder_id: str = "") -> None:
        self._desc = desc
        self._folder_id = folder_id
        self._routes = routes
        self._clock = env.clock
        self._randomness = env.randomness
        self._idle: list[BatchWriter] = []
        self._lock = env.threads.lock()
        me = weakref.ref(self)  # goes with its last user, who appends: no cycle keeps it

        def send(rows: pa.Table) -> Sequence[SentPart]:
            writers = me()
            assert writers is not None
            return writers._write("append", rows)

        self._small = SmallAppends(env.threads, send, desc.schema)

    def write(self, kind: WriteKind, rows: pa.Table) -> list[tuple[TabletKey, tuple[int, int]]]:
        """Write rows under an anonymous writer, in slices of at most 64 Ki rows; returns the offsets of each part.
        Appends of few rows go with those of other threads; see `SmallAppends`.

        Raises:
            LakeheadError: a slice failed; ``context["rows_acknowledged"]`` says how many rows before it were written.
        """
        if kind == "append" and self._small.takes(rows):
            return self._small.append(rows)
        return [(part.key, part.offsets) for part in self._write(kind, rows)]

    def _write(self, kind: WriteKind, rows: pa.Table) -> list[SentPart]:
        """What `write` does, by a writer of its own; positions are those in the slice that a part is of."""
        with self._lock:
            writer = self._idle.pop() if self._idle else None
        writer = writer or self.anonymous()
        out: list[SentPart] = []
        done = 0
        parts = deque(slices(rows))
        if len(parts) > 1:
            # The server checks one request whole: what takes several must not fail half-way.
            check_valid(rows.columns, rows.schema, f"rows for {self._desc.path}")
            for batch in parts:
                writer.require_small(batch)
        while parts:
            batch = parts.popleft()
            try:
                try:
                    out += _sent(writer, kind, batch)
                except LimitExceededError as e:
                    if batch.num_rows == 1 or "change_bytes_max" not in e.context or "acknowledged" in e.context:
                        raise
                    # The rows are small, those that they replace are not.
                    parts.extendleft(reversed(halves(batch)))
                    writer = self.anonymous()
                    continue
                except SequenceGapError as e:
                    if writer.sent_again or "acknowledged" in e.context:
                        raise
                    # While it was idle many others wrote, and it was forgotten: this batch is refused, by all tablets.
                    writer = self.anonymous()
                    out += _sent(writer, kind, batch)
            except LakeheadError as e:
                if isinstance(e, SchemaMismatchError):
                    check_valid(batch.columns, batch.schema, f"rows for {self._desc.path}")  # names the row
                before = f" (the {done:,} rows before are written)" if done else ""
                raise type(e)(e.message + before, **{**e.context, "rows_acknowledged": done}) from e
            done += batch.num_rows
        with self._lock:
            self._idle.append(writer)
        return out

    def named(self, name: str) -> BatchWriter:
        """Take over a named writer; see `BatchWriter.resume`."""
        return BatchWriter.resume(self._desc, self._routes, self._clock, name, folder_id=self._folder_id)

    def anonymous(self) -> BatchWriter:
        """A writer that nobody resumes."""
        writer_id = bytes.fromhex(self._randomness.uuid_hex())
        return BatchWriter(self._desc, self._routes, self._clock, writer_id=writer_id, folder_id=self._folder_id)


def _sent(writer: BatchWriter, kind: WriteKind, batch: pa.RecordBatch) -> list[SentPart]:
    prepared = writer.prepare(kind, batch)
    answers = zip(writer.send(prepared), prepared.rows, strict=True)
    return [SentPart(key, rows, offsets) for (key, offsets), rows in answers]
