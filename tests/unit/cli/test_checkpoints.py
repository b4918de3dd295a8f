"""`inspect snapshot`: whole checkpoints, damaged ones, and that nothing is touched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lakehead.cli import main as cli
from lakehead.cli.checkpoints import read_snapshot
from lakehead.env.storage import LocalStorage
from lakehead.errors import InvalidFileError, UnsupportedFormatError
from lakehead.log.checkpoint import Footer, LiveBatch, write_checkpoint
from lakehead.log.writers import WriterState
from lakehead.types import TIMESTAMP_TYPE

SCHEMA = pa.schema([("x", pa.int64()), ("s", pa.string())])
TIME_US = 1_700_000_000_000_000


def live(offsets: list[int]) -> LiveBatch:
    rows = pa.RecordBatch.from_pydict({"x": offsets, "s": [str(o) for o in offsets]}, schema=SCHEMA)
    times = pa.array([TIME_US] * len(offsets), pa.int64()).cast(TIMESTAMP_TYPE)
    return LiveBatch(np.array(offsets, np.int64), times, rows)


def write(folder: Path, *offsets: int, at: int = 100) -> Path:
    writers = [WriterState(b"n" * 16, 3, 7, 6, [6, 0, 4, 7, 4, 9]), WriterState(b"a" * 16, 0, 1, -1, [])]
    made = write_checkpoint(
        LocalStorage(), str(folder), Footer(at, TIME_US, 2, 0, writers), SCHEMA, [live(list(offsets))]
    )
    return Path(made.path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A whole checkpoint at offset 100 with three rows and two writers."""
    return write(tmp_path, 3, 50, 99)


def test_a_whole_checkpoint(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.stat()
    path.chmod(0o400)
    report = read_snapshot(str(path))
    assert (report.problems, report.offset, report.rows, report.schema_id) == ([], 100, 3, 2)
    assert report.columns == ["x int64", "s string"] and report.timestamp == "2023-11-14T22:13:20.000+00:00"
    first, second = report.writers
    assert (first.writer_id, first.epoch, first.last_sequence, first.acked_through) == ((b"n" * 16).hex(), 3, 7, 6)
    assert (first.answers, second.answers) == (2, 0)
    assert cli.main(["inspect", "snapshot", str(path), "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "below offset 100" in out and "3 live rows of schema 2, 2 writers" in out and "the checksum matches" in out
    assert "1 more writers are not shown" in out
    assert cli.main(["inspect", "snapshot", str(path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 3
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_log_tablets_checkpoint_has_no_rows(tmp_path: Path) -> None:
    report = read_snapshot(str(write(tmp_path)))
    assert (report.rows, report.problems) == (0, [])


@pytest.mark.parametrize("trimmed", [False, True])
def test_damage_is_explained_with_what_to_do(path: Path, trimmed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if trimmed:
        (path.parent / f"{50:020d}.start").touch()
    whole = path.read_bytes()
    remedy = "restore the file from a backup" if trimmed else "remove this file"
    for data in (whole[:-1], whole[:30], b"", whole[:200] + b"\xff" + whole[201:], b"XXXX" + whole[4:]):
        path.write_bytes(data)
        (problem,) = read_snapshot(str(path)).problems
        assert problem.startswith("at byte 0: ") and remedy in problem
    assert cli.main(["inspect", "snapshot", str(path), "-o", "json"]) == 5
    out = capsys.readouterr()
    assert len(json.loads(out.out)["problems"]) == 1
    assert json.loads(out.err)["error"]["kind"] == "CorruptionError"
    assert cli.main(["inspect", "snapshot", str(path)]) == 5
    assert "problem at byte 0" in capsys.readouterr().out


def test_contents_are_checked_beyond_the_checksum(tmp_path: Path) -> None:
    for offsets in ((5, 4), (5, 5), (5, 100)):
        (problem,) = read_snapshot(str(write(tmp_path, *offsets))).problems
        assert "out of order" in problem
    renamed = write(tmp_path, 1).rename(tmp_path / f"{7:020d}.checkpoint")
    (problem,) = read_snapshot(str(renamed)).problems
    assert "the file's name says offset 7, its footer 100" in problem


def test_a_newer_format_is_said_to_be_one(path: Path) -> None:
    path.write_bytes(b"LHK9" + path.read_bytes()[4:])
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        read_snapshot(str(path))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="No such file"):
        read_snapshot(str(tmp_path / "none.checkpoint"))
    with pytest.raises(InvalidFileError, match=r"name a \.checkpoint file in it"):
        read_snapshot(str(tmp_path))
