"""Rounds: where tasks run, what a broken log does, what is left behind."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lakehead.errors import LakeStateError
from lakehead.lake.round import run_round
from lakehead.types import TabletKey

TABLET = TabletKey("", 0)


def elsewhere(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Run tasks as another process would: everything is pickled on its way in and out."""
    sent = pickle.dumps((function, list(items)))
    there, tasks = pickle.loads(sent)
    results: list[Any] = pickle.loads(pickle.dumps([there(t) for t in tasks]))
    return results


def test_tasks_run_anywhere(keyed: Any) -> None:
    keyed.write(*range(20))
    keyed.write(*range(0, 20, 2), v=1)
    keyed.delete(3)
    result = run_round(keyed.table, keyed.desc, keyed.hot, map_tasks=elsewhere, rows_per_task=7)
    assert (result.rows, result.deletes) == (19, 0) and result.files > 3
    assert keyed.ids() == keyed.model_ids()


def test_an_old_log_start_stops_the_round(keyed: Any) -> None:
    keyed.write(1, 2, 3)
    keyed.hot.trim(TABLET, 1)
    with pytest.raises(LakeStateError):
        keyed.round()


def test_a_log_that_returns_too_little_stops_the_round(log: Any) -> None:
    log.write(*range(20))

    class Cut(type(log.hot)):  # type: ignore[misc]
        def read(self, tablet: TabletKey, start: int, end: int, columns: Sequence[str] | None = None) -> Any:
            return super().read(tablet, start, min(end, 15), columns)

    cut = Cut(log.desc)
    cut._logs = log.hot._logs
    with pytest.raises(LakeStateError, match="returned 5 records"):
        run_round(log.table, log.desc, cut, rows_per_task=10)
    assert log.data_files() == set() and log.load().metadata.snapshots == []


def test_a_named_round_lands_once(log: Any) -> None:
    log.write(1)
    first = log.round(round_id="r1")
    log.write(2)
    assert log.round(round_id="r1").snapshot_id == first.snapshot_id
    assert log.ids() == [1]
    log.round()
    assert log.ids() == [1, 2] and log.data_files() == log.used_files()
