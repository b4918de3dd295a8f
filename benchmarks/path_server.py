"""Processes that `benchmarks.paths` calls: a server of Lakehead that tells what its probes noted, and bare Flight.

The server reads lines: phases with their functions, as JSON, put probes in; an empty line takes them out, and the
marks are printed. Bare Flight answers each message of an exchange with as many bytes as it asks for, and streams
events, and does nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from benchmarks.probes import Mark, Probes
from lakehead.api.embedded import serve
from lakehead.benchmarks.child import Child, child
from lakehead.benchmarks.events import event_batches
from lakehead.config import ServerConfig

TOKEN = "paths"
_SPANS_OF_SERVER = 1 << 40
MESSAGE = pa.schema([("bytes", pa.large_binary())])


class PathServer:
    """A server in a process of its own, whose functions can be watched.

    Attributes:
        uri: its address.
        pid: its process.
    """

    def __init__(self, process: Child) -> None:
        self._process = process
        self.uri = process.line("lakehead://")
        self.pid = process.pid

    def put_in(self, phases: Mapping[str, Sequence[str]]) -> None:
        """See `Probes.put_in`."""
        self._process.tell(json.dumps(phases))
        self._process.line("in")

    def take_out(self) -> list[Mark]:
        """See `Probes.take_out`."""
        self._process.tell()
        return [Mark(*mark) for mark in json.loads(self._process.line())]


@contextmanager
def path_server(folder: str) -> Iterator[PathServer]:
    """Serve a folder from another process, on TCP."""
    with child("the server", [sys.executable, "-m", "benchmarks.path_server", "tcp", folder]) as process:
        yield PathServer(process)


@contextmanager
def socket_server(folder: str) -> Iterator[PathServer]:
    """The same on the Unix socket of the folder."""
    with child("the server", [sys.executable, "-m", "benchmarks.path_server", "socket", folder]) as process:
        yield PathServer(process)


@contextmanager
def bare_flight() -> Iterator[fl.FlightClient]:
    """A connection to a process of bare Flight."""
    with child("bare Flight", [sys.executable, "-m", "benchmarks.path_server", "bare", ""]) as process:
        uri = process.line("grpc://")
        with fl.connect(uri) as client:
            yield client


class _Bare(fl.FlightServerBase):
    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(MESSAGE)
        while True:
            try:
                asked = reader.read_chunk()
            except StopIteration:
                return
            writer.write_with_metadata(message(int(bytes(asked.app_metadata))), b"-")

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.FlightDataStream:
        rows, _, columns = ticket.ticket.decode().partition(":")
        batches = [b.select(columns.split(",")) for b in _events(int(rows))]
        return fl.GeneratorStream(batches[0].schema, iter(batches))


@functools.cache
def _events(rows: int) -> list[pa.RecordBatch]:
    return event_batches(rows)


@functools.cache
def message(size: int) -> pa.RecordBatch:
    """So many bytes, as one value."""
    return pa.record_batch([pa.array([bytes(size)], pa.large_binary())], schema=MESSAGE)


def _serve(how: str, folder: str) -> None:
    host = serve(folder, ServerConfig(token=TOKEN, unix=how == "socket"))
    print(host.uri, flush=True)
    probes: Probes | None = None
    for line in sys.stdin:
        if line.strip():
            probes = Probes(json.loads(line), _SPANS_OF_SERVER)
            probes.put_in()
            print("in", flush=True)
        elif probes is not None:
            print(json.dumps(probes.take_out()), flush=True)
    host.close()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        server = _Bare("grpc://127.0.0.1:0")
        print(f"grpc://127.0.0.1:{server.port}", flush=True)
        sys.stdin.read()
        os._exit(0)
    _serve(*sys.argv[1:])
