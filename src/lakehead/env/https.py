"""Small documents of the web, fetched within a time and a size, from the very address that is named."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from lakehead.errors import UnavailableError


def fetch(
    address: str,
    *,
    bytes_max: int,
    seconds_max: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """What a server answers with status 200. Redirections are not followed, and proxies not asked; a server of https
    must have a certificate that this machine trusts.

    Args:
        seconds_max: until there is a connection, and once more until all is there.
        body: is sent by POST; without, it is GET.
        headers: beside, or instead of, those that are sent anyway.

    Raises:
        UnavailableError: there is no such answer within that time, or it is larger.
    """
    import http.client
    import ssl

    parts = urlsplit(address)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        trusted = ssl.create_default_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=seconds_max, context=trusted)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=seconds_max)
    late = threading.Event()

    def cut() -> None:
        late.set()
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    # A timeout of the socket begins anew with each byte: who sends one now and then would hold this for ever.
    timer = threading.Timer(seconds_max, cut)
    timer.daemon = True
    try:
        connection.connect()
        timer.start()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        sent = {"Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close", **(headers or {})}
        connection.request("GET" if body is None else "POST", path, body, headers=sent)
        answer = connection.getresponse()
        data = answer.read(bytes_max + 1)
        if late.is_set():
            raise TimeoutError(f"not within {seconds_max:g} seconds")
    except (OSError, http.client.HTTPException, ValueError) as e:
        why = f"not within {seconds_max:g} seconds" if late.is_set() else e or type(e).__name__
        raise UnavailableError(f"{address} does not answer: {why}", address=address) from e
    finally:
        timer.cancel()
        connection.close()
    if answer.status != 200:
        raise UnavailableError(f"{address} answers {answer.status} {answer.reason}", address=address)
    if len(data) > bytes_max:
        raise UnavailableError(f"{address} answers more than {bytes_max:,} bytes", address=address)
    return data
