"""Preemption at lines: where code under test has no lock and no wait, tasks are switched all the same."""

from __future__ import annotations

from functools import partial

from tests.simulation.lines import Lines
from tests.simulation.scheduler import Process, Scheduler

from lakehead.format.frame import WriterStamp
from lakehead.log.writers import WriterTable


def order_of(seed: int, *, every: int | None) -> str:
    """Who comes when, where two tasks call plain code and pause nowhere."""
    scheduler = Scheduler(seed)
    if every is not None:
        scheduler.on_task = Lines(scheduler, seed, every).watch
    out: list[str] = []

    def work(name: str) -> None:
        table = WriterTable()
        for n in range(20):
            table.note(WriterStamp(name.encode() * 16, n, n - 1), n, n + 1)
            out.append(name)

    def main() -> None:
        tasks = [scheduler.spawn(n, Process(n), partial(work, n)) for n in "ab"]
        while not all(t.done for t in tasks):
            scheduler.sleep(0.1)

    scheduler.run(main)
    return "".join(out)


def test_tasks_are_switched_between_lines_of_the_code_under_test() -> None:
    assert order_of(1, every=None) in ("a" * 20 + "b" * 20, "b" * 20 + "a" * 20)
    assert order_of(1, every=5) == order_of(1, every=5)
    mixed = {order_of(seed, every=5) for seed in range(5)}
    assert len(mixed) == 5 and all("aba" in order or "bab" in order for order in mixed)
