"""A table's log as its servers offer it: how far it reaches, ranges of it, live rows, and what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import pyarrow as pa

from lakehead.client.merged_stream import MergedStream
from lakehead.client.patience import Patience, ask
from lakehead.client.received import require_columns, told_tablets
from lakehead.client.routes import Routes, by_server
from lakehead.client.told_columns import sent_columns, with_told_columns
from lakehead.env import Env
from lakehead.errors import CorruptionError, UnavailableError
from lakehead.log.hot_range import HotRange
from lakehead.predicate.read_spec import ReadSpec
from lakehead.protocol import messages as m
from lakehead.types import TableDescriptor, TabletKey


class RemoteLog:
    """Thread-safe; errors are those of the servers."""

    def __init__(self, desc: TableDescriptor, routes: Routes, env: Env, folder_id: str = "") -> None:
        """``folder_id`` is the folder that offsets are of: a server of another copy refuses them."""
        self._desc = desc
        self._routes = routes
        self._clock = env.clock
        self._threads = env.threads
        self._folder_id = folder_id

    def tablets(self, *, sync: bool = False, at_timestamp_us: int | None = None) -> Sequence[m.TabletState]:
        """State of every tablet, by key, as of one moment where one server has them; ``sync`` makes what it reports
        durable first."""
        request = m.Watermarks(
            table_id=self._desc.table_id, folder_id=self._folder_id, sync=sync, at_timestamp_us=at_timestamp_us
        )
        replies = [ask(s, self._clock, request)[0] for s in self._routes.servers(self._desc.table_id)]
        if len(replies) == 1:
            return told_tablets(self._desc, replies[0].tablets)
        return sorted((t for reply in replies for t in told_tablets(self._desc, reply.tablets)), key=lambda t: t.key)

    def watermarks(self) -> Mapping[TabletKey, HotRange]:
        """Which offsets the log has of each tablet, all of it on disk."""
        return {t.key: HotRange(t.log_start, t.high_watermark, t.overwritten) for t in self.tablets(sync=True)}

    def timestamps_at(self, offsets: Mapping[TabletKey, int]) -> tuple[int, dict[TabletKey, int | None]]:
        """The server's time, and the commit time of the row at each offset (None past the end), in microseconds."""
        ranges = [m.TabletRange(partition=k.partition, bucket=k.bucket, start=o, end=o + 1) for k, o in offsets.items()]
        keys, now_us = list(offsets), 0
        found: dict[TabletKey, int | None] = {}
        for server, places in by_server(self._routes, self._desc.table_id, keys):
            asked = [ranges[i] for i in places]
            request = m.TimestampsAt(table_id=self._desc.table_id, folder_id=self._folder_id, ranges=asked)
            reply, _ = ask(server, self._clock, request)
            now_us = max(now_us, reply.now_us)
            found |= dict(zip([keys[i] for i in places], reply.timestamps_us, strict=True))
        return now_us, {key: found[key] for key in keys}

    def read(
        self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows ``[start, end)`` of one tablet in offset order; see `lakehead.protocol.messages.Read` for columns.

        None reads the user's columns, then (keyed tables) ``__change_type`` and ``__prev_offset``, then ``__offset``
        and ``__timestamp``.
        """
        if columns is None:
            changes = ["__change_type", "__prev_offset"] if self._desc.keyed else []
            columns = [*self._desc.schema.names, *changes, "__offset", "__timestamp"]
        for _, batch in self.read_ranges({tablet: (start, end)}, ReadSpec(tuple(columns))):
            yield batch

    def read_ranges(
        self,
        ranges: Mapping[TabletKey, tuple[int, int]],
        spec: ReadSpec,
        *,
        live: bool = False,
        lease: str | None = None,
        incarnation: str = "",
        skip: int = 0,
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        """Rows of several ranges, tablet by tablet, each in offset order; for columns see
        `lakehead.protocol.messages.Read`. Of a limit nothing is known here.

        When a server goes away meanwhile, the rest is read from the next one, which holds the same rows at the same
        offsets unless they were trimmed, or lost in a power cut.

        Args:
            live: instead, of a keyed table, the rows that are live at exactly the end of each range.
            lease: from `Leases.open`; over when its server is.
            incarnation: of the server whose rows they must be; empty: any.
            skip: rows of the first range to leave out.
        """
        keys = [k for k, (start, end) in ranges.items() if start < end]
        if not keys:
            return
        for server, places in by_server(self._routes, self._desc.table_id, keys):
            part = {keys[i]: ranges[keys[i]] for i in places}
            passed = skip if keys[0] in part else 0
            how = partial(self._read_request, live=live, lease=lease, incarnation=incarnation)
            yield from self._read_from(server, part, spec, how, live=live, skip=passed)

    def _read_from(
        self,
        server: m.Endpoint,
        left: dict[TabletKey, tuple[int, int]],
        spec: ReadSpec,
        request: Callable[[dict[TabletKey, tuple[int, int]], ReadSpec, list[str]], m.Request[m.Stream]],
        *,
        live: bool,
        skip: int,
    ) -> Iterator[tuple[TabletKey, pa.RecordBatch]]:
        patience = Patience.bounded(self._clock, f"reading {self._desc.path}")
        while left:
            stream = None
            try:
                behind = skip
                sent = sent_columns(spec.names, dense=not live and spec.predicate is None)
                stream = server.stream(request(left, spec, sent))
                require_columns(self._desc, sent, stream.schema)
                stream = with_told_columns(stream, spec.names)
                for header, batch in stream:
                    patience.progress()
                    key = TabletKey(header.partition, header.bucket)
                    _require_part_of(left, key, header, live=live)
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
        spec: ReadSpec,
        columns: list[str],
        *,
        live: bool,
        lease: str | None,
        incarnation: str,
    ) -> m.Request[m.Stream]:
        return (m.ReadLive if live else m.Read)(
            table_id=self._desc.table_id,
            ranges=[_range(k, s, e) for k, (s, e) in ranges.items()],
            columns=columns,
            predicate=None if spec.predicate is None else spec.predicate.to_bytes(),
            folder_id=self._folder_id,
            schema_id=self._desc.schema_id,
            lease=lease,
            incarnation=incarnation,
        )

    def subscribe(
        self,
        *,
        starts: Mapping[TabletKey, int],
        default: Literal["latest", "earliest", "full"],
        stops: Mapping[TabletKey, int] | None,
        spec: ReadSpec,
    ) -> m.Stream:
        """Open a push stream, of all servers in one; see `lakehead.protocol.messages.Subscribe`."""
        # Live rows, which those of keyed tables may begin with, have other offsets.
        sent = sent_columns(spec.names, dense=not self._desc.keyed and spec.predicate is None)

        def request(mine: Callable[[TabletKey], bool]) -> m.Subscribe:
            return m.Subscribe(
                table_id=self._desc.table_id,
                starts=[_range(k, o, o) for k, o in starts.items() if mine(k)],
                default=default,
                stops=None if stops is None else [_range(k, o, o) for k, o in stops.items() if mine(k)],
                columns=sent,
                folder_id=self._folder_id,
                schema_id=self._desc.schema_id,
                predicate=None if spec.predicate is None else spec.predicate.to_bytes(),
            )

        servers = self._routes.servers(self._desc.table_id)
        if len(servers) == 1:
            return self._checked(servers[0].stream(request(lambda _: True)), spec, sent)
        streams: list[m.Stream] = []
        try:
            for server in servers:
                streams.append(self._checked(server.stream(request(partial(self._lives_on, server))), spec, sent))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return MergedStream(streams, self._threads)

    def _checked(self, stream: m.Stream, spec: ReadSpec, sent: Sequence[str]) -> m.Stream:
        try:
            require_columns(self._desc, sent, stream.schema)
        except BaseException:
            stream.close()
            raise
        return with_told_columns(stream, spec.names)

    def _lives_on(self, server: m.Endpoint, tablet: TabletKey) -> bool:
        return self._routes.leader(self._desc.table_id, tablet) is server


def _require_part_of(
    left: Mapping[TabletKey, tuple[int, int]], key: TabletKey, header: m.StreamHeader, *, live: bool
) -> None:
    start, end = left.get(key, (0, -1))
    if not live and header.end_offset is not None:
        end = header.end_offset if start <= header.end_offset <= end else -1
    if end < 0 or (header.end_offset is None and not live):
        raise CorruptionError("the server sent rows that were not asked for")


def _range(key: TabletKey, start: int, end: int) -> m.TabletRange:
    return m.TabletRange(partition=key.partition, bucket=key.bucket, start=start, end=end)
