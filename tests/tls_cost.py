"""What TLS costs, through Lakehead and through bare Flight, which is what pyarrow leaves to it: ``make tls-cost``.

Servers with and without TLS run in processes of their own and are asked in turns. Of each pair of answers the ratio is
taken; printed are medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from tests.certificates import Authority

import lakehead as lh
from lakehead.api.embedded import serve
from lakehead.config import ServerConfig

ROWS = 1_000_000
TABLE = pa.table({"a": np.arange(ROWS), "b": np.arange(ROWS) * 3, "c": np.linspace(0.0, 1.0, ROWS)})


class _Bare(fl.FlightServerBase):
    """Sends and takes the same rows, and does nothing with them."""

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.FlightDataStream:
        batches = TABLE.to_batches(max_chunksize=1 << 16)
        return fl.GeneratorStream(TABLE.schema, iter(batches))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        for _ in reader:
            continue


def serve_until_told(kind: str, folder: str, cert: str, key: str) -> None:
    """In a process of its own: say the port, and end with the input."""
    if kind == "lakehead":
        tls = {"tls_cert": cert, "tls_key": key} if cert else {}
        host = serve(folder, ServerConfig(token="t", **tls))
        print(host.port, flush=True)
        sys.stdin.read()
        host.close()
        return
    certificates = [(Path(cert).read_text(), Path(key).read_text())] if cert else None
    server = _Bare(f"grpc{'+tls' if cert else ''}://localhost:0", tls_certificates=certificates)
    print(server.port, flush=True)
    sys.stdin.read()
    server.shutdown()


def calls_of_lakehead(port: str, ca: Path | None) -> dict[str, Callable[[], object]]:
    con = lh.connect(f"lakehead://localhost:{port}", token="t", **({} if ca is None else {"tls_ca": ca}))
    table = con.create_table("a.read", TABLE.schema, durability="os")
    table.append(TABLE)
    keyed = con.create_table("a.keyed", TABLE.schema, primary_key="a", durability="os")
    keyed.upsert(TABLE.slice(0, 1000))
    grows = con.create_table("a.grows", TABLE.schema, durability="os")
    return {
        "Lakehead, 200 gets": lambda: [keyed.get(i) for i in range(200)],
        "Lakehead, a scan": lambda: table.scan().to_arrow(),
        "Lakehead, an append": lambda: grows.append(TABLE),
    }


def calls_of_flight(port: str, ca: Path | None) -> dict[str, Callable[[], object]]:
    how = {} if ca is None else {"tls_root_certs": ca.read_bytes()}
    client = fl.connect(f"grpc{'+tls' if ca else ''}://localhost:{port}", **how)

    def put() -> None:
        writer, _ = client.do_put(fl.FlightDescriptor.for_path("x"), TABLE.schema)
        writer.write_table(TABLE, max_chunksize=1 << 16)
        writer.close()

    return {"bare Flight, the same rows read": lambda: client.do_get(fl.Ticket(b"")).read_all(), "written": put}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make tls-cost")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_until_told(*options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder) / "ca")
        cert, key = map(str, authority.signed("server", "DNS:localhost"))
        for kind, calls_of in (("lakehead", calls_of_lakehead), ("flight", calls_of_flight)):
            servers = [
                _started(kind, f"{folder}/{kind}-plain", "", ""),
                _started(kind, f"{folder}/{kind}-tls", cert, key),
            ]
            plain, tls = (calls_of(port, ca) for (_, port), ca in zip(servers, (None, authority.ca), strict=True))
            for name in plain:
                print(f"{name:34}", _compared(plain[name], tls[name], options.rounds), flush=True)
            for process, _ in servers:
                process.kill()
                process.wait()


def _started(kind: str, folder: str, cert: str, key: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "tests.tls_cost", "--serve", kind, folder, cert, key]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def _compared(plain: Callable[[], object], tls: Callable[[], object], rounds: int) -> str:
    seconds: list[tuple[float, float]] = []
    for _ in range(rounds + 2):
        pair = []
        for call in (plain, tls):
            began = time.perf_counter()
            call()
            pair.append(time.perf_counter() - began)
        seconds.append((pair[0], pair[1]))
    without, with_tls = (statistics.median(pair[i] for pair in seconds[2:]) * 1e3 for i in (0, 1))
    ratio = statistics.median(b / a for a, b in seconds[2:])
    return f"{without:7.1f} ms, with TLS {with_tls:7.1f} ms: {ratio - 1:+.0%}"


if __name__ == "__main__":
    main()
