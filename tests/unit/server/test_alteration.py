"""What becomes of a definition: any changes in a row, against columns that have a number each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.altering import SPOT, TYPES, Shape, added, widened

from lakehead.config import Limits, TableProperties
from lakehead.errors import InvalidPropertyError, InvalidSchemaError, LimitExceededError
from lakehead.protocol.alterations import (
    Alteration,
    DropColumn,
    MakeNullable,
    RenameColumn,
    ResetProperty,
    SetProperty,
)
from lakehead.protocol.schemas import schema_from_text, schema_to_text
from lakehead.server.alteration import altered
from lakehead.types import Schemas, TableDescriptor, TablePath, children, field_id

SCHEMA = pa.schema(
    [
        pa.field("p", pa.string(), False),
        pa.field("k", pa.int32(), False),
        pa.field("n", pa.int32(), False),
        ("f", pa.float32()),
        ("spot", SPOT),
    ]
)
KEYS = ["p", "k"]
LIMITS = Limits()


def table(schema: pa.Schema = SCHEMA) -> TableDescriptor:
    return TableDescriptor("t1", TablePath("a", "t"), Schemas.only(schema), ("p", "k"), ("p",), ("k",), 2, None)


def ids_in(fields: list[pa.Field]) -> Iterator[int | None]:
    for f in fields:
        yield field_id(f)
        yield from ids_in(children(f.type))


@settings(max_examples=80)
@given(st.data())
def test_a_field_has_its_id_for_ever_and_alone(data: st.DataObject) -> None:
    desc, shape = table(), Shape.of(SCHEMA)
    owners = {i: c.number for c, f in zip(shape.columns, desc.schemas.current.fields, strict=True) for i in ids_in([f])}
    of_column = {c.number: field_id(f) for c, f in zip(shape.columns, desc.schemas.current.fields, strict=True)}
    for _ in range(data.draw(st.integers(1, 12))):
        changes: list[Alteration] = []
        for _ in range(data.draw(st.integers(1, 3))):
            changes.append(shape.next_change(lambda s: data.draw(st.sampled_from(s)), fixed=KEYS, types=TYPES))
            shape = shape.after(changes[-1])
        before, desc = desc, altered(desc, changes, LIMITS)
        assert desc.schemas.known[: len(before.schemas.known)] == before.schemas.known, "what was, stays"
        assert desc.schema == shape.schema
        for c, f in zip(shape.columns, desc.schemas.current.fields, strict=True):
            mine = list(ids_in([f]))
            assert None not in mine and len(set(mine)) == len(mine)
            assert of_column.setdefault(c.number, mine[0]) == mine[0], "a column keeps its id"
            assert {owners.setdefault(i, c.number) for i in mine if i is not None} == {c.number}, "and has it alone"
        assert [f for f in desc.schema if f.name in KEYS] == [SCHEMA.field(c) for c in KEYS]
        ids = [s.id for s in desc.schemas.known]
        assert ids == list(range(len(ids)))
        kept = [schema_from_text(s.id, schema_to_text(s)) for s in desc.schemas.known]
        assert tuple(kept) == desc.schemas.known, "as the catalog keeps it"


@given(
    st.permutations(
        [
            RenameColumn(name="f", to="share"),
            DropColumn(name="spot"),
            widened("n", pa.int64()),
            MakeNullable(name="n"),
            SetProperty(name="freshness", value="1s"),
        ]
    )
)
def test_changes_of_different_columns_come_to_the_same_in_any_order(changes: list[Alteration]) -> None:
    wanted = [RenameColumn(name="f", to="share"), DropColumn(name="spot"), widened("n", pa.int64())]
    wanted += [MakeNullable(name="n"), SetProperty(name="freshness", value="1s")]
    assert altered(table(), changes, LIMITS) == altered(table(), wanted, LIMITS)


def test_changes_that_come_to_nothing_make_no_schema() -> None:
    desc = table()
    there_and_back = [RenameColumn(name="f", to="g"), RenameColumn(name="g", to="f")]
    for changes in (
        [],
        there_and_back,
        [added("x", SPOT), DropColumn(name="x")],
        [widened("n", pa.int32())],
        [MakeNullable(name="f")],
        [ResetProperty(name="freshness")],
    ):
        assert altered(desc, changes, LIMITS) == desc
    only = altered(desc, [SetProperty(name="freshness", value="1s")], LIMITS)
    assert only.schemas is desc.schemas and only.properties != desc.properties


def test_what_was_once_given_is_not_given_again() -> None:
    desc = table()
    first = altered(desc, [added("x", SPOT)], LIMITS)
    again = altered(altered(first, [DropColumn(name="x")], LIMITS), [added("x", SPOT)], LIMITS)
    a, b = (list(ids_in([d.schemas.current.fields.field("x")])) for d in (first, again))
    assert not set(a) & set(b)
    assert min(i for i in a if i) > max(i for i in ids_in(list(desc.schemas.current.fields)) if i)


def test_as_many_columns_as_a_table_may_have() -> None:
    limits = dataclasses.replace(LIMITS, columns_max=len(SCHEMA) + 1)
    full = altered(table(), [added("x", pa.int64())], limits)
    with pytest.raises((LimitExceededError, InvalidSchemaError)):
        altered(full, [added("y", pa.int64())], limits)
    altered(full, [DropColumn(name="x"), added("y", pa.int64())], limits)


@pytest.mark.parametrize(
    ("now", "to"),
    [
        (pa.int64(), pa.int32()),
        (pa.int32(), pa.float64()),
        (pa.int64(), pa.decimal128(20, 0)),
        (pa.float64(), pa.float32()),
        (pa.decimal128(5, 2), pa.decimal128(9, 3)),
        (pa.decimal128(5, 2), pa.decimal128(4, 2)),
        (pa.string(), pa.large_string()),
        (pa.date32(), pa.timestamp("us")),
        (SPOT, pa.struct([("x", pa.int64()), ("tags", pa.list_(pa.string()))])),
        (pa.bool_(), pa.int8()),
    ],
)
def test_types_that_do_not_hold_every_value_are_no_wider_ones(now: pa.DataType, to: pa.DataType) -> None:
    desc = table(pa.schema([*SCHEMA, pa.field("v", now)]))
    with pytest.raises(InvalidSchemaError, match="cannot become"):
        altered(desc, [widened("v", to)], LIMITS)


def test_properties_are_read_as_they_are_at_creation() -> None:
    changes = [SetProperty(name="freshness", value="1s"), ResetProperty(name="freshness")]
    assert altered(table(), changes, LIMITS).properties == TableProperties()
    with pytest.raises(InvalidPropertyError):
        altered(table(), [SetProperty(name="compression", value="best")], LIMITS)
