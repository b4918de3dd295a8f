"""The figures of `python -m benchmarks --only layers`: how old what the example shop shows is, in layers by Spark."""

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
_LAYERS = ("bronze", "silver", "gold")


def layers(base: str, batches: Sequence[pa.RecordBatch], seconds: int = 40) -> Iterator[Figure]:
    """What `make shop` measures, half of these seconds each way; its events are its own.

    Raises:
        RuntimeError: it failed, or found something else than what it sent.
    """
    command = [sys.executable, "-m", "examples.shop", "--json", "--seconds", str(seconds), "--folder", f"{base}/shop"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the shop failed: {(done.stdout.splitlines() or [''])[-1]}\n{done.stderr[-2000:]}")
    yield from of_shop(json.loads(done.stdout.splitlines()[-1]))


def of_shop(found: dict[str, Any]) -> Iterator[Figure]:
    """The figures of what `python -m examples.shop --json` prints."""
    for name, fresh in found["freshness"].items():
        for n, layer in enumerate(_LAYERS, 1):
            beside = f"a commit a minute in each layer {n} min"
            yield Figure(f"{name}: event → {layer}, p50 / p99", _times(fresh[layer]), beside)
        yield Figure(f"{name}: event → subscriber, p50 / p99", _times(fresh["subscriber"]), "no layer")


def _times(of: dict[str, Any]) -> str:
    return f"{of['p50_ms']:.1f} / {of['p99_ms']:.1f} ms"
