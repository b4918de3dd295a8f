"""Checkpoints and trimming of a log: what they keep, and that a crash at any step of them loses nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from tests.log_writing import write

from lakehead.errors import ChecksumError, CorruptionError, OffsetOutOfRangeError, StorageError, UnsupportedFormatError
from lakehead.format.frame import FrameBody, WriterStamp, encode_body
from lakehead.log import checkpoint as checkpoints
from lakehead.log.checkpoint import USUAL_CHECKPOINTS, Checkpoint, CheckpointPolicy, live_at, write_checkpoint
from lakehead.log.tablet import LogTablet
from lakehead.testing.storage import FaultyStorage
from lakehead.types import Schemas

SCHEMA = pa.schema([("n", pa.int64())])
FOLDER = "/t/bucket-0"
WRITER = b"w" * 16


def open_log(
    storage: FaultyStorage, segment_bytes: int = 1000, policy: CheckpointPolicy = USUAL_CHECKPOINTS
) -> LogTablet:
    return LogTablet(storage, FOLDER, segment_bytes=segment_bytes, checkpoint_policy=policy)


def body(sequence: int, numbers: list[int], writer: bytes = WRITER, epoch: int = 0) -> FrameBody:
    batch = pa.RecordBatch.from_pydict({"n": numbers}, schema=SCHEMA)
    return encode_body(batch, schema_id=0, stamp=WriterStamp(writer, sequence, sequence - 1, sequence - 1, epoch))


def append(log: LogTablet, first: int, count: int, rows: int = 10, at: int = 5) -> None:
    """Batches ``first`` to ``first + count`` whose rows equal their offsets."""
    for sequence in range(first, first + count):
        end = log.log_end_offset
        write(log, [body(sequence, list(range(end, end + rows)))], at)
    log.sync()
    log.advance_high_watermark()


def checkpoint(log: LogTablet, storage: FaultyStorage) -> None:
    log.install(write_checkpoint(storage, FOLDER, log.take_checkpoint(0), SCHEMA, ()))


def numbers(log: LogTablet) -> list[int]:
    frames = log.frames(log.log_start_offset, log.log_end_offset)
    return [n for f in frames for n in f.body.rows(SCHEMA).column(0).to_pylist()]


def test_nothing_is_trimmed_beyond_the_checkpoint() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 10)
    assert log.trim(100) == 0
    checkpoint(log, storage)
    append(log, 10, 10)
    assert log.trim(45) == max(
        int(n[:20]) for n in storage.list_files(FOLDER) if n.endswith(".log") and int(n[:20]) <= 45
    )
    assert log.trim(200) == 100 and numbers(log) == list(range(100, 200))
    with pytest.raises(OffsetOutOfRangeError, match="begins at 100"):
        log.frames(99, 110)


def test_a_trim_of_nothing_touches_no_file() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 20)
    checkpoint(log, storage)
    before = storage.list_files(FOLDER)
    assert log.trim(0) == 0 and storage.list_files(FOLDER) == before
    assert log.trim(200) == 200
    before = storage.list_files(FOLDER)
    assert log.trim(200) == 200 and storage.list_files(FOLDER) == before


def test_the_last_segment_is_left_once_it_began_long_ago() -> None:
    storage = FaultyStorage()
    log = open_log(storage, segment_bytes=1 << 20)
    assert not log.began_until(100)
    append(log, 0, 1, at=10)
    append(log, 1, 1, at=20)
    assert not log.began_until(9) and log.began_until(10)
    log.roll()
    assert [s.base_offset for s in log.view().segments] == [0, 20]
    assert not log.began_until(100)
    log.roll()
    assert len(log.view().segments) == 2


def test_a_checkpoint_that_a_crash_left_beside_a_newer_one_goes_at_the_next_start() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    for first in (0, 5):
        append(log, first, 5)
        write_checkpoint(storage, FOLDER, log.take_checkpoint(0), SCHEMA, ())
    assert len([n for n in storage.list_files(FOLDER) if n.endswith(".checkpoint")]) == 2
    log.abandon()
    assert open_log(storage).checkpoint_offset == 100
    assert [n for n in storage.list_files(FOLDER) if n.endswith(".checkpoint")] == [f"{100:020d}.checkpoint"]


def test_what_readers_hold_stays_readable() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 30)
    view = log.view()
    reading = log.frames(0, 300)
    next(reading)
    checkpoint(log, storage)
    assert log.trim(300) == 300
    assert sum(f.body.row_count for f in reading) == 290
    assert sum(f.body.row_count for f in view.frames(0, 300)) == 300


class InstalledWhileLooked(LogTablet):
    """A log where something happens after a reader has looked at the checkpoint, and before he looks at segments."""

    between: Callable[[], None] | None = None
    _checkpoint: Checkpoint | None = None

    @property  # type: ignore[override]
    def checkpoint(self) -> Checkpoint | None:
        found, between, self.between = self._checkpoint, self.between, None
        if between is not None:
            between()
        return found

    @checkpoint.setter
    def checkpoint(self, made: Checkpoint | None) -> None:
        self._checkpoint = made


def test_a_view_has_no_hole_between_its_checkpoint_and_its_segments() -> None:
    storage = FaultyStorage()
    log = InstalledWhileLooked(storage, FOLDER, segment_bytes=1000)
    append(log, 0, 10)

    def install_and_trim() -> None:
        checkpoint(log, storage)
        log.trim(100)

    log.between = install_and_trim
    view = log.view()
    covered = 0 if view.checkpoint is None else view.checkpoint.offset
    assert view.log_start_offset <= covered == 100


def test_state_survives_restart_and_trimming() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    write(log, [body(0, [], b"n" * 16, epoch=4)], 1)
    append(log, 0, 20, at=70)
    state = log.writers.state()
    checkpoint(log, storage)
    log.trim(200)
    assert [n for n in storage.list_files(FOLDER) if "0" * 20 in n and not n.endswith(".start")] == []
    storage.crash()
    log = open_log(storage)
    assert (log.log_start_offset, log.log_end_offset, log.last_timestamp_us) == (200, 200, 70)
    assert log.writers.state() == state
    assert log.writers.answer(WriterStamp(WRITER, 19, 18)) == (190, 200)
    append(log, 20, 2, at=1)
    assert log.last_timestamp_us == 70, "commit times never go back"
    storage.crash()
    log = open_log(storage)
    assert numbers(log) == list(range(200, 220))


def test_a_batch_without_rows_at_the_boundary_is_still_known() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 3)
    footer = log.take_checkpoint(0)
    write(log, [body(3, [])], 5)
    log.sync()
    log.install(write_checkpoint(storage, FOLDER, footer, SCHEMA, ()))
    assert log.trim(30) == 30
    for _ in range(2):
        assert log.writers.answer(WriterStamp(WRITER, 3, 2)) == (30, 30)
        storage.crash()
        log = open_log(storage)
    append(log, 4, 1)


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "process killed"])
def test_a_crash_at_any_step_loses_nothing(power: bool) -> None:
    step = 0
    while True:
        storage = FaultyStorage()
        log = open_log(storage)
        append(log, 0, 20)
        checkpoint(log, storage)
        append(log, 20, 20)
        before = log.writers.state()
        left = step

        def fail(action: str, path: str) -> None:
            nonlocal left
            left -= action != "read"
            if left < 0:
                raise OSError(errno.EIO, "killed here")

        storage.before = fail
        try:
            checkpoint(log, storage)
            log.trim(400)
            done = True
        except StorageError:
            done = False
        storage.before = None
        if power:
            storage.crash()
        log = open_log(storage)
        start = log.log_start_offset
        assert log.log_end_offset == 400 and numbers(log) == list(range(start, 400))
        assert log.writers.state() == before
        assert not [n for n in storage.list_files(FOLDER) if n.endswith(".tmp")]
        checkpoint(log, storage)
        assert log.trim(400) == 400 and len(storage.list_files(FOLDER)) == 3, storage.list_files(FOLDER)
        if done:
            assert step > 5
            return
        step += 1


def test_a_full_disk_leaves_nothing_behind() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 5)
    footer = log.take_checkpoint(0)
    storage.full = True
    with pytest.raises(StorageError, match="disk is full"):
        write_checkpoint(storage, FOLDER, footer, SCHEMA, ())
    storage.full = False
    assert not [n for n in storage.list_files(FOLDER) if "checkpoint" in n]
    checkpoint(log, storage)
    storage.full = True
    assert log.trim(50) == 50, "trimming needs no room"


def test_a_large_checkpoint_goes_to_disk_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the syncs of writers wait for all of it."""
    monkeypatch.setattr(checkpoints, "_SYNC_BYTES", 2000)
    monkeypatch.setattr(checkpoints, "_BATCH_ROWS", 100)
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 5)
    footer = log.take_checkpoint(0)
    made, synced, at_once = f"{FOLDER}/{checkpoints.checkpoint_name(footer.offset)}.tmp", 0, []

    def step(action: str, path: str) -> None:
        nonlocal synced
        if path == made:
            size = storage.open_log(path).size
            at_once.append(size - synced)
            synced = size if action == "sync" else synced

    storage.before = step
    n = np.arange(100)
    rows = pa.RecordBatch.from_arrays([pa.array(n)], schema=SCHEMA)
    times = pa.array(n, checkpoints.TIMESTAMP_TYPE)
    live = [checkpoints.LiveBatch(n + at, times, rows) for at in range(0, 1000, 100)]
    storage_rows = write_checkpoint(storage, FOLDER, footer, SCHEMA, live).footer.rows
    assert storage_rows == 1000
    assert sum(at_once) > 20_000 and max(at_once) < 6000


@pytest.mark.parametrize("position", [0, 3, 8, 60, -1, -9, -13, -30])
def test_damage_to_a_checkpoint_is_named(position: int) -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 5)
    checkpoint(log, storage)
    [name] = [n for n in storage.list_files(FOLDER) if n.endswith(".checkpoint")]
    path = f"{FOLDER}/{name}"
    size = len(storage.read_file(path) or b"")
    storage.flip_bit(path, position % size)
    with pytest.raises((ChecksumError, UnsupportedFormatError)) as e:
        open_log(storage)
    assert e.value.context["path"] == path


@pytest.mark.parametrize("gone", [".log", ".checkpoint"])
def test_a_missing_file_is_noticed(gone: str) -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 20)
    checkpoint(log, storage)
    log.trim(200)
    append(log, 20, 1)
    log.close()
    for name in storage.list_files(FOLDER):
        if name.endswith(gone):
            storage.remove(f"{FOLDER}/{name}")
    with pytest.raises(CorruptionError, match="restore"):
        open_log(storage)


def test_a_newer_checkpoint_format_is_refused() -> None:
    storage = FaultyStorage()
    checkpoint(open_log(storage), storage)
    [name] = [n for n in storage.list_files(FOLDER) if n.endswith(".checkpoint")]
    data = storage.read_file(f"{FOLDER}/{name}") or b""
    storage.write_atomic(f"{FOLDER}/{name}", b"LHK2" + data[4:])
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        open_log(storage)


def test_a_damaged_segment_below_the_checkpoint_is_noticed_when_it_is_read() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 30)
    checkpoint(log, storage)
    log.close()
    path = next(f"{FOLDER}/{n}" for n in storage.list_files(FOLDER) if n.endswith(".log"))
    storage.flip_bit(path, 500)
    log = open_log(storage)
    with pytest.raises(CorruptionError) as e:
        numbers(log)
    assert e.value.context["path"] == path


def test_old_until_goes_by_whole_segments() -> None:
    storage = FaultyStorage()
    log = open_log(storage, segment_bytes=1)
    assert log.old_until(0) == 0
    for i in range(5):
        append(log, i, 1, at=10 * (i + 1))
    assert [log.old_until(t) for t in (9, 10, 19, 20, 49, 50)] == [0, 0, 0, 10, 30, 50]
    checkpoint(log, storage)
    assert [log.old_until(t) for t in (9, 10, 20, 49, 50)] == [0, 0, 10, 30, 50]
    storage.crash()
    assert [open_log(storage, 1).old_until(t) for t in (9, 20, 49, 50)] == [0, 10, 30, 50]


def test_offset_at_says_when_the_answer_was_trimmed() -> None:
    storage = FaultyStorage()
    log = open_log(storage, segment_bytes=1)
    for i in range(5):
        append(log, i, 1, at=10 * (i + 1))
    checkpoint(log, storage)
    log.trim(30)
    append(log, 5, 1, at=60)
    assert [log.offset_at(t, 10**9) for t in (10, 35, 45, 50, 51, 60, 61)] == [None, None, 40, 40, 50, 50, 60]
    log.trim(50)
    assert [log.offset_at(t, 10**9) for t in (50, 51, 60, 61)] == [None, 50, 50, 60]
    checkpoint(log, storage)
    assert log.trim(60) == log.log_end_offset == 60
    assert [log.offset_at(t, 10**9) for t in (50, 60, 61)] == [None, None, 60]


def test_rows_live_at_an_offset() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    live: dict[int, int] = {}  # key -> offset
    rng = np.random.default_rng(3)
    history: dict[int, dict[int, int]] = {}
    committed: dict[int, int] = {}  # offset -> time
    made = None
    for sequence in range(40):
        types: list[int] = []
        previous: list[int] = []
        keys: list[int] = []
        end = log.log_end_offset
        for key in rng.integers(0, 12, 5).tolist():
            at = end + len(keys)
            if key in live and rng.random() < 0.3:
                types.append(4)
                previous.append(live.pop(key))
                keys.append(key)
            elif key in live:
                types += [2, 3]
                previous += [live[key], live[key]]
                keys += [key, key]
                live[key] = at + 1
            else:
                types.append(1)
                previous.append(-1)
                keys.append(key)
                live[key] = at
        batch = pa.RecordBatch.from_pydict({"n": keys}, schema=SCHEMA)
        write(log, [
            encode_body(
                batch, schema_id=0, stamp=WriterStamp(WRITER, sequence, sequence - 1),
                change_types=np.array(types, np.int8), prev_offsets=np.array(previous, np.int64),
            )
        ], sequence)  # fmt: skip
        committed |= dict.fromkeys(range(end, log.log_end_offset), sequence)
        history[log.log_end_offset] = dict(live)
        if sequence in (15, 30):
            footer = log.take_checkpoint(0)
            rows = live_at(log.checkpoint, log.view().records, footer.offset, Schemas.only(SCHEMA))
            made = write_checkpoint(storage, FOLDER, footer, SCHEMA, rows)
            log.install(made)
            assert made.footer.rows == len(live)
    assert made is not None
    for end, expected in history.items():
        if end >= made.offset:
            found = list(live_at(log.checkpoint, log.view().records, end, Schemas.only(SCHEMA)))
            offsets = [o for b in found for o in b.offsets.tolist()]
            keys = [k for b in found for k in b.rows.column(0).to_pylist()]
            times = [t for b in found for t in b.timestamps.cast(pa.int64()).to_pylist()]
            assert times == [committed[o] for o in offsets]
            assert dict(zip(keys, offsets, strict=True)) == expected and offsets == sorted(offsets)


def empty(log: LogTablet, first: int, count: int, at: int = 5) -> None:
    """Batches ``first`` to ``first + count`` that change nothing."""
    for sequence in range(first, first + count):
        write(log, [body(sequence, [])], at)
    log.sync()
    log.advance_high_watermark()


def sizes(storage: FaultyStorage) -> list[int]:
    names = [n for n in storage.list_files(FOLDER) if n.endswith(".log")]
    return [len(storage.read_file(f"{FOLDER}/{n}") or b"") for n in names]


def test_batches_without_rows_roll_are_trimmed_and_still_known() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 1)
    empty(log, 1, 40)
    assert max(sizes(storage)) <= 1000 + 256 and len(sizes(storage)) > 5
    for crash in (False, True):
        if crash:
            storage.crash()
            log = open_log(storage)
        assert (log.log_start_offset, log.log_end_offset, numbers(log)) == (0, 10, list(range(10)))
        assert all(log.writers.answer(WriterStamp(WRITER, n, n - 1)) == (10, 10) for n in range(1, 41))
    checkpoint(log, storage)
    empty(log, 41, 5)
    assert log.trim(10) == 10 and sum(sizes(storage)) <= 1280
    checkpoint(log, storage)
    empty(log, 46, 3)
    for _ in range(2):
        storage.crash()
        log = open_log(storage)
        assert (log.log_start_offset, log.log_end_offset) == (10, 10)
        assert all(log.writers.answer(WriterStamp(WRITER, n, n - 1)) == (10, 10) for n in range(1, 49))
        log.trim(10)
    append(log, 49, 1)
    assert numbers(log) == list(range(10, 20))


def test_a_checkpoint_counts_what_came_after_it_and_nothing_else() -> None:
    storage = FaultyStorage()
    log = open_log(storage, policy=CheckpointPolicy(log_bytes=3000))
    append(log, 0, 1)
    taken, batches = 0, 400
    for sequence in range(1, batches):
        empty(log, sequence, 1)
        for _ in range(3):  # turns of maintenance, in which all may go that is in the log so far
            if log.wants_checkpoint(log.log_end_offset):
                checkpoint(log, storage)
                taken += 1
            log.trim(log.log_end_offset)
        assert sum(sizes(storage)) <= 3000 + 2 * 1256
    assert taken <= batches * 256 / 1000 + 2
    assert not log.wants_checkpoint(log.log_end_offset)


def test_a_missing_segment_without_rows_is_noticed() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 1)
    empty(log, 1, 20)
    append(log, 21, 1)
    log.close()
    names = [n for n in storage.list_files(FOLDER) if n.endswith(".log") and "-" in n]
    assert len(names) > 2
    for name in names:
        data = storage.read_file(f"{FOLDER}/{name}") or b""
        storage.remove(f"{FOLDER}/{name}")
        with pytest.raises(CorruptionError, match="restore"):
            open_log(storage)
        storage.write_atomic(f"{FOLDER}/{name}", data)
    assert numbers(open_log(storage)) == list(range(20))


def test_files_of_others_are_left_alone() -> None:
    storage = FaultyStorage()
    log = open_log(storage)
    append(log, 0, 20)
    checkpoint(log, storage)
    log.trim(100)
    log.close()
    strays = ["my.checkpoint", "my.log", "my.start", f"{7:020d} (copy).checkpoint", f"{7:020d} (copy).log", "zz.start"]
    for name in strays:
        storage.write_atomic(f"{FOLDER}/{name}", b"not ours")
    log = open_log(storage)
    assert (log.checkpoint_offset, log.log_end_offset) == (200, 200)
    append(log, 20, 1)
    checkpoint(log, storage)
    assert log.trim(210) == 210
    assert set(strays) <= set(storage.list_files(FOLDER))
