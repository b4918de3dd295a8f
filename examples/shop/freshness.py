"""How long events are under way: from the moment an application sends them to the moment a layer shows them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

KEEP_US = 300_000_000
"""Older arrivals are forgotten."""


def percentiles(micros: Ints) -> dict[str, Any]:
    """p50 and p99 in milliseconds, of how many events; None for them without events."""
    if not len(micros):
        return {"p50_ms": None, "p99_ms": None, "events": 0}
    p50, p99 = np.percentile(micros, [50, 99]) / 1000
    return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2), "events": len(micros)}


class Arrivals:
    """When each event came. One thread tells of them, any may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, Ints]] = deque()

    def saw(self, now_us: int, sent_us: Ints) -> None:
        """Events that were sent at these times are there now; both in microseconds since 1970."""
        with self._lock:
            self._seen.append((now_us, sent_us))
            while self._seen[0][0] < now_us - KEEP_US:
                self._seen.popleft()

    def between(self, since_us: int, until_us: int) -> tuple[Ints, Ints]:
        """When events were sent in ``[since, until)``, and how long each was under way, in order of arrival."""
        with self._lock:
            seen = [s for s in self._seen if s[0] >= since_us]
        sent = np.concatenate([np.empty(0, np.int64), *(s for _, s in seen)])
        took = np.concatenate([np.empty(0, np.int64), *(now - s for now, s in seen)])
        wanted = (sent >= since_us) & (sent < until_us)
        return sent[wanted], took[wanted]

    def percentiles(self, since_us: int, until_us: int) -> dict[str, Any]:
        """Of the events that were sent in ``[since, until)``."""
        return percentiles(self.between(since_us, until_us)[1])


class Sums:
    """When sums were seen to hold every event that was sent up to a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, int]] = deque()

    def saw(self, now_us: int, last_sent_us: int) -> None:
        """All events that were sent up to then are in the sums now."""
        with self._lock:
            if not self._seen or last_sent_us > self._seen[-1][1]:
                self._seen.append((now_us, last_sent_us))
            while self._seen[0][0] < now_us - KEEP_US:
                self._seen.popleft()

    def took(self, sent_us: Ints) -> Ints:
        """How long each of these events was under way; what no sum holds yet is left out."""
        with self._lock:
            now, last = np.array(self._seen, np.int64).reshape(-1, 2).T
        at = np.searchsorted(last, sent_us)
        there = at < len(last)
        return now[at[there]] - sent_us[there]
