"""Connections over both transports, and servers in other processes that tests may kill."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.ports import lasting_port
from tests.sql_copies import copying_at_once
from tests.waiting import WAIT_SECONDS, wait_until

import lakehead as lh

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SERVE = """
import json, os, sys
from lakehead.api.embedded import serve
from lakehead.config import LakeConfig, ServerConfig
folder, unix, port, token = sys.argv[1:]
lake = LakeConfig(**json.loads(os.environ.get("LAKEHEAD_TEST_LAKE", "{}")))
host = serve(folder, ServerConfig(unix=unix == "unix", port=int(port), token=token, lake=lake))
print(host.uri, flush=True)
sys.stdin.read()
host.close()
"""


class ServerProcess:
    """A server of a folder in another process, on one port, or a Unix socket, and token for all its lives."""

    token = "a token of the tests"

    def __init__(self, folder: Path, lake: lh.LakeConfig | None = None, *, unix: bool = False) -> None:
        self.folder = folder
        self.unix = unix
        self.uri = ""
        self.lake = lake or lh.LakeConfig()
        self.port = 0 if unix else lasting_port()
        self.start()

    def start(self) -> None:
        how = ["unix" if self.unix else "tcp", str(self.port), self.token]
        args = [sys.executable, "-c", _SERVE, str(self.folder), *how]
        environment = {**os.environ, "LAKEHEAD_TEST_LAKE": json.dumps(dataclasses.asdict(self.lake))}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(args, env=environment, **pipes)
        assert self.process.stdout is not None
        self.uri = self.process.stdout.readline().strip()
        assert self.uri, "the server did not start"
        if not self.unix:
            self.port = int(self.uri.rpartition(":")[2])

    def connect(self) -> lh.Connection:
        return lh.connect(self.uri, token=self.token)

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._end()

    def _end(self) -> None:
        self.process.wait(WAIT_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path / "data")
    yield made
    made.kill()


# For modules about what lies above the transports, or inside an embedded server: their `con` is embedded alone.
embedded_only = pytest.mark.parametrize("con", [pytest.param("embedded", id=pytest.HIDDEN_PARAM)], indirect=True)


@pytest.fixture(scope="module", params=["embedded", "server", "own"])
def con(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    """A connection; tests of a module share it, each with tables of its own."""
    folder = tmp_path_factory.mktemp(request.param) / "data"
    if request.param == "embedded":
        with lh.connect(folder) as made:
            yield made
        return
    process = ServerProcess(folder)
    # Who finds the token calls by a plain socket, who is given it by Flight.
    with process.connect() if request.param == "server" else lh.connect(process.uri) as made:
        yield made
    process.kill()


@pytest.fixture
def spark(con: lh.Connection) -> SparkSession:
    """A Spark session on the test's connection."""
    from lakehead.spark import session

    return session(con)


@pytest.fixture(params=["log", "keyed"])
def keyed(request: pytest.FixtureRequest) -> bool:
    """Once for a log table, once for a primary-key table."""
    return bool(request.param == "keyed")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A table name that no other test uses."""
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in request.node.name)
    return f"tests.{plain[:100]}"


@pytest.fixture(name="wait_until")
def waiting() -> Callable[..., None]:
    """Poll a condition that another thread or process brings about."""
    return wait_until


@pytest.fixture
def at_once() -> Iterator[None]:
    with copying_at_once():
        yield


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[lh.Connection]:
    """A connection whose statements are those of the test."""
    with lh.connect(tmp_path / "alone") as made:
        yield made
