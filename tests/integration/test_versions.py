"""A client and a server of different versions say so, and do nothing."""

from __future__ import annotations

import functools
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.folder import _attach
from lakehead.client import channel, flight
from lakehead.env.folder_lock import read_announcement
from lakehead.protocol import messages as m
from lakehead.protocol.socket_messages import Greeting
from lakehead.server import flight as server_flight
from lakehead.server import socket_server

BEFORE_VERSIONS = pa.schema([pa.field("attachment", pa.large_binary(), nullable=False)])
NEWER = BEFORE_VERSIONS.with_metadata({"lakehead.protocol": str(m.PROTOCOL_VERSION + 1)})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "CALL_SECONDS", 30.0)


@pytest.fixture
def by_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds a plain socket, as earlier versions do not."""
    monkeypatch.setattr(flight.FlightEndpoint, "_plain", lambda self: None)


@pytest.mark.parametrize("schema", [BEFORE_VERSIONS, NEWER], ids=["older", "newer"])
def test_a_server_refuses_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None, by_flight: None, schema: pa.Schema
) -> None:
    with lh.connect(tmp_path) as con:
        con.create_table("t", pa.schema([("k", pa.int64())])).append([{"k": 1}])
        monkeypatch.setattr(channel, "ATTACHMENT_SCHEMA", schema)
        monkeypatch.setattr(channel, "require_same_version", lambda begun: None)
        with pytest.raises(lh.ProtocolVersionError, match="same version") as raised:
            lh.connect(con.uri)
        assert not raised.value.retryable and raised.value.context["version"] == m.PROTOCOL_VERSION
        assert con.table("t").scan().count() == 1


@pytest.mark.parametrize("schema", [BEFORE_VERSIONS, NEWER], ids=["older", "newer"])
def test_a_client_refuses_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None, by_flight: None, schema: pa.Schema
) -> None:
    with lh.connect(tmp_path) as con:
        monkeypatch.setattr(server_flight, "ATTACHMENT_SCHEMA", schema)
        monkeypatch.setattr(server_flight, "require_same_version", lambda begun: None)
        with pytest.raises(lh.ProtocolVersionError, match="same version"):
            lh.connect(con.uri)
        note = read_announcement(str(tmp_path))
        assert note is not None
        with pytest.raises(lh.ProtocolVersionError, match="same version"):
            _attach(note, ("another", "process"))


def test_a_client_refuses_a_server_at_its_plain_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    with lh.connect(tmp_path) as con:
        monkeypatch.setattr(socket_server, "Greeting", functools.partial(Greeting, version=m.PROTOCOL_VERSION + 1))
        with pytest.raises(lh.ProtocolVersionError, match="same version") as raised:
            lh.connect(con.uri)
        assert not raised.value.retryable and raised.value.context["version"] == m.PROTOCOL_VERSION
