"""Golden values of the bucket hash: stored data depends on each of them, so none may ever change."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    FixedType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

from lakehead.errors import InvalidSchemaError, NullKeyError, SchemaMismatchError
from lakehead.format.bucketing import bucket_ids, can_hash, hash_column, unkeyed_bucket

MOMENT = dt.datetime(2017, 11, 16, 22, 31, 8)

# Iceberg's specification, Appendix B, and the same values in our other types.
GOLDEN = [
    (34, pa.int8(), 2017239379),
    (34, pa.int16(), 2017239379),
    (34, pa.int32(), 2017239379),
    (34, pa.int64(), 2017239379),
    (decimal.Decimal("14.20"), pa.decimal128(9, 2), -500754589),
    (decimal.Decimal("14.20"), pa.decimal128(38, 2), -500754589),
    (dt.date(2017, 11, 16), pa.date32(), -653330422),
    (dt.date(2017, 11, 16), pa.date64(), -653330422),
    (dt.time(22, 31, 8), pa.time32("s"), -662762989),
    (dt.time(22, 31, 8), pa.time32("ms"), -662762989),
    (dt.time(22, 31, 8), pa.time64("us"), -662762989),
    (MOMENT, pa.timestamp("s"), -2047944441),
    (MOMENT, pa.timestamp("ms"), -2047944441),
    (MOMENT, pa.timestamp("us"), -2047944441),
    (MOMENT.replace(tzinfo=dt.UTC), pa.timestamp("us", "UTC"), -2047944441),
    (MOMENT.replace(tzinfo=dt.UTC), pa.timestamp("ms", "America/Los_Angeles"), -2047944441),
    ("iceberg", pa.string(), 1210000089),
    ("iceberg", pa.large_string(), 1210000089),
    (b"\x00\x01\x02\x03", pa.binary(), -188683207),
    (b"\x00\x01\x02\x03", pa.large_binary(), -188683207),
    (b"\x00\x01\x02\x03", pa.binary(4), -188683207),
    ("", pa.string(), 0),
]


@pytest.mark.parametrize(("value", "arrow_type", "expected"), GOLDEN, ids=lambda v: str(v))
def test_hashes_of_the_iceberg_specification(value: Any, arrow_type: pa.DataType, expected: int) -> None:
    hashes = hash_column(pa.array([value], arrow_type))
    assert hashes.dtype == np.uint32
    assert hashes.astype(np.int32).tolist() == [expected]


GOLDEN_AB = [270839650, 171179490, 129896175]
GOLDEN_ABC = [28866400, 77087648, 619364377]
GOLDEN_UNKEYED = [0, 1, 2, 3, 0, 1]

INTEGERS = [0, 1, -1, 127, -128, 128, 255, 256, 32767, -32768, 2**31 - 1, -(2**31)]
AGAINST_PYICEBERG: list[tuple[IcebergType, pa.DataType, list[Any]]] = [
    (IntegerType(), pa.int32(), INTEGERS),
    (LongType(), pa.int64(), [*INTEGERS, 2**63 - 1, -(2**63), 2**32, -(2**32)]),
    (DateType(), pa.date32(), [dt.date(1970, 1, 1), dt.date(1969, 12, 31), dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    (TimeType(), pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999999)]),
    (TimestampType(), pa.timestamp("us"), [dt.datetime(1970, 1, 1), dt.datetime(1900, 1, 1, 0, 0, 0, 1), MOMENT]),
    (TimestamptzType(), pa.timestamp("us", "UTC"), [MOMENT.replace(tzinfo=dt.UTC)]),
    (StringType(), pa.string(), ["", "a", "ab", "abc", "abcd", "abcde", "søk", "東京", "😀", "x" * 1000]),
    (BinaryType(), pa.binary(), [b"", b"\x00", b"\x00\x00", b"\xff" * 7, bytes(range(256))]),
    (FixedType(3), pa.binary(3), [b"\x00\x00\x00", b"abc", b"\xff\xff\xff"]),
    (DecimalType(38, 0), pa.decimal128(38, 0), [decimal.Decimal(i) for i in [*INTEGERS, 10**37, -(10**37), 2**64]]),
    (DecimalType(9, 2), pa.decimal128(9, 2), [decimal.Decimal(i).scaleb(-2) for i in INTEGERS[:8]]),
]


@pytest.mark.parametrize(("iceberg", "arrow_type", "values"), AGAINST_PYICEBERG, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("buckets", [1, 7, 16])
def test_bucket_ids_equal_pyicebergs(
    iceberg: IcebergType, arrow_type: pa.DataType, values: list[Any], buckets: int
) -> None:
    transform = BucketTransform(buckets).transform(iceberg, bucket=True)
    many = values * 40  # more rows than the scalar path takes
    array = pa.array(many, arrow_type)
    assert bucket_ids([array], buckets).tolist() == [transform(v) for v in many]


def test_slices_chunks_and_empty_arrays() -> None:
    values = [f"v{i}" * (i % 5) for i in range(100)]
    for t in (pa.string(), pa.large_binary()):
        whole = pa.array(values, t)
        hashes = hash_column(whole)
        assert hash_column(whole[13:57]).tolist() == hashes[13:57].tolist()
        chunked = pa.chunked_array([whole[:0], whole[:31], whole[31:]])
        assert hash_column(chunked).tolist() == hashes.tolist()
    for t in (pa.int8(), pa.date64(), pa.decimal128(20, 3), pa.binary(5), pa.time32("ms"), pa.timestamp("s")):
        raw = range(20) if not pa.types.is_fixed_size_binary(t) else [b"%05d" % i for i in range(20)]
        integers = pa.int32() if t.bit_width == 32 else pa.int64()
        if pa.types.is_int8(t) or pa.types.is_fixed_size_binary(t) or pa.types.is_decimal(t):
            array = pa.array(list(raw), t)
        else:
            array = pa.array([86_400_000 * i if pa.types.is_date64(t) else i for i in range(20)], integers).view(t)
        assert hash_column(array[3:9]).tolist() == hash_column(array)[3:9].tolist()
        assert hash_column(pa.array([], t)).tolist() == []
        assert hash_column(pa.chunked_array([], t)).tolist() == []
        assert bucket_ids([pa.array([], t), pa.array([], t)], 4).tolist() == []
    assert hash_column(pa.array([""] * 50)).tolist() == [0] * 50


def test_a_slice_without_nulls_of_an_array_with_nulls() -> None:
    array = pa.array([None, 34, 34, None])
    assert hash_column(array[1:3]).tolist() == [2017239379] * 2


def test_several_columns_are_murmur3_of_their_hashes() -> None:
    a = pa.array([1, 2, 3], pa.int64())
    b = pa.array(["x", "y", "z"])
    c = pa.array([dt.date(2020, 1, 1)] * 3)
    assert bucket_ids([a, b], 1 << 30).tolist() == GOLDEN_AB
    assert bucket_ids([a, b, c], 1 << 30).tolist() == GOLDEN_ABC
    assert bucket_ids([b, a], 1 << 30).tolist() != GOLDEN_AB
    assert bucket_ids([a, b], 16).tolist() == [h % 16 for h in GOLDEN_AB]


def test_equal_columns_spread_over_all_buckets() -> None:
    array = pa.array(range(3200))
    counts = np.bincount(bucket_ids([array, array], 32), minlength=32)
    assert counts.min() > 50 and counts.max() < 150


def test_one_bucket_is_always_zero_but_still_refuses_nulls() -> None:
    assert bucket_ids([pa.array([5, 6])], 1).tolist() == [0, 0]
    with pytest.raises(NullKeyError):
        bucket_ids([pa.array([5, None])], 1)


def test_nulls_are_refused() -> None:
    with pytest.raises(NullKeyError):
        hash_column(pa.array(["a", None]))


@pytest.mark.parametrize(
    "t",
    [pa.float64(), pa.bool_(), pa.uint32(), pa.timestamp("ns"), pa.time64("ns"), pa.list_(pa.int32()), pa.null(),
     pa.decimal256(40, 2), pa.dictionary(pa.int8(), pa.string()), pa.string_view(), pa.duration("us")],
    ids=str,
)  # fmt: skip
def test_types_without_a_bucket_hash(t: pa.DataType) -> None:
    assert not can_hash(t)
    with pytest.raises(InvalidSchemaError):
        hash_column(pa.array([], t))


def test_seconds_beyond_the_range_of_microseconds() -> None:
    far = pa.array([2**62]).view(pa.timestamp("s"))
    with pytest.raises(SchemaMismatchError):
        hash_column(far)


def test_unkeyed_batches_go_round_robin_from_a_start_per_writer() -> None:
    assert [unkeyed_bucket(b"writer-1", s, 4) for s in range(6)] == GOLDEN_UNKEYED
    assert len({unkeyed_bucket(b"writer-%d" % i, 0, 4) for i in range(50)}) == 4
    assert unkeyed_bucket(b"", 0, 4) == 0
    assert unkeyed_bucket(b"w", 2**62, 1) == 0
