"""The server that attacks are played on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lakehead.api.embedded import serve
from lakehead.config import ServerConfig
from lakehead.server.host import ServerHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ServerHost]:
    made = serve(tmp_path / "data", ServerConfig(token="the owner's"))
    yield made
    made.close()
    assert made.wait_stopped(10)
