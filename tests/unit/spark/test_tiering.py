"""What is submitted to a Spark cluster: whose server it goes to, and how it ends where it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.config import ServerConfig
from lakehead.spark import tiering


def test_the_submitted_service_comes_with_the_token_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[list[str]] = []

    def open_service(spark: object, con: Any, *_: object, **how: object) -> Any:
        with con() as opened:
            known.append(opened.tables())
        return SimpleNamespace(run=lambda seconds: None)

    monkeypatch.setattr(tiering, "open_service", open_service)
    host = serve(tmp_path / "data", ServerConfig(token="t"))
    try:
        monkeypatch.setenv("HOME", str(tmp_path))  # where no token is found
        monkeypatch.setenv("LAKEHEAD_TOKEN", "another")
        assert tiering.main(["--uri", host.uri]) == lh.AuthenticationError("").exit_code and not known
        monkeypatch.setenv("LAKEHEAD_TOKEN", "t")
        assert tiering.main(["--uri", host.uri]) == 0 and known == [[]]
    finally:
        host.close()
    assert tiering.main(["--uri", os.fspath(tmp_path / "of my own")]) == 0, "a folder asks for none"


@pytest.mark.parametrize("uri", ["lakehead://nonsense", "s3://bucket", "lakehead://box:0"])
def test_an_address_that_is_none_is_one_line(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert tiering.main(["--uri", uri]) == lh.InvalidUriError("").exit_code
    told = capfd.readouterr().err
    assert told.startswith("error 1") and told.count("\n") == 1 and repr(uri) in told
