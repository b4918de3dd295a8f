"""Waiting for what another thread or process brings about, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT_SECONDS = 120.0
"""How long tests wait for what has to come: machines stand still for half a minute at times, which is no fault."""


def wait_until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Ask again and again, until the condition holds.

    Raises:
        AssertionError: it did not come about in time.
    """
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about in time"
        pause.wait(0.005)
