"""Finding Java: versions as runtimes print them, and the error that says what to install."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.errors import MissingDependencyError
from lakehead.spark.java import Java, find_java, parse_java_version

NEW = 'openjdk version "21.0.2" 2024-01-16'
OLD = 'java version "1.8.0_402"'


@pytest.mark.parametrize(
    ("text", "version"),
    [(NEW, 21), (OLD, 8), ('openjdk version "17-ea" 2021', 17), ('openjdk version "25" 2025', 25), ("no java", None)],
)
def test_version(text: str, version: int | None) -> None:
    assert parse_java_version(text) == version


def fake_java(home: Path, text: str) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    executable.chmod(0o755)
    return executable


def test_too_old_home_gives_way_to_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "old", OLD)
    new = fake_java(tmp_path / "new", NEW)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(new.parent))
    found = find_java()
    assert (found.executable, found.home, found.version) == (str(new), str(tmp_path / "new"), 21)


def test_none_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="openjdk-17-jre-headless"):
        find_java()


def test_only_old_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_java(tmp_path, OLD)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match="is Java 8") as caught:
        find_java()
    assert str(old) in str(caught.value)


@pytest.mark.parametrize(
    ("platform", "version", "some"),
    [("linux", 17, True), ("linux", 25, True), ("linux", 26, False), ("darwin", 17, False)],
)
def test_options_are_given_only_where_they_are_known(
    platform: str, version: int, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    assert bool(Java("java", "home", version).options) == some


def test_java_takes_the_options() -> None:
    found = find_java()
    subprocess.run(
        [found.executable, *found.options, "-version"], check=True, capture_output=True, timeout=WAIT_SECONDS
    )
