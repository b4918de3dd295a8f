"""Messages with attachments as Flight batches, and back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import CorruptionError, LimitExceededError
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, INSIDE_BYTES, send, unwrap, wrap


def chunks(message: bytes, attachments: list[pa.Buffer]) -> Callable[[], Any]:
    pairs = iter(wrap(message, attachments))

    def read() -> Any:
        batch, metadata = next(pairs)
        if batch is not None:
            assert batch.schema == ATTACHMENT_SCHEMA and batch.num_rows == 1
            batch.validate(full=True)
        return SimpleNamespace(data=batch, app_metadata=metadata)

    return read


@pytest.mark.parametrize("parts", [[], [b""], [b"one"], [b"a", b"", b"c" * 99], [b"a" * 70_000, b"", b"c"]])
def test_round_trip(parts: list[bytes]) -> None:
    message, found = unwrap(chunks(b"the message", [pa.py_buffer(p) for p in parts]))
    assert message == b"the message" and [b.to_pybytes() for b in found] == parts


def test_large_attachments_are_sent_without_a_copy() -> None:
    buffer = pa.py_buffer(b"x" * INSIDE_BYTES)
    [(batch, _)] = wrap(b"", [buffer])
    assert batch is not None and batch.column(0).buffers()[2].address == buffer.address


def test_small_attachments_come_with_the_message_to_where_columns_may_lie() -> None:
    parts = [b"one", b"", b"three" * 100]
    pairs = wrap(b"m", [pa.py_buffer(p) for p in parts])
    assert [batch for batch, _ in pairs] == [None]
    _, found = unwrap(chunks(b"m", [pa.py_buffer(p) for p in parts]))
    assert [b.address % 64 for b in found if b.size] == [0, 0]


def test_each_goes_as_what_it_is() -> None:
    class Writer:
        def __init__(self) -> None:
            self.sent: list[object] = []

        def write_metadata(self, metadata: pa.Buffer) -> None:
            self.sent.append(metadata)

        def write_with_metadata(self, batch: pa.RecordBatch, metadata: pa.Buffer) -> None:
            self.sent.append((batch, metadata))

    for size in (5, INSIDE_BYTES):
        writer, pairs = Writer(), wrap(b"m", [pa.py_buffer(b"x" * size)])
        send(writer, pairs)
        assert writer.sent == [pairs[0][1] if pairs[0][0] is None else pairs[0]]


def test_the_end_of_the_stream_passes_through() -> None:
    read = chunks(b"m", [pa.py_buffer(b"1"), pa.py_buffer(b"2" * INSIDE_BYTES)])
    unwrap(read)
    with pytest.raises(StopIteration):
        unwrap(read)


@pytest.mark.parametrize("metadata", [None, b"", b"abc"])
def test_another_protocol(metadata: bytes | None) -> None:
    buffer = None if metadata is None else pa.py_buffer(metadata)
    with pytest.raises(CorruptionError, match="protocol"):
        unwrap(lambda: SimpleNamespace(data=None, app_metadata=buffer))


def sent(*values: pa.RecordBatch, count: int | None = None) -> Callable[[], Any]:
    """Chunks that another program made up."""
    chunks = iter(values)
    number = struct.pack("<II", len(values) if count is None else count, 0)
    return lambda: SimpleNamespace(data=next(chunks), app_metadata=pa.py_buffer(number))


def lying(start: int, end: int) -> pa.RecordBatch:
    """One value of five bytes that says it lies elsewhere; as Arrow reads it from the wire."""
    value = pa.RecordBatch.from_arrays([pa.array([b"value"], pa.large_binary())], schema=ATTACHMENT_SCHEMA)
    true, told = struct.pack("<qq", 0, 5), struct.pack("<qq", start, end)
    data = value.serialize().to_pybytes()
    at = data.rindex(true, 0, data.rindex(b"value"))
    return pa.ipc.read_record_batch(pa.py_buffer(data[:at] + told + data[at + 16 :]), ATTACHMENT_SCHEMA)


@pytest.mark.parametrize(
    "batch",
    [
        lying(0, 1 << 40),
        lying(-8, 5),
        lying(5, 0),
        pa.record_batch({"attachment": pa.array([], pa.large_binary())}),
        pa.record_batch({"attachment": pa.array([b"1", b"2"], pa.large_binary())}),
        pa.record_batch({"attachment": [1]}),
        pa.record_batch({"a": pa.array([b"1"], pa.large_binary()), "b": pa.array([b"1"], pa.large_binary())}),
        pa.RecordBatch.from_pylist([{}], pa.schema([])),
        None,
    ],
)
def test_values_that_are_none_are_refused(batch: pa.RecordBatch | None) -> None:
    with pytest.raises(CorruptionError, match="attachment"):
        unwrap(sent(batch))


@pytest.mark.parametrize(
    "metadata",
    [
        struct.pack("<III", 1, 1, 1 << 31),
        struct.pack("<III", 1, 1, 3) + b"12",
        struct.pack("<II", 1 << 20, 1 << 20),
        struct.pack("<II", 1, 1) + b"\0\0\0",
        struct.pack("<IIII", 2, 1, 0, 0),
        struct.pack("<III", 1, 2, 0),
        struct.pack("<II", 0, 1 << 31),
    ],
)
def test_attachments_inside_that_are_none_are_refused(metadata: bytes) -> None:
    with pytest.raises(CorruptionError, match="attachment"):
        unwrap(lambda: SimpleNamespace(data=None, app_metadata=pa.py_buffer(metadata)))


def test_messages_have_limits() -> None:
    small = wrap(b"m", [pa.py_buffer(b"12345")] * 2)[0][1]
    with pytest.raises(LimitExceededError, match="bytes"):
        unwrap(lambda: SimpleNamespace(data=None, app_metadata=small), bytes_max=9)
    whole = lying(0, 5)
    assert len(unwrap(sent(whole, whole), bytes_max=10)[1]) == 2
    with pytest.raises(LimitExceededError, match="bytes"):
        unwrap(sent(whole, whole), bytes_max=9)
    with pytest.raises(LimitExceededError, match="attachments"):
        unwrap(sent(whole, count=2**32 - 1))
