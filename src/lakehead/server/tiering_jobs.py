"""Which tiering job has which table: each table one, the same number each, and none that a silent job could work on.

Nothing is stored: jobs say with each question what they have. After a restart of the server they keep it; what two of
them take for their own is a conflict that the lake's compare-and-swap decides, as it does for services that ask nobody.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lakehead.env.clock import Clock
from lakehead.env.threads import Threads
from lakehead.errors import OverloadedError
from lakehead.protocol.tiering import RoundInfo

SILENT_SECONDS = 5.0
"""A job that asked nothing for so long is gone, and its tables go to others."""

JOBS_MAX = 1000
ROUNDS_KEPT = 20


@dataclass
class Job:
    """One that asks.

    Attributes:
        name: for people: its host and process.
        wants: tables that it would work on.
        has: those that it may be working on: what it said that it has, and was told since.
        asked_at: on a clock that never goes back.
        number: of its newest question.
        resumes: whether it had tables when it first asked.
        memory_bytes: of its process.
    """

    name: str
    wants: frozenset[str] = frozenset()
    has: set[str] = field(default_factory=set)
    asked_at: float = 0.0
    number: int = -1
    resumes: bool = False
    memory_bytes: int = 0


class TieringJobs:
    """Thread-safe."""

    def __init__(self, clock: Clock, threads: Threads) -> None:
        self._clock = clock
        self._lock = threads.lock()
        self._jobs: dict[str, Job] = {}
        self._owners: dict[str, str] = {}
        self._resumed_until = clock.monotonic() + SILENT_SECONDS
        self._rounds: dict[str, deque[tuple[RoundInfo, float]]] = {}

    def ask(
        self,
        job_id: str,
        name: str,
        *,
        number: int,
        wants: Collection[str],
        has: Collection[str],
        memory_bytes: int = 0,
    ) -> frozenset[str]:
        """Take in that a job lives, and say which tables are its own until it asks again.

        A table goes from one job to another once the first has said that it is done with it, or is silent.

        Args:
            number: grows with each question, and is the same when one is repeated; an older one is passed by.
            wants: ids of tables that it would work on.
            has: those that it may be working on.
            memory_bytes: of its process.

        Raises:
            OverloadedError: `JOBS_MAX` others ask.
        """
        with self._lock:
            now = self._clock.monotonic()
            self._forget_silent(now)
            if job_id not in self._jobs and len(self._jobs) >= JOBS_MAX:
                raise OverloadedError(f"{JOBS_MAX} tiering jobs ask this server already: end some")
            # One that worked before this server began leaves time to others that did.
            job = self._jobs.setdefault(job_id, Job(name, resumes=bool(has)))
            if number < job.number:
                return frozenset()
            told = job.has if number == job.number else ()
            job.wants, job.has, job.asked_at, job.number = frozenset(wants), {*has, *told}, now, number
            job.memory_bytes = memory_bytes
            for table_id in [t for t in self._owned(job_id) if t not in job.wants]:
                del self._owners[table_id]
            for table_id in job.wants & job.has:
                self._owners.setdefault(table_id, job_id)
            if not job.resumes or now >= self._resumed_until:
                self._deal_out()
                self._even_out(job_id)
            others = [other for i, other in self._jobs.items() if i != job_id]
            own = {t for t in self._owned(job_id) if not any(t in other.has for other in others)}
            job.has |= own
            return frozenset(own)

    def leave(self, job_id: str) -> None:
        """A job works on nothing any more."""
        with self._lock:
            self._forget(job_id)

    def listed(self) -> list[tuple[Job, int, float]]:
        """The jobs that live: each with the number of its tables, and the seconds since it asked, the oldest first."""
        with self._lock:
            now = self._clock.monotonic()
            self._forget_silent(now)
            return [(job, len(self._owned(i)), now - job.asked_at) for i, job in self._jobs.items()]

    # ---- what they did ------------------------------------------------------------------------------------------

    def note_round(self, table_id: str, info: RoundInfo) -> None:
        """Keep what a round did, until `ROUNDS_KEPT` newer ones are known."""
        with self._lock:
            kept = self._rounds.setdefault(table_id, deque(maxlen=ROUNDS_KEPT))
            if not any(info == known for known, _ in kept):
                kept.append((info, self._clock.monotonic()))

    def rounds(self, table_id: str) -> list[tuple[RoundInfo, float]]:
        """The newest rounds of a table, the oldest first, and the seconds since each was reported."""
        with self._lock:
            now = self._clock.monotonic()
            return [(info, now - at) for info, at in self._rounds.get(table_id, ())]

    def forget_rounds(self, table_id: str) -> None:
        """The table is gone."""
        with self._lock:
            self._rounds.pop(table_id, None)

    # ---- who has what -------------------------------------------------------------------------------------------

    def _forget_silent(self, now: float) -> None:
        for job_id in [i for i, job in self._jobs.items() if now - job.asked_at > SILENT_SECONDS]:
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        for table_id in self._owned(job_id):
            del self._owners[table_id]

    def _owned(self, job_id: str) -> Sequence[str]:
        return [t for t, owner in self._owners.items() if owner == job_id]

    def _deal_out(self) -> None:
        """Give what nobody has to whoever has least."""
        counts = Counter(self._owners.values())
        for table_id in sorted({t for job in self._jobs.values() for t in job.wants} - self._owners.keys()):
            owner = min((i for i, job in self._jobs.items() if table_id in job.wants), key=lambda i: counts[i])
            self._owners[table_id] = owner
            counts[owner] += 1

    def _even_out(self, job_id: str) -> None:
        """Let a job that has fewer tables than others take some of theirs."""
        counts = Counter(self._owners.values())
        for table_id in self._movable_to(job_id):
            if counts[self._owners[table_id]] > counts[job_id] + 1:
                counts[self._owners[table_id]] -= 1
                counts[job_id] += 1
                self._owners[table_id] = job_id

    def _movable_to(self, job_id: str) -> Iterator[str]:
        wants = self._jobs[job_id].wants
        return (t for t, owner in sorted(self._owners.items()) if owner != job_id and t in wants)
