"""Whatever becomes of a schema, rows of the old one read as a plain model says; no frame with a match is skipped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehead.format.defaults import default_text, with_default
from lakehead.format.frame import STATISTICS_ROWS_MIN, FrameBody, WriterStamp, encode_body
from lakehead.format.read_as import may_match_as, read_as, rows_as
from lakehead.predicate import Bound
from lakehead.types import FIELD_ID, Schemas, TableSchema, children, with_children

Convert = Callable[[Any], Any]
"""What a value of the old schema is under the new one."""
WIDER = {pa.int32(): pa.int64(), pa.float32(): pa.float64()}
PLAIN = st.sampled_from([pa.int32(), pa.int64(), pa.float32(), pa.string(), pa.bool_(), pa.date32()])
TYPES = st.recursive(
    PLAIN,
    lambda inside: st.one_of(
        inside.map(pa.list_),
        inside.map(pa.large_list),
        inside.map(lambda t: pa.map_(pa.string(), t)),
        st.lists(inside, min_size=1, max_size=3).map(
            lambda types: pa.struct([pa.field(f"f{i}", t) for i, t in enumerate(types)])
        ),
    ),
    max_leaves=5,
)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.string(): st.text(max_size=3),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
}


def values(t: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(t):
        inside = st.fixed_dictionaries({f.name: values(f.type) for f in children(t)})
    elif pa.types.is_map(t):
        inside = st.lists(st.tuples(st.text(max_size=3), values(t.item_type)), max_size=3)
    elif pa.types.is_nested(t):
        inside = st.lists(values(t.value_type), max_size=3)
    else:
        inside = VALUES[t]
    return st.none() | inside


class Evolution:
    """Draws what becomes of fields, and how values follow."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._ids = itertools.count(1000)

    def fields(
        self, old: list[pa.Field], *, inside: bool = False
    ) -> tuple[list[pa.Field], list[tuple[str, str | None, Convert]]]:
        """New fields, and for each its name, the name that it had and how its value follows."""
        names = [f.name for f in old]
        kept = self._data.draw(st.lists(st.sampled_from(old), unique_by=lambda f: f.name))
        made: list[tuple[pa.Field, str | None, Convert]] = []
        for f in kept:
            t, convert = self._type(f.type)
            # Old names may come again, of other fields: only ids tell.
            made.append((f.with_type(t), f.name, convert))
        for t in self._data.draw(st.lists(PLAIN, min_size=0 if made else 1, max_size=2)):
            f = pa.field("", t, True, {FIELD_ID: str(next(self._ids))})
            value = None if inside else self._data.draw(st.none() | VALUES[t])
            made.append((with_default(f, default_text(value, f)), None, lambda _, value=value: value))
        made = self._data.draw(st.permutations(made))
        free = self._data.draw(st.permutations([*names, *(f"n{i}" for i in range(len(made)))]))
        fields = [f.with_name(name) for (f, _, _), name in zip(made, free, strict=False)]
        return fields, [(f.name, was, convert) for f, (_, was, convert) in zip(fields, made, strict=True)]

    def _type(self, t: pa.DataType) -> tuple[pa.DataType, Convert]:
        if t in WIDER and self._data.draw(st.booleans()):
            return WIDER[t], lambda v: v
        if pa.types.is_struct(t):
            fields, plan = self.fields(children(t), inside=True)
            return with_children(t, fields), lambda v: None if v is None else follow(plan, v)
        if not pa.types.is_nested(t):
            return t, lambda v: v
        *key, item = children(t)
        inner, convert = self._type(item.type)
        new = with_children(t, [*key, item.with_type(inner)])
        if key:
            return new, lambda v: None if v is None else [(k, convert(x)) for k, x in v]
        return new, lambda v: None if v is None else [convert(x) for x in v]


def follow(plan: list[tuple[str, str | None, Convert]], value: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(None if was is None else value[was]) for name, was, convert in plan}


@settings(max_examples=150)
@given(
    st.lists(TYPES, min_size=1, max_size=4).map(lambda types: [(f"f{i}", t) for i, t in enumerate(types)]),
    st.sampled_from(["none", "lz4"]),
    st.data(),
)
def test_rows_follow_their_fields(columns: list[tuple[str, Any]], compression: str, data: st.DataObject) -> None:
    old = TableSchema.of(0, pa.schema(columns))
    fields, plan = Evolution(data).fields(list(old.fields))
    schemas = Schemas((old, TableSchema.of(1, pa.schema(fields))))
    given = data.draw(st.lists(st.fixed_dictionaries({n: values(t) for n, t in columns}), max_size=6))
    batch = pa.RecordBatch.from_pylist(given, old.columns)
    body = encode_body(batch, schema_id=0, stamp=WriterStamp(bytes(16), 0), compression=compression)
    wanted = [follow(plan, row) for row in batch.to_pylist()]
    asked = data.draw(st.none() | st.lists(st.integers(0, len(fields) - 1), unique=True))
    names = [f.name for f in fields] if asked is None else [fields[i].name for i in asked]
    for found in (read_as(body, schemas, asked), rows_as(batch, 0, schemas, asked)):
        found.validate(full=True)
        assert found.num_rows == len(given)
        assert found.schema.names == names
        assert found.to_pylist() == [{n: row[n] for n in names} for row in wanted]
    start = data.draw(st.integers(0, len(given)))
    assert rows_as(batch.slice(start), 0, schemas).to_pylist() == wanted[start:]


def bounds(body: FrameBody, rows: list[dict[str, Any]], schema: pa.Schema) -> Iterator[tuple[Bound, bool]]:
    """Conditions, and whether a row meets them."""
    for f in schema:
        found = [row[f.name] for row in rows]
        yield Bound(f.name, "is_null", None), None in found
        yield Bound(f.name, "not_null", None), any(v is not None for v in found)
        if pa.types.is_integer(f.type):
            for v in {0, *(v for v in found if v is not None)}:
                yield Bound(f.name, "==", v), v in found
                yield Bound(f.name, ">", v), any(x is not None and x > v for x in found)
                yield Bound(f.name, "in", (v, v + 1)), v in found or v + 1 in found


@settings(max_examples=60)
@given(st.lists(PLAIN, min_size=1, max_size=4), st.data())
def test_no_frame_with_a_match_is_skipped(types: list[pa.DataType], data: st.DataObject) -> None:
    old = TableSchema.of(0, pa.schema([(f"f{i}", t) for i, t in enumerate(types)]))
    fields, plan = Evolution(data).fields(list(old.fields))
    schemas = Schemas((old, TableSchema.of(1, pa.schema(fields))))
    row = st.fixed_dictionaries({f.name: values(f.type) for f in old.columns})
    some = data.draw(st.lists(row, min_size=1, max_size=6))
    batch = pa.RecordBatch.from_pylist(some * STATISTICS_ROWS_MIN, old.columns)
    body = encode_body(batch, schema_id=0, stamp=WriterStamp(bytes(16), 0))
    assert body.statistics_length
    rows = [follow(plan, row) for row in batch.slice(0, len(some)).to_pylist()]
    for bound, matches in bounds(body, rows, schemas.current.columns):
        assert may_match_as(body, schemas, [bound]) or not matches
