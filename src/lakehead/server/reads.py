"""Reads of one server: lookups, watermarks, leases, and streams of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from lakehead.config import Limits
from lakehead.env import Env
from lakehead.env.threads import cores
from lakehead.errors import (
    CorruptionError,
    InvalidRequestError,
    LimitExceededError,
    OffsetOutOfRangeError,
    OverloadedError,
    SchemaMismatchError,
    WrongTableKindError,
)
from lakehead.format.ipc_message import read_received
from lakehead.format.joins import AnswerSize, join
from lakehead.format.plain import has_plain_rows, plain_key
from lakehead.log.netchange import NO_OFFSETS, Offsets
from lakehead.protocol import messages as m
from lakehead.server.access import Caller, Share
from lakehead.server.admission import Bounded
from lakehead.server.filtering import Filtering, Turns
from lakehead.server.leases import Leases
from lakehead.server.metadata import MetadataStore
from lakehead.server.quotas import Quotas
from lakehead.server.streams import ServerStream, open_read, open_read_live, open_subscription
from lakehead.server.tables import LiveTable, LiveTables
from lakehead.server.tablet import Tablet
from lakehead.types import Offset, TableDescriptor, TabletKey

if TYPE_CHECKING:
    from lakehead.kv.keys import KeyBatch

_ADDRESS_MAX = 8192
_Found: TypeAlias = tuple[pa.RecordBatch, Offsets]
"""Rows of a tablet, and each one's position in the keys."""
_Look: TypeAlias = Callable[[Tablet, int, int, Offset | None], _Found | None]
"""Rows of a tablet by these of the keys, as of the end of its log that is given; None: that cannot be told."""


class Reads:
    """Answers requests of readers. Thread-safe."""

    def __init__(
        self,
        metadata: MetadataStore,
        tables: LiveTables,
        leases: Leases,
        *,
        env: Env,
        limits: Limits,
        fence: Callable[[], None],
        quotas: Quotas,
    ) -> None:
        self._metadata = metadata
        self._tables = tables
        self._leases = leases
        self._clock = env.clock
        self._limits = limits
        self._fence = fence
        self._quotas = quotas
        self._turns = Turns(env.threads, cores())
        self._subscriptions = Bounded(env.threads, "subscriptions_max", "subscriptions", limits.subscriptions_max)
        self._reads = Bounded(env.threads, "reads_max", "reads", limits.reads_max)

    def get(self, request: m.Get) -> m.GetReply:
        """See `Get`."""
        table, desc = self._keyed(request)
        key = plain_key(tuple(request.key), desc.key_columns)
        if key is None or not has_plain_rows(desc.schema):
            raise InvalidRequestError(f"{desc.path} has no plain rows by such a key: look it up")
        tablet = table.tablet(request.tablet.key)
        if tablet is None:
            return m.GetReply(row=None)
        inside = [value for value, c in zip(key, desc.primary_key, strict=True) if c not in desc.partition_by]
        return m.GetReply(row=tablet.row(inside, desc.schema_id))

    def _keyed(self, request: m.Get | m.Lookup) -> tuple[LiveTable, TableDescriptor]:
        """The keyed table that is asked for, under the definition by which it is."""
        table = self._tables.get(request.table_id)
        desc = table.desc
        desc.require_schema(request.schema_id)
        if not desc.keyed:
            raise WrongTableKindError(f"{desc.path} is a log table: it has no keys to look up, scan it with where=")
        return table, desc

    def lookup(self, request: m.Lookup, attachments: Sequence[pa.Buffer]) -> tuple[m.LookupReply, list[pa.Buffer]]:
        """See `Lookup`."""
        table, desc = self._keyed(request)
        if request.prefix and tuple(request.prefix) != desc.prefix_key:
            raise InvalidRequestError(f"{desc.path} has no prefix {request.prefix} to look up by")
        if len(attachments) != 1 or len(request.counts) != len(request.tablets):
            raise InvalidRequestError("a lookup must have one attachment, and a number of keys for each tablet")
        ends: Sequence[int | None] = request.as_of or [None] * len(request.tablets)
        if len(ends) != len(request.tablets) or (request.prefix and request.as_of):
            raise InvalidRequestError("a lookup of keys as of a moment must have one offset for each tablet")
        keys = self._asked(request, attachments[0], desc)
        look = (self._by_prefix if request.prefix else self._by_key)(keys, desc, request)
        batches: list[pa.RecordBatch] = []
        places: list[Offsets] = []
        at, size = 0, AnswerSize(request.bytes_max)
        for ref, count, end in zip(request.tablets, request.counts, ends, strict=True):
            start, at = at, at + count
            tablet = table.tablet(ref.key)
            if tablet is None:
                continue
            found = look(tablet, start, at, end)
            if found is None:
                return m.LookupReply(exact=False), []
            if found[0].num_rows:
                batches.append(found[0])
                places.append(found[1])
                # Each tablet bounds its part; many of them are one answer.
                size.add(found[0], at)
        if not batches:
            return m.LookupReply(), [pa.py_buffer(b"")] * 2
        return m.LookupReply(), [join(batches).serialize(), pa.py_buffer(np.concatenate(places))]

    def _asked(self, request: m.Lookup, buffer: pa.Buffer, desc: TableDescriptor) -> pa.RecordBatch:
        schema = pa.schema([desc.schema.field(c) for c in request.prefix]) if request.prefix else desc.key_columns
        try:
            keys = read_received(buffer, schema, bytes_max=self._limits.batch_bytes_max)
        except CorruptionError as e:
            raise SchemaMismatchError(f"the keys do not have the schema of {desc.path}: {e}") from e
        if keys.num_rows > self._limits.lookup_keys_max:
            raise LimitExceededError(
                f"a lookup of {keys.num_rows:,} keys is over the limit of {self._limits.lookup_keys_max:,}:"
                " ask in parts",
                lookup_keys_max=self._limits.lookup_keys_max,
            )
        if sum(request.counts) != keys.num_rows or min(request.counts, default=0) < 0:
            raise InvalidRequestError(f"a lookup of {keys.num_rows:,} keys gives its tablets others")
        return keys

    @staticmethod
    def _by_key(keys: pa.RecordBatch, desc: TableDescriptor, request: m.Lookup) -> _Look:
        encoded: KeyBatch | None = None

        def look(tablet: Tablet, start: int, end: int, as_of: Offset | None) -> _Found | None:
            nonlocal encoded
            if encoded is None:  # once for all tablets
                encoded = tablet.encode(keys)
            some = encoded.slice(start, end)
            found = tablet.lookup(some, desc.schema_id, as_of=as_of, bytes_max=request.bytes_max)
            return None if found is None else (found[0], found[1] + start)

        return look

    @staticmethod
    def _by_prefix(keys: pa.RecordBatch, desc: TableDescriptor, request: m.Lookup) -> _Look:
        def look(tablet: Tablet, start: int, end: int, as_of: Offset | None) -> _Found | None:
            some = keys.slice(start, end - start)
            return tablet.prefix_lookup(some, desc.schema_id, bytes_max=request.bytes_max), NO_OFFSETS

        return look

    def watermarks(self, request: m.Watermarks) -> m.WatermarksReply:
        """See `Watermarks`."""
        table, at = self._tables.get(request.table_id), request.at_timestamp_us
        if request.sync:
            self._fence()
        with self._tables.moment:  # no watermark moves; what is overwritten goes when the new rows come
            seen = [
                (key, t, t.log_start_offset, t.high_watermark, t.row_count, t.overwritten)
                for key, t in table.answering().items()
            ]
        if request.sync:  # what is told, and perhaps more
            for _, tablet, *_ in seen:
                tablet.sync()
        states = []
        for key, tablet, start, end, rows, over in sorted(seen):
            since = None if at is None else tablet.offset_at(at)
            since = None if since is None else min(since, end)
            states.append(self._tablet_state(key, tablet, start, end, rows, over, since))
        me = self._metadata.incarnation
        return m.WatermarksReply(tablets=states, folder_id=me.folder_id, incarnation=me.number)

    @staticmethod
    def _tablet_state(
        key: TabletKey, tablet: Tablet, start: int, end: int, rows: int, over: int, at_timestamp: int | None = None
    ) -> m.TabletState:
        return m.TabletState(
            partition=key.partition,
            bucket=key.bucket,
            log_start=start,
            high_watermark=end,
            rows=rows,
            overwritten=over,
            at_timestamp=at_timestamp,
            damage="; ".join(map(str, tablet.damages())) or None,
        )

    def timestamps_at(self, request: m.TimestampsAt) -> m.TimestampsReply:
        """See `TimestampsAt`."""
        table = self._tables.get(request.table_id)
        tablets = [(table.tablet(r.key), r.start) for r in request.ranges]
        times = [None if tablet is None else tablet.timestamp_at(start) for tablet, start in tablets]
        return m.TimestampsReply(now_us=self._clock.now_us(), timestamps_us=times)

    def open_leases(self, request: m.OpenLeases, caller: Caller) -> m.LeasesReply:
        """See `OpenLeases`."""
        if any(t.lake is not None and len(t.lake.metadata) > _ADDRESS_MAX for t in request.tables):
            raise InvalidRequestError(f"the address of a lake table's version has at most {_ADDRESS_MAX} characters")
        self._leases.release(request.release, caller.principal)
        self._fence()
        live = [self._tables.get(t.table_id) for t in request.tables]
        # No watermark moves: each lies within its view. What tablets there are is asked inside: one that is made
        # before has rows that are older than others which are seen.
        with self._tables.moment:
            tables = [list(table.answering().items()) for table in live]
            seen = [
                {key: (t.view(), t.high_watermark, t.row_count, t.overwritten) for key, t in tablets}
                for tablets in tables
            ]
        # Looked at last: what an altered table was written since lies above these watermarks.
        for asked, table in zip(request.tables, live, strict=True):
            table.desc.require_schema(asked.schema_id)
        opened: list[m.Lease] = []
        me = str(self._metadata.incarnation)
        try:
            for asked, tablets, views in zip(request.tables, tables, seen, strict=True):
                held = {key: view for key, (view, *_) in views.items()}
                lease = self._leases.open(
                    asked.table_id,
                    held,
                    asked.lake,
                    planned=request.planned,
                    caller=caller,
                    require=self._quotas.require_lease,
                )
                states = [self._tablet_state(k, t, held[k].log_start_offset, *views[k][1:]) for k, t in sorted(tablets)]
                opened.append(m.Lease(lease=lease, tablets=states, incarnation=me))
        except OverloadedError:
            self._leases.release([held.lease for held in opened], caller.principal)
            raise
        return m.LeasesReply(leases=opened, seconds=self._limits.lease_seconds)

    def renew_leases(self, request: m.RenewLeases, caller: Caller) -> m.Done:
        """See `RenewLeases`."""
        self._leases.release(request.release, caller.principal)
        self._leases.renew(request.leases, caller.principal)
        return m.Done()

    def leased_lake(self, request: m.LeasedLake) -> m.LakeUsesReply:
        """See `LeasedLake`."""
        return m.LakeUsesReply(uses=self._leases.lake_uses(request.table_id))

    # ---- streams ----------------------------------------------------------------------------------------------

    def stream(
        self, request: m.Read | m.ReadLive | m.Subscribe, caller: Caller, gone: Callable[[], bool]
    ) -> ServerStream:
        """Open a stream, for which ``gone()`` tells that nobody waits any more."""
        share = caller.share
        filtering = Filtering(self._turns, share, gone)
        if isinstance(request, m.Subscribe):
            return self._counted(
                self._subscriptions,
                share,
                lambda: open_subscription(self._tables.get(request.table_id), request, filtering),
            )
        return self._counted(self._reads, share, lambda: self._read(request, caller.principal, filtering))

    def _read(self, request: m.Read | m.ReadLive, principal: str, filtering: Filtering) -> ServerStream:
        if request.incarnation and str(self._metadata.incarnation) not in request.incarnation.split(m.LEASE_JOINT):
            raise OffsetOutOfRangeError("the server was started again, and may have other rows at these offsets")
        leased = self._leases.views(request.table_id, request.lease, principal)
        table = self._tables.get(request.table_id)
        if isinstance(request, m.Read):
            return open_read(table, request, leased, filtering)
        return open_read_live(table, request, leased, filtering)

    @staticmethod
    def _counted(bounded: Bounded, share: Share, open_stream: Callable[[], ServerStream]) -> ServerStream:
        held = bounded.take(share=share)
        try:
            stream = open_stream()
        except BaseException:
            bounded.give_back(held)
            raise
        stream.on_close(lambda: bounded.give_back(held))
        return stream
