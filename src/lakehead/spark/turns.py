"""Whoever writes what follows from what a table has takes turns with others that do: of two queries that both read a
sum before either has written the new one, one would have added nothing.

Those of one process wait for each other. Of several processes one is first, and the others read again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

from lakehead.client.staging import JobBatch
from lakehead.client.table import TableHandle
from lakehead.errors import LakeheadError, TurnLostError

_R = TypeVar("_R")


class _Turn:
    """Of one table, for as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()
_guard = threading.Lock()


def in_turn(tables: Sequence[TableHandle], batch: JobBatch, work: Callable[[Mapping[str, int]], _R]) -> _R:
    """Do what reads these tables and then publishes a batch that follows from what they had.

    Args:
        tables: none, if the batch follows from nothing.
        work: is given the turns that it publishes under (`publish_together`), and called again, after what it has
            staged is discarded, when somebody else was first.
    """
    by_id = {table.desc.table_id: table for table in tables}
    with _alone(sorted(by_id)):
        while True:
            try:
                return work({table_id: table.staging.turn() for table_id, table in by_id.items()})
            except TurnLostError:
                for table in by_id.values():
                    with contextlib.suppress(LakeheadError):
                        table.staging.discard(batch)


@contextlib.contextmanager
def _alone(table_ids: Sequence[str]) -> Iterator[None]:
    """In this process; ids in their order: nobody waits for who waits for him."""
    with _guard:
        turns = [_turns.setdefault(table_id, _Turn()) for table_id in table_ids]
    with contextlib.ExitStack() as held:
        for turn in turns:
            held.enter_context(turn.lock)
        yield
