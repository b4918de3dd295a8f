"""The key index against a dict."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from lakehead.kv.index import KeyIndex
from lakehead.kv.keys import KeyBatch, encode_keys

INTS = pa.array([(i * 0x9E3779B97F4A7C15) % 2**63 * (-1) ** i for i in range(4000)], pa.int64())
SEED = np.uint64(0xFEDCBA9876543210)
STRINGS = pa.array([f"key-{i}" * (1 + i % 5) for i in range(4000)])


def batch(keys: pa.Array, rows: list[int]) -> KeyBatch:
    return encode_keys([keys.take(pa.array(rows, pa.int64()))], SEED)


@pytest.mark.parametrize("keys", [INTS, STRINGS], ids=["exact", "hashed"])
def test_equals_a_dict_through_growth_deletes_and_returns(keys: pa.Array) -> None:
    choose, index, model, offset = random.Random(5), KeyIndex(), dict[int, int](), 0
    for step in range(60):
        many = 400 if step < 20 else 120
        rows = [choose.randrange(len(keys)) for _ in range(many)]
        deleted = np.array([choose.random() < (0.1 if step < 20 else 0.7) for _ in rows])
        offsets = np.arange(offset, offset + many)
        slots = index.apply(batch(keys, rows), deleted, offsets)
        for row, gone, at, slot in zip(rows, deleted, offsets.tolist(), slots.tolist(), strict=True):
            assert (slot < 0) == (bool(gone) and row not in model)
            if gone:
                model.pop(row, None)
            else:
                model[row] = at
        offset += many
        found = index.probe(batch(keys, list(range(len(keys)))))
        live = {row: int(index.live_offsets[slot]) for row, slot in enumerate(found.tolist()) if slot >= 0}
        assert live == model and len(index) == len(model)
        assert len(set(found[found >= 0].tolist())) == len(model)
        assert index.live_offsets[index.live_slots()].tolist() == sorted(model.values())
    assert index.slots_used <= 4000, "deleted keys give their slots back"
    before = index.nbytes
    for _ in range(20):
        rows = list(range(200))
        index.apply(batch(keys, rows), np.zeros(200, np.bool_), np.arange(offset, offset + 200))
        index.apply(batch(keys, rows), np.ones(200, np.bool_), np.arange(offset, offset + 200))
    assert index.nbytes <= 2 * before, "keys that come and go cost nothing for good"


@pytest.mark.parametrize("keys", [INTS, STRINGS], ids=["exact", "hashed"])
@pytest.mark.parametrize("many", [1, 7, 60])
def test_equals_a_dict_at_each_step_of_its_growth(keys: pa.Array, many: int) -> None:
    choose, index, model, between = random.Random(many), KeyIndex(), dict[int, int](), 0
    offset = 1270  # a few below where the first table is full
    index.apply(batch(keys, list(range(offset))), np.zeros(offset, np.bool_), np.arange(offset))
    model.update(zip(range(offset), range(offset), strict=True))
    while len(index._before) or len(index._entries) == 2048:
        rows = [choose.randrange(3000) for _ in range(many)]
        deleted = np.array([choose.random() < 0.2 for _ in rows])
        index.apply(batch(keys, rows), deleted, np.arange(offset, offset + many))
        for row, gone, at in zip(rows, deleted, range(offset, offset + many), strict=True):
            model.pop(row, None)
            if not gone:
                model[row] = at
        offset += many
        found = index.probe(batch(keys, list(range(3000))))
        assert {r: int(index.live_offsets[s]) for r, s in enumerate(found.tolist()) if s >= 0} == model
        between += len(index._before) > 0
    assert between >= 5


@pytest.mark.parametrize("at", [0, 1, 1000, 2046, 2047])
def test_a_table_moves_wherever_a_run_of_keys_lies_also_around_its_end(at: int) -> None:
    def homes(home: int, n: int, first: int) -> pa.Array:
        """Keys whose home in a table of 2,048 entries is this one, for seed 0."""
        return pa.array(np.array([unmixed((home << 53) | (first + i)) for i in range(n)], np.uint64).view(np.int64))

    index, kept = KeyIndex(), list[pa.Array]()

    def upsert(keys: pa.Array) -> None:
        offset = sum(map(len, kept))
        index.apply(
            encode_keys([keys], np.uint64(0)), np.zeros(len(keys), np.bool_), np.arange(offset, offset + len(keys))
        )
        kept.append(keys)

    def complete() -> bool:
        found = index.probe(encode_keys([pa.concat_arrays(kept)], np.uint64(0)))
        return index.live_offsets[found].tolist() == list(range(len(index))) and found.min() >= 0

    upsert(homes(at, 1280, 0))
    upsert(homes(at, 1, 5000))
    assert len(index._before) == 2048
    last = (int(index._moved[0]) - 1) % 2048  # what comes to this home until it moves is where the move began
    for i in range(20):
        upsert(homes(last, 20, 10000 + 20 * i))
        assert complete()
    assert len(index._before) == 0 and len(index) == 1681


@pytest.mark.parametrize("keys", [INTS, STRINGS], ids=["exact", "hashed"])
def test_rows_of_keys_that_are_there_are_written_anew_while_the_table_moves(keys: pa.Array) -> None:
    index, rows = KeyIndex(), list(range(1270))
    index.apply(batch(keys, rows), np.zeros(1270, np.bool_), np.arange(1270))
    more = list(range(1270, 1340))
    index.apply(batch(keys, more), np.zeros(70, np.bool_), np.arange(1270, 1340))
    assert len(index._before), "it moves"
    some = batch(keys, rows[:100])
    for at in range(2000, 4000, 100):
        if not len(index._before):
            break
        index.renew(index.probe(some), np.arange(at, at + 100))
        found = index.probe(batch(keys, rows + more))
        assert index.live_offsets[found].tolist() == [*range(at, at + 100), *range(100, 1340)]
    assert not len(index._before) and at > 2100 and len(index) == 1340


def test_one_key_many_times_in_one_batch() -> None:
    index = KeyIndex()
    deleted = np.array([False, False, True, False, True, True, False])
    slots = index.apply(batch(INTS, [7] * 7), deleted, np.arange(10, 17))
    assert (slots >= 0).tolist() == [True] * 5 + [False, True]
    assert len(index) == 1
    assert index.live_offsets[index.probe(batch(INTS, [7]))[0]] == 16


def test_hash_collisions_are_told_apart_by_their_bytes() -> None:
    def colliding(rows: list[int]) -> KeyBatch:
        real = batch(STRINGS, rows)
        return KeyBatch(np.full(len(rows), 42, np.uint64), False, real.offsets, real.data)

    index = KeyIndex()
    rows = list(range(50))
    index.apply(colliding(rows), np.zeros(50, np.bool_), np.arange(50))
    index.apply(colliding(rows[::2]), np.ones(25, np.bool_), np.arange(50, 75))
    found = index.probe(colliding(rows))
    assert (found >= 0).tolist() == [False, True] * 25
    assert index.live_offsets[found[1::2]].tolist() == rows[1::2]


def test_only_hashed_keys_take_memory_for_their_bytes() -> None:
    for keys, hashed in ((INTS, False), (STRINGS, True)):
        index = KeyIndex()
        index.apply(batch(keys, list(range(3000))), np.zeros(3000, np.bool_), np.arange(3000))
        assert len(index) == 3000 <= index.capacity
        assert len(index._lengths) == len(index._starts) == (index.capacity if hashed else 0)


def test_an_empty_index_and_empty_batches() -> None:
    index = KeyIndex()
    assert index.probe(batch(INTS, [0, 1])).tolist() == [-1, -1]
    assert index.probe(batch(INTS, [])).tolist() == []
    assert index.apply(batch(STRINGS, []), np.zeros(0, np.bool_), np.arange(0)).tolist() == []
    assert index.live_slots().tolist() == [] and len(index) == 0


# Keys that someone chose who knows the code, but not the seed


def unmixed(h: int) -> int:
    """The key that `mix` takes to ``h`` when the seed is 0."""
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        h = (h ^ (h >> 33)) * pow(factor, -1, 1 << 64) % (1 << 64)
    return h ^ (h >> 33)


def mixed(h: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ (h >> 33)) * factor % (1 << 64)
    return h ^ (h >> 33)


def one_place(n: int) -> pa.Array:
    return pa.array(np.array([unmixed((0x12345678 << 32) | i) for i in range(n)], np.uint64).view(np.int64))


def one_hash(n: int) -> pa.Array:
    """Values of 16 bytes of which the first word is any, and the second makes up for it."""
    words = [(i, 7 ^ mixed(16 ^ i)) for i in range(n)]
    return pa.array([a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in words], pa.binary(16))


def longest_run(index: KeyIndex) -> int:
    """Entries that a lookup may have to look at."""
    gaps = np.flatnonzero(index._entries.array[:, 1] == 0)
    return int(np.diff([*gaps, gaps[0] + len(index._entries)]).max())


@pytest.mark.parametrize("keys", [one_place(6000), one_hash(6000)], ids=["exact", "hashed"])
@pytest.mark.parametrize("seed", [0, 1, SEED, np.uint64(2**64 - 1)])
def test_chosen_keys_land_in_one_place_only_for_the_seed_they_were_chosen_for(keys: pa.Array, seed: int) -> None:
    index = KeyIndex()
    index.apply(encode_keys([keys], np.uint64(seed)), np.zeros(len(keys), np.bool_), np.arange(len(keys)))
    assert len(index) == len(keys)
    assert longest_run(index) >= 6000 if seed == 0 else longest_run(index) < 200
