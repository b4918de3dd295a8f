"""Rows of a keyed table by their keys, from the servers on which their tablets live."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import numpy as np
import pyarrow as pa

from lakehead.client.patience import ask
from lakehead.client.received import found_places, found_row, found_rows
from lakehead.client.routes import Routes, by_server
from lakehead.client.row_routing import Rows, halves, parts_of, route, tablet_of
from lakehead.env import Clock
from lakehead.errors import CorruptionError, InvalidRequestError, LimitExceededError, NotLeaderError
from lakehead.format.arrays import places_of, to_arrow
from lakehead.format.plain import PlainKey, has_plain_rows, plain_key
from lakehead.protocol import messages as m
from lakehead.types import TableDescriptor, TabletKey

_LOOKUP_KEYS = 1 << 16
KEYS_MAX, PREFIX_BYTES_MAX = 1000, 1 << 20
"""The key index has whole rows, which are held as long as the read is; lake files are read column by column: for more
keys, or more bytes of the rows of prefixes, a scan is as quick."""


class Lookups:
    """Thread-safe. Keys given here were conformed to the table's schema; errors are those of the servers.

    Attributes:
        plain: whether the table has plain rows.
    """

    def __init__(self, desc: TableDescriptor, routes: Routes, clock: Clock, folder_id: str = "") -> None:
        self._desc = desc
        self._folder_id = folder_id
        self._routes = routes
        self._clock = clock
        self.plain = has_plain_rows(desc.schema)

    @functools.cached_property
    def prefix_columns(self) -> pa.Schema:
        """The partition columns and the prefix that rows are found by, in key order; none where that is not offered."""
        desc = self._desc
        asked = (*desc.partition_by, *desc.prefix_key) if desc.prefix_key else ()
        return pa.schema([desc.schema.field(c) for c in desc.primary_key if c in asked])

    def by_key(self, keys: pa.RecordBatch) -> pa.Table:
        """Rows of the keys that exist, in the order asked; ``keys`` holds the key columns in key order."""
        return self._in_parts(keys, lambda some: self._lookup_part(some, route(self._desc, some)))

    def _in_parts(self, keys: pa.RecordBatch, look: Callable[[pa.RecordBatch], pa.Table]) -> pa.Table:
        """What is found for as many keys at once as one answer holds, part after part.

        Raises:
            LimitExceededError: what is found for one of them is more.
        """
        asked = deque(keys.slice(at, _LOOKUP_KEYS) for at in range(0, keys.num_rows, _LOOKUP_KEYS))
        parts = []
        while asked:
            some = asked.popleft()
            try:
                parts.append(look(some))
            except LimitExceededError as e:
                if some.num_rows == 1 or not _is_too_much(e):
                    raise
                asked.extendleft(reversed(halves(some)))
        return pa.concat_tables([self._desc.schema.empty_table(), *parts]) if len(parts) != 1 else parts[0]

    def at_once(self, keys: pa.RecordBatch) -> pa.Table | None:
        """Rows of the keys that exist, as of one moment; None where several tablets would have them, which are asked
        one after the other, or they are too many, or too many bytes for one answer."""
        parts = self._in_one_tablet(keys)
        try:
            return self._lookup_part(keys, parts) if parts else None
        except LimitExceededError as e:
            if not _is_too_much(e):
                raise
            return None

    def prefix_at_once(self, prefixes: pa.RecordBatch) -> pa.Table | None:
        """Rows whose partition columns and bucket key equal one of these, as of one moment; None where several tablets
        would have them, or a scan is as quick.

        Args:
            prefixes: of `prefix_columns`.
        """
        parts = self._in_one_tablet(prefixes)
        try:
            return self._prefix_part(prefixes, parts, bytes_max=PREFIX_BYTES_MAX) if parts else None
        except LimitExceededError as e:
            if not _is_too_much(e):
                raise
            return None

    def _in_one_tablet(self, keys: pa.RecordBatch) -> list[tuple[TabletKey, Rows | None]]:
        """The tablet that has all of the keys; none where there is no such, or they are many."""
        parts = list(route(self._desc, keys)) if 0 < keys.num_rows <= KEYS_MAX else []
        return parts if len(parts) == 1 else []

    def _lookup_part(self, keys: pa.RecordBatch, parts: Iterable[tuple[TabletKey, Rows | None]]) -> pa.Table:
        refs, places, attachments = _asked(keys, parts)
        out = self._answers(refs, attachments, [])
        assert out is not None
        batches, order = [], []
        for i, asked in enumerate(places):
            if out[2 * i].size:
                batches.append(found_rows(out[2 * i], self._desc.schema))
                count = keys.num_rows if asked is None else len(asked)
                found = found_places(out[2 * i + 1], rows=batches[-1].num_rows, asked=count)
                order.append(found if asked is None else asked[found])
        table = pa.Table.from_batches(batches, self._desc.schema)
        return table if len(batches) <= 1 else table.take(to_arrow(places_of(np.concatenate(order), keys.num_rows)))

    def as_of(self, keys: pa.RecordBatch, ends: Mapping[TabletKey, int]) -> pa.Table | None:
        """Rows of keys that were live where the logs ended so; None when one of them may have changed since, or they
        are too many bytes. A tablet without an end had none."""
        parts = [(key, rows) for key, rows in route(self._desc, keys) if key in ends]
        refs, _, attachments = _asked(keys, parts)
        try:
            out = self._answers(refs, attachments, [], [ends[key] for key, _ in parts]) if refs else []
        except LimitExceededError:
            return None
        if out is None:
            return None
        batches = [found_rows(b, self._desc.schema) for b in out[::2] if b.size]
        return pa.Table.from_batches(batches, self._desc.schema)

    def plain_key(self, key: object) -> PlainKey | None:
        """The key that a user gave as `row` takes it; None: `by_key` has to look it up."""
        return plain_key(key, self._desc.key_columns) if self.plain else None

    def row(self, key: PlainKey) -> list[Any] | None:
        """The plain row of a plain key; None when there is none."""
        desc = self._desc
        tablet = tablet_of(desc, dict(zip(desc.primary_key, key, strict=True)))
        request = m.Get(
            table_id=desc.table_id,
            folder_id=self._folder_id,
            schema_id=desc.schema_id,
            tablet=m.TabletRef.of(tablet),
            key=list(key),
        )
        while True:
            try:
                return found_row(
                    ask(self._routes.leader(desc.table_id, tablet), self._clock, request)[0].row, desc.schema
                )
            except NotLeaderError as e:
                if not self._routes.moved(e):
                    raise

    def by_prefix(self, prefixes: pa.RecordBatch) -> pa.Table:
        """Rows whose partition columns and bucket key equal one of these; in no particular order.

        Raises:
            InvalidRequestError: the bucket key is no prefix of the primary key.
            LimitExceededError: one of them has more rows than an answer holds.
        """
        desc = self._desc

        def look(some: pa.RecordBatch) -> pa.Table:
            return self._prefix_part(some, route(desc, some))

        if not desc.prefix_key:
            raise InvalidRequestError(
                f"prefix lookups on {desc.path} are not possible: its bucket key {list(desc.bucket_key)} is not a"
                f" proper prefix of its primary key; create the table with bucket_key= set to the leading key columns"
            )
        if prefixes.num_rows <= _LOOKUP_KEYS:
            try:
                return look(prefixes)
            except LimitExceededError as e:
                if not _is_too_much(e):
                    raise
        # A server finds the rows of a prefix once for each part that has it.
        each = pa.Table.from_batches([prefixes]).group_by(prefixes.schema.names, use_threads=False).aggregate([])
        return self._in_parts(each.combine_chunks().to_batches()[0], look)

    def _prefix_part(
        self,
        prefixes: pa.RecordBatch,
        parts: Iterable[tuple[TabletKey, Rows | None]],
        *,
        bytes_max: int | None = None,
    ) -> pa.Table:
        desc = self._desc
        refs, _, attachments = _asked(prefixes.select(list(desc.prefix_key)), parts)
        out = self._answers(refs, attachments, list(desc.prefix_key), bytes_max=bytes_max)
        assert out is not None
        batches = [found_rows(b, desc.schema) for b in out[::2] if b.size]
        return pa.Table.from_batches(batches, desc.schema)

    def _answers(
        self,
        refs: list[m.TabletRef],
        attachments: list[pa.Buffer],
        prefix: list[str],
        as_of: list[int] | None = None,
        bytes_max: int | None = None,
    ) -> list[pa.Buffer] | None:
        """The attachments of the replies of all servers, two for each tablet, in the order of ``refs``; None when one
        of them is not exact."""
        table_id = self._desc.table_id
        while True:
            try:
                if len(servers := self._routes.servers(table_id)) == 1:
                    reply, found = ask(
                        servers[0], self._clock, self._request(refs, prefix, as_of, bytes_max), attachments
                    )
                    return _two_each(found, refs) if reply.exact else None
                out = [pa.py_buffer(b"")] * (2 * len(refs))
                for endpoint, places in by_server(self._routes, table_id, [ref.key for ref in refs]):
                    at = None if as_of is None else [as_of[i] for i in places]
                    request = self._request([refs[i] for i in places], prefix, at, bytes_max)
                    reply, found = ask(endpoint, self._clock, request, [attachments[i] for i in places])
                    if not reply.exact:
                        return None
                    _two_each(found, places)
                    for n, i in enumerate(places):
                        out[2 * i : 2 * i + 2] = found[2 * n : 2 * n + 2]
                return out
            except NotLeaderError as e:
                if not self._routes.moved(e):
                    raise

    def _request(
        self, refs: list[m.TabletRef], prefix: list[str], as_of: list[int] | None, bytes_max: int | None
    ) -> m.Lookup:
        desc = self._desc
        return m.Lookup(
            table_id=desc.table_id,
            folder_id=self._folder_id,
            schema_id=desc.schema_id,
            tablets=refs,
            prefix=prefix,
            as_of=as_of,
            bytes_max=bytes_max,
        )


def _asked(
    keys: pa.RecordBatch, parts: Iterable[tuple[TabletKey, Rows | None]]
) -> tuple[list[m.TabletRef], list[Rows | None], list[pa.Buffer]]:
    """The tablets that `route` found for these keys, the places of each one's, and its keys as they are sent."""
    tablets, places = [], []
    for key, rows in parts:
        tablets.append(m.TabletRef.of(key))
        places.append(rows)
    return tablets, places, [part.serialize() for part in parts_of(keys, places)]


def _is_too_much(e: LimitExceededError) -> bool:
    """Whether fewer keys are answered."""
    return "answer_bytes_max" in e.context


def _two_each(parts: list[pa.Buffer], tablets: Sized) -> list[pa.Buffer]:
    if len(parts) != 2 * len(tablets):
        raise CorruptionError(f"the server answered for {len(parts) / 2:g} tablets, and was asked for {len(tablets)}")
    return parts
