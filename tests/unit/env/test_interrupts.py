"""Work that no interrupt cuts in two, and waiting that leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.interrupting import interrupted
from tests.waiting import WAIT_SECONDS

from lakehead.env.interrupts import Changes, Latch, _Workers, shielded, stoppable, uninterrupted

pytestmark = pytest.mark.timeout(method="thread")
"""A time limit by SIGALRM would itself be a signal whose handler raises."""


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """As in a terminal: a shell's background job begins with interrupts ignored, and Spark's driver takes them."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual or signal.SIG_DFL)


def here() -> threading.Thread:
    return threading.current_thread()


def test_the_main_threads_work_is_done_elsewhere_and_that_of_others_where_they_are() -> None:
    assert here() is threading.main_thread()
    assert shielded(here) is not here()
    with ThreadPoolExecutor(1) as pool:
        there, done_in = pool.submit(lambda: (here(), shielded(here))).result(WAIT_SECONDS)
        assert there is done_in


def test_errors_come_back_as_they_are() -> None:
    def fail() -> None:
        raise ValueError("mine")

    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            shielded(fail)


def test_work_goes_on_when_the_wait_for_it_is_interrupted_and_is_undone() -> None:
    began, go_on, undone = Latch(), threading.Event(), threading.Event()
    done: list[object] = []

    def work() -> str:
        began.open()
        assert go_on.wait(WAIT_SECONDS)
        done.append("work")
        return "result"

    def undo(result: str) -> None:
        done.append(result)
        undone.set()

    interrupted(lambda: shielded(work, undo=undo), began)
    assert not done
    assert shielded(lambda: 7) == 7, "others do not wait for it"
    go_on.set()
    assert undone.wait(WAIT_SECONDS) and done == ["work", "result"]


def test_an_interrupt_waits_for_what_ends_soon() -> None:
    done: list[object] = []

    def work(times: int = 3) -> str:
        signal.raise_signal(signal.SIGINT)
        done.append(here())
        if times:
            uninterrupted(lambda: work(times - 1))
        return "result"

    usual = signal.getsignal(signal.SIGINT)
    assert uninterrupted(lambda: (done.append(here()), 5)[1]) == 5
    for call in (lambda: uninterrupted(work), lambda: uninterrupted(lambda: [work(), 1 // 0])):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert done == [here()] * 4, "all was done, in the main thread"
        assert signal.getsignal(signal.SIGINT) is usual
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0)


def test_where_no_interrupt_lands_or_other_signals_do() -> None:
    with ThreadPoolExecutor(1) as pool:
        there, done_in = pool.submit(lambda: (here(), uninterrupted(here))).result(WAIT_SECONDS)
        assert there is done_in
    usual = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        assert uninterrupted(here) is not here()
    finally:
        signal.signal(signal.SIGALRM, usual)
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert uninterrupted(lambda: signal.raise_signal(signal.SIGINT) or 5) == 5
    finally:
        signal.signal(signal.SIGINT, usual)


def test_many_that_were_left_do_not_keep_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    serving: list[None] = []  # an entry for each thread that does the main thread's work, or waits for some
    serve = _Workers._serve

    def counted(self: _Workers) -> None:
        serving.append(None)
        try:
            serve(self)
        finally:
            serving.pop()

    monkeypatch.setattr(_Workers, "_serve", counted)
    for _ in range(10):
        began = Latch()

        def work(began: Latch = began) -> None:
            began.open()
            assert go_on.wait(WAIT_SECONDS)

        interrupted(lambda work=work: shielded(work), began)  # type: ignore[misc]
    go_on.set()
    deadline = time.monotonic() + WAIT_SECONDS
    while len(serving) > 4:
        assert time.monotonic() < deadline, len(serving)
        shielded(here)


def test_a_wait_ends_with_a_change_of_another_thread() -> None:
    changes, state = Changes(), [0]

    def count() -> None:
        for _ in range(1000):
            state[0] += 1
            changes.notify_all()

    thread = threading.Thread(target=count)
    thread.start()
    for n in range(1, 1001, 7):
        changes.wait_for(lambda n=n: state[0] >= n)  # type: ignore[misc]
    thread.join()


def test_a_wait_that_is_interrupted_leaves_the_others_alone() -> None:
    changes, state = Changes(), [0]
    began = Latch()

    def reached() -> bool:
        began.open()
        return state[0] > 0

    interrupted(lambda: changes.wait_for(reached), began)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(changes.wait_for, lambda: state[0] > 0) for _ in range(2)]
        state[0] = 1
        pool.submit(changes.notify_all)
        for w in waiting:
            w.result(WAIT_SECONDS)


def test_without_a_change_it_is_looked_again_and_nothing_piles_up() -> None:
    changes, asked = Changes(), [0]

    def reached() -> bool:
        asked[0] += 1
        return asked[0] > 20

    changes.wait_for(reached, 0.0001)
    assert asked[0] > 20 and not changes._waiting


FORKS = """
import os
from lakehead.env.interrupts import shielded

assert shielded(lambda: 5) == 5
child = os.fork()
if child == 0:
    os._exit(shielded(lambda: 7))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_gets_threads_of_its_own() -> None:
    """In a process of its own: what other threads of a process hold when it forks stays held in the child."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS]
    assert subprocess.run(command, timeout=WAIT_SECONDS, check=False).returncode == 7


def test_what_may_take_long_is_stopped_however_often_it_must_be_told() -> None:
    begun, told, ended = Latch(), list[int](), list[int]()
    enough = Latch()

    def work() -> None:
        begun.open()
        assert enough.wait(WAIT_SECONDS)
        ended.append(1)

    def stop() -> None:
        told.append(1)
        if len(told) == 3:  # the first ones came before it could hear
            enough.open()

    interrupted(lambda: stoppable(work, stop), begun)
    assert ended == [1] and len(told) == 3


def test_what_does_not_stop_is_left_by_a_second_interrupt() -> None:
    begun, told, end, gone = Latch(), Latch(), Latch(), Latch()

    def work() -> None:
        begun.open()
        assert end.wait(WAIT_SECONDS)
        gone.open()

    def stop() -> None:
        told.open()
        signal.raise_signal(signal.SIGINT)

    interrupted(lambda: stoppable(work, stop), begun)
    assert told.wait(0)
    end.open()
    assert gone.wait(WAIT_SECONDS)


def test_what_need_not_be_waited_for_is_left_at_once() -> None:
    begun, told, end, gone = Latch(), list[int](), Latch(), Latch()

    def work() -> None:
        begun.open()
        assert end.wait(WAIT_SECONDS)
        gone.open()

    def stop() -> bool:
        told.append(1)
        return False

    interrupted(lambda: stoppable(work, stop), begun)
    assert told == [1] and not gone.wait(0)
    end.open()
    assert gone.wait(WAIT_SECONDS)


def test_what_never_began_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Callable[[], None]] = []

    def give(self: _Workers, work: Callable[[], None], done: Latch | None) -> None:
        given.append(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Workers, "give", give)
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        stoppable(lambda: calls.append("work"), lambda: calls.append("stop"))
    given[0]()
    assert not calls


def test_what_may_take_long_answers_and_fails_as_it_does() -> None:
    assert stoppable(here, lambda: None) is not here()
    with pytest.raises(ZeroDivisionError):
        stoppable(lambda: 1 / 0, lambda: None)
    with ThreadPoolExecutor(1) as pool:
        there, done_in = pool.submit(lambda: (here(), stoppable(here, lambda: None))).result(WAIT_SECONDS)
        assert there is done_in
