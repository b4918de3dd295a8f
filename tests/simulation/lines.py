"""Preemption at any line: with some seeds a task may have to let others go first between any two lines of the code
under test, not only where it sleeps, waits, locks or calls the disk.

Threads of the operating system are switched like that. Each worker traces the lines of the server, the client, the log,
the kv store and the lake's rounds; after so many of them as its own stream of chance says, the task pauses. Lines are
counted over all tasks, so the same seed pauses at the same ones.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.simulation.scheduler import Scheduler
from tests.standby import Standby

import lakehead
from lakehead.env.randomness import SeededRandomness

_HERE = Path(__file__).parent
_ROOT = Path(lakehead.__file__).parent
_WATCHED = tuple(f"{_ROOT}/{part}/" for part in ("server", "client", "log", "kv", "lake", "tiering", "api"))
_ATOMIC = {
    *(f"{_HERE}/{name}.py" for name in ("history", "observer", "lake", "disk")),
    *(f"{_ROOT}/testing/{name}.py" for name in ("database", "lake", "lake_parts", "storage")),
    f"{_ROOT}/lake/formats.py",
    functools.__file__,
}
"""What is called from here happens at once: the model's checks, the simulated catalog and disk; and what holds
real locks."""
_AT_ONCE = {f.__code__ for f in (Standby.follows, Standby.opened, Standby.compare, Standby.hand_on)}
"""So does what a standby does, whose locks are real: a task that is killed before it lets go of one has it for ever."""


class Lines:
    """Pauses tasks at lines of the code under test.

    Args:
        every: lines between two pauses, on average.
    """

    def __init__(self, scheduler: Scheduler, seed: int, every: int) -> None:
        self._scheduler = scheduler
        self._draws = SeededRandomness(seed).draws
        self._every = every
        self._left = self._gap()
        self._known: dict[CodeType, bool] = {}
        self.pauses = 0

    def _gap(self) -> int:
        return self._draws.randint(1, 2 * self._every)

    def watch(self) -> None:
        """Trace the current thread from now on."""
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        watched = self._known.get(code)
        if watched is None:
            name = code.co_filename
            watched = name.startswith(_WATCHED) and name not in _ATOMIC and code.co_name not in ("<module>", "__del__")
            self._known[code] = watched
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left <= 0 and _may_pause(frame):
                self._left = self._gap()
                self.pauses += 1
                self._scheduler.give_way(self._draws.choice([0.0, 0.0, 0.003]))
        return self._line


def _may_pause(frame: FrameType | None) -> bool:
    """Whether nothing that happens at once, and no destructor, is on the stack."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _ATOMIC or code in _AT_ONCE or code.co_name == "__del__":
            return False
        frame = frame.f_back
    return True
