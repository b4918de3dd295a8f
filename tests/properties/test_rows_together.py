"""Rows as dicts become the same table, or the same error, if their columns are converted together or one by one."""

from __future__ import annotations

import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.properties.test_plain import VALUES

from lakehead.errors import LakeheadError
from lakehead.format import rows as module
from lakehead.format.rows import to_arrow_table

DECIMALS = st.decimals("-999.99", "999.99", places=2)
TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **VALUES,
    pa.decimal128(5, 2): DECIMALS,
    pa.list_(pa.timestamp("s")): st.lists(VALUES[pa.timestamp("s")], max_size=3),
    pa.struct([("a", pa.int8()), ("b", pa.time32("s"))]): st.fixed_dictionaries(
        {"a": VALUES[pa.int8()]}, optional={"b": VALUES[pa.time32("s")]}
    ),
    pa.map_(pa.string(), pa.int64()): st.dictionaries(st.text(max_size=3), VALUES[pa.int64()], max_size=3),
}
ODD = st.sampled_from(
    [1.5, 2.0, "text", b"\xff", 2**70, -1, True, decimal.Decimal("0.001"), {"c": 1}, [None], "\ud800"]
)


def made(rows: list[dict[str, Any]], schema: pa.Schema) -> tuple[Any, ...]:
    try:
        table = to_arrow_table(rows, schema, what="rows", fill={})
    except LakeheadError as e:
        return type(e), str(e), e.context
    return tuple(
        (n, c.type, c.combine_chunks().to_pylist()) for n, c in zip(table.column_names, table.columns, strict=True)
    )


@given(st.data())
def test_together_is_one_by_one(data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(list(TYPES)), min_size=1, max_size=6))
    schema = pa.schema([(f"c{i}", t) for i, t in enumerate(types)])
    values = st.fixed_dictionaries({}, optional={f.name: TYPES[f.type] | st.none() for f in schema})
    rows = data.draw(st.lists(values, min_size=1, max_size=4))
    if data.draw(st.integers(0, 3)) == 0:
        rows[-1][data.draw(st.sampled_from(schema.names))] = data.draw(ODD)
    together = made(rows, schema)
    with pytest.MonkeyPatch.context() as one_by_one:
        one_by_one.setattr(module, "_together", refuse)
        assert made(rows, schema) == together


def refuse(*_: object) -> None:
    raise ValueError("one by one")
