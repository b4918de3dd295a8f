"""Cooperative tasks on a virtual clock: one runs at a time, and the seed decides which one goes on.

Code under test is written with plain calls, locks and events, so each task has a thread; but a thread runs only while
it holds the baton, and gives it away only where it sleeps, waits or pauses. The order is drawn from the seed and is the
same in every run. When nobody can run, the clock jumps to the next sleeper; when nobody sleeps, that is a deadlock.

A task runs inside a `Process`. Killing a process ends its tasks wherever they are: they are woken with `Killed`, and
whatever they wait for while they unwind raises it again.
"""

from __future__ import annotations

import heapq
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lakehead.env.randomness import SeededRandomness


class Killed(SystemExit):
    """The process that this code ran in was killed."""


class Process:
    """What is killed at once: a server or a client, until it is started anew as another `Process`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True


class Task:
    """One line of execution.

    Attributes:
        home: the process that it belongs to.
        process: the one that it runs in now: a server's while that answers it.
    """

    def __init__(self, name: str, process: Process, body: Callable[[], object]) -> None:
        self.name = name
        self.home = process
        self.process = process
        self.body = body
        self.done = False
        self.waits_for = ""
        self.wakes = 0
        self.worker: _Worker | None = None


class Scheduler:
    """Runs tasks to their end. Used by its own tasks only, but for `run`.

    Attributes:
        on_task: called first in the thread of each task.
    """

    def __init__(self, seed: int) -> None:
        self.draws = SeededRandomness(seed).draws
        self.now_us = 0
        self.pause_chance = 0.2
        self.on_task: Callable[[], None] = lambda: None
        self._current: Task | None = None
        self._ready: list[Task] = []
        self._waiting: dict[Task, None] = {}
        self._sleepers: list[tuple[int, int, Task, int]] = []
        self._sleeps = 0
        self._idle: list[_Worker] = []
        self._finished = threading.Semaphore(0)
        self._ending = False
        self._failure: BaseException | None = None

    def run(self, body: Callable[[], object]) -> None:
        """Run a first task, and those it spawns, until the first one ends; the others are killed then.

        Raises:
            BaseException: what the first of the tasks to fail raised.
            AssertionError: nobody could go on.
        """

        def first() -> None:
            body()
            self._end(None)

        self.spawn("main", Process("simulation"), first)
        self._give(self._next())
        self._finished.acquire()
        for worker in self._idle:
            worker.dismiss()
        if self._failure is not None:
            raise self._failure

    # ---- for tasks ----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True once all tasks have ended; destructors may run after that."""
        return self._current is None

    @property
    def current(self) -> Task:
        assert self._current is not None, "no task is running"
        return self._current

    def spawn(self, name: str, process: Process, body: Callable[[], object]) -> Task:
        """Start a task; it runs when it is drawn."""
        task = Task(name, process, body)
        self._ready.append(task)
        return task

    @contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        """Let the current task run in another process, as a call that is served there does."""
        task = self.current
        home, task.process = task.process, process
        try:
            self.check_alive()
            yield
        finally:
            task.process = home

    def check_alive(self) -> None:
        """Raises: Killed, when the current task's process is gone."""
        if self._ending or not self.current.process.alive:
            raise Killed

    def pause(self) -> None:
        """Perhaps let others go first, those who are ready or those of the next milliseconds. Code that unwinds goes on
        at once."""
        task = self.current
        if not task.process.alive or self._ending:
            return
        chance = self.draws.random() / self.pause_chance
        if chance < 0.3:
            self.sleep(0.01 * chance)
        elif chance < 1:
            self._ready.append(task)
            self._switch("a pause")

    def give_way(self, seconds: float) -> None:
        """Let others go first: those who are ready, and those of so much time. Code that unwinds goes on at once."""
        if self._current is None or not self._current.process.alive or self._ending:
            return
        if seconds:
            self.sleep(seconds)
        else:
            self._ready.append(self._current)
            self._switch("a line")

    def sleep(self, seconds: float) -> None:
        """Return after that time on the virtual clock."""
        self.wait([], "time", seconds)

    def wait(self, waiters: list[Task], reason: str, seconds: float | None = None) -> None:
        """Return once these waiters are woken, or that time has passed."""
        self.check_alive()
        task = self.current
        waiters.append(task)
        self._waiting[task] = None
        if seconds is not None:
            self._sleeps += 1
            heapq.heappush(self._sleepers, (self.now_us + max(int(seconds * 1e6), 1), self._sleeps, task, task.wakes))
        try:
            self._switch(reason)
        finally:
            if task in waiters:
                waiters.remove(task)

    def wake(self, waiters: list[Task]) -> None:
        """Let all of them go on."""
        for task in waiters:
            self._rouse(task)
        waiters.clear()

    def kill(self, process: Process) -> None:
        """End a process: its tasks, and the calls of others that it serves, unwind."""
        process.alive = False
        for task in [t for t in self._waiting if t.process is process]:
            self._rouse(task)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """End the whole run where a check inside fails, whatever code under test would make of the exception."""
        try:
            yield
        except AssertionError as e:
            self._end(e)
            raise Killed from e

    # ---- the baton ----------------------------------------------------------------------------------------------

    def _rouse(self, task: Task) -> None:
        if task in self._waiting:
            del self._waiting[task]
            task.wakes += 1
            self._ready.append(task)

    def _next(self) -> Task | None:
        """Who runs now, taken from those who can; None when all have ended."""
        while not self._ready:
            if self._sleepers:
                at_us, _, task, wakes = heapq.heappop(self._sleepers)
                if task.wakes == wakes and task in self._waiting:
                    self.now_us = max(self.now_us, at_us)
                    self._rouse(task)
            elif self._waiting:
                stuck = ", ".join(f"{t.name} waits for {t.waits_for}" for t in self._waiting)
                self._end(AssertionError(f"nobody can go on: {stuck}"))
            else:
                return None
        at = self.draws.randrange(len(self._ready))
        self._ready[at], self._ready[-1] = self._ready[-1], self._ready[at]
        return self._ready.pop()

    def _switch(self, reason: str) -> None:
        task = self.current
        task.waits_for = reason
        following = self._next()
        if following is not task:
            self._give(following)
            assert task.worker is not None
            task.worker.baton.acquire()
        self.check_alive()

    def _give(self, task: Task | None) -> None:
        self._current = task
        if task is None:
            self._finished.release()
            return
        if task.worker is None:
            task.worker = self._idle.pop() if self._idle else _Worker(self)
            task.worker.task = task
        task.worker.baton.release()

    def _end(self, failure: BaseException | None) -> None:
        self._failure = self._failure or failure
        self._ending = True
        for task in list(self._waiting):
            self._rouse(task)

    def _carry_out(self, worker: _Worker, task: Task) -> None:
        try:
            if task.process.alive and not self._ending:
                self.on_task()
                task.body()
        except Killed:
            pass
        except BaseException as e:
            self._end(e)
        sys.settrace(None)
        task.done = True
        self._idle.append(worker)
        self._give(self._next())


class _Worker:
    """A thread that carries out one task after the other."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.baton = threading.Semaphore(0)
        self.task: Task | None = None
        threading.Thread(target=self._run, name="simulation", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            task, self.task = self.task, None
            if task is None:
                return
            self._scheduler._carry_out(self, task)

    def dismiss(self) -> None:
        self.baton.release()
