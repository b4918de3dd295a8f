"""Rows of one schema as rows of another, by field id; rows of the wanted one as they are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from lakehead.errors import CorruptionError, SchemaChangedError
from lakehead.format.frame import FrameBody, WriterStamp, encode_body
from lakehead.format.read_as import Binding, cast_to, given_as, may_match_as, read_as, rows_as
from lakehead.predicate import Bound
from lakehead.types import FIELD_ID, Schemas, TableSchema

SPOT = pa.struct([("x", pa.int32()), ("y", pa.float32()), ("gone", pa.string())])
OLD = TableSchema.of(
    0,
    pa.schema(
        [
            pa.field("id", pa.int64(), False),
            ("n", pa.int32()),
            ("f", pa.float32()),
            ("gone", pa.string()),
            ("spot", SPOT),
            ("spots", pa.list_(SPOT)),
            ("many", pa.large_list(pa.int32())),
            ("named", pa.map_(pa.string(), SPOT)),
        ]
    ),
)


def made(name: str, t: pa.DataType, number: int | bytes, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, t, nullable, {FIELD_ID: str(number) if isinstance(number, int) else number})


def moved(t: pa.DataType) -> pa.DataType:
    """A spot without ``gone``, with ``x`` renamed and behind ``y``, both wider, and with a new field of an old name."""
    x, y, _ = (t.field(i) for i in range(3))
    new = made("gone", pa.int8(), 100 + int(y.metadata[FIELD_ID]))
    return pa.struct([y.with_type(pa.float64()), new, x.with_type(pa.int64()).with_name("x_2")])


def evolved() -> TableSchema:
    """``n`` and ``f`` wider, ``f`` renamed, ``gone`` dropped and added anew, and all in another order."""
    f = {f.name: f for f in OLD.fields}
    many, spots, key, value = f["many"].type, f["spots"].type, f["named"].type.key_field, f["named"].type.item_field
    item = spots.value_field
    return TableSchema.of(
        1,
        pa.schema(
            [
                f["named"].with_type(pa.map_(key, value.with_type(moved(value.type)))),
                made("gone", pa.int64(), 99),
                f["f"].with_type(pa.float64()).with_name("share"),
                f["many"].with_type(pa.large_list(many.value_field.with_type(pa.int64()))),
                f["spots"].with_type(pa.list_(item.with_type(moved(item.type)))),
                f["spot"].with_type(moved(f["spot"].type)),
                f["id"],
                f["n"].with_type(pa.int64()),
            ]
        ),
    )


SCHEMAS = Schemas((OLD, evolved()))


def spot(i: int) -> dict[str, Any] | None:
    return None if i % 3 == 2 else {"x": i, "y": i / 2, "gone": "g"}


def spot_2(i: int) -> dict[str, Any] | None:
    return None if i % 3 == 2 else {"y": i / 2, "gone": None, "x_2": i}


def row(i: int) -> dict[str, Any]:
    return {
        "id": i, "n": None if i % 5 == 4 else i, "f": i + 0.5, "gone": "old", "spot": spot(i),
        "spots": None if i % 4 == 3 else [spot(i), spot(i + 1)], "many": [i, None], "named": [(str(i), spot(i))],
    }  # fmt: skip


def row_2(i: int) -> dict[str, Any]:
    return {
        "named": [(str(i), spot_2(i))], "gone": None, "share": i + 0.5, "many": [i, None],
        "spots": None if i % 4 == 3 else [spot_2(i), spot_2(i + 1)], "spot": spot_2(i), "id": i,
        "n": None if i % 5 == 4 else i,
    }  # fmt: skip


def batch(rows: range = range(20)) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([row(i) for i in rows], OLD.columns)


def body(schema_id: int = 0, rows: pa.RecordBatch | None = None, compression: str = "none") -> FrameBody:
    stamp = WriterStamp(bytes(16), 0)
    return encode_body(rows or batch(), schema_id=schema_id, stamp=stamp, compression=compression)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_rows_are_read_by_field_id(compression: str) -> None:
    found = read_as(body(compression=compression), SCHEMAS)
    found.validate(full=True)
    assert found.schema.equals(SCHEMAS.current.columns, check_metadata=True)
    assert found.to_pylist() == [row_2(i) for i in range(20)]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("columns", [[7], [1], [2, 1, 6], [5, 0], []])
def test_columns_are_those_of_the_wanted_schema(compression: str, columns: list[int]) -> None:
    names = [SCHEMAS.current.columns.names[i] for i in columns]
    wanted = [{n: row_2(i)[n] for n in names} for i in range(20)]
    for found in (read_as(body(compression=compression), SCHEMAS, columns), rows_as(batch(), 0, SCHEMAS, columns)):
        assert found.schema.names == names and found.num_rows == 20 and found.to_pylist() == wanted


def test_rows_that_begin_within_their_buffers() -> None:
    for whole in (batch(range(3)), batch()):
        found = rows_as(whole.slice(1, 2), 0, SCHEMAS)
        found.validate(full=True)
        assert found.to_pylist() == [row_2(1), row_2(2)]


def buffers(array: pa.Array) -> list[int | None]:
    return [None if b is None else b.address for b in array.buffers()]


def test_rows_of_the_wanted_schema_are_neither_copied_nor_cast() -> None:
    for schemas in (Schemas((OLD,)), Schemas((evolved(), OLD))):
        frame = body()
        plain, found = frame.rows(OLD.columns), read_as(frame, schemas)
        assert [buffers(c) for c in found.columns] == [buffers(c) for c in plain.columns]
        some = read_as(frame, schemas, [4, 1])
        assert [buffers(c) for c in some.columns] == [buffers(plain.column(i)) for i in (4, 1)]
        rows = batch()
        assert rows_as(rows, 0, schemas) is rows


def test_what_did_not_change_is_not_copied() -> None:
    frame = body()
    assert buffers(read_as(frame, SCHEMAS).column("id")) == buffers(frame.rows(OLD.columns).column("id"))


def test_an_unknown_schema_is_named() -> None:
    for schemas in (SCHEMAS, Schemas.only(OLD.columns, 3)):
        for read in (read_as, lambda b, s: may_match_as(b, s, [Bound("n", "==", 1)])):
            with pytest.raises(CorruptionError, match="written under schema 7, the table has only"):
                read(body(7), schemas)
        with pytest.raises(CorruptionError, match="schema 7"):
            rows_as(batch(), 7, schemas)


def test_schemas_that_do_not_go_together_are_named() -> None:
    required = TableSchema.of(1, pa.schema([OLD.fields.field(0), made("new", pa.int8(), 77, nullable=False)]))
    with pytest.raises(CorruptionError, match="schema 1 requires column 'new', which rows of schema 0 do not have"):
        read_as(body(), Schemas((OLD, required)))
    narrow = TableSchema.of(1, pa.schema([OLD.fields.field(0).with_type(pa.int8())]))
    with pytest.raises(CorruptionError, match="rows of schema 0 cannot be read as schema 1"):
        read_as(body(rows=batch(range(1000))), Schemas((OLD, narrow)))


@pytest.mark.parametrize(
    ("bound", "possible"),
    [
        (Bound("share", ">", 0.6), True),
        (Bound("share", ">", 600.0), False),
        (Bound("n", "==", 1 << 40), False),
        (Bound("n", "==", 7), True),
        (Bound("n", "is_null", None), True),
        (Bound("id", "is_null", None), False),
        (Bound("gone", "is_null", None), True),
        (Bound("gone", "not_null", None), False),
        (Bound("gone", "==", 5), False),
        (Bound("gone", "in", (5, 6)), False),
        (Bound("f", ">", 200.0), True),  # no column of the current schema
        (Bound("__offset", ">", 10**6), True),
    ],
)
def test_statistics_are_read_by_field_id(bound: Bound, possible: bool) -> None:
    frame = body(rows=batch(range(300)))
    assert frame.statistics_length
    assert may_match_as(frame, SCHEMAS, [bound]) is possible
    assert may_match_as(frame, SCHEMAS, [Bound("id", ">=", 0), bound]) is possible
    if bound.column == "id":
        assert may_match_as(frame, Schemas((OLD,)), [bound]) is possible


def test_fields_without_an_id_are_no_one() -> None:
    physical = [pa.field("id", pa.int32()), made("strange", pa.int32(), b"none"), made("n", pa.int32(), 1)]
    binding = Binding.of(physical, [OLD.fields.field(0), OLD.fields.field(1)])
    assert (binding.read, binding.places) == ((2,), (0, None))


def test_rows_that_a_writer_gave_are_bound_as_far_as_they_were_given() -> None:
    """Partial columns in any number; renamed, widened, moved, dropped; a new column of an old name is not given."""
    written = TableSchema.of(0, pa.schema([("k", pa.int64()), ("a", pa.int32()), ("b", pa.string()), ("c", pa.int8())]))
    k, a, b, c = written.fields
    now = [c.with_type(pa.int32()), b.with_name("a"), made("b", pa.string(), 50), k, a.with_name("n")]
    schemas = Schemas((written, TableSchema.of(1, pa.schema(now))))
    row = {"k": 1, "a": 2, "b": "x", "c": None}
    after = {"c": ("c", pa.int32()), "b": ("a", pa.string()), "k": ("k", pa.int64()), "a": ("n", pa.int32())}
    for given in (["k", "a", "b", "c"], ["k"], ["k", "b"], ["k", "a", "c"], ["a", "b", "c"]):
        batch = pa.RecordBatch.from_pylist([row, row], written.columns).select(given)
        found = given_as(batch, 0, schemas)
        assert found.schema == pa.schema([after[c] for c in after if c in given])
        assert found.to_pylist() == [{after[c][0]: row[c] for c in after if c in given}] * 2
    without = Schemas((written, TableSchema.of(1, pa.schema([k, c]))))
    batch = pa.RecordBatch.from_pylist([row], written.columns)
    assert given_as(batch, 0, without).to_pylist() == [{"k": 1, "c": None}]
    assert given_as(batch, 0, Schemas((written,))) == batch
    with pytest.raises(CorruptionError, match="schema 7"):
        given_as(batch, 7, schemas)


def test_rows_of_a_newer_schema_are_not_read() -> None:
    new = evolved()
    schemas = Schemas((OLD, new)).as_of(0)
    batch = pa.RecordBatch.from_pylist([], new.columns)
    with pytest.raises(SchemaChangedError):
        rows_as(batch, 1, schemas)
    body = encode_body(batch, schema_id=1, stamp=WriterStamp(bytes(16), 0))
    with pytest.raises(SchemaChangedError):
        read_as(body, schemas)


DOUBLES = [[1.5], [2.5, -3.0], None, [], [float("inf")], [1e300], [float("nan")]]
WIDE = pa.float64()
NESTS = {
    "list": (lambda t: pa.list_(t), lambda v: v),
    "large list": (lambda t: pa.large_list(t), lambda v: v),
    "map": (lambda t: pa.map_(pa.string(), t), lambda v: None if v is None else [(str(i), x) for i, x in enumerate(v)]),
    "struct": (lambda t: pa.struct([("x", pa.list_(t))]), lambda v: None if v is None else {"x": v}),
    "list of maps": (
        lambda t: pa.list_(pa.map_(pa.string(), t)),
        lambda v: None if v is None else [[(str(i), x)] for i, x in enumerate(v)],
    ),
}


@pytest.mark.parametrize("nest", NESTS)
def test_doubles_inside_that_fit_are_floats_and_others_are_refused_where_they_are_seen(nest: str) -> None:
    """Slices too, of which parts hold more than is seen."""
    of, value = NESTS[nest]
    array = pa.array([value(v) for v in DOUBLES], of(WIDE))
    schema = pa.schema([("c", of(pa.float32()))])
    for start in range(len(DOUBLES)):
        for end in range(start, len(DOUBLES) + 1):
            batch = pa.RecordBatch.from_arrays([array.slice(start, end - start)], names=["c"])
            if start <= 5 < end:
                with pytest.raises(pa.ArrowInvalid, match="not in range"):
                    cast_to(schema, batch)
            else:
                assert str(cast_to(schema, batch)["c"].to_pylist()) == str(batch["c"].to_pylist())
