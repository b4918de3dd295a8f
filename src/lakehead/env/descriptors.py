"""How many files this process may hold open: each tablet has one, each segment of its log, and each connection."""

from __future__ import annotations

import contextlib
import os
import resource


def raise_descriptors() -> int:
    """Take as many as the system lets this process take, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS has less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def open_descriptors() -> int:
    """How many it has open."""
    return len(os.listdir("/dev/fd"))
