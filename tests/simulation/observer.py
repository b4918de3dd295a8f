"""Holds every answer of the server, at the moment it is given, to the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tests.simulation.history import History, TabletHistory, held, require, rows_of, shown
from tests.simulation.scheduler import Scheduler

from lakehead.format.frame import decode_body
from lakehead.protocol import messages as m
from lakehead.types import TableSchema, TabletKey

Floors = Mapping[TabletKey, int]


@dataclass(frozen=True)
class Seen:
    """What was known when a request arrived.

    Attributes:
        floors: what readers of the table had been shown.
        epochs: the newest epochs of the table's named writers.
    """

    floors: Floors
    epochs: Mapping[bytes, int]


class Observer:
    """Sees requests when they are sent, and answers when they leave the server."""

    def __init__(self, scheduler: Scheduler, history: History) -> None:
        self._scheduler = scheduler
        self._history = history

    def sending(self, request: m.Request[object], attachments: Sequence[pa.Buffer]) -> None:
        """A client is about to send this, for the first time or again."""
        if isinstance(request, m.Write):
            with self._scheduler.judging():
                self._history.sent(request, attachments)

    def before(self, request: m.Request[object]) -> Seen:
        """A request has arrived."""
        table_id = getattr(request, "table_id", None)
        if isinstance(request, m.OpenLeases):
            (table_id,) = {t.table_id for t in request.tables}
        floors = self._history.floors(table_id) if table_id in self._history.tables else {}
        return Seen(floors, dict(self._history.epochs.get(table_id or "", {})))

    def after(
        self,
        request: m.Request[object],
        attachments: Sequence[pa.Buffer],
        reply: m.Reply,
        out: Sequence[pa.Buffer],
        seen: Seen,
    ) -> None:
        """The server has answered."""
        floors = seen.floors
        with self._scheduler.judging():
            if isinstance(request, m.Write) and isinstance(reply, m.WriteReply):
                stamps = [decode_body(b).stamp for b in attachments]
                late = [s.epoch for s in stamps if 0 < s.epoch < seen.epochs.get(s.writer_id, 0)]
                require(not late, f"a write of epoch {late} is acknowledged, {seen.epochs} were there when it came")
                self._history.answered(request, attachments, reply)
            elif isinstance(request, m.OpenWriter) and isinstance(reply, m.WriterReply):
                writer, epochs = request.writer_id, self._history.epochs.setdefault(request.table_id, {})
                before = seen.epochs.get(writer, 0)
                require(reply.epoch > before, f"epoch {reply.epoch} was given after {before}")
                self._history.opened(request, reply)
                epochs[writer] = max(epochs.get(writer, 0), reply.epoch)
            elif isinstance(request, m.Watermarks) and isinstance(reply, m.WatermarksReply):
                self._watermarks(request.table_id, reply.tablets, floors, synced=request.sync)
            elif isinstance(request, m.OpenLeases) and isinstance(reply, m.LeasesReply):
                for asked, held in zip(request.tables, reply.leases, strict=True):
                    self._watermarks(asked.table_id, held.tablets, floors, synced=False)
            elif isinstance(request, m.Lookup):
                self._lookup(request, attachments, out, floors)

    def _watermarks(self, table_id: str, states: Sequence[m.TabletState], floors: Floors, *, synced: bool) -> None:
        for state in states:
            tablet = self._history.tablet(table_id, state.key)
            end = state.high_watermark
            tablet.see(end, floors.get(state.key, 0), "the high watermark")
            require(not synced or end <= tablet.durable_end, f"{tablet.name}: {end} was to be synced, and is not")
            require(state.log_start <= end, f"{tablet.name} starts at {state.log_start}, after its end {end}")

    def _lookup(
        self, request: m.Lookup, attachments: Sequence[pa.Buffer], out: Sequence[pa.Buffer], floors: Floors
    ) -> None:
        desc = self._history.tables[request.table_id]
        definition = self._history.definition(request.table_id, request.schema_id)
        schema = pa.schema([desc.schema.field(c) for c in desc.primary_key])
        (asked,) = attachments
        keys, found = rows_of(pa.ipc.read_record_batch(asked, schema)), {}
        if out[0].size:
            rows = [held(r, definition) for r in rows_of(pa.ipc.read_record_batch(out[0], definition.columns))]
            found = dict(zip(np.frombuffer(out[1], np.int64).tolist(), rows, strict=True))
        at = 0
        for ref, count in zip(request.tablets, request.counts, strict=True):
            start, at = at, at + count
            answer = [found.get(n) for n in range(start, at)]
            tablet = self._history.tablet(request.table_id, ref.key)
            self._state_seen(tablet, keys[start:at], answer, floors.get(ref.key, 0), definition)

    @staticmethod
    def _state_seen(
        tablet: TabletHistory,
        keys: list[tuple[object, ...]],
        found: Sequence[object],
        floor: int,
        definition: TableSchema,
    ) -> None:
        """The rows found must be those of one moment between the request's arrival and now."""
        for end in range(floor, tablet.readable_end + 1):
            state = tablet.state_at(end)
            rows = [tablet.records[state[k]].row if k in state else None for k in keys]
            if found == [None if r is None else held(shown(r, definition), definition) for r in rows]:
                tablet.floor = max(tablet.floor, end)
                return
        end = tablet.readable_end
        raise AssertionError(
            f"{tablet.name}: lookups of {keys} found {found}, which no state in [{floor}, {end}] holds"
        )
