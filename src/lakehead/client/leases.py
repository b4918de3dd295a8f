"""The leases of a connection's pinned reads: renewed while somebody holds them, let go of when nobody does.

A server ends a lease that nobody renews, so that what a process held is free soon after the process is gone. One thread
per connection renews; it runs only while there is something to renew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

from lakehead.config import LEASE_SECONDS
from lakehead.env.threads import Started, Threads
from lakehead.errors import ClosedError, LakeheadError, OverloadedError, UnavailableError
from lakehead.protocol import messages as m

Occasion: TypeAlias = Literal["open", "renew", "full"]
"""When holders of pins are asked to drop those that nobody needs: before a lease is opened (cheap checks only),
before leases are renewed, and when the server has no room for another one (whatever it takes)."""

_SHARE = 4
"""A lease is renewed so often in the time that it lasts."""


class LeaseKeeper:
    """Thread-safe; the garbage collector may call `release` at any time."""

    def __init__(self, endpoint: m.Endpoint, threads: Threads, *, renewing: bool) -> None:
        """``renewing`` starts the thread when there is something to renew."""
        self._endpoint = endpoint
        self._renewing = renewing
        self._kept: Counter[str] = Counter()
        self._released: deque[str] = deque()
        self._seconds = 0.0
        self._threads = threads
        self._lock = threads.lock()
        self._thread: Started | None = None
        self._closing = threads.event()
        self.before: list[Callable[[Occasion], None]] = []

    def open(self, tables: Sequence[tuple[str, str | None]], *, planned: bool = False) -> list[m.Lease]:
        """New leases; see `lakehead.protocol.messages.OpenLeases`. What was released goes with them.

        Raises:
            OverloadedError: the server has no room for another one, also after those that are over were let go of.
        """
        try:
            return self._open("open", tables, planned=planned)
        except OverloadedError:
            if not self.before:
                raise
            return self._open("full", tables, planned=planned)

    def _open(self, occasion: Occasion, tables: Sequence[tuple[str, str | None]], *, planned: bool) -> list[m.Lease]:
        for ask in list(self.before):
            ask(occasion)
        released = self._drained()
        wanted = [m.LeasedTable(table_id=t, lake_metadata=metadata) for t, metadata in tables]
        request = m.OpenLeases(tables=wanted, release=released, planned=planned)
        try:
            reply, _ = self._endpoint.call(request)
        except OverloadedError:
            raise
        except UnavailableError:  # a pooled stream that broke while it was idle
            reply, _ = self._endpoint.call(request)
        self._seconds = reply.seconds
        return reply.leases

    def keep(self, lease: str) -> None:
        """Renew a lease until it is released."""
        with self._lock:
            self._kept[lease] += 1
            if self._renewing and self._thread is None and self._seconds > 0:
                self._thread = self._threads.start(self._run, "lakehead-leases")

    def release(self, lease: str) -> None:
        """Let a lease go with the next request about leases. Sends nothing and takes no lock."""
        self._released.append(lease)

    @contextmanager
    def used(self, lease: str | None) -> Iterator[None]:
        """Renew a lease that somebody else opened, while it is used here."""
        if lease is None:
            yield
            return
        self._seconds = self._seconds or LEASE_SECONDS
        self.keep(lease)
        try:
            yield
        finally:
            with self._lock:
                self._forget(lease)

    def renew(self) -> bool:
        """Renew what is held and let go of the rest, now; tells whether anything is held.

        Raises:
            LakeheadError: the server did not answer.
        """
        for ask in list(self.before):
            ask("renew")
        released = self._drained()
        with self._lock:
            kept = list(self._kept)
        if kept or released:
            self._endpoint.call(m.RenewLeases(leases=kept, release=released))
        return bool(kept)

    def close(self) -> None:
        """End the thread; leases end by themselves."""
        self._closing.set()

    def _drained(self) -> list[str]:
        released = [self._released.popleft() for _ in range(len(self._released))]
        with self._lock:
            for lease in released:
                self._forget(lease)
        return released

    def _forget(self, lease: str) -> None:
        self._kept[lease] -= 1
        if self._kept[lease] <= 0:
            del self._kept[lease]

    def _run(self) -> None:
        while not self._closing.wait(self._seconds / _SHARE):
            try:
                if self.renew():
                    continue
            except ClosedError:
                return
            except LakeheadError:
                continue  # the server may come back before they end
            with self._lock:
                if not self._kept:
                    self._thread = None
                    return
