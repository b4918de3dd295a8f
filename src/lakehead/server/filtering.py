"""Filters of readers, computed in turns: as many at once as there are cores, of all shares of the server alike.

A filter is computed in slices of bounded work (`lakehead.predicate.work`). Before each one its reader waits for a turn,
and ends if nobody waits for its rows any more. So one who sends many filters, or costly ones, has others wait for a
slice and not for all of them, and who goes away costs nothing soon after.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from lakehead.env.threads import Event, Threads
from lakehead.errors import ClosedError
from lakehead.format.joins import join
from lakehead.predicate import Predicate
from lakehead.predicate.work import SLICE_NS
from lakehead.server.access import Share

_LOOK_SECONDS = 0.25
_ASKED_NS = 2e7
_LONG_NS = 2 * SLICE_NS
_SHARED_ROWS, _SHARED_NS, _SHARED_BYTE_NS = 1 << 12, 5e6, 20

T = TypeVar("T")


class _GoneError(Exception):
    """Nobody waits for these rows any more."""


class _Waiting:
    def __init__(self, woken: Event, *, long: bool) -> None:
        self.woken = woken
        self.long = long
        self.begun = False


class Turns:
    """Who may compute a filter now. Thread-safe.

    Those who wait get a turn one after the other, and of each its processes, whatever each has waiting. Turns that take
    long leave one core to the others, where there are two.
    """

    def __init__(self, threads: Threads, cores: int) -> None:
        self._threads = threads
        self._free = max(1, cores)
        self._free_long = max(1, cores - 1)
        self._lock = threads.lock()
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Waiting]]] = OrderedDict()

    @contextlib.contextmanager
    def turn(self, share: Share, gone: Callable[[], bool], *, long: bool = False) -> Iterator[None]:
        """Hold a turn, once it has come. The process that serves the folder need not wait.

        Raises:
            _GoneError: ``gone()``, which is asked while it waits.
        """
        if not share.of:
            yield
            return
        self._begin(share, gone, long=long)
        try:
            yield
        finally:
            with self._lock:
                self._give_back(long=long)

    def _begin(self, share: Share, gone: Callable[[], bool], *, long: bool) -> None:
        with self._lock:
            if not self._waiting and self._take(long=long):
                return
            me = _Waiting(self._threads.event(), long=long)
            self._waiting.setdefault(share.of, OrderedDict()).setdefault(share.process, deque()).append(me)
            self._wake()  # those before it may all wait for a long turn
        while not me.woken.wait(_LOOK_SECONDS):
            if gone():
                self._leave(share, me)
                raise _GoneError

    def _leave(self, share: Share, me: _Waiting) -> None:
        with self._lock:
            if me.begun:
                self._give_back(long=me.long)
                return
            self._waiting[share.of][share.process].remove(me)
            self._forget_if_empty(share)
            self._wake()

    def _take(self, *, long: bool) -> bool:
        if not self._free or (long and not self._free_long):
            return False
        self._free -= 1
        self._free_long -= long
        return True

    def _give_back(self, *, long: bool) -> None:
        self._free += 1
        self._free_long += long
        self._wake()

    def _wake(self) -> None:
        """Give turns to who waits, the share that had one last at the end."""
        while self._free:
            share = next(
                (
                    Share(of, process)
                    for of, processes in self._waiting.items()
                    for process, waiting in processes.items()
                    if self._free_long or not waiting[0].long
                ),
                None,
            )
            if share is None:
                return
            first = self._waiting[share.of][share.process].popleft()
            self._take(long=first.long)
            first.begun = True
            first.woken.set()
            self._waiting.move_to_end(share.of)
            self._waiting[share.of].move_to_end(share.process)
            self._forget_if_empty(share)

    def _forget_if_empty(self, share: Share) -> None:
        processes = self._waiting[share.of]
        if not processes[share.process]:
            del processes[share.process]
        if not processes:
            del self._waiting[share.of]


class Filtering:
    """What one read computes its filter by.

    Attributes:
        gone: tells that nobody waits for its rows any more.
    """

    def __init__(self, turns: Turns, share: Share, gone: Callable[[], bool]) -> None:
        self._turns = turns
        self._share = share
        self._unasked_ns = 0.0
        self.gone = gone

    def read(self, make: Callable[[], Predicate]) -> Predicate:
        """A predicate, read in a turn: it may have thousands of conditions.

        Raises:
            InvalidPredicateError: it is none.
            ClosedError: nobody waits for it any more.
        """
        try:
            with self._turns.turn(self._share, self.gone):
                return make()
        except _GoneError as e:
            raise ClosedError("nobody waits for this read any more") from e

    def filter(self, predicate: Predicate, rows: pa.RecordBatch) -> pa.RecordBatch:
        """As `Predicate.filter`, for one batch.

        Raises:
            InvalidPredicateError: see there; one row would take too long.
            _GoneError: nobody waits for it any more.
        """
        kept = []
        for part, ns in predicate.work.slices(rows):
            self._unasked_ns += ns
            if self._unasked_ns >= _ASKED_NS:  # gRPC takes a tenth of a millisecond to answer
                self._unasked_ns = 0.0
                if self.gone():
                    raise _GoneError
            with self._turns.turn(self._share, self.gone, long=ns > _LONG_NS):
                kept.append(predicate.filter(part))
        return join(kept)


def until_gone(items: Iterator[T]) -> Iterator[T]:
    """The items of a read, to its end or until `Filtering` finds that nobody waits for them."""
    with contextlib.suppress(_GoneError):
        yield from items


def at_once(predicate: Predicate, rows: pa.RecordBatch) -> pa.RecordBatch:
    """As `Filtering.filter`, without turns."""
    return join([predicate.filter(part) for part, _ in predicate.work.slices(rows)])


def soon_done(predicate: Predicate | None) -> bool:
    """Whether the rows of one small turn of a subscription are filtered in a few milliseconds."""
    if predicate is None:
        return True
    work = predicate.work
    return work.batch_ns + _SHARED_ROWS * work.row_ns <= _SHARED_NS and work.byte_ns <= _SHARED_BYTE_NS
