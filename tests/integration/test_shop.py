"""The example shop, smaller: its numbers are those of plain Python, whichever way they went; the page shows them."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from examples.shop import alerts, freshness, report, tables
from examples.shop.load import change_rows, event_rows
from examples.shop.model import BOTS, USERS, Shop
from examples.shop.page import PageServer
from examples.shop.watch import Watch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def shop(seed: int = 1) -> Shop:
    return Shop(seed=seed, rate=1_000, start_us=1_800_000_000_000_000)


# ---- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.spark(apart=True)
def test_all_ways_lead_to_the_same_numbers(tmp_path: Path) -> None:
    options = ["--rate=200", "--seconds=2", "--patience=300", "--json", f"--folder={tmp_path}"]
    command = [sys.executable, "-m", "examples.shop", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and len(found["checks"]) == 9
    for measured in found["freshness"].values():
        assert all(0 < measured[layer]["p50_ms"] <= measured[layer]["p99_ms"] for layer in measured)
    with lh.connect(tmp_path / "data") as con:
        events = {row["event_id"]: row for row in con.table(tables.EVENTS).scan().to_arrow().to_pylist()}
        category = {r["product_id"]: r["category"] for r in con.table(tables.PRODUCTS).scan().to_arrow().to_pylist()}
        assert con.table(tables.EVENTS).scan().count() == found["sent"]["events"] > len(events) > 400
        counts = Counter((row["event_at"].replace(second=0, microsecond=0), row["kind"]) for row in events.values())
        paid: Counter[str] = Counter()
        for row in events.values():
            paid[category[row["product_id"]]] += row["amount_cents"] if row["kind"] == "payment" else 0
        for layers in (tables.ONE, tables.CHAIN):
            shown = Counter[Any]()
            for row in con.table(layers.funnel).scan().to_arrow().to_pylist():
                for kind in ("view", "cart", "order", "payment"):
                    shown[row["minute"], kind] += row[f"{kind}s"]
            assert shown == counts
            revenue = con.table(layers.revenue).scan().to_arrow().to_pylist()
            assert {row["category"]: row["revenue_cents"] for row in revenue} == paid


# ---- what is generated ----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_events() -> None:
    one, same, other = (list(islice(shop(seed).seconds(), 5)) for seed in (1, 1, 2))
    for a, b in zip(one, same, strict=True):
        assert all(np.array_equal(a.events[name], b.events[name]) for name in a.events)
        assert all(np.array_equal(a.changes[name], b.changes[name]) for name in a.changes)
    assert not np.array_equal(one[4].events["user_id"], other[4].events["user_id"])


def test_events_come_late_and_twice_and_changes_out_of_order() -> None:
    seconds = list(islice(shop().seconds(), 30))
    ids, due, happened, changed = (
        np.concatenate([second[name] for second in part])
        for part, name in (
            ([s.events for s in seconds], "event_id"),
            ([s.events for s in seconds], "due"),
            ([s.events for s in seconds], "event_at"),
            ([s.changes for s in seconds], "seq"),
        )
    )
    assert (np.diff(due) >= 0).all() and (due >= happened).all()
    _, times = np.unique(ids, return_counts=True)
    assert set(times) == {1, 2} and 0.002 < (times == 2).mean() < 0.02
    assert 0.002 < (due - happened > 1_000_000).mean() < 0.03
    assert (np.diff(changed) < 0).any()
    assert 900 < len(ids) / 30 < 1_100


def test_rapid_clicks_are_told_once_a_while() -> None:
    rapid = alerts.RapidClicks()
    told: defaultdict[int, list[int]] = defaultdict(list)
    for number, second in enumerate(islice(shop().seconds(), 12)):
        for users in np.array_split(second.events["user_id"], 20):
            for user in rapid.take(users, number)[0].tolist():
                told[user].append(number)
    assert told and all(user < BOTS for user in told)
    assert all(np.diff(seconds).min(initial=99) >= alerts.WINDOW_SECONDS for seconds in told.values())
    calm = alerts.RapidClicks()
    for number in range(100):
        assert not len(calm.take(np.arange(USERS), number)[0])


def test_orders_are_those_whose_last_change_is_no_delete(con: lh.Connection) -> None:
    seconds = list(islice(shop().seconds(), 20))
    changes = [row for second in seconds for row in change_rows(second.changes).to_pylist()]
    last: dict[int, dict[str, Any]] = {}
    for row in sorted(changes, key=lambda row: row["seq"]):
        last[row["order_id"]] = row
    left = {order: row["status"] for order, row in last.items() if row["op"] != "d"}
    found = report.generated_orders(seed=1, rate=1_000, start_us=1_800_000_000_000_000, changes=len(changes))
    assert {order: tables.STATUSES[op] for order, op in found.items()} == left
    assert {"placed", "paid"} == set(left.values()) and len(left) < len(last)


# ---- reports --------------------------------------------------------------------------------------------------------


def test_a_report_over_the_lake_counts_what_came_twice_once(con: lh.Connection) -> None:
    made = shop()
    tables.create(con, made)
    sent = 0
    for second in islice(made.seconds(), 8):
        con.table(tables.EVENTS).append(event_rows(second.events, drifted=False))
        sent += len(second.events["due"])
    for name in (tables.EVENTS, tables.PRODUCTS):
        con.tier(name)
    expected = report.generated(seed=1, rate=1_000, start_us=1_800_000_000_000_000, events=sent)
    assert report.of_lake(lambda sql: con.sql(sql).to_arrow_table()) == expected
    assert 0 < sum(map(sum, expected.funnel.values())) < sent
    assert report.in_lake(con, [tables.EVENTS]) and not report.in_lake(con, [tables.USERS])


# ---- freshness and the page -----------------------------------------------------------------------------------------


def test_how_long_events_were_under_way() -> None:
    arrivals, sums = freshness.Arrivals(), freshness.Sums()
    arrivals.saw(1_000, np.array([100, 900]))
    arrivals.saw(2_000, np.array([1_500]))
    assert arrivals.percentiles(100, 1_500) == {"p50_ms": 0.5, "p99_ms": 0.89, "events": 2}
    assert arrivals.percentiles(5_000, 6_000) == {"p50_ms": None, "p99_ms": None, "events": 0}
    sums.saw(1_200, 900)
    sums.saw(1_400, 800)  # an older row: nothing new is in it
    sums.saw(2_500, 1_500)
    assert sums.took(np.array([100, 900, 901, 1_501])).tolist() == [1_100, 300, 1_599]
    arrivals.saw(2_000 + freshness.KEEP_US, np.array([7]))
    assert arrivals.between(0, 1 << 60)[0].tolist() == [1_500, 7]


@pytest.fixture
def page(con: lh.Connection) -> Iterator[PageServer]:
    tables.create(con, shop())
    watch = Watch(con, tables.ONE)
    server = PageServer(watch.state)
    yield server
    server.close()
    watch.close()


def test_the_page_shows_gold_as_it_moves(con: lh.Connection, page: PageServer, wait_until: Callable[..., None]) -> None:
    host = page.url.removeprefix("http://").rstrip("/")
    browser = http.client.HTTPConnection(host, timeout=WAIT_SECONDS)
    browser.request("GET", "/")
    answer = browser.getresponse()
    html = answer.read().decode()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "EventSource" in html and "src=" not in html and "http" not in html.replace("http-equiv", "")
    stream = http.client.HTTPConnection(host, timeout=WAIT_SECONDS)
    stream.request("GET", "/events")
    answer = stream.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"

    def shown() -> dict[str, Any]:
        line = answer.readline()
        assert line.startswith(b"data: ") and answer.readline() == b"\n"
        state: dict[str, Any] = json.loads(line[6:])
        return state

    first = shown()
    assert (first["events"], first["funnel"], first["variant"]) == (0, [], "one pipeline query")
    now = lh.connect(con.uri).sql("select now()").fetchone()[0]
    row = {"minute": now.replace(second=0, microsecond=0), "views": 5, "carts": 2, "orders": 1, "payments": 0}
    con.table(tables.ONE.funnel).upsert([row | {"last_sent": now}])
    con.table(tables.ONE.revenue).upsert(
        [{"category": "toys", "views": 5, "payments": 0, "revenue_cents": 0, "last_sent": now}]
    )
    con.table(tables.ALERTS).append([{"user_id": 7, "clicks": 60, "sent_at": now, "alert_at": now}])
    wait_until(lambda: bool(shown()["alerts"]))
    wait_until(lambda: bool(shown()["revenue"]))
    state = shown()
    assert [{k: m[k] for k in ("views", "carts", "orders", "payments")} for m in state["funnel"]] == [
        {"views": 5, "carts": 2, "orders": 1, "payments": 0}
    ]
    assert state["alerts"][0]["user"] == 7 and state["alerts_total"] == 1
    con.table(tables.ONE.funnel).upsert([row | {"views": 6, "last_sent": now}])
    wait_until(lambda: shown()["funnel"][0]["views"] == 6)
    browser.request("GET", "/nothing")
    assert browser.getresponse().status == 404
    browser.close()
    stream.close()


def test_an_event_is_fresh_in_gold_once_both_of_its_tables_have_it(
    con: lh.Connection, wait_until: Callable[..., None]
) -> None:
    tables.create(con, shop())
    watch = Watch(con, tables.ONE)
    second = next(islice(shop().seconds(), 4, None))
    sent_us = time.time_ns() // 1000
    rows = event_rows(second.events, drifted=False, sent_us=sent_us)
    con.table(tables.EVENTS).append(rows)

    def seen() -> dict[str, int]:
        found = watch.freshness(sent_us, sent_us + 1)
        return {layer: found[layer]["events"] for layer in found}

    wait_until(lambda: seen() == {"bronze": len(rows), "silver": 0, "gold": 0})
    silver = rows.group_by("event_id", use_threads=False).aggregate([("sent_at", "first")])
    silver = silver.rename_columns(["event_id", "sent_at"])
    for _ in range(2):  # the second time is an update, and nobody waits for it
        con.table(tables.ONE.events).upsert(silver)
    wait_until(lambda: seen()["silver"] == len(silver))
    last = rows["sent_at"][0].as_py()
    con.table(tables.ONE.funnel).upsert([{"minute": last, "views": 1, "last_sent": last}])
    before = last - dt.timedelta(seconds=1)
    con.table(tables.ONE.revenue).upsert([{"category": "toys", "views": 1, "last_sent": before}])
    wait_until(lambda: "toys" in str(watch.state()["revenue"]) and bool(watch.state()["funnel"]))
    assert seen()["gold"] == 0
    con.table(tables.ONE.revenue).upsert([{"category": "toys", "views": 2, "last_sent": last}])
    wait_until(lambda: seen() == {"bronze": len(rows), "silver": len(silver), "gold": len(rows)})
    watch.close()
