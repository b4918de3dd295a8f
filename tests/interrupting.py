"""Ctrl-C in the main thread, at a moment of a test's choice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.env.interrupts import Latch


def interrupted(call: Callable[[], object], when: Latch) -> None:
    """Make the call in this thread, the main one, and interrupt it once ``when`` is open; it raises that."""

    def interrupt() -> None:
        assert when.wait(WAIT_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    thread.join()
