"""The simulated scheduler and threads: one task at a time, in an order that the seed decides."""

from __future__ import annotations

from functools import partial

import pytest
from tests.simulation.scheduler import Killed, Process, Scheduler
from tests.simulation.threads import TaskLock, TaskThreads


def order_of(seed: int) -> list[str]:
    """Who comes when, where three tasks pause at every step."""
    scheduler = Scheduler(seed)
    scheduler.pause_chance = 1.0
    out: list[str] = []

    def work(name: str) -> None:
        for step in range(4):
            scheduler.pause()
            out.append(f"{name}{step}")

    def main() -> None:
        tasks = [scheduler.spawn(n, Process(n), partial(work, n)) for n in "abc"]
        while not all(t.done for t in tasks):
            scheduler.sleep(0.1)

    scheduler.run(main)
    return out


def test_the_seed_decides_the_order() -> None:
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(8)}) > 1
    assert sorted(order_of(2)) == sorted(order_of(3))


def test_sleeping_costs_no_time_and_keeps_its_order() -> None:
    scheduler = Scheduler(0)
    woken: list[tuple[str, int]] = []

    def main() -> None:
        for name, seconds in (("late", 3600.0), ("soon", 1.0)):

            def sleep(name: str = name, seconds: float = seconds) -> None:
                scheduler.sleep(seconds)
                woken.append((name, scheduler.now_us))

            scheduler.spawn(name, Process(name), sleep)
        scheduler.sleep(7200)

    scheduler.run(main)
    assert woken == [("soon", 1_000_000), ("late", 3_600_000_000)]


def test_locks_exclude_and_a_deadlock_is_named() -> None:
    scheduler = Scheduler(0)
    threads = TaskThreads(scheduler)
    first, second = threads.lock(), threads.lock()

    def take(one: TaskLock, other: TaskLock) -> None:
        with one:
            scheduler.sleep(1)
            with other:
                pass

    def main() -> None:
        scheduler.spawn("a", Process("a"), lambda: take(first, second))
        scheduler.spawn("b", Process("b"), lambda: take(second, first))
        threads.event().wait()

    with pytest.raises(AssertionError, match=r"nobody can go on: .*a waits for a lock that b holds"):
        scheduler.run(main)


def test_a_killed_process_unwinds_and_goes_no_further() -> None:
    scheduler = Scheduler(0)
    threads = TaskThreads(scheduler)
    seen: list[str] = []
    server = Process("server")

    def serve() -> None:
        try:
            threads.event().wait()
        except Killed:
            seen.append("killed")
            try:
                scheduler.sleep(1)
            finally:
                seen.append("no more waiting")

    def main() -> None:
        task = scheduler.spawn("serve", server, serve)
        scheduler.sleep(1)
        scheduler.kill(server)
        scheduler.sleep(1)
        assert task.done

    scheduler.run(main)
    assert seen == ["killed", "no more waiting"]


def test_what_a_task_raises_ends_the_run() -> None:
    scheduler = Scheduler(0)

    def fail() -> None:
        raise ValueError("of a task")

    def main() -> None:
        scheduler.spawn("fail", Process("fail"), fail)
        scheduler.sleep(1)
        raise AssertionError("not reached")

    with pytest.raises(ValueError, match="of a task"):
        scheduler.run(main)
