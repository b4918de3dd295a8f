"""Avro files of any codec: damage is one error."""

from __future__ import annotations

import json

import pytest
from pyiceberg.avro.codecs import KNOWN_CODECS
from pyiceberg.avro.reader import Reader, StringReader
from tests.unit.iceberg.test_relocation import avro

from lakehead.errors import CorruptionError, MissingDependencyError
from lakehead.iceberg.avro import _Decoder, read_avro

_CODECS = ["null", "deflate", "bzip2", "zstandard"]


def _reader(schema: str) -> Reader:
    assert json.loads(schema)
    return StringReader()


@pytest.mark.parametrize("codec", _CODECS)
def test_whatever_compresses_a_block_a_wrong_one_is_damage(codec: str) -> None:
    names = [b"\x08name" for _ in range(50)]
    whole = avro(names, codec, b"text")
    assert read_avro("x.avro", whole, _reader) == ["name"] * 50
    block = whole.index(whole[-16:]) + 16
    for at in range(block, len(whole) - 16):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        try:
            read_avro("x.avro", bytes(damaged), _reader)
        except CorruptionError as e:
            assert "x.avro is damaged" in e.message


def test_a_codec_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def decompress(data: bytes) -> bytes:
        raise ImportError("Snappy support not installed, please install using `pip install pyiceberg[snappy]`")

    whole = avro([b"\x08name"], "deflate", b"text")
    monkeypatch.setattr(KNOWN_CODECS["deflate"], "decompress", decompress)
    with pytest.raises(MissingDependencyError, match=r"pyiceberg\[snappy\]"):
        read_avro("x.avro", whole, _reader)


@pytest.mark.parametrize("bytes_", [3, -1, 1 << 62])
def test_no_more_is_read_than_there_is(bytes_: int) -> None:
    decoder = _Decoder(b"ab")
    with pytest.raises(EOFError):
        decoder.read(bytes_)
    assert decoder.read(2) == b"ab" and decoder.left == 0
