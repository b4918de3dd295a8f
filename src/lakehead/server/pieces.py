"""What a task has staged, as a file: where it lies, and its bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import crc32c
import msgspec
import pyarrow as pa

from lakehead.errors import CorruptionError
from lakehead.format.frame import PUBLISHERS, WRITER_ID_BYTES
from lakehead.protocol.codec import decode_call, encode
from lakehead.protocol.messages import Write

STAGED = "staged"
"""The folder beside the tablets of a table."""
_MAGIC = b"LHS1"
_HEAD = struct.Struct("<4sIII")
_ALIGNMENT = 64


def staged_folder(table_folder: str, job: str, batch: int) -> str:
    """Where the pieces of a batch are; each is ``<attempt>-<number>``."""
    return f"{table_folder}/{STAGED}/{hashlib.blake2b(job.encode(), digest_size=16).hexdigest()}-{batch}"


def job_writer(job: str) -> bytes:
    """The 16 bytes that stand for a job in batch frames."""
    size = WRITER_ID_BYTES - len(PUBLISHERS)
    return PUBLISHERS + hashlib.blake2b(job.encode(), digest_size=size, person=b"lakehead-publish").digest()


def encoded(write: Write, bodies: Sequence[pa.Buffer]) -> bytes:
    """A piece as a file: head, sizes of the bodies, the write, and the bodies, each at a multiple of 64. The head's
    checksum is that of what stands before the bodies, which have theirs in the write."""
    message = encode(write)
    sizes = struct.pack(f"<{len(bodies)}Q", *(b.size for b in bodies))
    before = sizes + message
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, len(bodies), len(message), crc32c.crc32c(before)), before]
    at = _HEAD.size + len(before)
    for body in bodies:
        gap = -at % _ALIGNMENT
        parts += [bytes(gap), memoryview(body)]
        at += gap + body.size
    return b"".join(parts)


def decoded(data: pa.Buffer, path: str) -> tuple[Write, list[pa.Buffer]]:
    """Inverse of `encoded`.

    Raises:
        CorruptionError: the bytes are no piece.
    """
    view = memoryview(data)
    try:
        magic, count, length, crc = _HEAD.unpack_from(view)
        at = _HEAD.size + 8 * count + length
        if magic != _MAGIC or crc32c.crc32c(view[_HEAD.size : at]) != crc:
            raise ValueError("its checksum is wrong")
        sizes = struct.unpack_from(f"<{count}Q", view, _HEAD.size)
        write = decode_call(bytes(view[at - length : at]))
        assert isinstance(write, Write)
        bodies = []
        for size in sizes:
            at += -at % _ALIGNMENT
            if at + size > data.size:
                raise ValueError("it is cut off")
            bodies.append(data.slice(at, size))
            at += size
    except (struct.error, ValueError, msgspec.DecodeError) as e:
        raise CorruptionError(f"{path} holds no staged rows that can be read: {e}", path=path) from e
    return write, bodies
