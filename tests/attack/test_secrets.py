"""Secrets are where other users cannot read them, or Lakehead does not start with them, and never says them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keyring
import keyring.backend
import keyring.errors
import pytest

import lakehead as lh
from lakehead.cli.main import main
from lakehead.config import load
from lakehead.env.secret_files import SECRETS

KEPT = {("lake/server", "token"): "from-the-keyring", ("db", "password"): "swordfish", ("db", "empty"): ""}


class Keyring(keyring.backend.KeyringBackend):
    """One that keeps what the test says, or fails."""

    priority = 1  # type: ignore[assignment]
    fails: Exception | None = None

    def get_password(self, service: str, username: str) -> str | None:
        if self.fails is not None:
            raise self.fails
        return KEPT.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        raise NotImplementedError

    def delete_password(self, service: str, username: str) -> None:
        raise NotImplementedError


@pytest.fixture
def ring() -> Iterator[Keyring]:
    before = keyring.get_keyring()
    made = Keyring()
    keyring.set_keyring(made)
    yield made
    keyring.set_keyring(before)


def loaded(toml: str, environ: dict[str, str] | None = None, *, shared: bool = True) -> Any:
    return load(toml, environ or {}, {}, "lakehead.toml", SECRETS, shared)


LITERALS = {
    "[server]\ntoken = 'open-sesame'": "[server] token",
    "[lake]\ncatalog = {password = 'open-sesame'}": "[lake] password",
    "[lake]\ncatalog = {'s3.secret-access-key' = 'open-sesame'}": "[lake] s3.secret-access-key",
    "[lake]\ncatalog = {'s3.session-token' = 'open-sesame'}": "[lake] s3.session-token",
    "[lake]\ncatalog = {'adls.account-key' = 'open-sesame'}": "[lake] adls.account-key",
    "[lake]\ncatalog = {'adls.connection-string' = 'open-sesame'}": "[lake] adls.connection-string",
    "[lake]\ncatalog = {credential = 'id:open-sesame'}": "[lake] credential",
    "[lake]\ncatalog = {'header.Authorization' = 'Basic open-sesame'}": "[lake] header.Authorization",
    "[lake]\ncatalog = {uri = 'postgresql://me:open-sesame@db/lake'}": "[lake] uri",
    "[lake]\ncatalog = {uri = 'postgresql://${env:USER}:open-sesame@db/lake'}": "[lake] uri",
    "[lake]\ncatalog = {uri = 'postgresql://db/lake?user=me&password=open-sesame&x=${env:USER}'}": "[lake] uri",
}


@pytest.mark.parametrize("toml", LITERALS)
def test_what_others_can_read_holds_no_secret(toml: str) -> None:
    with pytest.raises(lh.InvalidPropertyError, match=r"chmod 600 lakehead\.toml") as raised:
        loaded(toml, {"USER": "me"})
    assert LITERALS[toml] in raised.value.message and "${keyring:service/name}" in raised.value.message
    assert "open-sesame" not in f"{raised.value} {raised.value.context}"
    loaded(toml, {"USER": "me"}, shared=False)


def test_what_is_no_secret_may_be_read(ring: Keyring) -> None:
    found = loaded(
        """
        [server]
        listen = "127.0.0.1:9123"
        token = "${env:TOKEN}"
        tls_cert = "/etc/lakehead/server.pem"
        tls_key = "/etc/lakehead/server.key"
        [oidc]
        issuer = "https://id.example.org"
        audience = "lake"
        jwks = "https://id.example.org/keys?kind=sig"
        [lake]
        catalog = {uri = "postgresql://${env:USER}@db:5432/a", warehouse = "s3://bucket/x", "s3.access-key-id" = "id",
                   "s3.secret-access-key" = "${keyring:db/password}", "token-refresh-enabled" = true,
                   other = "postgresql://${env:USER}:${keyring:db/password}@db/lake"}
        """.replace(",\n", ", "),
        {"TOKEN": "t", "USER": "me"},
    )
    assert found.token == "t" and found.lake.catalog["s3.secret-access-key"] == "swordfish"
    assert found.lake.catalog["other"] == "postgresql://me:swordfish@db/lake"
    assert "swordfish" not in repr(found)


def test_the_keyring(ring: Keyring) -> None:
    assert loaded("[server]\ntoken = '${keyring:lake/server/token}'").token == "from-the-keyring"
    for text, why in {
        "${keyring:lake/other}": "has no secret",
        "${keyring:db/empty}": "has no secret",
        "${keyring:token}": "service/name",
        "${keyring:/token}": "service/name",
        "${keyring:lake/}": "service/name",
        "${vault:lake/token}": "is no reference",
    }.items():
        with pytest.raises(lh.InvalidPropertyError, match=why):
            loaded(f"[server]\ntoken = '{text}'")
    ring.fails = keyring.errors.KeyringLocked("it is locked")
    with pytest.raises(lh.InvalidPropertyError, match="it is locked"):
        loaded("[server]\ntoken = '${keyring:db/password}'")
    ring.fails = keyring.errors.NoKeyringError("No recommended backend was available")
    with pytest.raises(lh.InvalidPropertyError, match="No recommended backend"):
        loaded("[server]\ntoken = '${keyring:db/password}'")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(lh.MissingDependencyError, match=r"pip install 'lakehead\[keyring\]'"):
        loaded("[server]\ntoken = '${keyring:db/password}'")


def test_what_a_secret_holds_is_no_reference(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEPT, ("db", "password"), "${file:/etc/passwd}")
    assert loaded("[server]\ntoken = '${keyring:db/password}'").token == "${file:/etc/passwd}"


def test_the_command_line_looks_at_the_files_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LAKEHEAD_URI", "LAKEHEAD_CONFIG", "LAKEHEAD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "lakehead.toml"
    catalog = f"{{type = 'sql', uri = 'sqlite:///{tmp_path}/c.db', warehouse = '{tmp_path}/w', password = 'swordfish'}}"
    config.write_text(f"[lake]\ncatalog = {catalog}\n")
    words = ["--config", "lakehead.toml", "table", "create", "a.t", "--schema", "id bigint"]
    for mode in (0o640, 0o604, 0o644):
        config.chmod(mode)
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "chmod 600 lakehead.toml" in told and "swordfish" not in told
        assert not (tmp_path / "data").exists()
    config.chmod(0o600)
    assert main(words) == 0
