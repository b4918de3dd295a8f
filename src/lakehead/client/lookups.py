"""Rows of a keyed table by their keys, from the servers on which their tablets live."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from lakehead.client.patience import ask
from lakehead.client.received import found_places, found_row, found_rows
from lakehead.client.routes import Routes, by_server
from lakehead.client.row_routing import Rows, halves, route, tablet_of
from lakehead.env import Clock
from lakehead.errors import CorruptionError, InvalidRequestError, LimitExceededError, NotLeaderError
from lakehead.format.arrays import places_of, to_arrow
from lakehead.format.plain import PlainKey, has_plain_rows, plain_key
from lakehead.protocol import messages as m
from lakehead.protocol.messages import Endpoint
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
        return self._in_parts(keys, lambda some: self._lookup_part(some, list(route(self._desc, some))))

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

    def _lookup_part(self, keys: pa.RecordBatch, parts: Sequence[tuple[TabletKey, Rows | None]]) -> pa.Table:
        answers = self._answers(keys, parts, [])
        assert answers is not None
        batches, places = [], []
        for asked, rows, found in answers:
            if rows.size:
                batches.append(found_rows(rows, self._desc.schema))
                count = keys.num_rows if asked is None else len(asked)
                at = found_places(found, rows=batches[-1].num_rows, asked=count)
                places.append(at if asked is None else asked[at])
        schema = self._desc.schema
        if len(parts) <= 1 or not batches:
            return pa.Table.from_batches(batches, schema)
        order = to_arrow(places_of(np.concatenate(places), keys.num_rows))
        if len(batches) == 1:  # which takes half as long as to take from a table
            return pa.Table.from_batches([batches[0].take(order)], schema)
        return pa.Table.from_batches(batches, schema).take(order)

    def as_of(self, keys: pa.RecordBatch, ends: Mapping[TabletKey, int]) -> pa.Table | None:
        """Rows of keys that were live where the logs ended so; None when one of them may have changed since, or they
        are too many bytes. A tablet without an end had none."""
        parts = [(key, rows) for key, rows in route(self._desc, keys) if key in ends]
        try:
            answers = self._answers(keys, parts, [], [ends[key] for key, _ in parts]) if parts else []
        except LimitExceededError:
            return None
        return None if answers is None else self._rows(answers)

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
            return self._prefix_part(some, list(route(desc, some)))

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
        parts: Sequence[tuple[TabletKey, Rows | None]],
        *,
        bytes_max: int | None = None,
    ) -> pa.Table:
        asked = prefixes.select(list(self._desc.prefix_key))
        answers = self._answers(asked, parts, list(self._desc.prefix_key), bytes_max=bytes_max)
        assert answers is not None
        return self._rows(answers)

    def _rows(self, answers: Sequence[_Answer]) -> pa.Table:
        schema = self._desc.schema
        return pa.Table.from_batches([found_rows(rows, schema) for _, rows, _ in answers if rows.size], schema)

    def _answers(
        self,
        keys: pa.RecordBatch,
        parts: Sequence[tuple[TabletKey, Rows | None]],
        prefix: list[str],
        as_of: list[int] | None = None,
        bytes_max: int | None = None,
    ) -> list[_Answer] | None:
        """What all servers answer that have some of these tablets; None when one of them is not exact."""
        table_id = self._desc.table_id
        while True:
            try:
                answers = []
                for endpoint, places in by_server(self._routes, table_id, [key for key, _ in parts]):
                    ends = None if as_of is None else [as_of[i] for i in places]
                    answer = self._answer(endpoint, keys, [parts[i] for i in places], prefix, ends, bytes_max)
                    if answer is None:
                        return None
                    answers.append(answer)
                return answers
            except NotLeaderError as e:
                if not self._routes.moved(e):
                    raise

    def _answer(
        self,
        endpoint: Endpoint,
        keys: pa.RecordBatch,
        parts: Sequence[tuple[TabletKey, Rows | None]],
        prefix: list[str],
        as_of: list[int] | None,
        bytes_max: int | None,
    ) -> _Answer | None:
        desc = self._desc
        some = [rows for _, rows in parts if rows is not None]
        asked = np.concatenate(some) if some else None
        request = m.Lookup(
            table_id=desc.table_id,
            folder_id=self._folder_id,
            schema_id=desc.schema_id,
            tablets=[m.TabletRef.of(key) for key, _ in parts],
            counts=[keys.num_rows if rows is None else len(rows) for _, rows in parts],
            prefix=prefix,
            as_of=as_of,
            bytes_max=bytes_max,
        )
        sent = keys if asked is None else keys.take(to_arrow(asked))
        reply, found = ask(endpoint, self._clock, request, [sent.serialize()])
        if not reply.exact:
            return None
        if len(found) != 2:
            raise CorruptionError(f"the server answered a lookup with {len(found)} parts, not with rows and places")
        return asked, found[0], found[1]


_Answer: TypeAlias = tuple[Rows | None, pa.Buffer, pa.Buffer]
"""Of one server: the keys that it was asked for, None for all, the rows found, and the places of theirs among those."""


def _is_too_much(e: LimitExceededError) -> bool:
    """Whether fewer keys are answered."""
    return "answer_bytes_max" in e.context
