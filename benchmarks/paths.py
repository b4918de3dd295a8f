"""The figures of `python -m benchmarks --only paths`: what a call costs on each path, and what has how much of it.

Each path is called unwatched, for its time and its CPU, and then with the functions of its phases watched
(`benchmarks.probes`), in turns. Shares are those of the watched calls of the middle half, and are told of the unwatched
median. Beside a path stands what the part below takes alone, in the same turns.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.flight as fl
import pyarrow.parquet as pq

import lakehead as lh
from benchmarks.path_server import MESSAGE, TOKEN, PathServer, bare_flight, message, path_server, socket_server
from benchmarks.phases import PATHS, Phase, functions_of
from benchmarks.probes import REST, Mark, Probes, divided
from lakehead.benchmarks.events import BATCH_ROWS, Figure, seconds
from lakehead.benchmarks.run import warm_up

LOOKUP_KEYS = 1000
_ROUND_ROWS = 40
_ROUNDS = 4
_SECONDS = 0.2
_CALLS_MIN, _CALLS_MAX = 5, 100
_COLD_CALLS = 2
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Limit:
    """The part below a path, alone."""

    name: str
    work: Callable[[], object]


@dataclass(frozen=True)
class Case:
    """How a path is called.

    Attributes:
        ready: makes what the next call takes; not timed.
        call: the call; returns when it ended, if that is not when it returns.
        server: where a part of it runs, if not here.
    """

    call: Callable[[Any], int | None]
    ready: Callable[[], object] = lambda: None
    limit: Limit | None = None
    server: PathServer | None = None


def paths(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """All paths, in the order of `PATHS`."""
    rows = sum(b.num_rows for b in batches)
    numbers = {
        "batch": f"{batches[0].num_rows:,}",
        "keys": f"{min(rows, LOOKUP_KEYS):,}",
        "rows": f"{rows:,}",
    }
    with contextlib.ExitStack() as stack:
        cases = _Cases(stack, base, batches).all()
        for name, phases in PATHS.items():
            yield from _measured(name.format(**numbers), phases, cases[name]())


class _Cases:
    """What each path is called with; tables are made when the first path needs them."""

    def __init__(self, stack: contextlib.ExitStack, base: str, batches: Sequence[pa.RecordBatch]) -> None:
        self._base = base
        self._batches = batches
        self._rows = sum(b.num_rows for b in batches)
        self._one = batches[0].slice(0, 1)
        self._next_key = self._rows
        self._stack = stack
        self._here = stack.enter_context(lh.connect(f"{base}/embedded"))
        self._server = stack.enter_context(path_server(f"{base}/server"))
        self._there = stack.enter_context(lh.connect(self._server.uri, token=TOKEN))
        self._flight = stack.enter_context(bare_flight())
        for con in (self._here, self._there):
            warm_up(con, batches)
            loaded = con.create_table("paths.log", self._one.schema, durability="os")
            keyed = con.create_table("paths.keyed", self._one.schema, primary_key=["event_id"], durability="os")
            for batch in batches:
                loaded.append(batch)
                keyed.upsert(batch)

    def all(self) -> dict[str, Callable[[], Case]]:
        """Makes the case of each of `PATHS`."""
        batch, here, there, server = self._batches[0], self._here, self._there, self._server
        append, lookup, scan = self._append, self._lookup, self._scan
        return {
            "append of 1 row, embedded, os": lambda: append(here, self._one, "os"),
            "append of 1 row, embedded, sync": lambda: append(here, self._one, "sync"),
            "append of 1 row, socket, sync": self._append_by_socket,
            "append of 1 row, server, sync": lambda: append(there, self._one, "sync", server),
            "append of {batch} rows, embedded, os": lambda: append(here, batch, "os"),
            "append of {batch} rows, embedded, sync": lambda: append(here, batch, "sync"),
            "append of {batch} rows, server, sync": lambda: append(there, batch, "sync", server),
            "upsert of {batch} new keys, embedded, sync": lambda: self._upsert(self._new_keys),
            "upsert of {batch} existing keys, embedded, sync": lambda: self._upsert(lambda: batch),
            "get of 1 key, embedded": lambda: self._get(here),
            "get of 1 key, server": lambda: self._get(there, server),
            "lookup of {keys} keys, embedded": lambda: lookup(here),
            "lookup of {keys} keys, server": lambda: lookup(there, server),
            "scan of {rows} rows, all columns, embedded": lambda: scan(here, None),
            "scan of {rows} rows, one column, embedded": lambda: scan(here, ["price"]),
            "scan of {rows} rows, all columns, server": lambda: scan(there, None, server),
            "scan of {rows} rows, one column, server": lambda: scan(there, ["price"], server),
            "delivery of 1 row to a subscriber, server, sync": self._delivery,
            "tiering round of 40 rows, embedded": self._round,
            "union read of {rows} keys, one column, 10 % superseded, embedded": self._union,
            "SQL statement that selects 1 row, embedded": self._sql,
        }

    # ---- writes -----------------------------------------------------------------------------------------------

    def _append(self, con: lh.Connection, rows: pa.RecordBatch, how: str, server: PathServer | None = None) -> Case:
        name = f"paths.append_{rows.num_rows}_{how}"
        table = con.create_table(name, rows.schema, durability=how)
        limit = self._beside_append(rows.serialize().size, synced=how == "sync", far=server is not None)
        return Case(lambda _: _done(table.append(rows)), limit=limit, server=server)

    def _append_by_socket(self) -> Case:
        folder = f"{self._base}/attached"
        server = self._stack.enter_context(socket_server(folder))
        return self._append(self._stack.enter_context(lh.connect(folder)), self._one, "sync", server)

    def _upsert(self, ready: Callable[[], pa.RecordBatch]) -> Case:
        name = "paths.upserts"
        key = [self._one.schema.names[0]]
        table = self._here.create_table(name, self._one.schema, primary_key=key, if_not_exists=True)
        table.upsert(self._batches[0])
        return Case(
            lambda batch: _done(table.upsert(batch)),
            ready,
            self._file(self._batches[0].serialize().size, synced=True),
        )

    def _new_keys(self) -> pa.RecordBatch:
        batch = self._batches[0]
        keys = np.arange(self._next_key, self._next_key + batch.num_rows)
        self._next_key += batch.num_rows
        return pa.RecordBatch.from_arrays([pa.array(keys), *batch.columns[1:]], schema=batch.schema)

    def _beside_append(self, size: int, *, synced: bool, far: bool) -> Limit:
        file = self._file(size, synced=synced)
        if not far:
            return file
        there = self._round_trip(size, 100)

        def work() -> None:
            there.work()
            file.work()

        return Limit("bare Flight round trip, writev and fdatasync", work)

    def _file(self, size: int, *, synced: bool) -> Limit:
        """Write as many bytes at the end of a file, as a log does."""
        at = os.open(f"{self._base}/beside", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._stack.callback(os.close, at)
        data = bytes(size)

        def write() -> None:
            os.writev(at, [data])
            if synced:
                os.fdatasync(at)  # noqa: TID251 - the limit is the system's, not Storage's

        return Limit("bare writev and fdatasync" if synced else "bare writev", write)

    # ---- questions by key -------------------------------------------------------------------------------------

    def _get(self, con: lh.Connection, server: PathServer | None = None) -> Case:
        table, keys = con.table("paths.keyed"), self._some_keys()
        limit = None if server is None else self._round_trip(100, 100)
        return Case(lambda key: _done(table.get(key)), lambda: int(next(keys)[0]), limit, server)

    def _lookup(self, con: lh.Connection, server: PathServer | None = None) -> Case:
        table, keys = con.table("paths.keyed"), self._some_keys()
        answer = self._batches[0].slice(0, LOOKUP_KEYS).serialize().size
        limit = None if server is None else self._round_trip(8 * LOOKUP_KEYS, answer)
        return Case(lambda asked: _done(table.lookup(asked)), lambda: pa.table({"event_id": next(keys)}), limit, server)

    def _some_keys(self) -> Iterator[Any]:
        random = np.random.default_rng(3)
        while True:
            yield random.choice(self._rows, min(self._rows, LOOKUP_KEYS), replace=False)

    def _round_trip(self, ask: int, answer: int) -> Limit:
        """Bare Flight: so many bytes there, and so many back."""
        writer, reader = self._flight.do_exchange(fl.FlightDescriptor.for_path("bare"))
        self._stack.callback(writer.done_writing)
        writer.begin(MESSAGE)
        asked, told = message(ask), str(answer).encode()

        def work() -> None:
            writer.write_with_metadata(asked, told)
            reader.read_chunk()

        return Limit("bare Flight round trip", work)

    # ---- scans ------------------------------------------------------------------------------------------------

    def _scan(self, con: lh.Connection, columns: list[str] | None, server: PathServer | None = None) -> Case:
        table = con.table("paths.log")
        names = columns or self._one.schema.names
        ticket = fl.Ticket(f"{self._rows}:{','.join(names)}".encode())
        limit = None
        if server is not None:
            limit = Limit("bare Flight stream", lambda: self._flight.do_get(ticket).read_all())
        return Case(lambda _: _done(table.scan(columns).to_arrow()), limit=limit, server=server)

    def _delivery(self) -> Case:
        name = "paths.pushed"
        table = self._there.create_table(name, self._one.schema)
        other = self._stack.enter_context(lh.connect(self._server.uri, token=TOKEN))
        arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        subscription = other.table(name).subscribe("latest")

        def listen() -> None:
            with contextlib.suppress(lh.LakeheadError):  # the connection is closed when all is measured
                for _ in subscription:
                    arrived.put(time.perf_counter_ns())

        threading.Thread(target=listen, daemon=True).start()

        def call(_: object) -> int:
            table.append(self._one)
            return arrived.get(timeout=_ANSWER_SECONDS)

        limit = self._beside_append(self._one.serialize().size, synced=True, far=True)
        return Case(call, limit=limit, server=self._server)

    # ---- lake and SQL -----------------------------------------------------------------------------------------

    def _round(self) -> Case:
        rows = self._batches[0].slice(0, _ROUND_ROWS)
        table = self._here.create_table("paths.tiered", rows.schema, lake="iceberg")
        written, at = pa.Table.from_batches([rows]), f"{self._base}/beside.parquet"
        return Case(
            lambda _: _done(self._here.tier("paths.tiered")),
            lambda: table.append(rows),
            Limit("bare Parquet write", lambda: pq.write_table(written, at, compression="zstd")),
        )

    def _union(self) -> Case:
        name, plain = "paths.union", f"{self._base}/union.parquet"
        all_rows = pa.Table.from_batches(self._batches)
        table = self._here.create_table(name, self._one.schema, primary_key=["event_id"], lake="iceberg")
        for batch in self._batches:
            table.upsert(batch)
        self._here.tier(name)
        for batch in all_rows.slice(0, max(1, self._rows // 10)).to_batches(max_chunksize=BATCH_ROWS):
            table.upsert(batch)
        pq.write_table(all_rows, plain, compression="zstd")
        return Case(
            lambda _: _done(table.scan(["price"]).to_arrow()),
            limit=Limit("bare Parquet read", lambda: ds.dataset(plain).to_table(columns=["price"])),
        )

    def _sql(self) -> Case:
        # By its key, as a table that is asked again and again DuckDB has a copy of; not by a constant, which has a
        # shorter way.
        key = self._one.schema.names[0]
        table = self._here.create_table("paths.one", self._one.schema, primary_key=[key])
        table.upsert(self._one)
        rows = pa.Table.from_batches([self._one])
        bare = self._stack.enter_context(duckdb.connect())
        bare.register("one", rows)
        where = f"where {key} = {self._one.column(0)[0].as_py()} + 0"
        return Case(
            lambda _: _done(self._here.sql(f"select * from paths.one {where}").fetchall()),
            limit=Limit("bare DuckDB", lambda: bare.sql(f"select * from one {where}").fetchall()),
        )


def _done(_: object) -> None:
    """The call has ended when it returned."""


def _measured(name: str, phases: Sequence[Phase], case: Case) -> Iterator[Figure]:
    """The figures of a path: its time, its CPU, and each phase with its share."""
    calls, watched, marks, alone = _Calls(), _Calls(), list[Mark](), list[float]()
    for _ in range(_ROUNDS):  # in turns, so that the machine is the same to all
        calls.make(case)
        marks += _watched(phases, case, watched)
        if case.limit is not None:
            alone += [seconds(case.limit.work) for _ in range(_CALLS_MIN)]
    if silent := {p.name for p in phases} - {m.phase for m in marks}:
        raise lh.InvalidRequestError(
            f"nothing ran in phase {min(silent)!r} of path {name!r}: name the functions that it has now"
        )
    wall = float(np.median(calls.seconds))
    if case.limit is None:
        yield Figure(name, told(wall))
    else:
        limit = float(np.median(alone))
        yield Figure(name, told(wall), f"{case.limit.name} {told(limit)}", limit / wall)
    each = divided(marks, watched.windows)
    order = np.argsort(watched.seconds, kind="stable").tolist()
    taken: Counter[str] = Counter()
    for i in order[len(order) // 4 : len(order) - len(order) // 4]:
        taken.update(each[i])
    slower = float(np.median(watched.seconds)) / wall
    yield Figure(f"{name}: CPU", told(float(np.median(calls.cpu))), f"{slower:.2f} times the time")
    whole = sum(taken.values())
    for phase in (*(p.name for p in phases), REST):
        share = taken[phase] / whole
        yield Figure(f"{name}: {phase}", told(share * wall), f"{share:.0%}", share)


class _Calls:
    """Calls of a path: when each began and ended, and its CPU in seconds, in this process and the server's."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []
        self.cpu: list[float] = []

    @property
    def seconds(self) -> list[float]:
        """What each took."""
        return [(ended - began) / 1e9 for began, ended in self.windows]

    def make(self, case: Case) -> None:
        """Call for a while."""
        for _ in range(_COLD_CALLS):
            case.call(case.ready())
        until, made = time.perf_counter() + _SECONDS, 0
        while made < _CALLS_MIN or (made < _CALLS_MAX and time.perf_counter() < until):
            given = case.ready()
            before = _cpu_seconds(case.server)
            began = time.perf_counter_ns()
            ended = case.call(given)
            self.windows.append((began, time.perf_counter_ns() if ended is None else ended))
            self.cpu.append(_cpu_seconds(case.server) - before)
            made += 1


def _watched(phases: Sequence[Phase], case: Case, calls: _Calls) -> list[Mark]:
    """Call with the functions of all phases watched; what they noted, here and in the server."""
    functions = functions_of(phases)
    probes = Probes(functions)
    if case.server is not None:
        case.server.put_in(functions)
    marks: list[Mark] = []
    try:
        probes.put_in()
        calls.make(case)
    finally:
        marks += probes.take_out()
        if case.server is not None:
            marks += case.server.take_out()
    return marks


def _cpu_seconds(server: PathServer | None) -> float:
    return time.process_time() + (0.0 if server is None else time.clock_gettime(_cpu_clock(server.pid)))


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU, as Linux numbers it."""
    return (~pid << 3) | 2


def told(took: float) -> str:
    """Seconds, for people."""
    if took >= 0.01:
        return f"{took * 1e3:.1f} ms"
    return f"{took * 1e3:.2f} ms" if took >= 0.001 else f"{took * 1e6:.{0 if took >= 1e-5 else 1}f} µs"
