"""A small sample of the crash suite; `make crash` plays all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.deployment import PATIENCE_SECONDS
from tests.crash.history import LOG_SCHEMA, log_rows
from tests.crash.processes import Server, wait_until
from tests.crash.suite import Player, Step
from tests.crash.workload import Load

import lakehead as lh
from lakehead.client import patience


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", PATIENCE_SECONDS)


SAMPLE = [
    Step("server", "segment.append.torn"),
    Step("recovery", "recovery.segment.truncate.before", "segment.append.torn"),
    Step("round", "catalog.commit.after"),
    Step("maintenance", "compact.catalog.commit.before"),
    Step("stop", "stop-record.write.torn"),
    Step("alter", "tablet.alter.after"),
    Step("truncate", "command.TruncateTable.after"),
    Step("publish", "segment.append.after"),
    Step("overwrite", "tablet.truncate.after"),
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


def killed_at(command: list[str], folder: Path, files: int) -> None:
    """Run a command and kill it once it has written so many files, if it takes that long."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def far_enough() -> bool:
        return child.poll() is not None or sum(p.is_file() for p in folder.rglob("*")) >= files

    try:
        assert wait_until(far_enough, 120)
    finally:
        child.kill()
        child.wait()


@pytest.mark.xdist_group("crash")
@pytest.mark.timeout(600)
def test_backups_that_are_killed_are_made_again_and_restored(tmp_path: Path) -> None:
    server, backup, restored = Server(tmp_path), tmp_path / "backup", tmp_path / "restored"
    server.start()
    with server.connect() as con:
        table = con.create_table("t", LOG_SCHEMA, partition_by="p", lake="iceberg")
        for n in range(0, 90, 30):
            table.append(log_rows(1, range(n, n + 30)))
            con.tier("t")
        table.append(log_rows(1, range(90, 120)))
    lakehead = [sys.executable, "-m", "lakehead.cli.main"]
    save = [*lakehead, "--uri", str(server.folder), "backup", str(backup)]
    for files in (1, 6):
        killed_at(save, backup, files)
    if not (backup / "backup.json").exists():
        subprocess.run(save, check=True, stdout=subprocess.DEVNULL, timeout=120)
    server.kill()
    back = [*lakehead, "restore", str(backup), str(restored)]
    killed_at(back, tmp_path / "restored.restoring", 4)
    if not restored.exists():
        subprocess.run(back, check=True, stdout=subprocess.DEVNULL, timeout=120)
    expected = list(range(120))
    for folder in (restored, server.folder):
        with lh.connect(folder) as con:
            table = con.table("t")
            assert sorted(table.scan(["n"]).to_arrow()["n"].to_pylist()) == expected
            assert con.tier("t").rows == 30
            assert sorted(table.scan(["n"], tier="lake").to_arrow()["n"].to_pylist()) == expected
