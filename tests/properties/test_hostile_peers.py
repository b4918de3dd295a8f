"""Whatever a peer sends, a service answers or refuses it with a typed error: nothing crashes, hangs or lasts."""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import crc32c
import msgspec
import pyarrow as pa
import pytest

from lakehead.config import Limits, TableProperties
from lakehead.env import Env, SystemClock, SystemThreads
from lakehead.env.randomness import SeededRandomness
from lakehead.errors import InvalidRequestError, LakeheadError
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.predicate import parse_predicate
from lakehead.protocol import messages as m
from lakehead.protocol.alterations import AddColumn, SetProperty
from lakehead.protocol.codec import AnyCall, AnyStream, decode_call, decode_stream_request, encode
from lakehead.protocol.grants import CreateToken, Grant, ListGrants, ListTokens, Revoke, RevokeToken, WhoAmI
from lakehead.protocol.privileges import Privilege
from lakehead.protocol.quotas import ListQuotas, Quota, SetQuota
from lakehead.protocol.schemas import field_to_text
from lakehead.protocol.staging import AskTurn, Publish, Stage, StagedPart, StagedTable, Unstage
from lakehead.protocol.tiering import (
    AskTieringStatus,
    AskTieringWork,
    ReportTiered,
    RoundInfo,
)
from lakehead.server.endpoint import LocalEndpoint
from lakehead.server.service import Service
from lakehead.testing.storage import MemoryStorage
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA = pa.schema([pa.field("k", pa.int64(), False), ("s", pa.string()), ("l", pa.list_(pa.string()))])
KEY = pa.schema([SCHEMA.field("k")])
ODD_INTS = [-(2**63), -(2**31), -1, 0, 1, 2, 7, 63, 64, 65, 255, 1 << 16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1]
ODD_TEXTS = ["", ".", "..", "../../x", "a.b", "\x00", "k", "__offset", "Ünïcode" * 40, "%2F", "k=1&k=2", "day=x"]


def batch(rows: int) -> pa.RecordBatch:
    values = [{"k": i, "s": "text" * (i % 5), "l": None if i % 3 else ["a", None]} for i in range(rows)]
    return pa.RecordBatch.from_pylist(values, schema=SCHEMA)


def body(rows: pa.RecordBatch, sequence: int, compression: str = "none") -> pa.Buffer:
    return encode_body(rows, schema_id=0, stamp=WriterStamp(b"w" * 16, sequence), compression=compression).buffer


AnyRequest = AnyCall | AnyStream


@contextmanager
def service() -> Iterator[LocalEndpoint]:
    with tempfile.TemporaryDirectory() as folder:
        made = Service(
            folder,
            env=Env(SystemClock(), MemoryStorage(), SeededRandomness(1), SystemThreads()),
            limits=Limits(batch_bytes_max=1 << 20),
            lake=None,
        )
        yield LocalEndpoint(made)
        made.close()
        assert not list(Path(folder).iterdir())


def create(server: LocalEndpoint, name: str, **how: Any) -> str:
    desc = TableDescriptor(
        table_id="",
        path=TablePath("f", name),
        **{
            "schemas": Schemas.only(SCHEMA),
            "primary_key": (),
            "partition_by": (),
            "bucket_key": (),
            "buckets": 2,
            "lake": None,
            **how,
        },
        properties=TableProperties(durability="os"),
    )
    reply, _ = server.call(m.CreateTable(info=m.TableInfo.of(desc), if_not_exists=False))
    return reply.info.table_id


ROUND = RoundInfo(job="j", snapshot_id=1, records=2, rows=2, deletes=0, files=1, bytes=10, seconds={"plan": 0.1})


def requests(log: str, keyed: str, plain: str) -> list[tuple[AnyRequest, list[pa.Buffer]]]:
    """Good requests of every kind, to be spoiled."""
    ref, other = m.TabletRef(partition="", bucket=0), m.TabletRef(partition="", bucket=1)
    whole = m.TabletRange(partition="", bucket=0, start=0, end=3)
    where = parse_predicate("k > 1 and s like 'te%'", SCHEMA).to_bytes()
    info = m.TableInfo(
        table_id="",
        database="f",
        table="new",
        schema=m.TableInfo.of(descriptor_of(SCHEMA)).schema,
        schema_id=0,
        primary_key=("k",),
        partition_by=(),
        bucket_key=(),
        buckets=1,
        lake=None,
        properties={"durability": "os", "segment_bytes": 1024},
    )
    bodies = [body(batch(70), 9), body(batch(3), 9, "zstd")]
    sums = [crc32c.crc32c(b) for b in bodies]
    names = SCHEMA.names
    keys = batch(4).select(["k"]).serialize()
    more = field_to_text(pa.field("more", pa.int64()))
    changes = [AddColumn(name="more", field=more, after="k"), SetProperty(name="freshness", value="1s")]
    append = m.Write(table_id=log, kind="append", tablets=[ref, other], checksums=sums, columns=names)
    staged = {"table_id": log, "job": "nightly", "batch": 1}
    part = StagedPart(attempt="a" * 32, pieces=1)
    return [
        (Stage(**staged, attempt="a" * 32, number=0, write=append), bodies),
        (Publish(job="nightly", batch=1, tables=[StagedTable(table_id=log, parts=[part])], lasting=True), []),
        (
            Publish(job="j", batch=2, tables=[StagedTable(table_id=log, parts=[], writes=(append,))], lasting=True),
            bodies,
        ),
        (WhoAmI(), []),
        (ListGrants(), []),
        (ListTokens(), []),
        (CreateToken(principal="etl", seconds=60), []),
        (RevokeToken(id="a" * 16), []),
        (SetQuota(principal="etl", quota=Quota(bytes_in=1 << 20, streams=3)), []),
        (ListQuotas(), []),
        (Grant(to="etl", on="f", privileges=[Privilege.READ]), []),
        (Revoke(to="role:r", on="*", privileges=[Privilege.ADMIN]), []),
        (AskTurn(table_id=log), []),
        (Unstage(**staged), []),
        (m.Hello(), []),
        (m.CreateTable(info=info, if_not_exists=True), []),
        (m.GetTable(database="f", table="log"), []),
        (m.ListTables(database=None), []),
        (m.ListDatabases(), []),
        (m.DropTable(database="f", table="none", purge=False), []),
        (m.AlterTable(table_id=keyed, changes=changes), []),
        (m.RenameTable(database="f", table="keyed", to_database="g", to_table="keyed"), []),
        (m.TableNow(table_id=keyed), []),
        (m.Truncate(table_id=keyed), []),
        (m.Write(table_id=log, kind="append", tablets=[ref, other], checksums=sums, columns=names), bodies),
        (m.Write(table_id=keyed, kind="upsert", tablets=[ref, other], checksums=sums, columns=names), bodies),
        (m.OpenWriter(table_id=log, writer_id=b"n" * 16), []),
        (m.CloseWriter(table_id=log, writer_id=b"n" * 16, epoch=1, acked_through=3), []),
        (m.Lookup(table_id=keyed, tablets=[ref], counts=[4], prefix=[]), [keys]),
        (m.Get(table_id=plain, tablet=ref, key=["a", 3]), []),
        (m.Watermarks(table_id=log, sync=True, at_timestamp_us=5), []),
        (m.TimestampsAt(table_id=log, ranges=[whole]), []),
        (m.Read(table_id=log, ranges=[whole], columns=["s", "__offset"], predicate=where), []),
        (m.ReadLive(table_id=keyed, ranges=[whole], columns=["s"], predicate=where), []),
        (
            m.Subscribe(table_id=keyed, starts=[whole], default="full", stops=[whole], columns=["k"], predicate=where),
            [],
        ),
        (m.OpenLeases(tables=[m.LeasedTable(table_id=log, lake=None)], release=["none"]), []),
        (m.RenewLeases(leases=["none"], release=["none"]), []),
        (m.LeasedLake(table_id=log), []),
        (ReportTiered(table_id=log, round=ROUND), []),
        (m.LakeInfo(table_id=log), []),
        (m.AdoptLake(table_id=log), []),
        (AskTieringStatus(), []),
        (AskTieringWork(job_id="j", name="n", number=1, tables=["d.*"], has=[log], without=[keyed]), []),
    ]


def descriptor_of(schema: pa.Schema) -> TableDescriptor:
    return TableDescriptor("", TablePath("f", "t"), Schemas.only(schema), (), (), (), 1, None)


def spoiled(value: Any, r: random.Random, chance: float) -> Any:
    """A message as plain values, in which some are others: of the same type, mostly."""
    if isinstance(value, dict):
        return {k: v if k == "type" else spoiled(v, r, chance) for k, v in value.items() if r.random() > chance / 20}
    if isinstance(value, list):
        items = [spoiled(v, r, chance) for v in value]
        return r.choice([items * 2, items[1:], [], items[::-1]]) if r.random() < chance else items
    if r.random() > chance:
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return r.choice(ODD_INTS)
    if isinstance(value, str):
        return r.choice([*ODD_TEXTS, value[1:], value * 2])
    if isinstance(value, bytes):
        return flipped(value, r)
    return r.choice([None, 0, "", [], {}])


def flipped(data: bytes, r: random.Random) -> bytes:
    """Bytes with a few of them changed, numbers among them replaced by odd ones, or cut off."""
    out = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 5])):
        if out:
            at = r.randrange(len(out))
            how = r.randrange(4)
            if how == 0:
                out[at] ^= 1 << r.randrange(8)
            elif how == 1:
                out[at] = r.choice([0, 1, 127, 128, 255])
            else:
                size = 8 if how == 2 else 4
                at = at // size * size
                out[at : at + size] = struct.pack("<q", r.choice(ODD_INTS))[:size][: len(out) - at]
    return bytes(out[: r.randrange(len(out) + 1)]) if r.random() < 0.1 else bytes(out)


def from_another_writer(buffer: pa.Buffer, case: int) -> pa.Buffer:
    """A body with another writer id, so that it is not taken for one that was sent before."""
    data = buffer.to_pybytes()
    return pa.py_buffer(data[:8] + case.to_bytes(16, "little") + data[24:])


def decode_request(data: bytes) -> AnyRequest:
    """As the endpoint does at its two doors, whichever takes it."""
    try:
        return decode_call(data)
    except msgspec.DecodeError:
        return decode_stream_request(data)


def send(server: LocalEndpoint, request: AnyRequest, attachments: Sequence[pa.Buffer]) -> None:
    """As the Flight endpoint does: call it, or read the stream, but not for ever."""
    if isinstance(request, m.Read | m.ReadLive | m.Subscribe):
        asked = iter(range(3))
        for _, rows in server.stream(request).items(lambda: next(asked, None) is None):
            rows.validate(full=True)
    else:
        server.call(request, attachments)


def fuzz(seed: int, count: int) -> dict[str, int]:
    """Send spoiled requests to a service; returns how many of each outcome there were.

    Anything but an answer or a `LakeheadError` passes through.
    """
    outcomes: dict[str, int] = {}
    with service() as server:
        log, keyed = create(server, "log"), create(server, "keyed", primary_key=("k",), bucket_key=("k",))
        key = (pa.field("s", pa.string(), False), pa.field("k", pa.int64(), False))
        plain = create(server, "plain", schemas=Schemas.only(pa.schema(key)), primary_key=("s", "k"), bucket_key=("k",))
        good = requests(log, keyed, plain)
        assert {type(request) for request, _ in good} == set(get_args(AnyRequest))
        for request, attachments in good:
            try:
                send(server, request, attachments)
            except LakeheadError as e:
                assert isinstance(request, m.DropTable | m.LakeInfo | ReportTiered | m.AdoptLake | RevokeToken), e
        for case in range(seed, seed + count):
            r = random.Random(case)
            request, attachments = r.choice(good)
            plain = msgspec.msgpack.decode(encode(request))
            sent = msgspec.msgpack.encode(spoiled(plain, r, r.choice([0.0, 0.1, 0.5])))
            if r.random() < 0.2:
                sent = flipped(sent, r)
            parts = [from_another_writer(a, case) if isinstance(request, m.Write) else a for a in attachments]
            parts = [pa.py_buffer(flipped(a.to_pybytes(), r)) if r.random() < 0.7 else a for a in parts]
            try:
                decoded = decode_request(sent)
                if isinstance(decoded, m.Write) and r.random() < 0.9:
                    sums = [crc32c.crc32c(p) for p in parts]
                    decoded = msgspec.structs.replace(decoded, checksums=sums)
                send(server, decoded, parts)
                outcome = "answered"
            except (LakeheadError, msgspec.DecodeError) as e:
                outcome = type(e).__name__
            except Exception as e:
                raise AssertionError(f"case {case}: {type(decoded).__name__} {decoded!r}"[:2000]) from e
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        # The service lives, and what it took is whole.
        for table in (log, keyed):
            reply, _ = server.call(m.Watermarks(table_id=table, sync=True))
            ranges = [
                m.TabletRange(partition="", bucket=t.bucket, start=t.log_start, end=t.high_watermark)
                for t in reply.tablets
            ]
            for _, rows in server.stream(m.Read(table_id=table, ranges=ranges, columns=SCHEMA.names, predicate=None)):
                rows.validate(full=True)
    return outcomes


@pytest.mark.parametrize("seed", [0, 1_000_000, 2_000_000])
def test_spoiled_requests_are_answered_or_refused(seed: int) -> None:
    outcomes = fuzz(seed, 2000)
    assert outcomes["answered"] > 50 and sum(outcomes.values()) == 2000


def test_named_writers_are_opened_before_they_write() -> None:
    with service() as server:
        log = create(server, "log")
        ref = m.TabletRef(partition="", bucket=0)

        def write(epoch: int, sequence: int) -> m.Reply:
            stamp = WriterStamp(b"n" * 16, sequence, sequence - 1, epoch=epoch)
            made = encode_body(batch(3), schema_id=0, stamp=stamp)
            columns = SCHEMA.names
            request = m.Write(table_id=log, kind="append", tablets=[ref], checksums=[made.crc], columns=columns)
            return server.call(request, [made.buffer])[0]

        with pytest.raises(InvalidRequestError, match="never given out"):
            write(1, 0)
        opened, _ = server.call(m.OpenWriter(table_id=log, writer_id=b"n" * 16))
        assert opened.epoch == 1
        write(1, 0)
        with pytest.raises(InvalidRequestError, match="never given out"):
            write(2**32 - 1, 1)
        write(1, 1)
        with pytest.raises(InvalidRequestError, match="16 bytes"):
            server.call(m.OpenWriter(table_id=log, writer_id=b"short"))


if __name__ == "__main__":  # a long run: python -m tests.properties.test_hostile_peers FIRST_SEED CASES
    import sys

    print(fuzz(int(sys.argv[1]), int(sys.argv[2])))
