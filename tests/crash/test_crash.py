"""A small sample of the crash suite; `make crash` plays all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.suite import Player, Step
from tests.crash.workload import Load

SAMPLE = [
    Step("server", "log-start.create.after"),
    Step("server", "segment.append.torn"),
    Step("server", "answer.Write"),
    Step("server", "checkpoint.append.torn"),
    Step("server", "segment.remove.before"),
    Step("recovery", "recovery.segment.truncate.before", "segment.append.torn"),
    Step("round", "lake.deletes.closed"),
    Step("round", "catalog.commit.after"),
    Step("asleep", "catalog.commit.before"),
    Step("stop", "stop-record.write.torn"),
    Step("churn", "folder.remove.half"),
]


@pytest.mark.xdist_group("crash")
def test_nothing_is_lost_or_doubled_by_kills_at_named_points(tmp_path: Path) -> None:
    player = Player(tmp_path, 1, lambda text: None)
    player.play(SAMPLE, Load(pause=0.03))
    assert not player.counts.missed
    assert player.counts.checks > len(SAMPLE) and player.counts.acknowledged > 0
