"""Messages that lie: about sizes, offsets, nulls and text; none is believed."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from lakehead.errors import CorruptionError, LimitExceededError
from lakehead.format.ipc_message import decoded_bytes, read_received

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int32()))])
ROWS = pa.RecordBatch.from_pylist(
    [{"n": i, "s": None if i == 3 else f"text {i}", "l": [i] * (i % 3)} for i in range(9)], schema=SCHEMA
)
MAX = 1 << 20


def compressed(batch: pa.RecordBatch, codec: str) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    return messages.read_next_message().serialize()


def patched(message: pa.Buffer, old: bytes, new: bytes) -> pa.Buffer:
    data = message.to_pybytes()
    assert old in data and len(old) == len(new)
    return pa.py_buffer(data.replace(old, new, 1))


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rows_and_their_size(codec: str | None, rows: int) -> None:
    batch = ROWS.slice(0, rows)
    message = batch.serialize() if codec is None else compressed(batch, codec)
    assert read_received(message, SCHEMA, bytes_max=MAX).equals(batch)
    # Offsets of lists and texts of a slice are written from 0, and nulls only where there are any.
    assert batch.nbytes - 64 <= decoded_bytes(message) <= batch.nbytes + 100


def test_a_small_message_may_not_become_large_rows() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([bytes(MAX)])], ["b"])
    message = compressed(batch, "zstd")
    assert message.size < 1000 and decoded_bytes(message) > MAX
    with pytest.raises(LimitExceededError, match="decompressed"):
        read_received(message, batch.schema, bytes_max=MAX)
    assert read_received(message, batch.schema, bytes_max=2 * MAX).equals(batch)


@pytest.mark.parametrize("claimed", [2**62, -(2**63), -2])
def test_claimed_sizes_are_looked_at(claimed: int) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([bytes(77_777)])], ["b"])
    message = patched(compressed(batch, "lz4"), struct.pack("<q", 77_777), struct.pack("<q", claimed))
    with pytest.raises((LimitExceededError, CorruptionError)):
        read_received(message, batch.schema, bytes_max=MAX)


def test_offsets_may_not_lead_out_of_their_buffer() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["one", "two", "three", "four", "five"])], ["s"])
    offsets = struct.pack("<6i", 0, 3, 6, 11, 15, 19)
    # The last one is right, which is all that Arrow's cheap validation looks at.
    for wrong in ((0, 3, 1 << 30, 11, 15, 19), (0, 3, 2, 11, 15, 19), (0, -9, 6, 11, 15, 19)):
        message = patched(batch.serialize(), offsets, struct.pack("<6i", *wrong))
        pa.ipc.read_record_batch(message, batch.schema).validate()
        with pytest.raises(CorruptionError):
            read_received(message, batch.schema, bytes_max=MAX)


def test_texts_must_be_utf8() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["søk"])], ["s"])
    with pytest.raises(CorruptionError, match="UTF8"):
        read_received(patched(batch.serialize(), "søk".encode(), b"s\xff\xffk"), batch.schema, bytes_max=MAX)


def test_nulls_must_be_as_many_as_is_said() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, None, 3])], ["n"])
    message = patched(batch.serialize(), struct.pack("<qq", 3, 1), struct.pack("<qq", 3, 2))
    with pytest.raises(CorruptionError, match="null"):
        read_received(message, batch.schema, bytes_max=MAX)


def test_other_bytes_are_refused() -> None:
    message = ROWS.serialize()
    schema_message = SCHEMA.serialize()
    for data in (b"", b"abc", bytes(8), bytes(4000), message[:100], message[: message.size - 100], schema_message):
        with pytest.raises(CorruptionError):
            read_received(pa.py_buffer(data), SCHEMA, bytes_max=MAX)
    with pytest.raises(CorruptionError):
        read_received(message, pa.schema([*SCHEMA, ("more", pa.int32())]), bytes_max=MAX)
