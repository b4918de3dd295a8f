"""Who was let in takes what its quota says of the server, and no more, whatever it tries."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.cli.main import main
from lakehead.config import ServerConfig
from lakehead.protocol import messages as m
from lakehead.protocol.quotas import Quota
from lakehead.server import quotas
from lakehead.server.host import ServerHost

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.binary())])
KIB = 1024


def rows(size: int) -> pa.Table:
    return pa.table([pa.array([1], pa.int64()), pa.array([bytes(size)], pa.binary())], schema=SCHEMA)


@pytest.fixture
def owner(host: ServerHost) -> Iterator[lh.Connection]:
    with lh.connect(host.uri, token="the owner's") as con:
        con.create_table("shop.log", SCHEMA)
        yield con


@pytest.fixture
def known(host: ServerHost, owner: lh.Connection) -> Iterator[Any]:
    """Makes a principal that may do all in the database, and a connection of it."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> lh.Connection:
            owner.grant("create, read, write, manage", "shop", to=name)
            return stack.enter_context(lh.connect(host.uri, token=owner.create_token(name).token))

        yield make


def test_who_writes_fast_waits_and_then_is_refused(
    known: Any, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    con, other = known("etl"), known("other")
    owner.set_quota("etl", bytes_in="64KiB")
    table = con.table("shop.log")
    table.append(rows(128 * KIB))  # two seconds' worth
    began = time.monotonic()
    table.append(rows(1))
    assert time.monotonic() - began > 0.5
    other.table("shop.log").append(rows(128 * KIB))
    monkeypatch.setattr(quotas, "CALL_WAIT_SECONDS", 0.0)
    monkeypatch.setattr("lakehead.client.patience.PATIENCE_SECONDS", 0.0)
    table = con.table("shop.log")
    table.append(rows(512 * KIB))
    with pytest.raises(lh.QuotaExceededError, match="65,536 bytes a second") as raised:
        table.append(rows(1))
    told = raised.value.context
    assert (told["quota"], told["limit"]) == ("bytes_in", 64 * KIB)
    assert told["used"] > 256 * KIB and told["retry_after_ms"] > 3000  # type: ignore[operator]
    assert raised.value.retryable
    used = con.whoami().quota
    assert used is not None and used.used is not None and used.used.bytes_in > 256 * KIB
    owner.set_quota("etl")
    table.append(rows(1))
    assert owner.table("shop.log").scan().count() == 5


def test_a_stream_goes_as_fast_as_its_reader_may(known: Any, owner: lh.Connection) -> None:
    con = known("reader")
    owner.table("shop.log").append(rows(1500 * KIB))
    owner.set_quota("reader", bytes_out="1MiB")
    assert con.table("shop.log").scan().to_arrow().num_rows == 1
    info = con.quotas()[0]
    assert info.principal == "reader" and info.used is not None and info.used.bytes_out > 1024 * KIB
    began = time.monotonic()
    assert con.table("shop.log").scan().to_arrow().num_rows == 1  # by another stream
    assert time.monotonic() - began > 0.2


def test_rows_that_are_got_one_by_one_count(known: Any, owner: lh.Connection) -> None:
    con = known("reader")
    for name, schema in (("plain", pa.schema([("k", pa.int64()), ("v", pa.string())])), ("wide", SCHEMA)):
        owner.create_table(f"shop.{name}", schema, primary_key="k")
    owner.table("shop.plain").upsert([{"k": 1, "v": "x" * 5000}])
    owner.table("shop.wide").upsert(rows(5000))
    owner.set_quota("reader", bytes_out="1GiB")
    owner.set_quota("reader", bytes_out="1KiB")
    assert con.table("shop.plain").get(1) is not None
    first = con.quotas()[0].used.bytes_out
    assert first > 4000
    owner.set_quota("reader", bytes_out="1GiB")  # in which what was used is forgotten at once
    assert con.quotas()[0].used.bytes_out == 0
    owner.set_quota("reader", bytes_out="1KiB")  # in which it is kept for long
    con.table("shop.wide").lookup([1])
    assert con.quotas()[0].used.bytes_out > 0


def test_who_is_behind_still_renews_what_it_holds(known: Any, owner: lh.Connection) -> None:
    con = known("reader")
    owner.set_quota("reader", bytes_out="1KiB", bytes_in="1KiB")
    con.table("shop.log").append(rows(256 * KIB))
    assert con.quotas()[0].used.bytes_in > 200 * KIB
    began = time.monotonic()
    con._server.call(m.RenewLeases(leases=["a" * 32], release=[]))
    con.tables()
    assert time.monotonic() - began < 5


def test_streams_and_pinned_reads_of_one_principal_are_counted_together(
    host: ServerHost, known: Any, owner: lh.Connection
) -> None:
    one, two, other = known("reader"), known("reader"), known("other")
    owner.set_quota("reader", streams=1, leases=2)
    with one.table("shop.log").subscribe("earliest") as held:
        owner.table("shop.log").append(rows(1))
        next(iter(held))
        with (
            pytest.raises(lh.QuotaExceededError, match="streams") as raised,
            two.table("shop.log").subscribe("earliest") as another,
        ):
            next(iter(another))
        assert raised.value.context["limit"] == 1
        with other.table("shop.log").subscribe("earliest") as theirs:
            next(iter(theirs))
    table_id = owner.table("shop.log")._handle.desc.table_id
    asked = m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)] * 2, release=[])
    leases = [lease.lease for lease in one._server.call(asked)[0].leases]
    with pytest.raises(lh.QuotaExceededError, match="leases"):
        two._server.call(m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)], release=[]))
    two._server.call(m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)], release=leases[:1]))
    used = one.whoami().quota.used
    assert used.leases == 2
    other._server.call(asked)


def test_a_lease_of_two_tables_is_all_or_nothing(known: Any, owner: lh.Connection) -> None:
    con = known("reader")
    owner.set_quota("reader", leases=1)
    table_id = owner.table("shop.log")._handle.desc.table_id
    with pytest.raises(lh.QuotaExceededError):
        con._server.call(m.OpenLeases(tables=[m.LeasedTable(table_id=table_id, lake=None)] * 2, release=[]))
    assert con.whoami().quota.used.leases == 0


def test_tables_are_counted_until_they_are_dropped(known: Any, owner: lh.Connection) -> None:
    con = known("maker")
    owner.set_quota("maker", tables=2)
    done: list[BaseException | None] = []

    def make(n: int) -> None:
        try:
            con.create_table(f"shop.t{n}", SCHEMA)
            done.append(None)
        except lh.LakeheadError as e:
            done.append(e)

    threads = [threading.Thread(target=make, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [e for e in done if e is not None]
    assert len(refused) == 4 and all(isinstance(e, lh.LimitExceededError) for e in refused)
    assert {e.context["quota"] for e in refused} == {"tables"}  # type: ignore[attr-defined]
    mine = [name for name in con.tables() if name != "shop.log"]
    con.rename_table(mine[0], "shop.renamed")
    with pytest.raises(lh.LimitExceededError):
        con.create_table("shop.more", SCHEMA)
    con.create_table("shop.renamed", SCHEMA, if_not_exists=True)
    con.drop_table("shop.renamed")
    con.create_table("shop.more", SCHEMA)
    owner.create_table("shop.owners", SCHEMA)


def test_what_is_stored_is_its_makers_whoever_writes(
    known: Any, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "_MEASURED_SECONDS", 0.0)
    con, friend = known("maker"), known("friend")
    owner.set_quota("maker", stored_bytes="256KiB")
    con.create_table("shop.mine", SCHEMA).append(rows(100 * KIB))
    con.create_table("shop.also_mine", SCHEMA).append(rows(100 * KIB))
    used = con.whoami().quota.used
    assert 200 * KIB < used.stored_bytes < 220 * KIB and used.tables == 2
    for who in (con, friend, owner):
        with pytest.raises(lh.LimitExceededError, match="maker") as raised:
            who.table("shop.mine").append(rows(100 * KIB))
        assert raised.value.context["quota"] == "stored_bytes" and not raised.value.retryable
    friend.create_table("shop.friends", SCHEMA).append(rows(300 * KIB))
    assert con.table("shop.mine").scan().count() == 1, "and nothing was written"
    con.drop_table("shop.also_mine")
    con.table("shop.mine").append(rows(100 * KIB))


def test_what_is_moved_to_the_lake_beside_counts(
    known: Any, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "_MEASURED_SECONDS", 0.0)
    con = known("maker")
    table = con.create_table("shop.tiered", SCHEMA, lake="iceberg")
    owner.set_quota("maker", stored_bytes="1MiB")
    noise = pa.array([os.urandom(200 * KIB)], pa.binary())
    table.append(pa.table([pa.array([1], pa.int64()), noise], schema=SCHEMA))
    before = con.whoami().quota.used.stored_bytes
    con.tier("shop.tiered")
    assert con.whoami().quota.used.stored_bytes > before + 200 * KIB
    con.drop_table("shop.tiered", purge=True)
    assert con.whoami().quota.used.stored_bytes == 0


def test_a_quota_for_all_is_one_each(known: Any, owner: lh.Connection) -> None:
    con, other = known("one"), known("two")
    owner.set_quota("*", tables=1)
    owner.set_quota("two", tables=2)
    for name in ("a", "b", "c"):
        owner.create_table(f"shop.{name}", SCHEMA)  # who may do all has none
    con.create_table("shop.d", SCHEMA)
    with pytest.raises(lh.LimitExceededError):
        con.create_table("shop.e", SCHEMA)
    other.create_table("shop.f", SCHEMA)
    other.create_table("shop.g", SCHEMA)
    assert [(q.principal, q.quota.tables) for q in con.quotas()] == [("one", 1)]
    assert [(q.principal, q.quota.tables) for q in owner.quotas()] == [("*", 1), ("two", 2)]
    assert owner.quotas()[0].used is None and owner.whoami().quota is None


def test_nobody_sets_its_own(known: Any, owner: lh.Connection) -> None:
    con = known("etl")
    owner.grant("admin", "shop", to="etl")
    owner.set_quota("etl", streams=1)
    for who in ("etl", "*", "other"):
        with pytest.raises(lh.PermissionDeniedError):
            con.set_quota(who, streams=100)
    assert owner.quotas()[0].quota == Quota(streams=1)
    for bad in ({"bytes_in": 10}, {"streams": -1}, {"bytes_out": 0}, {"tables": 2**64}, {"leases": "many"}):
        ((name, value),) = bad.items()
        least = "1,024" if name.startswith("bytes") else "0"
        told = rf"^{name}={value!r} is no bound: write a whole number, {least} or more"
        with pytest.raises(lh.InvalidRequestError, match=told):
            owner.set_quota("etl", **bad)  # type: ignore[arg-type]
    for name in ("role:r", "a b", ""):
        with pytest.raises(lh.InvalidRequestError):
            owner.set_quota(name, streams=1)


def test_quotas_outlive_the_server(tmp_path: Path) -> None:
    config = ServerConfig(token="the owner's")
    host = serve(tmp_path / "data", config)
    with lh.connect(host.uri, token="the owner's") as con:
        con.set_quota("etl", tables=1, stored_bytes=0)
    host.close()
    host = serve(tmp_path / "data", config)
    with lh.connect(host.uri, token="the owner's") as con:
        assert con.quotas()[0].quota == Quota(tables=1, stored_bytes=0)
        con.set_quota("etl")
        assert con.quotas() == []
    host.close()


def test_the_command_line(
    host: ServerHost, owner: lh.Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAKEHEAD_TOKEN", "the owner's")

    def ran(*arguments: str) -> str:
        assert main(["--uri", host.uri, *arguments]) == 0
        return capsys.readouterr().out

    ran("quota", "set", "etl", "--bytes-in", "1MiB", "--tables", "3", "--stored-bytes", "0")
    assert "1,048,576 / 0" in ran("quota", "list")
    told = json.loads(ran("-o", "json", "quota", "list"))
    assert told["quota"]["tables"] == 3 and told["quota"]["stored_bytes"] == 0 and told["quota"]["streams"] is None
    assert main(["--uri", host.uri, "quota", "set", "etl"]) == 2  # which is no way to be rid of it
    assert "--bytes-in" in capsys.readouterr().err and "etl" in ran("quota", "list")
    ran("quota", "remove", "etl")
    assert "etl" not in ran("quota", "list")
