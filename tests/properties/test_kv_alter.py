"""Live rows of a tablet that is altered: those that a restart makes of its log, and those of a plain dict."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.altering import SPOT, TYPES, Shape
from tests.properties.test_read_as import VALUES

from lakehead.config import Limits
from lakehead.format.read_as import rows_as
from lakehead.kv.tablet import Change, KvTablet
from lakehead.server.alteration import altered
from lakehead.types import Schemas, TableDescriptor, TablePath

SCHEMA = pa.schema(
    [
        pa.field("k", pa.int32(), False),
        pa.field("s", pa.string(), False),
        pa.field("n", pa.int32(), False),
        ("t", pa.string()),
        ("m", pa.decimal128(5, 2)),
        ("spot", SPOT),
    ]
)
KEY = ["k", "s"]
KEYS = [(k, s) for k in range(4) for s in ("", "x", "yy")]
_OF_TYPE: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **VALUES,
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.float64(): st.floats(allow_nan=False),
}


def value(c: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_decimal(c):
        below = 10 ** min(c.precision, 20)
        return st.integers(1 - below, below - 1).map(lambda n: Decimal(n).scaleb(-c.scale))
    if pa.types.is_struct(c):
        return st.fixed_dictionaries({f.name: st.none() | value(f.type) for f in c})
    if pa.types.is_list(c):
        return st.lists(st.none() | st.text(max_size=2), max_size=3)
    return _OF_TYPE[c]


class Altered:
    """A tablet that is altered, its log, and its rows by the numbers of their columns."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
        path = TablePath("a", "t")
        self.desc = TableDescriptor("t1", path, Schemas.only(SCHEMA), ("k", "s"), (), ("k",), 1, None)
        self.shape = Shape.of(SCHEMA)
        self.kv = KvTablet(self.desc.schemas, ("k", "s"), ("k",), seed=1)
        self.log: list[tuple[int, Change, int]] = []
        self.end = 0
        self.rows: dict[tuple[int, str], dict[int, Any]] = {}

    def upsert(self) -> None:
        free = [c for c in self.shape.columns if c.name not in KEY]
        given = [c for c in free if not c.nullable or self.draw(st.booleans())]
        rows = []
        for k, s in self.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)):
            row = {"k": k, "s": s}
            row |= {c.name: self.draw(value(c.type) if not c.nullable else st.none() | value(c.type)) for c in given}
            rows.append(row)
            self.rows[k, s] = self.shape.held(row, self.rows.get((k, s)))
        names = [c.name for c in self.shape.columns if c.name in rows[0]]
        schema = pa.schema([self.desc.schema.field(n) for n in names])
        self._log(self.kv.plan_upsert(pa.RecordBatch.from_pylist(rows, schema), self.end))

    def delete(self) -> None:
        keys = self.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=9))
        for key in keys:
            self.rows.pop(key, None)
        schema = pa.schema([SCHEMA.field(c) for c in KEY])
        self._log(self.kv.plan_delete(pa.RecordBatch.from_pylist([{"k": k, "s": s} for k, s in keys], schema)))

    def fill(self) -> None:
        """So many rows that the tablet grows, most of which go again and leave slots behind."""
        free = {c.name: self.draw(value(c.type)) for c in self.shape.columns if c.name not in KEY}
        rows = [{"k": 100 + i, "s": "", **free} for i in range(200)]
        self._log(self.kv.plan_upsert(pa.RecordBatch.from_pylist(rows, self.desc.schema), self.end))
        schema = pa.schema([SCHEMA.field(c) for c in KEY])
        self._log(self.kv.plan_delete(pa.RecordBatch.from_pylist(rows, schema)))

    def _log(self, change: Change) -> None:
        assert change.rows.schema == self.desc.schema
        change.rows.validate(full=True)
        self.kv.apply(self.end, change.change_types, change.rows)
        self.log.append((self.end, change, self.desc.schema_id))
        self.end += change.rows.num_rows

    def alter(self) -> None:
        change = self.shape.next_change(lambda s: self.draw(st.sampled_from(s)), fixed=KEY, types=TYPES)
        self.desc, self.shape = altered(self.desc, [change], Limits()), self.shape.after(change)
        self.kv.alter(self.desc.schemas)

    def check(self) -> None:
        again = KvTablet(self.desc.schemas, ("k", "s"), ("k",), seed=2)
        for start, change, schema_id in self.log:
            again.apply(start, change.change_types, rows_as(change.rows, schema_id, self.desc.schemas))
        offsets, rows = flat(self.kv)
        others, same = flat(again)
        assert np.array_equal(offsets, others) and rows.equals(same)
        assert rows.schema == self.shape.schema and len(self.kv) == len(self.rows)
        found = {(r["k"], r["s"]): r for r in rows.to_pylist()}
        assert found == {key: self.shape.shown(row) for key, row in self.rows.items()}
        keys = pa.RecordBatch.from_pylist([{"k": k, "s": s} for k, s in KEYS], SCHEMA).select(KEY)
        looked_up = self.kv.gather(self.kv.find(keys)).to_pylist()
        assert [r for r in looked_up if r["k"] is not None] == [found[key] for key in KEYS if key in found]
        for k in range(5):
            prefixes = pa.RecordBatch.from_pylist([{"k": k}], SCHEMA).select(["k"])
            slots = self.kv.prefix_find(prefixes)
            ours = self.kv.gather(slots).to_pylist()
            assert ours == [r for r in rows.to_pylist() if r["k"] == k]
            assert (self.kv.sizes(slots) > 0).all()


def flat(kv: KvTablet) -> tuple[np.ndarray, pa.Table]:
    parts = kv.live_rows()
    for _, batch in parts:
        batch.validate(full=True)
    return np.concatenate([[], *(o for o, _ in parts)]), pa.Table.from_batches([b for _, b in parts], kv.schema)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_live_rows_are_those_that_the_log_makes(data: st.DataObject) -> None:
    t = Altered(data)
    actions = [t.upsert, t.upsert, t.upsert, t.delete, t.alter, t.alter, t.fill]
    for action in data.draw(st.lists(st.sampled_from(actions), min_size=2, max_size=14)):
        action()
    t.check()
