"""Who has a token of a principal does what was granted to it, and finds out about nothing else."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import crc32c
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.certificates import Authority
from tests.unit.server.test_access import requests
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.connection import reopened
from lakehead.api.embedded import serve
from lakehead.client.flight import FlightEndpoint
from lakehead.config import ServerConfig
from lakehead.env.address import TcpAddress
from lakehead.env.clock import SystemClock
from lakehead.format.frame import WriterStamp, encode_body
from lakehead.protocol import messages as m
from lakehead.protocol.codec import AnyStream
from lakehead.protocol.grants import Grant
from lakehead.protocol.privileges import Privilege
from lakehead.protocol.tiering import AskTieringWork
from lakehead.server import door, streams
from lakehead.server.host import ServerHost
from lakehead.spark import connections as spark

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])
KEYED: dict[str, Any] = {"primary_key": "k"}
ROWS = [{"k": 1, "v": "a"}]


@pytest.fixture
def owner(host: ServerHost) -> Iterator[lh.Connection]:
    with lh.connect(host.uri, token="the owner's") as con:
        for name in ("shop.orders", "shop.hidden", "pay.salaries"):
            con.create_table(name, SCHEMA, lake="iceberg").append(ROWS)
        yield con


@pytest.fixture
def connections() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def known(host: ServerHost, owner: lh.Connection, connections: contextlib.ExitStack) -> Any:
    """Makes a principal with grants, and a connection of it."""

    def make(name: str, *grants: tuple[str, str]) -> lh.Connection:
        for privileges, on in grants:
            owner.grant(privileges, on, to=name)
        token = owner.create_token(name).token
        return connections.enter_context(lh.connect(host.uri, token=token))

    return make


def refused(*calls: Any) -> None:
    for call in calls:
        with pytest.raises(lh.PermissionDeniedError):
            call()


def test_who_was_granted_nothing_does_nothing(host: ServerHost, owner: lh.Connection, known: Any) -> None:
    con = known("nobody")
    assert con.tables() == con.databases() == con.grants() == []
    me = con.whoami()
    assert (me.name, me.principal, me.roles, me.grants) == ("nobody", "nobody", [], [])
    refused(
        lambda: con.table("shop.orders"),
        lambda: con.table("shop.nothing_there"),
        lambda: con.create_table("shop.mine", SCHEMA),
        lambda: con.drop_table("shop.orders"),
        con.tiering_status,
        con.tokens,
        lambda: con.grant("read", "*", to="nobody"),
        lambda: con.create_token("another"),
    )
    endpoint = con._server
    table_id = owner._server.call(m.GetTable(database="shop", table="orders"))[0].info.table_id
    answered = []
    for request in requests(table_id):
        try:
            if isinstance(request, get_args(AnyStream)):
                endpoint.stream(request)
            else:
                endpoint.call(request)
            answered.append(type(request).__name__)
        except lh.PermissionDeniedError:
            pass
    assert sorted(answered) == ["Hello", "ListDatabases", "ListGrants", "ListQuotas", "ListTables", "WhoAmI"]
    assert sorted(owner.tables()) == ["pay.salaries", "shop.hidden", "shop.orders"], "and nothing was done"


@pytest.mark.parametrize("grants", [[], [("read", "shop.orders")], [("write", "shop.orders")]])
@pytest.mark.parametrize("name", ["shop.hidden", "shop.nothing_there", "nothing.there", "SHOP.HIDDEN"])
def test_sql_knows_nothing_of_tables_that_were_not_granted(known: Any, name: str, grants: list[Any]) -> None:
    con = known("somebody", *grants)
    for where in ("k = 1", "k = 0 + 1", "k > 0", "v = 'a'"):
        with pytest.raises(lh.TableNotFoundError, match="does not exist"):
            con.sql(f"select v from {name} where {where}")


@pytest.mark.parametrize("name", ["shop.keyed", "SHOP.Keyed"])
def test_sql_by_key_of_a_table_that_was_granted(known: Any, owner: lh.Connection, name: str) -> None:
    owner.create_table("shop.keyed", SCHEMA, **KEYED).upsert(ROWS)
    con = known("reader", ("read", "shop.keyed"))
    assert con.sql(f"select v from {name} where k = 1").fetchall() == [("a",)]


def test_a_reader_reads_and_nothing_more(known: Any, owner: lh.Connection) -> None:
    con = known("reader", ("read", "shop.orders"))
    table = con.table("shop.orders")
    assert table.scan().count() == 1 and con.tables() == ["shop.orders"] and con.databases() == ["shop"]
    assert con.sql("select v from shop.orders").fetchall() == [("a",)]
    lake = con._server.call(m.LakeInfo(table_id=table._handle.desc.table_id))[0]
    assert lake.catalog_properties == {} and lake.metadata_location
    refused(
        lambda: table.append(ROWS),
        lambda: table.writer("w"),
        lambda: con.tier("shop.orders"),
        lambda: con.sql("alter table shop.orders drop column v"),
        lambda: con.rename_table("shop.orders", "shop.other"),
        table.truncate,
        lambda: con.drop_table("shop.orders"),
        lambda: con.table("shop.hidden"),
        lambda: con.table("pay.salaries"),
        lambda: con.copy_table("shop.orders", "shop.copy"),
        lambda: con.grant("write", "shop.orders", to="reader"),
    )
    assert owner.table("shop.orders").scan().count() == 1


def test_what_one_may_not_know_of_is_as_what_is_not_there(known: Any, owner: lh.Connection) -> None:
    con = known("reader", ("read", "shop.orders"))
    told = []
    for name in ("pay.salaries", "pay.nothing", "shop.hidden", "shop.nothing"):
        with pytest.raises(lh.PermissionDeniedError) as raised:
            con.table(name)
        told.append(raised.value.message.replace(name, "X"))
    assert len(set(told)) == 1
    with pytest.raises(lh.LakeheadError) as failed:
        con.sql("select * from pay.salaries")
    assert "hidden" not in failed.value.message
    describer = known("describer", ("describe", "shop"))
    owner.rename_table("shop.hidden", "pay.moved")
    with pytest.raises(lh.TableNotFoundError) as moved:
        describer.table("shop.hidden")
    assert "pay" not in moved.value.message + str(moved.value.context)
    assert describer.tables() == ["shop.orders"]


def test_a_table_is_named_to_those_alone_who_may_know_its_name(known: Any, owner: lh.Connection) -> None:
    table = owner.table("shop.orders")
    table_id = table._handle.desc.table_id
    told = {"describer": "", "nobody": "", "other": ""}
    grants = {"describer": [("describe", "shop.orders")], "other": [("read", "pay")]}
    for name in told:
        con = known(name, *grants.get(name, []))
        for request in requests(table_id):
            call = con._server.stream if isinstance(request, get_args(AnyStream)) else con._server.call
            try:
                call(request)
            except lh.PermissionDeniedError as e:
                told[name] += f"{e.message} {e.context}\n"
            except lh.LakeheadError:
                pass  # it may ask
    assert table_id not in told["describer"] and "write table shop.orders" in told["describer"]
    assert "orders" not in told["nobody"] + told["other"] and table_id in told["nobody"]
    con = known("former", ("describe", "shop.orders"))
    opened = con.table("shop.orders")
    owner.rename_table("shop.orders", "shop.renamed")
    with pytest.raises(lh.PermissionDeniedError, match=r"write table shop\.renamed"):
        opened.append(ROWS)
    owner.revoke("describe", "shop.renamed", from_="former")
    with pytest.raises(lh.PermissionDeniedError, match=table_id):
        opened.append(ROWS)


def test_a_writer_writes_and_does_not_read(known: Any, owner: lh.Connection) -> None:
    table = known("writer", ("write", "shop")).table("shop.orders")
    table.append(ROWS)
    with table.writer("job") as writer:
        writer.append(ROWS)
    refused(table.scan, lambda: table.subscribe("earliest"), table.truncate)
    assert owner.table("shop.orders").scan().count() == 3


def test_a_tierer_tiers(known: Any, owner: lh.Connection) -> None:
    con = known("tierer", ("tier", "shop.orders"))
    con.tier("shop.orders")
    assert owner.table("shop.orders").scan(tier="lake").count() == 1
    refused(lambda: con.tier("shop.hidden"), lambda: con.table("shop.orders").append(ROWS))
    work = AskTieringWork(job_id="j", name="n", number=1, tables=None, has=[], without=[])
    told = [t.name for t in con._server.call(work)[0].tables]
    assert told == ["shop.orders"]
    mine = owner._server.call(work)[0].tables
    assert sorted(t.name for t in mine) == ["pay.salaries", "shop.hidden"], "the same id is another's job"


def test_who_makes_a_table_may_do_all_with_it_but_grant_it(known: Any, owner: lh.Connection) -> None:
    con = known("maker", ("create", "shop"))
    assert con.tables() == [] and con.databases() == ["shop"]
    refused(
        lambda: con.create_table("pay.mine", SCHEMA),
        lambda: con.create_table("new.mine", SCHEMA),
        lambda: con.table("shop.orders"),
        lambda: con.create_table("shop.orders", SCHEMA, if_not_exists=True),
    )
    told = set()
    for schema in (SCHEMA, pa.schema([("guess", pa.int64())])):  # nor whether a guess is right
        with pytest.raises(lh.PermissionDeniedError) as hidden:
            con.create_table("shop.orders", schema, if_not_exists=True)
        told.add(hidden.value.message)
    assert told == {"maker has no privilege to describe table shop.orders: ask who runs the server for it"}
    mine = con.create_table("shop.mine", SCHEMA, **KEYED)
    mine.upsert(ROWS)
    assert mine.get(1) == ROWS[0]
    con.copy_table("shop.mine", "shop.copy")
    con.rename_table("shop.copy", "shop.renamed")
    refused(
        lambda: con.rename_table("shop.mine", "pay.mine"),
        lambda: con.rename_table("shop.mine", "shop.orders", swap=True),
        lambda: con.grant("read", "shop.mine", to="friend"),
    )
    assert con.tables() == ["shop.mine", "shop.renamed"]
    con.drop_table("shop.mine")
    owner.create_table("shop.mine", SCHEMA, **KEYED)
    refused(lambda: con.table("shop.mine"))  # it is another table


def test_grants_are_the_tables_and_not_the_names(known: Any, owner: lh.Connection) -> None:
    con = known("reader", ("read", "shop.orders"))
    orders = con.table("shop.orders")
    owner.rename_table("shop.orders", "pay.renamed")
    assert con.tables() == ["pay.renamed"] and orders.scan().count() == 1
    owner.create_table("shop.orders", SCHEMA).append(ROWS)
    refused(lambda: con.table("shop.orders"))
    owner.drop_table("pay.renamed")
    assert con.tables() == con.grants() == []


def test_two_tables_that_change_places_change_grants(known: Any, owner: lh.Connection) -> None:
    con, other = known("reader", ("read", "shop.orders")), known("other", ("write", "pay.salaries"))
    for principal in ("reader", "other"):
        owner.grant("describe", "shop.orders", to=principal)
    before = con.table("shop.orders")
    owner.rename_table("shop.orders", "pay.salaries", swap=True)
    assert con.tables() == ["shop.orders"] and con.table("shop.orders").scan().count() == 1
    refused(before.scan, lambda: con.table("pay.salaries"))
    assert other.tables() == ["pay.salaries", "shop.orders"]
    other.table("pay.salaries").append(ROWS)
    refused(lambda: other.table("shop.orders").append(ROWS))


def test_no_admin_grants_more_than_that_of_which_it_is_admin(known: Any, owner: lh.Connection) -> None:
    con = known("boss", ("admin", "shop"))
    con.grant("read, write", "shop.orders", to="friend")
    con.grant("admin", "shop", to="friend")
    refused(
        lambda: con.grant("read", "pay.salaries", to="boss"),
        lambda: con.grant("read", "pay", to="boss"),
        lambda: con.grant("read", "*", to="boss"),
        lambda: con.grant("role:all", to="boss"),
        lambda: con.create_token("boss"),
        lambda: con.create_token("owner"),
        con.tokens,
        lambda: con.revoke("read", "*", from_="other"),
    )
    owner.grant("read", "pay", to="other")
    assert {g.to for g in con.grants()} == {"boss", "friend"}
    assert {g.to for g in owner.grants()} == {"boss", "friend", "other"}
    assert con.table("shop.hidden").scan().count() == 1


def test_roles_give_what_they_have_as_long_as_one_has_them(known: Any, owner: lh.Connection) -> None:
    con = known("analyst")
    owner.grant("read", "shop", to="role:readers")
    refused(lambda: con.table("shop.orders"))
    owner.grant("role:readers", to="analyst")
    assert con.table("shop.orders").scan().count() == 1
    assert con.whoami().roles == ["role:readers"]
    assert [(g.to, g.on, g.privileges) for g in con.grants()] == [
        ("role:readers", "shop", ["read"]),
        ("analyst", "role:readers", []),
    ]
    owner.revoke("role:readers", from_="analyst")
    refused(lambda: con.table("shop.orders"))
    with pytest.raises(lh.InvalidRequestError):
        owner.create_token("role:readers")
    with pytest.raises(lh.InvalidRequestError):
        owner.grant("role:readers", to="role:others")


@pytest.mark.parametrize(
    ("privileges", "on", "to"),
    [
        ("reed", "*", "p"),
        ("", "*", "p"),
        ("read", "a b", "p"),
        ("read", "*", "a b"),
        ("read", "*", ""),
        ("read", "*", "x" * 300),
        ("create", "shop.orders", "p"),
        ("read", "shop.nothing", "p"),
        ("role:", None, "p"),
        ("role:r", "shop", "p"),
        ("read", None, "p"),
        ("read", "role:r", "p"),
    ],
)
def test_what_cannot_be_granted_is_refused(owner: lh.Connection, privileges: str, on: str, to: str) -> None:
    with pytest.raises(lh.InvalidRequestError):
        owner.grant(privileges, on, to=to)
    assert owner.grants() == []


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_a_token_is_worth_nothing_once_it_is_revoked(
    host: ServerHost, owner: lh.Connection, connections: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.1)
    owner.grant("read", "shop.orders", to="etl")
    first, second = owner.create_token("etl"), owner.create_token("etl", expires="1h")
    assert first.id != second.id and first.token.startswith(f"lh_{first.id}_")
    con, other = (connections.enter_context(lh.connect(host.uri, token=t.token)) for t in (first, second))
    feed = con.table("shop.orders").subscribe("earliest")
    assert next(feed).rows.num_rows == 1
    scan = con.table("shop.orders").scan()
    owner.revoke_token(first.id)
    with pytest.raises(lh.AuthenticationError):
        con.tables()  # over a conversation that was open
    with pytest.raises(lh.AuthenticationError):
        scan.to_arrow()
    with pytest.raises(lh.AuthenticationError):
        next(feed)
    with pytest.raises(lh.AuthenticationError):
        lh.connect(host.uri, token=first.token)
    assert other.table("shop.orders").scan().count() == 1, "the other one is worth as much as before"
    assert [t.id for t in owner.tokens()] == [second.id]
    with pytest.raises(lh.InvalidRequestError, match="no token"):
        owner.revoke_token(first.id)


def test_a_stream_ends_when_its_grant_is_taken_back(
    known: Any, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.1)
    con = known("reader", ("read", "shop.orders"))
    idle, fed = (con.table("shop.orders").subscribe("earliest") for _ in range(2))
    assert next(idle).rows.num_rows == next(fed).rows.num_rows == 1
    owner.revoke("read", "shop.orders", from_="reader")
    refused(lambda: next(idle))
    owner.table("shop.orders").append(ROWS)
    refused(lambda: next(fed))


def test_a_token_is_worth_nothing_once_it_has_expired(
    host: ServerHost, owner: lh.Connection, connections: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.grant("read", "shop", to="etl")
    made = owner.create_token("etl", expires="30s")
    con = connections.enter_context(lh.connect(host.uri, token=made.token))
    assert con.table("shop.orders").scan().count() == 1
    now = SystemClock.now_us
    monkeypatch.setattr(SystemClock, "now_us", lambda self: now(self) + 31_000_000)
    with pytest.raises(lh.AuthenticationError):
        con.tables()
    with pytest.raises(lh.AuthenticationError):
        lh.connect(host.uri, token=made.token)
    assert [t.expired for t in owner.tokens()] == [True]


def test_tokens_survive_a_restart_as_digests(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        con.create_table("shop.orders", SCHEMA).append(ROWS)
        con.grant("read", "shop.orders", to="etl")
        token = con.create_token("etl").token
    secret = token.split("_", 2)[2].encode()  # which may have a "_" of its own
    held = [p for p in (tmp_path / "data").rglob("*") if p.is_file() and secret in p.read_bytes()]
    assert not held
    with lh.connect(tmp_path / "data") as con, lh.connect(con.uri, token=token) as etl:
        assert etl.whoami().principal == "etl" and etl.table("shop.orders").scan().count() == 1
        refused(lambda: etl.table("shop.orders").append(ROWS))


def test_who_has_a_token_takes_no_other_for_it(
    host: ServerHost, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own is in this user's files, where a worker, or a service that goes on, would find it."""
    made = owner.create_token("etl")
    with lh.connect(host.uri, token=made.token) as con, lh.connect(host.uri) as found:
        assert found.whoami().principal is None
        session = SimpleNamespace(sparkContext=SimpleNamespace(master="local", environment={}))
        spark.tell_workers(session, con)  # type: ignore[arg-type]
        for name, value in session.sparkContext.environment.items():
            monkeypatch.setenv(name, value)
        with spark._connected(host.uri) as worker, reopened(con) as again:
            assert worker.whoami().principal == again.whoami().principal == "etl"
        owner.revoke_token(made.id)
        with pytest.raises(lh.AuthenticationError):
            spark._connected(host.uri)
        with pytest.raises(lh.AuthenticationError):
            reopened(con)


def test_guesses_are_refused_slowed_and_logged(
    host: ServerHost, owner: lh.Connection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = owner.create_token("etl")
    waited: list[float] = []
    monkeypatch.setattr(SystemClock, "sleep", lambda self, seconds: waited.append(seconds))
    guesses = [
        "guess", f"lh_{made.id}_guess", f"lh_{made.id}_", f"lh_{made.id}", "lh__", "lh_", f"{made.token}x",
        made.token[:-1],
        f"lh_{'0' * 16}_{made.token.rpartition('_')[2]}", "", " the owner's",
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING, "lakehead.server"):
        for guess in guesses:
            endpoint = FlightEndpoint(TcpAddress("127.0.0.1", host.port), token=guess)
            with pytest.raises(lh.AuthenticationError):
                endpoint.call(m.Hello())
            endpoint.close()
    assert waited == sorted(waited) and waited[0] < 0.1 and waited[-1] == 1.0 and len(waited) == len(guesses)
    told = [r.getMessage() for r in caplog.records if "refused who comes" in r.getMessage()]
    assert len(told) == 4 and all("127.0.0.1" in t for t in told), "the first, second, fourth and eighth"
    assert not any(made.token.split("_", 2)[2] in t for t in told)
    waited.clear()
    with lh.connect(host.uri, token=made.token):
        assert not waited, "who is known does not wait for who guesses"


def guessed(endpoint: FlightEndpoint) -> None:
    with pytest.raises(lh.AuthenticationError):
        endpoint.call(m.Hello())


def test_who_guesses_takes_few_threads(host: ServerHost, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    go, waiting = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(door, "_WAITING_MAX", 2)
    monkeypatch.setattr(SystemClock, "sleep", lambda self, seconds: (waiting.release(), go.wait(WAIT_SECONDS)))
    endpoints = [FlightEndpoint(TcpAddress("127.0.0.1", host.port), token="guess") for _ in range(4)]
    threads = [threading.Thread(target=guessed, args=[e]) for e in endpoints[:2]]
    for thread in threads:
        thread.start()
        assert waiting.acquire(timeout=WAIT_SECONDS)
    for endpoint in endpoints[2:]:
        guessed(endpoint)
    assert len(owner.tables()) == 3
    go.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    for endpoint in endpoints:
        endpoint.close()


def test_no_other_method_is_answered(host: ServerHost) -> None:
    client = fl.connect(f"grpc://127.0.0.1:{host.port}")
    options = fl.FlightCallOptions(headers=[(b"authorization", b"Bearer the owner's")])
    for call in (
        lambda: list(client.list_flights(options=options)),
        lambda: list(client.do_action(fl.Action("x", b""), options)),
        lambda: client.get_flight_info(fl.FlightDescriptor.for_command(b"x"), options),
        lambda: list(client.list_actions(options)),
    ):
        with pytest.raises(fl.FlightError):
            call()
    client.close()


# ---- what is somebody's own -----------------------------------------------------------------------------------------


def test_a_writer_id_is_whose_it_was_first(known: Any, owner: lh.Connection) -> None:
    of_others = known("theirs", ("write", "shop"))
    mine, theirs = known("mine", ("write", "shop")).table("shop.orders"), of_others.table("shop.orders")
    writer = mine.writer("job")
    writer.append(ROWS)
    writer.flush()
    refused(lambda: theirs.writer("job"))
    table_id = mine._handle.desc.table_id
    batches = writer._batches
    end = m.CloseWriter(table_id=table_id, writer_id=batches._writer_id, epoch=batches._epoch, acked_through=2**60)
    rows = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
    stamp = WriterStamp(batches._writer_id, 1, epoch=batches._epoch, previous_sequence=0)
    forged = encode_body(rows, schema_id=0, stamp=stamp).buffer
    batch = m.Write(
        table_id=table_id,
        kind="append",
        tablets=[m.TabletRef(partition="", bucket=0)],
        checksums=[crc32c.crc32c(forged)],
        columns=SCHEMA.names,
    )
    for con in (of_others, owner):
        refused(lambda c=con: c._server.call(end), lambda c=con: c._server.call(batch, [forged]))
    writer.append(ROWS)
    writer.close()
    mine.writer("job").close()
    owner.grant("manage", "shop.orders", to="theirs")
    theirs.writer("job").close()
    refused(lambda: mine.writer("job"))


def test_a_lease_is_of_who_opened_it(known: Any, owner: lh.Connection, host: ServerHost) -> None:
    mine, theirs = (known(name, ("read", "shop")) for name in ("mine", "theirs"))
    table_id = mine.table("shop.orders")._handle.desc.table_id
    asked = m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)], release=[])
    lease = mine._server.call(asked)[0].leases[0].lease
    theirs._server.call(m.RenewLeases(leases=[lease], release=[lease]))
    theirs._server.call(m.OpenLeases(tables=[], release=[lease]))
    held = host.service._leases
    assert held.views(table_id, lease, "mine")
    assert not held.views(table_id, lease, "theirs") and not held.views(table_id, lease)
    mine._server.call(m.RenewLeases(leases=[], release=[lease]))
    assert not held.views(table_id, lease, "mine")


def test_a_principal_has_one_share_however_many_connections_it_has(
    host: ServerHost, owner: lh.Connection, connections: contextlib.ExitStack
) -> None:
    owner.grant("read", "shop", to="greedy")
    token = owner.create_token("greedy").token
    table_id = owner.table("shop.orders")._handle.desc.table_id
    asked = m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)], release=[])
    for _ in range(3):
        connections.enter_context(lh.connect(host.uri, token=token))._server.call(asked)
    assert [x.holder.of for x in host.service._leases._open.values()] == ["greedy"] * 3


# ---- certificates ---------------------------------------------------------------------------------------------------


def test_a_certificate_is_a_name(tmp_path: Path, connections: contextlib.ExitStack) -> None:
    authority = Authority(tmp_path / "ca")
    cert, key = map(str, authority.signed("server", "DNS:localhost"))
    name = "spiffe://lake.test/etl"
    own = authority.signed("etl", f"URI:{name}", "DNS:localhost")
    nameless = authority.signed("nameless", "DNS:etl.lake.test", f"URI:{name}")
    config = ServerConfig(token="t", tls_cert=cert, tls_key=key, tls_client_ca=str(authority.ca))
    host = serve(tmp_path / "data", config)
    uri = f"lakehead://localhost:{host.port}"
    tls: dict[str, Any] = {"tls_ca": authority.ca, "tls_cert": own[0], "tls_key": own[1]}
    try:
        con = connections.enter_context(lh.connect(uri, **tls))
        assert con.whoami().principal == name
        owner = connections.enter_context(lh.connect(uri, token="t", **tls))
        assert owner.whoami().principal is None, "a token decides"
        owner.create_table("shop.orders", SCHEMA).append(ROWS)
        refused(lambda: con.table("shop.orders"))
        owner.grant("read", "shop.orders", to=name)
        assert con.table("shop.orders").scan().count() == 1
        with pytest.raises(lh.AuthenticationError):
            lh.connect(uri, token="wrong", **tls)
        with pytest.raises(lh.AuthenticationError):  # its first name is none of ours
            lh.connect(uri, tls_ca=authority.ca, tls_cert=nameless[0], tls_key=nameless[1])
    finally:
        connections.close()
        host.close()
        host.wait_stopped(10)


def test_a_grant_that_no_client_of_ours_sends(host: ServerHost, owner: lh.Connection) -> None:
    for request in (
        Grant(to="p", on="role:r", privileges=[Privilege.READ]),
        Grant(to="p", on="shop", privileges=[]),
        Grant(to="role:r", on="role:s", privileges=[]),
    ):
        with pytest.raises(lh.InvalidRequestError):
            owner._server.call(request)
    assert owner.grants() == []
