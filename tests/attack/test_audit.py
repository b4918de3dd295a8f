"""What is written down of who asked what: all of it, and nothing that is secret."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.client.flight import FlightEndpoint
from lakehead.config import ServerConfig
from lakehead.env.address import TcpAddress
from lakehead.env.rotated_file import RotatedFile
from lakehead.errors import StorageError
from lakehead.protocol import messages as m
from lakehead.server.host import ServerHost

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def host(tmp_path: Path, path: Path) -> Iterator[ServerHost]:
    made = serve(tmp_path / "data", ServerConfig(token="open-sesame", audit=str(path)))
    yield made
    made.close()
    assert made.wait_stopped(10)


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_who_did_what_and_no_secret(host: ServerHost, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(lh.connect(host.uri, token="open-sesame"))
        owner.create_table("shop.orders", SCHEMA, primary_key="k").upsert([{"k": 77_001, "v": "swordfish"}])
        owner.grant("read", "shop.orders", to="reader")
        token = owner.create_token("reader").token
        con = stack.enter_context(lh.connect(host.uri, token=token))
        table = con.table("shop.orders")
        assert table.get(77_001) == {"k": 77_001, "v": "swordfish"}
        assert table.scan(where="v = 'swordfish'").to_arrow().num_rows == 1
        with pytest.raises(lh.PermissionDeniedError):
            table.upsert([{"k": 77_001, "v": "swordfish"}])
        with pytest.raises(lh.PermissionDeniedError):
            con.table("pay.salaries")
        with pytest.raises(lh.AuthenticationError):
            lh.connect(host.uri, token="lh_guess_open-barley")
        owner.rename_table("shop.orders", "shop.sold")
        owner.drop_table("shop.sold")
    deadline, pause = time.monotonic() + 30, threading.Event()
    while not any(line.get("stream") == "ends" for line in told(path)):
        assert time.monotonic() < deadline
        pause.wait(0.01)
    lines = told(path)
    by = {(line["who"], line["request"], line["outcome"]): line for line in lines}
    holder = "a holder of the server's token"
    assert by[holder, "CreateTable", "done"]["tables"] == ["shop.orders"]
    assert by[holder, "Write", "done"]["tables"] == ["shop.orders"] and by[holder, "Write", "done"]["bytes_in"] > 100
    assert by[holder, "RenameTable", "done"]["tables"] == ["shop.orders", "shop.sold"]
    assert by[holder, "DropTable", "done"]["tables"] == ["shop.sold"]
    granted = by[holder, "Grant", "done"]
    assert (granted["to"], granted["on"], granted["privileges"]) == ("reader", "shop.orders", ["read"])
    assert by[holder, "CreateToken", "done"]["principal"] == "reader" and granted["principal"] is None
    get = by["reader", "Get", "done"]
    assert (
        get["principal"] == "reader" and get["tables"] == ["shop.orders"] and get["from"].startswith("ipv4:127.0.0.1")
    )
    assert by["reader", "Write", "PermissionDeniedError"]["tables"] == ["shop.orders"]
    assert by["reader", "GetTable", "PermissionDeniedError"]["tables"] == ["pay.salaries"]
    streams = [line for line in lines if "stream" in line and line["who"] == "reader"]
    assert [line["stream"] for line in streams] == ["begins", "ends"] and streams[1]["bytes_out"] > 0
    refused = by[None, "log-in", "AuthenticationError"]
    assert refused["from"].startswith("ipv4:127.0.0.1") and refused["failures"] == 1
    assert all(line["at"].endswith("+00:00") for line in lines)
    text = path.read_text()
    for secret in ("open-sesame", "open-barley", token.split("_", 2)[2], "swordfish", "77001"):
        assert secret not in text


def test_who_sends_what_is_no_request_or_very_long_is_written_down_shortly(host: ServerHost, path: Path) -> None:
    endpoint = FlightEndpoint(TcpAddress("127.0.0.1", host.port), token="open-sesame")
    with pytest.raises(lh.LakeheadError):
        endpoint.call(m.GetTable(database="d" * 1_000_000, table='t"\n'))
    with pytest.raises(lh.LakeheadError):
        endpoint.call(m.OpenLeases(tables=[m.LeasedTable(table_id=f"{n}", lake=None) for n in range(1000)], release=[]))
    client = fl.connect(f"grpc://127.0.0.1:{host.port}")
    options = fl.FlightCallOptions(headers=[(b"authorization", b"Bearer open-sesame")])
    with pytest.raises(fl.FlightError):
        client.do_get(fl.Ticket(b"no request"), options).read_all()
    client.close()
    endpoint.close()
    long, many, none = told(path)
    assert len(long["tables"][0]) == 300 and len(many["tables"]) == 64
    assert (none["request"], none["outcome"]) == (None, "InvalidRequestError")


def test_many_guesses_do_not_fill_it(host: ServerHost, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakehead.env.clock.SystemClock.sleep", lambda self, seconds: None)
    for _ in range(20):
        with pytest.raises(lh.AuthenticationError):
            lh.connect(host.uri, token="guess")
    assert [line["failures"] for line in told(path)] == [1, 2, 4, 8, 16]


def test_a_server_whose_file_cannot_be_written_goes_on_and_says_so(
    host: ServerHost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RotatedFile, line: bytes) -> None:
        raise StorageError("cannot write the audit: the disk is full")

    monkeypatch.setattr(RotatedFile, "write", full)
    with caplog.at_level(logging.ERROR, "lakehead.server"), lh.connect(host.uri, token="open-sesame") as con:
        assert con.tables() == con.tables() == []
    assert caplog.text.count("the disk is full") == 1


def test_two_servers_do_not_write_to_one_file(host: ServerHost, tmp_path: Path, path: Path) -> None:
    with pytest.raises(lh.InvalidPropertyError, match="another process"):
        serve(tmp_path / "other", ServerConfig(audit=str(path)))
    serve(tmp_path / "other", ServerConfig()).close()  # nobody holds the folder
