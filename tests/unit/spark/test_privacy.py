"""Which settings keep a session private: all of a kind or none, and only on this machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lakehead.env.randomness import SeededRandomness
from lakehead.spark.privacy import Scratch, close_to_others, is_private, private_settings, tells_a_secret

SCRATCH = Scratch("/scratch", "/sockets")
CLUSTER = "local-cluster[1,1,512]"


def settings(
    master: str = "local[2]",
    configured: dict[str, str] | None = None,
    scratch: Scratch = SCRATCH,
    *,
    dirs: bool = False,
) -> dict[str, str]:
    return private_settings(master, configured or {}, scratch, SeededRandomness(1), has_local_dirs=dirs)


def test_of_settings_that_belong_together_all_or_none_are_ours() -> None:
    assert settings()["spark.authenticate"] == settings()["spark.network.crypto.enabled"] == "true"
    for name in ("spark.authenticate", "spark.network.crypto.enabled", "spark.ssl.rpc.enabled"):
        got = settings(configured={name: "false"})
        assert not [k for k in got if k.startswith(("spark.authenticate", "spark.network.crypto"))]
        assert got["spark.local.dir"] == "/scratch" and got["spark.driver.bindAddress"] == "127.0.0.1"


def test_what_is_written_elsewhere_is_encrypted() -> None:
    assert "spark.io.encryption.enabled" not in settings()
    for got in (settings(configured={"spark.local.dir": "/theirs"}), settings(dirs=True)):
        assert got["spark.io.encryption.enabled"] == "true" and "spark.local.dir" not in got
    got = settings(configured={"spark.local.dir": "/theirs", "spark.io.encryption.enabled": "false"})
    assert "spark.io.encryption.enabled" not in got


def test_where_no_socket_fits_there_is_none() -> None:
    got = settings(scratch=Scratch("/scratch", None))
    assert got["spark.python.unix.domain.socket.enabled"] == "false"
    got = settings(configured={"spark.python.unix.domain.socket.enabled": "true"}, scratch=Scratch("/scratch", None))
    assert not [k for k in got if "socket" in k]
    assert settings()["spark.python.unix.domain.socket.dir"] == "/sockets"


def test_a_cluster_of_ours_has_secrets_and_no_pages() -> None:
    got = settings(CLUSTER)
    key = got["spark.org.apache.spark.ui.JWSFilter.param.secretKey"]
    assert got["spark.authenticate.secret"] != key[: len(key) // 2] and got["spark.ui.filters"]
    assert "spark.ui.filters" not in settings(CLUSTER, {"spark.ui.enabled": "true"}), "who asks for pages gets them"
    assert "spark.authenticate.secret" not in settings(), "Spark makes one"


@pytest.mark.parametrize(
    ("master", "private"),
    [("local", True), ("local[*]", True), (CLUSTER, True), ("spark://127.0.0.1:7077", False), ("yarn", False)],
)
def test_clusters_that_others_configured_are_left_alone(master: str, private: bool) -> None:
    assert is_private(master) is private


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("spark.hadoop.fs.s3a.secret.key", True),
        ("spark.hadoop.fs.s3a.access.key", True),
        ("spark.hadoop.fs.s3a.session.token", True),
        ("spark.hadoop.fs.azure.account.key.x.dfs.core.windows.net", True),
        ("spark.ssl.keyPassword", True),
        ("spark.executorEnv.ANYTHING", True),
        ("spark.driver.memory", False),
        ("spark.jars.packages", False),
    ],
)
def test_secrets_are_told_by_their_names(name: str, secret: bool) -> None:
    assert tells_a_secret(name) is secret


def test_a_long_path_for_temporary_files_has_its_sockets_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = Scratch.made()
    assert stat.S_IMODE(Path(made.folder).stat().st_mode) == 0o700 and Path(made.folder).parent == long
    assert made.sockets is not None and stat.S_IMODE(Path(made.sockets).stat().st_mode) == 0o700
    monkeypatch.setenv("HOME", str(long))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Scratch.made().sockets is None


def test_a_folder_is_closed_before_or_after_it_is_made(tmp_path: Path) -> None:
    close_to_others(str(tmp_path / "work"), "app")
    (tmp_path / "open").mkdir(mode=0o755)
    close_to_others(str(tmp_path), "open")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "work" / "app", tmp_path / "open")] == [0o700, 0o700]
