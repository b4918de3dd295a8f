"""Tokens of this user's servers on this machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lakehead.env.credentials import load_token, remove_token, save_token


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_saved_tokens_are_found_by_port_and_by_nobody_else(home: Path) -> None:
    assert load_token(9123) is None
    save_token(9123, "secret")
    save_token(9124, "other")
    assert (load_token(9123), load_token(9124)) == ("secret", "other")
    files = [p for p in home.rglob("*") if p.is_file()]
    assert len(files) == 2
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_server_forgets_only_its_own_token() -> None:
    save_token(9123, "first")
    save_token(9123, "second")
    remove_token(9123, "first")
    assert load_token(9123) == "second"
    remove_token(9123, "second")
    remove_token(9123, "second")
    assert load_token(9123) is None


def test_without_a_home_the_token_goes_to_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    save_token(9123, "secret")
    assert load_token(9123) == "secret"
    assert not (tmp_path / "missing").exists()
