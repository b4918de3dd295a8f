"""What must be in tables whose columns come and go and whose rows are taken away, kept outside the processes that are
killed.

A column is known by a number of its own, whatever it is called: one that is dropped and added again under its name is
another one. What a truncation took away is known by offsets: writes below are gone, others stay.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from tests.crash.history import partition_of, require

from lakehead.types import TabletId

FIXED = (("p", pa.string()), ("k", pa.int64()), ("v", pa.int64()))
"""Columns that stay; the others are integers."""
VERSION = 0
"""Number of column ``v``."""

Row = dict[int, int]
"""Values by the number of their column; what is not given is not there."""


@dataclass(frozen=True)
class Column:
    """One that comes and goes."""

    number: int
    name: str
    wide: bool = False

    @property
    def type(self) -> pa.DataType:
        return pa.int64() if self.wide else pa.int32()


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """All columns of a table, as its definition has them."""
    return pa.schema([*FIXED, *((c.name, c.type) for c in columns)])


def tablet_of(key: int) -> TabletId:
    """Where a key or a log row's number lives: these tables are partitioned, and have one bucket."""
    return TabletId((partition_of(key),), 0)


@dataclass(frozen=True)
class _Write:
    """What one write gave to a key, None: that it is gone. ``offset``: where it stands, or where its batch begins."""

    offset: int
    given: Row | None


@dataclass(frozen=True)
class _Batch:
    """Keys and what they are given by name of column; under which definition is known when it was answered, or not."""

    rows: Sequence[tuple[int, Mapping[str, int] | None]]
    schema_id: int = -1


class ChangingHistory:
    """Writes of one thread, changes of another; a check while neither does anything."""

    def __init__(self, *, keyed: bool) -> None:
        self.keyed = keyed
        self.schema_id = 0
        self.columns: dict[int, tuple[Column, ...]] = {0: ()}
        self.altering = False
        self.cut: dict[TabletId, int] = {}
        """Offsets below which there is nothing any more."""
        self._writes: dict[int, list[_Write]] = {}
        self._ends: dict[TabletId, int] = {}
        self._truncating: dict[TabletId, int] | None = None
        self._open: _Batch | None = None
        self._lock = threading.Lock()
        self.answered_rows = 0

    # ---- writes ---------------------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[tuple[int, Mapping[str, int] | None]]) -> None:
        """A batch is on its way: keys with what they are given by name of column, None where they are deleted."""
        self._open = _Batch(rows)

    def answered(self, offsets: Mapping[TabletId, tuple[int, int]], schema_id: int) -> None:
        """It was acknowledged, under this definition."""
        assert self._open is not None
        batch, self._open = self._open, None
        with self._lock:
            self._adopt(batch.rows, schema_id, {t: start for t, (start, _) in offsets.items()})
            self._ends.update({t: end for t, (_, end) in offsets.items()})
            self.answered_rows += len(batch.rows)

    def unanswered(self, schema_id: int) -> None:
        """It may have landed or not; it was sent under this definition."""
        assert self._open is not None
        self._open = replace(self._open, schema_id=schema_id)

    def refused(self) -> None:
        """Nothing of it landed."""
        self._open = None

    def _adopt(
        self, rows: Iterable[tuple[int, Mapping[str, int] | None]], schema_id: int, starts: Mapping[TabletId, int]
    ) -> None:
        at = dict(starts)
        for key, given in rows:
            tablet = tablet_of(key)
            self._writes.setdefault(key, []).append(_Write(at.get(tablet, 0), self._numbered(given, schema_id)))
            if not self.keyed:
                at[tablet] += 1

    def _numbered(self, given: Mapping[str, int] | None, schema_id: int) -> Row | None:
        numbers = {"v": VERSION, **{c.name: c.number for c in self.columns[schema_id]}}
        return None if given is None else {numbers[name]: value for name, value in given.items()}

    # ---- changes --------------------------------------------------------------------------------------------------

    @property
    def now(self) -> tuple[Column, ...]:
        """The columns in force, as far as is known."""
        return self.columns[self.schema_id]

    def begin_alter(self, columns: tuple[Column, ...]) -> None:
        """The table may have these columns from now on."""
        self.columns[self.schema_id + 1] = columns
        self.altering = True

    def altered(self, name: str, schema_id: int, schema: pa.Schema) -> None:
        """Settle which definition is in force: the one before, unless a change was under way."""
        allowed = (self.schema_id, self.schema_id + 1) if self.altering else (self.schema_id,)
        require(schema_id in allowed, f"{name} has schema {schema_id}, not one of {allowed}")
        expected = schema_of(self.columns[schema_id])
        found = pa.schema([(f.name, f.type) for f in schema])
        require(found.equals(expected), f"{name}: schema {schema_id} is {found}, not {expected}")
        self.schema_id, self.altering = schema_id, False

    def begin_truncate(self) -> None:
        """Rows may be taken away from now on: with them all that was acknowledged by now."""
        with self._lock:
            self._truncating = dict(self._ends) if self._truncating is None else self._truncating

    def truncated(self, ends: Mapping[TabletId, int]) -> None:
        """They were, below these offsets."""
        with self._lock:
            before, self._truncating = self._truncating or {}, None
            early = {t: (ends.get(t), end) for t, end in before.items() if ends.get(t, 0) < end}
            require(not early, f"a truncation spares what was acknowledged before it (its offset, the end): {early}")
            self.cut.update(ends)

    # ---- check ----------------------------------------------------------------------------------------------------

    def check(self, name: str, rows: pa.Table, ends: Mapping[TabletId, int]) -> dict[int, Row]:
        """Compare a scan with system columns; what became of an unanswered batch and truncation is settled by it.

        Args:
            ends: high watermarks.

        Returns:
            The rows by key.
        """
        found = self._found(name, rows)
        done, undone = [], []
        for tablet in sorted({*ends, *found, *(tablet_of(k) for k in self._writes)}):
            here = found.get(tablet, {})
            old = self.cut.get(tablet, 0)
            cuts = self._cuts(name, tablet, here, ends.get(tablet, 0))
            fits = {
                cut: landed
                for cut in cuts
                for landed in (True, False)
                if self._expected(tablet, cut, landed=landed) == {k: row for k, (row, _) in here.items()}
            }
            require(fits, f"{name} {tablet}: {self._explained(tablet, cuts[0], here)}")
            new = [cut for cut in fits if cut != old]
            if old not in fits:
                done.append(tablet)
            elif not new and self._truncating and self._truncating.get(tablet, 0) > old:
                undone.append(tablet)
            self._settle(tablet, new[0] if old not in fits else old, here, landed=fits[new[0] if new else old])
        require(not (done and undone), f"{name}: truncation took rows of {done}, and none of {undone}")
        self._open = self._truncating = None
        return {k: row for part in found.values() for k, (row, _) in part.items()}

    def _found(self, name: str, rows: pa.Table) -> dict[TabletId, dict[int, tuple[Row, int]]]:
        expected = schema_of(self.now)
        shown = pa.schema([(f.name, f.type) for f in rows.schema if not f.name.startswith("__")])
        require(shown.equals(expected), f"{name}: a scan has {shown}, the table {expected}")
        numbers = {"v": VERSION, **{c.name: c.number for c in self.now}}
        values = [rows[c].to_pylist() for c in numbers]
        found: dict[TabletId, dict[int, tuple[Row, int]]] = {}
        columns = (rows[c].to_pylist() for c in ("p", "k", "__offset"))
        for i, (p, k, offset) in enumerate(zip(*columns, strict=True)):
            part = found.setdefault(tablet_of(k), {})
            require(p == partition_of(k) and k not in part, f"{name}: row {k} is there twice, or in partition {p}")
            row = {n: v[i] for n, v in zip(numbers.values(), values, strict=True) if v[i] is not None}
            part[k] = (row, offset)
        return found

    def _cuts(self, name: str, tablet: TabletId, here: Mapping[int, tuple[Row, int]], end: int) -> list[int]:
        """Offsets at which the tablet may have been cut: what is known, and where its rows begin or may begin."""
        old = self.cut.get(tablet, 0)
        before = None if self._truncating is None else self._truncating.get(tablet, 0)
        if self.keyed:
            starts = {w.offset for k, ws in self._writes.items() if tablet_of(k) == tablet for w in ws}
            later = [] if before is None else [*sorted(s for s in starts if s >= max(before, old)), end]
            return [old, *later]
        offsets = np.sort(np.array([offset for _, offset in here.values()], np.int64))
        start = end - len(offsets)
        dense = np.array_equal(offsets, np.arange(start, end))
        require(dense, f"{name} {tablet}: offsets {offsets[:5]}...{offsets[-5:]} do not lead up to {end}")
        may = start == old or (before is not None and start >= max(before, old))
        require(may, f"{name} {tablet}: rows begin at {start}, not at {old} (a truncation under way: {before})")
        return [start]

    def _expected(self, tablet: TabletId, cut: int, *, landed: bool) -> dict[int, Row]:
        """Live rows in the columns in force, with or without the unanswered batch, which stands last."""
        live: dict[int, Row] = {}
        for key, writes in self._writes.items():
            if tablet_of(key) == tablet:
                for w in writes:
                    if w.offset >= cut:
                        _apply(live, key, w.given)
        if landed and self._open is not None:
            for key, given in self._open.rows:
                if tablet_of(key) == tablet:
                    _apply(live, key, self._numbered(given, self._open.schema_id))
        there = {VERSION, *(c.number for c in self.now)}
        return {k: {n: v for n, v in row.items() if n in there} for k, row in live.items()}

    def _explained(self, tablet: TabletId, cut: int, here: Mapping[int, tuple[Row, int]]) -> str:
        expected = self._expected(tablet, cut, landed=False)
        rows = {k: row for k, (row, _) in here.items()}
        wrong = sorted(k for k in rows.keys() | expected.keys() if rows.get(k) != expected.get(k))
        shown = {k: (here.get(k), expected.get(k)) for k in wrong[:5]}
        return f"{len(wrong)} of {len(rows)} rows differ (key: found, expected): {shown}, columns {self.now}"

    def _settle(self, tablet: TabletId, cut: int, here: Mapping[int, tuple[Row, int]], *, landed: bool) -> None:
        """From now on what is there is what was acknowledged; values of columns that were dropped matter no more."""
        for key in [k for k in self._writes if tablet_of(k) == tablet and k not in here]:
            del self._writes[key]
        for key, (row, offset) in here.items():
            known = self._writes.get(key)
            if known and not (landed and self._open and any(k == key for k, _ in self._open.rows)):
                fits = offset >= known[-1].offset if self.keyed else offset == known[-1].offset
                require(fits, f"row {key} of {tablet} is at offset {offset}, it was answered {known[-1].offset}")
            self._writes[key] = [_Write(offset, row)]
        self.cut[tablet] = cut


def _apply(live: dict[int, Row], key: int, given: Row | None) -> None:
    if given is None:
        live.pop(key, None)
    else:
        live[key] = {**live.get(key, {}), **given}


def as_table(rows: Sequence[tuple[int, Mapping[str, int] | None]], schema: pa.Schema) -> pa.Table:
    """Rows of a batch, with the columns that they are given; of a delete, the keys."""
    names = ["p", "k", *(rows[0][1] or ())]
    plain: list[dict[str, Any]] = [{"p": partition_of(k), "k": k, **(given or {})} for k, given in rows]
    return pa.Table.from_pylist(plain, schema=pa.schema([(n, schema.field(n).type) for n in names]))
