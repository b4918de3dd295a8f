"""Whoever writes what follows from what a table has goes alone: of two queries of one process that both read a sum
before either has written the new one, one would have added nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

from lakehead.client.table import TableHandle


class _Turn:
    """Of one table, for as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()
_guard = threading.Lock()


@contextlib.contextmanager
def alone(tables: Iterable[TableHandle]) -> Iterator[None]:
    """From before these tables are read until what follows is published."""
    with _guard:
        # Always in one order: nobody waits for who waits for him.
        turns = [_turns.setdefault(table_id, _Turn()) for table_id in sorted({t.desc.table_id for t in tables})]
    with contextlib.ExitStack() as held:
        for turn in turns:
            held.enter_context(turn.lock)
        yield
