"""Keeps what libraries print when servers vanish out of the way: Arrow's C++ writes straight to descriptor 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def quiet_stderr(path: Path) -> Iterator[None]:
    """Send standard error to a file, for everything in this process."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(path, "a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
