"""The key index: primary key -> slot, and slot -> offset of the live row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lakehead.kv import kernels
from lakehead.kv.growing import GrowingArray
from lakehead.kv.keys import KeyBatch

_SLOTS_MIN = 1024
_MOVES_MIN = 256
_MOVES_A_KEY = 6
"""A table is full with 5 keys in 8 entries. So all of it has moved before 1 key in 6 entries has come since, and the
next one is far from full."""
_NEXT, _FREE, _ARENA_END, _ARENA_DEAD, _LIVE = range(5)


def home_shift(capacity: int) -> np.uint64:
    """How far a mixed key is shifted to its place among a power of two of them."""
    return np.uint64(64 - (capacity.bit_length() - 1))


class KeyIndex:
    """Open addressing over 16-byte entries. Not thread-safe: its tablet's lock guards it.

    It grows by doubling, and no change waits for it: changes that come after move a few entries each (`kernels`), and
    what is kept by slot grows in place. All keys that it is ever given are of one seed (`encode_keys`).
    """

    def __init__(self) -> None:
        self._entries = _entries(2 * _SLOTS_MIN)
        self._before, self._moved = _entries(0), np.zeros(2, np.int64)
        self._live_offsets = GrowingArray(np.int64)
        self._live_offsets.grow(_SLOTS_MIN)
        self._free = GrowingArray(np.int64)
        self._starts = GrowingArray(np.int64)  # of hashed keys only, as the next two
        self._lengths = GrowingArray(np.int64)
        self._arena = GrowingArray(np.uint8)
        self._state = np.zeros(5, np.int64)

    def __len__(self) -> int:
        return int(self._state[_LIVE])

    @property
    def live_offsets(self) -> npt.NDArray[np.int64]:
        """Offset of the row in each slot, -1 where it is gone; of no meaning from `slots_used` on. To be asked for
        again after `apply` and `reserve`."""
        return self._live_offsets.array

    @property
    def capacity(self) -> int:
        """Slots that arrays indexed by slot must have."""
        return len(self._live_offsets)

    @property
    def slots_used(self) -> int:
        """Slots ever given out; live and free ones."""
        return int(self._state[_NEXT])

    @property
    def nbytes(self) -> int:
        entries, slots = (self._entries, self._before), (self._live_offsets, self._free, self._starts, self._lengths)
        return sum(a.nbytes for a in (*entries, *slots, self._arena))

    def probe(self, keys: KeyBatch) -> npt.NDArray[np.int64]:
        """Slot of each key, -1 when there is no live row."""
        out = np.empty(len(keys.keys), np.int64)
        self._run(kernels.probe, keys, out)
        return out

    def apply(
        self, keys: KeyBatch, deleted: npt.NDArray[np.bool_], row_offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Insert, move or remove keys in this order; returns the slot of each, -1 for a delete that found nothing."""
        self._reserve(len(keys.keys), int(np.count_nonzero(deleted)), len(keys.data), hashed=not keys.exact)
        self._move(max(_MOVES_A_KEY * len(keys.keys), _MOVES_MIN))
        out = np.empty(len(keys.keys), np.int64)
        live, free = self._live_offsets.array, self._free.array
        self._run(kernels.apply_changes, keys, deleted, row_offsets, live, free, self._state, out)
        return out

    def renew(self, slots: npt.NDArray[np.int64], row_offsets: npt.NDArray[np.int64]) -> None:
        """What `apply` does where all keys have rows, in these slots, and none is removed."""
        self._move(max(_MOVES_A_KEY * len(slots), _MOVES_MIN))
        self._live_offsets.array[slots] = row_offsets

    def _run(self, kernel: Any, keys: KeyBatch, *more: object) -> None:
        kernel(
            self._entries.array,
            home_shift(len(self._entries)),
            self._before.array,
            home_shift(len(self._before)),
            self._moved,
            keys.keys,
            keys.exact,
            keys.offsets,
            keys.data,
            self._starts.array,
            self._lengths.array,
            self._arena.array,
            *more,
        )

    def _move(self, entries: int) -> None:
        """Go on with moving what was there before the index grew."""
        n = len(self._before)
        if not n:
            return
        shift = home_shift(len(self._entries))
        kernels.move_entries(self._before.array, self._moved, entries, self._entries.array, shift)
        if self._moved[1] == n:
            self._before = _entries(0)

    def live_slots(self) -> npt.NDArray[np.int64]:
        """Slots of live rows, in the order of their offsets."""
        slots = np.flatnonzero(self.live_offsets[: self.slots_used] >= 0)
        return slots[np.argsort(self.live_offsets[slots], kind="stable")]

    def reserve(self, rows: int, keys: KeyBatch | None = None) -> None:
        """Make room for so many more rows at once, which is cheaper than growing to it: for these keys, where they are
        known.

        Raises:
            MemoryError: there is not that much; all that is held stays.
        """
        hashed = keys is not None and not keys.exact
        self._reserve(rows, 0, len(keys.data) if keys is not None and hashed else 0, hashed=hashed)

    def _reserve(self, rows: int, deletes: int, key_bytes: int, *, hashed: bool) -> None:
        if self.slots_used + rows > self.capacity:
            self._live_offsets.grow(max(self.capacity * 2, self.slots_used + rows))
        for of_hashed in (self._starts, self._lengths) if hashed else ():
            if len(of_hashed) < self.capacity:  # each by itself: for the last one there may have been no memory
                of_hashed.grow(self.capacity)
        free = int(self._state[_FREE]) + deletes
        if free > len(self._free):
            self._free.grow(2 * free)
        entries = len(self._entries)
        while (len(self) + rows) * 8 > entries * 5:
            entries *= 2
        if entries != len(self._entries):
            self._move(len(self._before))
            self._entries, self._before = _entries(entries), self._entries
            self._moved[:] = kernels.begin_of_move(self._before.array), 0
        end = int(self._state[_ARENA_END])
        if end + key_bytes > len(self._arena):
            self._make_room(end, key_bytes)

    def _make_room(self, end: int, key_bytes: int) -> None:
        """For bytes of keys: where those of keys that are gone are, once they are half of all."""
        dead = int(self._state[_ARENA_DEAD])
        size = max(2 * (end - dead + key_bytes), 1 << 12)
        if 2 * dead < end:
            self._arena.grow(max(size, len(self._arena)))
            return
        arena = GrowingArray(np.uint8)
        arena.grow(size)
        self._state[_ARENA_END] = kernels.compact_arena(
            self._arena.array,
            self._starts.array,
            self._lengths.array,
            self._live_offsets.array,
            self.slots_used,
            arena.array,
        )
        self._state[_ARENA_DEAD] = 0
        self._arena = arena


def _entries(n: int) -> GrowingArray:
    entries = GrowingArray(np.int64, 2)
    entries.grow(n)
    return entries
