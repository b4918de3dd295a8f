"""How many files this process may hold open: each tablet has one, each segment of its log, and each connection."""

from __future__ import annotations

import contextlib
import os
import resource

from lakehead.env.storage import storage_errors


def raise_descriptors() -> int:
    """Take as many as the system lets this process take, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS has less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def fill_standard_descriptors() -> None:
    """Open the null device as standard input, output and error where the process was started without them, as some
    supervisors do: a lock, a log or a connection would get their numbers, and with them what libraries and child
    processes print. May be called at any time, by whoever is about to open something.

    Raises:
        StorageError: no file can be opened.
    """
    with storage_errors(os.devnull, "open"):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)


def open_descriptors() -> int:
    """How many it has open."""
    return len(os.listdir("/dev/fd"))
