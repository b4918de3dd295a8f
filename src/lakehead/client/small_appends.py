"""Appends of few rows that come while others are under way go together, in one batch.

As in `lakehead.server.group_commit` there is no timer: a lone append goes at once, and what came while it was under way
is the next batch. Its rows are encoded, sent, checked, written and synced once, however many threads gave them. One
thread sends for all; the others sleep until their rows have landed, so that they do not take turns at the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from lakehead.client.row_routing import Rows
from lakehead.env.interrupts import interrupts_land
from lakehead.env.threads import Done, Threads, this_thread
from lakehead.errors import InvalidRequestError, LakeheadError, OutcomeUnknownError
from lakehead.format.joins import range_bytes
from lakehead.types import TabletKey

_ROWS_MAX = 64
# Not so many that a batch is cut for several buckets (`row_routing.SHARE_ROWS`): what one call appends to a table
# without a bucket key has one.
_CALLS_MAX = 64
_BYTES_MAX = 16 << 10

Ranges = list[tuple[TabletKey, tuple[int, int]]]


class SentPart(NamedTuple):
    """Rows of a batch that one tablet got: their positions in the batch, ascending (None: all), and their offsets."""

    key: TabletKey
    rows: Rows | None
    offsets: tuple[int, int]


class _Append:
    """One call. Whoever opens ``done`` has set ``ranges`` or ``error``, or that its thread ``leads`` the next batch."""

    __slots__ = ("done", "error", "leads", "ranges", "rows")

    def __init__(self, rows: pa.Table, done: Done) -> None:
        self.rows = rows
        self.done = done
        self.leads = False
        self.ranges: Ranges | None = None
        self.error: LakeheadError | None = None

    def answer(self) -> Ranges:
        if self.error is not None:
            raise self.error
        assert self.ranges is not None
        return self.ranges


class _Widths(NamedTuple):
    """What tells how large rows of a schema are, in a quarter of the time that `range_bytes` takes. Arrow's own ways
    let other threads go first, and each of many has its turn at the interpreter then.

    Attributes:
        fixed: bytes of a row's values whose types are of fixed width, and bits that tell nulls.
        texts: places of columns of texts and binaries, and the bytes of an offset of theirs.
    """

    fixed: int
    texts: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, schema: pa.Schema) -> _Widths | None:
        """None where there are other types."""
        fixed, texts = len(schema), []
        for at, f in enumerate(schema):
            if pa.types.is_string(f.type) or pa.types.is_binary(f.type):
                texts.append((at, 4))
            elif pa.types.is_large_string(f.type) or pa.types.is_large_binary(f.type):
                texts.append((at, 8))
            elif pa.types.is_primitive(f.type) or pa.types.is_decimal(f.type) or pa.types.is_fixed_size_binary(f.type):
                fixed += -(-f.type.bit_width // 8)
            else:
                return None
        return cls(fixed, texts)

    def bytes_of(self, rows: pa.Table) -> int:
        size = self.fixed * rows.num_rows
        for at, width in self.texts:
            for chunk in rows.column(at).iterchunks():
                offsets = chunk.buffers()[1]
                if len(chunk):
                    ends = memoryview(offsets)[chunk.offset * width :][: (len(chunk) + 1) * width]
                    first, last = (int.from_bytes(end, "little") for end in (ends[:width], ends[-width:]))
                    size += width * len(chunk) + last - first
        return size


def _bytes_of(rows: pa.Table) -> int:
    chunks = (chunk for column in rows.columns for chunk in column.iterchunks())
    return sum(int(range_bytes(c, np.zeros(1, np.int64), np.full(1, len(c)))[0]) for c in chunks)


class SmallAppends:
    """The appends of few rows to one table. Thread-safe.

    Args:
        send: writes rows as one batch and tells where they are; raises what a write does.
        schema: of all rows, where that is known.
    """

    def __init__(
        self, threads: Threads, send: Callable[[pa.Table], Sequence[SentPart]], schema: pa.Schema | None = None
    ) -> None:
        self._threads = threads
        self._send = send
        self._widths = None if schema is None else _Widths.of(schema)
        self._lock = threads.lock()
        self._queue: list[_Append] = []
        self._busy = False
        self._leader: int | None = None

    def takes(self, rows: pa.Table) -> bool:
        """Whether these rows may wait for those of others: they are few. Those of the main thread never do, where an
        interrupt could leave the others without an answer, nor those that the thread which sends for all appends in the
        middle of that, as a logging handler or a destructor may: it would wait for itself."""
        if rows.num_rows > _ROWS_MAX or interrupts_land() or self._leader == this_thread():
            return False
        return (_bytes_of(rows) if self._widths is None else self._widths.bytes_of(rows)) <= _BYTES_MAX

    def append(self, rows: pa.Table) -> Ranges:
        """Returns where the rows are once they are durable as the table promises.

        Raises:
            LakeheadError: what a write of these rows alone raises.
        """
        mine = _Append(rows, self._threads.done())
        with self._lock:
            waits, self._busy = self._busy, True
            if waits:
                self._queue.append(mine)
        if waits:
            self._wait(mine)
            if not mine.leads:
                return mine.answer()
        with self._lock:
            group = [mine, *self._queue[: _CALLS_MAX - 1]]
            del self._queue[: _CALLS_MAX - 1]
            self._leader = this_thread()
        try:
            self._send_together(group)
        finally:
            self._pass_on(group)
        return mine.answer()

    def _wait(self, mine: _Append) -> None:
        try:
            mine.done.wait()
        except BaseException:  # what another thread raises in this one
            with self._lock:
                if mine in self._queue:
                    self._queue.remove(mine)
                leads = mine.leads
            if leads:
                self._pass_on([mine])
            raise

    def _pass_on(self, group: Sequence[_Append]) -> None:
        """Answer all but the first, whose thread this is; the first who came meanwhile sends the next batch."""
        with self._lock:
            following = self._queue.pop(0) if self._queue else None
            self._busy, self._leader = following is not None, None
            if following is not None:
                following.leads = True
        if following is not None:
            following.done.open()
        for one in group[1:]:
            if one.ranges is None and one.error is None:
                one.error = OutcomeUnknownError(
                    "the thread that sent these rows with its own failed: look for them before you write them again"
                )
            one.done.open()

    def _send_together(self, group: Sequence[_Append]) -> None:
        try:
            rows = [one.rows for one in group]
            parts = self._send(pa.concat_tables(rows).combine_chunks() if len(rows) > 1 else rows[0])
        except LakeheadError as e:
            if len(group) == 1:
                group[0].error = e
            elif _of_all(e):
                for one in group:
                    one.error = type(e)(e.message, **e.context)
                    one.error.__cause__ = e
            else:  # All of it was refused, maybe for the rows of one.
                for one in group:
                    self._send_together([one])
            return
        bounds = np.cumsum([0, *(one.rows.num_rows for one in group)])
        shares: list[Ranges] = [[] for _ in group]
        for key, positions, (start, _) in parts:
            cuts = (start + (bounds if positions is None else np.searchsorted(positions, bounds))).tolist()
            for share, low, high in zip(shares, cuts, cuts[1:], strict=False):
                if low < high:
                    share.append((key, (low, high)))
        for one, share in zip(group, shares, strict=True):
            one.ranges = share


def _of_all(e: LakeheadError) -> bool:
    """Whether a batch failed for what has nothing to do with its rows, or may be written, in some tablets at least."""
    return not isinstance(e, InvalidRequestError) or "acknowledged" in e.context
