"""What is known of files, snapshots and parts of logs, which do not change: of those that were asked for last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentlyUsed(Generic[K, V]):
    """Values by key. Whatever was not asked for longest goes first. Thread-safe."""

    def __init__(self, size_max: int, size_of: Callable[[V], int] = lambda _: 1) -> None:
        """Args:
        size_max: what all values may be together.
        size_of: what a value is of it; without it, one: their number is bounded.
        """
        self.size_max = size_max
        self.size = 0
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value of a key; None: it is not known."""
        return self.known([key]).get(key)

    def known(self, keys: Iterable[K]) -> dict[K, V]:
        """The values of those keys that are known."""
        with self._lock:
            found = {key: self._values[key] for key in keys if key in self._values}
            for key in found:
                self._values.move_to_end(key)
        return found

    def note(self, key: K, value: V) -> None:
        """From now on a key's value is this one; one that is larger than all may be is not kept."""
        self.note_all({key: value})

    def note_all(self, values: Mapping[K, V]) -> None:
        """The same for several."""
        with self._lock:
            for key, value in values.items():
                if key in self._values:
                    self.size -= self._size_of(self._values.pop(key))
                if self._size_of(value) <= self.size_max:
                    self._values[key] = value
                    self.size += self._size_of(value)
            while self.size > self.size_max:
                self.size -= self._size_of(self._values.popitem(last=False)[1])
