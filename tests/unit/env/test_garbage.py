"""A server's full collections: they pass over what survived, and forget nothing that came since."""

from __future__ import annotations

import gc
import weakref

from lakehead.env.clock import SystemClock
from lakehead.env.garbage import THAW_SECONDS, short_collections


class Clock(SystemClock):
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Cycle:
    """An object that only a collection can destroy."""

    def __init__(self) -> None:
        self.me = self


def test_collections_pass_over_what_survived_the_one_before() -> None:
    kept = [Cycle() for _ in range(1000)]
    with short_collections(Clock()):
        assert not set(map(id, kept)) & set(map(id, gc.get_objects()))
        new = [Cycle() for _ in range(1000)]
        assert set(map(id, new)) <= set(map(id, gc.get_objects()))
        gc.collect()
        assert not set(map(id, new)) & set(map(id, gc.get_objects()))
    assert set(map(id, [*kept, *new])) <= set(map(id, gc.get_objects()))


def test_what_came_since_is_collected() -> None:
    with short_collections(Clock()):
        gone = weakref.ref(Cycle())
        gc.collect()
        assert gone() is None


def test_what_survived_is_collected_once_an_hour() -> None:
    clock = Clock()
    with short_collections(clock):
        cycle = Cycle()
        gc.collect()
        gone = weakref.ref(cycle)
        del cycle
        gc.collect()
        assert gone() is not None
        clock.seconds += THAW_SECONDS
        gc.collect()
        assert gone() is None
        assert gc.get_freeze_count() > 0
