"""Messages with attachments as Flight batches, and back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import CorruptionError
from lakehead.protocol.attachments import ATTACHMENT_SCHEMA, unwrap, wrap


def chunks(message: bytes, attachments: list[pa.Buffer]) -> Callable[[], Any]:
    pairs = iter(list(wrap(message, attachments)))

    def read() -> Any:
        batch, metadata = next(pairs)
        assert batch.schema == ATTACHMENT_SCHEMA and batch.num_rows == 1
        batch.validate(full=True)
        return SimpleNamespace(data=batch, app_metadata=metadata)

    return read


@pytest.mark.parametrize("parts", [[], [b""], [b"one"], [b"a" * 70_000, b"", b"c"]])
def test_round_trip(parts: list[bytes]) -> None:
    message, found = unwrap(chunks(b"the message", [pa.py_buffer(p) for p in parts]))
    assert message == b"the message" and [b.to_pybytes() for b in found] == parts


def test_attachments_are_sent_without_a_copy() -> None:
    buffer = pa.py_buffer(b"x" * 1000)
    [(batch, _)] = wrap(b"", [buffer])
    assert batch.column(0).buffers()[2].address == buffer.address


def test_the_end_of_the_stream_passes_through() -> None:
    read = chunks(b"m", [pa.py_buffer(b"1"), pa.py_buffer(b"2")])
    unwrap(read)
    with pytest.raises(StopIteration):
        unwrap(read)


@pytest.mark.parametrize("metadata", [None, b"", b"abc"])
def test_another_protocol(metadata: bytes | None) -> None:
    buffer = None if metadata is None else pa.py_buffer(metadata)
    with pytest.raises(CorruptionError, match="protocol"):
        unwrap(lambda: SimpleNamespace(data=None, app_metadata=buffer))
