"""Which job has which table: in any history each table has one job at most, and none for long."""

from __future__ import annotations

import os
import random

import pytest

from lakehead.env.threads import SystemThreads
from lakehead.server.tiering_jobs import SILENT_SECONDS, TieringJobs

SEEDS = int(os.environ.get("LAKEHEAD_MODEL_EXAMPLES", "30"))


class StillClock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> int:
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Played:
    """A job that works on what it is told of, for a while."""

    def __init__(self, name: str, wants: set[str]) -> None:
        self.name = name
        self.wants = wants
        self.number = 0
        self.told: frozenset[str] = frozenset()
        self.at_work: set[str] = set()

    def ask(self, jobs: TieringJobs) -> None:
        self.number += 1
        has = self.told | self.at_work
        self.told = jobs.ask(self.name, self.name, number=self.number, wants=self.wants, has=has)
        assert self.told <= self.wants


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def jobs(clock: StillClock) -> TieringJobs:
    return TieringJobs(clock, SystemThreads())


def test_the_first_has_all_and_then_they_share(jobs: TieringJobs) -> None:
    tables = {f"t{n}" for n in range(6)}
    a, b, c = Played("a", tables), Played("b", tables), Played("c", {"t0"})
    a.ask(jobs)
    assert a.told == tables
    a.at_work = {"t0", "t1", "t2"}
    b.ask(jobs)
    assert not b.told, "a was told that it has all"
    a.ask(jobs)
    b.ask(jobs)
    assert len(a.told) == 3 and b.told == tables - a.told - a.at_work
    a.at_work = set()
    a.ask(jobs)
    b.ask(jobs)
    assert b.told == tables - a.told and len(b.told) == 3
    for _ in range(2):
        c.ask(jobs)
        a.ask(jobs)
        b.ask(jobs)
    c.ask(jobs)
    assert c.told == {"t0"} and len(a.told | b.told) == 5


def test_silent_jobs_and_those_that_leave_have_nothing(jobs: TieringJobs, clock: StillClock) -> None:
    a, b = Played("a", {"t"}), Played("b", {"t"})
    a.ask(jobs)
    clock.now += SILENT_SECONDS
    b.ask(jobs)
    assert not b.told
    clock.now += 0.1
    b.ask(jobs)
    assert b.told == {"t"}
    a.ask(jobs)
    assert not a.told, "it slept"
    jobs.leave("b")
    jobs.leave("b")
    a.ask(jobs)
    assert a.told == {"t"}
    assert [(job.name, tables) for job, tables, _ in jobs.listed()] == [("a", 1)]


def test_a_question_that_arrives_late_changes_nothing_and_one_that_is_repeated_is_answered(jobs: TieringJobs) -> None:
    assert jobs.ask("a", "a", number=1, wants={"t", "u"}, has=()) == {"t", "u"}
    assert jobs.ask("a", "a", number=1, wants={"t", "u"}, has=()) == {"t", "u"}
    assert jobs.ask("a", "a", number=2, wants={"t"}, has=("t",)) == {"t"}
    assert not jobs.ask("a", "a", number=1, wants={"t", "u"}, has=())
    assert jobs.ask("b", "b", number=1, wants={"t", "u"}, has=()) == {"u"}


def test_after_a_restart_each_keeps_what_it_has(clock: StillClock) -> None:
    tables = {f"t{n}" for n in range(6)}
    a, b = Played("a", tables), Played("b", tables)
    a.told, b.told = frozenset(["t0", "t1", "t2"]), frozenset(["t3", "t4"])
    jobs = TieringJobs(clock, SystemThreads())
    for job, had in ((a, a.told), (b, b.told)):
        job.ask(jobs)
        assert job.told == had
    clock.now += SILENT_SECONDS
    a.ask(jobs)
    b.ask(jobs)
    assert b.told == {"t3", "t4", "t5"}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_table_has_two_jobs_and_each_gets_one(seed: int) -> None:
    draws, clock = random.Random(seed), StillClock()
    jobs = TieringJobs(clock, SystemThreads())
    tables = [f"t{n}" for n in range(10)]
    played: dict[str, Played] = {}

    def step(name: str) -> None:
        job = played[name]
        job.ask(jobs)
        job.at_work = {t for t in job.told | job.at_work if draws.random() < 0.3}
        seen = [t for j in played.values() for t in j.told | j.at_work]
        assert len(seen) == len(set(seen))

    for n in range(200):
        clock.now += draws.random()
        what = draws.random()
        if what < 0.05 or not played:
            played[f"j{n}"] = Played(f"j{n}", set(draws.sample(tables, draws.randint(1, 10))))
        elif what < 0.1:
            name = draws.choice(sorted(played))
            if draws.random() < 0.5:
                jobs.leave(name)
            del played[name]  # dead, and so at work on nothing
        for name in sorted(played):
            if draws.random() < 0.8:
                step(name)
        slept = [j.name for j in played.values() if not any(job.name == j.name for job, _, _ in jobs.listed())]
        for name in slept:
            played[name].told, played[name].at_work = frozenset(), set()
    for _ in range(4):
        clock.now += SILENT_SECONDS - 1
        for job in played.values():
            job.at_work = set()
            job.ask(jobs)
    wanted = set().union(*(j.wants for j in played.values()))
    assert set().union(*(j.told for j in played.values())) == wanted
