"""How long Python's collector of reference cycles may stop a process that serves others.

A full collection walks everything that has lived for a while, and nothing else runs meanwhile: with Arrow and numba
loaded that is 60 to 100 ms, in which no reader has an answer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from lakehead.env.clock import Clock

THAW_SECONDS = 3600.0
"""So long may what was in use for a while, and is part of a cycle, stay in memory once it is not used any more."""


@contextlib.contextmanager
def short_collections(clock: Clock) -> Iterator[None]:
    """Have full collections pass over what survived the one before, but for one in `THAW_SECONDS`. For a process that
    is ours alone."""
    thawed = clock.monotonic()

    def collects(phase: str, info: dict[str, Any]) -> None:
        nonlocal thawed
        if info["generation"] < 2:
            return
        if phase == "stop":
            gc.freeze()
        elif (now := clock.monotonic()) - thawed >= THAW_SECONDS:
            thawed = now
            gc.unfreeze()

    gc.freeze()
    gc.callbacks.append(collects)
    try:
        yield
    finally:
        gc.callbacks.remove(collects)
        gc.unfreeze()
