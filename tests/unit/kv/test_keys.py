"""Keys as the index sees them: equal exactly when the rows' keys are equal."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.kv.keys import KeyBatch, encode_keys, is_exact

SEED = np.uint64(99)
COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, -1, 0, 1, 127]),
    (pa.int16(), [-(2**15), 0, 255, 256]),
    (pa.int32(), [-(2**31), -1, 0, 2**31 - 1]),
    (pa.int64(), [-(2**63), -1, 0, 1, 2**63 - 1]),
    (pa.decimal128(38, 2), [decimal.Decimal(v) for v in ("-1.00", "0.00", "0.01", "9" * 36 + ".99")]),
    (pa.date32(), [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]),
    (pa.time32("ms"), [dt.time(0), dt.time(23, 59, 59, 999000)]),
    (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999999)]),
    (pa.timestamp("us", "UTC"), [dt.datetime(1969, 1, 1, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]),
    (pa.string(), ["", "a", "b", "aa", "ab", "søk", "x" * 100, "x" * 99 + "y"]),
    (pa.large_string(), ["", "a", "b", "東"]),
    (pa.binary(), [b"", b"\0", b"\0\0", b"a", b"a\0"]),
    (pa.large_binary(), [b"", b"\0", b"\0\0"]),
    (pa.binary(3), [b"abc", b"abd", b"\0\0\0"]),
    (pa.binary(8), [b"abcdefgh", b"\0" * 8]),
    (pa.binary(16), [b"a" * 16, b"a" * 15 + b"b"]),
]


def identities(keys: KeyBatch) -> list[Any]:
    if keys.exact:
        return keys.keys.tolist()
    data = keys.data.tobytes()
    return [data[a:b] for a, b in itertools.pairwise(keys.offsets.tolist())]


@pytest.mark.parametrize(("t", "values"), COLUMNS, ids=lambda v: str(v) if isinstance(v, pa.DataType) else "")
def test_one_column(t: pa.DataType, values: list[Any]) -> None:
    keys = encode_keys([pa.array(values, t)], SEED)
    found = identities(keys)
    assert len(set(found)) == len(values)
    assert identities(encode_keys([pa.array(values[::-1], t)], SEED)) == found[::-1]
    sliced = pa.array([values[0], *values, values[0]], t).slice(1, len(values))
    again = encode_keys([sliced], SEED)
    assert identities(again) == found and again.keys.tolist() == keys.keys.tolist()
    assert keys.exact == is_exact([t]) == (t.bit_width in (8, 16, 32, 64) if not _is_variable(t) else False)
    if not keys.exact:
        assert len(set(keys.keys.tolist())) == len(values), "hashes of so few keys differ"


def _is_variable(t: pa.DataType) -> bool:
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t) or t in (pa.binary(), pa.large_binary()))


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(COLUMNS)), ids=lambda c: str(c[0]))
def test_two_columns(first: tuple[pa.DataType, list[Any]], second: tuple[pa.DataType, list[Any]]) -> None:
    pairs = list(itertools.product(first[1], second[1]))
    columns = [pa.array([p[i] for p in pairs], t) for i, (t, _) in enumerate((first, second))]
    keys = encode_keys(columns, SEED)
    assert not keys.exact
    assert len(set(identities(keys))) == len(pairs)
    again = encode_keys([c.slice(1) for c in columns], SEED)
    assert identities(again) == identities(keys)[1:] and again.keys.tolist() == keys.keys.tolist()[1:]


def test_column_boundaries_are_part_of_the_key() -> None:
    columns = [pa.array(["ab", "a", ""]), pa.array(["c", "bc", "abc"])]
    assert len(set(identities(encode_keys(columns, SEED)))) == 3


@pytest.mark.parametrize("t", [t for t, _ in COLUMNS], ids=str)
def test_no_rows(t: pa.DataType) -> None:
    assert len(encode_keys([pa.array([], t)], SEED).keys) == 0
    assert len(encode_keys([pa.array([], t), pa.array([], pa.string())], SEED).keys) == 0
