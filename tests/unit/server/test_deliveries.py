"""Streams that rest: who sends what is new, and what is left to their own thread."""

from __future__ import annotations

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS, wait_until

from lakehead.errors import ClosedError
from lakehead.protocol.codec import decode_stream_header
from lakehead.protocol.messages import StreamHeader
from lakehead.protocol.socket_messages import Incoming
from lakehead.server.deliveries import ITEMS_MAX, OWN_MAX, Deliveries, Resting, message_of, send_all
from lakehead.server.streams import Pause

ROWS = pa.record_batch({"n": [1, 2, 3]})


class Log:
    """Numbers that are appended, and a stream of them, as a subscription is one."""

    def __init__(self) -> None:
        self.end = 0
        self.lock = threading.Lock()
        self.watching: list[Callable[[], None]] = []
        self.senders: list[threading.Thread] = []
        self.long = False
        self.error: Exception | None = None
        self.stopped = False
        self.rows = ROWS
        self.looked: Callable[[], None] = lambda: None

    def append(self) -> None:
        with self.lock:
            self.end += 1
        self.notify()

    def notify(self) -> None:
        for call in self.watching:
            call()

    def items(self) -> Iterator[tuple[StreamHeader, pa.RecordBatch] | Pause]:
        at = 0
        while not self.stopped:
            if self.error is not None:
                raise self.error
            if self.long and at < self.end:
                yield Pause.LONG
            while at < self.end:
                at += 1
                self.senders.append(threading.current_thread())
                yield StreamHeader(partition="", bucket=0, end_offset=at), self.rows
            self.looked()
            yield Pause.NOTHING_NEW


class Served:
    """A stream of a log to a client, with its own thread."""

    def __init__(self, log: Log, deliveries: Deliveries) -> None:
        self.log = log
        self.client, self.connection = socket.socketpair()
        self.client.settimeout(30)
        self.items = log.items()
        self.resting = Resting(deliveries, self.connection, self.items)
        log.watching.append(self.resting.progressed)
        self.error: BaseException | None = None
        self.rests = 0
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.incoming = Incoming(ahead=True)

    def _serve(self) -> None:
        try:
            for item in self.items:
                if item is Pause.NOTHING_NEW:
                    self.rests += 1
                    if not self.resting.rest(60):
                        break
                elif not isinstance(item, Pause):
                    send_all(self.connection, message_of(item))
        except BaseException as e:
            self.error = e
        self.connection.close()

    def wait_resting(self) -> None:
        wait_until(lambda: self.resting._rests)

    def next(self) -> int:
        found = self.incoming.received(0)
        while found is None:
            count = self.client.recv_into(self.incoming.room)
            assert count, "it ended"
            found = self.incoming.received(count)
        end = decode_stream_header(found[0]).end_offset
        assert end is not None and pa.ipc.read_record_batch(found[1][0], self.log.rows.schema).equals(self.log.rows)
        return end


@pytest.fixture
def deliveries() -> Iterator[Deliveries]:
    made = Deliveries()
    yield made
    made.stop()
    made.thread.join(WAIT_SECONDS)
    assert not made.thread.is_alive()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def served(log: Log, deliveries: Deliveries) -> Iterator[Served]:
    made = Served(log, deliveries)
    made.wait_resting()
    yield made
    log.stopped = True
    log.notify()
    made.client.close()
    made.thread.join(WAIT_SECONDS)
    assert not made.thread.is_alive()


def test_who_has_promised_sends_when_it_keeps_the_promise(log: Log, served: Served, deliveries: Deliveries) -> None:
    deliveries.promise()
    log.append()
    log.append()
    assert log.senders == []
    deliveries.keep_promise()
    assert [served.next(), served.next()] == [1, 2]
    assert log.senders == [threading.current_thread()] * 2
    assert served.rests == 1  # its own thread has not woken
    deliveries.keep_promise()  # which is none any more
    log.append()
    assert served.next() == 3
    assert log.senders[-1] is deliveries.thread


def test_a_writer_sends_to_a_few_and_leaves_the_others(log: Log, deliveries: Deliveries) -> None:
    streams = [Served(log, deliveries) for _ in range(OWN_MAX + 3)]
    for stream in streams:
        stream.wait_resting()
    deliveries.promise()
    log.append()
    assert [stream.next() for stream in streams[OWN_MAX:]] == [1, 1, 1]
    assert set(log.senders) == {deliveries.thread} and len(log.senders) == 3
    deliveries.keep_promise()
    assert [stream.next() for stream in streams[:OWN_MAX]] == [1] * OWN_MAX
    assert log.senders[3:] == [threading.current_thread()] * OWN_MAX
    log.stopped = True
    log.notify()
    for stream in streams:
        stream.thread.join(WAIT_SECONDS)
        stream.client.close()


def test_what_never_ends_is_left_to_its_own_thread(log: Log, served: Served, deliveries: Deliveries) -> None:
    """Where others write all the time, there is always one more for who sends."""
    deliveries.promise()
    for _ in range(ITEMS_MAX + 10):
        log.append()
    deliveries.keep_promise()
    assert [served.next() for _ in range(ITEMS_MAX + 10)] == [*range(1, ITEMS_MAX + 11)]
    assert log.senders == [threading.current_thread()] * ITEMS_MAX + [served.thread] * 10
    served.wait_resting()


def test_what_takes_long_is_made_by_its_own_thread(log: Log, served: Served) -> None:
    log.long = True
    log.append()
    assert served.next() == 1
    served.wait_resting()
    assert log.senders == [served.thread] and served.rests == 2


def test_a_client_that_takes_nothing_holds_up_its_own_thread_alone(log: Log, served: Served) -> None:
    log.rows = pa.record_batch({"n": list(range(100_000))})
    for _ in range(8):
        log.append()
    wait_until(lambda: not served.resting._rests)
    assert [served.next() for _ in range(8)] == [*range(1, 9)]
    assert len(set(log.senders)) == 2
    served.wait_resting()
    log.append()
    assert served.next() == 9


@pytest.mark.parametrize("error", [ClosedError("the table was dropped"), ValueError("a fault")])
def test_what_fails_is_told_by_its_own_thread(log: Log, served: Served, error: Exception) -> None:
    log.error = error
    log.notify()
    served.thread.join(WAIT_SECONDS)
    assert served.error is error


def test_a_client_that_is_gone_ends_its_stream(log: Log, served: Served) -> None:
    served.client.close()
    log.append()
    served.thread.join(WAIT_SECONDS)
    assert isinstance(served.error, OSError)


def test_it_ends_with_its_stream(log: Log, served: Served) -> None:
    log.stopped = True
    log.notify()
    served.thread.join(WAIT_SECONDS)
    assert not served.thread.is_alive() and served.error is None


def test_progress_while_it_looks_has_it_look_again(log: Log, served: Served, deliveries: Deliveries) -> None:
    looked, go = threading.Event(), threading.Event()

    def wait() -> None:
        log.looked = lambda: None
        looked.set()
        assert go.wait(WAIT_SECONDS)

    log.looked = wait
    log.append()
    assert looked.wait(WAIT_SECONDS)  # and found the end
    deliveries.promise()
    log.append()
    deliveries.keep_promise()  # which another thread does, that is at it
    go.set()
    assert [served.next(), served.next()] == [1, 2]
    assert served.rests == 1


@pytest.mark.parametrize("seed", range(3))
def test_each_is_sent_once_in_order_whoever_writes(log: Log, deliveries: Deliveries, seed: int) -> None:
    """Writers that promise and such that do not, progress that brings nothing, and streams that wake between."""
    streams = [Served(log, deliveries) for _ in range(3)]
    dice = random.Random(seed)
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()

    def write() -> None:
        own = random.Random(seeds.get())
        for _ in range(200):
            what = own.random()
            if what < 0.5:
                deliveries.promise()
                try:
                    log.append()
                    log.append()
                finally:
                    deliveries.keep_promise()
            elif what < 0.8:
                log.append()
            else:
                log.notify()

    def wake(stream: Served) -> None:
        while not log.stopped:
            with stream.resting._changed:  # as when its time is over
                stream.resting._rests = False
                stream.resting._changed.notify_all()

    threads = [threading.Thread(target=write) for _ in range(4)]
    threads.append(threading.Thread(target=wake, args=(streams[0],)))
    for thread in threads:
        seeds.put(dice.randrange(1 << 30))
        thread.start()
    for thread in threads[:-1]:
        thread.join(WAIT_SECONDS)
    for stream in streams:
        assert [stream.next() for _ in range(log.end)] == [*range(1, log.end + 1)]
    log.stopped = True
    threads[-1].join(WAIT_SECONDS)
    log.notify()
    for stream in streams:
        stream.client.close()
        stream.thread.join(WAIT_SECONDS)
        assert not stream.thread.is_alive()
