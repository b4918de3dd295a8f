"""What is added to a keyed table: exact sums, and the order of floats that Spark has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.client.staging import JobBatch
from lakehead.errors import ColumnNotFoundError, InvalidRequestError, SchemaMismatchError
from lakehead.spark.combine import Combine
from lakehead.spark.layers import Layers

NAN = float("nan")
MOST = 2**63 - 1


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def column(t: pa.DataType, *values: Any) -> pa.Table:
    schema = pa.schema([("k", pa.int64()), ("v", t)])
    return pa.Table.from_arrays([pa.array([1] * len(values), pa.int64()), pa.array(values, t)], schema=schema)


def of_parts(way: str, t: pa.DataType, *parts: tuple[Any, ...]) -> Any:
    """As tasks have it of some batches each, and the driver of some tasks."""
    combine = Combine("a.t", ("k",), {"v": way})
    of_tasks = [pa.Table.from_batches(combine(column(t, *part).to_batches(max_chunksize=1))) for part in parts]
    return combine.rows(pa.concat_tables(of_tasks))["v"][0].as_py()


def accumulated(con: lh.Connection, way: Any, t: pa.DataType, *parts: tuple[Any, ...], of_column: Any = None) -> Any:
    """As a table has it of micro-batches."""
    con.create_table("a.t", column(of_column or t).schema, primary_key="k", if_not_exists=True)
    for number, part in enumerate(parts):
        out = Layers(con, JobBatch("query 1", number))
        out.accumulate("a.t", column(t, *part), **{way: "v"})
        out.write()
    return con.table("a.t").scan().to_arrow()["v"][0].as_py()


def cuts(values: tuple[Any, ...]) -> Iterator[list[tuple[Any, ...]]]:
    for order in itertools.permutations(values):
        for at in range(1, len(order)):
            yield [order[:at], order[at:]]
        yield [order]


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_its_column_does_not_hold_is_refused_and_nothing_is_written(
    con: lh.Connection, bits: int, sign: int
) -> None:
    t = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    most = 2 ** (bits - 1) - 1
    con.create_table("a.t", column(t).schema, primary_key="k").upsert({"k": 1, "v": 2 * sign})
    for number, part in enumerate([(sign * most,), (sign * most, sign * 5), (sign * most,) * 3]):
        out = Layers(con, JobBatch("query 1", number))
        out.append("a.log", column(t, *part))
        out.accumulate("a.t", column(t, *part), sum=["v"])
        with pytest.raises(SchemaMismatchError, match=r"'v'.*double") as raised:
            out.write()
        assert raised.value.context["column"] == "v"
    assert con.table("a.t").get(1) == {"k": 1, "v": 2 * sign}
    assert con.table("a.log").scan().count() == 0


def test_what_a_sum_is_on_the_way_does_not_matter(con: lh.Connection) -> None:
    """Neither within a micro-batch nor with the stored value, which the sum of the new ones leads back."""
    for parts in cuts((MOST, 5, -6)):
        assert of_parts("sum", pa.int64(), *parts) == MOST - 1
    assert accumulated(con, "sum", pa.int64(), (-5,), (MOST, 5), (1, -1, None)) == MOST


def test_small_whole_numbers_have_the_range_of_their_column(con: lh.Connection) -> None:
    assert accumulated(con, "sum", pa.int8(), (100, -100, 27), (100,), of_column=pa.int16()) == 127


@pytest.mark.parametrize("scale", [0, 2, 38])
def test_decimals_that_overflow(con: lh.Connection, scale: int) -> None:
    t = pa.decimal128(38, scale)
    most = Decimal((0, (9,) * 38, -scale))
    for parts in ([(most, most)], [(most,), (most,)], [(most,) * 4], [(most.copy_negate(), most.copy_negate())]):
        with pytest.raises(SchemaMismatchError, match="'v'"):
            of_parts("sum", t, *parts)
    assert accumulated(con, "sum", t, (most,)) == most
    with pytest.raises(SchemaMismatchError, match="'v'"):
        accumulated(con, "sum", t, (None,), (most, most))
    assert con.table("a.t").get(1) == {"k": 1, "v": most}


def test_decimals_fit_the_precision_of_their_column(con: lh.Connection) -> None:
    t = pa.decimal128(3, 2)
    assert accumulated(con, "sum", t, (Decimal("9.99"),), (Decimal("9.99"), Decimal("-9.99"))) == Decimal("9.99")
    with pytest.raises(SchemaMismatchError, match=r"decimal128\(3, 2\)"):
        accumulated(con, "sum", t, (None,), (None,), (Decimal("0.01"),))
    con.drop_table("a.t")
    assert accumulated(con, "sum", t, (Decimal("9.99"),) * 3, of_column=pa.decimal128(9, 4)) == Decimal("29.9700")


@pytest.mark.parametrize("of_column", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("t", [pa.int32(), pa.int64(), pa.float32()])
def test_sums_in_floats(con: lh.Connection, t: pa.DataType, of_column: pa.DataType) -> None:
    assert accumulated(con, "sum", t, (1, 2, None), (3,), of_column=of_column) == 6.0


def test_what_a_float_does_not_hold_is_refused(con: lh.Connection) -> None:
    with pytest.raises(SchemaMismatchError):
        accumulated(con, "sum", pa.int64(), (2**53, 1), of_column=pa.float64())


# ---- least and greatest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [pa.float32(), pa.float64()])
@pytest.mark.parametrize(
    ("values", "least", "greatest"),
    [
        ((NAN, 1.0), 1.0, NAN),
        ((NAN, 1.0, None), 1.0, NAN),
        ((NAN, math.inf), math.inf, NAN),
        ((NAN, -math.inf), -math.inf, NAN),
        ((NAN, None), NAN, NAN),
        ((NAN, NAN), NAN, NAN),
        ((2.0, None, 1.0), 1.0, 2.0),
        ((None, None), None, None),
        ((0.0, -0.0), 0.0, 0.0),
    ],
)
def test_floats_are_ordered_as_in_spark(
    con: lh.Connection, t: pa.DataType, values: tuple[Any, ...], least: Any, greatest: Any
) -> None:
    for parts in cuts(values):
        for way, expected in (("min", least), ("max", greatest)):
            for found in (of_parts(way, t, *parts), accumulated(con, way, t, *parts)):
                assert found == expected or (found != found and expected != expected), (way, parts)
            con.drop_table("a.t")


def test_nan_is_of_its_key_and_column_alone() -> None:
    rows = pa.table({"k": [1, 1, 2, 2], "a": [NAN, 1.0, 2.0, 3.0], "b": [1.0, 2.0, NAN, NAN], "c": [4, 3, 2, 1]})
    found = Combine("a.t", ("k",), {"a": "max", "b": "max", "c": "max"}).rows(rows).to_pylist()
    assert str(found) == "[{'k': 1, 'a': nan, 'b': 2.0, 'c': 4}, {'k': 2, 'a': 3.0, 'b': nan, 'c': 2}]"


# ---- what cannot be accumulated --------------------------------------------------------------------------------------

LISTS, STRUCTS = pa.list_(pa.int64()), pa.struct([("a", pa.int64())])


@pytest.mark.parametrize(
    ("way", "t"),
    [
        *(("sum", t) for t in (pa.string(), pa.binary(), pa.bool_(), pa.date32(), pa.timestamp("us"), LISTS, STRUCTS)),
        *((way, t) for way in ("min", "max") for t in (LISTS, STRUCTS, pa.map_(pa.int64(), pa.int64()))),
        ("sum", pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_types_without_a_sum_or_an_order_are_refused_by_the_call(con: lh.Connection, way: Any, t: pa.DataType) -> None:
    with pytest.raises(SchemaMismatchError, match=f"'v'.*has no {way}"):
        accumulated(con, way, t, (None,), of_column=pa.int64())
    con.create_table("a.other", column(t.value_type if pa.types.is_dictionary(t) else t).schema, primary_key="k")
    out = Layers(con, JobBatch("query 1"))
    out.accumulate("a.other", column(pa.null(), None), **{way: "v"})
    with pytest.raises(SchemaMismatchError, match=f"'v'.*has no {way}"):
        out.write()
    with pytest.raises(SchemaMismatchError):
        Layers(con, JobBatch("query 1")).accumulate("a.new", column(t, None), primary_key=["k"], **{way: "v"})
    assert con.tables("a") == ["a.other", "a.t"] and con.table("a.t").scan().count() == 0


@pytest.mark.parametrize("way", ["min", "max"])
@pytest.mark.parametrize(
    "t", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_as_other_libraries_have_it(con: lh.Connection, way: str, t: pa.DataType) -> None:
    assert accumulated(con, way, t, ("b", "a"), ("c", None), of_column=pa.string()) == {"min": "a", "max": "c"}[way]


def test_columns_that_are_not_there_or_not_to_be_added_to(con: lh.Connection) -> None:
    con.create_table("a.t", column(pa.int64()).schema, primary_key="k")
    out, rows = Layers(con, JobBatch("query 1")), column(pa.int64(), 1)
    for text in ("clicks", ["clicks"]):
        with pytest.raises(ColumnNotFoundError, match="'clicks'"):
            out.accumulate("a.t", rows.rename_columns(["k", "click"]), sum=text)
    with pytest.raises(SchemaMismatchError, match="'v' twice"):
        out.accumulate("a.t", rows.append_column("v", rows["v"]), sum="v")
    with pytest.raises(InvalidRequestError, match="each named once"):
        out.accumulate("a.t", rows, sum="v", max="v")
    out.accumulate("a.t", rows, sum=["k", "v"])
    with pytest.raises(InvalidRequestError, match="key"):
        out.write()


def test_names_are_sparks_without_regard_to_case(con: lh.Connection) -> None:
    con.create_table("a.cased", {"Id": pa.int64(), "n": pa.int64(), "M": pa.int64()}, primary_key="Id")
    rows = pa.table({"ID": [1, 1, 2], "N": [1, 2, 3], "m": [5, 4, 3]})
    for number, named in enumerate((("n", "M"), ("N", "m"))):
        out = Layers(con, JobBatch("query 1", number))
        out.accumulate("a.cased", rows, sum=named[0], min=[named[1]])
        out.write()
    assert con.table("a.cased").get(1) == {"Id": 1, "n": 6, "M": 4}
    out = Layers(con, JobBatch("query 1", 2))
    out.accumulate("a.cased", rows.drop(["m"]), sum="N")
    with pytest.raises(InvalidRequestError, match="put all of it"):  # both would add to what the table has now
        out.accumulate("a.cased", rows.drop(["m"]).rename_columns(["Id", "n"]), sum="n")
    with pytest.raises(InvalidRequestError, match="each named once"):
        out.accumulate("a.cased", rows, sum="n", min="N")
