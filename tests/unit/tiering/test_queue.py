"""What a tiering service does next, told event by event."""

from __future__ import annotations

import math
from dataclasses import replace

from lakehead.tiering.queue import (
    FENCED_SECONDS,
    IDLE_SHARE,
    LOOK_SECONDS,
    LOOK_SHARE,
    MAINTENANCE_ROUNDS,
    MAINTENANCE_SECONDS,
    RETRY_SECONDS,
    ROUND_RECORDS,
    ROUND_SHARE,
    End,
    Failed,
    Fenced,
    FoundTable,
    Gone,
    Instruction,
    Look,
    Looked,
    MaintenanceEnded,
    RoundEnded,
    RunMaintenance,
    RunRound,
    ServerAway,
    Stopped,
    TieringQueue,
    Turn,
    Wait,
    Woken,
    budget,
)

NOW = 1000.0
FRESHNESS = 30.0
RARELY = 1e9
NOTHING: frozenset[str] = frozenset()


def table(
    table_id: str,
    name: str | None = None,
    freshness: float = FRESHNESS,
    *,
    maintained: bool = True,
    end: int | None = 1,
) -> FoundTable:
    return FoundTable(table_id, name or table_id, freshness, maintained, end)


def looked(*tables: FoundTable) -> Looked:
    return Looked(tables)


def look(*has: str, without: frozenset[str] = NOTHING) -> Look:
    return Look(frozenset(has), without)


def started(
    *tables: FoundTable, turns_at_once: int = 1, look_seconds: float = LOOK_SECONDS
) -> tuple[TieringQueue, list[Instruction]]:
    """A queue that was told of these tables at `NOW`, and what it asked for then."""
    queue = TieringQueue(turns_at_once=turns_at_once, look_seconds=look_seconds)
    assert queue.handle(Woken(), NOW) == [look(), Wait(math.inf)]
    return queue, queue.handle(looked(*tables), NOW)


def woken(queue: TieringQueue, now: float, *tables: FoundTable) -> list[Turn]:
    """The turns that begin at a time, when whatever look is due then finds these tables."""
    out = queue.handle(Woken(), now)
    if any(isinstance(i, Look) for i in out):
        out += queue.handle(looked(*tables), now)
    return [i for i in out if isinstance(i, RunRound | RunMaintenance)]


def ended(table_id: str, end: int = 1, *, moved: bool = True) -> RoundEnded:
    return RoundEnded(table_id, end, moved)


def round_of(table_id: str, records_max: int = ROUND_RECORDS[1]) -> RunRound:
    return RunRound(table_id, records_max)


def test_next_round_ends_before_rows_are_too_old() -> None:
    for freshness in (1.0, 5.0, 30.0):
        for took in (0.05, 0.2, 0.4):
            assert budget(freshness, took) + LOOK_SHARE * freshness + took <= freshness + 1e-9


def test_slow_rounds_leave_a_pause() -> None:
    assert budget(5.0, 60.0) == IDLE_SHARE * 5.0


def test_a_table_gets_a_round_at_once_and_then_when_it_has_news() -> None:
    queue, first = started(table("a", end=10), look_seconds=RARELY)
    assert first == [round_of("a"), Wait(NOW + RARELY)]
    due = NOW + budget(FRESHNESS, 2.0)
    assert queue.handle(ended("a", 10), NOW + 2) == [Wait(due)]
    assert queue.tables["a"].due == due
    assert queue.handle(Woken(), due)[0] == look("a")
    again = due + budget(FRESHNESS, 2.0)
    assert queue.handle(looked(table("a", end=10)), due + 0.1) == [Wait(again)], "counted from the question"
    queue.handle(Woken(), again)
    assert queue.handle(looked(table("a", end=11)), again + 1)[0] == round_of("a")
    queue.handle(ended("a", 11), again + 5)
    assert queue.tables["a"].expected == 4


def test_news_that_came_before_a_table_is_due_need_no_question() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a"), NOW)
    queue.handle(Woken(), NOW + LOOK_SECONDS)
    queue.handle(looked(table("a", end=2)), NOW + LOOK_SECONDS)
    due = queue.tables["a"].due
    queue.look_seconds = RARELY
    assert queue.handle(Woken(), NOW + LOOK_SECONDS) == [Wait(due)]
    assert queue.handle(Woken(), due)[0] == round_of("a")


def test_many_idle_tables_share_their_questions() -> None:
    tables = [table(f"t{n}", freshness=1.0) for n in range(100)]
    queue, _ = started(*tables, turns_at_once=100)
    for n, t in enumerate(tables):
        queue.handle(ended(t.table_id), NOW + n / 1000)
    now, looks = NOW + 0.1, 0
    while now < NOW + 10:
        *out, wait = queue.handle(Woken(), now)
        for instruction in out:
            assert isinstance(instruction, Look)
            looks += 1
            *_, wait = queue.handle(looked(*tables), now)
        assert isinstance(wait, Wait)
        now = wait.until
    assert looks <= 30


def test_a_folder_that_was_put_back_has_news_wherever_its_logs_end() -> None:
    queue, _ = started(replace(table("a", end=10), folder="one"), look_seconds=RARELY)
    queue.handle(ended("a", 10), NOW + 2)
    for end, folder in ((10, "another"), (7, "a third")):
        due = queue.tables["a"].due
        assert woken(queue, due, replace(table("a", end=end), folder=folder)) == [round_of("a")]
        queue.handle(ended("a", end), due + 2)
        assert not queue.tables["a"].has_news


def test_a_table_that_no_server_knows_the_end_of_gets_a_round() -> None:
    queue, first = started(table("a", end=None))
    assert first[0] == round_of("a")
    queue.handle(ended("a", 7, moved=False), NOW)
    assert not queue.tables["a"].has_news
    queue.handle(Woken(), NOW + LOOK_SECONDS)
    queue.handle(looked(table("a", end=None)), NOW + LOOK_SECONDS)
    assert woken(queue, queue.tables["a"].due, table("a", end=None)) == [round_of("a")], "its server began anew"


def test_faster_rounds_are_believed_by_and_by() -> None:
    queue, _ = started(table("a", maintained=False), look_seconds=50.0)
    queue.handle(ended("a"), NOW + 8)
    assert queue.tables["a"].expected == 8
    assert woken(queue, NOW + 100, table("a", maintained=False, end=2)) == [round_of("a")]
    queue.handle(ended("a", 2), NOW + 102)
    assert queue.tables["a"].expected == 5


def test_a_round_that_moves_nothing_tells_nothing_of_those_that_do() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a", moved=False), NOW + 8)
    assert queue.tables["a"].expected == 0


def test_one_turn_at_a_time_and_who_is_due_longest_first() -> None:
    queue, first = started(table("a"), table("b"), table("c"), look_seconds=RARELY)
    assert first == [round_of("a"), Wait(NOW + RARELY)]
    assert queue.handle(Woken(), NOW + 1) == [Wait(NOW + RARELY)], "while a round runs"
    assert queue.handle(Failed("a"), NOW + 1)[0] == round_of("b")
    assert queue.handle(ended("b"), NOW + 1.9)[0] == round_of("c"), "before a, which is due since half a second"
    assert queue.handle(ended("c"), NOW + 1.95)[0] == round_of("a")


def test_several_turns_at_once_are_of_several_tables() -> None:
    queue, first = started(table("a"), table("b"), table("c"), turns_at_once=2)
    assert first == [round_of("a"), round_of("b"), Wait(NOW + LOOK_SECONDS)]
    assert round_of("c") in queue.handle(ended("b"), NOW + 1)


def test_an_error_delays_its_table_alone_and_ever_longer() -> None:
    a, b = table("a", maintained=False), table("b", maintained=False)
    queue, _ = started(a, b)
    now, delays = NOW, []
    for _ in range(50):
        follows: list[Turn] = [i for i in queue.handle(Failed("a"), now) if isinstance(i, RunRound)]
        delays.append(queue.tables["a"].due - now)
        while round_of("a") not in follows:
            if round_of("b") in follows:
                follows = [i for i in queue.handle(ended("b"), now) if isinstance(i, RunRound)]
            else:
                now = min(queue.tables["a"].due, now + LOOK_SECONDS)
                follows = woken(queue, now, a, b)
    assert delays[:4] == [0.5, 1, 2, 4] and delays[-1] == max(delays) == RETRY_SECONDS[1]
    assert queue.tables["b"].failures == 0


def test_who_was_only_late_tries_again_soon() -> None:
    queue, _ = started(table("a"))
    for n in range(1, 9):
        queue.handle(Failed("a", late=True), NOW + n)
        assert queue.tables["a"].due == NOW + n + RETRY_SECONDS[0] and queue.tables["a"].failures == n
        queue.handle(Woken(), NOW + n + RETRY_SECONDS[0])


def test_delays_end_when_the_server_answers() -> None:
    a, b = table("a"), table("b")
    queue, _ = started(a, b, look_seconds=100.0)
    queue.handle(Failed("a"), NOW)
    queue.handle(ended("b"), NOW)
    for at in (NOW + 0.5, NOW + 1.5, NOW + 3.5):
        assert woken(queue, at, a, b) == [round_of("a")]
        queue.handle(Failed("a"), at)
    late, due = queue.tables["a"].due, queue.tables["b"].due
    assert late == NOW + 7.5
    queue.look_seconds = 1.0
    assert queue.handle(Woken(), NOW + 4)[0] == look("a", "b")
    assert queue.handle(ServerAway(), NOW + 7)[-1] == Wait(late)
    assert queue.away and [queue.tables[i].due for i in "ab"] == [late, due]
    queue.handle(Woken(), late)
    queue.handle(Failed("a"), late)
    queue.handle(Woken(), NOW + 8)
    assert queue.handle(looked(a, b), NOW + 8.1)[0] == round_of("a")
    assert not queue.away and queue.tables["a"].failures == 0 and queue.tables["b"].due == due


def test_before_its_server_is_there_it_asks_for_it() -> None:
    queue = TieringQueue()
    assert queue.handle(Woken(), NOW)[0] == look()
    assert queue.handle(ServerAway(), NOW + 1) == [Wait(NOW + 1 + LOOK_SECONDS)]
    assert queue.handle(Woken(), NOW + 1 + LOOK_SECONDS)[0] == look()
    assert queue.handle(looked(table("a")), NOW + 4)[0] == round_of("a")


def test_a_fenced_table_is_left_to_others_for_a_while() -> None:
    queue, _ = started(table("a"))
    assert queue.handle(Fenced("a"), NOW) == [Wait(NOW + LOOK_SECONDS)]
    assert queue.fenced == {"a"} and not queue.tables
    at = NOW + FENCED_SECONDS - 1
    assert queue.handle(Woken(), at)[0] == look(without=frozenset("a"))
    assert not [i for i in queue.handle(looked(table("a")), at) if isinstance(i, RunRound)], "found nevertheless"
    assert queue.handle(Woken(), NOW + FENCED_SECONDS)[0] == look()
    assert queue.handle(looked(table("a")), NOW + FENCED_SECONDS)[0] == round_of("a")


def test_a_fenced_table_that_is_created_again_is_another_one() -> None:
    queue, _ = started(table("old", "t"))
    queue.handle(Fenced("old"), NOW)
    queue.handle(Woken(), NOW + LOOK_SECONDS)
    assert queue.handle(looked(table("new", "t")), NOW + LOOK_SECONDS)[0] == round_of("new")


def test_a_table_that_is_created_again_does_not_wait_for_the_old_ones_deadline() -> None:
    queue, _ = started(table("old", "t", freshness=86400))
    queue.handle(ended("old"), NOW + 0.5)
    queue.handle(Woken(), NOW + LOOK_SECONDS)
    assert queue.handle(looked(table("new", "t", freshness=1)), NOW + LOOK_SECONDS)[0] == round_of("new")
    assert list(queue.tables) == ["new"]


def test_a_table_that_is_gone_is_let_go() -> None:
    queue, _ = started(table("a"), table("b"))
    assert queue.handle(Gone("a"), NOW)[0] == round_of("b")
    assert list(queue.tables) == ["b"]


def test_let_go_while_its_round_runs() -> None:
    queue, _ = started(table("a"), table("b"))
    queue.handle(Woken(), NOW + 1)
    queue.handle(looked(table("b")), NOW + 1)
    assert list(queue.tables) == ["b"]
    assert queue.handle(Woken(), NOW + 2)[0] == look("a", "b"), "its round may still commit"
    assert round_of("a") not in queue.handle(looked(table("a"), table("b")), NOW + 2), "under way"
    assert queue.handle(Failed("a"), NOW + 9)[0] != round_of("a")


def test_another_name_of_the_same_table_changes_nothing() -> None:
    queue, _ = started(table("a", "old"))
    queue.handle(ended("a"), NOW + 0.5)
    due = queue.tables["a"].due
    queue.handle(Woken(), NOW + LOOK_SECONDS)
    queue.handle(looked(table("a", "new")), NOW + LOOK_SECONDS)
    assert (queue.tables["a"].table.name, queue.tables["a"].due) == ("new", due)


def test_a_shorter_freshness_is_kept_at_once() -> None:
    queue, _ = started(table("a", freshness=3600))
    queue.handle(ended("a"), NOW)
    queue.handle(Woken(), NOW + LOOK_SECONDS)
    queue.handle(looked(table("a", freshness=1)), NOW + LOOK_SECONDS)
    assert queue.tables["a"].due == NOW + LOOK_SECONDS + budget(1, 0)


def test_maintenance_follows_rounds_that_moved_rows_and_delays_none() -> None:
    a = table("a", freshness=3600)
    queue, _ = started(a)
    queue.handle(ended("a"), NOW)
    at = NOW + MAINTENANCE_SECONDS
    assert queue.tables["a"].maintain_at == at
    assert not woken(queue, at - 1, a) and woken(queue, at, a) == [RunMaintenance("a")]
    due = queue.tables["a"].due
    news = table("a", freshness=3600, end=2)
    assert not woken(queue, due, news), "one thing at a time"
    assert round_of("a") in queue.handle(Failed("a", maintenance=True), due), "its failure is no round's"
    assert queue.tables["a"].maintain_at == due + MAINTENANCE_SECONDS
    queue.handle(ended("a", 2), due)
    at = due + MAINTENANCE_SECONDS
    assert woken(queue, at, news) == [RunMaintenance("a")]
    queue.handle(MaintenanceEnded("a"), at)
    assert queue.tables["a"].maintain_at is None, "until the next round that moves rows"


def test_a_round_runs_beside_the_maintenance_of_its_table() -> None:
    a = table("a", freshness=3600)
    queue, _ = started(a, turns_at_once=2)
    queue.handle(ended("a"), NOW)
    at = NOW + MAINTENANCE_SECONDS
    assert woken(queue, at, a) == [RunMaintenance("a")]
    due, news = queue.tables["a"].due, table("a", freshness=3600, end=2)
    assert woken(queue, due, news) == [round_of("a")]
    assert not woken(queue, due + 5000, table("a", freshness=3600, end=3)), "one of each"
    assert round_of("a") not in queue.handle(Failed("a", maintenance=True), due + 5001)
    assert queue.tables["a"].failures == 0
    assert RunMaintenance("a") not in queue.handle(Failed("a"), due + 5001)
    assert (queue.tables["a"].failures, queue.tables["a"].maintain_at) == (1, due + 5001 + MAINTENANCE_SECONDS)


def test_many_rounds_do_not_wait_for_maintenance_and_it_goes_on_while_there_is_more() -> None:
    queue, out = started(table("a", freshness=1.0, end=None), look_seconds=RARELY)
    now = NOW
    for n in range(1, MAINTENANCE_ROUNDS + 1):
        assert out[0] == round_of("a")
        out = queue.handle(ended("a", n), now)
        if n < MAINTENANCE_ROUNDS:
            now = queue.tables["a"].due
            queue.handle(Woken(), now)
            out = queue.handle(looked(table("a", freshness=1.0, end=n + 1)), now)
    assert out[0] == RunMaintenance("a")
    assert queue.handle(MaintenanceEnded("a", more=True), now)[0] == RunMaintenance("a")
    queue.handle(MaintenanceEnded("a"), now)
    assert (queue.tables["a"].maintain_at, queue.tables["a"].rounds) == (None, 0)


def test_maintenance_that_fails_is_not_tried_after_every_round() -> None:
    queue, _ = started(table("a", freshness=1.0))
    out: list[Turn] = [round_of("a")]
    rounds = tries = 0
    now = NOW
    while rounds < 2 * MAINTENANCE_ROUNDS + 5:
        if not out:
            now += 0.5
            out = woken(queue, now, table("a", freshness=1.0, end=rounds + 1))
        elif isinstance(out[0], RunMaintenance):
            tries += 1
            failed = Failed("a", maintenance=True)
            out = [i for i in queue.handle(failed, now) if isinstance(i, RunRound | RunMaintenance)]
        else:
            rounds += 1
            follows = queue.handle(ended("a", rounds), now)
            out = [i for i in follows if isinstance(i, RunRound | RunMaintenance)]
    assert tries == 2, "each after so many rounds that moved rows"


def test_maintenance_takes_few_of_many_turns() -> None:
    tables = [table(f"t{n}") for n in range(6)]
    queue = TieringQueue(turns_at_once=6, maintenance_at_once=1, maintenance_rounds=1, look_seconds=RARELY)
    queue.handle(Woken(), NOW)
    assert queue.handle(looked(*tables), NOW)[:-1] == [round_of(t.table_id) for t in tables]
    begun = [i for t in tables for i in queue.handle(ended(t.table_id), NOW + 1)]
    assert [i for i in begun if isinstance(i, RunMaintenance)] == [RunMaintenance("t0")]
    assert queue.handle(MaintenanceEnded("t0"), NOW + 2)[0] == RunMaintenance("t1")


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
    assert queue.handle(Woken(), NOW + FRESHNESS)[0] == look("a")
    assert queue.handle(Stopped(), NOW + FRESHNESS) == [Wait(math.inf)]
    assert queue.handle(looked(table("a", end=2)), NOW + FRESHNESS) == [End()]


def test_what_is_not_under_way_changes_nothing() -> None:
    queue, _ = started(table("a"))
    queue.handle(ended("a", 1), NOW)
    due = queue.tables["a"].due
    for event in (Failed("a"), ended("a", 5), Failed("x"), Gone("x")):
        assert queue.handle(event, NOW + 0.5) == [Wait(NOW + LOOK_SECONDS)]
    assert queue.tables["a"].due == due


def test_a_long_log_is_tiered_in_rounds_that_others_can_wait_for() -> None:
    both = [table("long", freshness=60.0, maintained=False), table("quick", freshness=4.0, maintained=False)]
    queue, first = started(*both, look_seconds=RARELY)
    assert first[0] == round_of("long")
    least, wanted = ROUND_RECORDS[0], 4.0 * ROUND_SHARE
    assert queue.handle(RoundEnded("long", 1, True, more=True), NOW + 2 * wanted)[0] == round_of("quick")
    follows = queue.handle(ended("quick"), NOW + 5)
    assert follows[0] == round_of("long", ROUND_RECORDS[1] // 2), "at once, as there is more"
    now = NOW + 5
    for seconds, times in ((50.0, 9), (0.0, 3)):
        for _ in range(times):
            now += seconds
            if round_of("quick") in queue.handle(RoundEnded("long", 1, True, more=True), now):
                queue.handle(ended("quick"), now)
            queue.handle(looked(*both), now)
        if seconds:
            assert queue.tables["long"].records_max == least, "smaller ones are commits for the most part"
    assert queue.tables["long"].records_max == least * 4**3, "and fast ones grow"
