"""Where a server is reached, as a URI says it: a host and a port, or a Unix socket of this machine."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, unquote

from lakehead.errors import InvalidUriError

SCHEME = "lakehead://"
SOCKET_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103
"""What the kernel takes as the path of a Unix socket."""
# gRPC takes what these begin for something else, however they are written.
_UNSPEAKABLE = frozenset("?#%\0")
_PLAIN_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[^/]+)+")


@dataclass(frozen=True)
class TcpAddress:
    """A host, and a port of it."""

    host: str
    port: int

    @property
    def uri(self) -> str:
        """What `parse_uri` reads."""
        return f"{SCHEME}{self}"

    def location(self, *, tls: bool = False) -> str:
        """What Flight calls it."""
        return f"{'grpc+tls' if tls else 'grpc'}://{self}"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class SocketAddress:
    """A Unix socket of this machine.

    Attributes:
        path: absolute.
    """

    path: str

    @property
    def uri(self) -> str:
        """What `parse_uri` reads; there is no host in it, as in that of a file."""
        return f"{SCHEME}{quote(self.path)}"

    def location(self, *, tls: bool = False) -> str:
        """What Flight calls it, for which there is no TLS."""
        return f"grpc+unix://{quote(self.path)}"

    @property
    def possible(self) -> bool:
        """Whether kernel and gRPC can speak of it."""
        return len(os.fsencode(self.path)) <= SOCKET_PATH_BYTES_MAX and not _UNSPEAKABLE.intersection(self.path)

    def __str__(self) -> str:
        return self.path


Address: TypeAlias = TcpAddress | SocketAddress


def parse_uri(uri: str) -> Address:
    """The address of ``lakehead://host:port`` or ``lakehead:///path/of.sock``.

    Raises:
        InvalidUriError: it has another form.
    """
    rest = uri.removeprefix(SCHEME)
    if uri.startswith(f"{SCHEME}/"):
        address = SocketAddress(unquote(rest))
        if not address.possible or not _PLAIN_PATH.fullmatch(address.path):
            raise InvalidUriError(f"{uri!r} names no Unix socket: write what the server printed when it started")
        return address
    host, _, port = rest.rpartition(":")
    octets = host.split(".")
    bad_ip = all(o.isdecimal() for o in octets) and (len(octets) != 4 or any(int(o) > 255 for o in octets))
    if not uri.startswith(SCHEME) or not host or not port.isdecimal() or not 0 < int(port) < 65536 or bad_ip:
        example = f"{SCHEME}127.0.0.1:9123"
        raise InvalidUriError(f"{uri!r} is not a server address: write 'lakehead://host:port', for example {example}")
    return TcpAddress(host, int(port))
