"""What a server sends ends no client: it is looked at before anything is computed with it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.attack.hostile_server import HostileServer, Parts, with_lying_texts

import lakehead as lh
from lakehead.protocol.codec import encode
from lakehead.protocol.messages import NamesReply

ROWS = [{"k": k, "s": "abc"} for k in range(4)]


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[HostileServer]:
    with lh.connect(tmp_path / "data") as owner:
        owner.create_table("a.keyed", [("k", "int64"), ("s", "string")], primary_key="k").upsert(ROWS)
        owner.create_table("a.log", [("k", "int64"), ("s", "string")]).append(ROWS)
        owner.create_table(
            "a.two", [("k", "int64"), ("j", "int64"), ("s", "string")], primary_key=["k", "j"], bucket_key=["k"]
        ).upsert([{**row, "j": 1} for row in ROWS])
        made = HostileServer(owner._server)
        yield made
        made.shutdown()


@pytest.fixture
def con(hostile: HostileServer) -> Iterator[lh.Connection]:
    with lh.connect(hostile.address.uri, token="t") as made:
        yield made


def test_it_answers_as_long_as_it_is_honest(con: lh.Connection) -> None:
    keyed = con.table("a.keyed")
    assert keyed.get(1) == ROWS[1] and keyed.lookup([3, 0, 9])["k"].to_pylist() == [3, 0]
    assert con.table("a.two").prefix_lookup([2]).num_rows == 1
    assert con.table("a.log").scan().count() == 4


@pytest.mark.parametrize("table", ["a.keyed", "a.log"])
@pytest.mark.parametrize("how", ["scan", "subscribe", "full"])
def test_rows_that_point_outside_of_their_column(
    hostile: HostileServer, con: lh.Connection, table: str, how: str
) -> None:
    opened = con.table(table)
    hostile.item = lambda data, rows: (data, with_lying_texts(rows, "s") if rows.num_rows > 2 else rows)
    with pytest.raises(lh.CorruptionError, match="out of bounds"):
        if how == "scan":
            opened.scan().to_arrow()
        else:
            next(opened.subscribe("full" if how == "full" and table == "a.keyed" else "earliest"))
    hostile.item = lambda data, rows: (data, rows)
    assert opened.scan().count() == 4


@pytest.mark.parametrize("header", [b"", b"\xc1", b"\x80", encode(NamesReply(names=[]))])
@pytest.mark.parametrize("how", ["scan", "subscribe"])
def test_items_that_say_nothing(hostile: HostileServer, con: lh.Connection, header: bytes, how: str) -> None:
    hostile.item = lambda data, rows: (header, rows)
    table = con.table("a.log")
    with pytest.raises(lh.CorruptionError):
        table.scan().to_arrow() if how == "scan" else next(table.subscribe("earliest"))


def lying(parts: Parts, schema: pa.Schema) -> Parts:
    rows = pa.ipc.read_record_batch(parts[0], schema)
    return [with_lying_texts(rows, "s").serialize(), *parts[1:]]


def _bomb(rows: pa.RecordBatch) -> pa.Buffer:
    """A few kilobytes that stand for the rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(rows)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return reader.read_next_message().serialize()


SPOILED: dict[str, Callable[[Parts, pa.Schema], Parts]] = {
    "texts": lying,
    "none": lambda parts, schema: [],
    "one": lambda parts, schema: parts[:1],
    "more": lambda parts, schema: parts * 2,
    "cut": lambda parts, schema: [parts[0].slice(0, parts[0].size // 2), *parts[1:]],
    "bytes": lambda parts, schema: [pa.py_buffer(b"no message"), *parts[1:]],
}
PLACES: dict[str, bytes] = {
    "outside": struct.pack("<3q", 0, 1, 1 << 40),
    "before": struct.pack("<3q", -1, 1, 2),
    "fewer": struct.pack("<2q", 0, 1),
    "odd": b"x" * 23,
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("call", ["lookup", "prefix"])
def test_answers_of_lookups_that_cannot_be(hostile: HostileServer, con: lh.Connection, how: str, call: str) -> None:
    table = con.table("a.keyed" if call == "lookup" else "a.two")
    ask = (lambda: table.lookup([0, 1, 2])) if call == "lookup" else (lambda: table.prefix_lookup([0, 1, 2]))
    hostile.reply = lambda data, parts: (data, SPOILED[how](parts, table.schema))
    with pytest.raises(lh.CorruptionError):
        ask()
    hostile.reply = lambda data, parts: (data, parts)
    assert ask().num_rows == 3


@pytest.mark.parametrize("how", PLACES)
def test_rows_of_keys_that_nobody_asked_for(hostile: HostileServer, con: lh.Connection, how: str) -> None:
    table = con.table("a.keyed")
    hostile.reply = lambda data, parts: (data, [parts[0], pa.py_buffer(PLACES[how])])
    with pytest.raises(lh.CorruptionError, match="was not asked for"):
        table.lookup([0, 1, 2])


def test_a_small_answer_that_stands_for_a_large_one(hostile: HostileServer, con: lh.Connection) -> None:
    table = con.table("a.keyed")
    bomb = _bomb(pa.RecordBatch.from_pylist([{"k": 0, "s": "x" * (514 << 20)}], schema=table.schema))
    hostile.reply = lambda data, parts: (data, [bomb, *parts[1:]])
    with pytest.raises(lh.LimitExceededError):
        table.lookup([0, 1, 2])
