"""Write docs/benchmarks.md and its pictures from benchmarks/results/full.json: `make bench-page`. It writes what
`scripts.performance_page` has, too.

The page holds what one run of `make bench PEERS=1` measured, no more. A test sees that it is what the results say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from lakehead.benchmarks.events import Figure
from lakehead.benchmarks.results import Results
from scripts import performance_page
from scripts.performance_page import escaped, machine_table

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
    "spark": "Spark",
    "tpch": "TPC-H",
    "layers": "Through three layers",
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
[Where the time of a call goes](performance.md) is told on a page of its own.

`sync` waits until the disk has what was written, `os` does not. `p50` is the median; one call in a hundred takes longer
than `p99`. A ratio says how a figure compares with what stands beside it: 1 is as good, 0.5 half as good, 2 twice as
good. Where less is better, the section says so.

{machine}
"""
_SAYS = {
    "embedded": """Beside appends: a Flight server on this machine that throws away what it is sent. Appends here need
no network, and are checked, numbered and written to the log.
""",
    "loopback": """Beside appends: the same Flight server as above.
""",
    "smallwrites": """A call for every ten rows, into one table; then questions about all of them. Beside a question:
the same rows in a table to which they came in few batches, or a statement that reads no table.
""",
    "fanout": """A row every 20 ms to so many subscribers of one table. Beside it: bare Flight streams which hand the
same row to as many readers, and do nothing else.
""",
    "lake": """Beside the round: PyArrow's write of the same rows as one Parquet file. Beside union reads, which see
lake and hot rows as one table: a read of the lake alone, with which the ratio compares.
""",
    "writers": """Threads that append one row a call and wait until it is on disk. Beside them: the same without that.
""",
    "tiering": """Ratios of large rounds are to a bare Parquet write, of small rounds and scans to what stands beside
them; that of two jobs says how many times the rounds of one job they do. **Less is better** for the ratios of lag (1 is
as old as the table's freshness allows), of the service's CPU (a core is 1) and of maintenance (the rounds' time is 1).
""",
    "growth": """![What grows with what](benchmarks-growth.svg)

The same work with more there already, mostly ten times as much. The picture says how many times the time it took: 1 is
no growth, and less is better. The table's ratios are the reverse: below 1 it took longer. Scans are told for a million
rows each, so that what a scan takes with any number of them weighs most with few. At last a server is given rows with
new keys, batch after batch: what it has in memory then, and which of these writes took longest.
""",
    "spark": """On `local[2]`. Beside reads, streams and writes: Spark with the same rows in plain Parquet files. Beside
the lookup join: Spark's own join with such files.
""",
    "tpch": """The 22 queries at scale 0.1 over keyed tables of which the log has half, and supersedes a tenth
of what the lake has. Beside them: the same engine on the same rows in plain Parquet files, whose answers are equal.
They are asked one after the other, twice, and the quicker run of a query counts. Tables are
copied, for DuckDB once reading them has taken as long, for Spark by the second statement, and what is written later is
applied to the copies: so it is told, too, what the first round took, and what both take where a row of each table is
written before each statement.
""",
    "layers": """The [example shop](guides/shop.md) at 10,000 events a second: generator, server, Spark on `local[2]`,
a live page and alerts share the machine. Event → layer is from the moment an application sends an event to the moment
its effect is seen there.
""",
    "peers": """![How many times as fast as each peer](benchmarks-peers.svg)

Ratios say how many times as fast as the peer Lakehead was; **below 1 the peer was faster**. M/s are millions of rows a
second. Rows are made ready for each before its time begins.

They do not do the same work. SQLite, DuckDB, RocksDB and Redis keep the newest values of a row, and no log of changes,
offsets, or subscribers; Lakehead logs every change. RocksDB and Redis are given opaque bytes, and give them back
undecoded; Lakehead and DuckDB take and give Arrow, SQLite takes and gives Python's values. All but Redis, which answers
over a Unix socket, run in the caller's process.

They do not promise the same, either. SQLite, RocksDB and Redis do not wait for the disk here, and stand beside Lakehead
when it does not. DuckDB syncs every commit, and so does PyIceberg's catalog: what is beside them says whether Lakehead
did. PyIceberg makes files and a snapshot of every append, Lakehead a record in its log, which the next round brings to
the lake; upserts into Iceberg include the round.
""",
}


def page(results: Results) -> dict[Path, str]:
    """What the files of the page have to say, by their places."""
    parts = [_HEAD.format(rows=results.rows, machine=machine_table(results).rstrip())]
    for part, title in _TITLES.items():
        if figures := results.figures.get(part):
            parts.append(f"## {title}\n")
            parts += [_SAYS[part]] if part in _SAYS else []
            parts.append(_table(figures))
    return {
        PAGE: "\n".join(parts),
        PAGE.with_name("benchmarks-peers.svg"): _bars(_of_peers(results.figures.get("peers", ())), more_is_better=True),
        PAGE.with_name("benchmarks-growth.svg"): _bars(
            _of_growth(results.figures.get("growth", ())), more_is_better=False
        ),
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


def _bars(values: Sequence[tuple[str, float]], *, more_is_better: bool) -> str:
    """Horizontal bars from 1, on a logarithmic scale; green is good."""
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
        colour = "#2a7" if value == 1 or (value > 1) == more_is_better else "#c63"
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escaped(name)}</text>')
        out.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{max(length, 1):.1f}" height="{row - 8}" fill="{colour}"/>')
        out.append(f'<text x="{max(middle, end) + 4:.1f}" y="{y + 14}">{value:.2f}</text>')
    out.append(f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="0" y2="{height}" stroke="#333"/>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    pages = page(Results.read(RESULTS)) | performance_page.page(Results.read(performance_page.RESULTS))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
