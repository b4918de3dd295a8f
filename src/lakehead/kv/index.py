"""The key index: primary key -> slot, and slot -> offset of the live row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lakehead.kv import kernels
from lakehead.kv.keys import KeyBatch

_SLOTS_MIN = 1024
_NEXT, _FREE, _ARENA_END, _ARENA_DEAD, _LIVE = range(5)


def home_shift(capacity: int) -> np.uint64:
    """How far a mixed key is shifted to its place among a power of two of them."""
    return np.uint64(64 - (capacity.bit_length() - 1))


class KeyIndex:
    """Open addressing over 16-byte entries; grows by doubling. Not thread-safe: its tablet's lock guards it.

    Args:
        seed: a secret that keys are hashed with, those of `encode_keys` too.
    """

    def __init__(self, seed: np.uint64) -> None:
        self._seed = seed
        self._entries = np.zeros((2 * _SLOTS_MIN, 2), np.int64)
        self.live_offsets = np.full(_SLOTS_MIN, -1, np.int64)
        self._free = np.zeros(0, np.int64)
        self._starts = np.zeros(0, np.int64)  # of hashed keys only, as the next two
        self._lengths = np.zeros(0, np.int64)
        self._arena = np.zeros(1 << 12, np.uint8)
        self._state = np.zeros(5, np.int64)

    def __len__(self) -> int:
        return int(self._state[_LIVE])

    @property
    def capacity(self) -> int:
        """Slots that arrays indexed by slot must have."""
        return len(self.live_offsets)

    @property
    def slots_used(self) -> int:
        """Slots ever given out; live and free ones."""
        return int(self._state[_NEXT])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self._entries, self.live_offsets, self._free, self._starts, self._lengths)) + (
            self._arena.nbytes
        )

    def probe(self, keys: KeyBatch) -> npt.NDArray[np.int64]:
        """Slot of each key, -1 when there is no live row."""
        out = np.empty(len(keys.keys), np.int64)
        kernels.probe(
            self._entries,
            home_shift(len(self._entries)),
            self._seed,
            keys.keys,
            keys.exact,
            keys.offsets,
            keys.data,
            self._starts,
            self._lengths,
            self._arena,
            out,
        )
        return out

    def apply(
        self, keys: KeyBatch, deleted: npt.NDArray[np.bool_], row_offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Insert, move or remove keys in this order; returns the slot of each, -1 for a delete that found nothing."""
        self._reserve(len(keys.keys), int(np.count_nonzero(deleted)), len(keys.data), hashed=not keys.exact)
        out = np.empty(len(keys.keys), np.int64)
        kernels.apply_changes(
            self._entries,
            home_shift(len(self._entries)),
            self._seed,
            keys.keys,
            keys.exact,
            keys.offsets,
            keys.data,
            self._starts,
            self._lengths,
            self._arena,
            deleted,
            row_offsets,
            self.live_offsets,
            self._free,
            self._state,
            out,
        )
        return out

    def live_slots(self) -> npt.NDArray[np.int64]:
        """Slots of live rows, in the order of their offsets."""
        slots = np.flatnonzero(self.live_offsets[: self.slots_used] >= 0)
        return slots[np.argsort(self.live_offsets[slots], kind="stable")]

    def reserve(self, rows: int) -> None:
        """Make room for so many more rows at once, which is cheaper than growing to it."""
        self._reserve(rows, 0, 0, hashed=False)

    def _reserve(self, rows: int, deletes: int, key_bytes: int, *, hashed: bool) -> None:
        if self.slots_used + rows > self.capacity:
            self.live_offsets = _grown(self.live_offsets, max(self.capacity * 2, self.slots_used + rows), fill=-1)
        if hashed and len(self._starts) < self.capacity:
            self._starts = _grown(self._starts, self.capacity)
            self._lengths = _grown(self._lengths, self.capacity)
        free = int(self._state[_FREE]) + deletes
        if free > len(self._free):
            self._free = _grown(self._free, 2 * free)
        entries = len(self._entries)
        while (len(self) + rows) * 3 > entries * 2:
            entries *= 2
        if entries != len(self._entries):
            new = np.zeros((entries, 2), np.int64)
            kernels.rehash(self._entries, new, home_shift(entries), self._seed)
            self._entries = new
        end = int(self._state[_ARENA_END])
        if end + key_bytes > len(self._arena):
            dead = int(self._state[_ARENA_DEAD])
            arena = np.empty(max(2 * (end - dead + key_bytes), 1 << 12), np.uint8)
            self._state[_ARENA_END] = kernels.compact_arena(
                self._arena, self._starts, self._lengths, self.live_offsets, self.slots_used, arena
            )
            self._state[_ARENA_DEAD] = 0
            self._arena = arena


def _grown(array: npt.NDArray[np.int64], size: int, fill: int = 0) -> npt.NDArray[np.int64]:
    out = np.full(size, fill, np.int64)
    out[: len(array)] = array
    return out
