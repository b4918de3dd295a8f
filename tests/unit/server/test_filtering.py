"""Filters are computed in turns: no share has others wait for all of its own, and who goes away waits no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS, wait_until

from lakehead.env import SystemThreads
from lakehead.predicate import parse_predicate
from lakehead.server import filtering
from lakehead.server.access import Share
from lakehead.server.filtering import Filtering, Turns, soon_done, until_gone

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def never() -> bool:
    return False


class Floor:
    """Threads that take turns, and go on when they are told to."""

    def __init__(self, cores: int) -> None:
        self.turns = Turns(SystemThreads(), cores)
        self.began: list[str] = []
        self.left: list[str] = []
        self.threads: list[threading.Thread] = []
        self._go_on: dict[str, threading.Event] = {}

    def come(self, name: str, gone: Callable[[], bool] = never, *, long: bool = False) -> None:
        """Ask for a turn of the share that is the name's first letter, of the process that is its second where two
        follow."""
        share = Share(name[0], name[1] if len(name) > 2 else "")
        go_on = self._go_on[name] = threading.Event()

        def work() -> None:
            try:
                with self.turns.turn(share, gone, long=long):
                    self.began.append(name)
                    assert go_on.wait(WAIT_SECONDS)
            except filtering._GoneError:
                self.left.append(name)

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    def end(self, name: str) -> None:
        self._go_on[name].set()

    def end_all(self) -> None:
        for go_on in self._go_on.values():
            go_on.set()
        for thread in self.threads:
            thread.join(WAIT_SECONDS)


@pytest.fixture
def floor() -> Iterator[Floor]:
    made = Floor(2)
    yield made
    made.end_all()


def waiting(floor: Floor) -> int:
    return sum(len(waiting) for processes in floor.turns._waiting.values() for waiting in processes.values())


def test_who_comes_later_waits_for_one_turn_of_each(floor: Floor) -> None:
    for i in range(8):
        floor.come(f"a{i}")
        wait_until(lambda: len(floor.began) + waiting(floor) == i + 1)  # noqa: B023
    floor.come("b")
    floor.come("c")
    wait_until(lambda: waiting(floor) == 8)
    assert floor.began == ["a0", "a1"]
    for n, name in enumerate(["a0", "a1", "a2"], 3):
        floor.end(name)
        wait_until(lambda: len(floor.began) == n)  # noqa: B023
    assert floor.began[2] == "a2" and set(floor.began[3:]) == {"b", "c"}
    floor.end_all()
    assert sorted(floor.began) == [*(f"a{i}" for i in range(8)), "b", "c"] and not floor.turns._waiting


def test_made_up_processes_have_no_more_turns_together(floor: Floor) -> None:
    for i, name in enumerate(["a00", "a01", "a10", "a11", "a20", "a30", "a40", "b", "c"]):
        floor.come(name)
        wait_until(lambda: len(floor.began) + waiting(floor) == i + 1)  # noqa: B023
    for n, name in enumerate(["a00", "a01", "a10", "b", "c"], 3):
        floor.end(name)
        wait_until(lambda: len(floor.began) == n)  # noqa: B023
    assert floor.began == ["a00", "a01", "a10", "b", "c", "a20", "a30"]


def test_long_turns_leave_a_core_to_others(floor: Floor) -> None:
    floor.come("a0", long=True)
    wait_until(lambda: floor.began == ["a0"])
    floor.come("a1", long=True)
    wait_until(lambda: waiting(floor) == 1)
    floor.come("b")
    wait_until(lambda: floor.began == ["a0", "b"])
    floor.end("a0")
    wait_until(lambda: floor.began == ["a0", "b", "a1"])


def test_who_goes_away_waits_no_longer(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "_LOOK_SECONDS", 0.01)
    gone = threading.Event()
    for name in ("a0", "a1"):
        floor.come(name)
    wait_until(lambda: len(floor.began) == 2)
    floor.come("a2", gone.is_set)
    floor.come("b")
    wait_until(lambda: waiting(floor) == 2)
    gone.set()
    wait_until(lambda: floor.left == ["a2"])
    floor.end("a0")
    wait_until(lambda: floor.began[2:] == ["b"])
    floor.end_all()
    with floor.turns.turn(Share("x", ""), never), floor.turns.turn(Share("y", ""), never):  # all were given back
        assert not floor.turns._waiting


def test_a_filter_stops_between_slices() -> None:
    batch = pa.record_batch([list(range(2000)), ["ab" * 100] * 2000], schema=SCHEMA)
    costly = parse_predicate(" or ".join(f"s like '%{i}{'_' * 10}z%'" for i in range(30)), SCHEMA)
    slices = len(list(costly.work.slices(batch)))
    asked: list[int] = []

    def gone() -> bool:
        asked.append(1)
        return len(asked) > 3

    assert slices > 10
    by = Filtering(Turns(SystemThreads(), 1), Share("a", ""), gone)
    assert list(until_gone(by.filter(costly, b) for b in [batch.slice(0, 0), batch])) == [batch.slice(0, 0)]
    assert len(asked) == 4
    kept = Filtering(Turns(SystemThreads(), 1), Share("a", ""), never).filter(costly, batch)
    assert kept.num_rows == 0 and kept.schema == SCHEMA


def test_only_what_is_soon_done_is_computed_while_others_wait_for_it() -> None:
    quick = ("n = 3", "n > 5 and s = 'a'", "s like '%ab%'", "n in (1, 2, 3)")
    slow = (" or ".join(f"s like '%{i}%'" for i in range(20)), f"s like '%a{'_' * 30}%'", "n = 3 or " * 500 + "n = 4")
    assert all(soon_done(parse_predicate(w, SCHEMA)) for w in quick) and soon_done(None)
    assert not any(soon_done(parse_predicate(w, SCHEMA)) for w in slow)
