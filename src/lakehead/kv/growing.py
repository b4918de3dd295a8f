"""Arrays that grow without a pause: the system moves their pages to a larger place, and no byte is copied.

Memory that was not written yet reads as zero and takes none, so a table may have room for twice its rows. Small arrays
are plain ones: a server of many small tables would run out of mappings.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_MAPPED_MIN = 1 << 20
_HUGE_MIN = 4 << 20
"""An array that begins so large is of pages of 2 MiB where the system has them: fewer faults, and less to look up. One
that grows to it is not: columns would touch new pages in the same batch, all of them, and that batch would wait."""


class GrowingArray:
    """Zeros until they are set, in one array that may be in another place after `grow`.

    Args:
        dtype: of its values.
        width: values a row, for a matrix; 0 for an array of one dimension.

    Attributes:
        array: what it holds. To be asked for again after `grow`: who keeps it makes the next `grow` copy.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int = 0) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * (width or 1)
        self._map: mmap.mmap | None = None
        self.array: npt.NDArray[Any] = self._zeros(0)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def grow(self, rows: int) -> None:
        """Have room for so many rows, not fewer than now; those that are held stay.

        Raises:
            MemoryError: there is not that much; all is as it was.
        """
        if self._map is None or not self._moved(self._map, rows):
            held = self.array
            array = self._zeros(rows)
            array[: len(held)] = held
            self.array = array

    def _moved(self, held: mmap.mmap, rows: int) -> bool:
        before = len(self.array)
        del self.array  # a mapping that an array refers to cannot move
        try:
            held.resize(rows * self._row_bytes)
            before = rows
        except (BufferError, SystemError):  # someone has the array; a system that cannot move pages
            return False
        except OSError as e:
            raise MemoryError(f"no memory for {rows:,} rows of {self._row_bytes} bytes") from e
        finally:
            self.array = self._shaped(held, before)
        return True

    def _zeros(self, rows: int) -> npt.NDArray[Any]:
        size = rows * self._row_bytes
        if size < _MAPPED_MIN:
            return np.zeros((rows, self._width) if self._width else rows, self._dtype)
        try:
            new = mmap.mmap(-1, size, **_PRIVATE)
        except OSError as e:
            raise MemoryError(f"no memory for {rows:,} rows of {self._row_bytes} bytes") from e
        if size >= _HUGE_MIN and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # of a kernel that was built without them
                new.madvise(mmap.MADV_HUGEPAGE)
        self._map = new
        return self._shaped(new, rows)

    def _shaped(self, held: mmap.mmap, rows: int) -> npt.NDArray[Any]:
        values = np.frombuffer(held, self._dtype, rows * (self._width or 1))
        return values.reshape(rows, self._width) if self._width else values


_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""A shared mapping cannot grow."""
