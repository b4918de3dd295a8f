"""Who sends new rows to the streams that wait for them: the thread that has written the rows.

A subscription that has come to the end of the log has nothing to do until somebody writes. If it woke a thread of its
own then, this thread, those of other subscriptions and the writer's would take Python's lock from each other a dozen
times for each row. So it rests here meanwhile. Whoever writes sends what is new as soon as its own answer is on its
way; what makes progress otherwise has one thread for all streams do it.

What could keep such a thread is left to the stream's own: a client that does not take what comes, many rows at once, a
filter that takes long, and whatever fails.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pyarrow as pa

from lakehead.protocol.codec import encode
from lakehead.protocol.messages import StreamHeader
from lakehead.protocol.socket_messages import Outgoing
from lakehead.server.shared_turns import SharedItem
from lakehead.server.streams import Pause

Item = tuple[StreamHeader, pa.RecordBatch]
OWN_MAX = 8
"""To so many streams who writes sends itself, before it takes its next request; to more of them Deliveries' thread."""
ITEMS_MAX = 16
"""After so many items at once the stream's own thread goes on: where many write, there is always one more."""


class Deliveries:
    """The resting streams of which somebody has new rows. Thread-safe.

    Attributes:
        thread: sends where no other does, until `stop`.
    """

    def __init__(self) -> None:
        self._due: queue.SimpleQueue[Resting | None] = queue.SimpleQueue()
        self._mine = threading.local()
        self.thread = threading.Thread(target=self._send_all, name="lakehead-deliver", daemon=True)
        self.thread.start()

    def promise(self) -> None:
        """What this thread makes progress of, it sends itself, to a few: it calls `keep_promise` soon, whatever
        happens."""
        self._mine.due = []

    def keep_promise(self) -> None:
        """Send what this thread has promised to send, if it has."""
        due: list[Resting] | None = getattr(self._mine, "due", None)
        if due is not None:
            self._mine.due = None
            for resting in due:
                resting.send()

    def add(self, resting: Resting) -> None:
        """Have this sent soon what is new."""
        due: list[Resting] | None = getattr(self._mine, "due", None)
        if due is None or len(due) >= OWN_MAX:
            self._due.put(resting)
        else:
            due.append(resting)

    def _send_all(self) -> None:
        while (resting := self._due.get()) is not None:
            resting.send()

    def stop(self) -> None:
        """Send nothing more by a thread of its own."""
        self._due.put(None)


class Resting:
    """A stream to one client. Its own thread lets it rest; any thread sends what is new meanwhile."""

    def __init__(self, deliveries: Deliveries, connection: socket.socket, items: Iterator[Item | Pause]) -> None:
        """``items`` are the stream's, which are asked for by one thread at a time."""
        self._deliveries = deliveries
        self._connection = connection
        self._items = items
        self._changed = threading.Condition()
        self._rests = self._sending = self._again = self._ended = False
        self._unsent: Outgoing | None = None
        self._error: BaseException | None = None

    def progressed(self) -> None:
        """There may be something new; see `lakehead.server.progress.Progress.watch`."""
        if self._rests:  # else its own thread looks, before it lets it rest and right after
            self._deliveries.add(self)

    def rest(self, seconds: float) -> bool:
        """Let others send what is new, for so long at most. In the stream's own thread.

        Returns:
            whether the stream goes on.

        Raises:
            OSError: the client is gone.
            LakeheadError: what the stream ended with.
        """
        with self._changed:
            self._rests = True
        self.send()
        with self._changed:
            self._changed.wait_for(lambda: not self._rests, seconds)
            self._rests = False
            self._changed.wait_for(lambda: not self._sending)
            unsent, self._unsent = self._unsent, None
        if self._error is not None:
            raise self._error
        if unsent is not None:
            send_all(self._connection, unsent)
        return not self._ended

    def send(self) -> None:
        """Send what is new, as much as the client takes at once; its own thread goes on where that is not all."""
        with self._changed:
            if not self._rests:
                return
            if self._sending:
                self._again = True
                return
            self._sending = True
        while True:
            goes_on = self._send_new()
            with self._changed:
                if goes_on and self._again and self._rests:
                    self._again = False
                    continue
                self._sending = self._again = False
                self._rests = self._rests and goes_on
                if not self._rests:
                    self._changed.notify_all()
                return

    def _send_new(self) -> bool:
        """Whether the stream may rest on."""
        try:
            for number, item in enumerate(self._items):
                if isinstance(item, Pause):
                    return item is Pause.NOTHING_NEW
                outgoing = message_of(item)
                if not _sent_at_once(self._connection, outgoing):
                    self._unsent = outgoing
                    return False
                if number + 1 == ITEMS_MAX:
                    return False
            self._ended = True
        except BaseException as e:
            self._error = e
        return False


def send_all(connection: socket.socket, outgoing: Outgoing) -> None:
    """Send a message, for which the other side is waited for."""
    while parts := outgoing.parts:
        outgoing.sent(connection.sendmsg(parts))


def message_of(item: Item) -> Outgoing:
    """An item of a stream on its way."""
    header, batch = item
    return Outgoing(encode(header), [item.data if isinstance(item, SharedItem) else batch.serialize()])


def _sent_at_once(connection: socket.socket, outgoing: Outgoing) -> bool:
    """Send what the other side takes without being waited for; whether that is all."""
    while parts := outgoing.parts:
        try:
            outgoing.sent(connection.sendmsg(parts, (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
    return True
