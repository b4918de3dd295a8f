"""Group commit: whatever queued up while one group of writes was being committed is the next group.

There is no timer: a lone write goes at once, in its caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pyarrow as pa

from lakehead.env.threads import Done, Event, Threads
from lakehead.errors import LakeheadError, OverloadedError
from lakehead.format.frame import UNKNOWN_CONTENT, Content, FrameBody
from lakehead.format.joins import join
from lakehead.log.joined import SMALL_BYTES
from lakehead.types import WriteKind

_GROUP_WRITES_MAX = 256
_PLAN_BYTES_MAX = 64 << 20


class End(NamedTuple):
    """Why a tablet takes no more writes; a closed one serves no reads either."""

    how: Literal["broken", "closed"]
    reason: LakeheadError


@dataclass(eq=False)
class PendingWrite:
    """One batch on its way into a tablet; ``rows`` are those of ``body``."""

    kind: WriteKind
    body: FrameBody
    rows: pa.RecordBatch | None
    done: Done
    content: Content = UNKNOWN_CONTENT
    result: tuple[int, int] | None = None
    error: BaseException | None = None

    def wait(self) -> tuple[int, int]:
        """Offsets ``[start, end)`` of the write, once it is durable as the table promises.

        Raises:
            OutcomeUnknownError: it may have been applied.
            LakeheadError: the write was refused; nothing of it was applied.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class GroupCommit:
    """The queue of writes to one tablet. Thread-safe.

    Args:
        what: names the tablet in errors.
        commit: commits writes of one plan (see `_same_plan`); sets the result or the error of each, or raises what
            those without either get.
        run_in_background: has another thread do something; raises `RuntimeError` once the server is closing.
    """

    def __init__(
        self,
        threads: Threads,
        what: str,
        *,
        commit: Callable[[list[PendingWrite]], None],
        run_in_background: Callable[[Callable[[], None]], object],
    ) -> None:
        self._what = what
        self._commit = commit
        self._run_in_background = run_in_background
        self._threads = threads
        self._queue: list[PendingWrite] = []
        self._lock = threads.lock()
        self._busy = False
        self._idle: Event | None = None

    def submit(self, write: PendingWrite) -> bool:
        """Queue a write. True when the tablet was idle: the caller must then see to it that `drive` runs."""
        with self._lock:
            self._queue.append(write)
            drives, self._busy = not self._busy, True
            return drives

    def drive(self) -> None:
        """Commit the next group. What queued up meanwhile is committed by a background thread, never by a thread that
        may wait for another tablet, so that no two callers can wait for each other; one group at a time, so that a
        tablet under load leaves the background threads to others in between."""
        while self._commit_next():
            try:
                self._run_in_background(self.drive)
            except RuntimeError:  # the server is closing, its background threads have ended: refuse the rest here
                continue
            return

    def _commit_next(self) -> bool:
        with self._lock:
            group = self._queue[:_GROUP_WRITES_MAX]
            del self._queue[: len(group)]
        while group:
            run = _same_plan(group)
            group = group[len(run) :]
            error: LakeheadError | None = None
            try:
                self._commit(run)
            except LakeheadError as e:
                error = e
            except MemoryError as e:  # before anything was written: later it is not known what is there
                error = OverloadedError(f"a write to {self._what} needs memory that the server has not got: {e}")
                error.__cause__ = e
            except BaseException as e:
                # Not the exception itself: the callers of a group are many, an interrupt was meant for one of them.
                error = LakeheadError(f"a write to {self._what} failed inside the server: {type(e).__name__}: {e}")
                error.__cause__ = e
            for write in run:
                if write.result is None and write.error is None:
                    write.error = error
                write.done.open()
        with self._lock:
            self._busy = bool(self._queue)
            if not self._busy and self._idle is not None:
                self._idle.set()
            return self._busy

    def finish(self) -> None:
        """Return once the group under way has ended, and all that was queued; whoever closes refuses more before."""
        with self._lock:
            idle = self._idle = self._threads.event()
            if not self._busy:
                idle.set()
        idle.wait()


def _same_plan(group: list[PendingWrite]) -> list[PendingWrite]:
    """The longest start of the group that can be planned as one batch: one kind, one schema, one set of columns, each
    writer once (a writer's next batch must see the answer of the one before), and not more than one batch can hold."""
    first, writers, size = group[0], set(), 0
    run: list[PendingWrite] = []
    for w in group:
        same = (w.kind, w.body.schema_id) == (first.kind, first.body.schema_id)
        same = same and (w.rows is None or first.rows is None or w.rows.schema == first.rows.schema)
        size += w.body.buffer.size
        if not same or w.body.stamp.writer_id in writers or (run and size > _PLAN_BYTES_MAX):
            break
        writers.add(w.body.stamp.writer_id)
        run.append(w)
    return run


def rows_if_small(writes: Sequence[PendingWrite]) -> pa.RecordBatch | None:
    """The rows of batches of one schema, where each is so small that who reads it had better not read it alone."""
    rows = [w.rows for w in writes if w.rows is not None and w.body.buffer.size <= SMALL_BYTES]
    return join(rows) if len(rows) == len(writes) else None
