"""What a stream does to gRPC: one write at a time, as it aborts the process over two."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.client.channel import Exchange
from lakehead.protocol import messages as m

LARGE = pa.py_buffer(bytes(1 << 20))


class Channel:
    """No connection at all."""

    heard_at = 0.0

    def add(self, wait: object) -> None:
        return


class Writer:
    """Writes end when they are told to; two at once are an error."""

    def __init__(self) -> None:
        self.inside = threading.Lock()
        self.entered, self.leave = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[str] = []
        self.collisions = 0

    def _use(self, what: str) -> None:
        if not self.inside.acquire(blocking=False):
            self.collisions += 1
            return
        try:
            self.entered.release()
            assert self.leave.acquire(timeout=WAIT_SECONDS)
            self.calls.append(what)
        finally:
            self.inside.release()

    def write_with_metadata(self, batch: object, metadata: object) -> None:
        self._use("write")

    def write_metadata(self, metadata: object) -> None:
        self._use("write")


class Cancelled(Channel):
    """A connection that ended while the stream was made."""

    def add(self, wait: Any) -> None:
        wait.cancel()


def test_a_stream_on_a_connection_that_has_ended_is_cancelled_at_once() -> None:
    channel: Any = Cancelled()
    exchange = Exchange(channel)
    assert exchange.cancelled and isinstance(exchange.items.get(timeout=WAIT_SECONDS), StopIteration)


@pytest.mark.parametrize("then", ["small", "large"])
def test_nothing_is_written_beside_a_write_that_has_not_returned(then: str) -> None:
    channel: Any = Channel()
    writer = Writer()
    exchange = Exchange(channel)
    exchange._writer = writer
    exchange.ask(m.Hello(), [LARGE])
    assert writer.entered.acquire(timeout=WAIT_SECONDS)  # its answer comes now, while the write is still inside gRPC

    steps = {
        "small": lambda: exchange.ask(m.Hello()),
        "large": lambda: exchange.ask(m.Hello(), [LARGE]),
    }
    after = threading.Thread(target=steps[then])
    after.start()
    while after.is_alive() or len(writer.calls) < 2:
        writer.leave.release()
        after.join(0.01)
    exchange.cancel()
    assert writer.collisions == 0
    assert writer.calls[-1] == "write"


def test_a_stream_is_ended_without_its_writer() -> None:
    """Arrow's reader ends the writing when the server is gone, and gRPC aborts the process over another end of it."""
    channel: Any = Channel()
    exchange = Exchange(channel)
    exchange._writer = object()  # on which nothing can be called
    exchange.cancel()
    assert isinstance(exchange.items.get(timeout=WAIT_SECONDS), StopIteration) and not exchange.broken
