"""The token of this user's server goes to that server alone, not to who has another address or a killed one's port,
and nobody else on the machine can read what is stored."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.integration.conftest import ServerProcess

import lakehead as lh
from lakehead.api.backup import back_up, restore
from lakehead.api.embedded import serve
from lakehead.config import ServerConfig
from lakehead.protocol.messages import Hello


class _Listening(fl.ServerMiddlewareFactory):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.asked = threading.Event()

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str]]) -> None:
        self.heard += [v for k, values in headers.items() if k.lower() == "authorization" for v in values]
        self.asked.set()


@contextmanager
def impostor(location: str) -> Iterator[_Listening]:
    """A server of somebody else, who writes down what tokens they are sent."""
    listening = _Listening()
    server = fl.FlightServerBase(location, middleware={"listening": listening})
    try:
        yield listening
    finally:
        server.shutdown()


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A server on a port of loopback."""
    host = serve(folder, ServerConfig())
    try:
        assert host.port is not None
        yield host.port
    finally:
        host.close()
        assert host.wait_stopped(10)


def test_another_address_is_another_server(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as port:
        with impostor(f"grpc://127.0.0.3:{port}") as theirs, pytest.raises(lh.LakeheadError):
            lh.connect(f"lakehead://127.0.0.3:{port}")
        assert theirs.asked.is_set() and not theirs.heard
        with lh.connect(f"lakehead://localhost:{port}") as again:
            assert again.tables() == []


def test_a_folder_that_somebody_prepared_gets_no_token(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as port:
        trap = tmp_path / "trap"
        trap.mkdir()
        with impostor(f"grpc://127.0.0.3:{port}") as theirs, open(trap / "LOCK", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            note = {"uri": f"lakehead://127.0.0.3:{port}", "folder_id": "f" * 32, "pid": 1}
            (trap / "endpoint.json").write_text(json.dumps(note))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lakehead.api.folder._ATTACH_SECONDS", 0.5)
                with pytest.raises(lh.UnavailableError):
                    lh.connect(trap)
        assert theirs.asked.is_set() and not theirs.heard


def test_who_takes_the_port_of_a_killed_server_gets_no_token(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    con = lh.connect(server.uri)
    attached = lh.connect(tmp_path / "data")
    assert con.tables() == attached.tables() == []
    server.kill()
    with impostor(f"grpc://127.0.0.1:{server.port}") as theirs:
        for _ in range(3):
            with pytest.raises(lh.UnavailableError, match="is gone"):
                con._server.call(Hello())  # by a connection that was open
        with pytest.raises(lh.LakeheadError):
            lh.connect(server.uri)  # a new one
        assert attached.tables() == [], "it has become the owner"
        assert not theirs.heard
    con.close()
    attached.close()


def test_nobody_else_can_read_what_is_stored(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        rows = pa.table({"k": [1, 2], "p": ["a", "b"]})
        with lh.connect(tmp_path / "deep" / "data") as con:
            keyed = con.create_table("a.k", rows.schema, primary_key=["k"], lake="iceberg")
            log = con.create_table("a.l", rows.schema, partition_by="p", lake="iceberg", hot_retention="0s")
            for table in (keyed, log):
                table.append(rows) if table is log else table.upsert(rows)
                con.tier(table.name)
            keyed.upsert(rows)
            con.tier("a.k")
            con._server.service.maintain()
            back_up(con, str(tmp_path / "deep" / "data"), str(tmp_path / "copies" / "one"))
        restore(str(tmp_path / "copies" / "one"), str(tmp_path / "restored"))
        with lh.connect(tmp_path / "restored") as con:
            assert con.table("a.k").scan().count() == 2
            open_to_others = [
                (str(p), oct(p.lstat().st_mode))
                for top in ("deep", "copies", "restored")
                for p in (tmp_path / top, *(tmp_path / top).rglob("*"))
                if stat.S_IMODE(p.lstat().st_mode) & 0o077
            ]
        assert not open_to_others
    finally:
        os.umask(old)


def test_a_folder_that_was_made_before_is_closed_when_it_becomes_a_data_folder(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir(mode=0o755)
    with lh.connect(made):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "target").write_text("of somebody")
    (tmp_path / "data" / "LOCK").symlink_to(tmp_path / "target")
    with pytest.raises(lh.StorageError):
        lh.connect(tmp_path / "data")
