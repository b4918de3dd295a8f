"""A kv tablet: the live rows of one tablet by primary key, as a deterministic function of its log.

One write is three steps: **plan** reads the state and makes the changelog records, the owner **logs** them, and
**apply** changes the state from what was logged. `apply` is the only thing that changes state, in a live tablet as in
one that replays its log after a restart, so both are equal by construction. A row is visible to lookups exactly when
its change is readable in the log: the owner applies and moves the high watermark under one lock.

Pure core: no threads, no clock. The owner holds its lock around `plan_*`, `apply` and every read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehead.errors import LimitExceededError
from lakehead.format import joins
from lakehead.format.arrays import to_arrow
from lakehead.format.defaults import absent, default_bytes, default_of
from lakehead.format.joins import rows_without_columns, within_bytes
from lakehead.format.read_as import Binding
from lakehead.kv import kernels
from lakehead.kv.heap import HeapColumn, Slots, Sources, heap_column
from lakehead.kv.index import KeyIndex, home_shift
from lakehead.kv.keys import KeyBatch, encode_key, encode_keys
from lakehead.kv.prefixes import PrefixIndex
from lakehead.types import ChangeType, Offset, Schemas, field_id, without_ids

_GATHER_ROWS = 1 << 16
_ROW_BYTES = 64
"""What a row counts as before its size is known, where the bytes are bounded by who asks."""


@dataclass(frozen=True)
class Change:
    """Changelog records of one planned write, in log order.

    ``change_types`` int8 and ``prev_offsets`` int64 (-1 for none) have one entry a row of ``rows``; ``ends[i]`` is the
    number of records up to and including input row i.
    """

    change_types: npt.NDArray[np.int8]
    prev_offsets: npt.NDArray[np.int64]
    rows: pa.RecordBatch
    ends: npt.NDArray[np.int64]

    def part(self, start: int, end: int) -> Change:
        """Records ``[start, end)``."""
        return Change(
            self.change_types[start:end], self.prev_offsets[start:end], self.rows.slice(start, end - start), self.ends
        )


@dataclass(frozen=True)
class _Planned:
    """What the plan of an upsert of different keys has found out, for who applies its records.

    Attributes:
        records: the rows of the change.
        keys: of the rows that were given, in their order.
        slots: of the keys, -1 of new ones.
        ends: as of `Change`; the last record of each row is the one that stays.
        given: the rows themselves, where they have all columns.
    """

    records: pa.RecordBatch
    base_offset: Offset
    keys: KeyBatch
    slots: Slots
    ends: npt.NDArray[np.int64]
    given: pa.RecordBatch | None

    def stays(self, columns: Sequence[HeapColumn]) -> list[pa.Array]:
        """Values of each column of the table: the last record of each row that was given."""
        if self.given is not None and self.given.num_rows == self.records.num_rows:
            return list(self.given.columns)
        given, at = self.given, to_arrow(self.ends - 1)
        return [
            self.records.column(i).take(at) if given is None or column.keeps_given else given.column(i)
            for i, column in enumerate(columns)
        ]


class KvTablet:
    """Live rows by primary key.

    Args:
        schemas: those of the table; rows are held as the current one has them.
        key: the primary key's columns without the partition columns, which are the same in all rows of a tablet.
        prefix: leading key columns that `prefix_lookup` is asked by; empty when it is not offered.
        seed: 64 secret bits; what the tablet holds and answers is the same for all of them.

    Attributes:
        torn: a change has begun, and failed half way if none is under way, as for want of memory: what is held now may
            never have been, and no one reads it.
    """

    def __init__(self, schemas: Schemas, key: tuple[str, ...], prefix: tuple[str, ...] = (), *, seed: int) -> None:
        self.schemas = schemas
        self.schema = schema = schemas.current.columns
        self._key, self._prefix = key, prefix
        self._key_at = [schema.get_field_index(c) for c in key]
        self._prefix_at = [schema.get_field_index(c) for c in prefix]
        self._seed = np.uint64(seed)
        self._default_bytes = default_bytes(schemas.current.fields)
        self.torn = False
        self.clear()

    def clear(self) -> None:
        """Hold no rows, and give their memory back: whoever still refers to this does not keep it."""
        self._index, self._live = KeyIndex(), 0
        self._columns: list[HeapColumn] = [heap_column(f.type) for f in self.schema]
        self._prefixes = PrefixIndex(self._seed) if self._prefix else None
        self._planned: _Planned | None = None
        self._resize()

    def alter(self, schemas: Schemas) -> None:
        """Hold the rows as another schema has them. Keys stay as they are, and columns that do are not looked at."""
        self._planned = None
        before, wanted = self.schemas.current, schemas.current
        held = {field_id(f): at for at, f in enumerate(before.fields)}
        columns = []
        for f in wanted.fields:
            at = held.get(field_id(f))
            if at is not None and before.fields.field(at).type.equals(f.type, check_metadata=True):
                columns.append(self._columns[at])
            else:
                columns.append(self._bound(at, f))
        self.schemas, self.schema, self._columns = schemas, wanted.columns, columns
        self._default_bytes = default_bytes(wanted.fields)
        self._key_at = [self.schema.get_field_index(c) for c in self._key]
        self._prefix_at = [self.schema.get_field_index(c) for c in self._prefix]

    def _bound(self, at: int | None, wanted: pa.Field) -> HeapColumn:
        """The column in this place in another type; None: a new one, with its default in all rows."""
        (plain,) = without_ids([wanted])
        column = heap_column(plain.type)
        column.resize(self._capacity)
        slots = self._index.live_slots()
        for start in range(0, len(slots), _GATHER_ROWS):
            part = slots[start : start + _GATHER_ROWS]
            if at is None:
                column.scatter(part, absent(wanted, len(part)))
                continue
            there = self.schemas.current.fields.field(at)
            for some in self._cut(part):
                rows = pa.RecordBatch.from_arrays([self._columns[at].gather(some)], names=[there.name])
                column.scatter(some, Binding.of([there], [wanted]).rows(rows).column(0))
        return column

    def __len__(self) -> int:
        """Live rows after the last change that is done: what the log says up to there, also of one that is torn."""
        return self._live

    def _resize(self) -> None:
        for column in self._columns:
            column.resize(self._index.capacity)
        if self._prefixes is not None:
            self._prefixes.resize(self._index.capacity)
        self._capacity = self._index.capacity

    # ---- plan: reads the state, changes nothing ---------------------------------------------------------------

    def plan_upsert(self, batch: pa.RecordBatch, base_offset: Offset) -> Change:
        """Records that an upsert of these rows makes when the log ends at ``base_offset``.

        Args:
            batch: rows with the table's columns, or some of them (the key among them): the others keep their live
                value, their default for a new key. Rows of equal key take effect in order.
        """
        keys, slots, prior = self._resolve([batch.column(c) for c in self._key])
        n = batch.num_rows
        change, prev = np.empty(2 * n, np.int8), np.empty(2 * n, np.int64)
        image, under, ends = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64), np.empty(n, np.int64)
        latest, below = np.empty((2, n), np.int64)
        k = kernels.plan_upsert(
            slots, prior, self._index.live_offsets, base_offset, latest, below, change, prev, image, under, ends
        )
        if n and slots.min() < 0:
            self.reserve(n, keys)
        full = batch.num_columns == len(self.schema)
        if full and k == n:
            records = pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)
        else:
            records = self._images(batch, image[:k], under[:k])
        if (prior < 0).all():
            self._planned = _Planned(records, base_offset, keys, slots, ends, batch if full else None)
        return Change(change[:k], prev[:k], records, ends)

    def plan_delete(self, keys: pa.RecordBatch) -> Change:
        """Records that deleting these keys makes; ``keys`` holds the key columns. Absent keys make none."""
        _, slots, prior = self._resolve([keys.column(c) for c in self._key])
        n = keys.num_rows
        change, prev, image = np.empty(n, np.int8), np.empty(n, np.int64), np.empty(n, np.int64)
        ends = np.empty(n, np.int64)
        k = kernels.plan_delete(slots, prior, self._index.live_offsets, change, prev, image, ends)
        return Change(change[:k], prev[:k], self.gather(image[:k]), ends)

    def deletions(self, before: Offset) -> Iterator[Change]:
        """Records that delete every live row with an offset below this one, in offset order, in batches of bounded rows
        and bytes; each is to be applied before the next is asked for, and nothing else meanwhile."""
        slots = self._index.live_slots()
        slots = slots[self._index.live_offsets[slots] < before]
        parts = (slots[i : i + _GATHER_ROWS] for i in range(0, len(slots), _GATHER_ROWS))
        for part in (some for each in parts for some in self._cut(each)):
            n = len(part)
            kinds = np.full(n, ChangeType.DELETE, np.int8)
            yield Change(kinds, self._index.live_offsets[part], self.gather(part), np.arange(1, n + 1))

    def _resolve(self, columns: list[pa.Array]) -> tuple[KeyBatch, Slots, Slots]:
        keys = encode_keys(columns, self._seed)
        slots = self._index.probe(keys)
        n = len(slots)
        size = 1 << max(2 * n, 4).bit_length()
        prior = np.empty(n, np.int64)
        kernels.link_duplicates(
            keys.keys,
            keys.exact,
            keys.offsets,
            keys.data,
            np.zeros(size, np.int64),
            home_shift(size),
            prior,
        )
        return keys, slots, prior

    def _images(self, batch: pa.RecordBatch, image: Slots, under: Slots) -> pa.RecordBatch:
        """Row images of the records: given columns from ``image`` (slot, or ~row of the batch), others from the
        slots in ``under``."""
        names, there = self.schema.names, set(batch.schema.names)
        given = [i for i, name in enumerate(names) if name in there]
        sources, rows = Sources.of(image), batch.select([names[i] for i in given])
        if len(sources.old):
            columns = {i: self._columns[i].merge(sources, rows.column(n)) for n, i in enumerate(given)}
        else:
            columns = dict(zip(given, _taken(rows, sources.new).columns, strict=True))
        for i, column in enumerate(self._columns):
            if i not in columns:
                columns[i] = self._or_default(i, column.gather(under), under)
        return pa.RecordBatch.from_arrays([columns[i] for i in range(len(self._columns))], schema=self.schema)

    def _or_default(self, at: int, values: pa.Array, under: Slots) -> pa.Array:
        """The values of a column that is not given: of new keys, which have no slot, its default."""
        default = default_of(self.schemas.current.fields.field(at))
        return values if default is None else pc.if_else(to_arrow(under < 0), default, values)

    def require_change(self, batch: pa.RecordBatch, *, deleted: bool) -> None:
        """Refuse an upsert or delete whose old and new rows are too many bytes to be logged as one.

        Raises:
            LimitExceededError: ``context`` has ``change_bytes_max``.
        """
        n = batch.num_rows
        if batch.nbytes + 2 * n * (self._bytes_max + self._default_bytes) <= joins.CHANGE_BYTES_MAX:
            return
        size = int(self.sizes(self.find(batch)).sum())
        if not deleted:
            # Of columns that are not given, both images hold the live value; rows of one key hold one another's.
            partial = batch.num_columns < len(self.schema)
            size += size * partial + (batch.nbytes + n * self._default_bytes * partial) * (2 if n > 1 else 1)
        if size > joins.CHANGE_BYTES_MAX:
            raise LimitExceededError(
                f"a write of {n:,} rows would log {size:,} bytes of old and new rows, over the limit of"
                f" {joins.CHANGE_BYTES_MAX:,}: " + ("write fewer rows at once" if n > 1 else "delete the row first"),
                change_bytes_max=joins.CHANGE_BYTES_MAX,
            )

    # ---- apply: the only way the rows change ----------------------------------------------------------------

    def apply(self, base_offset: Offset, change_types: npt.NDArray[np.int8], rows: pa.RecordBatch) -> None:
        """Change the state as these logged records say; ``rows`` has the table's columns.

        Where they are those that were planned last, what the plan found out is not found out again.
        """
        planned, self._planned = self._planned, None
        self.torn = True
        if planned is not None and planned.records is rows and planned.base_offset == base_offset:
            offsets = base_offset + planned.ends - 1
            slots = planned.slots
            if len(slots) and slots.min() < 0:
                slots = self._index.apply(planned.keys, np.zeros(len(slots), np.bool_), offsets)
            else:
                self._index.renew(slots, offsets)
            if self._index.capacity != self._capacity:
                self._resize()
            self._put(slots, planned.stays(self._columns))
        else:
            self._apply(np.arange(base_offset, base_offset + rows.num_rows), change_types, rows)
        self._live, self.torn = len(self._index), False

    def reserve(self, rows: int, keys: KeyBatch | None = None) -> None:
        """Make room for so many rows before they are loaded, or logged; these keys are theirs, where they are known.

        Raises:
            MemoryError: there is not that much; all that is held stays.
        """
        self._index.reserve(rows, keys)
        if self._index.capacity != self._capacity:
            self._resize()

    def load(self, offsets: npt.NDArray[np.int64], rows: pa.RecordBatch) -> None:
        """`apply` rows of a checkpoint, which were written at these offsets; all of them before any later record."""
        self.torn = True
        self._apply(offsets, np.full(rows.num_rows, ChangeType.INSERT, np.int8), rows)
        self._live, self.torn = len(self._index), False

    def _apply(self, offsets: npt.NDArray[np.int64], change_types: npt.NDArray[np.int8], rows: pa.RecordBatch) -> None:
        if (change_types == ChangeType.UPDATE_BEFORE).any():
            keep = np.flatnonzero(change_types != ChangeType.UPDATE_BEFORE)
            rows, offsets, change_types = _taken(rows, keep), offsets[keep], change_types[keep]
        if rows.num_rows == 0:
            return
        deleted = change_types == ChangeType.DELETE
        slots = self._index.apply(encode_keys([rows.column(i) for i in self._key_at], self._seed), deleted, offsets)
        if self._index.capacity != self._capacity:
            self._resize()
        if deleted.any():
            self._forget(slots[deleted & (slots >= 0)])
        # A key may come several times, and a freed slot may be taken again: the last record of a slot wins.
        wins = ~deleted & (self._index.live_offsets[slots] == offsets)
        if not wins.all():
            at = np.flatnonzero(wins)
            rows, slots = _taken(rows, at), slots[at]
        self._put(slots, rows.columns)

    def _put(self, slots: Slots, values: Sequence[pa.Array]) -> None:
        for column, given in zip(self._columns, values, strict=True):
            column.scatter(slots, given)
        if self._prefixes is not None:
            self._prefixes.add(slots, [values[i] for i in self._prefix_at])

    def _forget(self, slots: Slots) -> None:
        if self._prefixes is not None:
            self._prefixes.remove(slots, lambda some: self.gather(some, self._prefix_at).columns)
        dead = np.unique(slots[self._index.live_offsets[slots] < 0])
        if len(dead):
            for column in self._columns:
                column.clear(dead)

    # ---- reads ------------------------------------------------------------------------------------------------

    def find(self, keys: pa.RecordBatch) -> Slots:
        """`probe` for keys that are not encoded."""
        return self.probe(self.encode(keys))

    def encode(self, keys: pa.RecordBatch) -> KeyBatch:
        """Keys as `probe` takes them; ``keys`` holds the key columns, and may hold others."""
        return encode_keys([keys.column(c) for c in self._key], self._seed)

    def probe(self, keys: KeyBatch) -> Slots:
        """Slot of each key, -1 when there is no such row; keys of another tablet that has the same seed will do."""
        return self._index.probe(keys)

    def is_older(self, slots: Slots, end: Offset) -> bool:
        """Whether there is a row in each of these slots, as it was written below this offset."""
        return bool((slots >= 0).all() and (self._index.live_offsets[slots] < end).all())

    def row(self, key: Sequence[int | str | bytes]) -> list[Any] | None:
        """The plain row of a key, of integers, texts and binaries; None when there is none."""
        slot = int(self._index.probe(encode_key([self.schema.field(i).type for i in self._key_at], key, self._seed))[0])
        return None if slot < 0 else [column.value(slot) for column in self._columns]

    def gather(self, slots: Slots, columns: list[int] | None = None) -> pa.RecordBatch:
        """Rows at these slots, in this order; ``columns`` are positions in the schema, None for all."""
        wanted = range(len(self.schema)) if columns is None else columns
        none_absent = len(slots) == 0 or bool(slots.min() >= 0)  # found out once for all columns
        arrays = [self._columns[i].gather(slots, none_absent=none_absent) for i in wanted]
        if not arrays:
            return rows_without_columns(len(slots))
        schema = self.schema if columns is None else pa.schema([self.schema.field(i) for i in wanted])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    @property
    def _bytes_max(self) -> int:
        return sum(c.bytes_max for c in self._columns)

    def answer(self, slots: Slots, bytes_max: int | None = None) -> pa.RecordBatch:
        """Rows at these slots, in this order, but for -1; more bytes than an answer holds are refused."""
        self.require_answer(slots, bytes_max)
        return self.gather(slots[slots >= 0])

    def sizes(self, slots: Slots) -> Slots:
        """About how many bytes the row at each of these slots takes; -1 takes a few."""
        return sum((c.sizes(slots) for c in self._columns), np.zeros(len(slots), np.int64))

    def prefix_answer(self, prefixes: pa.RecordBatch, bytes_max: int | None = None) -> pa.RecordBatch:
        """Rows whose leading key columns equal one of these, in offset order; more bytes than an answer holds are
        refused, and, at once, more rows than are worth finding for so few bytes."""
        assert self._prefixes is not None
        numbers = self._prefixes.numbers(prefixes.columns)
        if bytes_max is not None:
            rows = self._prefixes.count(numbers)
            joins.require_answer(rows, rows * _ROW_BYTES, bytes_max)
        return self.answer(self._by_offset(self._prefixes.find(numbers, self._index.slots_used)), bytes_max)

    def prefix_find(self, prefixes: pa.RecordBatch) -> Slots:
        """Slots of live rows whose leading key columns equal one of these, in offset order."""
        assert self._prefixes is not None
        numbers = self._prefixes.numbers(prefixes.columns)
        return self._by_offset(self._prefixes.find(numbers, self._index.slots_used))

    def _by_offset(self, slots: Slots) -> Slots:
        return slots[np.argsort(self._index.live_offsets[slots], kind="stable")]

    def live_rows(self, columns: list[int] | None = None) -> list[tuple[npt.NDArray[np.int64], pa.RecordBatch]]:
        """All live rows as (their offsets, rows), in offset order, in batches of bounded rows and bytes."""
        slots = self._index.live_slots()
        parts = (slots[i : i + _GATHER_ROWS] for i in range(0, len(slots), _GATHER_ROWS))
        return [
            (self._index.live_offsets[part], self.gather(part, columns)) for some in parts for part in self._cut(some)
        ]

    def _cut(self, slots: Slots) -> Iterator[Slots]:
        """The slots in parts whose rows fit into one batch."""
        if len(slots) * self._bytes_max <= joins.BYTES_MAX:
            yield slots
            return
        for start, end in within_bytes(self.sizes(slots)):
            yield slots[start:end]

    def require_answer(self, slots: Slots, bytes_max: int | None = None) -> None:
        """Refuse rows that are too many bytes for one answer; see `joins.require_answer`."""
        if len(slots) * self._bytes_max > (joins.BYTES_MAX if bytes_max is None else bytes_max):
            joins.require_answer(len(slots), int(self.sizes(slots).sum()), bytes_max)


def _taken(rows: pa.RecordBatch, at: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The rows at these positions; neighbours in their order are shared, not copied."""
    n = len(at)
    if n and at[-1] - at[0] == n - 1 and (n == 1 or bool((np.diff(at) == 1).all())):
        return rows.slice(int(at[0]), n)
    return rows.take(to_arrow(at))
