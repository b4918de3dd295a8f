"""Any bytes given to the frame decoder are refused as corruption or decoded; nothing else is raised or crashes."""

from __future__ import annotations

import contextlib
import struct

import crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehead.errors import LakeheadError
from lakehead.format.frame import WriterStamp, decode_body, decode_frame, encode_body, encode_header

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.int32()))])


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    count = draw(st.integers(0, 20))
    rows = [{"id": i, "name": draw(st.none() | st.text(max_size=5)), "tags": [i] * (i % 3)} for i in range(count)]
    changes = draw(st.booleans())
    body = encode_body(
        pa.RecordBatch.from_pylist(rows, schema=SCHEMA),
        schema_id=draw(st.integers(0, 2**32 - 1)),
        stamp=WriterStamp(bytes(16), draw(st.integers(-1, 2**62))),
        compression=draw(st.sampled_from(["none", "lz4", "zstd"])),
        change_types=np.ones(count, np.int8) if changes else None,
        prev_offsets=np.full(count, -1, np.int64) if changes else None,
    )
    base = draw(st.integers(0, 2**62))
    return encode_header(body, base_offset=base, timestamp_us=1, synced_end=0, epoch=0) + body.buffer.to_pybytes()


def decode_all(data: bytes, *, check: bool) -> None:
    frame = decode_frame(pa.py_buffer(data), check=check)
    _ = frame.end_offset, frame.body.change_types, frame.body.statistics
    for columns in (None, [1]):
        frame.body.rows(SCHEMA, columns)


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    for decode in (lambda: decode_all(data, check=True), lambda: decode_body(pa.py_buffer(data))):
        with contextlib.suppress(LakeheadError):
            decode()


@given(frames(), st.data())
def test_changed_bytes_never_pass_the_checksums(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    broken = bytearray(data)
    broken[at] ^= draw.draw(st.integers(1, 255))
    try:
        decode_frame(pa.py_buffer(bytes(broken)), check=True)
    except LakeheadError:
        return
    raise AssertionError(f"the change at byte {at} was not noticed")


@given(frames(), st.data())
def test_changed_headers_with_fitting_checksums_never_crash(data: bytes, draw: st.DataObject) -> None:
    """A peer that speaks the format badly, rather than a disk that forgets."""
    broken = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        broken[draw.draw(st.integers(64, 127))] = draw.draw(st.integers(0, 255))
    broken[12:16] = struct.pack("<I", crc32c.crc32c(bytes(broken[64:])))
    broken[8:12] = struct.pack("<I", crc32c.crc32c(bytes(broken[12:64])))
    with contextlib.suppress(LakeheadError):
        decode_all(bytes(broken), check=True)


@given(frames(), st.integers(0, 5000))
def test_cut_bytes(data: bytes, size: int) -> None:
    with contextlib.nullcontext() if size >= len(data) else pytest.raises(LakeheadError):
        decode_all(data[:size], check=True)
