"""A TCP door before a server that tests close, or have swallow one answer: what networks do to a commit."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from tests.waiting import WAIT_SECONDS


class CutWire:
    """Passes connections on to a port of this machine; a context manager.

    Attributes:
        port: where it listens.
        swallow: the answer to the next request that has these bytes never arrives: its connection ends instead.
        lose: the same, and the request does not arrive either.
        mute: the next request that has these bytes does not arrive, and is never answered; its connection stays.
        closed: no request is passed on; connections end.
        stuck: no request is passed on; connections stay.
        cuts: how many requests were swallowed, lost or muted.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.swallow: bytes | None = None
        self.lose: bytes | None = None
        self.mute: bytes | None = None
        self.closed = self.stuck = False
        self.cuts = 0
        self._held: list[socket.socket] = []

    def __enter__(self) -> CutWire:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        for end in (self._door, *self._held):
            end.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        if self.stuck:
            self._held.append(near)
            return
        if self.closed:
            near.close()
            return
        with near, socket.create_connection(("127.0.0.1", self._upstream)) as far, contextlib.suppress(OSError):
            mute, silent = threading.Event(), threading.Event()
            answers = threading.Thread(target=self._answers, args=(near, far, mute, silent), daemon=True)
            answers.start()
            while data := near.recv(1 << 20):
                if self.stuck:
                    continue
                if self.closed:
                    break
                if self.lose is not None and self.lose in data:
                    self.lose, self.cuts = None, self.cuts + 1
                    break
                if self.mute is not None and self.mute in data:
                    self.mute, self.cuts = None, self.cuts + 1
                    silent.set()
                    while near.recv(1 << 20):
                        continue
                    break
                if self.swallow is not None and self.swallow in data:
                    self.swallow, self.cuts = None, self.cuts + 1
                    mute.set()
                far.sendall(data)
            else:
                far.shutdown(socket.SHUT_WR)
                answers.join(WAIT_SECONDS)
            for end in (near, far):  # a thread that reads from a socket keeps it open when it is closed
                end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answers(near: socket.socket, far: socket.socket, mute: threading.Event, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 20):
                if mute.is_set():
                    break
                near.sendall(data)
            if not silent.is_set():
                near.shutdown(socket.SHUT_RDWR)
