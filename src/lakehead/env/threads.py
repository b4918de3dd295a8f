"""Threads and what they wait on, as one injectable thing.

Whoever shares state between threads asks `Threads` for locks, events and threads and does not name the ``threading``
module. So a simulation can run the same code one step at a time.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from lakehead.env.interrupts import Changes, Latch

P = ParamSpec("P")
T = TypeVar("T")


def cores() -> int:
    """How many threads of this process compute at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def before_exit(call: Callable[[], object]) -> None:
    """Have this called when the main thread has come to its end, while other threads can still do all: `atexit` comes
    later, when nothing can be begun. What is given last is called first; a forked child calls it, too."""
    # No public name has it. A Python without it calls it later, and at worst what runs then fails.
    getattr(threading, "_register_atexit", atexit.register)(call)


def this_thread() -> int:
    """Tells the threads that run apart."""
    return threading.get_ident()


class Lock(Protocol):
    """`threading.Lock`, held inside ``with``."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Event(Protocol):
    """`threading.Event`."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, seconds: float | None = None, /) -> bool: ...


class Done(Protocol):
    """What one thread waits for, once; made and waited for at a fraction of the cost of an `Event`. `Latch` is the real
    one."""

    def open(self) -> None: ...

    def wait(self) -> bool: ...


class Condition(Protocol):
    """Wakes those who wait for what others change; `Changes` is the real one."""

    def notify_all(self) -> None:
        """Let all who wait look again; call it after the state was changed."""
        ...

    def wait_for(self, reached: Callable[[], bool], check_seconds: float | None = None) -> None:
        """Return once ``reached()``, which is asked after each change, and after so many seconds without one."""
        ...


class Started(Protocol):
    """A thread that runs."""

    def join(self) -> None:
        """Return once it has ended."""
        ...


class Pool(Protocol):
    """A few threads that do what they are given."""

    def submit(self, work: Callable[[], object], /) -> object:
        """Have a thread do this as soon as one is free.

        Raises:
            RuntimeError: the pool was shut down.
        """
        ...

    def shutdown(self) -> None:
        """Take no more work, and return once all that was given is done."""
        ...


class WorkerPool(Executor):
    """A few threads that do what they are given, and no more of them than there was at once.

    As `concurrent.futures.ThreadPoolExecutor`, which takes no work once the main thread has ended, though others of the
    program may go on, and write and read as before. Within ``with`` it ends when all is done. Thread-safe.
    """

    def __init__(self, threads_max: int, name: str = "lakehead-worker") -> None:
        self._threads_max = threads_max
        self._name = name
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have ``fn`` called as soon as a thread is free.

        Raises:
            RuntimeError: the pool was shut down, or the system allows no thread.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeError(f"{self._name} was shut down")
            if self._idle:
                self._idle -= 1  # one of them takes it
            elif len(self._threads) < self._threads_max:
                self._begin()
            self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def _begin(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are as many as the system allows: those that there are do it
            if not self._threads:
                raise
            return
        self._threads.append(thread)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            _carry_out(*task)
            del task  # what it holds may be large
            with self._lock:
                self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and return once all that was given is done, or what was not begun is cancelled."""
        with self._lock:
            while cancel_futures and not self._ended and not self._tasks.empty():
                if (task := self._tasks.get()) is not None:
                    task[0].cancel()
            if not self._ended:
                self._ended = True
                for _ in self._threads:
                    self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as e:
        future.set_exception(e)
        del future, call  # else the error, by its traceback, and they would keep each other
    else:
        future.set_result(result)


class Threads(Protocol):
    """Where locks, events and threads come from."""

    def lock(self) -> Lock:
        """One that its holder may not take again."""
        ...

    def reentrant_lock(self) -> Lock:
        """One that its holder may take again: for what destructors may take, which run at any point of any thread."""
        ...

    def event(self) -> Event:
        """One that is not set."""
        ...

    def done(self) -> Done:
        """One that is not open."""
        ...

    def condition(self) -> Condition:
        """One that nobody waits for."""
        ...

    def start(self, work: Callable[[], object], name: str) -> Started:
        """Begin a thread, which does not keep the process from ending."""
        ...

    def pool(self, threads_max: int, name: str) -> Pool:
        """A pool of so many threads at most, begun when they are needed."""
        ...


class SystemThreads:
    """The operating system's threads."""

    def lock(self) -> Lock:
        return threading.Lock()

    def reentrant_lock(self) -> Lock:
        return threading.RLock()

    def event(self) -> Event:
        return threading.Event()

    def done(self) -> Done:
        return Latch()

    def condition(self) -> Condition:
        return Changes()

    def start(self, work: Callable[[], object], name: str) -> Started:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, threads_max: int, name: str) -> Pool:
        return WorkerPool(threads_max, name)
