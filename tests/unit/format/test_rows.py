"""Users' data to a table's columns: what is taken, what is refused, and that no value changes."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from lakehead.errors import ColumnNotFoundError, LakeheadError, NullKeyError, SchemaMismatchError
from lakehead.format.rows import conform, to_arrow_table, to_key_table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("price", pa.float64())])
ROWS: list[dict[str, Any]] = [{"id": 1, "name": "ø", "price": 1.5}, {"id": 2, "name": None, "price": float("-inf")}]
TABLE = pa.Table.from_pylist(ROWS, SCHEMA)
UTC = dt.UTC


def take(data: object, schema: pa.Schema = SCHEMA, required: list[str] | None = None) -> pa.Table:
    table = conform(to_arrow_table(data, schema, what="append"), schema, columns_required=required, what="append")
    table.validate(full=True)
    return table


def one(array: Any, t: pa.DataType, nullable: bool = True) -> list[Any]:
    """The values after conforming a lone column of Arrow data or Python values to a type."""
    data = pa.table({"x": array}) if isinstance(array, pa.Array | pa.ChunkedArray) else [{"x": v} for v in array]
    found = take(data, pa.schema([pa.field("x", t, nullable)]))
    assert found.schema.field("x").type == t
    values: list[Any] = found.column("x").to_pylist()
    return values


class Stream:
    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


class Batch:
    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self.batch.__arrow_c_array__(requested_schema)


# Inputs


@pytest.mark.parametrize(
    "data",
    [
        TABLE,
        TABLE.to_batches()[0],
        TABLE.to_reader(),
        Stream(TABLE),
        Batch(TABLE.to_batches()[0]),
        TABLE.to_pandas(),
        pl.from_arrow(TABLE),
        ROWS,
        tuple(ROWS),
        [dict(reversed(row.items())) for row in ROWS],
        TABLE.select(["price", "id", "name"]),
        TABLE.replace_schema_metadata({"pandas": "{}"}),
    ],
    ids=lambda d: type(d).__name__,
)
def test_every_kind_of_input(data: object) -> None:
    found = take(data)
    assert found.schema.equals(SCHEMA, check_metadata=True)
    assert found.equals(TABLE)


def test_parts_may_be_lists_of_rows() -> None:
    """A page of dicts at a time, or the batches of a table, as programs read them elsewhere."""
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    table = pa.table({"k": [3]})
    pages = [[{"k": 1}], [{"k": 2, "v": "x"}], []]
    for data in (pages, iter(pages)):
        rows = to_arrow_table(data, schema, what="rows", fill={"v": "y"})
        assert rows.to_pydict() == {"k": [1, 2], "v": ["y", "x"]}
    for data in ([table, table.to_batches(), [table, table], []], iter([table.to_batches()] * 4)):
        assert to_arrow_table(data, schema, what="rows").to_pydict() == {"k": [3, 3, 3, 3]}
    for odd in (pages, [[1, 2]], [[{"k": 1}], 5], [[{"k": 1}], {"k": 2}], [[{"k": 1}], table]):
        with pytest.raises(SchemaMismatchError):
            to_arrow_table(odd, schema, what="rows")


def test_one_dict_is_one_row_and_nothing_is_no_row() -> None:
    assert take(ROWS[0]).to_pylist() == ROWS[:1]
    for nothing in ([], pd.DataFrame(), pa.table({}), pa.table({}).to_reader(), pl.DataFrame()):
        assert take(nothing).schema == SCHEMA and take(nothing).num_rows == 0


def test_data_of_the_exact_schema_is_passed_on_as_it_is() -> None:
    assert conform(TABLE, SCHEMA) is TABLE


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (5, SchemaMismatchError, "append: a int is not a table"),
        (None, SchemaMismatchError, "NoneType"),
        (pl.LazyFrame({"id": [1]}), SchemaMismatchError, "its collect() makes one"),
        ("id,name", SchemaMismatchError, "a str is not a table"),
        ([1, 2], SchemaMismatchError, "row 0 is a int"),
        ([ROWS[0], (1, 2, 3)], SchemaMismatchError, "row 1 is a tuple"),
        ([ROWS[0], {"id": 1, "nom": 2, "price": 3}], SchemaMismatchError, "row 1 and row 0 differ in 'name', 'nom'"),
        ([{"id": 1, "nane": "x"}], ColumnNotFoundError, "no column 'nane'; did you mean 'name'?"),
        ([{"id": 1, "zz": 2}], ColumnNotFoundError, "columns: id, name, price"),
        ([{5: 1}], ColumnNotFoundError, "no column 5"),
        ({"id": 1, "__offset": 3}, SchemaMismatchError, "'__offset' is reserved"),
        (pa.table({"id": [1], "idd": [1]}), ColumnNotFoundError, "did you mean 'id'"),
        (pd.DataFrame({"id": [1], "zz": [1]}), ColumnNotFoundError, "no column 'zz'"),
        (pd.DataFrame([[1, 2]], columns=["id", "id"]), SchemaMismatchError, "'id' is there twice"),
        (pa.table([[1], [2]], names=["id", "id"]), SchemaMismatchError, "'id' is there twice"),
        (pa.table({"id": [1]}), SchemaMismatchError, "lacks 'name', 'price'"),
        pytest.param(Batch(pa.array([1])), SchemaMismatchError, "cannot be read as a table", id="no batch"),
        ([{"id": None, "name": "x", "price": 1.0}], NullKeyError, "'id' is null in row 0"),
        ([{"id": "1", "name": "x", "price": 1.0}], SchemaMismatchError, "column 'id' is int64: row 0 holds '1' (str)"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_input(data: object, error: type[LakeheadError], message: str) -> None:
    with pytest.raises(error) as found:
        take(data)
    assert type(found.value) is error
    assert message in str(found.value)


def test_the_offending_row_is_found_in_many() -> None:
    rows = [{**ROWS[0], "id": i} for i in range(1000)]
    rows[613]["id"] = 2**63
    rows[800]["id"] = "x"
    with pytest.raises(SchemaMismatchError, match=r"row 613 holds 9223372036854775808 \(int\)") as error:
        take(rows)
    assert error.value.context["row"] == 613 and error.value.context["column"] == "id"


def test_partial_data_needs_the_required_columns_only() -> None:
    found = take([{"price": 2.0, "id": 7}], required=["id"])
    assert found.schema == pa.schema([SCHEMA.field("id"), SCHEMA.field("price")])
    with pytest.raises(SchemaMismatchError, match="lacks 'id'"):
        take([{"price": 2.0}], required=["id"])


# Types


@pytest.mark.parametrize(
    ("array", "t", "expected"),
    [
        (pa.array([1, None, -128]), pa.int8(), [1, None, -128]),
        (pa.array([255], pa.uint8()), pa.int64(), [255]),
        (pa.array([1.5, float("inf")], pa.float32()), pa.float64(), "same"),
        (pa.array([np.float16(1.5)]), pa.float32(), [1.5]),
        (pa.array([1, 2**53]), pa.float64(), [1.0, 2.0**53]),
        (pa.array([decimal.Decimal("1.230")]), pa.decimal128(5, 2), [decimal.Decimal("1.23")]),
        (pa.array([decimal.Decimal("1.2")], pa.decimal64(5, 1)), pa.decimal128(5, 2), [decimal.Decimal("1.20")]),
        (pa.array(["a"], pa.string_view()), pa.large_string(), ["a"]),
        (pa.array(["a"], pa.large_string()), pa.string(), ["a"]),
        (pa.array([b"ab"]), pa.binary(2), [b"ab"]),
        (pa.array([b"ab"], pa.binary(2)), pa.large_binary(), [b"ab"]),
        (pa.array([dt.date(2020, 1, 2)], pa.date64()), pa.date32(), [dt.date(2020, 1, 2)]),
        (pa.array([dt.time(1, 2, 3)], pa.time64("ns")), pa.time32("s"), [dt.time(1, 2, 3)]),
        (pa.array([dt.datetime(2020, 1, 2)], pa.timestamp("ns")), pa.timestamp("s"), [dt.datetime(2020, 1, 2)]),
        (
            pa.array([dt.datetime(2020, 1, 2, tzinfo=UTC)], pa.timestamp("ms", "Europe/Oslo")),
            pa.timestamp("us", "UTC"),
            [dt.datetime(2020, 1, 2, tzinfo=UTC)],
        ),
        (pa.nulls(2), pa.struct([pa.field("a", pa.int8(), nullable=False)]), [None, None]),
        (pa.nulls(2), pa.int8(), [None, None]),
        (pa.array([[], None]), pa.list_(pa.string()), [[], None]),
        (pa.array(["a", "b", None, "a"]).dictionary_encode(), pa.string(), ["a", "b", None, "a"]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), pa.list_(pa.int8()), [[1, 2], None, [3, 4]]),
        (pa.array([{"b": 1, "a": "x"}, None]), pa.struct([("a", pa.string()), ("b", pa.int8())]), "same"),
        (pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())), pa.map_(pa.large_string(), pa.int8()), "same"),
        (pa.chunked_array([], pa.int8()), pa.int64(), []),
        (pa.chunked_array([], pa.dictionary(pa.int8(), pa.string())), pa.string(), []),
    ],
    ids=str,
)  # fmt: skip
def test_casts_within_a_family(array: Any, t: pa.DataType, expected: Any) -> None:
    assert one(array, t) == (array.to_pylist() if expected == "same" else expected)


ENCODED = ["a", "b", None, "a"]
PLAIN = [["a", "b"], None, [], [None, "c"]]


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
@pytest.mark.parametrize(
    "item", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)  # fmt: skip
def test_list_views_with_nulls(view: Any, item: pa.DataType) -> None:
    array = pa.array(PLAIN, view(item))
    for start in range(4):
        assert one(array[start:], pa.list_(pa.string())) == PLAIN[start:]
        assert one(array[start:], pa.large_list(pa.large_string())) == PLAIN[start:]


def test_dictionaries_inside_every_nested_type() -> None:
    # Dictionaries of string views are what Polars makes of its categoricals.
    indices = pa.array([0, 1, None, 0], pa.uint32())
    encoded = pa.DictionaryArray.from_arrays(indices, pa.array(["a", "b"], pa.string_view()))
    assert one(encoded, pa.string()) == ENCODED
    assert one(encoded[1:3], pa.large_string()) == ENCODED[1:3]
    struct = pa.StructArray.from_arrays([encoded], ["x"], mask=pa.array([False, True, False, False]))
    want = [{"x": "a"}, None, {"x": None}, {"x": "a"}]
    assert one(struct, pa.struct([("x", pa.string())])) == want
    assert one(struct[1:], pa.struct([("x", pa.string())])) == want[1:]
    lists = pa.ListArray.from_arrays([0, 1, 1, 4], encoded, mask=pa.array([False, True, False]))
    assert one(lists, pa.list_(pa.string())) == [["a"], None, ["b", None, "a"]]
    assert one(lists[1:], pa.list_(pa.string())) == [None, ["b", None, "a"]]
    fixed = pa.FixedSizeListArray.from_arrays(encoded, 2, mask=pa.array([True, False]))
    assert one(fixed, pa.list_(pa.string())) == [None, [None, "a"]]
    maps = pa.MapArray.from_arrays([0, 1, 3, 4], pa.array(["p", "q", "r", "s"]), encoded)
    want_maps = [[("p", "a")], [("q", "b"), ("r", None)], [("s", "a")]]
    assert one(maps, pa.map_(pa.string(), pa.string())) == want_maps
    assert one(maps[1:], pa.map_(pa.string(), pa.string())) == want_maps[1:]


def test_polars_categoricals() -> None:
    frame = pl.DataFrame({"x": pl.Series(["u", None, "u"], dtype=pl.Categorical)})
    assert take(frame, pa.schema([("x", pa.string())])).column(0).to_pylist() == ["u", None, "u"]


@pytest.mark.parametrize(
    ("array", "t"),
    [
        (pa.array(["1"]), pa.int64()),
        (pa.array([1]), pa.string()),
        (pa.array([True]), pa.int64()),
        (pa.array([1]), pa.bool_()),
        (pa.array([1.0]), pa.int64()),
        (pa.array([1.0]), pa.float32()),
        (pa.array([1]), pa.decimal128(5, 2)),
        (pa.array([2**53 + 1]), pa.float64()),
        (pa.array([128]), pa.int8()),
        (pa.array([2**63], pa.uint64()), pa.int64()),
        (pa.array([decimal.Decimal("1.234")]), pa.decimal128(5, 2)),
        (pa.array([decimal.Decimal("1234.00")]), pa.decimal128(5, 2)),
        (pa.array(["a"]), pa.binary()),
        (pa.array([b"a"]), pa.string()),
        (pa.array([b"abc"]), pa.binary(2)),
        (pa.array([dt.date(2020, 1, 1)]), pa.timestamp("us")),
        (pa.array([dt.datetime(2020, 1, 1)]), pa.date32()),
        (pa.array([dt.datetime(2020, 1, 1)]), pa.timestamp("us", "UTC")),
        (pa.array([dt.datetime(2020, 1, 1, tzinfo=UTC)]), pa.timestamp("us")),
        (pa.array([1500]).view(pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([{"a": 1}]), pa.struct([("a", pa.int64()), ("b", pa.int64())])),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int64())])),
        (pa.array([["a"]]), pa.list_(pa.int64())),
        (pa.array(["a"]).dictionary_encode(), pa.int64()),
        (pa.array([[300]]), pa.list_(pa.int8())),
    ],
    ids=str,
)
def test_arrow_data_that_would_change(array: pa.Array, t: pa.DataType) -> None:
    with pytest.raises(SchemaMismatchError, match=f"append: column 'x' is {t}".replace("(", r"\(").replace(")", r"\)")
                       .replace("[", r"\[").replace("]", r"\]")):  # fmt: skip
        one(array, t)


@pytest.mark.parametrize("places", [*range(1, 90, 3), 1000, 10**6, 10**7, 999_999_999])
@pytest.mark.parametrize("digits", ["1", "-9", "0", "9" * 38, "1" + "0" * 20])
@pytest.mark.parametrize("t", [pa.decimal128(38, 2), pa.decimal128(38, 38), pa.decimal128(1, 0)], ids=str)
def test_decimals_are_themselves_or_refused(digits: str, places: int, t: pa.DataType) -> None:
    """Arrow takes some for others, or ends the process."""
    for value in (decimal.Decimal(f"{digits}E-{places}"), decimal.Decimal(f"{digits}E+{places}")):
        for given, of in ((value, t), ([value], pa.list_(t)), ({"a": value}, pa.struct([("a", t)]))):
            try:
                found = one([given], of)
            except SchemaMismatchError:
                continue
            assert found == [given]


@pytest.mark.parametrize(
    ("value", "t"),
    [
        (2**40, pa.int32()),
        (True, pa.int64()),
        (1.5, pa.int64()),
        (decimal.Decimal("1.5"), pa.int64()),
        ([7, 1.5], pa.list_(pa.int8())),
        (float("nan"), pa.int64()),
        (1, pa.string()),
        ("\ud800", pa.string()),
        (b"\xff", pa.string()),
        (1e300, pa.float32()),
        (1.5, pa.decimal128(5, 2)),
        (decimal.Decimal("1.234"), pa.decimal128(5, 2)),
        (pd.Timestamp("2020-01-01 00:00:00.123456789"), pa.timestamp("us")),
        ([pd.Timestamp("2020-01-01 00:00:00.000000001", tz="UTC")], pa.list_(pa.timestamp("us", "UTC"))),
        (pd.NaT, pa.timestamp("us")),
        (dt.time(1, tzinfo=UTC), pa.time64("us")),
        (dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=1))), pa.timestamp("us", "UTC")),
        (5, pa.timestamp("us")),
        (5, pa.date32()),
        (5, pa.time64("us")),
        (dt.datetime(2020, 1, 1, 5), pa.date32()),
        (dt.date(2020, 1, 1), pa.timestamp("us")),
        (dt.datetime(2020, 1, 1), pa.timestamp("us", "UTC")),
        (dt.datetime(2020, 1, 1, tzinfo=UTC), pa.timestamp("us")),
        (dt.datetime(2020, 1, 1, 0, 0, 0, 1), pa.timestamp("s")),
        (dt.time(0, 0, 0, 1), pa.time32("ms")),
        ([dt.datetime(2020, 1, 1, 0, 0, 0, 1)], pa.list_(pa.timestamp("ms"))),
        ({"a": 1, "z": 2}, pa.struct([("a", pa.int64())])),
        ([{"a": 1, "z": 2}], pa.list_(pa.struct([("a", pa.int64())]))),
        ({"k": {"z": 2}}, pa.map_(pa.string(), pa.struct([("a", pa.int64())]))),
        (7, pa.list_(pa.date32())),
        (7, pa.map_(pa.string(), pa.date32())),
        pytest.param(object(), pa.int64(), id="object-int64"),
        ([1, 2], pa.int64()),
    ],
    ids=str,
)
def test_python_values_that_would_change(value: Any, t: pa.DataType) -> None:
    with pytest.raises(SchemaMismatchError, match=r"append: column 'x' is .*: row 1 holds"):
        one([None, value], t)


@pytest.mark.parametrize(
    ("value", "t"),
    [
        (dt.datetime(2020, 1, 1, 0, 0, 7), pa.timestamp("s")),
        (dt.datetime(2020, 1, 1, tzinfo=UTC), pa.timestamp("ms", "UTC")),
        (dt.time(1, 2, 3), pa.time32("s")),
        (dt.date(2020, 1, 1), pa.date32()),
        (float("inf"), pa.float32()),
        (7.0, pa.int64()),
        (np.int16(7), pa.int64()),
        (decimal.Decimal("1.20"), pa.decimal128(5, 2)),
        ({"a": [dt.date(2020, 1, 1), None], "b": None}, pa.struct([("a", pa.list_(pa.date32())), ("b", pa.int8())])),
        ([("k", [1])], pa.map_(pa.string(), pa.list_(pa.int8()))),
        ("ø", pa.large_string()),
    ],
    ids=str,
)
def test_python_values(value: Any, t: pa.DataType) -> None:
    assert one([value, None], t) == [value, None]


# pandas


def test_missing_values_of_pandas() -> None:
    frame = pd.DataFrame(
        {
            "i": [1.0, None],  # what pandas makes of integers with a gap
            "f": [float("nan"), 0.5],
            "s": ["a", None],
            "t": pd.to_datetime(["2020-01-01", None]),
            "z": pd.to_datetime(["2020-01-01", None], utc=True),
            "c": pd.Categorical(["u", None]),
            "l": [[1, 2], None],
            "d": [dt.date(2020, 1, 1), None],
            "n": pd.array([True, None], dtype="boolean"),
        },
        index=[7, 9],
    )
    schema = pa.schema(
        [
            ("i", pa.int32()), ("f", pa.float64()), ("s", pa.string()), ("t", pa.timestamp("us")),
            ("z", pa.timestamp("us", "UTC")), ("c", pa.string()), ("l", pa.list_(pa.int16())), ("d", pa.date32()),
            ("n", pa.bool_()),
        ]
    )  # fmt: skip
    moment = dt.datetime(2020, 1, 1)
    assert take(frame, schema).to_pylist() == [
        {
            "i": 1, "f": None, "s": "a", "t": moment, "z": moment.replace(tzinfo=UTC), "c": "u", "l": [1, 2],
            "d": dt.date(2020, 1, 1), "n": True,
        },
        {"i": None, "f": 0.5, "s": None, "t": None, "z": None, "c": None, "l": None, "d": None, "n": None},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "t", "says"),
    [
        ("2026-01-31", pa.date32(), "a text is not a point in time; give a date, time or datetime"),
        (["2026-01-31T10:00:00Z"], pa.list_(pa.timestamp("us", "UTC")), "a text is not a point in time; give a date"),
        ("10:00", pa.time64("us"), "a text is not a point in time; give a date, time"),
        (dt.date(2026, 1, 31), pa.timestamp("us"), "a date has no time of day; give a datetime"),
        ("12", pa.int64(), "a text is not a number; give an int"),
        (b"12", pa.int8(), "a text is not a number; give an int"),
        (12, pa.string(), "it is no text; give a str"),
        (1.5, pa.large_string(), "it is no text; give a str"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_told_what_to_give(value: Any, t: pa.DataType, says: str) -> None:
    with pytest.raises(SchemaMismatchError, match=says):
        one([value], t)


@pytest.mark.parametrize("index", ["id", "name", ["name", "id"]])
def test_a_column_is_not_lost_in_the_index_of_a_frame(index: Any) -> None:
    frame = TABLE.to_pandas().set_index(index)
    with pytest.raises(SchemaMismatchError, match=r"append: '(id|name)' is the frame's index.* frame\.reset_index\(\)"):
        take(frame, required=[])
    with pytest.raises(SchemaMismatchError, match="index"):
        to_key_table(frame, SCHEMA.remove(2), what="keys", allow_extra=True)
    assert take(frame.reset_index()) == TABLE == take(TABLE.to_pandas().rename_axis("row"))


def test_pandas_values_that_do_not_fit() -> None:
    for values, t in (([1.5, None], pa.int64()), (["a"], pa.int64()), ([1], pa.string()), ([2**40], pa.int32())):
        with pytest.raises(SchemaMismatchError, match="column 'x'"):
            take(pd.DataFrame({"x": values}), pa.schema([("x", t)]))


# Nulls


def test_nulls_name_column_and_row() -> None:
    table = pa.table({"id": pa.chunked_array([[1, 2], [3, None]])})
    with pytest.raises(NullKeyError, match="'id' is null in row 3") as error:
        conform(table, SCHEMA, columns_required=["id"])
    assert error.value.context == {"column": "id", "row": 3}
    lying = pa.Table.from_arrays([pa.array([None], pa.int64())], schema=pa.schema([SCHEMA.field("id")]))
    with pytest.raises(NullKeyError):
        conform(lying, lying.schema)
    with pytest.raises(NullKeyError):
        conform(pa.table({"id": pa.nulls(1)}), SCHEMA, columns_required=["id"])
    with pytest.raises(NullKeyError):
        conform(pa.table({"id": pa.DictionaryArray.from_arrays([0], pa.array([None], pa.int64()))}), SCHEMA,
                columns_required=["id"])  # fmt: skip


@pytest.mark.parametrize(
    ("t", "good", "bad"),
    [
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), [[1], None, []], [[1], [None]]),
        (pa.struct([pa.field("a", pa.int8(), nullable=False)]), [{"a": 1}, None], [{"a": None}]),
        (pa.map_(pa.string(), pa.field("value", pa.int8(), nullable=False)), [[("a", 1)], None], [[("a", None)]]),
        (
            pa.list_(pa.struct([pa.field("a", pa.list_(pa.field("item", pa.int8(), nullable=False)))])),
            [[{"a": [1]}, None, {"a": None}], None],
            [[{"a": [1, None]}]],
        ),
    ],
    ids=str,
)
def test_nulls_inside(t: pa.DataType, good: list[Any], bad: list[Any]) -> None:
    assert one(good, t) == good
    assert one(pa.array(bad + good, t)[len(bad) :], t) == good
    nullable = pa.array(bad) if not pa.types.is_map(t) else pa.array(bad, pa.map_(pa.string(), pa.int64()))
    for data in (bad, good + bad, nullable, pa.array(bad, t)):
        with pytest.raises(NullKeyError, match="'x'"):
            one(data, t)


def test_a_null_child_of_a_null_parent_is_no_null() -> None:
    child = pa.array([1, None, 3], pa.int64())
    struct = pa.StructArray.from_arrays([child], ["a"], mask=pa.array([False, True, False]))
    t = pa.struct([pa.field("a", pa.int8(), nullable=False)])
    assert one(struct, t) == [{"a": 1}, None, {"a": 3}]
    assert one(struct[1:], t) == [None, {"a": 3}]
    lists = pa.ListArray.from_arrays([0, 2, 3], struct)
    assert one(lists, pa.list_(t)) == [[{"a": 1}, None], [{"a": 3}]]
    with pytest.raises(NullKeyError):
        one(pa.StructArray.from_arrays([child], ["a"]), t)


# Keys

KEY = pa.schema([pa.field("id", pa.int64(), nullable=False)])
PAIR = pa.schema([pa.field("region", pa.string(), nullable=False), pa.field("id", pa.int64(), nullable=False)])


@pytest.mark.parametrize(
    "keys",
    [
        [3, 1],
        (3, 1),
        [{"id": 3}, {"id": 1}],
        pa.table({"id": [3, 1]}),
        pa.table({"id": pa.array([3, 1], pa.int32())}),
        pa.array([3, 1]),
        pa.chunked_array([[3], [1]]),
        np.array([3, 1]),
        pd.Series([3, 1]),
        pl.Series([3, 1]),
        pl.DataFrame({"id": [3, 1]}),
        pd.DataFrame({"id": [3, 1]}),
        range(3, -1, -2),
        [pa.scalar(3), pa.scalar(1)],
        pa.table({"id": [3, 1]}).to_batches(),
        pa.table({"id": [3, 1]}).to_reader(),
    ],
    ids=lambda k: type(k).__name__,
)
def test_keys_of_one_column(keys: object) -> None:
    found = to_key_table(keys, KEY, what="lookup")
    assert found.schema == KEY
    assert found.column("id").to_pylist() == [3, 1]
    if isinstance(keys, list | tuple):
        assert to_key_table(iter(keys), KEY, what="lookup") == found


def test_scalars_of_arrow_are_checked_as_values_are() -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))])
    rows = [
        {"id": pa.scalar(1), "at": pa.scalar(5, pa.timestamp("us"))},
        {"id": pa.scalar(None, pa.int64()), "at": None},
    ]
    at = dt.datetime(1970, 1, 1, microsecond=5)
    assert to_arrow_table(rows, schema, what="rows").to_pylist() == [{"id": 1, "at": at}, {"id": None, "at": None}]
    for wrong, why in [(pa.scalar("1"), "a text is not a number"), (pa.scalar(1.5), "not a whole number")]:
        with pytest.raises(SchemaMismatchError, match=why):
            to_arrow_table([{"id": wrong}], schema, what="rows")


def test_one_key() -> None:
    for key in (3, {"id": 3}, np.int64(3), pa.scalar(3)):
        assert to_key_table(key, KEY, what="get").to_pylist() == [{"id": 3}]
    name = pa.schema([pa.field("name", pa.string(), nullable=False)])
    assert to_key_table("abc", name, what="get").to_pylist() == [{"name": "abc"}]
    assert to_key_table({"id": 1, "region": "n"}, PAIR, what="get").to_pylist() == [{"region": "n", "id": 1}]
    assert to_key_table([], PAIR, what="lookup").schema == PAIR


@pytest.mark.parametrize(
    ("keys", "schema", "error"),
    [
        ([1], PAIR, SchemaMismatchError),
        ([{"id": 1}], PAIR, SchemaMismatchError),
        ([{"id": 1}, 2], KEY, SchemaMismatchError),
        ([None], KEY, NullKeyError),
        (None, KEY, NullKeyError),
        (["a"], KEY, SchemaMismatchError),
        (pa.array(["a"]), KEY, SchemaMismatchError),
        (pa.table({"v": ["a"]}), KEY, ColumnNotFoundError),
        ([{"id": 1, "v": 2}], KEY, ColumnNotFoundError),
    ],
    ids=str,
)  # fmt: skip
def test_refused_keys(keys: object, schema: pa.Schema, error: type[LakeheadError]) -> None:
    with pytest.raises(error) as found:
        to_key_table(keys, schema, what="lookup in shop.orders")
    assert type(found.value) is error
    assert str(found.value).startswith("lookup in shop.orders: ")


def test_extra_columns_of_deletes_are_dropped() -> None:
    rows = [{"v": object(), "id": 1, "__offset": 9, "region": "n"}]
    assert to_key_table(rows, PAIR, what="delete", allow_extra=True).to_pylist() == [{"region": "n", "id": 1}]
    columns = {"v": [1], "__bucket": [1], "id": [1], "region": ["n"]}
    for data in (pa.table(columns), pd.DataFrame(columns)):
        assert to_key_table(data, PAIR, what="delete", allow_extra=True).to_pylist() == [{"region": "n", "id": 1}]
    with pytest.raises(SchemaMismatchError, match="lacks 'region'"):
        to_key_table([{"id": 1, "v": 2}], PAIR, what="delete", allow_extra=True)
