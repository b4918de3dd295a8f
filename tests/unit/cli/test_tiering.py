"""`lakehead tier run` may be called before its server is there."""

from __future__ import annotations

from typing import Any

import pytest

import lakehead as lh
from lakehead.cli.tiering import _connected


class Away:
    """A session whose server is not there at once."""

    uri = "lakehead://box:1"

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def connect(self) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return "connected"


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    away: Any = Away(lh.UnavailableError("refused", gone=True), lh.UnavailableError("refused", gone=True))
    assert _connected(away) == "connected" and not away.errors


@pytest.mark.parametrize("error", [lh.UnavailableError("it holds the lock"), lh.AuthenticationError("who")])
def test_what_waiting_does_not_mend_ends_it(error: lh.LakeheadError) -> None:
    wrong: Any = Away(error)
    with pytest.raises(type(error)):
        _connected(wrong)
