"""Short simulations of a whole deployment: each seed another history of crashes and faults, in which all must hold."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.simulation.__main__ import main, report
from tests.simulation.run import simulate

ROOT = Path(__file__).parents[2]
SEEDS = 28
SEEDS_PER_TEST = 14


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Code that meets faults all the time warns all the time."""
    logger = logging.getLogger("lakehead")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_all_holds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        outcome = simulate(seed)
        if outcome.failure is not None:
            report(outcome)
            pytest.fail(f"seed {seed}: {outcome.failure}")


def test_a_seed_has_one_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["7"]) == 0
    here = capsys.readouterr().out
    env = {**os.environ, "PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-m", "tests.simulation", "7"]
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout == here
    assert main(["8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] != here.splitlines()[-1]
