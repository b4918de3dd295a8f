"""A copy of a log is cut to what the log was, wherever that was, also among frames without rows."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from tests.log_writing import write

from lakehead.env import LocalStorage
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.log.checkpoint import write_checkpoint
from lakehead.log.cut import cut_log
from lakehead.log.tablet import LogTablet

SCHEMA = pa.schema([("n", pa.int64())])
WRITER = b"w" * 16


def add(log: LogTablet, sequence: int, rows: int) -> None:
    batch = pa.RecordBatch.from_pydict({"n": [sequence] * rows}, schema=SCHEMA)
    write(log, [encode_body(batch, schema_id=0, stamp=WriterStamp(WRITER, sequence, sequence - 1))], 5)


def opened(folder: Path, segment_bytes: int = 600) -> LogTablet:
    return LogTablet(LocalStorage(), str(folder), segment_bytes=segment_bytes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("torn", [False, True])
def test_it_is_what_the_log_was(tmp_path: Path, seed: int, torn: bool) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 0, 1, 30]) for _ in range(14)]
    log = opened(tmp_path / "log")
    ends = []
    for sequence, rows in enumerate(sizes):
        ends.append(log.log_end_offset)
        add(log, sequence, rows)
    log.close()
    ends.append(log.log_end_offset)
    (tmp_path / "log" / "stopped.json").unlink()
    newest = max((tmp_path / "log").glob("*.log"))
    if torn:
        with newest.open("ab") as f:
            f.write(newest.read_bytes()[:50] or b"x" * 50)
    for count, end in enumerate(ends):
        copy = tmp_path / f"copy{count}"
        shutil.copytree(tmp_path / "log", copy)
        assert cut_log(LocalStorage(), str(copy), end, lambda stamp, count=count: stamp.sequence >= count)  # type: ignore[misc]
        again = opened(copy)
        assert again.log_end_offset == end
        assert again.writers.last_sequence(WRITER, 1000) == (count - 1 if count else None)
        numbers = [n for f in again.frames(0, end) for n in f.body.rows(SCHEMA).column(0).to_pylist()]
        assert numbers == [s for s, rows in enumerate(sizes[:count]) for _ in range(rows)]
        add(again, count, 2)
        again.close()


def test_not_behind_a_checkpoint(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    for sequence in range(5):
        add(log, sequence, 10)
    log.sync()
    log.advance_high_watermark()
    log.install(write_checkpoint(LocalStorage(), str(tmp_path / "log"), log.take_checkpoint(0), SCHEMA, ()))
    add(log, 5, 10)
    log.close()
    (tmp_path / "log" / "stopped.json").unlink()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    assert not cut_log(LocalStorage(), str(tmp_path / "copy"), 40, lambda _: True)
    assert opened(tmp_path / "copy").log_end_offset == 60, "nothing was cut"
    shutil.copytree(tmp_path / "log", tmp_path / "other")
    assert cut_log(LocalStorage(), str(tmp_path / "other"), 50, lambda _: True)
    assert opened(tmp_path / "other").log_end_offset == 50
