"""Segments: frames in a file, found by offset."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lakehead.errors import CorruptionError, StorageError
from lakehead.format.frame import WriterStamp, encode_body, encode_header
from lakehead.log.segment import INDEX_INTERVAL_BYTES, Segment, SegmentId
from lakehead.testing.storage import FaultyStorage

SCHEMA = pa.schema([("n", pa.int64())])


@pytest.fixture
def storage() -> FaultyStorage:
    made = FaultyStorage()
    made.make_folder("/t")
    return made


def frame(base: int, rows: int, timestamp: int = 1) -> tuple[bytes, pa.Buffer, int, int]:
    batch = pa.RecordBatch.from_pydict({"n": list(range(base, base + rows))}, schema=SCHEMA)
    body = encode_body(batch, schema_id=0, stamp=WriterStamp(bytes(16), base))
    header = encode_header(body, base_offset=base, timestamp_us=timestamp, synced_end=0, epoch=0)
    return header, body.buffer, rows, timestamp


def fill(segment: Segment, sizes: list[int]) -> None:
    at = segment.end_offset
    for i, rows in enumerate(sizes):
        segment.append([frame(at, rows, timestamp=100 + i)])
        at += rows


def offsets(segment: Segment, start: int, end: int) -> list[tuple[int, int]]:
    return [(f.base_offset, f.end_offset) for f in segment.frames(start, end)]


def test_names_lead_back_to_ids_that_are_in_the_order_of_the_log() -> None:
    assert SegmentId(12345).name == "00000000000000012345.log"
    ids = [SegmentId(0)]
    for end in (0, 0, 10, 10, 2**40):
        ids.append(ids[-1].after(end))
    assert ids == sorted(ids) == [SegmentId.of_name(i.name) for i in ids]
    assert [i.number for i in ids] == [0, 1, 2, 0, 1, 0]
    for name in ("1.log", "x", "00000000000000012345-0.log", "00000000000000012345.log.tmp"):
        assert SegmentId.of_name(name) is None


def test_reads_at_any_offset(storage: FaultyStorage) -> None:
    segment = Segment(storage, "/t", SegmentId(7))
    sizes = [1, 0, 5, 300, 0, 0, 2, 700, 1, 1, 0]
    fill(segment, sizes)
    assert segment.size_bytes > 2 * INDEX_INTERVAL_BYTES
    assert (segment.base_offset, segment.end_offset) == (7, 7 + sum(sizes))
    for start in range(7, segment.end_offset):
        for end in (start, start + 1, start + 40, segment.end_offset):
            found = offsets(segment, start, end)
            rows = [o for base, stop in found for o in range(base, stop) if start <= o < end]
            assert rows == list(range(start, min(end, segment.end_offset)))
            with_rows = [(base, stop) for base, stop in found if base < stop]
            assert all(stop > start and base < end for base, stop in with_rows)


def test_scan_rebuilds_what_append_built(storage: FaultyStorage) -> None:
    segment = Segment(storage, "/t", SegmentId(0))
    fill(segment, [3, 0, 1000, 4])
    again = Segment(storage, "/t", SegmentId(0))
    assert again.end_offset == 0
    frames = list(again.scan())
    assert [f.body.row_count for _, f in frames] == [3, 0, 1000, 4]
    assert again.end_offset == segment.end_offset
    assert again.timestamps_us == (100, 103)
    assert offsets(again, 1002, 1005) == offsets(segment, 1002, 1005) == [(3, 1003), (1003, 1007)]


def test_a_group_is_written_whole_or_not_at_all(storage: FaultyStorage) -> None:
    segment = Segment(storage, "/t", SegmentId(0))
    fill(segment, [2])
    storage.full = True
    with pytest.raises(StorageError, match="disk is full"):
        segment.append([frame(2, 1), frame(3, 1)])
    storage.full = False
    segment.append([frame(2, 4), frame(6, 1)])
    assert offsets(segment, 0, 9) == [(0, 2), (2, 6), (6, 7)]


def test_scan_names_the_place_that_is_damaged(storage: FaultyStorage) -> None:
    segment = Segment(storage, "/t", SegmentId(0))
    fill(segment, [2, 2, 2])
    places = [at for at, _ in Segment(storage, "/t", SegmentId(0)).scan()]
    storage.flip_bit(segment.path, places[1] + 130)
    with pytest.raises(CorruptionError) as raised:
        list(Segment(storage, "/t", SegmentId(0)).scan())
    assert raised.value.context == {"path": segment.path, "position": places[1]}


def test_scan_refuses_a_frame_out_of_place(storage: FaultyStorage) -> None:
    segment = Segment(storage, "/t", SegmentId(0))
    segment.append([frame(0, 2), frame(3, 2)])
    with pytest.raises(CorruptionError, match="expected 2"):
        list(Segment(storage, "/t", SegmentId(0)).scan())


def test_cut(storage: FaultyStorage) -> None:
    segment = Segment(storage, "/t", SegmentId(0))
    fill(segment, [2, 2, 2])
    places = [at for at, _ in Segment(storage, "/t", SegmentId(0)).scan()]
    again = Segment(storage, "/t", SegmentId(0))
    again.cut(places[2])
    assert [f.base_offset for _, f in again.scan()] == [0, 2]
    assert storage.unsynced_bytes() == 0
