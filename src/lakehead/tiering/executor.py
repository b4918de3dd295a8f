"""Where the tasks of a round run: an `Executor`, and the one that needs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeVar

SmallRounds = Literal["spark", "driver"]
"""Where rounds of few records run when there is Spark."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs the tasks of rounds."""

    def run(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        name: str = "",
        undo: Callable[[Iterable[Result]], None] | None = None,
    ) -> list[Result]:
        """Apply a function, picklable as the items are, to each item; returns or raises once no task runs any more.

        Args:
            name: what is done, for people.
            undo: given what other tasks returned when one fails.

        Returns:
            The results, in the order of the items.

        Raises:
            Exception: what a task raised.
            UnavailableError: a task could not be run.
        """
        ...


def here(records: int) -> Executor:
    """Where the tasks of a round of so many records run: in the caller's thread."""
    return LocalExecutor()


class LocalExecutor:
    """Runs tasks in the caller's thread, one after the other; the first that fails is the last."""

    def run(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        *,
        name: str = "",
        undo: Callable[[Iterable[Result]], None] | None = None,
    ) -> list[Result]:
        """See `Executor.run`."""
        done: list[Result] = []
        try:
            for item in items:
                done.append(task(item))
        except BaseException:
            if undo is not None:
                undo(done)
            raise
        return done
