"""The leases of a connection's pinned reads: renewed while somebody holds them, let go of when nobody does.

A server ends a lease that nobody renews, so that what a process held is free soon after the process is gone. One thread
per connection renews; it runs only while there is something to renew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

from lakehead.client.patience import ask
from lakehead.client.routes import Routes
from lakehead.config import LEASE_SECONDS
from lakehead.env import Env
from lakehead.env.threads import Started
from lakehead.errors import ClosedError, LakeheadError, OverloadedError
from lakehead.protocol import messages as m
from lakehead.protocol.messages import LEASE_JOINT

_log = logging.getLogger("lakehead.client")

Occasion: TypeAlias = Literal["open", "renew", "full"]
"""When holders of pins are asked to drop those that nobody needs: before a lease is opened (cheap checks only),
before leases are renewed, and when the server has no room for another one (whatever it takes)."""

_SHARE = 4
"""A lease is renewed so often in the time that it lasts."""
_LOOK_SECONDS = 1.0
"""How often the thread that renews looks whether anybody has the leases yet: a callback could be interrupted."""
_LINGER_SECONDS = 0.1
"""After a lease was let go of, others are waited for so long before the server is told."""


class _News:
    """What the thread that renews waits for and tells a server. It does not keep the leases alive, whose connection may
    be let go of without being closed."""

    def __init__(self, routes: Routes, env: Env) -> None:
        self.routes = routes
        self.clock = env.clock
        self.kept: Counter[str] = Counter()
        self.released: deque[str] = deque()
        self.changed = env.threads.condition()
        self.closed = False

    def wait(self, of: weakref.ref[Leases], reached: Callable[[], bool], until: float) -> None:
        """Return when this is reached, or the leases are closed or nobody's any more, or then."""

        def over() -> bool:
            return reached() or self.closed or of() is None or self.clock.monotonic() >= until

        self.changed.wait_for(over, min(max(until - self.clock.monotonic(), 0.001), _LOOK_SECONDS))

    def let_go(self) -> None:
        """Tell the servers of all leases that there were, as far as they listen."""
        leases = _parts([*self.kept, *self.released])
        with contextlib.suppress(LakeheadError):
            for server in self.routes.servers() if leases else ():
                server.call(m.RenewLeases(leases=[], release=leases))


class Leases:
    """The leases of one connection. Thread-safe; the garbage collector may call `release` at any time."""

    def __init__(self, routes: Routes, env: Env, *, renewing: bool) -> None:
        """``renewing`` starts the thread when there is something to renew."""
        self._routes = routes
        self._clock = env.clock
        self._renewing = renewing
        self._news = _News(routes, env)
        self._kept, self._released = self._news.kept, self._news.released
        self._seconds = 0.0
        self._threads = env.threads
        self._lock = env.threads.lock()
        self._thread: Started | None = None
        self.before: list[Callable[[Occasion], None]] = []

    def open(self, tables: Sequence[m.LeasedTable], *, planned: bool = False) -> list[m.Lease]:
        """Pin what all tablets of these tables hold at one moment, and what is used of the lake table of each; see
        `lakehead.protocol.messages.OpenLeases`. Tablets of several servers are pinned one server after the other.

        Raises:
            OverloadedError: a server has no room for another one, also after those that are over were let go of.
        """
        try:
            return self._open("open", tables, planned=planned)
        except OverloadedError:
            if not self.before:
                raise
            return self._open("full", tables, planned=planned)

    def _open(self, occasion: Occasion, tables: Sequence[m.LeasedTable], *, planned: bool) -> list[m.Lease]:
        for drop in list(self.before):
            drop(occasion)
        found: list[list[m.Lease]] = [[] for _ in tables]
        released = _parts(self._drained())
        try:
            for server, places in self._places([t.table_id for t in tables]):
                wanted = [tables[i] for i in places]
                request = m.OpenLeases(tables=wanted, release=released, planned=planned)
                reply, _ = ask(server, self._clock, request)
                self._seconds = reply.seconds
                for i, lease in zip(places, reply.leases, strict=True):
                    found[i].append(lease)
        except BaseException:
            for lease in (lease for leases in found for lease in leases):
                self.release(lease.lease)
            raise
        return [_joined(leases) for leases in found]

    def _places(self, table_ids: Sequence[str]) -> list[tuple[m.Endpoint, list[int]]]:
        """Each server, and the places of the tables that it has something of."""
        places: dict[int, tuple[m.Endpoint, list[int]]] = {}
        for i, table_id in enumerate(table_ids):
            for server in self._routes.servers(table_id):
                places.setdefault(id(server), (server, []))[1].append(i)
        return list(places.values())

    def lake_uses(self, table_id: str) -> list[m.LakeUse]:
        """What pinned reads of a table still use of its lake table, each once."""
        request = m.LeasedLake(table_id=table_id)
        replies = [ask(s, self._clock, request)[0] for s in self._routes.servers(table_id)]
        return list(dict.fromkeys(use for reply in replies for use in reply.uses))

    def keep(self, lease: str) -> None:
        """Renew a lease until it is released."""
        with self._lock:
            self._kept[lease] += 1
            if self._renewing and self._thread is None and self._seconds > 0:
                run = functools.partial(_renew, weakref.ref(self), self._news, self._seconds)
                self._thread = self._threads.start(run, "lakehead-leases")

    def release(self, lease: str) -> None:
        """Let a lease go: soon, or with the next request about leases. Waits for nothing."""
        self._released.append(lease)
        self._news.changed.notify_all()

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
        for drop in list(self.before):
            drop("renew")
        return self._tell()

    def _tell(self) -> bool:
        """As `renew`, without asking who holds pins whether they are needed."""
        released = self._drained()
        with self._lock:
            kept = list(self._kept)
        if kept or released:
            request = m.RenewLeases(leases=_parts(kept), release=_parts(released))
            for server in self._routes.servers():
                server.call(request)
        return bool(kept)

    def close(self) -> None:
        """End the thread; leases end by themselves."""
        self._news.closed = True
        self._news.changed.notify_all()

    def _drained(self) -> list[str]:
        released = []
        with contextlib.suppress(IndexError):  # others drain it at the same time
            while True:
                released.append(self._released.popleft())
        with self._lock:
            for lease in released:
                self._forget(lease)
        return released

    def _forget(self, lease: str) -> None:
        self._kept[lease] -= 1
        if self._kept[lease] <= 0:
            del self._kept[lease]

    def _renewed(self, *, due: bool) -> bool:
        """Tell the servers; returns whether there may be more to tell them."""
        try:
            # To find out what nobody needs takes requests to a JVM for each pin: not whenever a read ends.
            held = self.renew() if due else self._tell()
        except ClosedError:
            return False
        except LakeheadError:
            held = True  # the server may come back before they end
        except Exception:  # of who holds a pin: the leases of all others are renewed
            _log.exception("leases were not renewed, and are tried again")
            held = True
        with self._lock:
            if due and not held and not self._kept:
                self._thread = None
                return False
        return True


def _renew(of: weakref.ref[Leases], news: _News, seconds: float) -> None:
    """What the thread does; it ends where there is nothing to renew any more, or nobody who could hold it."""
    clock = news.clock
    due = clock.monotonic() + seconds / _SHARE
    while True:
        news.wait(of, lambda: bool(news.released), due)
        # What ends together, or just before the next begins, is one request.
        news.wait(of, lambda: not news.released, min(due, clock.monotonic() + _LINGER_SECONDS))
        if news.closed:
            return
        leases = of()
        if leases is None:
            news.let_go()
            return
        is_due = clock.monotonic() >= due
        if (is_due or news.released) and not leases._renewed(due=is_due):
            return
        if is_due:
            due = clock.monotonic() + leases._seconds / _SHARE
        del leases


def _joined(leases: Sequence[m.Lease]) -> m.Lease:
    """The leases of one table on its servers as one, of which each server takes what is its own."""
    if len(leases) == 1:
        return leases[0]
    tablets = sorted((t for lease in leases for t in lease.tablets), key=lambda t: t.key)
    return m.Lease(
        lease=LEASE_JOINT.join(lease.lease for lease in leases),
        tablets=tablets,
        incarnation=LEASE_JOINT.join(lease.incarnation for lease in leases),
    )


def _parts(leases: Iterable[str]) -> list[str]:
    return [part for lease in leases for part in lease.split(LEASE_JOINT)]
