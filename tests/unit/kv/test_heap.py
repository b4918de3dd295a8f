"""Heap columns of every type against a list of slots."""

from __future__ import annotations

import datetime as dt
import decimal
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.kv import heap
from lakehead.kv.growing import GrowingArray
from lakehead.kv.heap import Sources, heap_column

TYPES: list[tuple[pa.DataType, Callable[[int], Any]]] = [
    (pa.bool_(), lambda i: i % 2 == 0),
    (pa.int8(), lambda i: i % 256 - 128),
    (pa.int16(), lambda i: -i),
    (pa.int32(), lambda i: i * 1000),
    (pa.int64(), lambda i: i * 10**15),
    (pa.float32(), lambda i: i / 2),
    (pa.float64(), lambda i: i / 3),
    (pa.decimal128(20, 3), lambda i: decimal.Decimal(i - 50) / 1000),
    (pa.date32(), lambda i: dt.date(2000, 1, 1) + dt.timedelta(days=i)),
    (pa.time32("s"), lambda i: dt.time(i % 24)),
    (pa.time64("us"), lambda i: dt.time(0, 0, 0, i)),
    (pa.timestamp("ms"), lambda i: dt.datetime(2000, 1, 1) + dt.timedelta(hours=i)),
    (pa.timestamp("us", "UTC"), lambda i: dt.datetime(2000, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=i)),
    (pa.string(), lambda i: "s" * (i % 7) + str(i)),
    (pa.large_string(), lambda i: f"large {i}"),
    (pa.string(), lambda i: "é" * (i % 20)),
    (pa.string(), lambda i: "long" * 90 if i == 77 else "s" * (i % 40)),
    (pa.large_binary(), lambda i: bytes(i)),
    (pa.binary(), lambda i: bytes([i % 256]) * (i % 3)),
    (pa.large_binary(), lambda i: bytes([i % 256])),
    (pa.binary(5), lambda i: f"{i:05d}"[-5:].encode()),
    (pa.list_(pa.int32()), lambda i: [i] * (i % 4)),
    (pa.large_list(pa.string()), lambda i: [str(i), None]),
    (pa.map_(pa.string(), pa.int64()), lambda i: [(str(i), i)]),
    (
        pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))]),
        lambda i: {"x": i, "y": None if i % 2 else [str(i)]},
    ),
]


@pytest.mark.parametrize(("t", "make"), TYPES, ids=lambda v: str(v) if isinstance(v, pa.DataType) else "")
def test_equals_a_list(t: pa.DataType, make: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_GATHER_ROWS", 8)  # chunks wear out early
    choose, column, model = random.Random(3), heap_column(t), [None] * 300
    column.resize(100)
    stored: set[int] = set()
    for step in range(40):
        if step == 10:
            column.resize(300)
        room = 100 if step < 10 else 300
        slots = choose.sample(range(room), choose.randrange(60))
        values = [None if step > 5 and choose.random() < 0.2 else make(choose.randrange(200)) for _ in slots]
        column.scatter(np.array(slots, np.int64), pa.array([None, *values], t).slice(1))
        for slot, value in zip(slots, values, strict=True):
            model[slot] = value
        if step % 7 == 6:
            cleared = choose.sample(range(room), 10)
            column.clear(np.array(cleared, np.int64))
            column.scatter(np.array(cleared, np.int64), pa.nulls(10, t))
            for slot in cleared:
                model[slot] = None
        asked = [choose.randrange(-1, room) for _ in range(50)]
        found = column.gather(np.array(asked, np.int64))
        found.validate(full=True)
        assert found.type == t
        used = {i for i, v in enumerate(model) if v is not None}
        for slot, value in zip(asked, found.to_pylist(), strict=True):
            if slot < 0 or slot in used:
                assert value == (None if slot < 0 else model[slot])
        stored |= {*slots} | ({*cleared} if step % 7 == 6 else set())
        given = [None if choose.random() < 0.2 else make(choose.randrange(200)) for _ in range(30)]
        image = [choose.choice([*stored]) if stored and choose.random() < 0.5 else ~choose.randrange(30) for _ in asked]
        merged = column.merge(Sources.of(np.array(image, np.int64)), pa.array([None, *given], t).slice(1))
        merged.validate(full=True)
        assert merged.type == t
        assert merged.to_pylist() == [model[at] if at >= 0 else given[~at] for at in image]


@pytest.mark.parametrize("t", [t for t, _ in TYPES], ids=str)
def test_nothing_asked_nothing_stored(t: pa.DataType) -> None:
    column = heap_column(t)
    assert column.gather(np.zeros(0, np.int64)).type == t
    assert column.gather(np.array([-1])).to_pylist() == [None]
    column.resize(4)
    assert column.gather(np.array([-1, -1])).to_pylist() == [None, None]
    column.scatter(np.zeros(0, np.int64), pa.array([], t))
    assert len(column.gather(np.zeros(0, np.int64))) == 0
    assert column.gather(np.array([-1, -1])).null_count == 2
    column.scatter(np.array([2]), pa.nulls(1, t))
    assert column.gather(np.array([-1])).to_pylist() == column.gather(np.array([2])).to_pylist() == [None]


@pytest.mark.parametrize(("t", "make"), TYPES[13:20], ids=lambda v: str(v) if isinstance(v, pa.DataType) else "")
def test_single_values_and_their_sizes(t: pa.DataType, make: Callable[[int], Any]) -> None:
    column = heap_column(t)
    column.resize(100)
    values = [None if i % 9 == 8 else make(i) for i in range(100)]
    for part in range(0, 100, 20):  # longer ones come later
        column.scatter(np.arange(part, part + 20), pa.array(values[part : part + 20], t))
        for slot in range(100):
            assert column.value(slot) == (values[slot] if slot < part + 20 else None)
        sizes = column.sizes(np.arange(-1, part + 20))
        own = [len(v.encode() if isinstance(v, str) else v or b"") for v in [None, *values[: part + 20]]]
        assert all(size >= bytes_ for size, bytes_ in zip(sizes.tolist(), own, strict=True))
        assert column.bytes_max >= sizes.max()


def test_short_values_become_chunks_when_a_long_one_comes() -> None:
    column = heap.ShortColumn(pa.string())
    column.resize(4)
    column.scatter(np.array([0, 1]), pa.array(["a" * 40, None]))
    assert column._chunked is None
    column.scatter(np.array([3]), pa.array(["b" * 41]))
    assert column._chunked is not None and len(column._lengths) == 0
    column.resize(5)
    column.clear(np.array([0]))
    assert column.gather(np.array([-1, 0, 1, 2, 3, 4])).to_pylist() == [None] * 4 + ["b" * 41, None]


@pytest.mark.parametrize("t", [t for t, _ in TYPES], ids=str)
def test_a_column_without_memory_to_grow_has_what_it_had(t: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    make = next(make for other, make in TYPES if other.equals(t))
    column = heap_column(t)
    column.resize(4)
    column.scatter(np.array([1, 2]), pa.array([make(1), make(2)], t))

    def grow(array: GrowingArray, rows: int) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(GrowingArray, "grow", grow)
        column.resize(1000)
    assert column.gather(np.array([2, 1])).equals(pa.array([make(2), make(1)], t))
    assert column.value(1) is not None
    column.resize(1000)
    assert column.gather(np.array([2, 999]))[0].equals(pa.array([make(2)], t)[0])


def test_dead_values_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_GATHER_ROWS", 8)
    column = heap.ChunkedColumn(pa.string())
    column.resize(100)
    slots = np.arange(100)
    for i in range(200):
        column.scatter(slots, pa.array([f"{i} {s}" for s in slots]))
    assert sum(len(chunk) for chunk in column._chunks) <= 1000
    assert column.gather(slots).to_pylist() == [f"199 {s}" for s in slots]


@pytest.mark.parametrize(("rows", "dead", "left"), [(16, 15, 16), (17, 8, 17), (17, 9, 8), (18, 9, 18), (18, 10, 8)])
@pytest.mark.parametrize("at_once", [True, False])
def test_large_chunks_are_rewritten_once_most_is_dead(
    rows: int, dead: int, left: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_GATHER_ROWS", 8)
    column = heap.ChunkedColumn(pa.string())
    column.resize(rows)
    column.scatter(np.arange(rows), pa.array([str(i) for i in range(rows)]))
    for slots in [np.arange(dead)] if at_once else np.arange(dead).reshape(-1, 1):
        column.clear(slots)
    assert sum(len(chunk) for chunk in column._chunks) == left
    assert column.gather(np.arange(rows)).to_pylist() == [None] * dead + [str(i) for i in range(dead, rows)]


def test_small_writes_do_not_pile_up_chunks() -> None:
    column = heap.ChunkedColumn(pa.string())
    column.resize(2000)
    for i in range(2000):
        column.scatter(np.array([i]), pa.array([str(i)]))
    assert len(column._chunks) < 30
    assert column.gather(np.arange(2000)).to_pylist() == [str(i) for i in range(2000)]
