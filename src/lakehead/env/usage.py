"""What this process uses, for people who look."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from dataclasses import dataclass

_helpers = threading.local()


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of one thread, and of those that worked for it; picklable."""

    thread: tuple[int, int]
    seconds: float

    @classmethod
    def now(cls) -> CpuTime:
        """Of this thread, since it began."""
        return cls((os.getpid(), threading.get_ident()), time.thread_time() + getattr(_helpers, "seconds", 0.0))

    def since(self, began: CpuTime) -> CpuTime:
        """Between an earlier `now` of the same thread and this one."""
        return CpuTime(self.thread, self.seconds - began.seconds)


def note_helper(seconds: float) -> None:
    """Another thread has worked for this one for so many CPU seconds."""
    _helpers.seconds = getattr(_helpers, "seconds", 0.0) + seconds


def memory_bytes() -> int:
    """Memory that this process has in use; where the system does not say, the most that it ever had."""
    if (held := resident_bytes(os.getpid())) is not None:
        return held
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident_bytes(pid: int) -> int | None:
    """Memory that a process has in use; None where the system does not say."""
    try:
        with open(f"/proc/{pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return None
