"""Logs cut at any byte and damaged at any bit: what was synced is there or is refused by name, the torn tail is cut.

A tablet's folder is made once: several segments, named and anonymous writers, frames without rows, a checkpoint with
trimmed segments below it or none, a clean stop or none. Each case damages a copy and opens it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from tests.log_writing import write

from lakehead.cli.segments import read_segment
from lakehead.errors import CorruptionError, UnsupportedFormatError
from lakehead.format.frame import FrameBody, WriterStamp, encode_body
from lakehead.log.checkpoint import write_checkpoint
from lakehead.log.tablet import LogTablet
from lakehead.testing.storage import FaultyStorage

SCHEMA = pa.schema([("n", pa.int64())])
FOLDER = "/t/bucket-0"
SEGMENT_BYTES = 1200
EVERY_BIT = bool(os.environ.get("LAKEHEAD_EVERY_BIT"))
"""A long run: each bit of each file, where CI takes one bit of each byte."""


def body(writer: bytes, sequence: int, numbers: range, epoch: int = 0) -> FrameBody:
    batch = pa.RecordBatch.from_pydict({"n": list(numbers)}, schema=SCHEMA)
    return encode_body(batch, schema_id=0, stamp=WriterStamp(writer * 16, sequence, sequence - 1, sequence - 1, epoch))


@dataclass(frozen=True)
class Placed:
    """One frame where it lies."""

    path: str
    position: int
    end: int
    base_offset: int
    end_offset: int
    synced_end: int


class Made:
    """A log as it is on the disk, and what each of its frames says."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.frames = list(self._frames())

    def _frames(self) -> Iterator[Placed]:
        for path in sorted(p for p in self.files if p.endswith(".log")):
            data, at = self.files[path], 0
            while at < len(data):
                length = int.from_bytes(data[at + 4 : at + 8], "little")
                base, _, synced = (int.from_bytes(data[at + k : at + k + 8], "little") for k in (16, 24, 32))
                rows = int.from_bytes(data[at + 112 : at + 116], "little")
                yield Placed(path, at, at + length, base, base + rows, synced)
                at += length

    @property
    def last_path(self) -> str:
        return max(p for p in self.files if p.endswith(".log"))

    def storage(self, path: str = "", data: bytes = b"") -> FaultyStorage:
        """A disk with these files, one of them another."""
        made = FaultyStorage()
        made.make_folder(FOLDER)
        for name, content in {**self.files, **({path: data} if path else {})}.items():
            made.write_atomic(name, content)
        return made

    def frame_at(self, path: str, position: int) -> Placed:
        return next(f for f in self.frames if f.path == path and f.position <= position < f.end)


def make(*, stopped: bool, checkpoint: bool) -> Made:
    """Groups of frames, of which the last is not known to be synced by any other."""
    storage = FaultyStorage()
    log = LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
    sequences = {b"a": 0, b"b": 0, b"n": 0}
    groups = [[("a", 1)], [("b", 3), ("a", 0)], [("n", 2)], [("a", 5), ("b", 1), ("n", 0)], [("b", 7)], [("a", 2)]]
    groups += [[("n", 1), ("a", 40)], [("b", 2), ("n", 1), ("a", 3)]]
    for i, group in enumerate(groups):
        bodies = []
        at = log.log_end_offset
        for name, rows in group:
            writer = name.encode()
            bodies.append(body(writer, sequences[writer], range(at, at + rows), epoch=2 if name == "n" else 0))
            sequences[writer] += 1
            at += rows
        write(log, bodies, 100 + i)
        log.sync()
        if checkpoint and i == 2:
            log.install(write_checkpoint(storage, FOLDER, log.take_checkpoint(0), SCHEMA, ()))
            log.trim(log.checkpoint_offset)
    if stopped:
        log.close()
    names = storage.list_files(FOLDER)
    assert sum(n.endswith(".log") for n in names) > 2
    return Made({f"{FOLDER}/{n}": storage.read_file(f"{FOLDER}/{n}") or b"" for n in names})


@pytest.fixture(scope="module")
def stopped() -> Made:
    found = make(stopped=True, checkpoint=False)
    assert f"{FOLDER}/stopped.json" in found.files
    return found


@pytest.fixture(scope="module")
def checkpointed() -> Made:
    found = make(stopped=False, checkpoint=True)
    assert any(p.endswith(".checkpoint") for p in found.files)
    return found


@pytest.fixture(params=["killed", "stopped", "checkpointed"], scope="module")
def made(request: pytest.FixtureRequest) -> Made:
    if request.param == "killed":
        return make(stopped=False, checkpoint=False)
    found: Made = request.getfixturevalue(request.param)
    return found


def numbers(log: LogTablet) -> list[int]:
    frames = log.frames(log.log_start_offset, log.log_end_offset)
    return [n for f in frames for n in f.body.rows(SCHEMA).column(0).to_pylist()]


def check_whole(storage: FaultyStorage, end: int) -> None:
    """The log holds exactly the offsets up to ``end``, again after another crash, and is written on."""
    for _ in range(2):
        log = LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
        assert (log.log_end_offset, log.high_watermark) == (end, end)
        assert numbers(log) == list(range(log.log_start_offset, end))
        storage.crash()
    log = LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
    assert write(log, [body(b"x", 0, range(end, end + 2))], 1) == [(end, end + 2)]
    assert numbers(log)[-3:] == list(range(log.log_start_offset, end + 2))[-3:]


def test_a_log_is_whole_up_to_any_byte_of_its_last_group(made: Made) -> None:
    last = [f for f in made.frames if f.path == made.last_path]
    data = made.files[made.last_path]
    mark = max(f.synced_end for f in made.frames)
    first = next(f for f in last if f.base_offset >= mark)
    assert last.index(first) <= len(last) - 3, "the last group has several frames"
    stop = any(p.endswith("stopped.json") for p in made.files)
    for size in range(first.position, len(data)):
        kept = [f for f in last if f.end <= size]
        end = kept[-1].end_offset if kept else made.frames[made.frames.index(first) - 1].end_offset
        storage = made.storage(made.last_path, data[:size])
        if stop and end < last[-1].end_offset:
            with pytest.raises(CorruptionError, match=r"restore|cut off|checksum|bytes"):
                LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
        else:
            log = LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
            assert log.log_end_offset == end, size
            if size % 37 == 0 or size in (f.end for f in last):
                check_whole(storage, end)


def flips(data: bytes, every: int = 1) -> Iterator[tuple[int, bytes]]:
    """(position, data with one bit of that byte changed)."""
    for position in range(0, len(data), 1 if EVERY_BIT else every):
        for bit in range(8) if EVERY_BIT else [(position * 5 + position // 8) % 8]:
            yield position, data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def test_any_flipped_bit_of_a_segment_is_corruption_below_a_mark_and_a_torn_tail_above(made: Made) -> None:
    covered = max((int(os.path.basename(p)[:20]) for p in made.files if p.endswith(".checkpoint")), default=0)
    stop = max((f.end_offset for f in made.frames if any(p.endswith("stopped.json") for p in made.files)), default=0)
    refused = cut = 0
    for path in sorted(p for p in made.files if p.endswith(".log")):
        for position, data in flips(made.files[path], every=3):
            bad = made.frame_at(path, position)
            mark = max([covered, stop, *(f.synced_end for f in made.frames if f is not bad)])
            storage = made.storage(path, data)
            # Whoever flips the version in a frame's magic makes it one of a newer version, wherever it lies.
            newer = position == bad.position + 3
            if path != made.last_path or bad.base_offset < mark or newer:
                with pytest.raises(CorruptionError, match="upgrade" if newer else None) as caught:
                    numbers(LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES))
                assert caught.value.context == {"path": path, "position": bad.position} or newer, position
                assert path in str(caught.value) and f"at byte {bad.position}:" in str(caught.value)
                assert {n: storage.read_file(n) for n in made.files} == {**made.files, path: data}, "nothing changed"
                refused += 1
            else:
                log = LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
                assert log.log_end_offset == bad.base_offset
                assert numbers(log) == list(range(log.log_start_offset, bad.base_offset))
                cut += 1
    assert refused and (cut or stop)


def test_any_flipped_bit_is_shown_by_inspect(made: Made, tmp_path: Path) -> None:
    for path in sorted(p for p in made.files if p.endswith(".log")):
        file = tmp_path / os.path.basename(path)
        for position, data in flips(made.files[path], every=7):
            bad = made.frame_at(path, position)
            file.write_bytes(data)
            try:
                problems = read_segment(str(file)).problems
            except UnsupportedFormatError as e:
                assert position == bad.position + 3
                problems = [str(e)]
            assert len(problems) == 1 and f"at byte {bad.position}" in problems[0], (position, problems)


def test_damage_of_the_stop_file_is_refused_or_harmless(stopped: Made) -> None:
    made, path = stopped, f"{FOLDER}/stopped.json"
    end = made.frames[-1].end_offset
    cases = [data for _, data in flips(made.files[path])]
    cases += [made.files[path][:size] for size in range(len(made.files[path]))]
    for data in [*cases, b"[]", b'{"synced_end": "x"}', b'{"synced_end": null}', b'{"synced_end": 1e999}', b"\xff\xfe"]:
        storage = made.storage(path, data)
        try:
            log = LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
        except CorruptionError as e:
            assert FOLDER in str(e)
        else:
            assert numbers(log) == list(range(end))


def test_damage_of_a_checkpoint_is_refused_by_name(checkpointed: Made) -> None:
    made = checkpointed
    for path in (p for p in made.files if p.endswith(".checkpoint")):
        whole = made.files[path]
        cases = [data for _, data in flips(whole)] + [whole[:size] for size in range(len(whole))]
        for data in [*cases, whole + b"\0", b"LHK2" + whole[4:]]:
            with pytest.raises(CorruptionError, match=r"restore|upgrade") as caught:
                LogTablet(made.storage(path, data), FOLDER, segment_bytes=SEGMENT_BYTES)
            assert path in str(caught.value) and caught.value.context["path"] == path


def test_what_a_crash_left_half_made_is_no_obstacle(made: Made) -> None:
    storage = made.storage()
    end = made.frames[-1].end_offset
    left = [f"{end:020d}.checkpoint.tmp", f"{FOLDER}/{0:020d}.checkpoint.tmp".rsplit("/", 1)[1], "stopped.json.tmp"]
    for name in left:
        storage.write_atomic(f"{FOLDER}/{name}", b"half of somethi")
    check_whole(storage, end)
    assert not any(name.endswith(".tmp") for name in storage.list_files(FOLDER))


def test_a_missing_file_is_named(made: Made) -> None:
    for path in made.files:
        if path.endswith((".start", "stopped.json")) or path == made.last_path:
            continue
        storage = made.storage()
        storage.remove(path)
        with pytest.raises(CorruptionError, match="restore"):
            LogTablet(storage, FOLDER, segment_bytes=SEGMENT_BYTES)
