"""The vectorised bucket hash equals a scalar murmur3 of the specification's bytes, for any values and slices."""

from __future__ import annotations

import decimal
import struct

import mmh3
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakehead.format.bucketing import bucket_ids, bucket_of, hash_column, unkeyed_bucket

LONGS = st.integers(-(2**63), 2**63 - 1)


def murmur3(value: bytes) -> int:
    return mmh3.hash(value, 0, signed=False)


def scalar(value: object) -> int:
    if isinstance(value, int):
        return murmur3(struct.pack("<q", value))
    if isinstance(value, decimal.Decimal):
        unscaled = int(value)
        bits = (unscaled if unscaled >= 0 else -unscaled - 1).bit_length()
        return murmur3(unscaled.to_bytes(bits // 8 + 1, "big", signed=True))
    return murmur3(value.encode() if isinstance(value, str) else value)  # type: ignore[arg-type]


@given(
    st.one_of(
        st.tuples(st.just(pa.int64()), st.lists(LONGS)),
        st.tuples(st.just(pa.int16()), st.lists(st.integers(-(2**15), 2**15 - 1))),
        st.tuples(st.sampled_from([pa.string(), pa.large_string()]), st.lists(st.text())),
        st.tuples(st.sampled_from([pa.binary(), pa.large_binary()]), st.lists(st.binary(max_size=300), max_size=80)),
        st.tuples(st.just(pa.binary(6)), st.lists(st.binary(min_size=6, max_size=6))),
        st.tuples(st.just(pa.decimal128(38, 0)), st.lists(st.integers(-(10**38) + 1, 10**38 - 1).map(decimal.Decimal))),
    ),
    st.data(),
)
def test_hash_column_equals_the_scalar_hash(typed: tuple[pa.DataType, list[object]], data: st.DataObject) -> None:
    t, values = typed
    start = data.draw(st.integers(0, len(values)))
    cut = data.draw(st.integers(start, len(values)))
    array = pa.array(values, t)
    expected = [scalar(v) for v in values[start:]]
    assert hash_column(array[start:]).tolist() == expected
    assert hash_column(pa.chunked_array([array[start:cut], array[cut:]])).tolist() == expected


@given(st.lists(st.tuples(LONGS, st.text(max_size=20), st.binary(max_size=9))), st.integers(1, 1024))
def test_several_columns_hash_their_hashes(rows: list[tuple[int, str, bytes]], buckets: int) -> None:
    columns = [pa.array([r[i] for r in rows], t) for i, t in enumerate((pa.int64(), pa.string(), pa.binary()))]
    for count in (1, 2, 3):
        assert [bucket_of(row[:count], buckets) for row in rows] == bucket_ids(columns[:count], buckets).tolist()
    for count in (2, 3):
        combined = [murmur3(b"".join(struct.pack("<I", scalar(v)) for v in row[:count])) for row in rows]
        assert bucket_ids(columns[:count], buckets).tolist() == [(h & 0x7FFFFFFF) % buckets for h in combined]


@given(st.binary(max_size=40), st.integers(0, 2**62), st.integers(1, 1024))
def test_consecutive_sequences_visit_every_bucket_once(writer_id: bytes, sequence: int, buckets: int) -> None:
    visited = [unkeyed_bucket(writer_id, sequence + i, buckets) for i in range(buckets)]
    assert sorted(visited) == list(range(buckets))
    assert unkeyed_bucket(writer_id, 0, buckets) == (murmur3(writer_id) & 0x7FFFFFFF) % buckets
