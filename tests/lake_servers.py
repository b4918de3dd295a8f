"""Servers that lakes live on, started by tests: PostgreSQL, an S3 store, and an Iceberg REST catalog over it.

Each listens on loopback alone, on free ports, with credentials that it checks. The S3 store and the REST catalog are
one program, SeaweedFS: plain buckets, whose tables are in a catalog of their own, and buckets of the REST catalog.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import glob
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
import requests
from tests.waiting import WAIT_SECONDS

from lakehead.config import LakeConfig
from lakehead.env.randomness import SystemRandomness

SECRET, STORE_SECRET = "open-sesame", "open-barley"
"""The password of the database, and the secret key of the store; nobody may show them."""
KEY_ID = "lakehead-key"
PLAIN_BUCKET, CATALOG_BUCKET = "plain", "tables"
READER_ROLE = "arn:aws:iam::000000000000:role/Readers"
_ALL = {"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}
_TRUST = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": ["sts:AssumeRole"]}
_TRUST_CATALOG = {
    "Effect": "Allow",
    "Principal": {"Federated": "iceberg-catalog"},
    "Action": ["sts:AssumeRoleWithCredentials"],
}
_IAM = {
    "identities": [
        {"name": "lakehead", "credentials": [{"accessKey": KEY_ID, "secretKey": STORE_SECRET}], "actions": ["Admin"]}
    ],
    "sts": {
        "tokenDuration": "1h",
        "maxSessionLength": "12h",
        "issuer": "tests",
        "signingKey": base64.b64encode(b"k" * 32).decode(),
    },
    "policy": {"defaultEffect": "Deny", "storeType": "memory"},
    "policies": [{"name": "All", "document": {"Version": "2012-10-17", "Statement": [_ALL]}}],
    "roles": [
        {
            "roleName": "Readers",
            "roleArn": READER_ROLE,
            "attachedPolicies": ["All"],
            "trustPolicy": {"Version": "2012-10-17", "Statement": [_TRUST, _TRUST_CATALOG]},
        }
    ],
}
_DEATH_SIGNAL = 1
_USER = "postgres"
_PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3", "admin") for kind in ("", ".grpc")]
_PORTS.append("s3.port.iceberg")
_PORTS_FILE = "ports"


@dataclasses.dataclass(frozen=True)
class LakeServer:
    """What a lake's catalog is told of a server that runs.

    Attributes:
        properties: of the catalog, or of its storage.
        uri: its address, for messages and faults.
    """

    properties: dict[str, str]
    uri: str


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in held:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in held]


def _new_folder(kind: str) -> Path:
    """One of this process; those of processes that were killed, and removed nothing, go."""
    for left in Path(tempfile.gettempdir()).glob(f"lakehead-{kind}-*-*"):
        owner = left.name.split("-")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            _remove(left)
    return Path(tempfile.mkdtemp(prefix=f"lakehead-{kind}-{os.getpid()}-"))


def _remove(folder: Path) -> None:
    """Remove a server's folder, and the sockets that SeaweedFS has elsewhere, wherever its folder is."""
    if (ports := folder / _PORTS_FILE).exists():
        for port in ports.read_text().split():
            for socket_path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres() -> Iterator[LakeServer]:
    """A PostgreSQL server with an empty database, which asks for a password."""
    programs = _postgres_programs()
    # Not below pytest's folder: PostgreSQL refuses to be root, and another user cannot get there.
    folder = _new_folder("postgres")
    user = _USER if os.getuid() == 0 else None
    try:
        password = folder / "password"
        password.write_text(SECRET)
        if user is not None:
            for path in (folder, password):
                os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        data = str(folder / "data")
        made = [programs / "initdb", "-D", data, "-U", "lake", "--auth=scram-sha-256", f"--pwfile={password}"]
        settings = ["--no-sync", "--no-locale", "--encoding=UTF8"]
        subprocess.run([*made, *settings], check=True, capture_output=True, user=user, cwd=folder)
        (port,) = free_ports(1)
        options = ["-c", "listen_addresses=127.0.0.1", "-p", str(port), "-c", "unix_socket_directories="]
        command = [str(programs / "postgres"), "-D", data, *options, "-c", "fsync=off"]

        def answers() -> bool:
            try:
                psycopg.connect(_address(port, "postgres"), connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                return False

        with _running(command, folder, answers, user=user, stop=signal.SIGINT):
            uri = _address(port, "postgres").replace("postgresql:", "postgresql+psycopg:")
            yield LakeServer({"type": "sql", "uri": uri}, f"127.0.0.1:{port}")
    finally:
        _remove(folder)


def _address(port: int, database: str) -> str:
    return f"postgresql://lake:{SECRET}@127.0.0.1:{port}/{database}"


def _postgres_programs() -> Path:
    if (on_path := shutil.which("initdb")) is not None:
        return Path(on_path).resolve().parent
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed: make postgres")
    return Path(found[-1]).parent


@contextmanager
def seaweed(*, roles: bool = False, vends: bool = False) -> Iterator[LakeServer]:
    """An S3 store with `PLAIN_BUCKET`, and a REST catalog whose tables lie in `CATALOG_BUCKET` of it.

    Args:
        roles: it has an STS at the store's address, and `READER_ROLE`, which may do everything: what a session of it
            may not, its own policy forbids.
        vends: its REST catalog hands out sessions of that role for each table.
    """
    with ExitStack() as stack:
        for left in (2, 1, 0):
            try:
                ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
                server = stack.enter_context(_seaweed_on(ports, roles=roles, vends=vends))
                break
            except AssertionError:  # another process may have taken a port meanwhile
                if not left:
                    raise
        yield server


@contextmanager
def _seaweed_on(ports: dict[str, int], *, roles: bool, vends: bool) -> Iterator[LakeServer]:
    folder = _new_folder("seaweed")
    (folder / _PORTS_FILE).write_text(" ".join(map(str, ports.values())))
    # What it logs, and two sockets, would be among temporary files; a relative path is short enough for a socket.
    command = [
        str(Path(sys.executable).parent / "weed"),
        f"-logdir={folder}",
        "mini",
        "-filer.localSocket=filer.sock",
        "-s3.localSocket=s3.sock",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += ["-s3.port.lance=0", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
    command += [f"-bucket={PLAIN_BUCKET}", f"-tableBucket={CATALOG_BUCKET}", "-master.volumeSizeLimitMB=64"]
    if roles:
        (folder / "iam.json").write_text(json.dumps(_IAM))
        command.append(f"-s3.iam.config={folder}/iam.json")
    if vends:
        command.append(f"-s3.iceberg.credentialRole={READER_ROLE}")
    storage = {
        "s3.endpoint": f"http://127.0.0.1:{ports['s3.port']}",
        "s3.access-key-id": KEY_ID,
        "s3.secret-access-key": STORE_SECRET,
        "s3.region": "us-east-1",
    }
    catalog = f"http://127.0.0.1:{ports['s3.port.iceberg']}"
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": STORE_SECRET}

    def answers() -> bool:
        try:
            token = requests.post(
                f"{catalog}/v1/oauth/tokens",
                {"grant_type": "client_credentials", "client_id": KEY_ID, "client_secret": STORE_SECRET},
                timeout=5,
            ).json()["access_token"]
            found = requests.get(
                f"{catalog}/v1/{CATALOG_BUCKET}/namespaces", headers={"Authorization": f"Bearer {token}"}, timeout=5
            )
            plain = requests.head(f"{storage['s3.endpoint']}/{PLAIN_BUCKET}", timeout=5)
            return found.status_code == 200 and plain.status_code != 404
        except (requests.RequestException, ValueError, KeyError):
            return False

    try:
        with _running(command, folder, answers, environment=environment, stop=signal.SIGKILL):
            yield LakeServer(storage, catalog)
    finally:
        _remove(folder)


def rest_properties(store: LakeServer, uri: str | None = None) -> dict[str, str]:
    """The catalog properties of a store's REST catalog, perhaps at another address."""
    address = uri or store.uri
    given = {"type": "rest", "uri": address, "warehouse": f"s3://{CATALOG_BUCKET}"}
    login = {"credential": f"{KEY_ID}:{STORE_SECRET}", "oauth2-server-uri": f"{address}/v1/oauth/tokens"}
    return {**given, **login, **store.properties}


@contextmanager
def _running(
    command: list[str],
    folder: Path,
    answers: Callable[[], bool],
    *,
    stop: signal.Signals,
    user: str | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[None]:
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, user=user, env=environment, cwd=folder, preexec_fn=_end_with_parent
        )
    try:
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        while not answers():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            pause.wait(0.05)
        yield
    finally:
        process.send_signal(stop)
        process.wait(30)


def _end_with_parent() -> None:
    """A run of tests that is killed leaves no server; Linux alone can be asked for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def warehouse(store: LakeServer) -> dict[str, str]:
    """Storage properties with a warehouse of its own in the plain bucket."""
    return {**store.properties, "warehouse": f"s3://{PLAIN_BUCKET}/{SystemRandomness().uuid_hex()}"}


# ---- fixtures -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def database() -> Iterator[LakeServer]:
    """PostgreSQL; each test takes a catalog name of its own."""
    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def store() -> Iterator[LakeServer]:
    """SeaweedFS; each test takes a warehouse, or databases, of its own."""
    with seaweed() as server:
        yield server


@pytest.fixture
def lake_on(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], LakeConfig]:
    """The configuration of a new lake, by kind: ``postgres`` has files on disk, ``postgres-s3`` and ``rest`` on S3."""

    def configure(kind: str) -> LakeConfig:
        catalog: dict[str, str] = {}
        if kind != "rest":
            catalog |= request.getfixturevalue("database").properties | {"warehouse": f"file://{tmp_path}/warehouse"}
        if kind == "postgres-s3":
            catalog |= warehouse(request.getfixturevalue("store"))
        if kind == "rest":
            catalog = rest_properties(request.getfixturevalue("store"))
        return LakeConfig(name=f"lake{SystemRandomness().uuid_hex()}", catalog=catalog)

    return configure
