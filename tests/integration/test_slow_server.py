"""Servers that are slow: a busy machine answers a connection late, which is no reason to give up."""

from __future__ import annotations

import socket
import threading
from typing import Any

import lakehead as lh

_LATE_SECONDS = 0.5


def _late_door(port: int) -> socket.socket:
    """A socket that takes connections at once and passes them on to a port late, until it is closed."""
    door = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()

    def serve() -> None:
        while True:
            try:
                near, _ = door.accept()
            except OSError:
                return
            threading.Event().wait(_LATE_SECONDS)
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return door


def test_a_connection_that_is_answered_late_is_waited_for(server: Any) -> None:
    with _late_door(server.port) as door:
        with lh.connect(f"lakehead://127.0.0.1:{door.getsockname()[1]}", token=server.token) as con:
            assert con.tables() == []
        door.shutdown(socket.SHUT_RDWR)
