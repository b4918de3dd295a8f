"""The batch frame: what goes in comes out, and other bytes are refused."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from lakehead.errors import ChecksumError, CorruptionError, LimitExceededError, UnsupportedFormatError
from lakehead.format import frame as frames
from lakehead.format.frame import (
    BODY_HEADER_BYTES,
    HEADER_BYTES,
    FrameBody,
    WriterStamp,
    decode_body,
    decode_frame,
    decode_header,
    encode_body,
    encode_header,
)

STAMP = WriterStamp(b"0123456789abcdef", 7, 5, 6, 3)
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("flag", pa.bool_()),
        ("price", pa.decimal128(12, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
        ("extra", pa.map_(pa.string(), pa.int32())),
        ("point", pa.struct([("x", pa.float64()), ("y", pa.float32())])),
        ("code", pa.binary(3)),
    ]
)
ROWS = [
    {
        "id": i,
        "name": None if i % 3 == 0 else f"name {i}",
        "flag": i % 2 == 0,
        "price": decimal.Decimal(i) / 100,
        "at": dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=i),
        "tags": [str(i)] * (i % 4),
        "extra": [("a", i)],
        "point": None if i % 5 == 0 else {"x": i / 2, "y": None},
        "code": b"abc",
    }
    for i in range(100)
]
BATCH = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)


def whole(body: FrameBody, base: int = 40) -> pa.Buffer:
    header = encode_header(body, base_offset=base, timestamp_us=1_700_000_000_000_000, synced_end=30, epoch=2)
    return pa.py_buffer(header + body.buffer.to_pybytes())


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_round_trip(compression: str) -> None:
    body = encode_body(BATCH, schema_id=4, stamp=STAMP, compression=compression)
    data = whole(body)
    assert data.size % 64 == 0
    found = decode_frame(data, check=True)
    assert (found.base_offset, found.end_offset, found.timestamp_us) == (40, 140, 1_700_000_000_000_000)
    assert (found.synced_end, found.epoch, found.length) == (30, 2, data.size)
    assert (found.body.schema_id, found.body.stamp, found.body.row_count) == (4, STAMP, 100)
    assert found.body.rows(SCHEMA).equals(BATCH)
    assert not found.body.change_types.any() and len(found.body.change_types) == 100
    assert decode_body(body.buffer, body.crc).rows(SCHEMA).equals(BATCH)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("columns", [[0], [7, 0, 5], [8, 1], list(range(9)), []])
def test_projection(compression: str, columns: list[int]) -> None:
    body = encode_body(BATCH, schema_id=0, stamp=STAMP, compression=compression)
    found = body.rows(SCHEMA, columns)
    assert found.num_rows == 100
    assert found.schema.names == [SCHEMA.names[i] for i in columns]
    for i, column in zip(columns, found.columns, strict=True):
        assert column.equals(BATCH.column(i))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_changelog(compression: str) -> None:
    batch = pa.concat_batches([BATCH] * 3)
    changes = np.array([1, 2, 3, 4] * 75, np.int8)
    previous = np.arange(-1, 299)
    body = encode_body(
        batch, schema_id=0, stamp=STAMP, compression=compression, change_types=changes, prev_offsets=previous
    )
    found = decode_frame(whole(body), check=True).body
    assert found.change_types.tolist() == changes.tolist()
    assert found.prev_offsets.tolist() == previous.tolist()
    assert found.rows(SCHEMA).equals(batch)
    assert found.statistics.size > 0


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("changelog", [False, True])
def test_frame_without_rows(compression: str, changelog: bool) -> None:
    changes: dict[str, Any] = {}
    if changelog:
        changes = {"change_types": np.zeros(0, np.int8), "prev_offsets": np.zeros(0, np.int64)}
    body = encode_body(BATCH.slice(0, 0), schema_id=0, stamp=STAMP, compression=compression, **changes)
    found = decode_frame(whole(body), check=True)
    assert found.base_offset == found.end_offset == 40
    assert found.body.stamp == STAMP
    assert len(found.body.change_types) == 0
    assert found.body.rows(SCHEMA).equals(BATCH.slice(0, 0))
    assert found.body.rows(SCHEMA, [1]).num_rows == 0


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_slices_hold_their_rows_only(compression: str) -> None:
    part = BATCH.slice(13, 9)
    body = encode_body(part, schema_id=0, stamp=STAMP, compression=compression)
    assert body.rows(SCHEMA).equals(part)
    assert body.buffer.size < encode_body(BATCH, schema_id=0, stamp=STAMP, compression=compression).buffer.size / 1.5


def test_rows_share_the_frames_memory() -> None:
    body = encode_body(BATCH.select(["id"]), schema_id=0, stamp=STAMP)
    values = body.rows(pa.schema([SCHEMA.field("id")])).column(0).buffers()[1]
    assert body.buffer.address <= values.address < body.buffer.address + body.buffer.size


def test_every_flipped_bit_of_a_frame_is_found() -> None:
    small = BATCH.slice(0, 2).select(["id", "name"])
    data = whole(encode_body(small, schema_id=0, stamp=STAMP)).to_pybytes()
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptionError):
            decode_frame(pa.py_buffer(bytes(broken)), check=True)


def test_cut_off_frames_are_found() -> None:
    data = whole(encode_body(BATCH, schema_id=0, stamp=STAMP))
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + BODY_HEADER_BYTES, data.size - 1):
        with pytest.raises(CorruptionError):
            decode_frame(data.slice(0, size), check=True)
    with pytest.raises(CorruptionError):
        decode_body(data.slice(0, BODY_HEADER_BYTES - 1))
    with pytest.raises(ChecksumError):
        decode_body(data.slice(0, 64), crc=1)


def test_frames_of_a_newer_format_are_told_apart() -> None:
    data = b"LHF2" + whole(encode_body(BATCH, schema_id=0, stamp=STAMP)).to_pybytes()[4:]
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        decode_header(pa.py_buffer(data))


def test_contradicting_lengths_are_found() -> None:
    body = encode_body(BATCH.select(["id"]), schema_id=0, stamp=STAMP)
    longer = pa.py_buffer(body.buffer.to_pybytes() + bytes(64))
    with pytest.raises(CorruptionError, match="lengths"):
        decode_body(longer)


def test_rows_of_another_schema_are_refused_or_read_as_such() -> None:
    body = encode_body(BATCH.select(["id"]), schema_id=0, stamp=STAMP)
    with pytest.raises(CorruptionError, match="cannot be read"):
        body.rows(SCHEMA)


def test_a_frame_too_large_to_read_back_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    size = encode_body(BATCH, schema_id=0, stamp=STAMP).buffer.size
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", HEADER_BYTES + size)
    whole(encode_body(BATCH, schema_id=0, stamp=STAMP))
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", HEADER_BYTES + size - 64)
    with pytest.raises(LimitExceededError, match="split"):
        encode_body(BATCH, schema_id=0, stamp=STAMP)


def test_received_rows_are_those_that_were_sent() -> None:
    for compression in ("none", "lz4", "zstd"):
        body = encode_body(BATCH, schema_id=0, stamp=STAMP, compression=compression)
        assert body.received_rows(SCHEMA, bytes_max=1 << 20).equals(BATCH)
    with pytest.raises(LimitExceededError, match="split"):
        body.received_rows(SCHEMA, bytes_max=1000)


def test_bodies_that_contradict_themselves_are_not_received() -> None:
    rows = BATCH.num_rows
    changes: dict[str, Any] = {"change_types": np.ones(rows, np.int8), "prev_offsets": np.full(rows, -1)}
    bad_stamps = [WriterStamp(bytes(16), -1), WriterStamp(bytes(16), 3, 3), WriterStamp(bytes(16), 3, -2)]
    bad_stamps.append(WriterStamp(bytes(16), 3, acked_through=-2))
    bodies = [encode_body(BATCH, schema_id=0, stamp=STAMP, **changes)]
    bodies += [encode_body(BATCH, schema_id=0, stamp=stamp) for stamp in bad_stamps]
    good = encode_body(BATCH, schema_id=0, stamp=STAMP)
    bodies.append(msgspec.structs.replace(good, row_count=rows - 1))
    bodies.append(msgspec.structs.replace(good, flags=4))
    for body in bodies:
        with pytest.raises(CorruptionError):
            body.received_rows(SCHEMA, bytes_max=1 << 20)


def test_statistics_of_other_rows_are_not_received() -> None:
    large = pa.concat_batches([BATCH] * (frames.STATISTICS_ROWS_MIN // BATCH.num_rows + 1))
    data = encode_body(large, schema_id=0, stamp=STAMP).buffer.to_pybytes()
    at = BODY_HEADER_BYTES
    for position, wrong in ((at, b"\0\0\0\0"), (at + 4, b"\1\0"), (at + 8 + 4, b"\x09")):
        spoiled = data[:position] + wrong + data[position + len(wrong) :]
        with pytest.raises(CorruptionError, match="statistics"):
            decode_body(pa.py_buffer(spoiled)).received_rows(SCHEMA, bytes_max=1 << 24)


def test_layout_is_frozen() -> None:
    schema = pa.schema([("id", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"id": 1}, {"id": None}], schema=schema)
    changes, previous = np.array([2, 3], np.int8), np.array([8, 8], np.int64)
    body = encode_body(
        batch, schema_id=9, stamp=STAMP, change_types=changes, prev_offsets=previous, with_statistics=False
    )
    header = encode_header(body, base_offset=10, timestamp_us=11, synced_end=12, epoch=13)
    assert header[:4] == b"LHF1"
    assert int.from_bytes(header[4:8], "little") == 64 + body.buffer.size
    assert header[16:44].hex() == "0a000000000000000b000000000000000c000000000000000d000000" and not any(header[44:])
    start = body.buffer.to_pybytes()[: BODY_HEADER_BYTES + 18]
    assert start[:8].hex() == "0900000001000000" and start[8:24] == STAMP.writer_id
    assert start[24:56].hex() == "0700000000000000050000000000000006000000000000000200000000000000"
    assert start[60:64].hex() == "03000000"
    assert start[64:].hex() == "080000000000000008000000000000000203"
