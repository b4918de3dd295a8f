"""Preemption at lines: where code under test has no lock and no wait, tasks are switched all the same."""

from __future__ import annotations

from functools import partial

from tests.simulation.lines import Lines
from tests.simulation.scheduler import Process, Scheduler
from tests.standby import Standby

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


class Noting:
    """Stands for a tablet: applying anything goes through lines of the log."""

    def apply(self, frames: object) -> None:
        WriterTable().note(WriterStamp(b"a" * 16, 1, 0), 1, 2)


def test_what_a_standby_does_is_not_interrupted() -> None:
    """Its locks are real: nobody would let go of one for a task that is killed there."""
    for through_standby in (False, True):
        scheduler = Scheduler(1)
        lines = Lines(scheduler, 1, 1)
        scheduler.on_task = lines.watch

        def work(through_standby: bool = through_standby) -> None:
            for _ in range(10):
                Standby.hand_on(None, Noting(), []) if through_standby else Noting().apply([])  # type: ignore[arg-type]

        scheduler.run(work)
        assert (lines.pauses == 0) is through_standby
