"""Addresses as URIs say them."""

from __future__ import annotations

import pytest

from lakehead.env.address import SOCKET_PATH_BYTES_MAX, SocketAddress, TcpAddress, parse_uri
from lakehead.errors import InvalidUriError


@pytest.mark.parametrize(
    ("uri", "address", "location"),
    [
        ("lakehead://127.0.0.1:9123", TcpAddress("127.0.0.1", 9123), "grpc://127.0.0.1:9123"),
        ("lakehead://[::1]:1", TcpAddress("[::1]", 1), "grpc://[::1]:1"),
        (
            "lakehead:///run/user/7/a:1.sock",
            SocketAddress("/run/user/7/a:1.sock"),
            "grpc+unix:///run/user/7/a%3A1.sock",
        ),
        (
            "lakehead:///home/J%20%C3%96/a.sock",
            SocketAddress("/home/J Ö/a.sock"),
            "grpc+unix:///home/J%20%C3%96/a.sock",
        ),
    ],
)
def test_uris_and_back(uri: str, address: TcpAddress | SocketAddress, location: str) -> None:
    assert parse_uri(uri) == parse_uri(address.uri) == address
    assert address.location() == location


def test_with_tls() -> None:
    assert TcpAddress("lake.test", 1).location(tls=True) == "grpc+tls://lake.test:1"


@pytest.mark.parametrize(
    "uri",
    ["lakehead://", "lakehead://box", "lakehead://box:0", "lakehead://256.0.0.1:1", "http://box:1", "box:1",
     "lakehead:///", "lakehead:///a/../b.sock", "lakehead:///a//b.sock", "lakehead:///a/", "lakehead:////a.sock",
     "lakehead:///a?b.sock", "lakehead:///a%23.sock", "lakehead:///a%00.sock", f"lakehead:///{'a' * 107}"],
)  # fmt: skip
def test_what_is_no_address(uri: str) -> None:
    with pytest.raises(InvalidUriError):
        parse_uri(uri)


def test_what_is_too_long_for_the_kernel() -> None:
    assert SocketAddress("/" + "a" * (SOCKET_PATH_BYTES_MAX - 1)).possible
    assert not SocketAddress("/" + "ä" * (SOCKET_PATH_BYTES_MAX // 2 + 1)).possible
