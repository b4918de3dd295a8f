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
from lakehead.protocol.alterations import DropColumn, SetProperty
from lakehead.protocol.codec import (
    AnyCall,
    AnyStream,
    answer_type,
    decode_call,
    decode_error,
    decode_reply,
    decode_stream_header,
    decode_stream_request,
    encode,
)
from lakehead.protocol.grants import (
    CreateToken,
    Grant,
    Granted,
    GrantsReply,
    ListGrants,
    ListTokens,
    Revoke,
    RevokeToken,
    TokenInfo,
    TokenReply,
    TokensReply,
    WhoAmI,
    WhoAmIReply,
)
from lakehead.protocol.privileges import EVERYTHING, Database, Privilege
from lakehead.protocol.quotas import ListQuotas, Quota, QuotaInfo, QuotasReply, SetQuota, Used
from lakehead.protocol.staging import AskTurn, Publish, Published, Stage, StagedPart, StagedTable, Turn, Unstage
from lakehead.protocol.tiering import (
    AskTieringStatus,
    AskTieringWork,
    JobInfo,
    ReportTiered,
    RoundInfo,
    TableRounds,
    TieredTable,
    TieringStatus,
    TieringWork,
)
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
ROUND = RoundInfo(job="h:1", snapshot_id=1, records=2, rows=2, deletes=0, files=1, bytes=10, seconds={"plan": 0.1})
WRITE = m.Write(table_id="t1", kind="delete", tablets=[REF], checksums=[2**32 - 1], columns=["søk"])
USED = Used(bytes_in=1, bytes_out=2, streams=3, leases=4, tables=5, stored_bytes=6)
QUOTA = QuotaInfo(principal="etl", quota=Quota(streams=1), used=USED)
GRANTED = Granted(to="role:readers", on="*", privileges=["read"])
CALLS: list[m.Request[Any]] = [
    m.Hello(),
    m.CreateTable(info=INFO, if_not_exists=True),
    m.GetTable(database="shop", table="orders"),
    m.ListTables(database=None),
    m.ListDatabases(),
    m.DropTable(database="shop", table="orders", purge=False),
    m.RenameTable(database="shop", table="a", to_database="new", to_table="b", swap=True),
    m.TableNow(table_id="t1"),
    m.Truncate(table_id="t1", ends=[m.TabletRange(partition="", bucket=0, start=0, end=3)]),
    m.AlterTable(table_id="t1", changes=[DropColumn(name="søk"), SetProperty(name="freshness", value="1s")]),
    WRITE,
    Stage(table_id="t1", job="j", batch=3, attempt="a" * 32, number=0, write=WRITE),
    Publish(
        job="j",
        batch=3,
        tables=[
            StagedTable(table_id="t1", parts=[StagedPart(attempt="a" * 32, pieces=1)]),
            StagedTable(table_id="t2", parts=[], writes=(WRITE,), turn=7),
        ],
        lasting=True,
    ),
    AskTurn(table_id="t1"),
    Unstage(table_id="t1", job="j", batch=3),
    m.OpenWriter(table_id="t1", writer_id=bytes(range(16))),
    m.CloseWriter(table_id="t1", writer_id=bytes(range(16)), epoch=3, acked_through=7),
    m.Lookup(table_id="t1", tablets=[REF, REF], counts=[2, 0], prefix=[]),
    m.Get(table_id="t1", tablet=REF, key=[1, "a", b"b"]),
    m.Watermarks(table_id="t1", sync=True, at_timestamp_us=5),
    m.TimestampsAt(table_id="t1", ranges=[RANGE]),
    m.OpenLeases(tables=[m.LeasedTable(table_id="t1", lake=None)], release=["a" * 32]),
    m.RenewLeases(leases=["a" * 32], release=[]),
    m.LeasedLake(table_id="t1"),
    m.LakeInfo(table_id="t1"),
    m.AdoptLake(table_id="t"),
    AskTieringWork(job_id="j", name="host:1", number=2, tables=["shop.*"], has=["t"], without=[], leaving=False),
    ReportTiered(table_id="t1", round=ROUND),
    AskTieringStatus(),
    WhoAmI(),
    ListGrants(),
    ListTokens(),
    CreateToken(principal="etl", seconds=3600.5),
    RevokeToken(id="a" * 16),
    Grant(to="etl", on="shop.orders", privileges=[Privilege.READ, Privilege.TIER]),
    Revoke(to="etl", on="role:readers", privileges=[]),
    SetQuota(principal="etl", quota=Quota(bytes_in=1024, stored_bytes=0)),
    ListQuotas(),
]
STREAMS: list[m.Request[m.Stream]] = [
    m.Read(table_id="t1", ranges=[RANGE], columns=["søk", "__offset"], predicate=b"\x00\xff"),
    m.ReadLive(table_id="t1", ranges=[RANGE], columns=[], predicate=None, lease="a" * 32),
    m.Subscribe(table_id="t1", starts=[RANGE], default="full", stops=None, columns=["søk"], predicate=None),
]
REPLIES: list[m.Reply] = [
    TieringStatus(
        jobs=[JobInfo(name="h:1", tables=1, silent_seconds=0.5)],
        tables=[TableRounds(table="shop.orders", rounds=[ROUND], ages=[1.5])],
    ),
    TieringWork(
        tables=[
            TieredTable(table_id="t", name="shop.orders", freshness_ms=1000, maintained=True, end=7),
            TieredTable(table_id="u", name="shop.clicks", freshness_ms=1, maintained=False, end=None),
        ]
    ),
    m.LakeUsesReply(
        uses=[m.LakeUse(metadata="file:///m.json"), m.LakeUse(metadata="file:///m.json", snapshot=2**63 - 1)]
    ),
    m.HelloReply(folder_id="f" * 32, version=1, pid=7),
    m.TableReply(info=INFO),
    m.NamesReply(names=["a.b"]),
    m.TruncateReply(ends=[m.TabletRange(partition="", bucket=0, start=0, end=3)]),
    m.Done(),
    Published(rows=3, before=False),
    Turn(number=1 << 40),
    m.WriteReply(offsets=[(0, 1), (5, 5)]),
    m.WriterReply(epoch=2, last_sequence=-1, tablets=[REF], sequences=[4]),
    m.LookupReply(),
    m.GetReply(row=None),
    m.GetReply(row=[1, None, "a", b"b", 0.5, True]),
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
    WhoAmIReply(name="etl", principal="etl", roles=["role:readers"], grants=[GRANTED]),
    WhoAmIReply(name="etl", principal="etl", roles=[], grants=[], quota=QUOTA),
    QuotasReply(quotas=[QUOTA, QuotaInfo(principal="*", quota=Quota(), used=None)]),
    WhoAmIReply(name="a holder", principal=None, roles=[], grants=[]),
    GrantsReply(grants=[GRANTED]),
    TokensReply(tokens=[TokenInfo(id="a" * 16, principal="etl", created_us=1, expires_us=None, expired=False)]),
    TokenReply(id="a" * 16, token="lh_a_b"),
    m.ErrorReply(code=1001, message="é", context={"table": "a", "n": 1, "f": 0.5, "b": True, "none": None}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda r: type(r).__name__)
def test_calls(call: m.Request[Any]) -> None:
    found = decode_call(encode(call))
    assert type(found) is type(call) and found == call
    for decode in (decode_stream_request, decode_error, lambda data: decode_reply(data, call)):
        with pytest.raises(msgspec.DecodeError):
            decode(encode(call))
    for reply in REPLIES:
        if type(reply) in (answer_type(type(call)), m.ErrorReply):
            answer = decode_reply(encode(reply), call)
            assert type(answer) is type(reply) and answer == reply
        else:
            with pytest.raises(msgspec.DecodeError):  # not what answers this
                decode_reply(encode(reply), call)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda r: type(r).__name__)
def test_stream_requests(stream: m.Request[m.Stream]) -> None:
    found = decode_stream_request(encode(stream))
    assert type(found) is type(stream) and found == stream
    with pytest.raises(msgspec.DecodeError):
        decode_call(encode(stream))


def test_no_message_is_left_out() -> None:
    calls = get_args(AnyCall)
    assert {type(r) for r in CALLS} == set(calls)
    assert {type(r) for r in STREAMS} == set(get_args(AnyStream))
    assert {type(r) for r in REPLIES} == {m.ErrorReply, *map(answer_type, calls)}
    assert {answer_type(s) for s in get_args(AnyStream)} == {m.Stream}


def test_what_is_repeated_after_a_lost_connection() -> None:
    once = {type(r).__name__ for r in CALLS if not r.idempotent}
    assert once == {"AlterTable", "CreateToken", "DropTable", "OpenWriter", "RenameTable", "RevokeToken"}
    assert not m.CreateTable(info=INFO, if_not_exists=False).idempotent
    left = AskTieringWork(job_id="j", name="host:1", number=3, tables=None, has=[], without=[], leaving=True)
    assert not left.idempotent, "nobody waits for a server that is away to be told that it was left"


def test_every_request_says_what_it_needs() -> None:
    needed = {type(r).__name__: r.privilege for r in (*CALLS, *STREAMS)}
    by_privilege = {p: sorted(n for n, q in needed.items() if q is p) for p in Privilege}
    assert by_privilege == {
        Privilege.USAGE: ["Hello", "ListDatabases", "ListGrants", "ListQuotas", "ListTables", "WhoAmI"],
        Privilege.DESCRIBE: ["AskTieringStatus", "GetTable", "TableNow"],
        Privilege.READ: [
            "Get", "LakeInfo", "Lookup", "OpenLeases", "Read", "ReadLive", "RenewLeases", "Subscribe", "TimestampsAt",
            "Watermarks",
        ],
        Privilege.WRITE: ["AskTurn", "CloseWriter", "OpenWriter", "Publish", "Stage", "Unstage", "Write"],
        Privilege.TIER: ["AskTieringWork", "LeasedLake", "ReportTiered"],
        Privilege.CREATE: ["CreateTable"],
        Privilege.MANAGE: ["AlterTable", "DropTable", "RenameTable", "Truncate"],
        Privilege.ADMIN: ["AdoptLake", "CreateToken", "Grant", "ListTokens", "Revoke", "RevokeToken", "SetQuota"],
    }  # fmt: skip
    anything = {type(r).__name__ for r in (*CALLS, *STREAMS) if (r.privilege, None) in r.needs}
    told_what_they_may = {
        "AskTieringStatus", "AskTieringWork", "ListDatabases", "ListGrants", "ListQuotas", "ListTables",
    }  # fmt: skip
    assert anything == told_what_they_may | {"Hello", "WhoAmI", "RenewLeases"}, "leases are their openers'"
    others = {type(r).__name__: list(r.needs) for r in CALLS if set(r.needs) != {(r.privilege, t) for t in r.about}}
    assert {name: needs for name, needs in others.items() if name not in anything} == {
        "CreateTable": [(Privilege.CREATE, Database("shop"))],
        **{
            name: [(Privilege.ADMIN, EVERYTHING)]
            for name in ("CreateToken", "ListTokens", "RevokeToken", "Revoke", "SetQuota")
        },
        "Grant": [(Privilege.ADMIN, TablePath("shop", "orders"))],
    }
    rename = m.RenameTable(database="a", table="t", to_database="b", to_table="t")
    assert list(rename.needs) == [(Privilege.MANAGE, TablePath("a", "t")), (Privilege.CREATE, Database("b"))]


def test_tokens_are_not_shown() -> None:
    assert "secret" not in repr(TokenReply(id="a", token="lh_a_secret"))


def test_numbers_beyond_64_bits_are_refused() -> None:
    good = m.CloseWriter(table_id="t1", writer_id=bytes(16), epoch=2**63 - 1, acked_through=-(2**63))
    assert decode_call(encode(good)) == good
    with pytest.raises(msgspec.DecodeError):
        decode_call(encode(msgspec.structs.replace(good, epoch=2**63)))


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage", b"\x81\xa4type\xa4Nope", b"\x81\xa4type\xa2\xff\xff"])
def test_other_bytes_are_refused(data: bytes) -> None:
    for decode in (decode_call, decode_stream_request, decode_error, decode_stream_header):
        with pytest.raises(msgspec.DecodeError):
            decode(data)


@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values(), ids=lambda c: c.__name__)
def test_errors(cls: type[LakeheadError]) -> None:
    context: dict[str, Any] = {"table": "a.b", "offset": 2**62, "ratio": 0.5, "flag": False, "none": None}
    reply = decode_error(encode(m.ErrorReply(code=cls.code, message="what to do: é", context=context)))
    error = error_from_code(reply.code, reply.message, reply.context)
    assert type(error) is cls and error.context == context and str(error) == "what to do: é"


@pytest.mark.parametrize("end", [None, 0, 2**62])
def test_stream_headers(end: int | None) -> None:
    header = m.StreamHeader(partition="p=%26", bucket=4, end_offset=end)
    assert decode_stream_header(encode(header)) == header


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
    plain = dataclasses.replace(DESC, primary_key=(), bucket_key=(), lake=None)
    assert m.TableInfo.of(plain).descriptor() == plain
    key = TabletKey("day=2024-01-01", 3)
    assert m.TabletRef.of(key).key == key
