"""What a tiering service does next, told event by event."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lakehead.tiering.queue import (
    IDLE_SHARE,
    LOOKUPS_MAX,
    MAINTENANCE_ROUNDS,
    MAINTENANCE_SECONDS,
    RELIST_SECONDS,
    RETRY_SECONDS,
    ROUND_RECORDS,
    ROUND_SHARE,
    AskWatermarks,
    End,
    Failed,
    Fenced,
    Gone,
    Instruction,
    Listed,
    ListedTable,
    ListTables,
    MaintenanceEnded,
    RoundEnded,
    RunMaintenance,
    RunRound,
    ServerAway,
    Stopped,
    TieringQueue,
    Wait,
    Watermarks,
    Woken,
    budget,
)
from lakehead.types import TabletKey

NOW = 1000.0
FRESHNESS = 30.0
TABLET = TabletKey("", 0)


def table(
    table_id: str,
    name: str | None = None,
    freshness: float = FRESHNESS,
    *,
    lake: bool = True,
    maintained: bool = True,
) -> ListedTable:
    return ListedTable(table_id, name or table_id, freshness, lake, maintained)


def listed(*tables: ListedTable, unseen: Iterable[str] = ()) -> Listed:
    return Listed(frozenset([*(t.name for t in tables), *unseen]), tables)


def started(
    *tables: ListedTable, turns_at_once: int = 1, relist_seconds: float = RELIST_SECONDS
) -> tuple[TieringQueue, list[Instruction]]:
    """A queue that was told of these tables at `NOW`, and what it asked for then."""
    queue = TieringQueue(turns_at_once=turns_at_once, relist_seconds=relist_seconds)
    assert queue.handle(Woken(), NOW) == [ListTables(frozenset()), Wait(math.inf)]
    return queue, queue.handle(listed(*tables), NOW)


def woken(queue: TieringQueue, now: float, *tables: ListedTable) -> list[Instruction]:
    """The turns that begin at a time, when whatever listing is due then finds these tables."""
    out = queue.handle(Woken(), now)
    if any(isinstance(i, ListTables) for i in out):
        out += queue.handle(listed(*tables), now)
    return [i for i in out if isinstance(i, AskWatermarks | RunRound | RunMaintenance)]


def ended(table_id: str, end: int = 0, *, moved: bool = True) -> RoundEnded:
    return RoundEnded(table_id, {TABLET: end}, moved)


def round_of(table_id: str, records_max: int = ROUND_RECORDS[1]) -> RunRound:
    return RunRound(table_id, records_max)


def test_next_round_ends_before_rows_are_too_old() -> None:
    for freshness in (1.0, 5.0, 30.0):
        for took in (0.05, 0.2, 0.4):
            assert budget(freshness, took) + took <= freshness


def test_slow_rounds_leave_a_pause() -> None:
    assert budget(5.0, 60.0) == IDLE_SHARE * 5.0


def test_a_table_gets_a_round_at_once_and_then_when_it_has_news() -> None:
    queue, first = started(table("a"))
    assert first == [round_of("a"), Wait(NOW + RELIST_SECONDS)]
    queue.handle(ended("a", 10), NOW + 2)
    due = NOW + budget(FRESHNESS, 2.0)
    assert queue.tables["a"].due == due
    queue.handle(listed(table("a")), due - 1)
    assert queue.handle(Woken(), due)[0] == AskWatermarks("a")
    assert round_of("a") not in queue.handle(Watermarks("a", {TABLET: 10}), due)
    again = queue.tables["a"].due
    assert again == due + budget(FRESHNESS, 2.0)
    queue.handle(Woken(), again)
    assert queue.handle(Watermarks("a", {TABLET: 11}), again + 1)[0] == round_of("a")
    queue.handle(ended("a", 11), again + 5)
    assert queue.tables["a"].expected == 5, "counted from the question"


def test_faster_rounds_are_believed_by_and_by() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a"), NOW + 8)
    assert queue.tables["a"].expected == 8
    queue.handle(Woken(), NOW + 100)
    queue.handle(Watermarks("a", {TABLET: 1}), NOW + 100)
    queue.handle(ended("a", 1), NOW + 102)
    assert queue.tables["a"].expected == 5


def test_a_round_that_moves_nothing_tells_nothing_of_those_that_do() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a", moved=False), NOW + 8)
    assert queue.tables["a"].expected == 0


def test_one_turn_at_a_time_and_who_is_due_longest_first() -> None:
    queue, first = started(table("a"), table("b"), table("c"))
    assert first[:-1] == [round_of("a")]
    assert queue.handle(Woken(), NOW + 1) == [Wait(NOW + RELIST_SECONDS)], "while a round runs"
    assert queue.handle(Failed("a"), NOW + 1)[0] == round_of("b")
    assert queue.handle(ended("b"), NOW + 1.9)[0] == round_of("c"), "before a, which is due since half a second"
    assert queue.handle(ended("c"), NOW + 1.95)[0] == round_of("a")


def test_several_turns_at_once_are_of_several_tables() -> None:
    queue, first = started(table("a"), table("b"), table("c"), turns_at_once=2)
    assert first == [round_of("a"), round_of("b"), Wait(NOW + RELIST_SECONDS)]
    assert queue.handle(ended("b"), NOW + 1)[0] == round_of("c")


def test_an_error_delays_its_table_alone_and_ever_longer() -> None:
    a, b = table("a", maintained=False), table("b", maintained=False)
    queue, _ = started(a, b)
    now, delays = NOW, []
    for _ in range(2000):
        follows = queue.handle(Failed("a"), now)
        delays.append(queue.tables["a"].due - now)
        while round_of("a") not in follows:
            if round_of("b") in follows or AskWatermarks("b") in follows:
                follows = queue.handle(ended("b"), now)
            else:
                now = min(queued.due for queued in queue.tables.values())
                follows = woken(queue, now, a, b)
    assert delays[:4] == [0.5, 1, 2, 4] and delays[-1] == max(delays) == RETRY_SECONDS[1]
    assert queue.tables["b"].failures == 0


def test_delays_end_when_the_server_answers() -> None:
    a, b = table("a"), table("b")
    queue, _ = started(a, b)
    queue.handle(Failed("a"), NOW)
    queue.handle(ended("b"), NOW)
    for at in (NOW + 1, NOW + 2, NOW + 4):
        assert woken(queue, at, a, b) == [round_of("a")]
        queue.handle(Failed("a"), at)
    late, due = queue.tables["a"].due, queue.tables["b"].due
    assert late == NOW + 8
    at = NOW + 4 + RELIST_SECONDS
    assert queue.handle(Woken(), at)[0] == ListTables(frozenset())
    assert queue.handle(ServerAway(), at)[-1] == Wait(late)
    assert queue.away and [queue.tables[i].due for i in "ab"] == [late, due]
    queue.handle(Woken(), late)
    queue.handle(Failed("a"), late)
    assert queue.handle(listed(a, b), late)[0] == round_of("a")
    assert not queue.away and queue.tables["a"].failures == 0 and queue.tables["b"].due == due


def test_before_its_server_is_there_it_asks_for_it() -> None:
    queue = TieringQueue()
    assert queue.handle(Woken(), NOW)[0] == ListTables(frozenset())
    assert queue.handle(ServerAway(), NOW + 1) == [Wait(NOW + 1 + RELIST_SECONDS)]
    assert queue.handle(Woken(), NOW + 1 + RELIST_SECONDS)[0] == ListTables(frozenset())
    assert queue.handle(listed(table("a")), NOW + 4)[0] == round_of("a")


def test_a_fenced_table_never_comes_back() -> None:
    queue, _ = started(table("a"))
    assert queue.handle(Fenced("a"), NOW) == [Wait(NOW + RELIST_SECONDS)]
    for tables in ([table("a")], [], [table("a")], [table("a", "renamed")]):
        queue.handle(Woken(), NOW + 100)
        assert not [i for i in queue.handle(listed(*tables), NOW + 100) if isinstance(i, RunRound)]
    assert queue.fenced == {"a"}


def test_a_fenced_table_that_is_created_again_is_another_one() -> None:
    queue, _ = started(table("old", "t"))
    queue.handle(Fenced("old"), NOW)
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    assert queue.handle(listed(table("new", "t")), NOW + RELIST_SECONDS)[0] == round_of("new")


def test_a_table_without_a_lake_that_is_created_again_with_one_is_tiered() -> None:
    queue, first = started(table("plain", "t", lake=False))
    assert first == [Wait(NOW + RELIST_SECONDS)]
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    assert queue.handle(listed(table("tiered", "t")), NOW + RELIST_SECONDS)[0] == round_of("tiered")
    queue.handle(ended("tiered"), NOW + RELIST_SECONDS)
    queue.handle(Woken(), NOW + 2 * RELIST_SECONDS)
    queue.handle(listed(table("plain again", "t", lake=False)), NOW + 2 * RELIST_SECONDS)
    assert not queue.tables


def test_a_table_that_is_created_again_does_not_wait_for_the_old_ones_deadline() -> None:
    queue, _ = started(table("old", "t", freshness=86400))
    queue.handle(ended("old"), NOW + 1)
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    assert queue.handle(listed(table("new", "t", freshness=1)), NOW + RELIST_SECONDS)[0] == round_of("new")
    assert list(queue.tables) == ["new"]


def test_a_table_that_is_gone_is_let_go_and_its_name_looked_up() -> None:
    queue, _ = started(*(table(f"i{n}", f"n{n}") for n in range(LOOKUPS_MAX + 5)))
    assert queue.handle(Gone("i0"), NOW)[0] == round_of("i1")
    assert "i0" not in queue.tables
    (listing, *_) = queue.handle(Woken(), NOW + RELIST_SECONDS)
    assert isinstance(listing, ListTables) and "n0" not in listing.settled


def test_dropped_while_its_round_runs() -> None:
    queue, _ = started(table("a"), table("b"))
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    queue.handle(listed(table("b")), NOW + RELIST_SECONDS)
    assert list(queue.tables) == ["b"]
    queue.handle(Woken(), NOW + 2 * RELIST_SECONDS)
    assert round_of("a") not in queue.handle(listed(table("a"), table("b")), NOW + 2 * RELIST_SECONDS), "under way"
    assert queue.handle(Failed("a"), NOW + 9)[0] != round_of("a")


def test_another_name_of_the_same_table_changes_nothing() -> None:
    queue, _ = started(table("a", "old"))
    queue.handle(ended("a"), NOW + 1)
    due = queue.tables["a"].due
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    queue.handle(listed(table("a", "new")), NOW + RELIST_SECONDS)
    assert (queue.tables["a"].table.name, queue.tables["a"].due) == ("new", due)


def test_a_shorter_freshness_is_kept_at_once() -> None:
    queue, _ = started(table("a", freshness=3600))
    queue.handle(ended("a"), NOW)
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    queue.handle(listed(table("a", freshness=1)), NOW + RELIST_SECONDS)
    assert queue.tables["a"].due == NOW + RELIST_SECONDS + budget(1, 0)


def test_a_name_that_cannot_be_looked_up_is_asked_for_again() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a"), NOW)
    queue.handle(Woken(), NOW + RELIST_SECONDS)
    queue.handle(listed(unseen=["a", "b"]), NOW + RELIST_SECONDS)
    assert list(queue.tables) == ["a"], "what was known stays"
    (listing, *_) = queue.handle(Woken(), NOW + 2 * RELIST_SECONDS)
    assert isinstance(listing, ListTables) and not listing.settled


def test_many_tables_are_looked_up_in_turns() -> None:
    tables = [table(f"t{n}", lake=False) for n in range(2 * LOOKUPS_MAX + 50)]
    names = frozenset(t.name for t in tables)
    queue, _ = started(*tables)
    asked: set[str] = set()
    for i in range(1, 4):
        (listing, *_) = queue.handle(Woken(), NOW + i * RELIST_SECONDS)
        assert isinstance(listing, ListTables)
        now = names - listing.settled
        assert len(now) == LOOKUPS_MAX
        asked |= now
        queue.handle(Listed(names, tuple(t for t in tables if t.name in now)), NOW + i * RELIST_SECONDS)
    assert asked == names


def test_maintenance_follows_rounds_that_moved_rows_and_delays_none() -> None:
    a = table("a", freshness=3600)
    queue, _ = started(a)
    queue.handle(ended("a", 1), NOW)
    at = NOW + MAINTENANCE_SECONDS
    assert queue.tables["a"].maintain_at == at
    assert not woken(queue, at - 1, a) and woken(queue, at, a) == [RunMaintenance("a")]
    due = queue.tables["a"].due
    assert not woken(queue, due, a), "one thing at a time"
    assert queue.handle(Failed("a"), due)[0] == AskWatermarks("a"), "its failure is no round's"
    assert queue.tables["a"].maintain_at == due + MAINTENANCE_SECONDS
    queue.handle(Watermarks("a", {TABLET: 1}), due)
    at = due + MAINTENANCE_SECONDS
    assert woken(queue, at, a) == [RunMaintenance("a")]
    queue.handle(MaintenanceEnded("a"), at)
    assert queue.tables["a"].maintain_at is None, "until the next round that moves rows"


def test_many_rounds_do_not_wait_for_maintenance_and_it_goes_on_while_there_is_more() -> None:
    a = table("a", freshness=1.0)
    queue, _ = started(a)
    now = NOW
    for n in range(MAINTENANCE_ROUNDS):
        assert (
            RunMaintenance("a") not in queue.handle(ended("a", n + 1), now)[: 0 if n + 1 == MAINTENANCE_ROUNDS else 9]
        )
        if n + 1 < MAINTENANCE_ROUNDS:
            now = queue.tables["a"].due
            assert woken(queue, now, a) == [AskWatermarks("a")]
            queue.handle(Watermarks("a", {TABLET: n + 2}), now)
    assert queue._under_way["a"][0] == RunMaintenance("a")
    assert queue.handle(MaintenanceEnded("a", more=True), now)[0] == RunMaintenance("a")
    queue.handle(MaintenanceEnded("a"), now)
    assert (queue.tables["a"].maintain_at, queue.tables["a"].rounds) == (None, 0)


def test_maintenance_that_fails_is_not_tried_after_every_round() -> None:
    a = table("a", freshness=1.0)
    queue, out = started(a)
    rounds = tries = 0
    now = NOW
    while rounds < 2 * MAINTENANCE_ROUNDS + 5:
        turns = [i for i in out if isinstance(i, AskWatermarks | RunRound | RunMaintenance)]
        if not turns:
            now += 0.5
            out = list(woken(queue, now, a))
        elif isinstance(turns[0], RunMaintenance):
            tries += 1
            out = queue.handle(Failed("a"), now)
        elif isinstance(turns[0], AskWatermarks):
            out = queue.handle(Watermarks("a", {TABLET: rounds + 1}), now)
        else:
            rounds += 1
            out = queue.handle(ended("a", rounds), now)
    assert tries == 2, "each after so many rounds that moved rows"


def test_a_table_without_maintenance() -> None:
    queue, _ = started(table("a", maintained=False))
    queue.handle(ended("a", 1), NOW)
    assert queue.tables["a"].maintain_at is None


def test_stopped_means_that_nothing_more_begins() -> None:
    queue, _ = started(table("a"), table("b"))
    assert queue.handle(Stopped(), NOW) == [Wait(math.inf)], "a's round is under way"
    assert queue.handle(ended("a"), NOW + 9) == [End()]
    queue, _ = started(table("a"))
    queue.handle(ended("a", 1), NOW)
    queue.handle(Woken(), NOW + FRESHNESS)
    queue.handle(Stopped(), NOW + FRESHNESS)
    queue.handle(listed(table("a")), NOW + FRESHNESS)
    assert queue.handle(Watermarks("a", {TABLET: 2}), NOW + FRESHNESS) == [End()]


def test_what_is_not_under_way_changes_nothing() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a", 1), NOW)
    due = queue.tables["a"].due
    for event in (Failed("a"), ended("a", 5), Watermarks("a", {TABLET: 9}), Failed("x"), Gone("x")):
        assert queue.handle(event, NOW + 1) == [Wait(NOW + RELIST_SECONDS)]
    assert queue.tables["a"].due == due


def test_a_long_log_is_tiered_in_rounds_that_others_can_wait_for() -> None:
    queue, first = started(table("long", freshness=60.0), table("quick", freshness=4.0), relist_seconds=math.inf)
    assert first[0] == round_of("long")
    least, wanted = ROUND_RECORDS[0], 4.0 * ROUND_SHARE
    assert queue.handle(RoundEnded("long", {TABLET: 1}, True, more=True), NOW + 2 * wanted)[0] == round_of("quick")
    asked = queue.handle(ended("quick"), NOW + 5)[0]
    assert asked == AskWatermarks("long"), "at once, as there is more"
    halved = round_of("long", ROUND_RECORDS[1] // 2)
    assert queue.handle(Watermarks("long", {TABLET: 9}), NOW + 5)[0] == halved
    now = NOW + 5
    for _ in range(9):
        now += 50.0
        queue.handle(RoundEnded("long", {TABLET: 1}, True, more=True), now)
        queue.handle(ended("quick"), now)
        queue.handle(Watermarks("long", {TABLET: 9}), now)
    assert queue.tables["long"].records_max == least, "slow ones are commits for the most part"
    for _ in range(3):
        queue.handle(RoundEnded("long", {TABLET: 1}, True, more=True), now)
        queue.handle(ended("quick"), now)
        queue.handle(Watermarks("long", {TABLET: 9}), now)
    assert queue.tables["long"].records_max == least * 4**3, "and fast ones grow"


def test_maintenance_takes_few_of_many_turns() -> None:
    tables = [table(f"t{n}") for n in range(6)]
    queue = TieringQueue(turns_at_once=6, maintenance_at_once=1, maintenance_rounds=1, relist_seconds=math.inf)
    queue.handle(Woken(), NOW)
    assert queue.handle(listed(*tables), NOW)[:-1] == [round_of(t.table_id) for t in tables]
    begun = [i for t in tables for i in queue.handle(ended(t.table_id), NOW + 1)]
    assert [i for i in begun if isinstance(i, RunMaintenance)] == [RunMaintenance("t0")]
    begun = queue.handle(MaintenanceEnded("t0"), NOW + 2)
    assert begun[0] == RunMaintenance("t1")
