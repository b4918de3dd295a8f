"""Avro files, read and written again by their own schema: what is not changed stays as another engine wrote it.

PyIceberg reads manifests into its own classes, which drop fields that it does not know. Here a record is a plain dict
of every field that its writer's schema names, so that one address in it can be changed and all else be kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyiceberg.avro.codecs import KNOWN_CODECS

from lakehead.errors import LakeStateError

_MAGIC = b"Obj\x01"
_SYNC_BYTES = 16
_FIXED = {"boolean": 1, "float": 4, "double": 8}


@dataclass(frozen=True)
class Branch:
    """A value of a union: which of its types it has, and the value."""

    index: int
    value: Any


def edit_avro(data: bytes, edit: Callable[[dict[str, Any]], None], path: str) -> bytes:
    """An Avro object container file with every record changed in place by ``edit``.

    Values of unions are `Branch`; floating-point numbers, booleans and fixed are their bytes; all else is plain.

    Raises:
        LakeStateError: it is no such file, or is compressed in a way that cannot be read here; ``path`` is named.
    """
    try:
        return _edited(data, edit)
    except (IndexError, KeyError, ValueError, TypeError, UnicodeDecodeError, OverflowError) as e:
        raise LakeStateError(f"the lake's metadata file {path} cannot be read ({e}): restore it", path=path) from e


def _edited(data: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    if data[:4] != _MAGIC:
        raise ValueError("it is no Avro file")
    source = _Reader(data, 4)
    metadata = source.value({"type": "map", "values": "bytes"}, {})
    head_end = source.at + _SYNC_BYTES
    marker = data[source.at : head_end]
    names: dict[str, Any] = {}
    schema = _named(json.loads(metadata["avro.schema"]), names)
    codec = _Codec(metadata.get("avro.codec", b"null").decode())
    out = bytearray(data[:head_end])
    source.at = head_end
    while source.at < len(data):
        count = source.long()
        block = _Reader(codec.unpack(source.take(source.long())), 0)
        if source.take(_SYNC_BYTES) != marker:
            raise ValueError("its blocks do not end where they say")
        records = bytearray()
        for _ in range(count):
            record = block.value(schema, names)
            edit(record)
            _write(records, schema, record, names)
        packed = codec.pack(bytes(records))
        out += _long(count) + _long(len(packed)) + packed + marker
    return bytes(out)


class _Codec:
    def __init__(self, name: str) -> None:
        if name not in KNOWN_CODECS:
            raise ValueError(f"its compression is {name!r}")
        self._codec = KNOWN_CODECS[name]

    def unpack(self, data: bytes) -> bytes:
        return data if self._codec is None else self._codec.decompress(data)

    def pack(self, data: bytes) -> bytes:
        return data if self._codec is None else self._codec.compress(data)[0]


def _named(schema: Any, names: dict[str, Any]) -> Any:
    """Note the types that have names, which other places in the schema may use instead of the type."""
    if isinstance(schema, list):
        for part in schema:
            _named(part, names)
    elif isinstance(schema, dict):
        if "name" in schema:
            names[schema["name"]] = schema
        for part in ("items", "values", "type"):
            if not isinstance(schema.get(part), str | None):
                _named(schema[part], names)
        for field in schema.get("fields", ()):
            _named(field["type"], names)
    return schema


def _type_of(schema: Any, names: dict[str, Any]) -> tuple[str, Any]:
    """What a schema is: a kind of Avro, and where its parts stand."""
    while True:
        if isinstance(schema, list):
            return "union", schema
        if isinstance(schema, str):
            if schema not in names:
                return schema, schema
            schema = names[schema]
        elif isinstance(schema["type"], str) and schema["type"] not in names:
            return schema["type"], schema
        else:
            schema = schema["type"]


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def take(self, size: int) -> bytes:
        end = self.at + size
        if size < 0 or end > len(self._data):
            raise ValueError("it is cut off")
        part, self.at = self._data[self.at : end], end
        return part

    def long(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self.at]
            value |= (byte & 0x7F) << shift
            self.at, shift = self.at + 1, shift + 7
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)

    def _blocks(self) -> Any:
        while count := self.long():
            if count < 0:
                count = -count
                self.long()  # the block's size in bytes
            yield from range(count)

    def value(self, schema: Any, names: dict[str, Any]) -> Any:
        kind, schema = _type_of(schema, names)
        if kind in ("int", "long", "enum"):
            return self.long()
        if kind == "string":
            return self.take(self.long()).decode()
        if kind == "bytes":
            return self.take(self.long())
        if kind == "null":
            return None
        if kind == "union":
            index = self.long()
            return Branch(index, self.value(schema[index], names))
        if kind == "record":
            return {f["name"]: self.value(f["type"], names) for f in schema["fields"]}
        if kind == "array":
            return [self.value(schema["items"], names) for _ in self._blocks()]
        if kind == "map":
            return {self.take(self.long()).decode(): self.value(schema["values"], names) for _ in self._blocks()}
        return self.take(schema["size"] if kind == "fixed" else _FIXED[kind])


def _write(out: bytearray, schema: Any, value: Any, names: dict[str, Any]) -> None:
    kind, schema = _type_of(schema, names)
    if kind in ("int", "long", "enum"):
        out += _long(value)
    elif kind in ("string", "bytes"):
        data = value.encode() if kind == "string" else value
        out += _long(len(data)) + data
    elif kind == "union":
        out += _long(value.index)
        _write(out, schema[value.index], value.value, names)
    elif kind == "record":
        for field in schema["fields"]:
            _write(out, field["type"], value[field["name"]], names)
    elif kind in ("array", "map"):
        if value:
            out += _long(len(value))
        for item in value:
            if kind == "array":
                _write(out, schema["items"], item, names)
            else:
                _write(out, "string", item, names)
                _write(out, schema["values"], value[item], names)
        out += _long(0)
    elif kind != "null":
        out += value


def _long(value: int) -> bytes:
    rest, out = (value << 1) ^ (value >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])
