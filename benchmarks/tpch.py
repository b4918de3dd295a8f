"""The figures of `python -m benchmarks --only tpch`: the 22 queries of TPC-H over tables of which half is hot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from lakehead.benchmarks.events import Figure

_ROOT = Path(__file__).parents[1]


def tpch(base: str, batches: Sequence[pa.RecordBatch], scale: float = 0.1, times: int = 2) -> Iterator[Figure]:
    """What `make tpch` measures, by DuckDB and by Spark; its rows are its own.

    Args:
        times: of these runs of all queries, the quickest of each query counts.

    Raises:
        RuntimeError: it failed, or a query found something else than in plain files.
    """
    told = ["--scale", str(scale), "--times", str(times), "--folder", base, "--spark", "--json"]
    command = [sys.executable, "-m", "tests.tpch", *told]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"TPC-H failed: {done.stderr[-2000:]}")
    yield from of_engines(json.loads(done.stdout.splitlines()[-1]))


def of_engines(found: dict[str, Any]) -> Iterator[Figure]:
    """The figures of what `python -m tests.tpch --json` prints."""
    for engine, took in found.items():
        union, plain, first = (sum(took[name]) for name in ("union", "plain", "first"))
        beside = f"plain Parquet {plain:.2f} s"
        yield Figure(f"22 queries by {engine}", f"{union:.2f} s", beside, plain / union)
        yield Figure(f"those asked first, by {engine}", f"{first:.2f} s", beside, plain / first)
        queries = enumerate(zip(took["union"], took["plain"], strict=True), 1)
        number, (own, other) = max(queries, key=lambda query: query[1][0] / query[1][1])
        name, said = f"that which loses most, by {engine}", f"query {number}, plain Parquet {other * 1e3:.0f} ms"
        yield Figure(name, f"{own * 1e3:.0f} ms", said, other / own)
