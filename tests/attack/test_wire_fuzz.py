"""A little of ``make attack-fuzz``."""

from __future__ import annotations

import pytest
from tests.attack.wire_fuzz import KINDS, watch


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_messages_end_no_process(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert watch(kind, 1, 1000), capfd.readouterr().out
    assert f"{kind}: 1,000 cases" in capfd.readouterr().out
