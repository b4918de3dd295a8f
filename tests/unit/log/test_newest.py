"""Frames from memory are those of the file, or none."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from lakehead.env.storage import LocalStorage
from lakehead.errors import OffsetOutOfRangeError
from lakehead.format.frame import Frame, WriterStamp, encode_body
from lakehead.log import LogTablet, newest
from lakehead.types import Schemas

SCHEMA = pa.schema([("k", pa.int64())])
SCHEMAS = Schemas.only(SCHEMA)


def said(frame: Frame) -> tuple[int, int, bytes]:
    return frame.base_offset, frame.timestamp_us, frame.body.buffer.to_pybytes()


@pytest.mark.parametrize("seed", range(5))
def test_latest_frames_are_those_of_the_file(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "_BYTES_MAX", 4000)
    r = random.Random(seed)
    log = LogTablet(LocalStorage(), str(tmp_path / "log"), segment_bytes=3000)
    sequence = from_memory = 0
    for _ in range(150):
        bodies = []
        for _ in range(r.choice([1, 1, 2, 20])):
            rows = pa.record_batch([pa.array(range(r.choice([0, 1, 1, 5, 400])))], schema=SCHEMA)
            bodies.append(encode_body(rows, schema_id=0, stamp=WriterStamp(bytes(16), sequence, sequence - 1)))
            sequence += 1
        frames = log.encode(bodies, sequence)
        log.append_frames(frames)
        if r.random() < 0.95:
            log.apply(frames)
        else:  # applied by others, of whom the log does not know
            log.state.apply(frames)
        log.advance_high_watermark()
        for _ in range(5):
            end = r.randint(max(0, log.high_watermark - 30), log.high_watermark)
            start = max(0, end - r.randint(1, 30))
            found = [r.frame for r in log.records(start, end, SCHEMAS)]
            from_memory += log._newest.between(start, end) is not None
            wanted = [f for f in log.frames(start, end) if f.body.row_count]
            assert [said(f) for f in found if f.body.row_count] == [said(f) for f in wanted]
    assert from_memory > 50
    log.abandon()
    assert log._newest.between(log.high_watermark, log.high_watermark) is None


def test_what_lies_below_the_log_is_refused(tmp_path: Path) -> None:
    log = LogTablet(LocalStorage(), str(tmp_path / "log"), segment_bytes=1 << 20)
    for n in range(3):
        rows = pa.record_batch([pa.array([n])], schema=SCHEMA)
        frames = log.encode([encode_body(rows, schema_id=0, stamp=WriterStamp(bytes(16), n, n - 1))], n)
        log.append_frames(frames)
        log.apply(frames)
        log.advance_high_watermark()
    assert len(list(log.records(1, 3, SCHEMAS))) == 2
    log.roll()
    log._segments = log._segments[1:]  # trimmed
    with pytest.raises(OffsetOutOfRangeError):
        log.records(1, 3, SCHEMAS)
    log.close()
