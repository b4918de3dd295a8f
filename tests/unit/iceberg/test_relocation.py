"""What is written again for a lake that was moved: every address of the old place, and nothing else."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.avro.codecs import KNOWN_CODECS

from lakehead.config import TableProperties
from lakehead.errors import LakeStateError, UnavailableError
from lakehead.iceberg.avro_file import Branch, edit_avro
from lakehead.iceberg.relocation import Move, local_path, relocate_table
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "all",
    "fields": [
        {"name": "text", "type": "string"},
        {"name": "maybe", "type": ["null", "long", "string"], "default": None},
        {"name": "raw", "type": "bytes"},
        {"name": "flag", "type": "boolean"},
        {"name": "f", "type": "float"},
        {"name": "d", "type": {"type": "double"}},
        {"name": "uuid", "type": {"type": "fixed", "name": "uuid_fixed", "size": 4}},
        {"name": "again", "type": "uuid_fixed"},
        {"name": "kind", "type": {"type": "enum", "name": "kinds", "symbols": ["A", "B"]}},
        {"name": "pairs", "type": {"type": "array", "items": {"type": "record", "name": "kv", "fields": [
            {"name": "key", "type": "int"}, {"name": "value", "type": "bytes"}]}, "logicalType": "map"}},
        {"name": "named", "type": {"type": "map", "values": ["null", "kv"]}},
    ],
}  # fmt: skip


def long(value: int) -> bytes:
    rest, out = (value << 1) ^ (value >> 63), b""
    while rest > 0x7F:
        out, rest = out + bytes([rest & 0x7F | 0x80]), rest >> 7
    return out + bytes([rest])


def text(value: bytes) -> bytes:
    return long(len(value)) + value


def record(name: bytes, number: int) -> bytes:
    pair = long(number) + text(b"\x00\xff")
    # A block of two with its size in bytes, then one without.
    pairs = long(-2) + long(2 * len(pair)) + pair + pair + long(1) + pair + long(0)
    named = long(1) + text(b"key") + long(1) + pair + long(0)
    plain = text(name) + long(1) + long(-number) + text(b"raw") + b"\x01abcdabcdefghwxyz1234" + long(1)
    return plain + pairs + named


def avro(records: list[bytes], codec: str, mine: bytes = b"\x00\xff") -> bytes:
    metadata = {b"avro.schema": json.dumps(SCHEMA).encode(), b"avro.codec": codec.encode(), b"mine": mine}
    head = b"Obj\x01" + long(len(metadata)) + b"".join(text(k) + text(v) for k, v in metadata.items()) + long(0)
    out = head + b"s" * 16
    for part in (records[:2], records[2:]):
        data = b"".join(part)
        packed = data if KNOWN_CODECS[codec] is None else KNOWN_CODECS[codec].compress(data)[0]
        out += long(len(part)) + text(packed) + b"s" * 16
    return out


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2"])
def test_avro_files_keep_what_is_not_changed(codec: str) -> None:
    numbers = [0, 1, -1, 63, 64, -65, 2**40, -(2**62)]
    data = avro([record(b"name %d" % n, n) for n in numbers], codec)
    seen: list[dict[str, Any]] = []
    same = edit_avro(data, lambda r: seen.append(json.loads(json.dumps(r, default=str))), "x.avro")
    assert [r["text"] for r in seen] == [f"name {n}" for n in numbers]
    again: list[dict[str, Any]] = []
    assert edit_avro(same, again.append, "x.avro") == same, "written as it is read"
    assert [r["maybe"] for r in again] == [Branch(1, -n) for n in numbers]
    assert [len(r["pairs"]) for r in again] == [3] * len(numbers)
    assert same.startswith(data[: data.index(b"s" * 16) + 16]), "the head is the writer's own"

    def rename(r: dict[str, Any]) -> None:
        r["text"] = "another, longer: " + "x" * 300
        r["maybe"] = Branch(2, "text")

    changed: list[dict[str, Any]] = []
    edit_avro(edit_avro(data, rename, "x.avro"), changed.append, "x.avro")
    assert {r["text"] for r in changed} == {"another, longer: " + "x" * 300}
    assert [{**r, "text": "", "maybe": ""} for r in changed] == [{**r, "text": "", "maybe": ""} for r in again]


def cut(data: bytes) -> bytes:
    return data[:-30]


def torn(data: bytes) -> bytes:
    return data[:-1] + b"x"


@pytest.mark.parametrize("damage", [cut, torn, lambda d: b"PAR1" + d, lambda d: d.replace(b"\x08null", b"\x08lzma", 1)])
def test_damaged_avro_files_are_named(damage: Callable[[bytes], bytes]) -> None:
    data = avro([record(b"a", 1), record(b"b", 2), record(b"c", 3)], "null")
    with pytest.raises(LakeStateError, match=r"/lake/x\.avro"):
        edit_avro(damage(data), lambda _: None, "/lake/x.avro")


def test_addresses_of_the_old_place_move_however_they_are_spelled() -> None:
    move = Move("/a/lake", "/much/deeper/lake")
    for scheme in ("file://", "file:", ""):
        assert move.address(f"{scheme}/a/lake/shop/t/x.parquet") == f"{scheme}/much/deeper/lake/shop/t/x.parquet"
        assert move.address(f"{scheme}/a/lake") == f"{scheme}/much/deeper/lake"
        assert local_path(f"{scheme}/a/lake") == "/a/lake"
    for other in ("file:///a/lakes/x", "/a", "s3://a/lake/x", "file:///b/a/lake/x", ""):
        assert move.address(other) == other and not move.concerns(other)


DESC = TableDescriptor(
    table_id="f" * 32, path=TablePath("shop", "t"), schemas=Schemas.only(pa.schema([("k", pa.int64())])),
    primary_key=(), partition_by=(), bucket_key=(), buckets=1, lake="iceberg", properties=TableProperties(),
)  # fmt: skip


def catalog(path: Path, location: str | None) -> str:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "create table iceberg_tables(catalog_name, table_namespace, table_name, metadata_location,"
            " previous_metadata_location)"
        )
        db.execute("insert into iceberg_tables values ('lakehead', 'shop', 't', ?, null)", (location,))
    db.close()
    return str(path)


def test_what_is_in_its_place_is_left_alone(tmp_path: Path) -> None:
    db = catalog(tmp_path / "catalog.db", f"file://{tmp_path}/shop/t-{DESC.table_id}/metadata/0.metadata.json")
    assert not relocate_table(db, "lakehead", DESC, str(tmp_path), "me")
    assert not relocate_table(db, "another", DESC, str(tmp_path), "me")
    assert not relocate_table(str(tmp_path / "missing.db"), "lakehead", DESC, str(tmp_path), "me")
    sqlite3.connect(tmp_path / "empty.db").close()
    assert not relocate_table(str(tmp_path / "empty.db"), "lakehead", DESC, str(tmp_path), "me")


def test_what_cannot_be_understood_or_is_missing_changes_nothing(tmp_path: Path) -> None:
    db = catalog(tmp_path / "a.db", "s3://bucket/shop/t/metadata/0.metadata.json")
    with pytest.raises(LakeStateError, match=r"catalog\.db"):
        relocate_table(db, "lakehead", DESC, str(tmp_path), "me")
    gone = f"file:///old/lake/shop/t-{DESC.table_id}/metadata/00001-x.metadata.json"
    db = catalog(tmp_path / "b.db", gone)
    with pytest.raises(UnavailableError):
        relocate_table(db, "lakehead", DESC, str(tmp_path), "me")
    damaged = tmp_path / f"shop/t-{DESC.table_id}/metadata/00001-x.metadata.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    with pytest.raises(LakeStateError, match="restore"):
        relocate_table(db, "lakehead", DESC, str(tmp_path), "me")
    (tmp_path / "c.db").write_bytes(b"no database, whatever it is called" * 40)
    with pytest.raises(UnavailableError):
        relocate_table(str(tmp_path / "c.db"), "lakehead", DESC, str(tmp_path), "me")
    with closing(sqlite3.connect(db)) as again, again:
        assert again.execute("select metadata_location from iceberg_tables").fetchone() == (gone,)
    again.close()
