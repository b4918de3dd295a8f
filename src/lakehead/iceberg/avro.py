"""Avro files, read so that damage is an error.

PyIceberg's own decoder is compiled and believes what a file says of its lengths: of one that is cut or has a wrong bit
it decodes memory that lies elsewhere, or ends the process; and a file that ends too early just ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyiceberg.avro.codecs.codec import Codec
from pyiceberg.avro.decoder import BinaryDecoder
from pyiceberg.avro.file import META_SCHEMA, AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_reader
from pyiceberg.exceptions import ResolveError

from lakehead.errors import MissingDependencyError
from lakehead.iceberg.file_io import damaged_file

_HEADER = construct_reader(META_SCHEMA, {-1: AvroFileHeader})
_MAGIC, _SYNC_BYTES = b"Obj\x01", 16
_INT_BYTES_MAX = 10
_UNDECODABLE = (
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    ResolveError,
)
"""How PyIceberg says that a file is no Avro, or not of the records that it is read for."""


class _Decoder(BinaryDecoder):
    """Of bytes; raises `EOFError` where these end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that were not read."""
        return len(self._data) - self._at

    def tell(self) -> int:
        return self._at

    def read(self, n: int) -> bytes:
        if not 0 <= n <= self.left:
            raise EOFError(f"{n} bytes are to follow, and {self.left} do")
        self._at += n
        return self._data[self._at - n : self._at]

    def skip(self, n: int) -> None:
        self.read(n)

    def read_int(self) -> int:
        data, start = self._data, self._at
        value = shift = 0
        for at in range(start, min(start + _INT_BYTES_MAX, len(data))):
            byte = data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self._at = at + 1
                return (value >> 1) ^ -(value & 1)
            shift += 7
        raise EOFError("a number does not end")

    def skip_int(self) -> None:
        self.read_int()


def read_avro(path: str, data: bytes, reader_of: Callable[[str], Reader]) -> list[Any]:
    """All records of an Avro file.

    Args:
        path: names it in errors.
        reader_of: how records of a schema are read, which comes as JSON.

    Raises:
        CorruptionError: it is damaged.
        MissingDependencyError: it is compressed by what is not installed.
    """
    try:
        return _records(data, reader_of)
    except _UNDECODABLE as e:
        raise damaged_file(path, e) from e


def _records(data: bytes, reader_of: Callable[[str], Reader]) -> list[Any]:
    decoder = _Decoder(data)
    header = _HEADER.read(decoder)
    if header.magic != _MAGIC:
        raise ValueError("it is no Avro file")
    codec, reader = header.compression_codec(), reader_of(header.meta["avro.schema"])
    records: list[Any] = []
    while decoder.left:
        count, block = decoder.read_int(), decoder.read_bytes()
        if decoder.read(_SYNC_BYTES) != header.sync:
            raise ValueError("what ends a block is missing")
        within = _Decoder(_decompressed(codec, block) if codec else block)
        records += [reader.read(within) for _ in range(count)]
        if within.left:
            raise ValueError(f"{within.left} bytes follow the last record of a block")
    return records


def _decompressed(codec: type[Codec], block: bytes) -> bytes:
    try:
        return codec.decompress(block)
    except ImportError as e:
        raise MissingDependencyError(f"the lake's manifests are compressed by what is not installed here: {e}") from e
    except Exception as e:  # each codec has errors of its own
        raise ValueError(f"a block cannot be decompressed: {e}") from e
