"""What the demo shows while it runs, and the summary that it closes with."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from lakehead.demo.questions import Answer
from lakehead.env import Clock

_LINE_SECONDS = 5.0
_PLAIN_WIDTH = 100


class Screen:
    """Steps and progress: a bar on a terminal, a line every few seconds elsewhere. A context manager.

    Args:
        to_stderr: leave standard output to the result.
    """

    def __init__(self, clock: Clock, total: int, *, to_stderr: bool) -> None:
        self.console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = _PLAIN_WIDTH
        self._clock, self._total = clock, total
        self._start = clock.monotonic()
        self._next_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("[bold]{task.completed:,.0f}[/] of {task.total:,.0f} flights"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None

    @property
    def seconds(self) -> float:
        """Since the demo began."""
        return self._clock.monotonic() - self._start

    def step(self, text: str) -> None:
        """Say what happens now."""
        self.console.print(f"[dim]{self.seconds:5.1f} s[/]  {text}")

    def show(self, sent: int, state: str) -> None:
        """Say how far the stream is; as often as one likes."""
        if self.console.is_terminal:
            if self._task is None:
                self._progress.start()
                self._task = self._progress.add_task("  stream", total=self._total, state="")
            self._progress.update(self._task, completed=sent, state=state)
        elif self.seconds >= self._next_line:
            self._next_line = self.seconds + _LINE_SECONDS
            self.step(f"{sent:,} of {self._total:,} flights sent · {state}")

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()

    def hide(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._progress.stop()
            self._task = None


def print_answer(console: Console, answer: Answer) -> None:
    """A question with its answer as a small table."""
    console.print()
    table = _table(answer.title, caption=" = ".join(answer.answered_by))
    numeric = [pa.types.is_integer(f.type) or pa.types.is_floating(f.type) for f in answer.rows.schema]
    for name, right in zip(answer.rows.column_names, numeric, strict=True):
        table.add_column(name.replace("_", " "), justify="right" if right else "left")
    for row in answer.rows.to_pylist():
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The closing summary, from the same values that the JSON output has."""
    console.print()
    table = _table("Tables")
    for name in ("table", "rows", "lake", "snapshots", "files", "deletes", "MB"):
        table.add_column(name, justify="left" if name == "table" else "right", no_wrap=True)
    for t in summary["tables"]:
        counts = (t[k] for k in ("union_rows", "lake_rows", "lake_snapshots", "data_files", "delete_files"))
        table.add_row(t["name"], *(f"{n:,}" for n in counts), f"{t['lake_bytes'] / 1e6:.2f}")
    console.print(table)
    console.print()
    for name, text in _facts(summary):
        console.print(f"[bold]{name:<10}[/] {text}")
    console.print()
    for title, lines in (
        ("Open the lake table with PyIceberg", summary["open"]["pyiceberg"]),
        ("or with DuckDB", summary["open"]["duckdb"]),
        ("What to try next", summary["next"]),
    ):
        console.print(f"[bold]{title}[/]")
        for line in lines:
            console.print(f"  {line}", markup=False)
        console.print()
    console.print(f"[bold green]All {summary['checks_passed']} checks passed[/] in {summary['seconds']:.0f} s.")


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rates, push, lag = summary["rates"], summary["push"], summary["lag"]
    flowing, end = summary["rounds_while_flowing"], summary["at_stream_end"]
    lines = [
        ("Stream", f"{rates['paced']:,} flights/s at the demo's pace, then {rates['burst']:,}/s as fast as it goes"),
        ("Updates", f"{rates['departures']:,} departures/s beside {rates['arrivals']:,} arrivals/s, while writing"),
    ]
    for phase, text in (("paced", "at the demo's pace"), ("burst", "in the burst")):
        if push[phase]:
            latency = f"p50 {push[phase]['p50_ms']:.1f} ms, p99 {push[phase]['p99_ms']:.1f} ms"
            lines.append(("Push", f"{latency} from append to the subscriber's process, {text}"))
    ages = f"oldest {lag['seconds_p50']:.1f} s (median), {lag['seconds_max']:.1f} s (longest: Spark starting)"
    return [
        *lines,
        (
            "Rounds",
            f"{flowing['nyc.flights']} of flights, {flowing['nyc.flight_status']} of flight_status, as data flowed",
        ),
        ("Lake lag", f"at most {lag['rows_max']:,} flights; {ages}"),
        ("At the end", f"of the stream: {end['union']:,} flights in the union read, {end['lake']:,} in the lake alone"),
        ("Metadata", summary["metadata_location"]),
        ("Folder", summary["folder"]),
    ]


def _table(title: str, caption: str | None = None) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left", title_style="bold")


def _text(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
