"""`lakehead demo`: a year of flights through one table, from stream to lake, with everything checked as it goes."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from contextlib import ExitStack
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from lakehead.api.connection import Connection, connect
from lakehead.api.table import Table
from lakehead.demo.check import Checker
from lakehead.demo.child import Child
from lakehead.demo.data import DemoData, load
from lakehead.demo.feed import TABLES, Feed, Pace
from lakehead.demo.folder import prepare_folder, write_marker
from lakehead.demo.questions import Answer, ask_all, decoded
from lakehead.demo.screen import Screen, print_answer, print_summary
from lakehead.env import SystemClock
from lakehead.errors import UnavailableError

_REFRESH_SECONDS = 0.2
_READY_SECONDS = 60.0
_REPORT_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_TIERED_SECONDS = 90.0
_SPARK_MODULE = "lakehead.demo.spark"
_SUBSCRIBER_MODULE = "lakehead.demo.subscriber"
_INTERRUPTED = 130


def run_demo(
    folder: str, *, rows: int | None = None, fresh: bool = False, output: Literal["text", "json"] = "text"
) -> int:
    """Run the demo; the folder remains.

    Args:
        folder: made when missing; an earlier demo in it is replaced.
        rows: flights to send, in departure order; None for all of them.
        fresh: replace an earlier demo even when tables were added to it.
        output: ``"json"`` prints the summary as one JSON document; progress then goes to standard error.

    Returns:
        The exit code: 0, 1 when something that must hold did not, 130 after Ctrl-C.

    Raises:
        InvalidRequestError: the folder holds something else, or ``rows`` is out of range.
        MissingDependencyError: the data, PySpark or Java is missing; the message says what to install.
        LakeheadError: the engine or a process of the demo failed.
    """
    clock = SystemClock()
    data = load().first(rows)
    folder = os.path.abspath(os.path.expanduser(folder))
    replaced = prepare_folder(folder, fresh=fresh)
    with Screen(clock, data.flights.num_rows, to_stderr=output == "json") as screen:
        screen.step(f"{'Replacing the earlier demo' if replaced else 'A new demo'} in {folder}")
        try:
            with ExitStack() as stack:
                summary = _Demo(folder, screen, stack, Pace.of(data.flights.num_rows)).run(data)
        except KeyboardInterrupt:
            screen.hide()
            screen.step(f"Stopped. What was written remains in {folder}")
            return _INTERRUPTED
        finally:
            screen.hide()
        write_marker(folder, summary)
        if output == "json":
            sys.stdout.write(json.dumps(summary, default=str) + "\n")
        if summary["violations"]:
            for violation in summary["violations"]:
                screen.console.print(f"[bold red]VIOLATED[/]  {violation}")
            return 1
        if output == "text":
            print_summary(screen.console, summary)
    return 0


class _Demo:
    """One run, from an empty folder to the summary. ``stack`` ends what it starts, in reverse, whatever happens."""

    def __init__(self, folder: str, screen: Screen, stack: ExitStack, pace: Pace) -> None:
        self._folder, self._screen, self._stack, self._pace = folder, screen, stack, pace
        self._clock = SystemClock()

    def run(self, data: DemoData) -> dict[str, Any]:
        """The summary; its ``violations`` are empty when all held."""
        con = self._stack.enter_context(connect(self._folder))
        feed = Feed(con, data, self._pace, self._clock, rounds=lambda: checker.rounds["nyc.flights"])
        checker = Checker(con, data, feed)
        self._screen.step("Starting Spark (local[2]) to tier into Iceberg, and a subscriber, each in its own process")
        spark = self._child(_SPARK_MODULE, [con.uri, *TABLES], "spark.log")
        rows, paced = data.flights.num_rows, self._pace.paced_rows
        subscriber = self._child(_SUBSCRIBER_MODULE, [con.uri, str(rows), str(paced)], "subscriber.log")
        subscriber.wait_for("ready", seconds=_READY_SECONDS)
        self._stack.callback(feed.stop)
        self._stack.callback(checker.stop)
        checker.check()  # Of empty tables; what loads when first needed is loaded before latencies count.
        self._screen.step(f"Sending {rows:,} flights in departure order; two writers keep nyc.flight_status up to date")
        feed.start()
        checker.start()
        self._watch(feed, checker, (spark, subscriber))
        checker.stop()
        checker.raise_error()
        if checker.violations:
            return self._failed(checker)
        return self._finish(con, data, feed, checker, spark, subscriber)

    def _child(self, module: str, arguments: list[str], log: str) -> Child:
        path = os.path.join(self._folder, log)
        return self._stack.enter_context(Child(module, arguments, log_path=path, clock=self._clock))

    def _watch(self, feed: Feed, checker: Checker, children: tuple[Child, ...]) -> None:
        """Show how it goes until all is written, or something is wrong."""
        while not feed.done.wait(_REFRESH_SECONDS) and not checker.violations:
            for child in children:
                child.raise_error()
            checker.raise_error()
            sent, rounds = feed.flights.sent, checker.rounds["nyc.flights"]
            lake = checker.seen[-1].lake if checker.seen else 0
            state = f"{lake:,} in the lake · lag {max(sent - lake, 0):,} · {rounds} rounds"
            self._screen.show(sent, f"{state} · {checker.passed} checks passed")
        self._screen.hide()
        feed.raise_error()

    def _finish(
        self, con: Connection, data: DemoData, feed: Feed, checker: Checker, spark: Child, subscriber: Child
    ) -> dict[str, Any]:
        spark.wait_for("ready", seconds=_READY_SECONDS)
        checker.check()
        rounds = dict(checker.rounds)
        checker.expect(
            rounds["nyc.flights"] >= self._pace.rounds_min,
            f"the tiering service committed {rounds['nyc.flights']} rounds of nyc.flights while data flowed, not"
            f" {self._pace.rounds_min}: see {os.path.join(self._folder, 'spark.log')}",
        )
        push = subscriber.wait_for("report", seconds=_REPORT_SECONDS)
        flights = data.flights.num_rows
        checker.expect(
            push["rows"] == push["distinct"] == flights and push["ordered"],
            f"the subscriber got {push['rows']:,} rows, {push['distinct']:,} of them distinct, in order:"
            f" {push['ordered']}; sent were {flights:,}",
        )
        self._screen.step("All is written. Comparing every table with a model, asking DuckDB and PySpark")
        checker.check_union()
        answers = ask_all(con, lambda query: self._ask(spark, query), lambda what: checker.expect(False, what))
        self._screen.step("Waiting until the rest is in the lake")
        self._wait_tiered(checker, spark)
        spark.close()
        checker.check_lake()
        if checker.violations:
            return self._failed(checker)
        if not self._screen.console.stderr:
            for answer in answers:
                print_answer(self._screen.console, answer)
        return self._summary(con, feed, checker, push=push, rounds=rounds, answers=answers)

    def _ask(self, spark: Child, query: str) -> pa.Table:
        spark.tell(sql=query)
        return decoded(spark.wait_for("answer", seconds=_ANSWER_SECONDS)["rows"])

    def _wait_tiered(self, checker: Checker, spark: Child) -> None:
        deadline = self._clock.monotonic() + _TIERED_SECONDS
        while left := checker.lag_rows():
            spark.raise_error()
            if self._clock.monotonic() > deadline:
                raise UnavailableError(
                    f"{left:,} rows were not tiered within {_TIERED_SECONDS:.0f} s: see"
                    f" {os.path.join(self._folder, 'spark.log')}"
                )
            self._clock.sleep(_REFRESH_SECONDS)

    def _failed(self, checker: Checker) -> dict[str, Any]:
        return {"ok": False, "folder": self._folder, "violations": checker.violations, "checks_passed": checker.passed}

    def _summary(
        self,
        con: Connection,
        feed: Feed,
        checker: Checker,
        *,
        push: dict[str, Any],
        rounds: dict[str, int],
        answers: list[Answer],
    ) -> dict[str, Any]:
        metadata = con.table("nyc.flights").lake.metadata_location
        lags = [s.union - s.lake for s in checker.seen]
        ages = [s.lag_seconds for s in checker.seen]
        return {
            "ok": True,
            "folder": self._folder,
            "violations": [],
            "checks_passed": checker.passed,
            "seconds": round(self._screen.seconds, 1),
            "tables": [_table_facts(con.table(name)) for name in TABLES],
            "rates": {name: round(rate) for name, rate in feed.rates.items()},
            "push": {key: push[key] for key in ("rows", "paced", "burst")},
            "rounds_while_flowing": rounds,
            "lag": {
                "rows_max": max(lags),
                "seconds_p50": round(statistics.median(ages), 1),
                "seconds_max": round(max(ages), 1),
            },
            "at_stream_end": dict(zip(("union", "lake"), feed.at_end, strict=True)),
            "questions": [
                {"title": a.title, "answered_by": list(a.answered_by), "rows": a.rows.to_pylist()} for a in answers
            ],
            "metadata_location": metadata,
            "open": {
                "pyiceberg": [
                    "from pyiceberg.table import StaticTable",
                    f'StaticTable.from_metadata("{metadata}").scan(limit=5).to_arrow()',
                ],
                "duckdb": ["INSTALL iceberg; LOAD iceberg;", f"SELECT count(*) FROM iceberg_scan('{metadata}');"],
            },
            "next": [
                f"export LAKEHEAD_URI={shlex.quote(_shown(self._folder))}",
                'lakehead sql "select carrier, count(*) n from nyc.flights group by carrier order by n desc"',
                "lakehead sql 'select committed_at, added_rows, total_files from nyc.flights$lake$snapshots'",
                "lakehead get nyc.planes N14228",
                "lakehead tail nyc.flights --start earliest",
                "lakehead status",
            ],
        }


def _table_facts(table: Table) -> dict[str, Any]:
    files = table.lake.files()
    deletes = {path for paths in files["delete_files"].to_pylist() for path in paths}
    return {
        "name": table.name,
        "union_rows": table.scan().count(),
        "lake_rows": table.scan(tier="lake").count(),
        "lake_snapshots": table.lake.snapshots().num_rows,
        "data_files": files.num_rows,
        "delete_files": len(deletes),
        "lake_bytes": int(pc.sum(files["bytes"]).as_py() or 0),
    }


def _shown(folder: str) -> str:
    """The folder as one would type it here."""
    relative = os.path.relpath(folder)
    return folder if relative.startswith("..") else os.path.join(".", relative)
