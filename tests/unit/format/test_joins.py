"""Joining and cutting: the same rows in the same order, within bounds of rows and bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.errors import LimitExceededError
from lakehead.format import joins
from lakehead.format.joins import AnswerSize

STRUCT = pa.struct([("a", pa.string()), ("b", pa.list_(pa.int64()))])
TYPES = [
    pa.int64(), pa.bool_(), pa.string(), pa.large_binary(), pa.list_(pa.string()), pa.large_list(STRUCT), STRUCT,
    pa.map_(pa.string(), pa.list_(pa.binary())), pa.binary(7), pa.decimal128(20, 2),
]  # fmt: skip


def value(t: pa.DataType, rng: random.Random) -> Any:
    if rng.random() < 0.1:
        return None
    if pa.types.is_struct(t):
        return {t.field(i).name: value(t.field(i).type, rng) for i in range(t.num_fields)}
    if pa.types.is_map(t):
        return [(f"k{i}", value(t.item_type, rng)) for i in range(rng.randrange(4))]
    if pa.types.is_nested(t):
        return [value(t.value_type, rng) for _ in range(rng.randrange(6))]
    if pa.types.is_fixed_size_binary(t):
        return b"1234567"
    if pa.types.is_string(t):
        return "x" * rng.choice([0, 3, 40, 900])
    if pa.types.is_binary(t) or pa.types.is_large_binary(t):
        return b"y" * rng.choice([0, 5, 700])
    return rng.random() < 0.5 if pa.types.is_boolean(t) else rng.randrange(100)


def random_batch(rows: int, rng: random.Random) -> pa.RecordBatch:
    before = rng.randrange(5)
    arrays = [pa.array([value(t, rng) for _ in range(before + rows)], t) for t in TYPES]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(TYPES))]).slice(before)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "BYTES_MAX", 8000)


def measured(batch: pa.RecordBatch) -> tuple[int, int]:
    return batch.num_rows, batch.nbytes


def require_small(batches: list[pa.RecordBatch]) -> None:
    sizes = [(b.num_rows, b.nbytes) for b in batches]
    assert all(rows == 1 or size <= 1.1 * 8000 for rows, size in sizes), sizes


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_rows_add_up_to_the_size_of_the_batch(seed: int) -> None:
    batch = random_batch(200, random.Random(seed))
    assert 0.8 * batch.nbytes <= joins.row_bytes(batch).sum() <= 1.4 * batch.nbytes
    at = np.arange(200)
    for column in batch.columns:
        sizes = joins.range_bytes(column, at, at + 1)
        assert sizes.max() <= joins.largest(column) <= sizes.max() + 4 and joins.largest(column.slice(0, 0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_same_rows_within_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    batches = [random_batch(rng.choice([0, 1, 2, 30, 200]), rng) for _ in range(12)]
    table = pa.Table.from_batches(batches)
    whole = list(joins.table_batches(table, rows_max=50))
    assert pa.Table.from_batches(whole, table.schema).equals(table) and all(b.num_rows <= 50 for b in whole)
    require_small(whole)
    slices = [part for b in batches for part in joins.cut(b)]
    assert pa.Table.from_batches(slices, table.schema).equals(table)
    require_small(slices)
    order = np.array(rng.sample(range(table.num_rows), table.num_rows), np.int64)
    sorted_rows = list(joins.taken(batches, order))
    assert pa.Table.from_batches(sorted_rows, table.schema).to_pylist() == table.take(pa.array(order)).to_pylist()
    require_small(sorted_rows)


def test_neighbours_are_joined_and_what_is_large_stands_alone() -> None:
    sizes = [1, 1, 1, 50, 2, 2, 300, 1, 1]
    batches = [pa.record_batch({"x": ["y" * 10] * n}) for n in sizes]
    groups = list(joins.gathered(batches, measured, rows_max=4, rows_enough=40))
    assert [[b.num_rows for b in group] for group in groups] == [[1, 1, 1], [50], [2, 2], [300], [1, 1]]
    heavy = [pa.record_batch({"x": ["y" * n]}) for n in (10, 3000, 10, 1000, 1000, 1500, 1500, 1500, 1500, 900, 90_000)]
    groups = list(joins.gathered(heavy, measured, rows_max=100, rows_enough=100))
    assert [len(group) for group in groups] == [1, 1, 6, 2, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bytes_max", [1000, joins.BYTES_MAX])
def test_rows_at_positions_of_any_chunks(seed: int, bytes_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "BYTES_MAX", bytes_max)
    rng = random.Random(seed)
    table = pa.Table.from_batches([random_batch(rng.randrange(1, 40), rng) for _ in range(rng.randrange(1, 5))])
    order = np.array([rng.randrange(len(table)) for _ in range(60)], np.int64)
    assert joins.rows_at(table, order).equals(table.take(pa.array(order)))
    assert joins.rows_at(table, order[:0]).equals(table.slice(0, 0))
    assert joins.rows_at(table.slice(0, 0), order[:0]).equals(table.slice(0, 0))


def test_rows_at_positions_beside_texts_that_no_column_holds_together() -> None:
    large = (1 << 30) + 1
    ends = pa.py_buffer(np.array([0, large, large + 1], np.int32))
    chunk = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(bytes(large + 1))])
    table = pa.table({"a": pa.chunked_array([chunk, chunk])})
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        table.take(pa.array([1, 3]))
    assert joins.rows_at(table, np.array([3, 1])).to_pylist() == [{"a": "\0"}] * 2


def test_an_answer_is_as_large_as_its_rows_and_not_as_what_they_share() -> None:
    shared = pa.record_batch({"a": pa.array(range(100_000))})
    size = AnswerSize(100_000)
    for n in range(1000):  # a row of each of many tablets: 800 KB in all buffers together are no answer
        size.add(shared.slice(n, 1), n + 1)
    with pytest.raises(LimitExceededError):
        size.add(shared, 2000)
    AnswerSize(10).add(shared, 1)  # one row never is too many
    with pytest.raises(LimitExceededError):
        AnswerSize(10).add(shared, 2)
