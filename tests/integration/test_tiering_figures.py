"""`lakehead bench --only tiering` on few rows: that each figure is measured, not what it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lakehead.benchmarks.events import event_batches
from lakehead.benchmarks.run import run_bench
from lakehead.benchmarks.tiering import half_updated
from lakehead.benchmarks.tiering_service import History, Sizes
from lakehead.errors import InvalidRequestError


def test_each_figure_of_tiering_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = Sizes(commits=4, loads=((1, 0.2), (2, 0.4)), seconds=0.6, idle=2, shared=2)
    assert run_bench(rows=2000, output="json", folder=str(tmp_path), only=["tiering"], sizes=sizes) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [f["name"] for f in figures] == [
        "round in process, a core, log table",
        "round in process, a core, keyed, 50 % updates",
        "small round at commit 4, maintained",
        "small round at commit 4, not maintained",
        "lake scan after 4 rounds, maintained",
        "lake scan after 4 rounds, not maintained",
        "lag of 1 table at 0.2 s, p50 / p99",
        "service's CPU, 1 table at 0.2 s",
        "lag of 2 tables at 0.4 s, p50 / p99",
        "service's CPU, 2 tables at 0.4 s",
        "CPU of a service with 2 idle tables",
        "2 tables with a backlog, two jobs",
    ]
    assert all(f["ratio"] is not None for f in figures)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"'tier' .*tiering, growth, spark, tiering-spark$"):
        run_bench(only=["tier"])


def test_half_of_the_keys_are_updates() -> None:
    ids = np.concatenate([b.column("event_id") for b in half_updated(event_batches(20_000), 50_000)])
    assert (ids < 20_000).sum() == 10_000
    assert len(set(ids)) == 20_000


def test_lag_is_the_age_of_the_oldest_row_that_the_lake_lacks() -> None:
    history = History()
    for at in (1.0, 2.0, 3.0):
        history.add(history.written, 10, at)
    history.add(history.tiered, 20, 3.5)
    history.add(history.tiered, 10, 5.0)
    assert history.lags(np.array([0.5, 1.5, 3.25, 3.5, 4.0, 5.0])).tolist() == [0.0, 0.5, 2.25, 0.5, 1.0, 0.0]
