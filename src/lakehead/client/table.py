"""One table as its tablet servers offer it: numbered writes, lookups, log reads and subscriptions, by tablet key."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from lakehead.client.leases import LeaseKeeper
from lakehead.client.patience import Patience, ask
from lakehead.client.routing import route
from lakehead.client.writer import BatchWriter
from lakehead.env import Env
from lakehead.errors import (
    InvalidRequestError,
    LakeheadError,
    LimitExceededError,
    SchemaMismatchError,
    SequenceGapError,
    UnavailableError,
)
from lakehead.format.joins import table_batches
from lakehead.format.values import check_valid
from lakehead.predicate import Predicate
from lakehead.protocol import messages as m
from lakehead.types import TableDescriptor, TabletKey, WriteKind

_SLICE_ROWS = 1 << 16
_LOOKUP_KEYS = 1 << 16


class TableClient:
    """Thread-safe. Rows given here were conformed to the table's schema; errors are those of the server."""

    def __init__(
        self,
        desc: TableDescriptor,
        endpoint: m.Endpoint,
        env: Env,
        leases: LeaseKeeper | None = None,
        folder_id: str = "",
    ) -> None:
        """``leases`` are those of all clients of a connection: some do not live to let go of theirs. ``folder_id`` is
        the folder that offsets are of: a server of another copy refuses them."""
        self._folder_id = folder_id
        self.desc = desc
        self._endpoint = endpoint
        self.clock = env.clock
        self._randomness = env.randomness
        self._writers: list[BatchWriter] = []
        self.leases = LeaseKeeper(endpoint, env.threads, renewing=False) if leases is None else leases
        self._lock = env.threads.lock()

    def _ask(self, request: m.Request[m.R], attachments: Sequence[pa.Buffer] = ()) -> tuple[m.R, list[pa.Buffer]]:
        return ask(self._endpoint, self.clock, request, attachments)

    @property
    def open(self) -> bool:
        """Whether calls may succeed: its connection is not closed."""
        return not getattr(self._endpoint, "closed", False)

    # ---- write ------------------------------------------------------------------------------------------------

    def write(self, kind: WriteKind, rows: pa.Table) -> list[tuple[TabletKey, tuple[int, int]]]:
        """Write rows under an anonymous writer, in slices of at most 64 Ki rows; returns the offsets of each part.

        Raises:
            LakeheadError: a slice failed; ``context["rows_acknowledged"]`` says how many rows before it were written.
        """
        with self._lock:
            writer = self._writers.pop() if self._writers else None
        writer = writer or self.anonymous_writer()
        out: list[tuple[TabletKey, tuple[int, int]]] = []
        done = 0
        parts = deque(slices(rows))
        if len(parts) > 1:
            # The server checks one request whole: what takes several must not fail half-way.
            check_valid(rows.columns, rows.schema, f"rows for {self.desc.path}")
            for batch in parts:
                writer.require_small(batch)
        while parts:
            batch = parts.popleft()
            try:
                try:
                    out += writer.send(writer.prepare(kind, batch))
                except LimitExceededError as e:
                    if batch.num_rows == 1 or "change_bytes_max" not in e.context or "acknowledged" in e.context:
                        raise
                    # The rows are small, those that they replace are not.
                    parts.extendleft(reversed(_halves(batch)))
                    writer = self.anonymous_writer()
                    continue
                except SequenceGapError as e:
                    if writer.sent_again or "acknowledged" in e.context:
                        raise
                    # While it was idle many others wrote, and it was forgotten: this batch is refused, by all tablets.
                    writer = self.anonymous_writer()
                    out += writer.send(writer.prepare(kind, batch))
            except LakeheadError as e:
                if isinstance(e, SchemaMismatchError):
                    check_valid(batch.columns, batch.schema, f"rows for {self.desc.path}")  # names the row
                before = f" (the {done:,} rows before are written)" if done else ""
                raise type(e)(e.message + before, **{**e.context, "rows_acknowledged": done}) from e
            done += batch.num_rows
        with self._lock:
            self._writers.append(writer)
        return out

    def named_writer(self, name: str) -> BatchWriter:
        """Take over a named writer; see `BatchWriter.resume`."""
        return BatchWriter.resume(self.desc, self._endpoint, self.clock, name)

    def anonymous_writer(self) -> BatchWriter:
        """A writer that nobody resumes."""
        writer_id = bytes.fromhex(self._randomness.uuid_hex())
        return BatchWriter(self.desc, self._endpoint, self.clock, writer_id=writer_id)

    # ---- lookup -----------------------------------------------------------------------------------------------

    def lookup(self, keys: pa.RecordBatch) -> pa.Table:
        """Rows of the keys that exist, in the order asked; ``keys`` holds the key columns in key order."""
        asked = deque(keys.slice(at, _LOOKUP_KEYS) for at in range(0, keys.num_rows, _LOOKUP_KEYS))
        parts = []
        while asked:
            some = asked.popleft()
            try:
                parts.append(self._lookup_part(some))
            except LimitExceededError as e:
                if some.num_rows == 1 or "answer_bytes_max" not in e.context:
                    raise
                asked.extendleft(reversed(_halves(some)))
        return pa.concat_tables([self.desc.schema.empty_table(), *parts]) if len(parts) != 1 else parts[0]

    def _lookup_part(self, keys: pa.RecordBatch) -> pa.Table:
        refs, attachments, places = [], [], []
        for key, rows in route(self.desc, keys):
            refs.append(m.TabletRef.of(key))
            places.append(rows)
            attachments.append((keys if rows is None else keys.take(pa.array(rows))).serialize())
        _, out = self._ask(m.Lookup(table_id=self.desc.table_id, tablets=refs, prefix=[]), attachments)
        batches, order = [], []
        for i, asked in enumerate(places):
            if out[2 * i].size:
                batches.append(pa.ipc.read_record_batch(out[2 * i], self.desc.schema))
                found = np.frombuffer(out[2 * i + 1], np.int64)
                order.append(found if asked is None else asked[found])
        table = pa.Table.from_batches(batches, self.desc.schema)
        return table if len(batches) <= 1 else table.take(pa.array(np.argsort(np.concatenate(order), kind="stable")))

    def prefix_lookup(self, prefixes: pa.RecordBatch) -> pa.Table:
        """Rows whose partition columns and bucket key equal one of these; in no particular order.

        Raises:
            InvalidRequestError: the bucket key is no prefix of the primary key.
        """
        desc = self.desc
        if not desc.prefix_key:
            raise InvalidRequestError(
                f"prefix lookups on {desc.path} are not possible: its bucket key {list(desc.bucket_key)} is not a"
                f" proper prefix of its primary key; create the table with bucket_key= set to the leading key columns"
            )
        refs, attachments = [], []
        for key, rows in route(desc, prefixes):
            part = prefixes.select(list(desc.prefix_key))
            refs.append(m.TabletRef.of(key))
            attachments.append((part if rows is None else part.take(pa.array(rows))).serialize())
        request = m.Lookup(table_id=desc.table_id, tablets=refs, prefix=list(desc.prefix_key))
        _, out = self._ask(request, attachments)
        batches = [pa.ipc.read_record_batch(b, desc.schema) for b in out[::2] if b.size]
        return pa.Table.from_batches(batches, desc.schema)

    # ---- log --------------------------------------------------------------------------------------------------

    def tablets(self, *, sync: bool = False, at_timestamp_us: int | None = None) -> list[m.TabletState]:
        """State of every tablet, by key; ``sync`` makes what it reports durable first."""
        reply, _ = self._ask(m.Watermarks(table_id=self.desc.table_id, sync=sync, at_timestamp_us=at_timestamp_us))
        return reply.tablets

    def watermarks(self) -> Mapping[TabletKey, tuple[int, int]]:
        """Per tablet ``(log_start_offset, high_watermark)``, all of it on disk."""
        return {t.key: (t.log_start, t.high_watermark) for t in self.tablets(sync=True)}

    def timestamps_at(self, offsets: Mapping[TabletKey, int]) -> tuple[int, dict[TabletKey, int | None]]:
        """The server's time, and the commit time of the row at each offset (None past the end), in microseconds."""
        ranges = [m.TabletRange(partition=k.partition, bucket=k.bucket, start=o, end=o + 1) for k, o in offsets.items()]
        reply, _ = self._ask(m.TimestampsAt(table_id=self.desc.table_id, ranges=ranges))
        return reply.now_us, dict(zip(offsets, reply.timestamps_us, strict=True))

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``[start, end)`` of one tablet in offset order; see `lakehead.protocol.messages.Read` for columns.

        None reads the user's columns, then (keyed tables) ``__change_type`` and ``__prev_offset``, then ``__offset``
        and ``__timestamp``.
        """
        if columns is None:
            changes = ["__change_type", "__prev_offset"] if self.desc.keyed else []
            columns = [*self.desc.schema.names, *changes, "__offset", "__timestamp"]
        for _, batch in self.read_ranges({tablet: (start, end)}, columns):
            yield batch

    def read_ranges(
        self,
        ranges: Mapping[TabletKey, tuple[int, int]],
        columns: Sequence[str],
        predicate: Predicate | None = None,
        *,
        live: bool = False,
        lease: str | None = None,
        skip: int = 0,
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        """Rows of several ranges, tablet by tablet, each in offset order.

        When the server goes away meanwhile, the rest is read from the next one, which holds the same rows at the same
        offsets unless they were trimmed.

        Args:
            live: instead, of a keyed table, the rows that are live at exactly the end of each range.
            lease: from `open_leases`; over when its server is.
            skip: rows of the first range to leave out.
        """
        patience = Patience.bounded(self.clock, f"reading {self.desc.path}")
        left = {k: (s, e) for k, (s, e) in ranges.items() if s < e}
        while left:
            stream = None
            try:
                behind = skip
                stream = self._endpoint.stream(self._read_request(left, columns, predicate, live=live, lease=lease))
                for header, batch in stream:
                    patience.progress()
                    key = TabletKey(header.partition, header.bucket)
                    while (first := next(iter(left))) != key:
                        del left[first]
                        behind = skip = 0
                    if live:
                        # The rows that are live at one offset are the same ones whenever they are asked for.
                        batch, behind = batch.slice(behind), max(0, behind - batch.num_rows)
                        skip += batch.num_rows
                    else:
                        assert header.end_offset is not None
                        left[key] = header.end_offset, left[key][1]
                    if batch.num_rows:
                        yield key, batch
                return
            except UnavailableError as e:
                patience.wait(e)
            finally:
                if stream is not None:
                    stream.close()

    def _read_request(
        self,
        ranges: Mapping[TabletKey, tuple[int, int]],
        columns: Sequence[str],
        predicate: Predicate | None,
        *,
        live: bool,
        lease: str | None,
    ) -> m.Request[m.Stream]:
        return (m.ReadLive if live else m.Read)(
            table_id=self.desc.table_id,
            ranges=[_range(k, s, e) for k, (s, e) in ranges.items()],
            columns=list(columns),
            predicate=None if predicate is None else predicate.to_bytes(),
            folder_id=self._folder_id,
            lease=lease,
        )

    def open_leases(
        self, tables: Sequence[tuple[str, str | None]], *, planned: bool = False
    ) -> list[tuple[str, list[m.TabletState]]]:
        """Pin what all tablets of these tables of one connection hold at one moment, and the files of a lake metadata
        file of each; see `protocol.messages.OpenLeases`."""
        patience = Patience.bounded(self.clock, f"pinning {self.desc.path}")
        while True:
            try:
                return [(held.lease, held.tablets) for held in self.leases.open(tables, planned=planned)]
            except UnavailableError as e:
                patience.wait(e)

    def keep_lease(self, lease: str) -> None:
        """Renew a lease until it is released."""
        self.leases.keep(lease)

    def release_lease(self, lease: str) -> None:
        """Let a lease go with the next request about leases, so that the garbage collector may call it."""
        self.leases.release(lease)

    def leased_metadata(self) -> list[str]:
        """Iceberg metadata files that pinned reads still use."""
        reply, _ = self._ask(m.LeasedMetadata(table_id=self.desc.table_id))
        return reply.names

    def subscribe(
        self,
        *,
        starts: Mapping[TabletKey, int],
        default: Literal["latest", "earliest", "full"],
        stops: Mapping[TabletKey, int] | None,
        columns: Sequence[str],
        predicate: Predicate | None,
    ) -> m.Stream:
        """Open a push stream; see `lakehead.protocol.messages.Subscribe`."""
        return self._endpoint.stream(
            m.Subscribe(
                table_id=self.desc.table_id,
                starts=[_range(k, o, o) for k, o in starts.items()],
                default=default,
                stops=None if stops is None else [_range(k, o, o) for k, o in stops.items()],
                columns=list(columns),
                folder_id=self._folder_id,
                predicate=None if predicate is None else predicate.to_bytes(),
            )
        )

    # ---- lake -------------------------------------------------------------------------------------------------

    def lake(self) -> m.LakeReply:
        """Where the table's lake stands now."""
        reply, _ = self._ask(m.LakeInfo(table_id=self.desc.table_id))
        return reply

    def adopt_lake(self) -> bool:
        """See `lakehead.api.lake.TableLake.adopt`."""
        reply, _ = self._ask(m.AdoptLake(table_id=self.desc.table_id))
        return bool(reply.names)

    def report_tiered(self) -> None:
        """Tell the server that a round was committed, so that it may trim at once. A hint: it looks at the lake."""
        self._ask(m.ReportTiered(table_id=self.desc.table_id))


def _range(key: TabletKey, start: int, end: int) -> m.TabletRange:
    return m.TabletRange(partition=key.partition, bucket=key.bucket, start=start, end=end)


def _halves(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    middle = batch.num_rows // 2
    return [batch.slice(0, middle), batch.slice(middle)]


def slices(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The table as record batches of at most 64 Ki rows and 64 MiB, or one larger row; at least one batch."""
    if rows.num_rows == 0:
        yield pa.RecordBatch.from_arrays([pa.array([], f.type) for f in rows.schema], schema=rows.schema)
        return
    yield from table_batches(rows, rows_max=_SLICE_ROWS)
