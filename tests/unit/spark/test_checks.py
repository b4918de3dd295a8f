"""What sessions are told of executors that lack something, before anything relies on them."""

from __future__ import annotations

import itertools
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lakehead as lh
from lakehead.spark import checks

_numbers = itertools.count()


def session(master: str = "spark://box:7077", python: str = "python3-elsewhere", executors: int = 2) -> Any:
    memory = SimpleNamespace(size=lambda: executors + 1)
    jsc = SimpleNamespace(sc=lambda: SimpleNamespace(getExecutorMemoryStatus=lambda: memory))
    context = SimpleNamespace(
        master=master,
        pythonExec=python,
        applicationId=f"app-{next(_numbers)}",
        environment={},
        _jsc=jsc,
        _python_includes=[],
    )
    return SimpleNamespace(sparkContext=context)


def connection(uri: str = "lakehead://box:9123", token: str | None = None) -> Any:
    return SimpleNamespace(uri=uri, tables=list, _given=(token, None))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each task of the next jobs ends with; the sizes of those that were run."""
    ends: list[Any] = []
    ran: list[Any] = [ends]

    def run_job(spark: Any, name: str, function: Any, items: list[str], slices: int) -> list[Any]:
        ran.append(len(items))
        return ends or [(None, None)] * slices

    monkeypatch.setattr(checks, "run_job", run_job)
    return ran


def test_executors_are_looked_at_once_for_each_address_and_token(jobs: list[Any]) -> None:
    spark = session()
    for _ in range(2):
        checks.require_executors(spark, connection())
        checks.require_executors(spark, connection("lakehead://box:9124"))
    checks.require_executors(session(executors=0), connection())
    checks.require_executors(session(executors=99), connection())
    assert jobs[1:] == [2, 2, 1, checks.TASKS_MAX]
    for _ in range(2):
        checks.require_executors(spark, connection(token="another"))
    assert jobs[1:] == [2, 2, 1, checks.TASKS_MAX, 2]


def test_the_drivers_own_python_on_its_machine_is_not(jobs: list[Any]) -> None:

    for master in ("local[2]", "local-cluster[1,1,1024]"):
        checks.require_executors(session(master, sys.executable), connection())
    assert jobs[1:] == []
    checks.require_executors(session("local[2]", executors=0), connection())
    assert jobs[1:] == [1]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (lh.AuthenticationError("wrong token"), lh.AuthenticationError, "give it token= (wrong token)"),
        (lh.UnavailableError("nobody answers"), lh.InvalidRequestError, "do not reach lakehead://box:9123"),
        (lh.PermissionDeniedError("usage"), lh.PermissionDeniedError, "usage"),
    ],
)
def test_what_a_task_met_is_told(jobs: list[Any], error: lh.LakeheadError, kind: type, says: str) -> None:
    jobs[0][:] = [(None, None), (None, error)]
    spark = session()
    with pytest.raises(kind) as told:
        checks.require_executors(spark, connection())
    assert type(told.value) is kind and says in str(told.value)
    jobs[0].clear()
    checks.require_executors(spark, connection())


def test_a_server_that_is_away_is_told_of_as_such(jobs: list[Any]) -> None:
    def away() -> list[str]:
        raise lh.UnavailableError("away")

    jobs[0][:] = [(None, lh.UnavailableError("nobody answers"))]
    con = connection()
    con.tables = away
    with pytest.raises(lh.UnavailableError, match="away"):
        checks.require_executors(session(), con)


def test_what_plans_on_the_driver_is_looked_at(tmp_path: Path) -> None:

    checks.require_planner(session(python=sys.executable))
    with pytest.raises(lh.MissingDependencyError, match="is not there on this machine") as told:
        checks.require_planner(session(python="./environment/bin/python3"))
    assert told.value.context["python"] == "./environment/bin/python3"
    venv.create(tmp_path / "bare", symlinks=True)
    with pytest.raises(lh.MissingDependencyError, match="has no module '"):
        checks.require_planner(session(python=str(tmp_path / "bare/bin/python3")))
