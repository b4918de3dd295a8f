"""Threads, locks and events of the server and the client, on the simulation's scheduler.

The modules under test say ``threading.Lock()``; while a simulation runs, their ``threading`` is `Threads`. So real
group commits, waits and background work happen, one step at a time.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any
from unittest import mock

from tests.simulation.scheduler import Scheduler, Task

from lakehead.server import service, tables
from lakehead.server.tablet import PendingWrite


class TaskLock:
    """`threading.Lock` and, as ``reentrant``, `threading.RLock`. Whoever takes a plain one may have to let others go
    first; a reentrant one is also taken by destructors, which run anywhere."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._scheduler.over:
            self._depth += 1
            return True
        if not self._reentrant:
            self._scheduler.pause()
        task = self._scheduler.current
        if not (self._reentrant and self._owner is task):
            while self._owner is not None:
                if not blocking:
                    return False
                self._scheduler.wait(self._waiters, f"a lock that {self._owner.name} holds")
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._scheduler.wake(self._waiters)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class TaskEvent:
    """`threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.wake(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        end_us = None if timeout is None else self._scheduler.now_us + timeout * 1e6
        while not self._set:
            left = None if end_us is None else (end_us - self._scheduler.now_us) / 1e6
            if left is not None and left <= 0:
                break
            self._scheduler.wait(self._waiters, "an event", left)
        return self._set


class TaskCondition:
    """`threading.Condition`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = TaskLock(scheduler, reentrant=True)
        self._waiters: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        self._lock.release()
        try:
            self._scheduler.wait(self._waiters, "a condition", timeout)
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        self._scheduler.wake(self._waiters)


class TaskChanges:
    """`lakehead.env.interrupts.Changes`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiters: list[Task] = []

    def notify_all(self) -> None:
        self._scheduler.wake(self._waiters)

    def wait_for(self, reached: Callable[[], bool], check_seconds: float | None = None) -> None:
        while not reached():
            self._scheduler.wait(self._waiters, "a change", check_seconds)


class TaskThread:
    """`threading.Thread`: a task of the process that starts it."""

    def __init__(
        self, target: Callable[..., None], name: str = "thread", args: tuple[Any, ...] = (), daemon: bool = True
    ) -> None:
        self._call = lambda: target(*args)
        self.name = name
        self._ended: TaskEvent | None = None

    def start(self) -> None:
        scheduler = self._scheduler
        self._ended = ended = TaskEvent(scheduler)

        def body() -> None:
            try:
                self._call()
            finally:
                ended.set()

        scheduler.spawn(self.name, scheduler.current.process, body)

    def join(self, timeout: float | None = None) -> None:
        if self._ended is not None:
            self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._ended is not None and not self._ended.is_set()

    _scheduler: Scheduler


class Pool:
    """`ThreadPoolExecutor`, as far as work is only handed over."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._closed = False

    def submit(self, call: Callable[[], None]) -> None:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._scheduler.spawn("background", self._scheduler.current.process, call)

    def shutdown(self, wait: bool = True) -> None:
        self._closed = True


class Threads:
    """What the modules under test find under the name ``threading``; all that is not here is the real thing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.Thread = type("Thread", (TaskThread,), {"_scheduler": scheduler})

    def Lock(self) -> TaskLock:
        return TaskLock(self._scheduler)

    def RLock(self) -> TaskLock:
        return TaskLock(self._scheduler, reentrant=True)

    def Event(self) -> TaskEvent:
        return TaskEvent(self._scheduler)

    def Condition(self) -> TaskCondition:
        return TaskCondition(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


@contextmanager
def simulated_threads(scheduler: Scheduler) -> Iterator[None]:
    """Give the server's and the client's modules the scheduler's threads."""
    threads = Threads(scheduler)

    def pending(*args: Any) -> PendingWrite:
        # The dataclass holds on to the real Event.
        done: Any = threads.Event()
        return functools.partial(PendingWrite, done=done)(*args)

    with ExitStack() as stack:
        for name, module in sorted(sys.modules.items()):
            if name.startswith(("lakehead.server.", "lakehead.client.")) and hasattr(module, "threading"):
                stack.enter_context(mock.patch.object(module, "threading", threads))
        stack.enter_context(mock.patch.object(service, "ThreadPoolExecutor", lambda *_, **__: Pool(scheduler)))
        stack.enter_context(mock.patch.object(service, "PendingWrite", pending))
        stack.enter_context(mock.patch.object(tables, "Changes", lambda: TaskChanges(scheduler)))
        yield
