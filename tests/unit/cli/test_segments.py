"""`inspect segment`: whole files, damaged ones, and that nothing is touched."""

from __future__ import annotations

import json
from pathlib import Path

import crc32c
import pyarrow as pa
import pytest

from lakehead.cli import main as cli
from lakehead.cli.segments import read_segment
from lakehead.errors import InvalidFileError, UnsupportedFormatError
from lakehead.format.frame import HEADER_BYTES, WriterStamp, encode_body, encode_header

FRAMES, ROWS = 5, 10


def frame(base: int, sequence: int, compression: str = "none") -> bytes:
    """One frame of `ROWS` rows."""
    batch = pa.record_batch({"x": pa.array(range(ROWS), pa.int64())})
    body = encode_body(batch, schema_id=3, stamp=WriterStamp(b"w" * 16, sequence), compression=compression)
    header = encode_header(body, base_offset=base, timestamp_us=1_700_000_000_000_000 + base, synced_end=base, epoch=2)
    return header + body.buffer.to_pybytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A whole segment of offsets [100, 150)."""
    file = tmp_path / f"{100:020d}.log"
    file.write_bytes(b"".join(frame(100 + ROWS * i, i) for i in range(FRAMES)))
    return file


def test_a_whole_segment(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.stat()
    report = read_segment(str(path))
    assert (report.problems, report.unread_bytes) == ([], 0)
    assert (report.base_offset, report.end_offset, report.rows) == (100, 150, 50)
    assert report.bytes == sum(f.bytes for f in report.frames)
    third = report.frames[2]
    assert (third.base_offset, third.rows, third.schema_id, third.sequence, third.epoch) == (120, 10, 3, 2, 2)
    assert (third.writer_id, third.kind, third.checksum) == ((b"w" * 16).hex(), "append", "ok")
    assert third.timestamp.startswith("2023-11-14T22:13:20")
    path.chmod(0o400)
    assert cli.main(["inspect", "segment", str(path)]) == 0
    out = capsys.readouterr().out
    assert "5 frames, 50 rows, offsets [100, 150)" in out and "all checksums match" in out
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_long_segments_are_shortened_in_text_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "segment", str(path), "--limit", "1"]) == 0
    assert "3 frames between are not shown" in capsys.readouterr().out
    assert cli.main(["inspect", "segment", str(path), "--limit", "1", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["frames"]) == FRAMES


def test_a_bad_body_is_reported_and_stepped_over(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(path.read_bytes())
    at = len(frame(100, 0)) * 2
    data[at + len(frame(100, 0)) - 100] ^= 1
    path.write_bytes(data)
    assert cli.main(["inspect", "segment", str(path), "-o", "json"]) == 5
    out = capsys.readouterr()
    document = json.loads(out.out)
    assert [f["checksum"] for f in document["frames"]] == ["ok", "ok", "bad", "ok", "ok"]
    (problem,) = document["problems"]
    assert problem.startswith(f"at byte {at}, offset 120: the rows do not match their checksum")
    assert "restore the file" in problem
    assert json.loads(out.err)["error"]["kind"] == "CorruptionError"
    assert cli.main(["inspect", "segment", str(path)]) == 5
    out = capsys.readouterr()
    assert "bad" in out.out and out.err.startswith("error: ") and "is damaged: at byte" in out.err


def test_after_a_bad_header_the_next_frame_is_found(path: Path) -> None:
    data, size = bytearray(path.read_bytes()), len(frame(100, 0))
    data[2 * size + 20] ^= 1
    path.write_bytes(data)
    report = read_segment(str(path))
    assert [f.base_offset for f in report.frames] == [100, 110, 130, 140] and report.unread_bytes == size
    (problem,) = report.problems
    assert problem.startswith(f"at byte {2 * size}: {size} bytes form no frame")
    assert f"whole frames follow at byte {3 * size}" in problem and "restore the file" in problem


@pytest.mark.parametrize("kept", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100])
def test_a_torn_tail_is_explained(path: Path, kept: int) -> None:
    whole = len(frame(100, 0))
    path.write_bytes(path.read_bytes()[: 4 * whole + kept])
    report = read_segment(str(path))
    assert (len(report.frames), report.end_offset, report.unread_bytes) == (4, 140, kept)
    assert f"at byte {4 * whole}: the last {kept} bytes form no frame" in report.problems[0]
    assert "cut off" in report.problems[0] and "newest segment" in report.problems[0]


def test_a_tail_of_zeros_is_told_apart(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(4096))
    report = read_segment(str(path))
    assert report.unread_bytes == 4096 and "all zero" in report.problems[0] and len(report.frames) == FRAMES


def test_a_frame_of_an_earlier_start_is_reported(path: Path) -> None:
    data, size = path.read_bytes(), len(frame(100, 0))
    header = data[2 * size : 2 * size + 64]
    stale = header[:40] + (1).to_bytes(4, "little") + header[44:]
    stale = stale[:8] + crc32c.crc32c(stale[12:]).to_bytes(4, "little") + stale[12:]
    path.write_bytes(data[: 2 * size] + stale + data[2 * size + 64 :])
    (problem,) = read_segment(str(path)).problems
    assert problem.startswith(f"at byte {2 * size}: the frame was written by start 1 of a server, after start 2")


def test_offsets_must_follow_the_name_and_one_another(path: Path) -> None:
    path.write_bytes(frame(100, 0) + frame(120, 1))
    assert "but the frame before it ends at 110" in read_segment(str(path)).problems[0]
    renamed = path.rename(path.with_name(f"{7:020d}.log"))
    assert "but the file's name says 7" in read_segment(str(renamed)).problems[0]
    free = renamed.rename(path.with_name("copy.bin"))
    assert len(read_segment(str(free)).problems) == 1


def test_a_newer_format_is_said_to_be_one(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3:4] = b"9"
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError, match=r"at byte 0: .*upgrade"):
        read_segment(str(path))


def test_compressed_and_empty_segments(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(frame(100, 0, "lz4"))
    assert [f.compressed for f in read_segment(str(path)).frames] == [True]
    path.write_bytes(b"")
    assert cli.main(["inspect", "segment", str(path)]) == 0
    assert "0 bytes, 0 frames, 0 rows" in capsys.readouterr().out


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="No such file"):
        read_segment(str(tmp_path / "none.log"))
    with pytest.raises(InvalidFileError, match=r"name a \.log file in it"):
        read_segment(str(tmp_path))


def test_times_beyond_the_calendar_are_shown_as_numbers(path: Path) -> None:
    body = encode_body(pa.record_batch({"x": [1]}), schema_id=0, stamp=WriterStamp(bytes(16), 0))
    header = encode_header(body, base_offset=100, timestamp_us=2**62, synced_end=0, epoch=0)
    path.write_bytes(header + body.buffer.to_pybytes())
    report = read_segment(str(path))
    assert report.frames[0].timestamp == f"{2**62} µs" and not report.problems
