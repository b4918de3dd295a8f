"""The figures of `lakehead bench --only growth`: the same work beside ten times as much of what is there already.

A ratio of 1 is no growth, 0.1 as much as what grew; what subscribers and commits cost is in the parts ``fanout`` and
``tiering``. And what a server that is given ever more keys has in memory, and the longest write meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pyarrow as pa

import lakehead as lh
from lakehead.benchmarks.events import Figure, seconds
from lakehead.env.usage import resident_bytes

_TABLES = (10, 100, 1000)
_PARTITIONS = (10, 100, 1000)
_BUCKETS = (1, 4, 16)
_TIMES = 15
_LOOKUP_KEYS = 1000
_LOADS = (1, 5)

Server = Callable[[str], AbstractContextManager[tuple[str, int]]]
"""Makes a server of a folder; gives its address and process."""


def growth(server: Server, base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """With the rows given, a tenth and a hundredth of them; tables; partitions; buckets; a server with the rows, and
    with five times as many."""
    with lh.connect(f"{base}/growth") as con:
        yield from _rows(con, batches)
        yield from _tables(con, batches[0])
        yield from _partitions(con)
        yield from _buckets(con, batches[0])
    yield from _keys(server, base, batches)


def _keys(server: Server, base: str, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    """What a server has in memory, and whether a write waits because the table grows."""
    rows, at = sum(b.num_rows for b in batches), batches[0].schema.get_field_index("event_id")
    key = batches[0].schema.field(at)
    with server(f"{base}/growth-server") as (uri, pid), lh.connect(uri) as con:
        con.create_table("growth.first", batches[0].schema, primary_key=[key.name]).upsert(batches[0].slice(0, 1))
        keyed = con.create_table("growth.keyed", batches[0].schema, primary_key=[key.name])
        taken: list[float] = []
        loaded = 0
        for times in _LOADS:
            while loaded < times:
                for batch in batches:
                    moved = pa.array(batch.column(at).to_numpy() + loaded * rows, key.type)
                    new = batch.set_column(at, key, moved)
                    taken.append(seconds(partial(keyed.upsert, new)))
                loaded += 1
            longest, median = max(taken) * 1e3, float(np.median(taken)) * 1e3
            what = f"{len(taken):,} upserts of {batches[0].num_rows:,} keys"
            yield Figure(f"longest of {what}", f"{longest:.1f} ms", f"median {median:.1f} ms, to a server, synced")
            if (held := resident_bytes(pid)) is not None:
                size = loaded * sum(b.nbytes for b in batches)
                name = f"memory of the server, {loaded * rows:,} keyed rows"
                yield Figure(name, f"{held / 1e6:.0f} MB", f"the rows in Arrow {size / 1e6:.0f} MB")


def _rows(con: lh.Connection, batches: Sequence[pa.RecordBatch]) -> Iterator[Figure]:
    log = con.create_table("growth.log", batches[0].schema, durability="os")
    # What is appended by way of measurement is not there when rows are scanned.
    appended = con.create_table("growth.appended", batches[0].schema, durability="os")
    keyed = con.create_table("growth.keyed", batches[0].schema, primary_key=["event_id"], durability="os")
    # The last batch may be shorter.
    whole = batches[0]
    marks = sorted({max(1, len(batches) // by) for by in (100, 10, 1)})
    steps: dict[str, list[tuple[int, float]]] = {}
    done = 0
    for mark in marks:
        for batch in batches[done:mark]:
            log.append(batch)
            appended.append(batch)
            keyed.upsert(batch)
        done, rows = mark, sum(b.num_rows for b in batches[:mark])
        order = np.random.default_rng(rows).integers(0, rows, _TIMES).tolist()
        some = pa.table({"event_id": np.random.default_rng(1).permutation(rows)[:_LOOKUP_KEYS]})
        works: dict[str, tuple[Callable[[int], object], float]] = {
            f"append of {whole.num_rows:,} rows": (lambda _: appended.append(whole), 1),
            f"upsert of {whole.num_rows:,} keys that are there": (lambda _: keyed.upsert(whole), 1),
            f"lookup of {some.num_rows:,} keys": (lambda _, some=some: keyed.lookup(some), 1),  # type: ignore[misc]
            "get of a key": (lambda i, order=order: keyed.get(order[i]), 1),  # type: ignore[misc]
            "scan of a column, a million rows": (lambda _: log.scan(["price"]).to_arrow(), rows / 1e6),
        }
        for name, (work, per) in works.items():
            steps.setdefault(name, []).append((rows, _median(work) / per))
    for name, taken in steps.items():
        yield from _grown(name, "rows", taken)


def _tables(con: lh.Connection, batch: pa.RecordBatch) -> Iterator[Figure]:
    made: list[lh.Table] = []
    create: list[tuple[int, float]] = []
    append: list[tuple[int, float]] = []
    asked: list[tuple[int, float]] = []
    one = batch.slice(0, 1)
    for mark in _TABLES:
        while len(made) < mark - _TIMES:
            made.append(con.create_table(f"growth.t{len(made)}", batch.schema, buckets=4))

        def new(_: int) -> None:
            made.append(con.create_table(f"growth.t{len(made)}", batch.schema, buckets=4))

        create.append((mark, _median(new) if mark > _TIMES else _median(new, mark)))
        append.append((mark, _median(lambda _, mark=mark: made[mark // 2].append(one))))  # type: ignore[misc]
        text = f"select count(*) from {made[mark // 2].name}"
        asked.append((mark, _median(lambda _, text=text: con.sql(text).fetchall())))  # type: ignore[misc]
    yield from _grown("create of a table of 4 buckets", "tables", create)
    yield from _grown("append of a row to one of them", "tables", append)
    yield from _grown("SQL count(*) of one of them", "tables", asked)


def _partitions(con: lh.Connection) -> Iterator[Figure]:
    schema = pa.schema([("day", pa.int32()), ("v", pa.int64())])
    table = con.create_table("growth.partitioned", schema, partition_by=["day"], durability="os")
    some: list[tuple[int, float]] = []
    read: list[tuple[int, float]] = []
    for mark in _PARTITIONS:
        table.append(pa.table({"day": np.arange(mark), "v": np.arange(mark)}, schema=schema))
        few = pa.table({"day": np.arange(10), "v": np.arange(10)}, schema=schema)
        some.append((mark, _median(lambda _, few=few: table.append(few))))  # type: ignore[misc]
        read.append((mark, _median(lambda _: table.scan(where="day = 3").to_arrow())))
    yield from _grown("append that touches 10 partitions", "partitions", some)
    yield from _grown("scan of one partition", "partitions", read)


def _buckets(con: lh.Connection, batch: pa.RecordBatch) -> Iterator[Figure]:
    few = batch.slice(0, _LOOKUP_KEYS)
    keys = few.select(["event_id"])
    steps: dict[str, list[tuple[int, float]]] = {}
    for mark in _BUCKETS:
        log = con.create_table(f"growth.log{mark}", batch.schema, buckets=mark, durability="os")
        name = f"growth.keyed{mark}"
        keyed = con.create_table(name, batch.schema, primary_key=["event_id"], buckets=mark, durability="os")
        keyed.upsert(batch)
        works: dict[str, Callable[[], object]] = {
            f"spread append of {batch.num_rows:,} rows": partial(log.append, batch),
            f"spread upsert of {few.num_rows:,} keys": partial(keyed.upsert, few),
            f"spread lookup of {keys.num_rows:,} keys": partial(keyed.lookup, keys),
        }
        for what, work in works.items():
            steps.setdefault(what, []).append((mark, _median(lambda _, work=work: work())))  # type: ignore[misc]
    for what, taken in steps.items():
        yield from _grown(what, "buckets", taken)


def _grown(work: str, what: str, taken: Sequence[tuple[int, float]]) -> Iterator[Figure]:
    before = None
    for n, took in taken:
        beside, ratio = "", None
        if before is not None:
            beside = f"with {n / before[0]:.3g} times as many {what}: {took / before[1]:.2f} times"
            ratio = before[1] / took
        yield Figure(f"{work}, {n:,} {what}", f"{took * 1e3:.3f} ms", beside, ratio)
        before = n, took


def _median(work: Callable[[int], object], times: int | None = None) -> float:
    return float(np.median([seconds(partial(work, i)) for i in range(times or _TIMES)]))
