"""Ctrl-C may raise `KeyboardInterrupt` between any two instructions of the main thread, and of no other.

What must not end half done runs `shielded`: in another thread, while the main thread waits. What also ends soon by
itself runs `uninterrupted`, in the main thread, and the interrupt waits: to wake another thread and to be woken by it
takes as long as a small write. What may take long inside a library that looks at no signals is `stoppable`. What the
main thread waits for it waits for with plain locks, which are taken and given back in one step: `threading.Event` and
`Condition` are written in Python, and an interrupt inside of them leaves a lock behind that nobody gives back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar

from lakehead.env.forks import keep

T = TypeVar("T")
_IDLE_WORKERS_MAX = 2
_NOTICE_SECONDS = 1.0
_STOP_EVERY_SECONDS = 0.05
_STOPS_MAX = 60
_INTERRUPT = int(signal.SIGINT)
_OTHER_SIGNALS = [
    int(signal.Signals[name])
    for name in ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGVTALRM", "SIGPROF", "SIGXCPU")
]
# What `signal` wraps, to give its constants back as an enum: that would take a quarter of the time of a small write.
_handler_of: Callable[[int], Any] = _signal.getsignal
_handle: Callable[[int, Any], Any] = _signal.signal


class Latch:
    """Opened once, by any thread; to wait for it may be interrupted, and leaves nothing behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let whoever waits go on; nothing happens the second time."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Return once it is open, or after that time; True in the first case. One thread, once."""
        if seconds is not None:
            return self._lock.acquire(timeout=seconds)
        # A signal that comes just before the wait begins does not end it; it is noticed at the next.
        while not self._lock.acquire(timeout=_NOTICE_SECONDS):
            continue
        return True


class Changes:
    """Wakes threads that wait for a change, as `threading.Condition` does; it also works where interrupts land."""

    def __init__(self) -> None:
        # Reentrant, as the garbage collector may close a forgotten stream at any point of any thread.
        self._lock = threading.RLock()
        self._waiting: list[Latch] = []

    def notify_all(self) -> None:
        """Let all who wait look again; call it after the state was changed."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for latch in waiting:
            latch.open()

    def wait_for(self, reached: Callable[[], bool], check_seconds: float | None = None) -> None:
        """Return once ``reached()``, which is asked after each change, and after so many seconds without one."""
        while not reached():
            latch = Latch()
            with self._lock:
                self._waiting.append(latch)
            # Asked once more: the change may have come before this waiter was listed.
            if reached() or not latch.wait(check_seconds):
                with self._lock, contextlib.suppress(ValueError):
                    self._waiting.remove(latch)


class _Task(Generic[T]):
    """Work that another thread does. When the caller leaves before it has ended, its result is undone."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object] | None) -> None:
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()
        self._begun = self._left = self._ended = self._withdrawn = False
        self.latch = Latch()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        with self._lock:
            if self._withdrawn:
                return
            self._begun = True
        try:
            self.result = self._work()
        except BaseException as e:
            self.error = e
        with self._lock:
            self._ended = True
            left = self._left
        if left:
            self.clean_up()

    def withdraw(self) -> bool:
        """Work that has not begun is not to begin; False when it has."""
        with self._lock:
            self._withdrawn = not self._begun
            return self._withdrawn

    def leave(self) -> bool:
        """Nobody takes the result; True when `clean_up` is left to the caller."""
        with self._lock:
            self._left = True
            return self._ended

    def outcome(self) -> T:
        """Return or raise what the work did, which has ended."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None
        return self.result  # type: ignore[return-value]

    def clean_up(self) -> None:
        if self._undo is not None and self.error is None:
            self._undo(self.result)  # type: ignore[arg-type]


class _Workers:
    """Threads that do the main thread's work. It starts them by the bare call, which interrupts cannot cut in two."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], Latch | None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def give(self, work: Callable[[], None], done: Latch | None) -> None:
        self._tasks.put((work, done))
        if not self._idle:
            _thread.start_new_thread(self._serve, ())

    def _serve(self) -> None:
        with self._lock:
            self._idle += 1
        while True:
            work, done = self._tasks.get()
            with self._lock:
                self._idle -= 1
                alone = not self._idle
            if alone and not self._tasks.empty():
                # Given to this thread before it was known to be busy: the work must not wait behind what may take long.
                _thread.start_new_thread(self._serve, ())
            work()
            with self._lock:
                self._idle += 1
                enough = self._idle > _IDLE_WORKERS_MAX
                self._idle -= enough
            if done is not None:
                done.open()
            del work, done
            if enough:
                return


_workers = _Workers()


def interrupts_land() -> bool:
    """Whether this is the thread in which `KeyboardInterrupt` may be raised."""
    return threading.get_ident() == threading.main_thread().ident


def shielded(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Call ``work`` where no interrupt lands, and return or raise what it does.

    That is here, or for the main thread another one. An interrupt of the main thread ends its waiting, and the work
    goes on to its end; then ``undo`` is called with its result.
    """
    if not interrupts_land():
        return work()
    task = _Task(work, undo)
    try:
        _workers.give(task.run, task.latch)
        task.latch.wait()
    except BaseException:
        if task.leave():
            _workers.give(task.clean_up, None)
        raise
    return task.outcome()


def stoppable(work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Call ``work``, which takes as long as it takes, and return or raise what it does.

    The main thread has another one do it. An interrupt of its waiting has the work stopped, and comes when that has
    ended; work that does not end within some seconds is left to itself, and so it is by a second interrupt.

    Args:
        stop: makes the work end soon; called until it has ended, as what is said to work that is about to begin may be
            lost. Any thread may call it, at any time. False: nobody need wait for the work's end.
    """
    if not interrupts_land():
        return work()
    task = _Task(work, None)
    try:
        _workers.give(task.run, task.latch)
        task.latch.wait()
    except BaseException:
        stops = 0 if task.withdraw() else _STOPS_MAX
        for _ in range(stops):
            if stop() is False or task.latch.wait(_STOP_EVERY_SECONDS):
                break
        raise
    return task.outcome()


def uninterrupted(work: Callable[[], T]) -> T:
    """Call ``work``, which ends soon by itself. An interrupt of the main thread comes when the work has ended.

    Other signals whose handlers may raise (a time limit by SIGALRM) make it as `shielded`.
    """
    if not interrupts_land():
        return work()
    usual = _handler_of(_INTERRUPT)
    if not callable(usual) or any(map(callable, map(_handler_of, _OTHER_SIGNALS))):
        return shielded(work)
    came: list[int] = []

    def notice(number: int, frame: FrameType | None) -> None:
        came.append(number)

    _handle(_INTERRUPT, notice)
    try:
        return work()
    finally:
        _handle(_INTERRUPT, usual)
        if came:
            usual(came[0], None)


def _after_fork() -> None:
    """A child has none of the threads."""
    global _workers
    keep(_workers)
    _workers = _Workers()


os.register_at_fork(after_in_child=_after_fork)
