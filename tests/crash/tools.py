"""What every step of the crash suite needs: to wait, to count, to kill, to recover, to tier."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.crash.deployment import Counts, Deployment
from tests.crash.history import require
from tests.crash.processes import Rounds, Task, wait_until

import lakehead as lh

REACH_SECONDS = 60.0
_OFTEN = {
    "segment.append": (1, 2, 5, 20),
    "segment.sync": (1, 2, 5, 20),
    "answer.Write": (1, 2, 5, 20),
    "recovery.segment.sync": (1, 2, 5),
    "tablet.": (1, 2, 3),
    "expire.lake.remove": (1, 2, 5, 9),
}


@dataclass(frozen=True)
class Step:
    """One kill, or one fault of the catalog.

    Attributes:
        kind: which method of `Player` plays it.
        point: the named point; what it is about, where there is none.
        first: another point at which the server is killed before.
    """

    kind: str
    point: str
    first: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.point}"


class Tools:
    """For one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts = Counts()
        self.random = random.Random(seed)
        self._pause = threading.Event()
        self._tierer: Rounds | None = None

    def _nth(self, point: str) -> int:
        """How often a point is passed before it kills: those that are reached often, up to many times."""
        return self.random.choice(next((n for start, n in _OFTEN.items() if point.startswith(start)), (1,)))

    def _wait(self, low: float, high: float) -> None:
        self._pause.wait(self.random.uniform(low, high))

    def _count(self, name: str, hit: bool) -> None:
        (self.counts.kills if hit else self.counts.missed)[name] += 1

    def _die(self, deployment: Deployment, name: str, nudge: Callable[[], object] | None = None) -> None:
        """Wait until the armed server dies; when its point is not reached, kill it all the same."""
        server = deployment.server
        deadline = time.monotonic() + REACH_SECONDS
        while server.alive and time.monotonic() < deadline:
            if nudge is not None:
                with contextlib.suppress(lh.UnavailableError, lh.ClosedError):
                    nudge()
            wait_until(lambda: not server.alive, 0.2)
        self._count(name, server.reached)
        server.kill()

    def _die_in_a_moment(self, deployment: Deployment, name: str, change: Callable[[], None]) -> None:
        """Kill the server while one change follows the other."""
        server = deployment.server
        killer = threading.Timer(self.random.uniform(0.05, 0.8), os.kill, (server.pid, signal.SIGKILL))
        killer.start()
        while server.alive:
            change()
        killer.join()
        self._count(name, True)
        server.kill()

    def _recover(self, deployment: Deployment) -> None:
        deployment.restart()
        deployment.check()

    def _rounds(self, deployment: Deployment) -> Rounds:
        if self._tierer is None:
            self._tierer = deployment.rounds()
        return self._tierer

    def _bury(self, rounds: Rounds) -> None:
        rounds.kill()
        self._tierer = None

    def _tier(self, deployment: Deployment, table: str, task: Task = "tier") -> dict[str, Any]:
        """A round, or maintenance, that nothing disturbs must succeed."""
        answer = deployment.ask(self._rounds(deployment), table, task)
        require(answer is not None and "error" not in answer, f"{task} that nothing disturbs ended with {answer}")
        assert answer is not None
        return answer
