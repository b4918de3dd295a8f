"""The live page: the standard library's HTTP server, and one HTML file to which the server sends what is new.

``python -m examples.shop.page URI --port 8080 [--layers chain]``, until its standard input ends. ``/`` is the page,
``/events`` its stream (server-sent events), ``/state`` what it shows at this moment.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lakehead as lh
from examples.shop import tables
from examples.shop.watch import Watch

EVERY_SECONDS = 0.25
HTML = Path(__file__).with_name("page.html")


class PageServer(ThreadingHTTPServer):
    """Shows what ``state`` returns, at ``url``, from when it is made until it is closed."""

    daemon_threads = True

    def __init__(self, state: Callable[[], dict[str, Any]], port: int = 0) -> None:
        self.state = state
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", port), _Answers)
        self._thread = threading.Thread(
            target=partial(self.serve_forever, poll_interval=0.05), name="page", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def close(self) -> None:
        """End all streams and the server."""
        self.closing.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Answers(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        match self.path:
            case "/":
                self._answer("text/html; charset=utf-8", HTML.read_bytes())
            case "/state":
                self._answer("application/json", json.dumps(self.server.state()).encode())
            case "/events":
                self._stream()
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"data: " + json.dumps(self.server.state()).encode() + b"\n\n")
                if self.server.closing.wait(EVERY_SECONDS):
                    return
        except (BrokenPipeError, ConnectionResetError):
            return  # the browser went away

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--layers", choices=("one", "chain"), default="one")
    given = parser.parse_args()
    with lh.connect(given.uri) as con:
        watch = Watch(con, tables.ONE if given.layers == "one" else tables.CHAIN)
        server = PageServer(lambda: watch.state(), given.port)
        print(json.dumps({"url": server.url}), flush=True)
        for line in sys.stdin:  # "measure SINCE UNTIL", in microseconds, or "layers one|chain"
            match line.split():
                case ["measure", since, until]:
                    print(json.dumps(watch.freshness(int(since), int(until))), flush=True)
                case ["layers", which]:
                    watch.close()
                    watch = Watch(con, tables.ONE if which == "one" else tables.CHAIN)
                    print(json.dumps({"layers": which}), flush=True)
        server.close()
        watch.close()


if __name__ == "__main__":
    main()
