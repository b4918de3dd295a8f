"""Seeds that end in 9 have what they are for: copies that are opened, and second owners, whom writers turn to."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from tests.simulation.run import RARE_EVERY, simulate

SEEDS_MAX = 20
WANTED = {"lock removed", "leaves the first owner", "gone"}


def test_folders_are_copied_and_opened_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="lakehead")  # code that meets faults all the time warns all the time
    counts: Counter[str] = Counter()
    for seed in range(9, SEEDS_MAX * RARE_EVERY, RARE_EVERY):
        outcome = simulate(seed)
        assert outcome.failure is None, f"seed {seed}: {outcome.failure}"
        counts.update(outcome.counts)
        if counts.keys() >= WANTED:
            return
    raise AssertionError(f"in {SEEDS_MAX} seeds there is only {dict(counts)}")
