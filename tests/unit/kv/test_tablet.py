"""The kv tablet: what a write logs, and that applying the log gives the state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.kv import heap
from lakehead.kv.growing import GrowingArray
from lakehead.kv.index import KeyIndex
from lakehead.kv.prefixes import PrefixIndex
from lakehead.kv.tablet import Change, KvTablet
from lakehead.types import Schemas

SCHEMA = pa.schema([pa.field("k", pa.int32(), False), ("a", pa.string()), ("b", pa.int64())])
SYMBOLS = ("+A", "+I", "-U", "+U", "-D")


class Logged:
    """A kv tablet with the end of an imagined log."""

    def __init__(
        self, schema: pa.Schema = SCHEMA, key: tuple[str, ...] = ("k",), prefix: tuple[str, ...] = (), seed: int = 1
    ) -> None:
        self.kv = KvTablet(Schemas.only(schema), key, prefix, seed=seed)
        self.key = key
        self.end = 0
        self.records: list[tuple[Any, ...]] = []

    def upsert(self, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        schema = pa.schema([f for f in self.kv.schema if f.name in rows[0]])
        return self.log(self.kv.plan_upsert(pa.RecordBatch.from_pylist(rows, schema=schema), self.end))

    def delete(self, *keys: Any) -> list[tuple[Any, ...]]:
        rows = [dict(zip(self.key, k if isinstance(k, tuple) else (k,), strict=True)) for k in keys]
        return self.log(self.kv.plan_delete(pa.RecordBatch.from_pylist(rows, schema=self.key_schema)))

    def log(self, change: Change) -> list[tuple[Any, ...]]:
        assert len(change.change_types) == len(change.prev_offsets) == change.rows.num_rows
        assert change.rows.schema == self.kv.schema
        change.rows.validate(full=True)
        self.kv.apply(self.end, change.change_types, change.rows)
        images = [tuple(r.values()) for r in change.rows.to_pylist()]
        made = [
            (SYMBOLS[t], p, *image)
            for t, p, image in zip(change.change_types, change.prev_offsets.tolist(), images, strict=True)
        ]
        self.end += len(made)
        self.records += made
        return made

    @property
    def key_schema(self) -> pa.Schema:
        return pa.schema([self.kv.schema.field(c) for c in self.key])

    def get(self, *keys: Any) -> list[Any]:
        rows = [dict(zip(self.key, k if isinstance(k, tuple) else (k,), strict=True)) for k in keys]
        slots = self.kv.find(pa.RecordBatch.from_pylist(rows, schema=self.key_schema))
        found = [tuple(r.values()) for r in self.kv.gather(slots).to_pylist()]
        return [row if slot >= 0 else None for slot, row in zip(slots, found, strict=True)]


def test_insert_update_delete() -> None:
    t = Logged()
    assert t.upsert([{"k": 1, "a": "x", "b": 1}, {"k": 2, "a": None, "b": 2}]) == [
        ("+I", -1, 1, "x", 1),
        ("+I", -1, 2, None, 2),
    ]
    assert t.upsert([{"k": 2, "a": "y", "b": None}, {"k": 3, "a": "z", "b": 3}]) == [
        ("-U", 1, 2, None, 2),
        ("+U", 1, 2, "y", None),
        ("+I", -1, 3, "z", 3),
    ]
    assert t.get(1, 2, 3, 4) == [(1, "x", 1), (2, "y", None), (3, "z", 3), None]
    assert t.delete(2, 4, 1) == [("-D", 3, 2, "y", None), ("-D", 0, 1, "x", 1)]
    assert t.get(1, 2, 3) == [None, None, (3, "z", 3)] and len(t.kv) == 1
    assert t.upsert([{"k": 2, "a": "again", "b": 0}]) == [("+I", -1, 2, "again", 0)]


def test_partial_update_keeps_the_other_columns() -> None:
    t = Logged()
    t.upsert([{"k": 1, "a": "x", "b": 1}])
    assert t.upsert([{"k": 1, "b": 5}, {"k": 2, "b": 6}]) == [
        ("-U", 0, 1, "x", 1),
        ("+U", 0, 1, "x", 5),
        ("+I", -1, 2, None, 6),
    ]
    assert t.upsert([{"k": 1, "a": None}]) == [("-U", 2, 1, "x", 5), ("+U", 2, 1, None, 5)]
    assert t.upsert([{"k": 1}]) == [("-U", 5, 1, None, 5), ("+U", 5, 1, None, 5)]
    assert t.get(1, 2) == [(1, None, 5), (2, None, 6)]


def test_rows_of_one_key_in_one_batch_take_effect_in_order() -> None:
    t = Logged()
    assert t.upsert([{"k": 1, "a": None, "b": 1}, {"k": 1, "a": "v", "b": None}, {"k": 1, "a": "w", "b": 3}]) == [
        ("+I", -1, 1, None, 1),
        ("-U", 0, 1, None, 1),
        ("+U", 0, 1, "v", None),
        ("-U", 2, 1, "v", None),
        ("+U", 2, 1, "w", 3),
    ]
    assert t.get(1) == [(1, "w", 3)] and len(t.kv) == 1


def test_partial_rows_of_one_key_in_one_batch_build_on_the_live_row() -> None:
    t = Logged()
    t.upsert([{"k": 1, "a": "kept", "b": 0}])
    assert t.upsert([{"k": 1, "b": 1}, {"k": 9, "b": 7}, {"k": 1, "b": 2}, {"k": 9, "b": 8}]) == [
        ("-U", 0, 1, "kept", 0),
        ("+U", 0, 1, "kept", 1),
        ("+I", -1, 9, None, 7),
        ("-U", 2, 1, "kept", 1),
        ("+U", 2, 1, "kept", 2),
        ("-U", 3, 9, None, 7),
        ("+U", 3, 9, None, 8),
    ]
    assert t.get(1, 9) == [(1, "kept", 2), (9, None, 8)]


def test_a_key_deleted_twice_in_one_batch_goes_once() -> None:
    t = Logged()
    t.upsert([{"k": 1, "a": "x", "b": 1}])
    assert t.delete(1, 1, 5, 1) == [("-D", 0, 1, "x", 1)]
    assert t.delete(1) == [] and len(t.kv) == 0


def test_planning_changes_nothing() -> None:
    t = Logged()
    t.upsert([{"k": 1, "a": "x", "b": 1}])
    rows = [{"k": i, "a": "new", "b": i} for i in range(3000)]
    first = t.kv.plan_upsert(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), 1)
    t.kv.plan_delete(pa.RecordBatch.from_pylist([{"k": 1}], schema=t.key_schema))
    assert len(t.kv) == 1 and t.get(0, 1) == [None, (1, "x", 1)]
    second = t.kv.plan_upsert(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), 1)
    assert first.rows.equals(second.rows) and first.prev_offsets.tolist() == second.prev_offsets.tolist()


def test_ends_give_each_row_its_records() -> None:
    t = Logged()
    t.upsert([{"k": 1, "a": "x", "b": 1}])
    batch = pa.RecordBatch.from_pylist([{"k": k, "a": "", "b": 0} for k in (1, 2, 2)], schema=SCHEMA)
    change = t.kv.plan_upsert(batch, 1)
    assert change.ends.tolist() == [2, 3, 5]
    part = change.part(2, 5)
    assert part.change_types.tolist() == [1, 2, 3] and part.prev_offsets.tolist() == [-1, 3, 3]
    assert part.rows.column(0).to_pylist() == [2, 2, 2]


def test_replaying_records_in_one_piece_or_many_gives_the_same_state() -> None:
    t = Logged()
    for i in range(30):
        t.upsert([{"k": (i * k) % 11, "a": f"{i}-{k}", "b": k} for k in range(5)])
        t.delete(i % 11, (i + 3) % 11)
    live = [r for _, b in t.kv.live_rows() for r in b.to_pylist()]
    types = np.array([SYMBOLS.index(r[0]) for r in t.records], np.int8)
    images = pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, r[2:], strict=True)) for r in t.records], schema=SCHEMA)
    for piece in (1, 7, len(t.records)):
        replayed = KvTablet(Schemas.only(SCHEMA), ("k",), seed=2)
        for at in range(0, len(types), piece):
            replayed.apply(at, types[at : at + piece], images.slice(at, piece))
        again = replayed.live_rows()
        assert [r for _, b in again for r in b.to_pylist()] == live
        assert [o for offs, _ in again for o in offs] == [o for offs, _ in t.kv.live_rows() for o in offs]


def test_prefix() -> None:
    schema = pa.schema([pa.field("u", pa.string(), False), pa.field("n", pa.int32(), False), ("v", pa.float64())])
    t = Logged(schema, ("u", "n"), ("u",))
    t.upsert([{"u": u, "n": n, "v": n / 2} for n in range(700) for u in ("a", "b", "ab")])
    t.delete(("a", 3), ("b", 699))
    t.upsert([{"u": "a", "n": 1, "v": None}])

    def find(*prefixes: str) -> list[tuple[Any, ...]]:
        asked = pa.RecordBatch.from_pylist([{"u": u} for u in prefixes], schema=pa.schema([schema.field("u")]))
        return [tuple(r.values()) for r in t.kv.gather(t.kv.prefix_find(asked)).to_pylist()]

    assert sorted(find("a"), key=lambda r: r[1]) == [("a", n, None if n == 1 else n / 2) for n in range(700) if n != 3]
    assert len(find("a", "b", "a")) == 2 * 699
    assert find("c") == [] and find() == []


def test_live_rows_come_in_offset_order() -> None:
    t = Logged()
    t.upsert([{"k": k, "a": str(k), "b": k} for k in range(5)])
    t.upsert([{"k": 0, "a": "moved", "b": 0}])
    t.delete(3)
    [(offsets, rows)] = t.kv.live_rows([1])
    assert offsets.tolist() == [1, 2, 4, 6] and rows.to_pydict() == {"a": ["1", "2", "4", "moved"]}
    assert KvTablet(Schemas.only(SCHEMA), ("k",), seed=2).live_rows() == []


WIDE = pa.schema(
    [
        pa.field("k", pa.string(), False),
        ("a", pa.string()),
        ("b", pa.int64()),
        ("c", pa.list_(pa.int16())),
        ("d", pa.bool_()),
    ]
)


@pytest.mark.parametrize("seed", range(6))
def test_what_was_planned_is_applied_as_what_is_read_of_the_log(seed: int) -> None:
    """Whatever the plan found out, whichever plan was the last."""
    rng = random.Random(seed)
    planned, replayed = (KvTablet(Schemas.only(WIDE), ("k",), ("k",), seed=1) for _ in range(2))
    end = 0

    def row(keys: list[str], names: list[str]) -> list[dict[str, Any]]:
        values = {
            "a": lambda: rng.choice([None, "x", "longer" * 20]),
            "b": lambda: rng.choice([None, rng.randrange(99)]),
            "c": lambda: rng.choice([None, [], [1, 2]]),
            "d": lambda: rng.choice([None, True, False]),
        }
        return [{"k": key, **{n: values[n]() for n in names if n != "k"}} for key in keys]

    def state(kv: KvTablet) -> list[tuple[list[int], list[dict[str, Any]]]]:
        return [(offsets.tolist(), rows.to_pylist()) for offsets, rows in kv.live_rows(list(range(len(WIDE))))]

    for _ in range(60):
        count = rng.randrange(1, 30)
        keys = [f"key{rng.randrange(60)}" for _ in range(count)]
        if rng.random() < 0.7:
            keys = list(dict.fromkeys(keys))
        names = WIDE.names if rng.random() < 0.6 else ["k", *rng.sample(WIDE.names[1:], 2)]
        schema = pa.schema([WIDE.field(n) for n in WIDE.names if n in names])
        batch = pa.RecordBatch.from_pylist(row(keys, schema.names), schema=schema)
        if rng.random() < 0.2:
            change = planned.plan_delete(batch.select(["k"]))
        else:
            change = planned.plan_upsert(batch, end)
        if rng.random() < 0.2:
            planned.plan_upsert(pa.RecordBatch.from_pylist(row(["never"], WIDE.names), schema=WIDE), end)
        read = pa.RecordBatch.from_arrays(change.rows.columns, schema=WIDE)
        planned.apply(end, change.change_types, change.rows)
        replayed.apply(end, change.change_types, read)
        end += change.rows.num_rows
        assert state(planned) == state(replayed)
        some = pa.RecordBatch.from_pydict({"k": [f"key{n}" for n in range(60)]})
        assert planned.gather(planned.find(some)).equals(replayed.gather(replayed.find(some)))
        assert sorted(planned.prefix_find(some).tolist()) == sorted(
            planned.find(some)[planned.find(some) >= 0].tolist()
        )


def test_updates_keep_nothing_of_the_message_that_they_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long values are kept as they were logged, not as parts of what a client has sent."""
    monkeypatch.setattr(heap, "_MERGE_ROWS_MAX", 1)
    kv = KvTablet(Schemas.only(SCHEMA), ("k",), seed=1)
    held = []
    for end, letter in ((0, "a"), (10, "b")):
        rows = pa.RecordBatch.from_pydict(
            {"k": list(range(10)), "a": [letter * 100] * 10, "b": list(range(10))}, schema=SCHEMA
        )
        held.append(rows.column(1).buffers()[2])
        change = kv.plan_upsert(rows, end)
        kv.apply(end, change.change_types, change.rows)
    kept = {b.address for chunk in kv._columns[1]._chunked._chunks for b in chunk.buffers() if b}  # type: ignore[attr-defined]
    assert held[1].address not in kept


# Memory that is not there


PLACES: dict[str, tuple[Any, str]] = {
    "an array": (GrowingArray, "grow"),
    "a wider column": (heap.ShortColumn, "_widen"),
    "a column of long values": (heap.ShortColumn, "_as_chunks"),
    "a chunk": (heap.ChunkedColumn, "_append"),
    "what is kept of prefixes": (PrefixIndex, "add"),
    "the index": (KeyIndex, "apply"),
    "rows that are there": (KeyIndex, "renew"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", ["w" * 30, "w" * 60])
@pytest.mark.parametrize("some", [range(3000), range(500)])
def test_without_memory_rows_are_as_before_or_known_to_be_torn(
    place: str, text: str, some: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that memory is asked for in turn, until the write gets through: while it is planned nothing changes."""
    owner, name = PLACES[place]
    asks, left = getattr(owner, name), 0

    def refused(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError("no memory for this test")
        return asks(self, *args)

    def rows(keys: range, value: int, text: str) -> pa.RecordBatch:
        made = [{"p": k % 7, "k": f"key{k}", "a": value, "s": text, "b": value} for k in keys]
        return pa.RecordBatch.from_pylist(made, schema=schema)

    schema = pa.schema(
        [("p", pa.int64()), ("k", pa.string()), ("a", pa.int64()), ("s", pa.string()), ("b", pa.int64())]
    )
    before, after = rows(range(1000), 1, "v"), rows(some, 2, text)
    for turn in range(1, 200):
        kv = KvTablet(Schemas.only(schema), ("p", "k"), ("p",), seed=1)
        kv.apply(0, np.ones(1000, np.int8), before)
        left, planned = turn, False
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refused)
            try:
                change = kv.plan_upsert(after, 1000)
                planned = True
                kv.apply(1000, change.change_types, change.rows)
            except MemoryError:
                assert kv.torn == planned and len(kv) == 1000
                if planned:
                    continue
        there = {r["k"]: r for r in [*before.to_pylist(), *(after.to_pylist() if planned else [])]}
        assert not kv.torn and len(kv) == len(there)
        found = kv.gather(kv.find(pa.RecordBatch.from_pylist(list(there.values()), schema=schema)))
        assert found.to_pylist() == list(there.values())
        prefix = kv.prefix_answer(pa.record_batch({"p": pa.array([3])}))
        assert sorted(prefix["k"].to_pylist()) == sorted(k for k, r in there.items() if r["p"] == 3)
        if planned:
            return
        change = kv.plan_upsert(after, 1000)
        kv.apply(1000, change.change_types, change.rows)
        assert kv.gather(kv.find(after)).to_pylist() == after.to_pylist()
    pytest.fail("the write never got through")


@pytest.mark.parametrize("key", ["k", "s"])
def test_memory_for_new_rows_is_asked_for_before_they_are_logged(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, asks = pa.schema([("k", pa.int64()), ("s", pa.string()), ("f", pa.float64())]), GrowingArray.grow

    def refused(self: GrowingArray, rows: int) -> None:
        assert rows == 0, "asked for memory"
        asks(self, rows)

    kv = KvTablet(Schemas.only(schema), (key,), seed=1)
    for start in range(0, 20_000, 5000):
        rows = [{"k": n, "s": f"key{n:05}", "f": n / 2} for n in range(start, start + 5000)]
        change = kv.plan_upsert(pa.RecordBatch.from_pylist(rows, schema=schema), start)
        with monkeypatch.context() as patched:
            if start:  # by then columns are as wide as their values
                patched.setattr(GrowingArray, "grow", refused)
            kv.apply(start, change.change_types, change.rows)
    assert len(kv) == 20_000
