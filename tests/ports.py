"""Ports of servers that are killed and started again."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def lasting_port() -> int:
    """A free port that nobody is given while its server is down, as gRPC would share it then: it lies below those that
    the kernel hands out."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    draws = random.SystemRandom()
    while True:
        port = draws.randrange(max(1024, first - 16_000), first)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
