"""What a server sends ends no client: it is looked at before anything is computed with it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.attack.hostile_server import HostileServer, Parts, with_lying_texts
from tests.attack.wire_fuzz import OTHER_COLUMNS

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


def spoiling(change: Callable[[dict[str, Any]], object], kind: str) -> Callable[[bytes, Parts], tuple[bytes, Parts]]:
    """Replies of this kind with something in them changed."""

    def reply(data: bytes, parts: Parts) -> tuple[bytes, Parts]:
        plain = msgspec.msgpack.decode(data)
        if plain["type"] == kind:
            change(plain)
        return msgspec.msgpack.encode(plain), parts

    return reply


def first_tablet(**told: object) -> Callable[[dict[str, Any]], object]:
    return lambda reply: (reply["leases"][0] if "leases" in reply else reply)["tablets"][0].update(told)


CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], object], Callable[[lh.Connection], object]]] = {
    "no leases": ("LeasesReply", lambda r: r["leases"].clear(), lambda con: con.table("a.log").scan()),
    "two leases": ("LeasesReply", lambda r: r["leases"].extend(r["leases"]), lambda con: con.table("a.log").scan()),
    "leases of no time": ("LeasesReply", lambda r: r.update(seconds=-1.0), lambda con: con.table("a.log").scan()),
    "a lease of another tablet": ("LeasesReply", first_tablet(bucket=7), lambda con: con.table("a.log").scan()),
    "a log that begins at its end": ("LeasesReply", first_tablet(log_start=9), lambda con: con.table("a.log").scan()),
    "rows without a log": ("WatermarksReply", first_tablet(rows=1 << 40), lambda con: con.table("a.log").status()),
    "another partition": ("WatermarksReply", first_tablet(partition="../x"), lambda con: con.table("a.log").status()),
    "a tablet twice": (
        "WatermarksReply", lambda r: r["tablets"].extend(r["tablets"]), lambda con: con.table("a.log").status(),
    ),
    "no times": ("TimestampsReply", lambda r: r["timestamps_us"].clear(), lambda con: con.table("a.log").status()),
    "not exact": ("LookupReply", lambda r: r.update(exact=False), lambda con: con.table("a.keyed").lookup([1])),
    "half a row": ("GetReply", lambda r: r["row"].pop(), lambda con: con.table("a.keyed").get(1)),
    "a text for a number": ("GetReply", lambda r: r.update(row=["x", "y"]), lambda con: con.table("a.keyed").get(1)),
    "a key that is no column": (
        "TableReply", lambda r: r["info"].update(primary_key=["x"]), lambda con: con.table("a.log"),
    ),
    "a key twice": (
        "TableReply", lambda r: r["info"].update(primary_key=["k", "k"]), lambda con: con.table("a.log"),
    ),
    "no buckets": ("TableReply", lambda r: r["info"].update(buckets=0), lambda con: con.table("a.log")),
    "epochs of any size": (
        "WriterReply", lambda r: r.update(epoch=1 << 40), lambda con: con.table("a.log").writer("w"),
    ),
    "sequences of no tablet": (
        "WriterReply", lambda r: r.update(sequences=[1]), lambda con: con.table("a.log").writer("w"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_answers_that_contradict_themselves(hostile: HostileServer, con: lh.Connection, what: str) -> None:
    kind, change, call = CONTRADICTIONS[what]
    honest, hostile.reply = hostile.reply, spoiling(change, kind)
    with pytest.raises(lh.CorruptionError):
        call(con)
    hostile.reply = honest
    call(con)


@pytest.mark.parametrize("data", [None, b"", b"\xc1", encode(NamesReply(names=[]))], ids=str)
def test_what_came_of_a_write_is_not_known_where_nobody_can_read_the_answer(
    hostile: HostileServer, con: lh.Connection, data: bytes | None
) -> None:
    table = con.table("a.log")
    honest = hostile.reply
    hostile.reply = (
        spoiling(lambda r: r["offsets"].clear(), "WriteReply") if data is None else lambda _, parts: (data, parts)
    )
    with pytest.raises(lh.OutcomeUnknownError):
        table.append(ROWS)
    hostile.reply = honest
    assert table.scan().count() == 8


@pytest.mark.parametrize("columns", OTHER_COLUMNS)
@pytest.mark.parametrize("how", ["scan", "subscribe", "full"])
def test_streams_of_other_columns(hostile: HostileServer, con: lh.Connection, how: str, columns: Any) -> None:
    table = con.table("a.keyed" if how == "full" else "a.log")
    hostile.columns = columns
    with pytest.raises(lh.CorruptionError):
        table.scan().to_arrow() if how == "scan" else next(table.subscribe("full" if how == "full" else "earliest"))


HEADERS: dict[str, dict[str, Any]] = {
    "another partition": {"partition": "p=1"},
    "another bucket": {"bucket": 5},
    "no end": {"end_offset": None},
    "an end behind what was asked for": {"end_offset": 1 << 40},
    "an end before it": {"end_offset": -1},
}


@pytest.mark.parametrize("what", HEADERS)
def test_rows_that_were_not_asked_for(hostile: HostileServer, con: lh.Connection, what: str) -> None:
    hostile.item = lambda data, rows: (msgspec.msgpack.encode({**msgspec.msgpack.decode(data), **HEADERS[what]}), rows)
    with pytest.raises(lh.CorruptionError):
        con.table("a.log").scan().to_arrow()
    if "partition" in what or "bucket" in what:
        with pytest.raises(lh.CorruptionError):
            next(con.table("a.log").subscribe("earliest"))


@pytest.mark.parametrize("codes", [[0, 1, 9, 0], [0, None, 0, 0]], ids=str)
def test_changes_that_are_none(hostile: HostileServer, con: lh.Connection, codes: list[int | None]) -> None:
    def spoil(data: bytes, rows: pa.RecordBatch) -> tuple[bytes, pa.RecordBatch]:
        at = rows.schema.get_field_index("__change_type")
        return data, rows.set_column(at, "__change_type", pa.array(codes[: rows.num_rows], pa.int8()))

    hostile.item = spoil
    with pytest.raises(lh.CorruptionError, match="change"):
        list(con.table("a.keyed").subscribe("earliest", stop="now"))
