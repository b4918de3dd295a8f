"""The load: threads that write, read back and scan, note what was acknowledged and pause so that all can be checked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from tests.crash.history import (
    Change,
    Key,
    KeyedHistory,
    LogHistory,
    Values,
    WrongDataError,
    differences,
    keyed_rows,
    log_rows,
    partition_of,
    require,
)

import lakehead as lh
from lakehead.api.table import handle_of
from lakehead.client.batch_writer import BatchWriter

QUIET_SECONDS = 60.0
_NAMED_CYCLE = 7


class Gate:
    """Lets writers through while it is open; `shut` returns once none is inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._over = False
        self._inside = 0
        self.turn = 0
        """How often it was opened."""

    def enter(self, *, after_turn: int = -1) -> bool:
        """Wait until it is open, later than ``after_turn``; False when all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or (self._open and self.turn > after_turn))
            self._inside += not self._over
            return not self._over

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        with self._changed:
            self._open = True
            self.turn += 1
            self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._open = False
            quiet = self._changed.wait_for(lambda: self._inside == 0, QUIET_SECONDS)
        require(quiet, "a client call has not returned a minute after the server came back")

    def end(self) -> None:
        with self._changed:
            self._open, self._over = False, True
            self._changed.notify_all()


@dataclass(frozen=True)
class Load:
    """How much is written.

    Attributes:
        pause: seconds between the calls of one thread.
        rows: of a call, at most.
        keys: of each keyed writer.
        abandon: share of calls after which a named writer is left without being closed.
    """

    pause: float = 0.02
    rows: int = 12
    keys: int = 60
    abandon: float = 0.05


class Actor(threading.Thread):
    """One thread of the load: calls `act` again and again while the gate is open."""

    def __init__(self, gate: Gate, name: str, seed: int, pause: float) -> None:
        super().__init__(name=name, daemon=True)
        self.gate = gate
        self.random = random.Random(f"{seed} {name}")
        self.problem: BaseException | None = None
        self.unanswered = 0
        """Calls whose outcome stayed unknown."""
        self._pause = pause
        self._waiter = threading.Event()
        self._turn = -1

    def act(self) -> bool:
        """One step; False when nothing more may be done before the next check."""
        raise NotImplementedError

    def rest(self) -> None:
        """Come to a rest, so that all that was sent is answered; the gate is about to shut."""

    def run(self) -> None:
        while self.gate.enter(after_turn=self._turn):
            try:
                while self.gate.is_open:
                    if not self.act():
                        self._turn = self.gate.turn
                        break
                    self._waiter.wait(self._pause * self.random.uniform(0.2, 1.8))
                self.rest()
            except BaseException as e:
                self.problem = e
                return
            finally:
                self.gate.leave()


UNKNOWN = (lh.UnavailableError, lh.OutcomeUnknownError, lh.ClosedError)
"""What a call on a server that dies or stops may raise; the write may have landed or not."""


class LogAppender(Actor):
    """Appends through `Table.append`, which sends again by itself."""

    def __init__(self, gate: Gate, table: lh.Table, history: LogHistory, writer: int, seed: int, load: Load) -> None:
        super().__init__(gate, f"append {table.name} {writer}", seed, load.pause)
        self.table, self.history, self.writer, self.load = table, history, writer, load

    def act(self) -> bool:
        numbers = self.history.begin(self.writer, self.random.randint(1, self.load.rows))
        try:
            result = self.table.append(log_rows(self.writer, numbers))
        except UNKNOWN:
            self.unanswered += 1
            return False
        self.history.answered(self.writer, result.offsets)
        return True


class NamedAppender(Actor):
    """Appends through a named, pipelined writer; now and then it is left as it is, like that of an application that
    died, and a successor goes on from `last_sequence`."""

    def __init__(self, gate: Gate, table: lh.Table, history: LogHistory, writer: int, seed: int, load: Load) -> None:
        super().__init__(gate, f"pipeline {table.name} {writer}", seed, load.pause)
        self.table, self.history, self.writer, self._abandon = table, history, writer, load.abandon
        self.resumed = 0
        self._pipeline: lh.Writer | None = None
        self._sequence = 0
        self._sent = 0

    def _numbers(self, sequence: int) -> range:
        whole, part = divmod(sequence, _NAMED_CYCLE)
        start = whole * _NAMED_CYCLE * (_NAMED_CYCLE + 1) // 2 + part * (part + 1) // 2
        return range(start, start + part + 1)

    def act(self) -> bool:
        if self._pipeline is None and not self._resume():
            return True
        assert self._pipeline is not None
        choice = self.random.random()
        try:
            self._pipeline.append(log_rows(self.writer, self._numbers(self._sequence)))
            self._sequence += 1
            self._sent = max(self._sent, self._sequence)
            if choice < 0.1:
                self._pipeline.flush()
            elif choice < 0.13:
                self._pipeline.close()
                self._pipeline = None
            elif choice < 0.13 + self._abandon:
                self._pipeline = None
        except UNKNOWN:
            self.unanswered += 1
            self._pipeline = None
        return True

    def _resume(self) -> bool:
        try:
            self._pipeline = self.table.writer(f"etl-{self.writer}")
        except UNKNOWN:
            return False
        last = self._pipeline.last_sequence
        require(last < self._sent, f"{self.name}: resumed after batch {last} of {self._sent}")
        self.resumed += 1
        self._sequence = last + 1
        return True

    def rest(self) -> None:
        # A successor begins where its predecessor is known to have come to, which may have come further.
        pause = threading.Event()
        while True:
            try:
                if self._pipeline is None and not self._resume():
                    pause.wait(0.02)
                    continue
                assert self._pipeline is not None
                while self._sequence < self._sent:
                    self._pipeline.append(log_rows(self.writer, self._numbers(self._sequence)))
                    self._sequence += 1
                self._pipeline.flush()
                break
            except UNKNOWN:
                self._pipeline = None
        self.history.sent_through(self.writer, self._numbers(self._sent).start)


class KeyedWriter(Actor):
    """Upserts, partial updates and deletes of its own keys, read back now and then.

    An impatient one does not send again: what was under way when the server died may have landed or not.
    """

    def __init__(
        self, gate: Gate, table: lh.Table, history: KeyedHistory, writer: int, seed: int, load: Load, *, patient: bool
    ) -> None:
        super().__init__(gate, f"upsert {table.name} {writer}", seed, load.pause)
        self.table, self.history, self.writer, self.load = table, history, writer, load
        self._sender: BatchWriter | None = None
        self._patient = patient
        self._version = 0
        self._keys = [(partition_of(k), writer * 1_000_000 + k) for k in range(load.keys)]
        self.lookups = 0

    def act(self) -> bool:
        change = self._change()
        self.history.begin(self.writer, change)
        try:
            self._send(change)
        except UNKNOWN:
            self.unanswered += 1
            self._sender = None
            return False
        self.history.answered(self.writer)
        if self.random.random() < 0.3:
            self._look_up()
        return True

    def _change(self) -> Change:
        keys = self.random.sample(self._keys, self.random.randint(1, min(self.load.rows, len(self._keys))))
        choice = self.random.random()
        if choice < 0.15:
            return Change("delete", tuple({"p": p, "k": k} for p, k in keys))
        rows = []
        for p, k in keys:
            self._version += 1
            row: dict[str, Any] = {"p": p, "k": k, "v": self._version}
            if choice > 0.35:
                row["a"] = self.random.choice([None, self._version, -self._version])
            if choice < 0.35 or choice > 0.55:
                row["b"] = self.random.choice([None, "", f"value {self._version} that does not fit inline"])
            rows.append(row)
        return Change("upsert", tuple(rows))

    def _send(self, change: Change) -> None:
        if self._patient:
            write = self.table.delete if change.kind == "delete" else self.table.upsert
            write(change.table())
            return
        client = handle_of(self.table)
        if self._sender is None:
            self._sender = BatchWriter(
                client.desc, client._routes, client.env.clock, writer_id=self.random.randbytes(16), retry_seconds=0.0
            )
        rows = change.table()
        names = list(client.desc.primary_key) if change.kind == "delete" else rows.column_names
        schema = pa.schema([client.desc.schema.field(c) for c in names])
        batch = pa.RecordBatch.from_arrays([rows[c].combine_chunks() for c in names], schema=schema)
        self._sender.send(self._sender.prepare(change.kind, batch))

    def _look_up(self) -> None:
        keys = self.random.sample(self._keys, min(20, len(self._keys)))
        try:
            rows = self.table.lookup(
                [{c: v for c, v in zip("pk", key, strict=True) if c in self.table.primary_key} for key in keys]
            )
        except UNKNOWN:
            return
        expected = {key: self.history.live[key] for key in keys if key in self.history.live}
        wrong = differences(keyed_rows(rows), expected)
        require(not wrong, f"{self.name}: a lookup after the answer differs (found, expected): {wrong}")
        self.lookups += 1


class Scanner(Actor):
    """Union scans under load: every acknowledged row, each once."""

    def __init__(
        self,
        gate: Gate,
        logs: Mapping[str, tuple[lh.Table, LogHistory]],
        keyed: Mapping[str, tuple[lh.Table, KeyedHistory]],
        seed: int,
        pause: float,
    ) -> None:
        super().__init__(gate, "scan", seed, pause)
        self._scans: list[Callable[[], None]] = [
            *(lambda t=t, h=h: self._scan_log(t, h) for t, h in logs.values()),
            *(lambda t=t, h=h: self._scan_keyed(t, h) for t, h in keyed.values()),
        ]
        self.scans = 0

    def act(self) -> bool:
        try:
            self.random.choice(self._scans)()
            self.scans += 1
        except UNKNOWN:
            return True
        return True

    def _scan_log(self, table: lh.Table, history: LogHistory) -> None:
        acked = history.answered_rows
        count = table.scan().count()
        require(count >= acked, f"{table.name}: a scan counts {count} of {acked} acknowledged rows")

    def _scan_keyed(self, table: lh.Table, history: KeyedHistory) -> None:
        acked = history.snapshot()
        rows = table.scan().to_arrow()
        found = keyed_rows(rows)
        require(len(found) == rows.num_rows, f"{table.name}: a scan has {rows.num_rows} rows of {len(found)} keys")
        self._require_newer(table, acked, found)

    @staticmethod
    def _require_newer(table: lh.Table, acked: Mapping[Key, Values], found: Mapping[Key, Values]) -> None:
        old = {k: (v, acked[k]) for k, v in found.items() if k in acked and v[0] < acked[k][0]}
        if old:
            raise WrongDataError(f"{table.name}: a scan shows rows older than what was acknowledged: {old}")
