"""The measured parts of docs/performance.md, and its picture, from benchmarks/results/paths.json: `make bench-page`.

The prose is written by hand; between ``<!-- measured: name -->`` and ``<!-- end -->`` stands what one run of
`make paths` measured. A test sees that it is what the results say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.phases import KINDS, kinds
from benchmarks.probes import REST
from lakehead.benchmarks.events import Figure
from lakehead.benchmarks.results import Results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "paths.json"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = PAGE.with_name("performance-paths.svg")
_MACHINE = "machine"
_TABLES = {
    "append": ("append of ",),
    "upsert": ("upsert of ",),
    "keys": ("get of ", "lookup of "),
    "scan": ("scan of ",),
    "delivery": ("delivery of ",),
    "round": ("tiering round of ",),
    "union": ("union read of ",),
    "sql": ("SQL statement ",),
}
_MEASURED = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
_COLOURS = {
    "caller": "#48a",
    "wire": "#b8a",
    "server": "#2a7",
    "disk": "#c63",
    "lake": "#db4",
    "DuckDB": "#885",
    "rest": "#bbb",
}


@dataclass(frozen=True)
class _Path:
    """A path as it was measured: its time, its CPU, and its phases, the rest being the last."""

    whole: Figure
    cpu: Figure
    phases: dict[str, Figure]


def page(results: Results) -> dict[Path, str]:
    """What the files of the page have to say, by their places.

    Raises:
        ValueError: the page does not have each table once.
    """
    paths = _paths(results.figures["paths"])
    parts = {_MACHINE: machine_table(results)}
    parts |= {name: _table([p for p in paths if p.whole.name.startswith(of)]) for name, of in _TABLES.items()}
    text = PAGE.read_text(encoding="utf-8")
    if sorted(found := [m[2] for m in _MEASURED.finditer(text)]) != sorted(parts):
        raise ValueError(f"{PAGE.name} has the measured parts {found}, and there are {list(parts)}")
    text = _MEASURED.sub(lambda m: f"{m[1]}\n{parts[m[2]]}\n{m[3]}", text)
    return {PAGE: text, PICTURE: _bars(paths)}


def machine_table(results: Results) -> str:
    """What the results were measured on and with."""
    names = list(results.machine)
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join([*lines, "| " + " | ".join(results.machine[n] for n in names) + " |", ""])


def _paths(figures: Sequence[Figure]) -> list[_Path]:
    out: list[_Path] = []
    for f in figures:
        path, _, part = f.name.partition(": ")
        if not part:
            out.append(_Path(f, f, {}))
        elif part == "CPU":
            out[-1] = _Path(out[-1].whole, f, {})
        else:
            assert path == out[-1].whole.name
            out[-1].phases[part] = f
    return out


def _table(paths: Sequence[_Path]) -> str:
    """A column a path, a row a phase."""
    rows: list[str] = []
    for path in paths:
        at = 0
        for name in path.phases:  # one that is new goes after the one before it
            if name not in rows:
                rows.insert(at, name)
            at = rows.index(name) + 1
    rows.append(rows.pop(rows.index(REST)))
    lines = ["| | " + " | ".join(p.whole.name for p in paths) + " |", "|---" * (len(paths) + 1) + "|"]

    def add(name: str, cells: Sequence[str]) -> None:
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")

    add("**by the clock**", [f"**{p.whole.value}**" for p in paths])
    add("CPU", [p.cpu.value for p in paths])
    add("the part below, alone", [p.whole.beside for p in paths])
    for row in rows:
        found = [p.phases.get(row) for p in paths]
        add(row, ["" if f is None else f"{f.value} ({f.beside})" for f in found])
    add("the call when watched", [p.cpu.beside for p in paths])
    return "\n".join(lines) + "\n"


def _bars(paths: Sequence[_Path]) -> str:
    """For each path a bar of its phases by kind, all of one length, and its time."""
    kind_of = {**kinds(), REST: "rest"}
    width, left, right, row, top = 1040, 440, 80, 22, 48
    height = top + row * len(paths) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n, (kind, meaning) in enumerate(KINDS.items()):
        x, y = 8 + n % 4 * 250, 6 + n // 4 * 18
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 18}" y="{y + 10}">{escaped(meaning)}</text>')
    for n, path in enumerate(paths):
        x, y = float(left), top + n * row
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escaped(path.whole.name)}</text>')
        shares = {kind: 0.0 for kind in KINDS}
        for name, figure in path.phases.items():
            shares[kind_of[name]] += figure.ratio or 0.0
        for kind, share in shares.items():
            length = share * (width - left - right)
            if share:
                out.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="{row - 6}" fill="{_COLOURS[kind]}"/>'
                )
            x += length
        out.append(f'<text x="{width - right + 6}" y="{y + 14}">{escaped(path.whole.value)}</text>')
    return "\n".join([*out, "</svg>", ""])


def escaped(text: str) -> str:
    """Text as it stands in a picture."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
