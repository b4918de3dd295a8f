"""Moves a data folder whose lake names its files by absolute address, without re-encoding what it wrote.

Iceberg metadata holds addresses in JSON, in SQLite and in Avro records, where a text of the same length can take
another's place byte by byte; only delete files, which hold addresses as Parquet values, are written again. So a golden
folder is made at, and unpacked to, a path of exactly `PATH_BYTES` bytes.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

PATH_BYTES = 230
PLACEHOLDER = "/golden/".ljust(PATH_BYTES, "x")


def padded(parent: Path) -> Path:
    """A path of `PATH_BYTES` bytes below a folder; nothing is made."""
    missing = PATH_BYTES - len(str(parent)) - 1
    assert missing >= 1, f"{parent} is too long for a golden folder"
    return parent / ("x" * missing)


def relocate(folder: Path, old: str, new: str) -> None:
    """Have the lake files in a folder name each other by another path, which must be as long as the old one."""
    was, now = old.encode(), new.encode()
    assert len(was) == len(now) == PATH_BYTES
    for path in sorted((folder / "lake").rglob("*")):
        if path.suffix in (".json", ".db"):
            path.write_bytes(path.read_bytes().replace(was, now))
        elif path.suffix == ".avro":
            path.write_bytes(_relocated_avro(path.read_bytes(), was, now))
        elif path.suffix == ".parquet" and "file_path" in pq.read_schema(path).names:
            _relocate_deletes(path, old, new)


def _relocate_deletes(path: Path, old: str, new: str) -> None:
    table = pq.read_table(path)
    at = table.schema.get_field_index("file_path")
    moved = pc.replace_substring(table["file_path"], old, new)
    pq.write_table(table.set_column(at, table.schema.field(at), moved), path)


def _relocated_avro(data: bytes, was: bytes, now: bytes) -> bytes:
    """An object container file: magic, metadata map, sync marker; then blocks of count, size, bytes, marker."""
    assert data[:4] == b"Obj\x01"
    at, metadata = 4, {}
    while count := _long(data, at)[0]:
        at = _long(data, at)[1]
        for _ in range(count):
            name, at = _bytes(data, at)
            metadata[name], at = _bytes(data, at)
    at = _long(data, at)[1]
    header, marker = data[: at + 16], data[at : at + 16]
    at += 16
    parts = [header.replace(was, now)]
    deflated = metadata.get(b"avro.codec", b"null") == b"deflate"
    assert deflated or metadata.get(b"avro.codec", b"null") == b"null"
    while at < len(data):
        count, at = _long(data, at)
        block, at = _bytes(data, at)
        assert data[at : at + 16] == marker
        at += 16
        if deflated:
            packer = zlib.compressobj(wbits=-15)
            plain = zlib.decompress(block, wbits=-15).replace(was, now)
            block = packer.compress(plain) + packer.flush()
        else:
            block = block.replace(was, now)
        parts += [_encoded(count), _encoded(len(block)), block, marker]
    return b"".join(parts)


def _long(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at


def _encoded(value: int) -> bytes:
    rest, out = value << 1, bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _long(data, at)
    return data[at : at + size], at + size
