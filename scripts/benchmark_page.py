"""Write docs/benchmarks.md and its pictures from benchmarks/results/full.json: `make bench-page`.

The page holds what one run of `make bench PEERS=1` measured, no more. A test sees that it is what the results say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from lakehead.benchmarks.events import Figure
from lakehead.benchmarks.results import Results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "full.json"
PAGE = ROOT / "docs" / "benchmarks.md"
_TITLES = {
    "embedded": "In one process",
    "loopback": "Over loopback, to a server process",
    "smallwrites": "Small writes",
    "push": "From append to subscriber",
    "fanout": "Many subscribers",
    "lake": "The lake and the union read",
    "writers": "Many writers",
    "restart": "Restart after kill -9",
    "tiering": "Tiering",
    "growth": "Growth",
    "peers": "Beside peers",
}
_HEAD = """# Benchmarks

What `make bench PEERS=1` measured in one run on the machine below: {rows:,} events of eight columns (69 bytes of Arrow
each) unless a name says otherwise. `make bench-page` writes this page and its pictures from
[the results](../benchmarks/results/full.json). Machines differ, and one machine from minute to minute: compare ratios.

```console
$ make bench PEERS=1 ARGS="--save full.json"
$ lakehead bench --rows 200000 --only embedded --only lake --compare benchmarks/results/quick.json
```

`make bench-quick` does the second with more parts, and tells which ratios moved by half or more; it fails no build.

{machine}
"""
_PEERS = """![How many times as fast as each peer](benchmarks-peers.svg)

Rows are made ready for each before its time begins. What is unfair: SQLite, RocksDB and Redis keep the newest values
of a row, and no log of changes, offsets, or subscribers; RocksDB and Redis are given opaque bytes, and give them back
undecoded. Lakehead takes and gives Arrow and logs every change. It runs in the caller's process, as SQLite, DuckDB and
RocksDB do; Redis answers over a Unix socket. None of them waits for the disk here; PyIceberg always writes files, as
Lakehead's round does. A ratio below 1 says that the peer was faster.
"""
_GROWTH = """![What grows with what](benchmarks-growth.svg)

The same work with ten times as much there already. The picture says how many times the time it took: 1 is no growth.
"""


def page(results: Results) -> dict[Path, str]:
    """What the files of the page have to say, by their places."""
    names = [k for k in results.machine]
    machine = "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|\n"
    machine += "| " + " | ".join(results.machine[n] for n in names) + " |"
    parts = [_HEAD.format(rows=results.rows, machine=machine)]
    for part, title in _TITLES.items():
        if figures := results.figures.get(part):
            parts.append(f"## {title}\n")
            parts += [_PEERS] if part == "peers" else [_GROWTH] if part == "growth" else []
            parts.append(_table(figures))
    return {
        PAGE: "\n".join(parts),
        PAGE.with_name("benchmarks-peers.svg"): _bars(_of_peers(results.figures.get("peers", ()))),
        PAGE.with_name("benchmarks-growth.svg"): _bars(_of_growth(results.figures.get("growth", ()))),
    }


def _table(figures: Iterable[Figure]) -> str:
    lines = ["| figure | measured | beside | ratio |", "|---|---|---|---|"]
    for f in figures:
        ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
        lines.append(f"| {_cell(f.name)} | {_cell(f.value)} | {_cell(f.beside)} | {ratio} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _of_peers(figures: Iterable[Figure]) -> list[tuple[str, float]]:
    return [(f.name, f.ratio) for f in figures if f.ratio is not None]


def _of_growth(figures: Iterable[Figure]) -> list[tuple[str, float]]:
    return [(f.name, 1 / f.ratio) for f in figures if f.ratio]


def _bars(values: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars from 1, on a logarithmic scale."""
    width, left, right, row = 900, 430, 70, 22
    reach = max([abs(math.log10(v)) for _, v in values] or [1.0])
    middle = left + (width - left - right) * (0.5 if any(v < 1 for _, v in values) else 0.02)
    scale = (
        min(middle - left, width - right - middle) / reach if middle > left + 50 else (width - right - middle) / reach
    )
    height = row * len(values) + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n, (name, value) in enumerate(values):
        y = 8 + n * row
        end = middle + math.log10(value) * scale
        x, length = min(middle, end), abs(end - middle)
        colour = "#2a7" if value >= 1 else "#c63"
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{_escaped(name)}</text>')
        out.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{max(length, 1):.1f}" height="{row - 8}" fill="{colour}"/>')
        at, anchor = (end + 4, "start") if value >= 1 else (middle + 4, "start")
        out.append(f'<text x="{at:.1f}" y="{y + 14}" text-anchor="{anchor}">{value:.2f}</text>')
    out.append(f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="0" y2="{height}" stroke="#333"/>')
    return "\n".join([*out, "</svg>", ""])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    for path, text in page(Results.read(RESULTS)).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
