"""What happened in a simulation: counts, a hash that two equal runs share, and the last events for whoever must
understand a failure."""

from __future__ import annotations

import hashlib
from collections import Counter, deque

_EVENTS_KEPT = 60


class Trace:
    """Events in the order in which they happened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, now_us: int, who: str, what: str, detail: object = "") -> None:
        """Note one event; ``what`` is counted, all of it is hashed."""
        line = f"{now_us / 1e6:12.6f}  {who:<12} {what:<24} {detail}".rstrip()
        self.counts[what] += 1
        self.last.append(line)
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
