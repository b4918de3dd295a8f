"""Every request, reply and error survives the wire."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import msgspec
import pyarrow as pa
import pytest

from lakehead.config import TableProperties
from lakehead.errors import ERRORS_BY_CODE, LakeheadError, error_from_code
from lakehead.protocol import messages as m
from lakehead.types import Schemas, TableDescriptor, TablePath, TabletKey

DESC = TableDescriptor(
    table_id="t1",
    path=TablePath("shop", "orders"),
    schemas=Schemas.only(
        pa.schema([pa.field("søk", pa.int64(), False), ("tags", pa.map_(pa.string(), pa.list_(pa.float32())))]), 3
    ),
    primary_key=("søk",),
    partition_by=(),
    bucket_key=("søk",),
    buckets=3,
    lake="iceberg",
    properties=TableProperties(durability="os", compression="zstd", log_ttl_ms=None),
)
INFO = m.TableInfo.of(DESC)
REF = m.TabletRef(partition="day=2024-01-01&r=%2F", bucket=3)
RANGE = m.TabletRange(partition="", bucket=0, start=0, end=2**62)
REQUESTS: list[m.Request] = [
    m.Hello(),
    m.CreateTable(info=INFO, if_not_exists=True),
    m.GetTable(database="shop", table="orders"),
    m.ListTables(database=None),
    m.ListDatabases(),
    m.DropTable(database="shop", table="orders", purge=False),
    m.Write(table_id="t1", kind="delete", tablets=[REF], checksums=[2**32 - 1], columns=["søk"]),
    m.OpenWriter(table_id="t1", writer_id=bytes(range(16))),
    m.CloseWriter(table_id="t1", writer_id=bytes(range(16)), epoch=3, acked_through=7),
    m.Lookup(table_id="t1", tablets=[REF, REF], prefix=[]),
    m.Watermarks(table_id="t1", sync=True, at_timestamp_us=5),
    m.TimestampsAt(table_id="t1", ranges=[RANGE]),
    m.Read(table_id="t1", ranges=[RANGE], columns=["søk", "__offset"], predicate=b"\x00\xff"),
    m.OpenLeases(tables=[m.LeasedTable(table_id="t1", lake_metadata=None)], release=["a" * 32]),
    m.RenewLeases(leases=["a" * 32], release=[]),
    m.LeasedMetadata(table_id="t1"),
    m.ReadLive(table_id="t1", ranges=[RANGE], columns=[], predicate=None, lease="a" * 32),
    m.Subscribe(table_id="t1", starts=[RANGE], default="full", stops=None, columns=["søk"], predicate=None),
    m.LakeInfo(table_id="t1"),
    m.AdoptLake(table_id="t"),
    m.ReportTiered(table_id="t1"),
]
REPLIES: list[m.Reply] = [
    m.HelloReply(folder_id="f" * 32, version=1, pid=7),
    m.TableReply(info=INFO),
    m.NamesReply(names=["a.b"]),
    m.Done(),
    m.WriteReply(offsets=[(0, 1), (5, 5)]),
    m.WriterReply(epoch=2, last_sequence=-1, tablets=[REF], sequences=[4]),
    m.LookupReply(),
    m.WatermarksReply(tablets=[m.TabletState(partition="", bucket=0, log_start=0, high_watermark=9, rows=4)]),
    m.TimestampsReply(now_us=1, timestamps_us=[None, 2]),
    m.LeasesReply(leases=[m.Lease(lease="a" * 32, tablets=[])]),
    m.LakeReply(metadata_location="file:/x", catalog_name="c", catalog_properties={"a": "b"}, storage_properties={}),
    m.LakeReply(
        metadata_location="x",
        catalog_name="c",
        catalog_properties={},
        storage_properties={},
        incarnation="f/1/s",
        owner="o",
    ),
    m.ErrorReply(code=1001, message="é", context={"table": "a", "n": 1, "f": 0.5, "b": True, "none": None}),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests(request_: m.Request) -> None:
    found = m.decode_request(m.encode(request_))
    assert type(found) is type(request_) and found == request_
    with pytest.raises(msgspec.DecodeError):
        m.decode_reply(m.encode(request_))


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies(reply: m.Reply) -> None:
    found = m.decode_reply(m.encode(reply))
    assert type(found) is type(reply) and found == reply


def test_no_message_is_left_out() -> None:
    assert {type(r) for r in REQUESTS} == set(get_args(m.AnyRequest))
    # A union of classes decodes exactly its members.
    assert {type(r) for r in REPLIES} == set(get_args(m.AnyReply))


def test_numbers_beyond_64_bits_are_refused() -> None:
    good = m.CloseWriter(table_id="t1", writer_id=bytes(16), epoch=2**63 - 1, acked_through=-(2**63))
    assert m.decode_request(m.encode(good)) == good
    with pytest.raises(msgspec.DecodeError):
        m.decode_request(m.encode(msgspec.structs.replace(good, epoch=2**63)))


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage", b"\x81\xa4type\xa4Nope", b"\x81\xa4type\xa2\xff\xff"])
def test_other_bytes_are_refused(data: bytes) -> None:
    for decode in (m.decode_request, m.decode_reply, m.decode_stream_header):
        with pytest.raises(msgspec.DecodeError):
            decode(data)


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values(), ids=lambda c: c.__name__)
def test_errors(cls: type[LakeheadError]) -> None:
    context: dict[str, Any] = {"table": "a.b", "offset": 2**62, "ratio": 0.5, "flag": False, "none": None}
    reply = m.decode_reply(m.encode(m.ErrorReply(code=cls.code, message="what to do: é", context=context)))
    assert isinstance(reply, m.ErrorReply)
    error = error_from_code(reply.code, reply.message, reply.context)
    assert type(error) is cls and error.context == context and str(error) == "what to do: é"


@pytest.mark.parametrize("end", [None, 0, 2**62])
def test_stream_headers(end: int | None) -> None:
    header = m.StreamHeader(partition="p=%26", bucket=4, end_offset=end)
    assert m.decode_stream_header(m.encode(header)) == header


@pytest.mark.parametrize(
    "change",
    [
        {"database": "../.."},
        {"table": "a/b"},
        {"table": ""},
        {"properties": {"segment_bytes": "many"}},
        {"properties": {"durability": "hope"}},
        {"properties": {"nope": 1}},
        {"schema": "!"},
    ],
    ids=str,
)
def test_definitions_from_peers_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(LakeheadError):
        msgspec.structs.replace(INFO, **change).descriptor()


def test_descriptors() -> None:
    assert INFO.descriptor() == DESC
    assert m.decode_reply(m.encode(m.TableReply(info=INFO))).info.descriptor() == DESC  # type: ignore[union-attr]
    plain = dataclasses.replace(DESC, primary_key=(), bucket_key=(), lake=None)
    assert m.TableInfo.of(plain).descriptor() == plain
    key = TabletKey("day=2024-01-01", 3)
    assert m.TabletRef.of(key).key == key
