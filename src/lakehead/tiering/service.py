"""The tiering service: a shell around its queue, which does what the queue says and tells it how that ended.

Where tables are and where rounds run is for `TieredTables` to know. A server that is away ends nothing, at the start as
later: the service asks for it every second, and goes on at once with all tables when it answers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lakehead.env import Env
from lakehead.errors import (
    AuthenticationError,
    ClosedError,
    CommitConflictError,
    FolderCopiedError,
    LakeheadError,
    MissingDependencyError,
    NoLakeError,
    TableNotFoundError,
    TieringFencedError,
    UnavailableError,
)
from lakehead.tiering.queue import (
    MAINTENANCE_SECONDS,
    End,
    Event,
    Failed,
    Fenced,
    Gone,
    Look,
    Looked,
    MaintenanceEnded,
    RoundEnded,
    RunMaintenance,
    RunRound,
    ServerAway,
    Stopped,
    TieringQueue,
    Turn,
    TurnEnded,
    Wait,
    Woken,
)

if TYPE_CHECKING:
    from lakehead.tiering.commit import CommitResult

Until = Callable[[], bool] | float | None

_log = logging.getLogger("lakehead.tiering")
CONFLICTS_MIN = 5
"""So many rounds of a table in a row that others were quicker than are worth a warning."""
ASK_SECONDS = 0.05
"""How often an ``until`` that is a function is asked."""
_NO_LATER_TRY = (ClosedError, MissingDependencyError, NoLakeError, TableNotFoundError)
"""What ends the service when tables are looked for."""


@dataclass(frozen=True)
class RoundReport:
    """A round that moved rows.

    Attributes:
        table: its name.
        rows, deletes, files: rows added to the lake, older ones deleted, data files added.
        snapshot_id: the lake snapshot.
        seconds: how long the round took.
    """

    table: str
    rows: int
    deletes: int
    files: int
    snapshot_id: int
    seconds: float


class TieredTables(Protocol):
    """Tables by id, as a service reaches them. Several threads take turns at once: of different tables, and a round and
    a maintenance of one."""

    def open(self) -> None:
        """Make ready what takes long; a server that is away is nothing to wait for.

        Raises:
            MissingDependencyError: rounds cannot run here.
        """
        ...

    def look(self, has: frozenset[str], without: frozenset[str]) -> Looked:
        """The tables that are the service's until it looks again.

        Args:
            has: ids of tables that it may be working on.
            without: ids of tables that it leaves to others.

        Raises:
            NoLakeError, TableNotFoundError: a table that the service is to tier has no lake, or does not exist.
            LakeheadError: the server cannot be asked now.
        """
        ...

    def run_round(self, table_id: str, records_max: int) -> CommitResult:
        """One tiering round of so many log records at most; see `lakehead.tiering.round.run_round`.

        Raises:
            TieringFencedError, FolderCopiedError: another service tiers the table, or that of another copy.
            TableNotFoundError: it is gone.
        """
        ...

    def maintain(self, table_id: str) -> bool:
        """A turn of bounded work: compaction, and once there is none, expiry. Returns whether there is more to do.

        Raises:
            TieringFencedError, FolderCopiedError, TableNotFoundError: as `run_round`.
        """
        ...

    def close(self) -> None:
        """Leave the tables to others, and let go of what was opened for them."""
        ...


class TieringService:
    """Keeps lake tables as fresh as they promise. Runs once at a time; `stop` may be called from any thread.

    Args:
        on_round: called after each round that moved rows, in the thread of `run`.
        make_queue: for each run.

    Attributes:
        queue: what the newest run decides with.
    """

    def __init__(
        self,
        tables: TieredTables,
        env: Env,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        make_queue: Callable[[], TieringQueue] = TieringQueue,
    ) -> None:
        self._tables = tables
        self._clock = env.clock
        self._threads = env.threads
        # Not an event: a signal may land in the middle of waiting for it.
        self._changed = env.threads.condition()
        self._stopped = False
        self._ended: deque[Callable[[], TurnEnded]] = deque()
        self._on_round = on_round
        self._make_queue = make_queue
        self.queue = make_queue()

    def stop(self) -> None:
        """Make `run`, or the next one if there is none, return once the round under way is committed."""
        self._stopped = True
        self._changed.notify_all()

    def run(self, until: Until = None) -> None:
        """Tier until told to stop; a round under way is finished first.

        Args:
            until: None: until `stop`, SIGTERM or SIGINT (signals when called in the main thread); a number: so many
                seconds; a function: until it returns true.

        Raises:
            MissingDependencyError: rounds were to run on Spark, and there is no Java 17+ runtime.
            NoLakeError: a table was named that has no lake.
            TableNotFoundError: a table was named that does not exist.
            ClosedError: the connection was closed.
        """
        self.queue = self._make_queue()
        try:
            with _stop_on_signals(self.stop):
                self._tables.open()
                end = self._clock.monotonic() + until if isinstance(until, int | float) else math.inf
                with contextlib.ExitStack() as stack:
                    self._serve(end, until if callable(until) else None, self._start_turns(stack))
        finally:
            self._stopped = False
            self._tables.close()

    def _start_turns(self, stack: contextlib.ExitStack) -> Callable[[Turn], None]:
        """What has a turn taken: here, or by threads that the stack waits for."""
        self._ended.clear()
        if self.queue.turns_at_once == 1:
            return lambda turn: self._ended.append(self._take_turn(turn))
        pool = self._threads.pool(self.queue.turns_at_once, "lakehead-tiering")
        stack.callback(pool.shutdown)

        def take(turn: Turn) -> None:
            self._ended.append(self._take_turn(turn))
            self._changed.notify_all()

        def start(turn: Turn) -> None:
            pool.submit(lambda: take(turn))

        return start

    def _serve(self, end: float, ask: Callable[[], bool] | None, start: Callable[[Turn], None]) -> None:
        event: Event = Woken()
        todo: deque[Look | Turn] = deque()
        then: Wait | End = End()
        stopping = False
        while True:
            now = self._clock.monotonic()
            if not stopping and (self._stopped or now >= end or (ask is not None and says_so(ask))):
                stopping = True
                self.queue.handle(Stopped(), now)
            for instruction in self.queue.handle(event, now):
                if isinstance(instruction, Wait | End):
                    then = instruction
                else:
                    todo.append(instruction)
            if self._ended:
                event = self._ended.popleft()()
            elif todo:
                event = Woken()
                if isinstance(following := todo.popleft(), Look):
                    event = self._look(following)
                else:
                    start(following)
            elif isinstance(then, End):
                return
            else:
                asked = math.inf if ask is None else now + ASK_SECONDS
                self._wait(None if stopping else min(then.until, end, asked))
                event = Woken()

    def _wait(self, until: float | None) -> None:
        """Return when a turn has ended, or at this time, or when told to stop; None: when a turn has ended."""
        if until is None:
            self._changed.wait_for(lambda: bool(self._ended))
            return

        def reached() -> bool:
            return bool(self._ended) or self._stopped or self._clock.monotonic() >= until

        self._changed.wait_for(reached, max(until - self._clock.monotonic(), 0.0))

    # ---- what the queue says ------------------------------------------------------------------------------------

    def _look(self, look: Look) -> Event:
        try:
            found = self._tables.look(look.has, look.without)
        except _NO_LATER_TRY:
            raise
        except LakeheadError as e:
            if not self.queue.away:
                _log.warning("tables cannot be looked for, trying every %g s: %s", self.queue.look_seconds, e)
            return ServerAway()
        if self.queue.away:
            _log.warning("the server answers again")
        return found

    def _take_turn(self, turn: Turn) -> Callable[[], TurnEnded]:
        """Take a turn; what comes of it is told by the thread of `run`, which calls what this returns."""
        start = self._clock.monotonic()
        try:
            match turn:
                case RunRound():
                    result = self._tables.run_round(turn.table_id, turn.records_max)
                    seconds = self._clock.monotonic() - start
                    return lambda: self._told(turn, lambda: self._report(turn, result, seconds))
                case RunMaintenance():
                    more = self._tables.maintain(turn.table_id)
                    return lambda: MaintenanceEnded(turn.table_id, more)
        except Exception as e:  # one table's trouble, whatever it is, may not stop the others
            error = e
            return lambda: self._failed(turn, error)

    def _told(self, turn: Turn, tell: Callable[[], TurnEnded]) -> TurnEnded:
        try:
            return tell()
        except Exception as e:
            return self._failed(turn, e)

    def _name(self, table_id: str) -> str:
        queued = self.queue.tables.get(table_id)
        return table_id if queued is None else queued.table.name

    def _failed(self, turn: Turn, e: Exception) -> TurnEnded:
        table_id, name, maintenance = turn.table_id, self._name(turn.table_id), isinstance(turn, RunMaintenance)
        if isinstance(e, TieringFencedError | FolderCopiedError):  # a server that is fenced has a successor
            _log.error("%s: left to another tiering service: %s", name, e)
            return Fenced(table_id, maintenance)
        if isinstance(e, MissingDependencyError):  # whoever runs this has to install it, for whatever table
            raise e
        if isinstance(e, TableNotFoundError):
            return Gone(table_id, maintenance)
        queued, late = self.queue.tables.get(table_id), isinstance(e, CommitConflictError)
        if maintenance:
            _log.warning("%s: maintenance failed, again in %.0f s: %s", name, MAINTENANCE_SECONDS, e)
        else:
            self._tell(name, e, 0 if queued is None else queued.failures)
        return Failed(table_id, maintenance, late)

    def _report(self, turn: RunRound, result: CommitResult, seconds: float) -> RoundEnded:
        if result.snapshot_id is not None:
            name = self._name(turn.table_id)
            report = RoundReport(name, result.rows, result.deletes, result.files, result.snapshot_id, seconds)
            _log.info(
                "%s: %s rows, %s deletes in %d files, %.2f s, lake snapshot %d",
                name, f"{report.rows:,}", f"{report.deletes:,}", report.files, report.seconds, report.snapshot_id,
            )  # fmt: skip
            if self._on_round is not None:
                self._on_round(report)
        return RoundEnded(turn.table_id, result.end, result.snapshot_id is not None, result.more)

    def _tell(self, name: str, e: Exception, failures: int) -> None:
        late = isinstance(e, CommitConflictError)
        level = logging.INFO if late and failures < CONFLICTS_MIN else logging.WARNING
        known = isinstance(e, LakeheadError)
        text = str(e) if known else f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        delay = self.queue.retry_delay(1 if late else failures + 1)
        _log.log(level, "%s: round failed, again in %.1f s: %s", name, delay, text, exc_info=not known)


def says_so(ask: Callable[[], bool]) -> bool:
    """Whether the one who is asked says that it is over; who cannot look now is asked again."""
    try:
        return ask()
    except (UnavailableError, AuthenticationError):
        return False


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the run in good order; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(n, lambda *_: stop()) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
