"""Tables of both kinds against plain Python: whatever stops, moves, compacts or trims them, they hold what was written.

A real service runs on a disk that can lose power, with a real Iceberg table beside it. Rules write, break, restart,
tier, compact, expire, let other engines commit, checkpoint, trim and read in any order. Always: a union read is the
model, hot and lake rows do not overlap, offsets are dense, lookups and replayed changelogs agree.

``LAKEHEAD_MODEL_EXAMPLES=500`` makes a long run of it.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pyiceberg.expressions import In
from tests.properties.deployed_table import Deployed, Rows, in_order

from lakehead import OffsetOutOfRangeError, TabletId
from lakehead.client.row_routing import route

EXAMPLES = int(os.environ.get("LAKEHEAD_MODEL_EXAMPLES", "0"))
COMPRESSION = st.sampled_from(["none", "lz4", "zstd"])
SYNCS, TORN = st.integers(0, 3), st.integers(0, 1500)


class LogTable(Deployed):
    """The model: rows by number, where each lies, and what other engines did to the lake."""

    schema = pa.schema([("n", pa.int64()), ("p", pa.string()), ("v", pa.float64())])

    @initialize(
        partitioned=st.booleans(),
        buckets=st.integers(1, 3),
        bucket_key=st.sampled_from([(), ("n",), ("n", "p")]),
        lake=st.sampled_from([True, True, False]),
        durable=st.booleans(),
        compression=COMPRESSION,
        warm=st.booleans(),
    )
    def create(
        self, partitioned: bool, buckets: int, bucket_key: tuple[str, ...], compression: Any, warm: bool, **how: Any
    ) -> None:
        partition_by = ("p",) if partitioned else ()
        self.deploy(
            primary_key=(),
            partition_by=partition_by,
            bucket_key=tuple(c for c in bucket_key if c not in partition_by),
            buckets=buckets,
            compression=compression,
            **how,
        )
        self.next = 0
        self.held: dict[int, dict[str, Any]] = {}
        self.place: dict[int, tuple[TabletId, int]] = {}
        self.in_lake: set[int] = set()
        self.deleted: set[int] = set()
        self.foreign: dict[int, dict[str, Any]] = {}
        self.etl = -1
        if warm:
            self.append(20)
            self.append_what_is_repeated(20)
            self.tier(True) if self.has_lake else self.maintain(2)
            self.append(5)

    def made(self, count: int) -> Rows:
        numbers = range(self.next, self.next + count)
        self.next += count
        return [{"n": n, "p": "xyz"[n % 3], "v": None if n % 4 == 0 else n / 2} for n in numbers]

    def rows(self) -> Rows:
        return [*(r for n, r in self.held.items() if n not in self.deleted), *self.foreign.values()]

    def lake_rows(self) -> Rows:
        return [*(self.held[n] for n in self.in_lake - self.deleted), *self.foreign.values()]

    def hot_rows(self) -> int | None:
        return len(self.held) - len(self.in_lake)

    def tiered(self) -> None:
        self.in_lake = set(self.held)

    def took(self, rows: Rows, where: dict[int, tuple[TabletId, int]]) -> None:
        """The table has these rows now, at the next offsets of their tablets and in their order."""
        ends: dict[TabletId, int] = {}
        for tablet, offset in self.place.values():
            ends[tablet] = max(ends.get(tablet, 0), offset + 1)
        for row in rows:
            tablet, offset = where[row["n"]]
            assert offset == ends.get(tablet, 0), "offsets are dense, a batch keeps its order"
            ends[tablet] = offset + 1
            self.place[row["n"]] = (tablet, offset)
            self.held[row["n"]] = row

    def places(self, rows: Rows) -> dict[int, tuple[TabletId, int]]:
        found = self.table.scan(["n", "p"], where=f"n >= {rows[0]['n']}", system_columns=True).to_arrow().to_pylist()
        partitioned = bool(self.table.partition_by)
        tablets = {r["n"]: TabletId((r["p"],) if partitioned else (), r["__bucket"]) for r in found}
        return {r["n"]: (tablets[r["n"]], r["__offset"]) for r in found if r["__offset"] is not None}

    @rule(count=st.integers(1, 60))
    def append(self, count: int) -> None:
        rows = self.made(count)
        offsets = self.table.append(rows).offsets
        where = self.places(rows)
        self.took(rows, where)
        for tablet, (start, end) in offsets.items():
            assert {o for t, o in where.values() if t == tablet} == set(range(start, end))

    @rule(count=st.integers(1, 20))
    def append_what_is_repeated(self, count: int) -> None:
        rows = self.made(count)
        self.send("append", rows)
        self.took(rows, self.places(rows))

    @rule(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5), named=st.booleans())
    def append_through_a_writer(self, counts: list[int], named: bool) -> None:
        batches = [self.made(c) for c in counts]
        with self.table.writer("etl" if named else None) as writer:
            assert not named or writer.last_sequence == self.etl
            for batch in batches:
                writer.append(batch)
            writer.flush()
            self.etl = writer.last_sequence if named else self.etl
        rows = [r for b in batches for r in b]
        if rows:
            self.took(rows, self.places(rows))

    @precondition(lambda self: self.durable)
    @rule(count=st.integers(1, 20), syncs=SYNCS, torn_bytes=TORN)
    def append_and_cut_power(self, count: int, syncs: int, torn_bytes: int) -> None:
        rows = self.made(count)
        done = self.write_and_cut_power(lambda: self.table.append(rows), syncs=syncs, torn_bytes=torn_bytes)
        where = self.places(rows)
        parts = route(self.table._desc, pa.RecordBatch.from_pylist(rows, self.table.schema))
        for _, positions in parts:
            part = rows if positions is None else [rows[i] for i in positions]
            there = [r["n"] in where for r in part]
            assert all(there) or not (done or any(there)), "a batch is atomic in a tablet, and there once acknowledged"
        self.took([r for r in rows if r["n"] in where], where)

    @rule(count=st.integers(1, 9))
    def append_to_a_full_disk(self, count: int) -> None:
        rows = self.made(count)
        self.write_when_full(lambda: self.table.append(rows))
        self.table.append(rows)
        self.took(rows, self.places(rows))

    @precondition(lambda self: self.has_lake and not self.table.describe()["bucket_key"])
    @rule(count=st.integers(1, 5))
    def append_by_another_engine(self, count: int) -> None:
        rows = [{**r, "n": r["n"] - 10**9} for r in self.made(count)]
        table = self.iceberg()
        lake = pa.schema([f.remove_metadata() for f in table.schema().as_arrow()])
        table.append(pa.Table.from_pylist(rows, lake))
        self.foreign |= {r["n"]: r for r in rows}

    @precondition(lambda self: self.has_lake and not self.table.describe()["bucket_key"] and self.in_lake)
    @rule(which=st.integers(0, 6))
    def delete_by_another_engine(self, which: int) -> None:
        numbers = sorted(r["n"] for r in self.lake_rows() if r["n"] % 7 == which)
        if numbers:
            self.iceberg().delete(In("n", numbers))
            self.deleted |= {n for n in numbers if n in self.held}
            self.foreign = {n: r for n, r in self.foreign.items() if n not in numbers}

    @precondition(lambda self: self.place)
    @rule(first=st.integers(0, 999), count=st.integers(0, 999))
    def read_some_range(self, first: int, count: int) -> None:
        tablet = min(t for t, _ in self.place.values())
        numbers = sorted((o, n) for n, (t, o) in self.place.items() if t == tablet)
        start = first % len(numbers)
        end = min(start + count, len(numbers))
        found: Rows = []
        stops = {t: 0 for t, _ in self.place.values()} | {tablet: end}
        try:
            for batch in self.table.subscribe(dict.fromkeys(stops, 0) | {tablet: start}, stop=stops):
                found += batch.rows.to_pylist()
        except OffsetOutOfRangeError:
            assert not self.has_lake
            return
        wanted = [(o, n) for o, n in numbers[start:end]]
        got = [(r["__offset"], r["n"]) for r in found]
        # What another engine deleted from the lake is gone once the log is trimmed.
        assert [x for x in wanted if x in got or x[1] not in self.deleted] == got
        times = [r["__timestamp"] for r in found]
        assert times == sorted(times)

    @rule()
    def follow_from_the_beginning(self) -> None:
        last: dict[TabletId, int] = {}
        seen = set()
        for batch in self.table.subscribe("earliest", stop="now"):
            for row in batch.rows.to_pylist():
                n = row["n"]
                assert self.place[n] == (batch.tablet, row["__offset"]) and row["__offset"] > last.get(batch.tablet, -1)
                assert {c: row[c] for c in self.schema.names} == self.held[n]
                last[batch.tablet] = row["__offset"]
                seen.add(n)
        assert set(self.held) - self.deleted <= seen <= set(self.held)

    @rule(low=st.integers(0, 300), width=st.integers(0, 80), limit=st.none() | st.integers(0, 20))
    def scan_where(self, low: int, width: int, limit: int | None) -> None:
        where = f"n >= {low} and n < {low + width} and v is not null"
        wanted = [r["n"] for r in self.rows() if low <= r["n"] < low + width and r["v"] is not None]
        found = self.table.scan(columns=["n"], where=where, limit=limit).to_arrow()["n"].to_pylist()
        assert len(found) == (len(wanted) if limit is None else min(limit, len(wanted)))
        assert set(found) <= set(wanted) and len(set(found)) == len(found)


KEYS = [(k, s) for k in range(6) for s in ("x", "", "é")]
Key = tuple[int, str]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
numbers_ = st.none() | st.integers(-9, 9)
texts = st.none() | st.sampled_from(["", "text", "a longer text, past what fits inline"])


def key_row(key: Key) -> dict[str, Any]:
    return {"k": key[0], "s": key[1], "p": key[0] % 2 == 0}


class KeyedTable(Deployed):
    """The model: key -> row."""

    schema = pa.schema(
        [("k", pa.int32()), ("s", pa.string()), ("p", pa.bool_()), ("a", pa.int64()), ("b", pa.string())]
    )

    @initialize(
        partitioned=st.booleans(),
        buckets=st.integers(1, 3),
        prefixed=st.booleans(),
        lake=st.sampled_from([True, True, False]),
        durable=st.booleans(),
        compression=COMPRESSION,
        warm=st.booleans(),
    )
    def create(self, partitioned: bool, prefixed: bool, warm: bool, **how: Any) -> None:
        self.deploy(
            primary_key=("k", "s", "p") if partitioned else ("k", "s"),
            partition_by=("p",) if partitioned else (),
            bucket_key=("k",) if prefixed else ("k", "s"),
            **how,
        )
        self.prefixed = prefixed
        self.model: dict[Key, dict[str, Any]] = {}
        self.in_lake: Rows = []
        self.etl = -1
        if warm:
            self.upsert([(key, i, "text") for i, key in enumerate(KEYS[3:])])
            self.upsert_what_is_repeated([(key, i, "text") for i, key in enumerate(KEYS[:9])])
            self.tier(True) if self.has_lake else self.maintain(2)
            self.delete(KEYS[::3])

    def rows(self) -> Rows:
        return list(self.model.values())

    def lake_rows(self) -> Rows:
        return self.in_lake

    def hot_rows(self) -> int | None:
        return None

    def tiered(self) -> None:
        self.in_lake = self.rows()

    def keys_only(self, some: list[Key]) -> Rows:
        return [{c: key_row(key)[c] for c in self.table.primary_key} for key in some]

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_, texts), min_size=1, max_size=10))
    def upsert(self, rows: list[tuple[Key, int | None, str | None]]) -> None:
        self.table.upsert([{**key_row(key), "a": a, "b": b} for key, a, b in rows])
        self.model |= {key: {**key_row(key), "a": a, "b": b} for key, a, b in rows}

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_, texts), min_size=1, max_size=10))
    def upsert_what_is_repeated(self, rows: list[tuple[Key, int | None, str | None]]) -> None:
        self.send("upsert", [{**key_row(key), "a": a, "b": b} for key, a, b in rows])
        self.model |= {key: {**key_row(key), "a": a, "b": b} for key, a, b in rows}

    def updated(self, rows: list[tuple[Key, int | None]]) -> dict[Key, dict[str, Any]]:
        new: dict[Key, dict[str, Any]] = {}
        for key, a in rows:
            new[key] = {**(new.get(key) or self.model.get(key) or {**key_row(key), "b": None}), "a": a}
        return new

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=10))
    def upsert_some_columns(self, rows: list[tuple[Key, int | None]]) -> None:
        self.table.upsert([{**key_row(key), "a": a} for key, a in rows])
        self.model |= self.updated(rows)

    @rule(some=some_keys)
    def delete(self, some: list[Key]) -> None:
        self.table.delete(self.keys_only(some))
        for key in some:
            self.model.pop(key, None)

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=6), gone=some_keys)
    def write_through_a_named_writer(self, rows: list[tuple[Key, int | None]], gone: list[Key]) -> None:
        with self.table.writer("etl") as writer:
            assert writer.last_sequence == self.etl
            writer.upsert([{**key_row(key), "a": a} for key, a in rows])
            writer.delete(self.keys_only(gone))
            writer.flush()
            self.etl = writer.last_sequence
        self.model |= self.updated(rows)
        for key in gone:
            self.model.pop(key, None)

    @rule(many=st.integers(100, 1000))
    def fill_and_empty(self, many: int) -> None:
        rows = [{"k": 1000 + i, "s": "", "p": i % 2 == 0, "a": i, "b": str(i)} for i in range(many)]
        self.table.upsert(rows)
        assert self.table.scan().count() == len(self.model) + many
        self.table.delete([{c: r[c] for c in self.table.primary_key} for r in rows])

    @precondition(lambda self: self.durable)
    @rule(
        rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=10),
        delete=st.booleans(),
        syncs=SYNCS,
        torn_bytes=TORN,
    )
    def write_and_lose_power(
        self, rows: list[tuple[Key, int | None]], delete: bool, syncs: int, torn_bytes: int
    ) -> None:
        keys = [key for key, _ in rows]
        new = dict.fromkeys(keys) if delete else self.updated(rows)
        if delete:
            write = lambda: self.table.delete(self.keys_only(keys))  # noqa: E731
        else:
            write = lambda: self.table.upsert([{**key_row(key), "a": a} for key, a in rows])  # noqa: E731
        done = self.write_and_cut_power(write, syncs=syncs, torn_bytes=torn_bytes)
        found = {(r["k"], r["s"]): r for r in self.table.scan().to_arrow().to_pylist()}
        schema = pa.schema([self.table.schema.field(c) for c in self.table.primary_key])
        for _, positions in route(self.table._desc, pa.RecordBatch.from_pylist(self.keys_only(keys), schema)):
            part = keys if positions is None else [keys[i] for i in positions]
            after = {key: new[key] for key in part}
            if {key: found.get(key) for key in part} == after:
                self.model |= {key: row for key, row in after.items() if row is not None}
                for key in [key for key, row in after.items() if row is None]:
                    self.model.pop(key, None)
            else:
                assert not done, "what was acknowledged is there"
                assert {k: found.get(k) for k in part} == {k: self.model.get(k) for k in part}, "a batch is atomic"

    @rule(rows=st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=4))
    def upsert_to_a_full_disk(self, rows: list[tuple[Key, int | None]]) -> None:
        self.write_when_full(lambda: self.table.upsert([{**key_row(key), "a": a} for key, a in rows]))
        self.upsert_some_columns(rows)

    @rule(some=some_keys)
    def lookup(self, some: list[Key]) -> None:
        found = self.table.lookup(self.keys_only(some)).to_pylist()
        assert found == [self.model[key] for key in some if key in self.model]

    @precondition(lambda self: self.prefixed)
    @rule(k=st.integers(0, 6))
    def prefix_lookup(self, k: int) -> None:
        asked = {c: v for c, v in {"k": k, "p": k % 2 == 0}.items() if c == "k" or c in self.table.partition_by}
        found = self.table.prefix_lookup([asked]).to_pylist()
        assert in_order(found) == in_order([row for (number, _), row in self.model.items() if number == k])

    @rule(low=st.integers(-9, 9))
    def scan_where(self, low: int) -> None:
        scan = self.table.scan(where=f"a > {low} or b is null")
        wanted = [r for r in self.rows() if (r["a"] is not None and r["a"] > low) or r["b"] is None]
        assert in_order(scan.to_arrow().to_pylist()) == in_order(wanted)
        assert scan.count() == len(wanted)

    @rule(start=st.sampled_from(["earliest", "full"]))
    def replay_the_changelog(self, start: Any) -> None:
        state: dict[Key, dict[str, Any]] = {}
        for batch in self.table.subscribe(start, stop="now"):
            for r in batch.rows.to_pylist():
                key, image = (r["k"], r["s"]), {c: r[c] for c in self.schema.names}
                if r["__change_type"] in ("-U", "-D"):
                    assert state.pop(key) == image
                else:
                    assert key not in state
                    state[key] = image
        assert state == self.model


TestLogTable = LogTable.TestCase
TestLogTable.settings = settings(max_examples=EXAMPLES or 7, stateful_step_count=15)
TestKeyedTable = KeyedTable.TestCase
TestKeyedTable.settings = settings(max_examples=EXAMPLES or 7, stateful_step_count=15)
