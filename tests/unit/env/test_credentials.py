"""Tokens of this user's servers on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lakehead.env.address import TcpAddress
from lakehead.env.credentials import FoundToken, KeptToken
from lakehead.errors import StorageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def found(host: str = "127.0.0.1", port: int = 9123, folder_id: str | None = None) -> str | None:
    return FoundToken(TcpAddress(host, port), folder_id)()


def test_kept_tokens_are_found_by_address_and_by_nobody_else(home: Path) -> None:
    assert found() is None
    kept = [KeptToken(TcpAddress("127.0.0.1", port), "f", token) for port, token in ((9123, "secret"), (9124, "other"))]
    assert (found(), found(port=9124)) == ("secret", "other")
    assert found(host="localhost") == "secret", "which is that address"
    assert found(host="127.0.0.3") is None and found(host="10.0.0.1") is None
    assert found(folder_id="f") == "secret" and found(folder_id="g") is None
    files = [p for p in home.rglob("*") if p.is_file()]
    assert len(files) == 2
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    for token in kept:
        token.remove()
    assert not [p for p in home.rglob("*") if p.is_file()]


def test_a_server_on_all_addresses_is_found_on_loopback() -> None:
    kept = KeptToken(TcpAddress("0.0.0.0", 9123), "f", "secret")
    assert found() == "secret" and found(host="10.0.0.1") is None, "which may be another machine's"
    kept.remove()


def test_a_server_forgets_only_its_own_token() -> None:
    first = KeptToken(TcpAddress("127.0.0.1", 9123), "f", "first")
    second = KeptToken(TcpAddress("127.0.0.1", 9123), "f", "second")
    first.remove()
    assert found() == "second"
    second.remove()
    second.remove()
    assert found() is None


def test_a_token_is_its_servers_while_that_lives() -> None:
    kept = KeptToken(TcpAddress("127.0.0.1", 9123), "f", "secret")
    token = FoundToken(TcpAddress("127.0.0.1", 9123))
    assert not token.lives() and token() == "secret" and token.lives()
    kept.forget()  # what the kernel does when the process is killed
    assert not token.lives() and found() is None
    other = KeptToken(TcpAddress("127.0.0.1", 9999), "f", "other")
    assert len(os.listdir(Path(kept._path).parent)) == 1, "what was left is removed"
    other.remove()


@pytest.mark.parametrize("how", ["mode", "link", "text"])
def test_what_somebody_else_may_have_written_is_no_token(home: Path, how: str) -> None:
    kept = KeptToken(TcpAddress("127.0.0.1", 9123), "f", "secret")
    path = Path(kept._path)
    if how == "mode":
        path.chmod(0o644)
    elif how == "link":
        path.rename(home / "elsewhere")
        path.symlink_to(home / "elsewhere")
    else:
        path.write_text("secret")
    assert found() is None
    kept.forget()


def test_without_a_home_the_token_goes_to_a_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = KeptToken(TcpAddress("127.0.0.1", 9123), "f", "secret")
    assert found() == "secret" and str(tmp_path / "lakehead-") in kept._path
    assert not (tmp_path / "missing").exists()
    kept.remove()


def test_a_folder_that_somebody_prepared_is_refused(home: Path, tmp_path: Path) -> None:
    (home / "theirs").mkdir()
    (home / ".lakehead").symlink_to(home / "theirs")
    with pytest.raises(StorageError, match="another user"):
        KeptToken(TcpAddress("127.0.0.1", 9123), "f", "secret")
    assert not list((home / "theirs").iterdir())


def test_a_folder_of_an_earlier_version_is_closed_to_others(home: Path) -> None:
    (home / ".lakehead" / "tokens").mkdir(parents=True)
    (home / ".lakehead" / "tokens" / "9123").write_text("an old token")
    kept = KeptToken(TcpAddress("127.0.0.1", 9123), "f", "secret")
    assert [stat.S_IMODE((home / p).stat().st_mode) for p in (".lakehead", ".lakehead/tokens")] == [0o700, 0o700]
    assert len(list((home / ".lakehead" / "tokens").iterdir())) == 1
    kept.remove()
