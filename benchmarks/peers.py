"""The figures of `python -m benchmarks --only peers`: Lakehead beside what one would take instead, on the same rows.

SQLite, DuckDB and PyIceberg are always there; RocksDB and Redis where they are installed (`make bench PEERS=1`). Rows
are made ready for each before its time begins, so that no peer pays for what only Lakehead takes as it is: Arrow.
DuckDB syncs every commit, as PyIceberg's catalog does, and has no setting for that: both stand beside Lakehead, synced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table as IcebergTable

import lakehead as lh
from lakehead.benchmarks.child import child
from lakehead.benchmarks.events import Figure, seconds
from lakehead.benchmarks.run import warm_up

_LOOKUP_KEYS = 1000
_GETS = 2000
_SMALL_ROWS = 10
_SMALL_CALLS = 1000
_SMALL_CALLS_ICEBERG = 30
_LAKE_ROWS = 100_000
_LAKEHEAD, _SYNCED = "Lakehead", "Lakehead, synced"
_THAT_SYNC = ("DuckDB", "PyIceberg")


class Store(Protocol):
    """Rows by their first column, `event_id`."""

    name: str

    def ready(self, batch: pa.RecordBatch) -> Any:
        """The rows as `upsert` takes them."""

    def upsert(self, rows: Any) -> None: ...

    def ready_keys(self, keys: list[int]) -> Any:
        """The keys as `lookup` takes them."""

    def lookup(self, keys: Any) -> int:
        """How many of the rows were found; their values are read."""

    def get(self, key: int) -> object: ...


class _Lakehead:
    def __init__(self, con: lh.Connection, schema: pa.Schema, *, synced: bool = False) -> None:
        self.name, durability = (_SYNCED, "sync") if synced else (_LAKEHEAD, "os")
        self._table = con.create_table(f"peers.{durability}", schema, primary_key=["event_id"], durability=durability)

    def ready(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def upsert(self, rows: pa.RecordBatch) -> None:
        self._table.upsert(rows)

    def ready_keys(self, keys: list[int]) -> pa.Table:
        return pa.table({"event_id": keys})

    def lookup(self, keys: pa.Table) -> int:
        return self._table.lookup(keys).num_rows

    def get(self, key: int) -> object:
        return self._table.get(key)


class _SQLite:
    name = "SQLite"

    def __init__(self, folder: str, schema: pa.Schema) -> None:
        self._con = sqlite3.connect(f"{folder}/peers.sqlite", isolation_level=None)
        self._con.execute("pragma journal_mode = wal")
        self._con.execute("pragma synchronous = off")
        self._con.execute(f"create table t ({schema.names[0]} integer primary key, {', '.join(schema.names[1:])})")
        self._insert = f"insert or replace into t values ({', '.join('?' * len(schema))})"

    def ready(self, batch: pa.RecordBatch) -> list[tuple[object, ...]]:
        columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in batch.columns]
        return list(zip(*(c.to_pylist() for c in columns), strict=True))

    def upsert(self, rows: list[tuple[object, ...]]) -> None:
        self._con.execute("begin")
        self._con.executemany(self._insert, rows)
        self._con.execute("commit")

    def ready_keys(self, keys: list[int]) -> list[int]:
        return keys

    def lookup(self, keys: list[int]) -> int:
        marks = ", ".join("?" * len(keys))
        return len(self._con.execute(f"select * from t where event_id in ({marks})", keys).fetchall())

    def get(self, key: int) -> object:
        return self._con.execute("select * from t where event_id = ?", (key,)).fetchone()


class _DuckDB:
    name = "DuckDB"

    def __init__(self, folder: str, schema: pa.Schema) -> None:
        self._con = duckdb.connect(f"{folder}/peers.duckdb")
        self._con.register("rows", schema.empty_table())
        self._con.execute("create table t as from rows; alter table t add primary key (event_id)")

    def ready(self, batch: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([batch])

    def upsert(self, rows: pa.Table) -> None:
        self._con.register("rows", rows)
        self._con.execute("insert or replace into t from rows")

    def ready_keys(self, keys: list[int]) -> pa.Table:
        return pa.table({"key": keys})

    def lookup(self, keys: pa.Table) -> int:
        self._con.register("keys", keys)
        found: pa.Table = self._con.execute("select t.* from t join keys on event_id = key").to_arrow_table()
        return found.num_rows

    def get(self, key: int) -> object:
        return self._con.execute("select * from t where event_id = ?", (key,)).fetchone()


class _ByBytes:
    """Stores of bytes: a row is 69 of them, about what the events take in Arrow."""

    def ready(self, batch: pa.RecordBatch) -> dict[bytes, bytes]:
        blob = np.random.default_rng(3).bytes(69 * batch.num_rows)
        ids = batch.column(0).to_pylist()
        return {_key(k): blob[69 * i : 69 * (i + 1)] for i, k in enumerate(ids)}

    def ready_keys(self, keys: list[int]) -> list[bytes]:
        return [_key(k) for k in keys]


class _RocksDB(_ByBytes):
    name = "RocksDB"

    def __init__(self, folder: str) -> None:
        import rocksdict

        self._db = rocksdict.Rdict(f"{folder}/peers.rocks", rocksdict.Options(raw_mode=True))
        self._batch = partial(rocksdict.WriteBatch, raw_mode=True)

    def upsert(self, rows: dict[bytes, bytes]) -> None:
        batch = self._batch()
        for key, value in rows.items():
            batch.put(key, value)
        self._db.write(batch)

    def lookup(self, keys: list[bytes]) -> int:
        return sum(v is not None for v in self._db[keys])

    def get(self, key: int) -> object:
        return self._db.get(_key(key))


class _Redis(_ByBytes):
    name = "Redis"

    def __init__(self, socket: str) -> None:
        import redis

        self._db = redis.Redis(unix_socket_path=socket)
        self._db.ping()

    def upsert(self, rows: dict[bytes, bytes]) -> None:
        self._db.mset(rows)

    def lookup(self, keys: list[bytes]) -> int:
        return sum(v is not None for v in self._db.mget(keys))

    def get(self, key: int) -> object:
        return self._db.get(_key(key))


def _key(key: int) -> bytes:
    return key.to_bytes(8, "big")


def peers(base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """Lakehead's figures first, then each peer's, whose ratio says how many times as fast Lakehead was."""
    schema, rows = batches[0].schema, sum(b.num_rows for b in batches)
    with contextlib.ExitStack() as stack:
        con = stack.enter_context(lh.connect(f"{base}/peers"))
        warm_up(con, batches)
        ours = [_Lakehead(con, schema), _Lakehead(con, schema, synced=True)]
        stores: list[Store] = [*ours, _SQLite(base, schema), _DuckDB(base, schema)]
        if importlib.util.find_spec("rocksdict") is not None:
            stores.append(_RocksDB(base))
        if importlib.util.find_spec("redis") is not None and shutil.which("redis-server"):
            stores.append(_Redis(stack.enter_context(_redis_server(base))))
        yield from _by_key(stores, batches, rows)
        yield from _small_appends(con, base, batches[0])
        yield from _lake_upserts(con, base, batches)


def _by_key(stores: Sequence[Store], batches: Sequence[pa.RecordBatch], rows: int) -> Iterator[Figure]:
    order = np.random.default_rng(2).permutation(rows).tolist()
    asked = [order[at : at + _LOOKUP_KEYS] for at in range(0, min(rows, 100 * _LOOKUP_KEYS), _LOOKUP_KEYS)]
    found: dict[str, list[tuple[str, float]]] = {}
    gets: list[tuple[str, list[float]]] = []
    for store in stores:
        ready = [store.ready(batch) for batch in batches]
        for work in ("upsert, new keys", "upsert, existing keys"):
            took = seconds(lambda store=store, ready=ready: [store.upsert(r) for r in ready])  # type: ignore[misc]
            found.setdefault(work, []).append((store.name, rows / took))
        if store.name == _SYNCED:  # reads are those of the other
            continue
        keys = [store.ready_keys(k) for k in asked]
        counts: list[int] = []
        took = seconds(lambda store=store, keys=keys, counts=counts: counts.extend(map(store.lookup, keys)))  # type: ignore[misc]
        if counts != [len(k) for k in asked]:
            raise lh.LakeheadError(f"{store.name} did not find the rows that it was given")
        found.setdefault(f"lookup, {len(asked[0]):,} keys a call", []).append((store.name, sum(counts) / took))
        some = order[:_GETS]
        gets.append((store.name, [seconds(lambda store=store, k=k: store.get(k)) for k in some]))  # type: ignore[misc]
        del ready
    for work, speeds in found.items():
        yield from _compared(work, speeds, lambda per_s: f"{per_s / 1e6:.3f} M/s")
    ours = float(np.median(gets[0][1]))
    for name, took_each in gets:
        p50, p99 = np.percentile(took_each, [50, 99])
        ratio = None if name == gets[0][0] else float(p50) / ours
        yield Figure(f"get, one key: {name}", f"{p50 * 1e3:.4f} / {p99 * 1e3:.4f} ms", "p50 / p99", ratio)


def _small_appends(con: lh.Connection, base: str, batch: pa.RecordBatch) -> Iterator[Figure]:
    rows = pa.Table.from_batches([batch.slice(0, _SMALL_ROWS)])
    log = con.create_table("peers.log", rows.schema, durability="os")
    synced = con.create_table("peers.synced_log", rows.schema, durability="sync")
    lite, duck = _SQLite(_folder(base, "small"), rows.schema), duckdb.connect(f"{base}/small/log.duckdb")
    lite._con.execute("create table log as select * from t")
    insert = lite._insert.replace("or replace into t", "into log")
    tuples = lite.ready(batch.slice(0, _SMALL_ROWS))
    duck.register("rows", rows)
    duck.execute("create table log as from rows limit 0")
    iceberg = _iceberg_table(_folder(base, "small-iceberg"), rows.schema)

    def in_sqlite() -> None:
        lite._con.execute("begin")
        lite._con.executemany(insert, tuples)
        lite._con.execute("commit")

    works: list[tuple[str, Callable[[], object], int]] = [
        (_LAKEHEAD, lambda: log.append(rows), _SMALL_CALLS),
        (_SYNCED, lambda: synced.append(rows), _SMALL_CALLS),
        ("SQLite", in_sqlite, _SMALL_CALLS),
        ("DuckDB", lambda: duck.execute("insert into log from rows"), _SMALL_CALLS),
        ("PyIceberg", lambda: iceberg.append(rows), _SMALL_CALLS_ICEBERG),
    ]
    speeds = []
    for name, work, calls in works:
        work()
        speeds.append((name, calls / seconds(lambda work=work, calls=calls: [work() for _ in range(calls)])))  # type: ignore[misc]
    yield from _compared(f"append, {rows.num_rows} rows a call", speeds, lambda per_s: f"{1e3 / per_s:.3f} ms a call")


def _lake_upserts(con: lh.Connection, base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """Half of the rows new, half changed, into all rows in an Iceberg table."""
    table = pa.Table.from_batches(batches)
    n = min(_LAKE_ROWS, table.num_rows)
    ids = np.arange(table.num_rows - n // 2, table.num_rows - n // 2 + n)
    changed = table.slice(0, n).set_column(0, "event_id", pa.array(ids))
    keyed = con.create_table("peers.lake", table.schema, primary_key=["event_id"], lake="iceberg")
    for batch in batches:
        keyed.upsert(batch)
    con.tier("peers.lake")

    def ours() -> None:
        for batch in changed.to_batches(max_chunksize=10_000):
            keyed.upsert(batch)
        con.tier("peers.lake")

    theirs = _iceberg_table(_folder(base, "upsert-iceberg"), table.schema)
    theirs.append(table)
    speeds = [
        (_SYNCED, n / seconds(ours)),
        ("PyIceberg", n / seconds(lambda: theirs.upsert(changed, join_cols=["event_id"]))),
    ]
    yield from _compared(f"upsert of {n:,} rows into Iceberg", speeds, lambda per_s: f"{n / per_s:.2f} s")


def _iceberg_table(folder: str, schema: pa.Schema) -> IcebergTable:
    catalog = SqlCatalog("peers", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("db")
    return catalog.create_table("db.t", schema)


def _folder(base: str, name: str) -> str:
    made = f"{base}/{name}"
    os.makedirs(made, exist_ok=True)
    return made


def _compared(work: str, speeds: Sequence[tuple[str, float]], tell: Callable[[float], str]) -> Iterator[Figure]:
    """Ours come first. What syncs stands beside Lakehead that does, where that was measured."""
    known = dict(speeds)
    for name, speed in speeds:
        beside, ratio = "", None
        if name not in (_LAKEHEAD, _SYNCED):
            ours = _SYNCED if name in _THAT_SYNC and _SYNCED in known else _LAKEHEAD
            ratio = known[ours] / speed
            beside = f"{ours}: {ratio:.2f} times that"
        yield Figure(f"{work}: {name}", tell(speed), beside, ratio)


@contextlib.contextmanager
def _redis_server(base: str) -> Iterator[str]:
    """Redis in memory, on a Unix socket alone."""
    folder = _folder(base, "redis")
    command = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/s", "--save", "", "--dir", folder]
    with child("redis-server", command) as process:
        process.line("eady to accept connections")
        yield f"{folder}/s"
