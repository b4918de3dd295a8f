"""What subscriptions were sent last: many wait at a log's end for the same rows, which are read and projected once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa

from lakehead.env.threads import Threads
from lakehead.protocol.messages import StreamHeader

Item: TypeAlias = tuple[StreamHeader, pa.RecordBatch]
ROWS_MAX = 1 << 12
"""Who reads more at once reads history, which nobody else is at just then."""
_TURNS_MAX = 16
_TURN_BYTES_MAX = 1 << 18


class SharedItem(tuple[StreamHeader, pa.RecordBatch]):
    """An item that many streams may send.

    Attributes:
        data: its rows as a message of Arrow's IPC format, which a plain socket carries as it is.
    """

    data: pa.Buffer

    @classmethod
    def of(cls, item: Item) -> SharedItem:
        """The same rows, which keep no file open that the log lets go of."""
        header, batch = item
        data = batch.serialize()
        made = cls((header, pa.ipc.read_record_batch(data, batch.schema)))
        made.data = data
        return made


class SharedTurns:
    """The newest turns of one table's subscriptions. Thread-safe."""

    def __init__(self, threads: Threads) -> None:
        self._lock = threads.lock()
        self._turns: OrderedDict[Hashable, Sequence[Item]] = OrderedDict()

    def of(self, turn: Hashable, read: Callable[[], Iterator[Item]]) -> Sequence[Item]:
        """The items of a turn; only who comes first reads them, while the others wait."""
        with self._lock:
            items = self._turns.get(turn)
            if items is None:
                items = shared = [SharedItem.of(item) for item in read()]
                if sum(item.data.size for item in shared) <= _TURN_BYTES_MAX:
                    self._turns[turn] = items
                if len(self._turns) > _TURNS_MAX:
                    self._turns.popitem(last=False)
            return items
