"""Arrays that grow in place."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lakehead.kv import growing
from lakehead.kv.growing import GrowingArray

MAPPED = growing._MAPPED_MIN // 8


class NoMoves(mmap.mmap):
    """As on systems which cannot move pages."""

    def resize(self, newsize: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


class NoMemory(mmap.mmap):
    def resize(self, newsize: int) -> None:
        raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [("i8", 0), ("u1", 0), ("V16", 0), ("u8", 3), ("?", 0)])
def test_what_is_held_stays_and_what_is_new_is_zero(
    dtype: str, width: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not moves:
        monkeypatch.setattr(mmap, "mmap", NoMoves)
    array, draws = GrowingArray(dtype, width), np.random.default_rng(1)
    expected: npt.NDArray[Any] = np.zeros((0, width) if width else 0, dtype)
    for rows in [0, 1, 10, 1000, MAPPED - 1, MAPPED, 3 * MAPPED, 3 * MAPPED + 1, 9 * MAPPED]:
        array.grow(rows)
        more = np.zeros((rows - len(expected), width) if width else rows - len(expected), dtype)
        expected = np.concatenate([expected, more])
        assert len(array) == rows and array.array.dtype == np.dtype(dtype) and array.nbytes == expected.nbytes
        assert array.array.tobytes() == expected.tobytes()
        for at in draws.integers(0, max(array.nbytes, 1), min(rows, 1000)):
            array.array.view("u1").reshape(-1)[at] = expected.view("u1").reshape(-1)[at] = 1


def test_who_keeps_an_array_keeps_what_it_had() -> None:
    array = GrowingArray(np.int64)
    array.grow(MAPPED)
    kept = array.array
    kept[:] = 5
    array.grow(4 * MAPPED)
    array.array[:] = 6
    assert (kept == 5).all() and len(kept) == MAPPED
    kept_too = array.array[:3]
    array.grow(8 * MAPPED)
    array.array[:] = 7
    assert kept_too.tolist() == [6, 6, 6]


def test_no_memory_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", NoMemory)
    array = GrowingArray(np.int64)
    array.grow(MAPPED)
    array.array[:] = 3
    with pytest.raises(MemoryError, match="no memory for 10,000,000 rows of 8 bytes"):
        array.grow(10_000_000)
    assert len(array) == MAPPED and (array.array == 3).all()


def test_small_arrays_take_no_mapping() -> None:
    array = GrowingArray(np.int64)
    array.grow(MAPPED - 1)
    assert array._map is None
    array.grow(MAPPED)
    assert array._map is not None


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no pages of another size")
@pytest.mark.parametrize("refused", [False, True])
def test_what_begins_large_asks_for_large_pages(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Asked(mmap.mmap):
        def madvise(self, option: int, *of: int) -> None:
            asked.append(len(self))
            if refused:  # as a kernel that was built without them
                raise OSError(22, "Invalid argument")
            super().madvise(option, *of)

    monkeypatch.setattr(mmap, "mmap", Asked)
    array = GrowingArray(np.int64)
    array.grow(MAPPED)
    assert asked == []
    array.array[:] = 3
    array.grow(16 * MAPPED)
    assert asked == [] and (array.array[:MAPPED] == 3).all()
    large = GrowingArray(np.int64)
    large.grow(16 * MAPPED)
    assert asked == [128 * MAPPED] and not large.array.any()
