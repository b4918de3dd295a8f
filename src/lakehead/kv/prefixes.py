"""Live rows by the leading columns of their keys: for each prefix that has any, a list through the slots of its rows.

So a prefix is asked for in the time that its own rows take, however many others there are; a row that comes or goes is
linked or unlinked in constant time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from lakehead.format.arrays import to_arrow
from lakehead.kv import kernels
from lakehead.kv.growing import GrowingArray
from lakehead.kv.heap import Slots
from lakehead.kv.index import KeyIndex
from lakehead.kv.keys import encode_keys

_FOLLOWED = 8
"""Where more than one slot in so many is asked for, all are looked at in their order: to jump from one to the next
takes about so much longer."""


class PrefixIndex:
    """Which slots have rows of a prefix. Not thread-safe, as `KeyIndex`.

    Args:
        seed: a secret that prefixes are hashed with.
    """

    def __init__(self, seed: np.uint64) -> None:
        self._seed = seed
        self._index = KeyIndex()
        self._heads = GrowingArray(np.int64, 2)  # of each prefix: one more than its newest slot, and how many it has
        self._links = GrowingArray(np.int64, 3)  # of each slot, one more than: the next, the one before, its prefix

    def __len__(self) -> int:
        return len(self._index)

    def resize(self, slots: int) -> None:
        """Make room for this many slots."""
        self._links.grow(slots)

    def add(self, slots: Slots, columns: Sequence[pa.Array]) -> None:
        """Link these slots, which are different ones, but for those that are linked already.

        Args:
            columns: the leading key columns of the row in each slot.
        """
        new = np.flatnonzero(self._links.array[slots, 2] == 0)
        if not len(new):
            return
        if len(new) < len(slots):
            slots, columns = slots[new], [column.take(to_arrow(new)) for column in columns]
        come = encode_keys(columns, self._seed)
        prefixes = self._index.apply(come, np.zeros(len(new), np.bool_), np.zeros(len(new), np.int64))
        if self._index.capacity > len(self._heads):
            self._heads.grow(self._index.capacity)
        kernels.link(prefixes, slots, self._heads.array, self._links.array)

    def remove(self, slots: Slots, columns: Callable[[Slots], Sequence[pa.Array]]) -> None:
        """Unlink these slots, but for those that are not linked.

        Args:
            columns: the leading key columns of the rows that were in slots.
        """
        last = np.empty(len(slots), np.int64)
        last = last[: kernels.unlink(slots, self._heads.array, self._links.array, last)]
        if len(last):
            gone = encode_keys(columns(last), self._seed)
            self._index.apply(gone, np.ones(len(last), np.bool_), np.zeros(len(last), np.int64))

    def numbers(self, columns: Sequence[pa.Array]) -> Slots:
        """The number of each different prefix that has rows; of no meaning after the next change."""
        numbers = np.unique(self._index.probe(encode_keys(columns, self._seed)))
        return numbers[numbers >= 0]

    def count(self, prefixes: Slots) -> int:
        """How many rows the prefixes of these numbers have."""
        return int(self._heads.array[prefixes, 1].sum())

    def find(self, prefixes: Slots, slots_used: int) -> Slots:
        """Slots of the rows of the prefixes of these numbers, in no order.

        Args:
            slots_used: all linked slots are below.
        """
        found = np.empty(self.count(prefixes), np.int64)
        if len(found) * _FOLLOWED > slots_used:
            return np.flatnonzero(np.isin(self._links.array[:slots_used, 2], prefixes + 1))
        kernels.follow(prefixes, self._heads.array, self._links.array, found)
        return found
