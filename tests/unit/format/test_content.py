"""The content checksum: equal for equal batches whatever memory holds them, another for others, the same for ever."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.format.content import content_checksum

COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int16": (pa.int16(), [1, None, 0, -3, 5]),
    "bool": (pa.bool_(), [True, None, False, True, True]),
    "float": (pa.float32(), [1.5, None, 0.0, -0.0, float("inf")]),
    "decimal": (pa.decimal128(38, 2), [Decimal("1.20"), None, Decimal(0), Decimal(-4), Decimal(5)]),
    "date": (pa.date32(), [dt.date(1970, 1, 1), None, dt.date(1900, 1, 1), dt.date(2026, 11, 21), dt.date(1, 1, 1)]),
    "time": (pa.time64("us"), [dt.time(1), None, dt.time(0), dt.time(2), dt.time(3)]),
    "timestamp": (pa.timestamp("us", "UTC"), [0, None, -1, 1, 2]),
    "text": (pa.string(), ["a", None, "", "ab", "é"]),
    "large": (pa.large_string(), ["a", None, "", "ab", "é"]),
    "binary": (pa.binary(), [b"a", None, b"", b"\0", b"\0\0"]),
    "fixed": (pa.binary(2), [b"aa", None, b"\0\0", b"dd", b"ee"]),
    "list": (pa.list_(pa.int32()), [[1, None], None, [], [3, 4], [None]]),
    "large list": (pa.large_list(pa.string()), [["a", None], None, [], ["c", "d"], ["cd"]]),
    "fixed list": (pa.list_(pa.int16(), 2), [[1, 2], None, [3, None], [None, 3], [0, 0]]),
    "struct": (
        pa.struct([("x", pa.int8()), ("y", pa.string())]),
        [{"x": 1, "y": "q"}, None, {"x": None, "y": "q"}, {"x": 1, "y": None}, {"x": None, "y": None}],
    ),
    "map": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None, [], [("b", None), ("c", 3)], [("b", 3)]]),
    "nested": (
        pa.list_(pa.struct([("m", pa.list_(pa.bool_()))])),
        [[{"m": [True, None]}], None, [], [None, {"m": None}], [{"m": []}]],
    ),
}
GOLDEN = {
    "int16": 377208489,
    "bool": 1168084193,
    "float": 2057677813,
    "decimal": 1863834051,
    "date": 899437840,
    "time": 3868899072,
    "timestamp": 3053828942,
    "text": 3202836474,
    "large": 3202836474,
    "binary": 836401082,
    "fixed": 1124097878,
    "list": 2978197572,
    "large list": 1266760510,
    "fixed list": 1575930283,
    "struct": 2396491313,
    "map": 2062024216,
    "nested": 792507690,
}


def one(name: str, rows: list[Any] | None = None) -> pa.RecordBatch:
    t, values = COLUMNS[name]
    return pa.RecordBatch.from_arrays([pa.array(values if rows is None else rows, t)], names=["c"])


def layouts(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The same rows in other memory: slices, the wire, copies, other values below the nulls."""
    n = batch.num_rows
    before, after = batch.take(pa.array([n - 1, 0, 1])), batch.take(pa.array([1, n - 1]))
    longer = pa.concat_batches([before, batch, after])
    sliced = longer.slice(3, n)
    return [sliced, pa.ipc.read_record_batch(sliced.serialize(), batch.schema), batch.take(pa.array(np.arange(n)))]


@pytest.mark.parametrize("name", COLUMNS)
def test_it_is_of_the_rows_and_not_of_their_memory(name: str) -> None:
    batch = one(name)
    for other in layouts(batch):
        assert other.equals(batch) and content_checksum(other) == content_checksum(batch)
        for start, length in itertools.product(range(5), range(4)):
            part = one(name, COLUMNS[name][1][start : start + length])
            assert content_checksum(other.slice(start, length)) == content_checksum(part), (start, length)


@pytest.mark.parametrize("name", COLUMNS)
def test_other_rows_have_another(name: str) -> None:
    values = COLUMNS[name][1]
    rows = [[], *([v] for v in values), *([a, b] for a, b in itertools.permutations(values, 2)), values]
    found = {content_checksum(one(name, r)) for r in rows}
    assert len(found) == len({repr(r) for r in rows}), "a row, none, their order"


def test_what_lies_under_a_null_does_not_count() -> None:
    values, valid = pa.py_buffer(np.array([1, 77, 3])), pa.py_buffer(b"\x05")
    dirty = pa.Array.from_buffers(pa.int64(), 3, [valid, values])
    batch = pa.RecordBatch.from_arrays([dirty], names=["c"])
    assert content_checksum(batch) == content_checksum(pa.record_batch({"c": pa.array([1, None, 3])}))
    whole = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\xff"), values])
    batch = pa.RecordBatch.from_arrays([whole], names=["c"])
    assert content_checksum(batch) == content_checksum(pa.record_batch({"c": pa.array([1, 77, 3])}))


def test_columns_count_by_name_and_place() -> None:
    batches = [
        pa.record_batch(columns)
        for columns in (
            {"a": pa.array([1]), "b": pa.array([2])},
            {"b": pa.array([1]), "a": pa.array([2])},
            {"a": pa.array([2]), "b": pa.array([1])},
            {"a": pa.array([1])},
            {"ab": pa.array([1]), "c": pa.array([2])},
        )
    ]
    assert len({content_checksum(b) for b in batches}) == len(batches)


def test_it_is_the_same_for_ever() -> None:
    """Logs and checkpoints hold these."""
    assert {name: content_checksum(one(name)) for name in COLUMNS} == GOLDEN
