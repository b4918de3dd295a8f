"""A small sample of the crash suite; `make crash` plays all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.history import LOG_SCHEMA, log_rows
from tests.crash.processes import Server
from tests.crash.suite import Player, Step
from tests.crash.workload import Load

import lakehead as lh

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
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_doubled_by_kills_at_named_points(tmp_path: Path) -> None:
    player = Player(tmp_path, 1, lambda text: None)
    player.play(SAMPLE, Load(pause=0.03))
    assert not player.counts.missed
    assert player.counts.checks > len(SAMPLE) and player.counts.acknowledged > 0


@pytest.mark.xdist_group("crash")
@pytest.mark.parametrize("point", ["folder.remove.half", "folder.remove.after"])
def test_a_drop_that_was_cut_off_leaves_all_of_a_table_or_nothing(tmp_path: Path, point: str) -> None:
    server = Server(tmp_path)
    server.start()
    with server.connect() as con:
        table = con.create_table("t", LOG_SCHEMA, partition_by="p")
        for n in range(9):
            table.append(log_rows(1, range(n, n + 1)))
        server.arm(point)
        with pytest.raises(lh.UnavailableError):
            con.drop_table("t")
    server.release()
    server.disarm()
    server.start()
    try:
        with server.connect() as con:
            counts = [con.table(name).scan().count() for name in con.tables()]
            assert counts in ([], [9])
    finally:
        server.kill()
