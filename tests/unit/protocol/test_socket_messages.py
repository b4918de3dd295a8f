"""Messages of a plain socket come through in pieces of any size, and what is none is refused."""

from __future__ import annotations

import struct

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehead.errors import CorruptionError, LimitExceededError, ProtocolVersionError
from lakehead.protocol.attachments import ATTACHMENTS_MAX
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import PROTOCOL_VERSION, ErrorReply
from lakehead.protocol.socket_messages import (
    ENCODED_BYTES_MAX,
    Bytes,
    Greeting,
    Incoming,
    Outgoing,
    read_greeting,
    read_welcome,
)

SIZES = st.one_of(st.integers(0, 200), st.sampled_from([16_320, 65_528, 65_536, 70_000, 200_000]))


def sent(message: bytes, attachments: list[bytes], piece: int | None = None) -> bytes:
    """What goes through the socket, where one call takes at most so much."""
    outgoing = Outgoing(message, [pa.py_buffer(a) for a in attachments])
    out = bytearray()
    while parts := outgoing.parts:
        taken = b"".join(parts)[:piece]
        out += taken
        outgoing.sent(len(taken))
    return bytes(out)


def received(incoming: Incoming, data: bytes, pieces: list[int]) -> tuple[bytes, list[pa.Buffer]]:
    """What is made of it, when it comes so."""
    at, turn = 0, 0
    while True:
        room = incoming.room
        assert room.nbytes
        count = min(room.nbytes, pieces[turn % len(pieces)], len(data) - at)
        assert count, "more was expected than was sent"
        room[:count] = data[at : at + count]
        at, turn = at + count, turn + 1
        found = incoming.received(count)
        if found is not None:
            assert at == len(data)
            return found


@given(
    st.lists(st.tuples(SIZES, st.lists(SIZES, max_size=4)), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 7, 8, 9, 63, 4096, 65_536, 1 << 20]), min_size=1, max_size=5),
    st.sampled_from([None, 1000, 65_537]),
)
def test_messages_come_through_whole(
    messages: list[tuple[int, list[int]]], pieces: list[int], piece: int | None
) -> None:
    if sum(pieces) / len(pieces) < 10:
        pieces = [*pieces, 4096]  # else it takes long
    incoming = Incoming()
    for n, (size, attachments) in enumerate(messages):
        message = bytes([n]) * size
        given = [bytes([n + 1 + i]) * count for i, count in enumerate(attachments)]
        found, parts = received(incoming, sent(message, given, piece), pieces)
        assert found == message
        assert [p.to_pybytes() for p in parts] == given
        assert all(p.address % 64 == 0 for p in parts if p.size), "columns may be read where they are"


@given(
    st.lists(st.tuples(SIZES, st.lists(SIZES, max_size=3)), min_size=1, max_size=6), st.sampled_from([7, 100, 1 << 20])
)
def test_items_of_a_stream_come_one_behind_the_other(messages: list[tuple[int, list[int]]], piece: int) -> None:
    sent_all = [
        (bytes([n]) * size, [bytes([n + 9]) * count for count in parts]) for n, (size, parts) in enumerate(messages)
    ]
    data = b"".join(sent(message, parts) for message, parts in sent_all)
    if len(data) > 100_000:
        piece = 1 << 20  # else it takes long
    incoming, found, at = Incoming(ahead=True), [], 0
    while len(found) < len(messages):
        while (item := incoming.received(0)) is not None:
            found.append((item[0], [p.to_pybytes() for p in item[1]]))
        count = min(incoming.room.nbytes, piece, len(data) - at)
        if count:
            incoming.room[:count] = data[at : at + count]
            at += count
            if (item := incoming.received(count)) is not None:
                found.append((item[0], [p.to_pybytes() for p in item[1]]))
    assert found == sent_all and at == len(data)


def test_many_attachments_go_in_more_calls_than_one() -> None:
    given = [b"x" * 1000] * 3000
    found, parts = received(Incoming(), sent(b"m", given), [1 << 20])
    assert (found, [p.to_pybytes() for p in parts]) == (b"m", given)


@pytest.mark.parametrize("pieces", [[1 << 20], [1000]])
def test_what_is_over_the_limit_is_read_and_the_next_one_goes_on(pieces: list[int]) -> None:
    incoming = Incoming(bytes_max=100_000)
    for _ in range(2):
        with pytest.raises(LimitExceededError, match="more than 100,000 bytes") as caught:
            received(incoming, sent(b"m", [b"x" * 60_000] * 2), pieces)
        assert caught.value.context["message_bytes_max"] == 100_000
        assert received(incoming, sent(b"m", [b"y" * 50_000] * 2), pieces)[0] == b"m"
    small = Incoming(bytes_max=0)
    with pytest.raises(LimitExceededError):
        received(small, sent(b"m", [b"x"]), pieces)


def test_what_is_no_message_is_refused() -> None:
    for head in (struct.pack("<II", 0, ATTACHMENTS_MAX + 1), struct.pack("<II", ENCODED_BYTES_MAX + 1, 0), b"GET / HT"):
        with pytest.raises(CorruptionError, match="does not speak this protocol"):
            received(Incoming(), head, [1 << 20])
    with pytest.raises(CorruptionError, match="does not speak this protocol"):
        received(Incoming(), struct.pack("<IIQQ", 0, 2, (1 << 64) - 1, 1), [1 << 20])
    with pytest.raises(CorruptionError, match="before it was asked"):
        received(Incoming(), sent(b"m", []) + b"more", [1 << 20])


@given(st.binary(min_size=1, max_size=300), st.sampled_from([None, 100]))
def test_whatever_comes_is_a_message_or_refused(data: bytes, bytes_max: int | None) -> None:
    incoming = Incoming(bytes_max=bytes_max)
    at = 0
    try:
        while at < len(data):
            count = min(incoming.room.nbytes, len(data) - at)
            incoming.room[:count] = data[at : at + count]
            at += count
            incoming.received(count)
    except (CorruptionError, LimitExceededError, MemoryError):
        pass


def welcome(data: bytes) -> Bytes:
    read_welcome(data)
    return data


def test_greetings_tell_the_version() -> None:
    ours = encode(Greeting(token="t", process="host:1"))
    assert read_greeting(ours) == Greeting(version=PROTOCOL_VERSION, token="t", process="host:1")
    theirs = encode(Greeting(version=PROTOCOL_VERSION + 1))
    for read in (read_greeting, welcome):
        with pytest.raises(ProtocolVersionError, match="install the same version"):
            read(theirs)
        with pytest.raises(msgspec.DecodeError):
            read(b"\xc1")
    assert read_welcome(encode(ErrorReply(code=3, message="no", context={}))) == ErrorReply(
        code=3, message="no", context={}
    )
