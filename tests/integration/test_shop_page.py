"""The shop's live page in a real browser: what stands there is what the tables hold, as it moves."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.browser import Browser
from tests.waiting import wait_until

import lakehead as lh
from examples.shop import tables
from examples.shop.load import event_rows
from examples.shop.model import Second, Shop
from examples.shop.page import PageServer
from examples.shop.watch import ALERTS_SHOWN, MINUTES_SHOWN, Watch

SECONDS = 120.0
CELLS = "[...document.querySelectorAll('#{} tr')].map(row => [...row.cells].map(cell => cell.textContent))"
BARS = "[...document.querySelectorAll('#{} .bar')].map(b => [b.firstChild.textContent, b.lastChild.textContent])"
TEXT = "document.getElementById('{}').textContent"
POINTS = "document.querySelector('#{}line polyline').getAttribute('points').split(' ').filter(p => p).length"


class Load:
    """Fills all layers from the shop's model, a second at a time, gold by plain Python."""

    def __init__(self, con: lh.Connection) -> None:
        shop = Shop(seed=1, rate=1_000, start_us=1_800_000_000_000_000)
        tables.create(con, shop)
        self._con = con
        self._seconds = shop.seconds()
        self._category = {row["product_id"]: row["category"] for row in shop.products().to_pylist()}
        self._seen: set[int] = set()
        self._funnel: Counter[tuple[dt.datetime, str]] = Counter()
        self._sales: Counter[tuple[str, str]] = Counter()

    def send(self) -> None:
        """One second more."""
        second: Second = next(self._seconds)
        rows = event_rows(second.events, drifted=False, sent_us=time.time_ns() // 1000)
        self._con.table(tables.EVENTS).append(rows)
        new = [row for row in rows.to_pylist() if row["event_id"] not in self._seen]
        new = list({row["event_id"]: row for row in new}.values())
        if not new:
            return
        self._seen |= {row["event_id"] for row in new}
        silver = pa.Table.from_pylist([{"event_id": r["event_id"], "sent_at": r["sent_at"]} for r in new])
        self._con.table(tables.ONE.events).upsert(silver)
        for row in new:
            minute = row["event_at"].replace(second=0, microsecond=0)
            self._funnel[minute, f"{row['kind']}s"] += 1
            category = self._category[row["product_id"]]
            self._sales[category, f"{row['kind']}s"] += 1
            self._sales[category, "revenue_cents"] += row["amount_cents"] if row["kind"] == "payment" else 0
        last = {"last_sent": max(row["sent_at"] for row in new)}
        for table, key, counts, columns in (
            (tables.ONE.funnel, "minute", self._funnel, tables.COUNTS),
            (tables.ONE.revenue, "category", self._sales, tables.SALES),
        ):
            keys = sorted({k for k, _ in counts})
            self._con.table(table).upsert([{key: k, **{c: counts[k, c] for c in columns}, **last} for k in keys])


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def of_tables(con: lh.Connection) -> dict[str, Any]:
    """What the page should show of the tables."""

    def rows(table: str, key: str) -> list[dict[str, Any]]:
        return sorted(con.table(table).scan().to_arrow().to_pylist(), key=lambda row: row[key])

    funnel = rows(tables.ONE.funnel, "minute")[-MINUTES_SHOWN:]
    told = rows(tables.ALERTS, "user_id")
    return {
        "events": f"{con.table(tables.EVENTS).scan().count():,}",
        "minutes": [[f"{m['minute']:%H:%M:%S}", *(f"{m[c]:,}" for c in tables.COUNTS)] for m in reversed(funnel)],
        "funnel": [[c, f"{sum(m[c] for m in funnel):,}"] for c in tables.COUNTS],
        "revenue": [
            [r["category"], f"{(r['revenue_cents'] + 50) // 100:,} €"] for r in rows(tables.ONE.revenue, "category")
        ],
        "alerts": [
            [str(a["user_id"]), f"{a['clicks']:,}", took(a["alert_at"] - a["sent_at"]), f"{a['alert_at']:%H:%M:%S}"]
            for a in reversed(told[-ALERTS_SHOWN:])
        ],
        "total": f"({len(told):,})",
    }


def took(time: dt.timedelta) -> str:
    ms = time / dt.timedelta(milliseconds=1)
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1_000:.1f} s"


def on_page(browser: Browser) -> dict[str, Any]:
    shown = {name: browser.ask(CELLS.format(name)) for name in ("minutes", "alerts")}
    shown |= {name: browser.ask(BARS.format(name)) for name in ("funnel", "revenue")}
    shown["funnel"] = [[step, text.partition(" · ")[0]] for step, text in shown["funnel"]]
    return shown | {
        "events": browser.ask(TEXT.format("flow")).partition(" ")[0],
        "total": browser.ask(TEXT.format("total")),
    }


def settles(browser: Browser, expected: dict[str, Any]) -> None:
    with contextlib.suppress(AssertionError):
        wait_until(lambda: on_page(browser) == expected, SECONDS)
    assert on_page(browser) == expected


def fresh(browser: Browser) -> list[float]:
    """Milliseconds of the layers that show any."""
    texts = [browser.ask(TEXT.format(layer)) for layer in ("bronze", "silver", "gold")]
    units = {"ms": 1, "s": 1_000}
    return [float(value) * units[unit] for value, unit in (t.split() for t in texts if t != "–")]


def test_a_browser_shows_what_the_tables_hold_as_it_moves(con: lh.Connection, tmp_path: Path) -> None:
    load = Load(con)
    with (
        closing(Watch(con, tables.ONE)) as watch,
        closing(PageServer(watch.state)) as page,
        Browser(tmp_path / "browser") as browser,
    ):
        browser.open(page.url)
        wait_until(lambda: browser.ask(TEXT.format("variant")) == "one pipeline query", SECONDS)
        assert on_page(browser)["events"] == "0" and not fresh(browser)

        begin = time.monotonic()

        def all_fresh() -> bool:
            load.send()
            return len(fresh(browser)) == 3

        wait_until(all_fresh, SECONDS)
        assert all(0 < ms < (time.monotonic() - begin) * 1_000 for ms in fresh(browser))
        before: dict[str, Any] = {}
        for n in itertools.count():
            now = dt.datetime.now(dt.UTC)
            for ms in (1.5, 250, 12_000):
                alert = {"user_id": 7 + n, "clicks": 61 + n, "alert_at": now + dt.timedelta(milliseconds=ms)}
                con.table(tables.ALERTS).append([{"sent_at": now, **alert}])
            expected = of_tables(con)
            settles(browser, expected)
            assert all(expected[part] != before.get(part) for part in expected)
            if n == 3:
                break
            before = expected
            for _ in range(30):
                load.send()
        assert expected["funnel"][-1][1] != "0" and len(expected["alerts"]) == ALERTS_SHOWN
        assert browser.ask(POINTS.format("gold")) > 1
        wait_until(lambda: not fresh(browser), SECONDS)  # nothing came for seconds
        assert not browser.errors


def test_the_page_says_that_its_server_is_away_and_goes_on_with_the_next(con: lh.Connection, tmp_path: Path) -> None:
    load = Load(con)
    with closing(Watch(con, tables.ONE)) as watch, Browser(tmp_path / "browser") as browser:
        with closing(PageServer(watch.state)) as page:
            browser.open(page.url)
            wait_until(lambda: browser.ask(TEXT.format("variant")) != "", SECONDS)
        wait_until(lambda: browser.ask(TEXT.format("link")) == "the server is away", SECONDS)
        load.send()
        with closing(PageServer(watch.state, page.server_port)):
            expected = of_tables(con)
            settles(browser, expected)
            assert browser.ask(TEXT.format("link")) == "" and not browser.errors
