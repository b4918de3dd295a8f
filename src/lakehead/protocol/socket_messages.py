"""How one message with its attachments travels by a plain socket, where one side speaks at a time.

A message begins with ``u32 size`` of the encoded message, which begins there, and ``u32 count`` of attachments; then
come their sizes, as u64, the encoded message, and the attachments, each followed by zeros up to a multiple of 64 bytes,
so that what is read at once into memory of Arrow's is aligned as Arrow wants it. Each side begins with a `Greeting`,
which says which version of the protocol it speaks; this form is the same in all versions.

Then the client asks for one thing after the other, or for one stream: that begins with a message of one attachment, the
schema; each item is a `StreamHeader` with one attachment, the rows; an `ErrorReply`, or nothing, ends it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from lakehead.errors import CorruptionError
from lakehead.protocol.attachments import ATTACHMENTS_MAX, size_error, version_error
from lakehead.protocol.messages import PROTOCOL_VERSION, ErrorReply, Int64, Message

ENCODED_BYTES_MAX = 1 << 30
"""What an encoded message may hold, without its attachments."""
WINDOW_BYTES = 4 << 20
"""What one side may have sent that the other has not read, as far as the system allows so much."""
_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_BODY_BYTES_MAX = 1 << 40
_ALIGNMENT = 64
_ZEROS = bytes(_ALIGNMENT)
_JOINED_BYTES = 1 << 14
_SCRATCH_BYTES = 1 << 16
_PARTS_MAX = 512

Bytes = bytes | memoryview


class Greeting(Message, frozen=True, kw_only=True, tag=True):
    """First words of each side.

    Attributes:
        version: of the protocol.
        token: who calls.
        process: which process that is, as it says.
        stream: whether it asks for one stream.
    """

    version: Int64 = PROTOCOL_VERSION
    token: str | None = None
    process: str = ""
    stream: bool = False


_greetings = msgspec.msgpack.Decoder(Greeting)
_welcomes = msgspec.msgpack.Decoder(Greeting | ErrorReply)


def read_greeting(data: bytes) -> Greeting:
    """What a client begins with; raises `msgspec.DecodeError` for other bytes, `ProtocolVersionError` of another
    version."""
    return _of_this_version(_greetings.decode(data))


def read_welcome(data: bytes) -> Greeting | ErrorReply:
    """What a server answers to that; raises as `read_greeting`."""
    found = _welcomes.decode(data)
    return found if isinstance(found, ErrorReply) else _of_this_version(found)


def _of_this_version(greeting: Greeting) -> Greeting:
    if greeting.version != PROTOCOL_VERSION:
        raise version_error(str(greeting.version))
    return greeting


class Outgoing:
    """A message on its way."""

    def __init__(self, message: bytes, attachments: Sequence[pa.Buffer] = ()) -> None:
        sizes = [buffer.size for buffer in attachments]
        head = _HEAD.pack(len(message), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + message
        self._parts: list[Bytes] = [head]
        for buffer, size in zip(attachments, sizes, strict=True):
            self._parts += [memoryview(buffer).cast("B"), _ZEROS[: -size % _ALIGNMENT]] if size else []
        if len(self._parts) > 1 and sum(sizes) <= _JOINED_BYTES:
            self._parts = [b"".join(self._parts)]

    @property
    def parts(self) -> Sequence[Bytes]:
        """What is to be sent next, as much as one call of the system takes; nothing when all was sent."""
        return self._parts[:_PARTS_MAX]

    def sent(self, count: int) -> None:
        """So many bytes of it were sent."""
        done = 0
        for part in self._parts:
            if count < len(part):
                break
            count -= len(part)
            done += 1
        del self._parts[:done]
        if count:
            self._parts[0] = memoryview(self._parts[0])[count:]


class Incoming:
    """Puts messages together from the bytes that come, in pieces of any size."""

    def __init__(self, *, bytes_max: int | None = None, ahead: bool = False) -> None:
        """Begin with no message.

        Args:
            bytes_max: what all attachments together may hold; None for peers that are trusted to know.
            ahead: the next message may come before this one was answered, as items of a stream do.
        """
        self._bytes_max = bytes_max
        self._ahead = ahead
        self._small = memoryview(bytearray(_SCRATCH_BYTES))
        self._begin()

    def _begin(self) -> None:
        self._front = self._small
        self._have = 0
        self._front_bytes = 0  # of head, sizes and message, as far as that is known
        self._sizes: tuple[int, ...] | None = None
        self._body: pa.Buffer | None = None
        self._rest: memoryview | None = None
        self._skip = 0

    @property
    def room(self) -> memoryview:
        """Where the next bytes go: to its beginning, as many as there are."""
        if self._rest is not None:
            return self._rest
        return self._small[: self._skip] if self._skip else self._front[self._have :]

    @property
    def whole(self) -> bool:
        """Whether all of `room` is to be filled, whatever comes."""
        return self._rest is not None

    def received(self, count: int) -> tuple[bytes, list[pa.Buffer]] | None:
        """So many bytes were put into `room`; the message, once that is all of it. None have to come where messages may
        come ahead: one may be there already.

        Raises:
            CorruptionError: what comes is no message, and there is no telling where the next one begins.
            LimitExceededError: it was larger than allowed; all of it was read, and the next one may come.
        """
        if self._rest is not None:
            self._rest = self._rest[count:]
            return None if self._rest.nbytes else self._finished()
        if self._skip:
            self._skip -= count
            return None if self._skip else self._too_large()
        self._have += count
        if self._sizes is None and not self._read_sizes():
            return None
        if self._have < self._front_bytes:
            self._make_front(self._front_bytes)
            return None
        return self._begin_body()

    def _read_sizes(self) -> bool:
        """Read head and sizes, once they are there."""
        if self._have < _HEAD.size:
            return False
        message, count = _HEAD.unpack_from(self._front)
        if count > ATTACHMENTS_MAX or message > ENCODED_BYTES_MAX:
            raise CorruptionError(
                f"a message of {message:,} bytes with {count:,} attachments: the peer does not speak this protocol"
            )
        at = _HEAD.size + count * _SIZE.size
        if self._have < at:
            self._make_front(at)
            return False
        self._sizes = struct.unpack_from(f"<{count}Q", self._front, _HEAD.size)
        self._front_bytes = at + message
        return True

    def _make_front(self, size: int) -> None:
        if size > len(self._front):
            larger = memoryview(bytearray(size))
            larger[: self._have] = self._front[: self._have]
            self._front = larger

    def _begin_body(self) -> tuple[bytes, list[pa.Buffer]] | None:
        assert self._sizes is not None
        size = sum(s + -s % _ALIGNMENT for s in self._sizes)
        came = self._front[self._front_bytes : self._have]
        if size > _BODY_BYTES_MAX:
            raise CorruptionError(f"attachments of {size:,} bytes: the peer does not speak this protocol")
        surplus = b""
        if len(came) > size:
            if not self._ahead:
                raise CorruptionError("the peer spoke before it was asked: it does not speak this protocol")
            surplus = bytes(came[size:])
            came = came[:size]
        if self._bytes_max is not None and sum(self._sizes) > self._bytes_max:
            self._skip = size - len(came)
            return None if self._skip else self._too_large()
        if size:
            self._body = pa.allocate_buffer(size)
            body = memoryview(self._body).cast("B")
            body[: len(came)] = came
            if len(came) < size:
                self._rest = body[len(came) :]
                return None
        found = self._finished()
        self._small[: len(surplus)] = surplus
        self._have = len(surplus)
        return found

    def _finished(self) -> tuple[bytes, list[pa.Buffer]]:
        assert self._sizes is not None
        message = bytes(self._front[_HEAD.size + len(self._sizes) * _SIZE.size : self._front_bytes])
        found: list[pa.Buffer] = []
        at = 0
        for size in self._sizes:
            found.append(self._body.slice(at, size) if self._body is not None else pa.py_buffer(b""))
            at += size + -size % _ALIGNMENT
        self._begin()
        return message, found

    def _too_large(self) -> tuple[bytes, list[pa.Buffer]]:
        assert self._bytes_max is not None
        self._begin()
        raise size_error(self._bytes_max)
