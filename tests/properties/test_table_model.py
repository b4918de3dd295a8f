"""Tables of both kinds against plain Python: whatever stops, moves, compacts or trims them, they hold what was written.

A real service runs on a disk that can lose power, with a real Iceberg table beside it. Rules write, break, restart,
tier, compact, expire, let other engines commit, checkpoint, trim and read in any order. Always: a union read is the
model, hot and lake rows do not overlap, offsets are dense, lookups and replayed changelogs agree.

``LAKEHEAD_MODEL_EXAMPLES=500`` makes a long run of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pyiceberg.expressions import In
from tests.altering import Column, Shape, value_of
from tests.properties.deployed_table import COMPRESSION, Deployed, Held, Rows, in_order

from lakehead import LakeStateError, OffsetOutOfRangeError, TabletId
from lakehead.client.row_routing import route

EXAMPLES = int(os.environ.get("LAKEHEAD_MODEL_EXAMPLES", "0"))
SYNCS, TORN = st.integers(0, 3), st.integers(0, 1500)


_N = 0
"""The number of the column that numbers the rows of a log table."""


class LogTable(Deployed):
    """The model: rows by number, where each lies, and what other engines did to the lake."""

    schema = pa.schema([("n", pa.int64()), ("p", pa.string()), ("v", pa.float32())])
    fixed = ("n", "p")

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
        self.held: dict[int, dict[int, Any]] = {}
        self.place: dict[int, tuple[TabletId, int]] = {}
        self.in_lake: set[int] = set()
        self.foreign: dict[int, dict[int, Any]] = {}
        self.etl = -1
        if warm:
            self.append(20)
            self.append_what_is_repeated(20)
            self.tier(True) if self.has_lake else self.maintain(2)
            self.append(5)

    def made(self, count: int, shape: Shape | None = None) -> Rows:
        numbers = range(self.next, self.next + count)
        self.next += count
        columns = [c for c in (shape or self.shape).columns if c.name not in self.fixed]
        filled = [{c.name: value_of(c.type, None if (n + c.number) % 4 == 2 else n) for c in columns} for n in numbers]
        return [{"n": n, "p": "xyz"[n % 3], **row} for n, row in zip(numbers, filled, strict=True)]

    def rows(self) -> Held:
        return [*self.held.values(), *self.foreign.values()]

    def lake_rows(self) -> Held:
        return [*(self.held[n] for n in self.in_lake), *self.foreign.values()]

    def hot_rows(self) -> int | None:
        return len(self.held) - len(self.in_lake)

    def tiered(self) -> None:
        self.in_lake = set(self.held)

    def took(self, rows: Rows, where: dict[int, tuple[TabletId, int]], shape: Shape | None = None) -> None:
        """The table has these rows now, at the next offsets of their tablets and in their order."""
        ends: dict[TabletId, int] = {}
        for tablet, offset in self.place.values():
            ends[tablet] = max(ends.get(tablet, 0), offset + 1)
        for row in rows:
            tablet, offset = where[row["n"]]
            assert offset == ends.get(tablet, 0), "offsets are dense, a batch keeps its order"
            ends[tablet] = offset + 1
            self.place[row["n"]] = (tablet, offset)
            self.held[row["n"]] = (shape or self.shape).held(row)

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

    @rule(count=st.integers(1, 20), which=st.integers(0, 99))
    def append_by_who_knows_an_old_definition(self, count: int, which: int) -> None:
        desc, shape = self.definitions[which % len(self.definitions)]
        rows = self.made(count, shape)
        self.handle(desc).writers.write("append", pa.Table.from_pylist(rows, desc.schema))
        self.took(rows, self.places(rows), shape)

    @rule(count=st.integers(1, 20))
    def append_what_is_repeated(self, count: int) -> None:
        rows = self.made(count)
        self.send("append", rows)
        self.took(rows, self.places(rows))

    @rule(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5), named=st.booleans())
    def append_through_a_writer(self, counts: list[int], named: bool) -> None:
        batches = [self.made(c) for c in counts]
        self.refresh()
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
        self.foreign |= {r["n"]: self.shape.held(r) for r in rows}

    @precondition(lambda self: self.has_lake and not self.table.describe()["bucket_key"] and self.in_lake)
    @rule(which=st.integers(0, 6))
    def delete_by_another_engine(self, which: int) -> None:
        """That is refused, until it is undone."""
        numbers = sorted(r[_N] for r in self.lake_rows() if r[_N] % 7 == which)
        if not set(numbers) & self.in_lake or any(c.default is not None for c in self.shape.columns):
            return  # it would write the rows that stay anew, without defaults
        lake = self.iceberg()
        rows = lake.scan(In("n", numbers)).to_arrow()
        lake.delete(In("n", numbers))
        with pytest.raises(LakeStateError, match="another engine changed the rows"):
            self.table.scan()
        lake.refresh()
        lake.append(rows)

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
        assert wanted == got
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
                assert {c: row[c] for c in self.shape.names} == self.shape.shown(self.held[n])
                last[batch.tablet] = row["__offset"]
                seen.add(n)
        assert set(self.held) == seen

    @rule(low=st.integers(0, 300), width=st.integers(0, 80), limit=st.none() | st.integers(0, 20))
    def scan_where(self, low: int, width: int, limit: int | None) -> None:
        v = next(c for c in self.shape.columns if c.name not in self.fixed)
        where = f"n >= {low} and n < {low + width} and {v.name} is not null"
        wanted = [r[_N] for r in self.rows() if low <= r[_N] < low + width and v.of(r) is not None]
        found = self.table.scan(columns=["n"], where=where, limit=limit).to_arrow()["n"].to_pylist()
        assert len(found) == (len(wanted) if limit is None else min(limit, len(wanted)))
        assert set(found) <= set(wanted) and len(set(found)) == len(found)


KEYS = [(k, s) for k in range(6) for s in ("x", "", "é")]
Key = tuple[int, str]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
numbers_ = st.none() | st.integers(-9, 9)
Given = list[tuple[Key, int | None]]
some_rows = st.lists(st.tuples(st.sampled_from(KEYS), numbers_), min_size=1, max_size=10)


def key_row(key: Key) -> dict[str, Any]:
    return {"k": key[0], "s": key[1], "p": key[0] % 2 == 0}


class KeyedTable(Deployed):
    """The model: key -> row."""

    schema = pa.schema(
        [("k", pa.int32()), ("s", pa.string()), ("p", pa.bool_()), ("a", pa.int32()), ("b", pa.string())]
    )
    fixed = ("k", "s", "p")

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
        self.model: dict[Key, dict[int, Any]] = {}
        self.in_lake: Held = []
        self.etl = -1
        if warm:
            self.upsert([(key, i) for i, key in enumerate(KEYS[3:])])
            self.upsert_what_is_repeated([(key, i) for i, key in enumerate(KEYS[:9])])
            self.tier(True) if self.has_lake else self.maintain(2)
            self.delete(KEYS[::3])

    def rows(self) -> Held:
        return list(self.model.values())

    def lake_rows(self) -> Held:
        return self.in_lake

    def hot_rows(self) -> int | None:
        return None

    def tiered(self) -> None:
        self.in_lake = self.rows()

    def keys_only(self, some: list[Key]) -> Rows:
        return [{c: key_row(key)[c] for c in self.table.primary_key} for key in some]

    def free(self, shape: Shape | None = None) -> list[Column]:
        return [c for c in (shape or self.shape).columns if c.name not in self.fixed]

    def made(self, given: Given, columns: list[Column]) -> Rows:
        """Rows with these columns beside those of the key, all of them from one number."""
        return [{**key_row(key), **{c.name: value_of(c.type, n) for c in columns}} for key, n in given]

    def written(self, rows: Rows, shape: Shape | None = None) -> dict[Key, dict[int, Any]]:
        """What becomes of the rows of these keys: columns that are not given stay as they are."""
        new: dict[Key, dict[int, Any]] = {}
        for row in rows:
            key = row["k"], row["s"]
            new[key] = (shape or self.shape).held(row, new.get(key) or self.model.get(key))
        return new

    @rule(rows=some_rows)
    def upsert(self, rows: Given) -> None:
        made = self.made(rows, self.free())
        self.table.upsert(made)
        self.model |= self.written(made)

    @rule(rows=some_rows)
    def upsert_what_is_repeated(self, rows: Given) -> None:
        made = self.made(rows, self.free())
        self.send("upsert", made)
        self.model |= self.written(made)

    @rule(rows=some_rows, which=st.integers(0, 99), some=st.booleans())
    def upsert_by_who_knows_an_old_definition(self, rows: Given, which: int, some: bool) -> None:
        desc, shape = self.definitions[which % len(self.definitions)]
        made = self.made(rows, self.free(shape)[: 1 if some else None])
        schema = pa.schema([f for f in desc.schema if f.name in made[0]])
        self.handle(desc).writers.write("upsert", pa.Table.from_pylist(made, schema))
        self.model |= self.written(made, shape)

    @rule(rows=some_rows)
    def upsert_some_columns(self, rows: Given) -> None:
        made = self.made(rows, self.free()[:1])
        self.table.upsert(made)
        self.model |= self.written(made)

    @rule(some=some_keys)
    def delete(self, some: list[Key]) -> None:
        self.table.delete(self.keys_only(some))
        for key in some:
            self.model.pop(key, None)

    @rule(rows=some_rows, gone=some_keys)
    def write_through_a_named_writer(self, rows: Given, gone: list[Key]) -> None:
        made = self.made(rows, self.free()[:1])
        self.refresh()
        with self.table.writer("etl") as writer:
            assert writer.last_sequence == self.etl
            writer.upsert(made)
            writer.delete(self.keys_only(gone))
            writer.flush()
            self.etl = writer.last_sequence
        self.model |= self.written(made)
        for key in gone:
            self.model.pop(key, None)

    @rule(many=st.integers(100, 1000))
    def fill_and_empty(self, many: int) -> None:
        rows = self.made([((1000 + i, ""), i) for i in range(many)], self.free())
        self.table.upsert(rows)
        assert self.table.scan().count() == len(self.model) + many
        self.table.delete([{c: r[c] for c in self.table.primary_key} for r in rows])

    @precondition(lambda self: self.durable)
    @rule(rows=some_rows, delete=st.booleans(), syncs=SYNCS, torn_bytes=TORN)
    def write_and_lose_power(self, rows: Given, delete: bool, syncs: int, torn_bytes: int) -> None:
        keys, made = [key for key, _ in rows], self.made(rows, self.free()[:1])
        new: dict[Key, Any] = dict.fromkeys(keys) if delete else self.written(made)
        if delete:
            write = lambda: self.table.delete(self.keys_only(keys))  # noqa: E731
        else:
            write = lambda: self.table.upsert(made)  # noqa: E731
        done = self.write_and_cut_power(write, syncs=syncs, torn_bytes=torn_bytes)
        found = {(r["k"], r["s"]): r for r in self.table.scan().to_arrow().to_pylist()}
        schema = pa.schema([self.table.schema.field(c) for c in self.table.primary_key])
        for _, positions in route(self.table._desc, pa.RecordBatch.from_pylist(self.keys_only(keys), schema)):
            part = keys if positions is None else [keys[i] for i in positions]
            after = {key: new[key] for key in part}
            if {key: found.get(key) for key in part} == self.shown_by_key(after):
                self.model |= {key: row for key, row in after.items() if row is not None}
                for key in [key for key, row in after.items() if row is None]:
                    self.model.pop(key, None)
            else:
                assert not done, "what was acknowledged is there"
                before = self.shown_by_key({k: self.model.get(k) for k in part})
                assert {k: found.get(k) for k in part} == before, "a batch is atomic"

    def shown_by_key(self, rows: Mapping[Key, Mapping[int, Any] | None]) -> dict[Key, dict[str, Any] | None]:
        return {key: None if row is None else self.shape.shown(row) for key, row in rows.items()}

    @rule(rows=some_rows)
    def upsert_to_a_full_disk(self, rows: Given) -> None:
        self.write_when_full(lambda: self.table.upsert(self.made(rows, self.free()[:1])))
        self.upsert_some_columns(rows)

    @rule(some=some_keys)
    def lookup(self, some: list[Key]) -> None:
        found = self.table.lookup(self.keys_only(some)).to_pylist()
        assert found == self.shown([self.model[key] for key in some if key in self.model])

    @precondition(lambda self: self.prefixed)
    @rule(k=st.integers(0, 6))
    def prefix_lookup(self, k: int) -> None:
        asked = {c: v for c, v in {"k": k, "p": k % 2 == 0}.items() if c == "k" or c in self.table.partition_by}
        found = self.table.prefix_lookup([asked]).to_pylist()
        assert in_order(found) == in_order(self.shown([row for (number, _), row in self.model.items() if number == k]))

    @rule(low=st.integers(-9, 9))
    def scan_where(self, low: int) -> None:
        last = self.free()[-1]
        some = next((c for c in self.free() if pa.types.is_integer(c.type)), None)
        where = f"{last.name} is null" if some is None else f"{some.name} > {low} or {last.name} is null"
        scan = self.table.scan(where=where)
        values = [some.of(r) if some else None for r in self.rows()]
        above = [r for r, v in zip(self.rows(), values, strict=True) if v is not None and v > low]
        wanted = above + [r for r in self.rows() if r not in above and last.of(r) is None]
        assert in_order(scan.to_arrow().to_pylist()) == in_order(self.shown(wanted))
        assert scan.count() == len(wanted)

    @rule(start=st.sampled_from(["earliest", "full"]))
    def replay_the_changelog(self, start: Any) -> None:
        state: dict[Key, dict[str, Any]] = {}
        for batch in self.table.subscribe(start, stop="now"):
            for r in batch.rows.to_pylist():
                key, image = (r["k"], r["s"]), {c: r[c] for c in self.shape.names}
                if r["__change_type"] in ("-U", "-D"):
                    assert state.pop(key) == image
                else:
                    assert key not in state
                    state[key] = image
        assert state == self.shown_by_key(self.model)


TestLogTable = LogTable.TestCase
TestLogTable.settings = settings(max_examples=EXAMPLES or 7, stateful_step_count=15)
TestKeyedTable = KeyedTable.TestCase
TestKeyedTable.settings = settings(max_examples=EXAMPLES or 7, stateful_step_count=15)
