"""Threads that do what they are given, as few as suffice."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.env.threads import WorkerPool


def test_results_come_in_the_order_of_what_was_given() -> None:
    first = threading.Event()

    def work(n: int) -> int:
        if n == 0:
            assert first.wait(WAIT_SECONDS)
        if n == 1:
            first.set()
        return n * n

    with WorkerPool(2) as pool:
        assert list(pool.map(work, range(20))) == [n * n for n in range(20)]
        assert pool.submit(pow, 2, 5).result() == 32
        assert len(pool._threads) == 2


def test_a_thread_that_is_idle_is_taken_before_another_is_begun() -> None:
    with WorkerPool(8) as pool:
        for n in range(50):
            assert pool.submit(lambda n=n: n).result() == n
            while not pool._idle:  # it says so after the result is there
                pass
        assert len(pool._threads) == 1


def test_after_one_that_failed_those_that_were_not_begun_are_not() -> None:
    done: list[int] = []

    def work(n: int) -> int:
        if n == 2:
            raise KeyError(n)
        done.append(n)
        return n

    with WorkerPool(1) as pool:
        held = threading.Event()
        blocked = pool.submit(held.wait, WAIT_SECONDS)
        results = pool.map(work, range(100))
        last = pool.submit(len, done)
        held.set()
        assert blocked.result() and next(results) == 0
        with pytest.raises(KeyError):
            list(results)
    assert last.result() <= 100 and done[:2] == [0, 1] and 2 not in done


def test_who_asks_no_further_has_the_rest_left_undone() -> None:
    held, done = threading.Event(), []

    def work(n: int) -> int:
        if n:
            assert held.wait(WAIT_SECONDS)
        done.append(n)
        return n

    with WorkerPool(1) as pool:
        results = pool.map(work, range(100))
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        held.set()
    assert len(done) <= 2


def test_an_ended_pool_takes_nothing_and_has_done_all() -> None:
    pool = WorkerPool(3)
    futures = [pool.submit(abs, -n) for n in range(50)]
    pool.shutdown()
    pool.shutdown()
    assert [f.result() for f in futures] == list(range(50))
    assert not any(t.is_alive() for t in pool._threads)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(abs, 1)


def test_what_was_withdrawn_is_not_done() -> None:
    held = threading.Event()
    with WorkerPool(1) as pool:
        pool.submit(held.wait, WAIT_SECONDS)
        future = pool.submit(abs, -1)
        assert future.cancel()
        held.set()
        with pytest.raises(CancelledError):
            future.result()
        assert pool.submit(abs, -1).result() == 1


def test_without_another_thread_to_have_those_that_are_there_do_all(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if not allowed:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    allowed = False
    with WorkerPool(4) as pool:
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(abs, -1)
        allowed, held = True, threading.Event()
        pool.submit(held.wait, WAIT_SECONDS)
        allowed = False
        later = [pool.submit(abs, -n) for n in range(5)]
        held.set()
        assert [f.result() for f in later] == list(range(5))


def test_what_was_not_begun_can_be_cancelled_at_the_end() -> None:
    held = threading.Event()
    pool = WorkerPool(1)
    begun = pool.submit(held.wait, WAIT_SECONDS)
    later = [pool.submit(abs, -n) for n in range(5)]
    while not begun.running():
        pass
    pool.shutdown(wait=False, cancel_futures=True)
    held.set()
    pool.shutdown()
    assert begun.result() and all(f.cancelled() for f in later)


def test_an_error_keeps_nothing_of_the_call_alive() -> None:
    class Given:
        pass

    def fail(given: Given) -> None:
        raise KeyError

    given = Given()
    gone = weakref.ref(given)
    gc.disable()
    try:
        with WorkerPool(1) as pool, pytest.raises(KeyError):
            pool.submit(fail, given).result()
        del given
        assert gone() is None
    finally:
        gc.enable()
