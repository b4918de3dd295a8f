"""Numbers go between numpy and Arrow as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakehead.format.arrays import ascending, constant, places_of, to_arrow, to_bools, to_numbers


@pytest.mark.parametrize("dtype", ["i1", "u2", "<i4", "<i8", "<u8", "<f4", "<f8", "?"])
@pytest.mark.parametrize("values", [[], [1], [1, 0, 3, 0, 1, 1, 0, 1, 1]])
@pytest.mark.parametrize("every", [1, 2])
def test_an_array_is_what_arrow_makes_of_the_numbers(dtype: str, values: list[int], every: int) -> None:
    numbers = np.array(values, dtype)[::every]
    found = to_arrow(numbers)
    found.validate(full=True)
    assert found.equals(pa.array(numbers))


def test_an_array_lacks_what_is_not_valid() -> None:
    numbers, valid = np.arange(20), np.arange(20) % 3 > 0
    assert to_arrow(numbers, valid=valid).equals(pa.array(numbers, mask=~valid))
    assert to_arrow(numbers, valid=np.ones(20, np.bool_)).buffers()[0] is None
    assert to_arrow(numbers > 4, valid=valid).equals(pa.array(numbers > 4, mask=~valid))
    instants = pa.timestamp("us", "UTC")
    assert to_arrow(numbers, instants, valid).equals(pa.array(numbers, mask=~valid).cast(instants))


@pytest.mark.parametrize("values", [[], [True], [True, None, False, True, True, False, None, True, True, False]])
@pytest.mark.parametrize("first", [0, 1, 9])
def test_truths_are_those_of_a_slice(values: list[Any], first: int) -> None:
    array = pa.array(values, pa.bool_()).slice(min(first, len(values)))
    assert to_bools(array).tolist() == [bool(v) for v in array.to_pylist()]


def test_numbers_are_those_of_a_slice() -> None:
    array = pa.array(range(10), pa.int64()).slice(3, 4)
    assert to_numbers(array).tolist() == [3, 4, 5, 6]
    assert to_numbers(array.slice(0, 0)).tolist() == []
    assert to_numbers(pa.nulls(0, pa.int64())).tolist() == []
    with pytest.raises(ValueError, match="1 of 2"):
        to_numbers(pa.array([1, None]))
    for t in (pa.int8(), pa.uint16(), pa.int32(), pa.uint64()):
        assert to_numbers(pa.array([1, 127], t)).dtype == t.to_pandas_dtype()


@pytest.mark.parametrize("values", [[], [0], [3, 1, 2, 0], [4, 0, 2]])
def test_places_sort_numbers_that_differ(values: list[int]) -> None:
    numbers = np.array(values, np.int64)
    assert numbers[places_of(numbers, 5)].tolist() == sorted(values)


@pytest.mark.parametrize("rows", [0, 1, 8191, 8192, 8193, 20_000])
@pytest.mark.parametrize("start", [0, 7, (1 << 62) - 5])
def test_numbers_of_the_pool_are_those_of_numpy(rows: int, start: int) -> None:
    found = ascending(start, start + rows)
    assert found.dtype == np.int64 and np.array_equal(found, np.arange(start, start + rows))
    for dtype in (np.int32, np.int64):
        same = constant(-3, rows, dtype)
        assert same.dtype == dtype and np.array_equal(same, np.full(rows, -3))
    assert to_arrow(found).to_pylist() == list(range(start, start + rows))
