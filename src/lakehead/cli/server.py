"""`lakehead server`: serve a data folder until told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Annotated

import typer

from lakehead.cli.metrics import RoundMetrics, ServerMetrics, new_registry, served
from lakehead.cli.output import write_json, write_line
from lakehead.cli.session import ConfigOption, Session, command, read_config
from lakehead.errors import InvalidRequestError


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    command(app, "server")(server)


def server(
    session: Session,
    data: Annotated[str, typer.Option(help="The folder; made when it is missing.", envvar="LAKEHEAD_DATA")] = "./data",
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen on TCP, not on a Unix socket; port 0 is a free one.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="PEM", help="The server's certificate: speak TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="The key of that certificate.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(metavar="PEM", help="Serve those alone who have a certificate of this authority.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Be reached from other machines without TLS: the network is encrypted.")
    ] = False,
    audit: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write each request to this file, as a line of JSON.")
    ] = None,
    tier: Annotated[bool, typer.Option("--tier", help="Keep lake tables fresh, too, in this process.")] = False,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Answer Prometheus there; port 0 takes a free one.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Serve a data folder until SIGINT or SIGTERM.

    Prints one line with the URI when it is ready.

    Settings: defaults, then the file, then LAKEHEAD_LISTEN, LAKEHEAD_TOKEN and LAKEHEAD_LAKE_NAME, then options.
    """
    from lakehead.api.connection import open_server
    from lakehead.api.embedded import serve
    from lakehead.config import load
    from lakehead.env.clock import SystemClock
    from lakehead.env.garbage import short_collections
    from lakehead.env.secret_files import SECRETS

    if session.uri_given:
        raise InvalidRequestError(f"--uri {session.uri} says where to connect: name the folder to serve with --data")
    if not data:
        raise InvalidRequestError("--data (or LAKEHEAD_DATA) is empty: name the folder to serve, or leave it out")
    path = config or session.config
    flags = {"listen": listen, "tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca, "audit": audit}
    toml, shared = read_config(path) if path else (None, False)
    settings = load(toml, os.environ, {**flags, "insecure": insecure or None}, path or "", SECRETS, shared)
    # Blocked before the first thread starts, so that all threads inherit it and only sigwait takes the signals.
    stops = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        with contextlib.ExitStack() as stack:
            registry = new_registry() if metrics else None
            host = serve(data, settings)
            stack.callback(host.close)
            url = None
            if tier or metrics:
                con = stack.enter_context(open_server(host.local_uri, token=host.token))
            if registry is not None:
                registry.register(ServerMetrics(con))
                url = stack.enter_context(served(metrics or "", registry))
            if session.json:
                write_json({"uri": host.uri, "data": data, "pid": os.getpid()} | ({"metrics": url} if url else {}))
                sys.stdout.flush()
            else:
                write_line(f"serving {data} at {host.uri}" + (f", metrics at {url}" if url else ""))
            if tier:
                stack.enter_context(con.tiering(on_round=RoundMetrics(registry).count if registry else None))
            with short_collections(SystemClock()):
                signal.sigwait(stops)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is synced and closed; a normal exit would wait for the connections that clients keep open.
    os._exit(0)
