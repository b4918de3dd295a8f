"""Runs the shop: ``python -m examples.shop --seconds 20 --rate 10000 [--page 8080]``.

A server, the applications, the alerts and the page are processes of their own; this one is the driver of Spark. The
pipeline runs as one query, then as three, and a column appears. At the end every number is compared with what a batch
job finds in the lake, and with what was generated.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lakehead as lh
import lakehead.spark as lhs
from examples.shop import report, tables
from examples.shop.children import Child
from examples.shop.model import Shop
from examples.shop.pipeline import SETTINGS, Pipeline, Queries, Starts
from examples.shop.tables import CHAIN, ONE

FRESH_SECONDS = 2.0
"""A pipeline keeps up once it is not farther behind, or comes no nearer."""
DRIFT_SECONDS = 2.0
STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Options:
    """How the shop runs.

    Attributes:
        seconds: for how long freshness is measured, half of it for each way of building the pipeline.
        rate: about so many events a second.
        patience: for how many seconds at most to wait for what was sent.
        page: the port of the live page; 0 for a free one.
        folder: where everything is, and what stays after it; None for a folder that goes.
    """

    seconds: float = 20.0
    rate: int = 10_000
    patience: float = 60.0
    page: int = 0
    seed: int = 1
    folder: Path | None = None


class Run:
    """One run of the shop, and what was found."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._begin = time.monotonic()
        self._pause = threading.Event()
        self._queries = Queries()
        self.found: dict[str, Any] = {"options": {"rate": options.rate, "seconds": options.seconds}, "checks": {}}

    def say(self, text: str) -> None:
        """Say what happens."""
        print(f"{time.monotonic() - self._begin:5.1f} s  {text}", file=sys.stderr, flush=True)

    def run(self) -> dict[str, Any]:
        """Everything; returns what was found, as plain values."""
        options = self._options
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(Child("examples.shop.server", str(self._folder / "data")))
            uri = server.answer()["uri"]
            con = stack.enter_context(lh.connect(uri))
            shop = Shop(seed=options.seed, rate=options.rate, start_us=0)
            tables.create(con, shop)
            self.say(f"serving at {uri}, Spark starts")
            alerts = stack.enter_context(Child("examples.shop.alerts", uri))
            page = stack.enter_context(Child("examples.shop.page", uri, "--port", str(options.page)))
            with ThreadPoolExecutor(1, initializer=_give_way) as giving_way:
                spark = giving_way.submit(lhs.session, con, app_name="shop", **SETTINGS).result()
            stack.callback(spark.stop)
            pipeline = Pipeline(con, spark, self._folder / "checkpoints")
            self.say(f"live page at {page.answer()['url']}")
            start_us = _now_us()
            sends = {"seed": options.seed, "rate": options.rate, "start-us": start_us}
            load = stack.enter_context(
                Child("examples.shop.load", uri, *(f"--{name}={value}" for name, value in sends.items()))
            )
            stack.callback(self._queries.stop)
            self._queries.start(pipeline.orders())
            self._measure("one pipeline query", pipeline.one(), page, alerts)
            self._queries.stop(pipeline.one())
            page.ask("layers", "chain")
            self._measure("three chained queries", pipeline.chain(), page, alerts)
            self._drift(con, spark, load)
            load.end()
            sent = load.answer()
            self.say(f"{sent['events']:,} events were sent; queries catch up")
            self._queries.start(pipeline.one())
            self._queries.catch_up()
            self._check(con, spark, start_us, sent)
        return self.found

    # ---- freshness --------------------------------------------------------------------------------------------------

    def _measure(self, name: str, starts: Starts, page: Child, alerts: Child) -> None:
        began = time.monotonic()
        self._queries.start(starts)
        before, behind = math.inf, self._until_gold_has(_now_us(), page)
        while FRESH_SECONDS < behind < before:  # on a machine that is busy with other things it may never be less
            before, behind = behind, self._until_gold_has(_now_us(), page)
        self.say(f"{name}: read what was there, and keeps up since {time.monotonic() - began:.1f} s after its start")
        gc.freeze()  # what is loaded by now, a full collection passes over: it would stop the driver for 70 ms
        since = _now_us()
        self._pause.wait(self._options.seconds / 2)
        until = _now_us()
        self._until_gold_has(until, page)
        found = {**page.ask("measure", since, until), "subscriber": alerts.ask("measure", since, until)}
        self.found.setdefault("freshness", {})[name] = found
        self.say(f"{name}: " + ", ".join(f"{layer} {_times(found[layer])}" for layer in found))

    def _until_gold_has(self, moment_us: int, page: Child) -> float:
        """Wait until gold holds what was sent in the second before a moment; how many seconds that took."""
        began = time.monotonic()
        while time.monotonic() < began + self._options.patience:
            self._queries.follow()
            seen = page.ask("measure", moment_us - 1_000_000, moment_us)
            if seen["bronze"]["events"] and seen["gold"]["events"] == seen["bronze"]["events"]:
                break
            self._pause.wait(STEP_SECONDS)
        return time.monotonic() - began

    def _drift(self, con: lh.Connection, spark: Any, load: Child) -> None:
        """A column appears in all layers while they are in use; queries that read them begin again by themselves."""
        began = time.monotonic()
        spark.sparkContext.setLogLevel("OFF")  # the queries end with an error, as they should
        tables.drift(con)
        load.tell("drift")
        again: set[str] = set()
        while time.monotonic() < began + DRIFT_SECONDS or not again >= {"clean", "enrich", "count"}:
            again.update(self._queries.follow())
            self._pause.wait(STEP_SECONDS)
            if time.monotonic() > began + self._options.patience:
                raise RuntimeError(f"of the queries only {sorted(again)} noticed the new column")
        spark.sparkContext.setLogLevel("ERROR")
        self.say(f"clients began to tell their {tables.DRIFT}: the queries went on with the new column by themselves")

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check(self, con: lh.Connection, spark: Any, start_us: int, sent: dict[str, int]) -> None:
        names = [tables.EVENTS, tables.PRODUCTS, tables.ORDERS, *ONE.all, *CHAIN.all]
        for name in names:
            con.tier(name)
        self.say("the lake has all of it; the report is made")
        model = {"seed": self._options.seed, "rate": self._options.rate, "start_us": start_us}
        expected = report.generated(**model, events=sent["events"])
        orders = report.generated_orders(**model, changes=sent["changes"])

        def duckdb(sql: str) -> Any:
            return con.sql(sql).to_arrow_table()

        def pyspark(sql: str) -> Any:
            return lhs.sql(spark, sql).toArrow()

        drifted = con.sql(f"select count(*) from {CHAIN.events} where {tables.DRIFT} is not null").fetchone()
        self.found["checks"] = {
            "the lake holds the same offsets as the logs": report.in_lake(con, names),
            "gold of one query equals what was generated": report.live(con, ONE) == expected,
            "gold of three queries equals what was generated": report.live(con, CHAIN) == expected,
            "a batch report over bronze in the lake, by DuckDB": report.of_lake(duckdb) == expected,
            "a batch report over bronze in the lake, by Spark": report.of_lake(pyspark) == expected,
            "a batch report over silver in the lake, by Spark": report.of_lake(pyspark, ONE.events) == expected,
            "gold in the lake equals gold": report.of_gold_in_lake(duckdb, ONE) == expected,
            "orders equal those of the database": report.live_orders(con) == orders,
            "the new column came through": drifted is not None and drifted[0] > 0,
        }
        self.found["sent"] = sent
        self.found["totals"] = {c: sum(m[i] for m in expected.funnel.values()) for i, c in enumerate(tables.COUNTS)}
        self.found["alerts"] = con.table(tables.ALERTS).scan().count()
        self.found["ok"] = all(self.found["checks"].values())


def _give_way() -> None:
    """What this thread starts lets others go first: Spark computes much, and on a machine of few cores who is told of
    events within milliseconds would wait for it. Where only processes have priorities, the driver does, too."""
    os.nice(10)


def _now_us() -> int:
    return time.time_ns() // 1000


def _times(found: dict[str, Any]) -> str:
    if found["p50_ms"] is None:
        return "nothing came"
    return f"{found['p50_ms']:,.1f} / {found['p99_ms']:,.1f} ms"


def show(found: dict[str, Any]) -> None:
    """The summary, as text."""
    layers = ("bronze", "silver", "gold", "subscriber")
    print(f"\n{'event until it is in, p50 / p99':<34}" + "".join(f"{layer:>22}" for layer in layers))
    for name, freshness in found["freshness"].items():
        print(f"{name:<34}" + "".join(f"{_times(freshness[layer]):>22}" for layer in layers))
    minute = "".join(f"{text:>22}" for text in ("1 min", "2 min", "3 min", "–"))
    print(f"{'a commit a minute in each layer':<34}{minute}")
    sent, totals = found["sent"], found["totals"]
    print(f"\nSent: {sent['events']:,} events, {sent['changes']:,} changes of orders. Told: {found['alerts']} alerts.")
    print("Each once: " + ", ".join(f"{count:,} {name}" for name, count in totals.items()) + ".\n")
    for check, passed in found["checks"].items():
        print(f"  {'ok' if passed else 'NOT SO':<7} {check}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.shop", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, half of it each way (20)")
    parser.add_argument("--rate", type=int, default=10_000, help="events a second (10000)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds at most to wait for what was sent (60)")
    parser.add_argument("--page", type=int, default=0, metavar="PORT", help="of the live page; 0 takes a free one")
    parser.add_argument("--seed", type=int, default=1, help="of what is generated (1)")
    parser.add_argument("--folder", type=Path, help="a new folder that stays; default: one that goes")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    options = Options(**given)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="lakehead-shop-"))
    try:
        found = Run(options, folder.absolute()).run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
