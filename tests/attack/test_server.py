"""One client that holds the token takes its share of a server, and leaves the others theirs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as fl
import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.client import channel
from lakehead.client.flight import FlightEndpoint
from lakehead.config import Limits, ServerConfig
from lakehead.env.address import TcpAddress
from lakehead.env.storage import LocalStorage
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.log import LogTablet
from lakehead.protocol import messages as m
from lakehead.protocol.alterations import AddColumn, SetProperty
from lakehead.protocol.schemas import field_to_text
from lakehead.server.access import Caller
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA = pa.schema([pa.field("k", pa.int64()), ("p", pa.string())])
LIMITS = Limits(
    leases_max=40,
    subscriptions_max=10,
    exchanges_max=20,
    tables_max=5,
    tablets_max=20,
    schema_bytes_max=20_000,
    partition_name_max=100,
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, int]]:
    host = serve(tmp_path / "data", ServerConfig(token="t", limits=LIMITS))
    yield host.uri, host.port
    host.close()
    host.wait_stopped(10)


@pytest.fixture
def con(served: tuple[str, int]) -> Iterator[lh.Connection]:
    with lh.connect(served[0], token="t") as made:
        made.create_table("a.t", SCHEMA).append([{"k": 1, "p": "x"}])
        yield made


def as_process(name: str, port: int, token: str = "t") -> FlightEndpoint:
    """A connection of what says that it is another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "process_name", lambda: name)
        return FlightEndpoint(TcpAddress("127.0.0.1", port), token=token)


@pytest.fixture
def attacker(served: tuple[str, int], con: lh.Connection) -> Iterator[FlightEndpoint]:
    made = as_process("the attacker", served[1])
    yield made
    made.close()


def table_id(endpoint: FlightEndpoint) -> str:
    return endpoint.call(m.GetTable(database="a", table="t"))[0].info.table_id


def test_leases_of_one_client_leave_room_for_others(attacker: FlightEndpoint, con: lh.Connection) -> None:
    asked = m.LeasedTable(table_id=table_id(attacker), lake=None)
    with pytest.raises(lh.OverloadedError):
        for _ in range(100):
            attacker.call(m.OpenLeases(tables=[asked], release=[]))
    scans = [con.table("a.t").scan() for _ in range(10)]
    assert [s.count() for s in scans] == [1] * 10
    with pytest.raises(lh.OverloadedError):
        attacker.call(m.OpenLeases(tables=[asked] * 30, release=[]))
    assert [s.count() for s in scans] == [1] * 10


def test_an_address_in_a_lease_is_bounded(attacker: FlightEndpoint) -> None:
    asked = m.LeasedTable(table_id=table_id(attacker), lake=m.LakeUse(metadata="x" * 1_000_000))
    with pytest.raises(lh.InvalidRequestError, match="8192"):
        attacker.call(m.OpenLeases(tables=[asked], release=[]))


def test_streams_of_one_client_leave_room_for_others(attacker: FlightEndpoint, con: lh.Connection) -> None:
    # From "latest", or they would share one stream.
    request = m.Subscribe(
        table_id=table_id(attacker), starts=[], default="latest", stops=None, columns=["k"], predicate=None
    )
    with contextlib.ExitStack() as stack:
        with pytest.raises(lh.OverloadedError):
            for _ in range(LIMITS.subscriptions_max + 1):
                stream = attacker.stream(request)
                stack.callback(stream.close)
        rows = next(iter(con.table("a.t").subscribe(start="earliest")))
        assert rows.rows.num_rows == 1


def test_conversations_of_one_client_leave_room_for_others(
    served: tuple[str, int], attacker: FlightEndpoint, con: lh.Connection
) -> None:
    held = []
    with pytest.raises(fl.FlightServerError, match="exchanges_max"):
        for _ in range(LIMITS.exchanges_max + 1):
            held.append(attacker._borrow())  # which nobody gives back
            held[-1][1].ask(m.Hello())
            attacker.next_of(*held[-1], 30)
    assert len(held) > LIMITS.exchanges_max // 2
    with lh.connect(served[0], token="t") as other:
        assert other.table("a.t").scan().count() == 1
    for _, exchange in held:
        exchange.cancel()


def converse(endpoint: FlightEndpoint, times: int) -> list[Any]:
    """Hold so many conversations, or as many as the server lets it."""
    held: list[Any] = []
    with contextlib.suppress(fl.FlightServerError):
        for _ in range(times):
            borrowed = endpoint._borrow()  # which nobody gives back
            borrowed[1].ask(m.Hello())
            endpoint.next_of(*borrowed, 30)
            held.append(borrowed)
    return held


def test_many_connections_of_a_process_have_one_share(served: tuple[str, int], con: lh.Connection) -> None:
    endpoints = [as_process("the attacker", served[1]) for _ in range(10)]
    held = [exchange for endpoint in endpoints for exchange in converse(endpoint, 10)]
    assert 10 < len(held) <= 17  # four fifths of the limit, and one
    assert con.table("a.t").scan().count() == 1
    for endpoint in endpoints:
        endpoint.close()


def test_processes_that_somebody_made_up_leave_room_for_principals(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, exchanges_max=200, leases_max=40)
    host = serve(tmp_path / "data", ServerConfig(token="t", limits=limits))
    with lh.connect(host.uri, token="t") as owner:
        owner.create_table("a.t", SCHEMA).append([{"k": 1, "p": "x"}])
        owner.grant("read", "a", to="other")
        token = owner.create_token("other").token
    endpoints = [as_process(f"process {i}", host.port) for i in range(60)]
    asked = m.LeasedTable(table_id=table_id(endpoints[0]), lake=None)
    leases = 0
    for endpoint in endpoints:
        with contextlib.suppress(lh.OverloadedError):
            endpoint.call(m.OpenLeases(tables=[asked], release=[]))
            leases += 1
    assert leases == limits.leases_max
    held = [exchange for endpoint in endpoints for exchange in converse(endpoint, 20)]
    assert 150 < len(held) < 200
    with lh.connect(host.uri, token=token) as other:
        scans = [other.table("a.t").scan() for _ in range(10)]
        assert [s.count() for s in scans] == [1] * 10
    for endpoint in endpoints:
        endpoint.close()
    host.close()
    host.wait_stopped(10)


def test_processes_at_one_socket_have_shares_of_their_own(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as owner:
        owner.create_table("a.t", SCHEMA).append([{"k": 1, "p": "x"}])
        seen: list[Caller] = []
        handled = owner._server.service.call  # type: ignore[attr-defined]
        owner._server.service.call = lambda r, a, caller: (seen.append(caller), handled(r, a, caller))[1]  # type: ignore[attr-defined]
        for name in ("one", "one", "two"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(channel, "process_name", lambda name=name: name)
                with lh.connect(owner.uri) as con:
                    con.tables()
        shares = [caller.share for caller in seen if caller.peer]
        assert len(set(shares)) == 2 and {s.of for s in shares} == {shares[0].of}


def definition(name: str, properties: dict[str, Any] | None = None, **how: Any) -> m.CreateTable:
    """A request that no client of ours would send."""
    schema = how.pop("schema", SCHEMA)
    desc = TableDescriptor("", TablePath("a", name), Schemas.only(schema), (), (), (), 1, None)
    info = m.TableInfo.of(dataclasses.replace(desc, **how))
    info = msgspec.structs.replace(info, properties={**info.properties, **(properties or {})})
    return m.CreateTable(info=info, if_not_exists=False)


@pytest.mark.parametrize(
    "properties",
    [
        {"segment_bytes": 1},
        {"segment_bytes": 0},
        {"segment_bytes": -1},
        {"segment_bytes": 2**63 - 1},
        {"target_file_bytes": 1},
        {"freshness_ms": -1},
        {"hot_retention_ms": 2**63 - 1},
        {"log_ttl_ms": -5},
        {"durability": "none"},
        {"compression": "brotli"},
        {"nope": 1},
    ],
    ids=str,
)
def test_properties_are_checked_whoever_sends_them(attacker: FlightEndpoint, properties: dict[str, Any]) -> None:
    with pytest.raises(lh.InvalidRequestError):
        attacker.call(definition("other", properties))
    assert attacker.call(m.ListTables(database=None))[0].names == ["a.t"]
    for name, value in properties.items():
        with pytest.raises(lh.InvalidRequestError):
            change = SetProperty(name=name.removesuffix("_ms"), value=f"{value}ms" if name.endswith("_ms") else value)
            attacker.call(m.AlterTable(table_id=table_id(attacker), changes=[change]))


def test_definitions_are_bounded(attacker: FlightEndpoint) -> None:
    wide = pa.schema([(f"{i}" + "x" * 2000, pa.int64()) for i in range(20)])
    nested = pa.schema([("s", pa.struct([(f"f{i}", pa.int64()) for i in range(2000)]))])
    for schema in (wide, nested):
        with pytest.raises(lh.InvalidSchemaError, match="bytes"):
            attacker.call(definition("wide", schema=schema))
    field = field_to_text(pa.field("s", nested.field(0).type))
    with pytest.raises(lh.InvalidSchemaError, match="bytes"):
        attacker.call(m.AlterTable(table_id=table_id(attacker), changes=[AddColumn(name="s", field=field, after=None)]))


def test_tables_and_tablets_are_bounded(attacker: FlightEndpoint, con: lh.Connection) -> None:
    with pytest.raises(lh.LimitExceededError, match="tablets"):
        attacker.call(definition("many", buckets=100))
    parts = con.create_table("a.parts", SCHEMA, partition_by="p", buckets=2)
    with pytest.raises(lh.LimitExceededError, match="tablets"):
        parts.append([{"k": i, "p": str(i)} for i in range(10)])
    assert parts.scan().count() == 0
    with pytest.raises(lh.LimitExceededError, match="shorter"):
        parts.append([{"k": 1, "p": "x" * 101}])
    parts.append([{"k": i, "p": str(i)} for i in range(5)])
    with pytest.raises(lh.LimitExceededError, match="tables"):
        for i in range(10):
            attacker.call(definition(f"t{i}"))
    assert len(con.tables()) == LIMITS.tables_max


def test_a_log_of_tiny_segments_has_few_files(tmp_path: Path) -> None:
    log = LogTablet(LocalStorage(), str(tmp_path / "log"), segment_bytes=1)
    rows = pa.record_batch([[1]], ["k"])
    for i in range(3000):
        log.append_frames(log.encode([encode_body(rows, schema_id=0, stamp=WriterStamp(b"w" * 16, i))], i))
    assert len(list((tmp_path / "log").glob("*.log"))) < 1000
    log.close()
    again = LogTablet(LocalStorage(), str(tmp_path / "log"), segment_bytes=1)
    assert again.log_end_offset == 3000
    again.close()
