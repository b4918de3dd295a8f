"""`lakehead bench --only spark` on few rows: that each figure is measured, not what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_MEASURE = """
import json, sys
from lakehead.benchmarks.events import event_batches
from lakehead.benchmarks.spark import on_spark
print(json.dumps([(f.name, f.ratio) for f in on_spark(sys.argv[1], event_batches(20_000), sent=10, times=1)]))
"""


def test_each_figure_of_spark_is_measured(tmp_path: Path) -> None:
    # A process of its own: the session that it ends is not that of other tests.
    done = subprocess.run([sys.executable, "-c", _MEASURE, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    told = [ratio is not None for _, ratio in figures]
    assert told == [False, *[True] * 14, False, True]
    assert len({name for name, _ in figures}) == len(figures)
