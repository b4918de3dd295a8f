"""An embedded connection, and a server that was told no address, listen where this user alone can reach them; a client
talks to no socket that another user may have put there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attack.test_tokens import impostor
from tests.integration.conftest import ServerProcess

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.config import ServerConfig
from lakehead.env.address import SocketAddress, parse_uri
from lakehead.env.credentials import FoundToken
from lakehead.env.own_sockets import OwnSocket

LISTENS = "0A"


def socket_of(con: lh.Connection) -> Path:
    address = parse_uri(con.uri)
    assert isinstance(address, SocketAddress)
    return Path(address.path)


def ports_of(pid: int) -> list[str]:
    """The TCP addresses on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd))
    lines = [
        line.split() for f in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{f}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == LISTENS and f"socket:[{line[9]}]" in inodes]


@pytest.mark.parametrize("how", ["embedded", "server"])
def test_nothing_listens_on_the_network(tmp_path: Path, how: str) -> None:
    embedded = f"import lakehead as lh; con = lh.connect({str(tmp_path)!r}); print(con.uri, flush=True); input()"
    server = ["-m", "lakehead.cli.main", "server", "--data", str(tmp_path)]
    command = [sys.executable, *(["-c", embedded] if how == "embedded" else server)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "lakehead:///" in process.stdout.readline()
            assert ports_of(process.pid) == []
        finally:
            process.kill()


def test_whatever_the_umask_nobody_else_can_connect(tmp_path: Path, home: Path) -> None:
    home.parent.chmod(0o755)
    old = os.umask(0)
    try:
        with lh.connect(tmp_path / "data") as con:
            at = socket_of(con)
            modes = [stat.S_IMODE(p.lstat().st_mode) for p in (at, at.parent, at.parent.parent)]
            assert modes == [0o600, 0o700, 0o700]
            if os.getuid() == 0:  # else nobody can be played here
                become = "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534)"
                code = f"{become}; socket.socket(socket.AF_UNIX).connect({str(at)!r})"
                at.chmod(0o777)  # it is the folder that counts
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
                assert "PermissionError" in done.stderr
    finally:
        os.umask(old)


@contextlib.contextmanager
def trap(folder: Path) -> Iterator[str]:
    """A socket of somebody else, who writes down what tokens they are sent: its address."""
    with impostor(SocketAddress(f"{folder}/s.sock").location()) as theirs:
        yield f"lakehead://{folder}/s.sock"
        assert not theirs.heard


def test_a_socket_in_a_folder_that_others_can_reach_is_not_talked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with trap(private) as uri:
        for mode in (0o755, 0o701, 0o770):
            private.chmod(mode)
            with pytest.raises(lh.AuthenticationError, match="may be another user"):
                lh.connect(uri, token="mine")
        private.chmod(0o700)
        (tmp_path / "link").symlink_to(private)
        with pytest.raises(lh.AuthenticationError):
            lh.connect(f"lakehead://{tmp_path}/link/s.sock", token="mine")
        (private / "link.sock").symlink_to(private / "s.sock")
        with pytest.raises(lh.AuthenticationError):
            lh.connect(f"lakehead://{private}/link.sock", token="mine")
        (private / "file").touch()
        with pytest.raises(lh.AuthenticationError):
            lh.connect(f"lakehead://{private}/file", token="mine")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: 4711)
            with pytest.raises(lh.AuthenticationError):
                lh.connect(uri, token="mine")


def test_a_folder_that_somebody_prepared_is_not_attached_to(tmp_path: Path) -> None:
    theirs, data = tmp_path / "theirs", tmp_path / "data"
    for made in (theirs, data):
        made.mkdir()
    theirs.chmod(0o755)
    with trap(theirs) as uri, open(data / "LOCK", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (data / "endpoint.json").write_text(json.dumps({"uri": uri, "folder_id": "f" * 32, "pid": 1}))
        with pytest.raises(lh.AuthenticationError):
            lh.connect(data)


def test_a_token_goes_to_its_own_socket(tmp_path: Path) -> None:
    with lh.connect(tmp_path / "data") as con:
        assert FoundToken(parse_uri(con.uri))() is not None
        private = tmp_path / "private"
        private.mkdir(mode=0o700)
        elsewhere = private / socket_of(con).name
        assert FoundToken(SocketAddress(str(elsewhere)))() is None
        with lh.connect(con.uri) as again:
            assert again.whoami().principal is None
        with pytest.raises(lh.AuthenticationError):
            lh.connect(con.uri, token="guess")  # the token is asked for, too


def test_who_comes_by_a_socket_is_written_down_and_slowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = tmp_path / "audit.jsonl"
    host = serve(tmp_path / "data", ServerConfig(unix=True, token="t", audit=str(audit)))
    try:
        assert host.port is None and host.uri == host.local_uri
        for _ in range(3):
            with pytest.raises(lh.AuthenticationError):
                lh.connect(host.uri, token="guess")
        with lh.connect(host.uri) as con:
            made = con.create_token("report")
            with lh.connect(host.uri, token=made.token) as report:
                assert report.whoami().principal == "report"
    finally:
        host.close()
    assert host.wait_stopped(10)
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["from"] for line in lines} == {"unix:"}
    assert [line["failures"] for line in lines if line["request"] == "log-in"] == [1, 2]
    assert {line["principal"] for line in lines} == {None, "report"}
    assert "refused who comes from unix:" in caplog.text


class Ear:
    """Listens on a socket as a server does."""

    def __init__(self, address: SocketAddress) -> None:
        self.heard = socket.socket(socket.AF_UNIX)
        self.heard.bind(address.path)
        self.heard.listen()

    def hears(self, address: SocketAddress) -> bool:
        """Whether who connects there comes here."""
        self.heard.settimeout(10)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(address.path)
            with self.heard.accept()[0]:
                return True

    def stop(self) -> None:
        self.heard.close()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one; the folder for temporary files is above it. Of ``tmp_path`` the names of sockets are too long."""
    with tempfile.TemporaryDirectory() as above:
        made = Path(above, "home")
        made.mkdir()
        monkeypatch.setenv("HOME", str(made))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", above)
        yield made


@pytest.mark.parametrize("left", ["file", "link", "stale", "live"])
def test_what_is_in_the_way_is_replaced(home: Path, left: str) -> None:
    folder = home / ".lakehead" / "sockets"
    folder.mkdir(parents=True)
    at, target = folder / "n.sock", home / "target"
    target.write_text("of somebody")
    theirs = None
    if left == "file":
        at.write_text("planted")
    elif left == "link":
        at.symlink_to(target)
    else:
        theirs = Ear(SocketAddress(str(at)))
        if left == "stale":
            theirs.stop()
    (folder / "1.0.new").touch()
    mine = OwnSocket("n.sock", Ear)
    assert mine.address.path == str(at) and target.read_text() == "of somebody"
    assert mine.server.hears(mine.address)
    assert [p.name for p in folder.iterdir()] == ["n.sock"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder.parent)] == [0o700, 0o700]
    mine.remove()
    mine.server.stop()
    assert not at.exists()
    if theirs is not None:
        theirs.stop()


def test_a_place_that_somebody_prepared_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = home.parent / "theirs"
    theirs.mkdir()
    (home / ".lakehead").symlink_to(theirs)
    mine = OwnSocket("n.sock", Ear)  # in the folder for temporary files
    assert mine.address.path.startswith(f"{home.parent}/lakehead-")
    mine.remove()
    monkeypatch.setattr("tempfile.tempdir", str(theirs))
    (theirs / f"lakehead-{os.getuid()}").symlink_to(home.parent)
    with pytest.raises(lh.StorageError, match=r"another user.*another user"):
        OwnSocket("n.sock", Ear)
    mine.server.stop()
    assert len(list(theirs.iterdir())) == 1


def test_a_server_lets_the_next_one_have_its_name(home: Path) -> None:
    first, second = OwnSocket("n.sock", Ear), OwnSocket("n.sock", Ear)
    first.remove()
    first.server.stop()
    assert second.server.hears(second.address)
    second.remove()
    second.server.stop()


def test_what_a_killed_server_left_gets_no_token_and_is_replaced(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", unix=True)
    con, attached = lh.connect(server.uri), lh.connect(tmp_path / "data")
    con.create_table("a.t", [("k", "int64")]).append([{"k": 1}])
    at, uri = socket_of(con), server.uri
    server.kill()
    assert at.exists()
    with pytest.raises(lh.UnavailableError):
        lh.connect(uri)
    assert FoundToken(parse_uri(uri))() is None
    assert attached.table("a.t").scan().count() == 1, "it has become the owner"
    assert attached.uri == uri and con.table("a.t").scan().count() == 1, "at the same address"
    con.close()
    attached.close()
    assert not at.exists()
