"""The log tablet: append, read, roll, and recovery from every way to stop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.log_writing import write

from lakehead.errors import ChecksumError, CorruptionError, OffsetOutOfRangeError, StorageError
from lakehead.format.frame import FrameBody, WriterStamp, encode_body
from lakehead.log.tablet import LogTablet
from lakehead.testing.storage import FaultyStorage

SCHEMA = pa.schema([("n", pa.int64())])
FOLDER = "/t/bucket-0"


def open_tablet(storage: FaultyStorage, segment_bytes: int = 1 << 20) -> LogTablet:
    return LogTablet(storage, FOLDER, segment_bytes=segment_bytes)


def bodies(*sizes: int, start: int = 0, writer: bytes = b"w" * 16) -> Iterator[FrameBody]:
    """Bodies whose rows are numbered on from ``start``, by one writer."""
    for i, rows in enumerate(sizes):
        batch = pa.RecordBatch.from_pydict({"n": list(range(start, start + rows))}, schema=SCHEMA)
        yield encode_body(batch, schema_id=0, stamp=WriterStamp(writer, i, i - 1))
        start += rows


def rows(tablet: LogTablet, start: int = 0, end: int | None = None) -> list[int]:
    end = tablet.log_end_offset if end is None else end
    out = []
    for frame in tablet.frames(start, end):
        numbers = frame.body.rows(SCHEMA).column(0).to_pylist()
        out += [n for o, n in enumerate(numbers, frame.base_offset) if start <= o < end]
    return out


def files(storage: FaultyStorage) -> list[str]:
    return [f"{FOLDER}/{name}" for name in storage.list_files(FOLDER) if name.endswith(".log")]


def test_offsets_are_dense_and_reads_begin_anywhere() -> None:
    tablet = open_tablet(FaultyStorage(), segment_bytes=1000)
    sizes = [3, 0, 1, 40, 7, 0, 100, 2]
    results = [r for body in bodies(*sizes) for r in write(tablet, [body], 5)]
    assert [end - start for start, end in results] == sizes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(results))
    assert len(tablet._segments) > 2
    for start in range(tablet.log_end_offset + 1):
        assert rows(tablet, start) == list(range(start, sum(sizes)))
    assert rows(tablet, 2, 45) == list(range(2, 45))
    with pytest.raises(OffsetOutOfRangeError):
        list(tablet.frames(-1, 1))


def test_a_group_gets_consecutive_offsets() -> None:
    tablet = open_tablet(FaultyStorage())
    assert write(tablet, list(bodies(2, 0, 3)), 1) == [(0, 2), (2, 2), (2, 5)]
    assert rows(tablet) == [0, 1, 2, 3, 4]


def test_readers_wait_for_the_high_watermark_and_marks_for_the_sync() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage)
    write(tablet, list(bodies(2)), 1)
    assert (tablet.log_end_offset, tablet.synced_end, tablet.high_watermark) == (2, 0, 0)
    tablet.sync()
    tablet.advance_high_watermark()
    assert (tablet.log_end_offset, tablet.synced_end, tablet.high_watermark) == (2, 2, 2)
    assert storage.unsynced_bytes() == 0


def test_timestamps_never_go_back() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=500)
    for time, body in zip([100, 50, 200, 0, 300], bodies(2, 2, 2, 2, 2), strict=True):
        write(tablet, [body], time)
    tablet.close()
    tablet = open_tablet(storage, segment_bytes=500)
    write(tablet, list(bodies(2, start=10, writer=b"x" * 16)), 10)
    assert [tablet.timestamp_at(o) for o in range(0, 12, 2)] == [100, 100, 200, 200, 300, 300]
    assert tablet.timestamp_at(12) is None
    assert [tablet.offset_at(t, 10**9) for t in (0, 100, 101, 200, 201, 300, 301)] == [0, 0, 4, 4, 8, 8, 12]


def test_full_disk_leaves_the_log_as_it_was() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage)
    first, second = bodies(2, 3)
    write(tablet, [first], 1)
    storage.full = True
    with pytest.raises(StorageError):
        write(tablet, [second], 2)
    assert tablet.log_end_offset == 2 and tablet.writers.answer(second.stamp) is None
    storage.full = False
    assert write(tablet, [second], 2) == [(2, 5)]
    assert rows(tablet) == [0, 1, 2, 3, 4]


def test_a_failed_sync_is_remembered_also_when_rolling_caused_it() -> None:
    for segment_bytes in (1, 1 << 20):
        storage = FaultyStorage()
        tablet = open_tablet(storage, segment_bytes)
        write(tablet, list(bodies(2)), 1)
        assert not tablet.sync_failed
        storage.sync_fails = True
        with pytest.raises(StorageError):
            if segment_bytes == 1:
                write(tablet, list(bodies(1, writer=b"x" * 16)), 1)
            else:
                tablet.sync()
        assert tablet.sync_failed and tablet.synced_end == 0


def test_restart_restores_rows_writers_and_offsets() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=600)
    made = list(bodies(2, 0, 30, 4, 50))
    for body in made:
        write(tablet, [body], 7)
    tablet.close()
    again = open_tablet(storage, segment_bytes=600)
    assert (again.log_start_offset, again.log_end_offset, again.high_watermark) == (0, 86, 86)
    assert rows(again) == list(range(86))
    assert [again.writers.answer(b.stamp) for b in made] == [(0, 2), (2, 2), (2, 32), (32, 36), (36, 86)]
    assert again.state.offset == 86


def test_a_power_cut_at_every_byte_of_the_last_frame() -> None:
    def until_cut() -> FaultyStorage:
        storage = FaultyStorage()
        tablet = open_tablet(storage)
        first, second, third = bodies(2, 1, 3)
        write(tablet, [first], 1)
        tablet.sync()
        write(tablet, [second], 1)
        tablet.sync()
        write(tablet, [third], 2)
        return storage

    whole = until_cut().unsynced_bytes()
    assert whole > 128
    for torn in range(whole + 1):
        storage = until_cut()
        storage.crash(torn_bytes=torn)
        tablet = open_tablet(storage)
        end = 6 if torn == whole else 3
        assert rows(tablet) == list(range(end)) and tablet.high_watermark == end
        assert storage.unsynced_bytes() == 0, "what recovery keeps is synced"
        write(tablet, list(bodies(2, start=end, writer=b"x" * 16)), 3)
        tablet.sync()
        storage.crash()
        assert rows(open_tablet(storage)) == list(range(end + 2))


def test_a_damaged_tail_that_was_acknowledged_only_by_itself_is_cut() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage)
    for body in bodies(2, 2, 2):
        write(tablet, [body], 1)
        tablet.sync()
    size = len(storage.read_file(files(storage)[-1]) or b"")
    storage.flip_bit(files(storage)[-1], size - 70)
    storage.crash()
    assert rows(open_tablet(storage)) == [0, 1, 2, 3], "the documented limit: the last group"


def test_damage_below_a_synced_mark_is_corruption() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage)
    for body in bodies(2, 2, 2):
        write(tablet, [body], 1)
        tablet.sync()
    tablet.close()
    path = files(storage)[-1]
    size = len(storage.read_file(path) or b"")
    # The clean stop recorded that everything was synced, so that no byte of any frame may differ.
    for position in range(0, size, 13):
        storage.flip_bit(path, position, bit=5)
        with pytest.raises(CorruptionError) as raised:
            open_tablet(storage)
        assert path in str(raised.value)
        storage.flip_bit(path, position, bit=5)
    assert rows(open_tablet(storage)) == list(range(6))


def test_marks_inside_later_frames_protect_earlier_ones() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage)
    for body in bodies(2, 2, 2):
        write(tablet, [body], 1)
        tablet.sync()
    storage.crash()
    data = storage.read_file(files(storage)[0]) or b""
    storage.flip_bit(files(storage)[0], len(data) // 3 + 140)
    with pytest.raises(CorruptionError):
        open_tablet(storage)


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_a_missing_segment_is_corruption(lost: int) -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=1)
    for body in bodies(2, 2, 2):
        write(tablet, [body], 1)
    tablet.close()
    storage.remove(files(storage)[lost])
    with pytest.raises(CorruptionError, match="restore"):
        open_tablet(storage)


def test_damage_in_an_older_segment_is_corruption() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=1)
    for body in bodies(20, 20):
        write(tablet, [body], 1)
    tablet.close()
    size = len(storage.read_file(files(storage)[0]) or b"")
    storage.flip_bit(files(storage)[0], size - 100)
    with pytest.raises(ChecksumError):
        open_tablet(storage)


def test_a_crash_while_rolling() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=1)
    first, second = bodies(2, 3)
    write(tablet, [first], 1)
    storage.full = True
    with pytest.raises(StorageError):
        write(tablet, [second], 1)
    assert len(files(storage)) == 2, "the new segment is there, empty"
    storage.crash()
    tablet = open_tablet(storage, segment_bytes=1)
    assert rows(tablet) == [0, 1]
    write(tablet, [second], 1)
    assert rows(tablet) == [0, 1, 2, 3, 4] and len(files(storage)) == 2


def test_opening_a_damaged_log_closes_what_it_opened() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=1)
    for body in bodies(2, 2):
        write(tablet, [body], 1)
    tablet.close()
    storage.flip_bit(files(storage)[0], 30)
    with pytest.raises(CorruptionError):
        open_tablet(storage)
    assert not any(handle._open for handle in storage._handles)


def test_a_sync_that_failed_is_never_tried_again() -> None:
    storage = FaultyStorage()
    tablet = open_tablet(storage, segment_bytes=100)
    write(tablet, list(bodies(3)), 1)
    storage.sync_fails = True
    with pytest.raises(StorageError):
        tablet.sync()
    storage.sync_fails = False
    # The kernel may have dropped the pages: a sync that works now says nothing of them.
    for again in (tablet.sync, tablet.roll, lambda: tablet.take_checkpoint(0), tablet.close):
        with pytest.raises(StorageError, match="restart the server"):
            again()
    assert tablet.synced_end == 0


def data_of(storage: FaultyStorage) -> bytes:
    return storage.read_file(files(storage)[-1]) or b""


@pytest.mark.parametrize("stopped", [True, False])
def test_whole_frames_that_do_not_fit_are_damage_and_nothing_is_cut(stopped: bool) -> None:
    """Two processes that each took themselves for the owner wrote one log."""
    storage = FaultyStorage()
    first = open_tablet(storage)
    write(first, list(bodies(2, 2)), 1)
    first.sync()
    second = open_tablet(storage)
    write(second, list(bodies(3, writer=b"2" * 16)), 1)
    second.sync()
    if stopped:
        second.close()
    for body in bodies(1, 4, writer=b"1" * 16):
        write(first, [body], 1)
        first.sync()
    storage.crash()
    before = data_of(storage)
    with pytest.raises(CorruptionError, match="two servers wrote this log") as raised:
        open_tablet(storage)
    assert raised.value.context["path"] == files(storage)[-1] and raised.value.context["position"] > 0
    assert data_of(storage) == before


def test_frames_of_an_earlier_start_are_not_taken_after_those_of_a_later_one() -> None:
    storage = FaultyStorage()

    def start(epoch: int, segment_bytes: int = 1 << 20) -> LogTablet:
        return LogTablet(storage, FOLDER, segment_bytes=segment_bytes, epoch=epoch)

    stale = start(4)
    for epoch in (4, 7):
        tablet = start(epoch, segment_bytes=1)
        write(tablet, list(bodies(2, writer=bytes([epoch]) * 16)), 1)
        tablet.close()
    assert rows(start(7)) == [0, 1, 0, 1] and rows(start(9)) == [0, 1, 0, 1]
    with pytest.raises(CorruptionError, match="written by start 7"):
        start(6)
    # What a process that was thought dead adds at just the right offset.
    stale._segments = [*start(7)._segments]
    stale.append_frames(stale.encode(list(bodies(2, writer=b"s" * 16)), 1))
    stale.sync()
    with pytest.raises(CorruptionError, match="by start 4 of a server, after start 7"):
        start(9)


def test_frames_say_where_they_belong_and_go_nowhere_else() -> None:
    leader, standby = open_tablet(FaultyStorage()), open_tablet(FaultyStorage())
    first, second = (leader.encode([body], 1) for body in bodies(2, 3))
    assert (leader.log_end_offset, leader.frames_written) == (0, 0), "to encode changes nothing"
    for log in (leader, standby):
        log.append_frames(first)
    assert [f.base_offset for f in second] == [0], "as they were made before the first were appended"
    with pytest.raises(CorruptionError, match="ends at offset 2"):
        standby.append_frames(second)
    with pytest.raises(CorruptionError, match="frames are missing, or come twice"):
        standby.append_frames([*leader.encode(list(bodies(1, writer=b"x" * 16)), 1), *second])
    assert standby.log_end_offset == 2 and rows(standby) == rows(leader)
    with pytest.raises(CorruptionError, match="state that ends at 0"):
        standby.apply(leader.encode(list(bodies(1, writer=b"x" * 16)), 1))
    standby.apply(first)
    assert standby.state.offset == 2
