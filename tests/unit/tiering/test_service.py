"""The shell of the tiering service, over tables that are only played, on a clock that moves when it waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from lakehead.env import Env
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    CommitConflictError,
    FencedError,
    LakeheadError,
    MissingDependencyError,
    NoLakeError,
    RequestTimeoutError,
    StorageError,
    TableNotFoundError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.tiering.commit import CommitResult
from lakehead.tiering.queue import LOOK_SECONDS, FoundTable, Looked
from lakehead.tiering.service import CONFLICTS_MIN, RoundReport, TieringService
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


class MovingClock:
    """A clock that is moved by hand; also the threads of an `Env` whose conditions move it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits = 0

    def monotonic(self) -> float:
        return self.now

    def condition(self) -> MovingClock:
        return self

    def notify_all(self) -> None:
        pass

    def wait_for(self, reached: Callable[[], bool], check_seconds: float) -> None:
        self.waits += 1
        assert self.waits < 10_000, "nothing happens any more"
        if not reached():
            self.now += check_seconds


class PlayedTables:
    """Tables in memory: how far log and lake of each are, and what goes wrong with them."""

    def __init__(self, clock: MovingClock, *names: str) -> None:
        self.clock = clock
        self.ids = {name: f"{name}#0" for name in names}
        self.logs = {i: 1 for i in self.ids.values()}
        self.lakes = {i: 0 for i in self.ids.values()}
        self.wrong: dict[str, Exception] = {}
        self.look_fails: list[LakeheadError] = []
        self.rounds: list[str] = []
        self.maintained: list[str] = []
        self.closed = False

    def open(self) -> None:
        assert not self.closed

    def look(self, has: frozenset[str], without: frozenset[str]) -> Looked:
        if self.look_fails:
            raise self.look_fails.pop(0)
        return Looked(tuple(FoundTable(i, n, 1.0, True, self.logs[i]) for n, i in self.ids.items() if i not in without))

    def run_round(self, table_id: str, records_max: int) -> CommitResult:
        self.clock.now += 0.1
        self.rounds.append(table_id)
        if table_id in self.wrong:
            raise self.wrong[table_id]
        rows = self.logs[table_id] - self.lakes[table_id]
        self.lakes[table_id] += rows
        end = self.lakes[table_id]
        return CommitResult(len(self.rounds) if rows else None, rows, 0, 1, {TABLET: end}, end=end)

    def maintain(self, table_id: str) -> bool:
        self.maintained.append(table_id)
        return len(self.maintained) == 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock() -> MovingClock:
    return MovingClock()


def service(tables: PlayedTables, on_round: Callable[[RoundReport], None] | None = None) -> TieringService:
    env = replace(Env.system(), clock=tables.clock, threads=tables.clock)  # type: ignore[arg-type]
    return TieringService(tables, env, on_round=on_round)


def test_rounds_are_run_and_reported(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a", "b")
    reports: list[RoundReport] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        if report.snapshot_id == 1:
            tables.logs["b#0"] += 4

    service(tables, on_round).run(10)
    assert [(r.table, r.rows, r.snapshot_id) for r in reports] == [("a", 1, 1), ("b", 5, 2)]
    assert reports[0].seconds == pytest.approx(0.1)
    assert tables.rounds == ["a#0", "b#0"], "no round without news"
    assert clock.now == pytest.approx(1010) and tables.closed


def test_a_round_under_way_is_finished_and_is_the_last(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a", "b", "c")
    made = service(tables, lambda _: made.stop())
    made.run()
    assert tables.rounds == ["a#0"] and tables.lakes["a#0"] == 1


def test_trouble_of_one_table_stays_with_it(clock: MovingClock, caplog: pytest.LogCaptureFixture) -> None:
    tables = PlayedTables(clock, "a", "b")
    tables.wrong["a#0"] = ZeroDivisionError("any")
    with caplog.at_level(logging.WARNING, "lakehead.tiering"):
        service(tables).run(20)
    assert tables.rounds.count("a#0") == 6, "at once, and after 0.5, 1, 2, 4 and 8 seconds"
    assert tables.lakes["b#0"] == 1
    assert "a: round failed, again in 4.0 s: ZeroDivisionError: any" in caplog.text


def test_a_round_that_others_are_quicker_than_is_tried_soon_and_no_warning_unless_it_goes_on(
    clock: MovingClock, caplog: pytest.LogCaptureFixture
) -> None:
    tables = PlayedTables(clock, "a")
    tables.wrong["a#0"] = CommitConflictError("first")
    with caplog.at_level(logging.INFO, "lakehead.tiering"):
        service(tables).run(6)
    told = [r.levelname for r in caplog.records if "again in 0.5 s: first" in r.getMessage()]
    assert len(told) == tables.rounds.count("a#0") >= 10, "each half a second"
    assert told == ["INFO"] * CONFLICTS_MIN + ["WARNING"] * (len(told) - CONFLICTS_MIN)


def test_what_is_not_installed_ends_it_whichever_table_finds_out(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a", "b")
    tables.wrong["a#0"] = MissingDependencyError("no module")
    with pytest.raises(MissingDependencyError):
        service(tables).run(20)
    assert tables.rounds.count("a#0") == 1 and tables.closed


def test_who_is_told_of_rounds_may_fail(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a", "b")

    def on_round(report: RoundReport) -> None:
        if report.table == "a":
            raise ValueError("not again")

    service(tables, on_round).run(10)
    assert tables.lakes == {"a#0": 1, "b#0": 1}


def test_a_table_that_a_newer_service_took_is_left_until_it_is_another_one(
    clock: MovingClock, caplog: pytest.LogCaptureFixture
) -> None:
    tables = PlayedTables(clock, "a")
    tables.wrong["a#0"] = TieringFencedError("newer")
    made = service(tables)
    with caplog.at_level(logging.ERROR, "lakehead.tiering"):
        made.run(lambda: clock.now > 1010)
    assert tables.rounds == ["a#0"] and "a: left to another tiering service" in caplog.text
    assert made.queue.fenced == {"a#0"}
    tables = PlayedTables(clock, "a")
    tables.wrong["a#0"] = TieringFencedError("newer")

    def until() -> bool:
        if tables.rounds == ["a#0"]:
            tables.ids["a"], tables.logs["a#1"], tables.lakes["a#1"] = "a#1", 7, 0
        return tables.lakes.get("a#1") == 7

    service(tables).run(until)
    assert tables.rounds == ["a#0", "a#1"]


def test_a_server_that_was_fenced_has_a_successor(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a")
    tables.wrong["a#0"] = FencedError("another process serves the folder")

    def until() -> bool:
        if len(tables.rounds) == 3:
            tables.wrong.clear()
        return tables.lakes["a#0"] == 1

    service(tables).run(until)
    assert len(tables.rounds) == 4


def test_a_table_that_is_gone_is_let_go(clock: MovingClock, caplog: pytest.LogCaptureFixture) -> None:
    tables = PlayedTables(clock, "a", "b")
    tables.wrong["a#0"] = TableNotFoundError("dropped")
    with caplog.at_level(logging.INFO, "lakehead.tiering"):
        service(tables).run(0.5)
    assert tables.rounds == ["a#0", "b#0"] and "failed" not in caplog.text


def test_a_server_that_is_not_there_yet_is_waited_for(clock: MovingClock, caplog: pytest.LogCaptureFixture) -> None:
    tables = PlayedTables(clock, "a")
    tables.look_fails = [
        UnavailableError("away"), RequestTimeoutError("silent"), StorageError("disk"), AuthenticationError("who")
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING, "lakehead.tiering"):
        service(tables).run(lambda: tables.lakes["a#0"] == 1)
    assert clock.now == pytest.approx(1000 + 4 * LOOK_SECONDS + 0.1)
    assert [r.message for r in caplog.records] == [
        f"tables cannot be looked for, trying every {LOOK_SECONDS:g} s: away",
        "the server answers again",
    ]


@pytest.mark.parametrize("error", [ClosedError("closed"), NoLakeError("no lake"), TableNotFoundError("unknown")])
def test_what_no_later_try_mends_ends_it(clock: MovingClock, error: LakeheadError) -> None:
    tables = PlayedTables(clock, "a")
    tables.look_fails = [error]
    with pytest.raises(type(error)):
        service(tables).run()
    assert tables.closed


def test_who_is_asked_whether_to_stop_may_fail(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a")
    answers = iter([UnavailableError("away"), AuthenticationError("who"), None])

    def until() -> bool:
        answer = next(answers)
        if answer is not None:
            raise answer
        return True

    service(tables).run(until)
    assert not list(answers)


def test_it_may_run_again(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a")
    made = service(tables)
    made.run(1)
    tables.logs["a#0"] += 1
    tables.closed = False
    made.run(1)
    assert tables.lakes["a#0"] == 2


def test_maintenance_follows_many_rounds(clock: MovingClock) -> None:
    tables = PlayedTables(clock, "a")

    def on_round(report: RoundReport) -> None:
        tables.logs["a#0"] += 1

    service(tables, on_round).run(until=lambda: len(tables.maintained) == 2)
    assert tables.maintained == ["a#0", "a#0"], "there was more to do"
    assert len(tables.rounds) == 20
