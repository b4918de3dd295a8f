"""Threads, locks and events of the server and the client, on the simulation's scheduler.

The code under test is handed `TaskThreads` as its `lakehead.env.threads.Threads`. So real group commits, waits and
background work happen, one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from tests.simulation.scheduler import Scheduler, Task


class TaskLock:
    """A `Lock`. Whoever takes a plain one may have to let others go first; a ``reentrant`` one is also taken by
    destructors, which run anywhere."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: list[Task] = []

    @property
    def held(self) -> bool:
        """Whether somebody has it."""
        return self._owner is not None

    def __enter__(self) -> bool:
        if self._scheduler.over:
            self._depth += 1
            return True
        if not self._reentrant:
            self._scheduler.pause()
        task = self._scheduler.current
        if not (self._reentrant and self._owner is task):
            while self._owner is not None:
                self._scheduler.wait(self._waiters, f"a lock that {self._owner.name} holds")
        self._owner = task
        self._depth += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._scheduler.wake(self._waiters)


class TaskEvent:
    """An `Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiters: list[Task] = []

    def set(self) -> None:
        self._set = True
        self._scheduler.wake(self._waiters)

    open = set
    """As a `Done`."""

    def clear(self) -> None:
        self._set = False

    def wait(self, seconds: float | None = None, /) -> bool:
        end_us = None if seconds is None else self._scheduler.now_us + seconds * 1e6
        while not self._set:
            left = None if end_us is None else (end_us - self._scheduler.now_us) / 1e6
            if left is not None and left <= 0:
                break
            self._scheduler.wait(self._waiters, "an event", left)
        return self._set


class TaskCondition:
    """A `Condition`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changes = 0
        self._waiters: list[Task] = []

    def notify_all(self) -> None:
        self._changes += 1
        self._scheduler.wake(self._waiters)

    def wait_for(self, reached: Callable[[], bool], check_seconds: float | None = None) -> None:
        seen = self._changes
        while not reached():
            if seen == self._changes:  # else there was one while `reached` was asked
                self._scheduler.wait(self._waiters, "a change", check_seconds)
            seen = self._changes


class TaskThread:
    """A task of the process that starts it, as a thread."""

    def __init__(self, scheduler: Scheduler, work: Callable[[], object], name: str) -> None:
        self._ended = TaskEvent(scheduler)
        self._work = work
        scheduler.spawn(name, scheduler.current.process, self._run)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def join(self) -> None:
        self._ended.wait()


class TaskPool:
    """A `Pool` that begins a task for all that it is given."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._closed = False

    def submit(self, work: Callable[[], object], /) -> None:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._scheduler.spawn("background", self._scheduler.current.process, work)

    def shutdown(self) -> None:
        self._closed = True


class TaskThreads:
    """A `lakehead.env.threads.Threads` whose threads are tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def lock(self) -> TaskLock:
        return TaskLock(self._scheduler, reentrant=False)

    def reentrant_lock(self) -> TaskLock:
        return TaskLock(self._scheduler, reentrant=True)

    def event(self) -> TaskEvent:
        return TaskEvent(self._scheduler)

    def done(self) -> TaskEvent:
        return TaskEvent(self._scheduler)

    def condition(self) -> TaskCondition:
        return TaskCondition(self._scheduler)

    def start(self, work: Callable[[], object], name: str) -> TaskThread:
        return TaskThread(self._scheduler, work, name)

    def pool(self, threads_max: int, name: str) -> TaskPool:
        return TaskPool(self._scheduler)
