"""Results on standard output: every value comes out, whatever it is and however deep it lies."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest

from lakehead.cli.output import json_text, rows_of, write_arrow_table, write_rows_json, write_table

NANOSECOND = 1_577_836_800_123_456_789
"""Of 2020-01-01."""
FINE = "2020-01-01T00:00:00.123456789"
NS, US = pa.timestamp("ns"), pa.timestamp("us")
YEAR_10000 = 253_402_300_800_000_000
MOMENTS: dict[str, tuple[pa.Array, str]] = {
    "nanoseconds": (pa.array([NANOSECOND], NS), FINE),
    "nanoseconds in a zone": (pa.array([NANOSECOND], pa.timestamp("ns", "UTC")), FINE + "Z"),
    "nanoseconds of a day": (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
    "a year beyond Python's": (pa.array([YEAR_10000], US), "10000-01-01T00:00:00"),
    "no end": (pa.array([2**63 - 1], US), "infinity"),
    "no beginning, in a zone": (pa.array([1 - 2**63], pa.timestamp("us", "UTC")), "-infinity"),
    "no last day": (pa.array([2**31 - 1], pa.int32()).view(pa.date32()), "infinity"),
}


def list_of(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays([0, 1], values)


def struct_of(values: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([values], ["x"])


def twice_of(values: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([values, values], ["x", "x"])


NESTS: dict[str, tuple[Any, Any]] = {
    "column": (lambda a: a, lambda v: v),
    "list": (list_of, lambda v: [v]),
    "large list": (lambda a: pa.LargeListArray.from_arrays([0, 1], a), lambda v: [v]),
    "list view": (lambda a: pa.ListViewArray.from_arrays([0], [1], a), lambda v: [v]),
    "list of a fixed size": (lambda a: pa.FixedSizeListArray.from_arrays(a, 1), lambda v: [v]),
    "struct": (struct_of, lambda v: {"x": v}),
    "names that come twice": (twice_of, lambda v: {"x": v, "x_1": v}),
    "map": (lambda a: pa.MapArray.from_arrays([0, 1], pa.array(["k"]), a), lambda v: [["k", v]]),
    "keys of a map": (lambda a: pa.MapArray.from_arrays([0, 1], a, pa.array([1])), lambda v: [[v, 1]]),
    "list of structs": (lambda a: list_of(struct_of(a)), lambda v: [{"x": v}]),
    "dictionary": (lambda a: pa.DictionaryArray.from_arrays(pa.array([0]), a), lambda v: v),
    "union": (lambda a: pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [a]), lambda v: v),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_moments_that_python_lacks_are_texts_at_any_depth(
    moment: str, nest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (values, text), (nested, shown) = MOMENTS[moment], NESTS[nest]
    table = pa.table({"c": nested(values)})
    write_rows_json(table)
    assert json.loads(capsys.readouterr().out) == {"c": shown(text)}
    write_arrow_table(table)
    assert text in capsys.readouterr().out


def test_nulls_stay_at_any_depth() -> None:
    t = pa.struct([("l", pa.list_(NS)), ("m", pa.map_(pa.string(), NS))])
    rows = [None, {"l": None, "m": None}, {"l": [None], "m": [("k", None)]}]
    assert [r["c"] for r in rows_of(pa.table({"c": pa.array(rows, t)}))] == rows


def test_what_python_has_stays_as_it_is() -> None:
    rows = [{"c": {"n": 1, "b": b"\x00", "l": [1.5, None]}}, {"c": None}]
    assert rows_of(pa.Table.from_pylist(rows)) == rows
    assert json_text(rows[0]) == '{"c":{"n":1,"b":"00","l":[1.5,null]}}'


def test_floats_that_json_lacks_are_texts_at_any_depth() -> None:
    lacking = [math.nan, math.inf, -math.inf]
    assert json.loads(json_text({"c": lacking, "m": [(math.inf, {"x": math.nan})]})) == {
        "c": ["NaN", "Infinity", "-Infinity"],
        "m": [["Infinity", {"x": "NaN"}]],
    }


def test_a_title_is_one_line_above_a_narrow_table(capsys: pytest.CaptureFixture[str]) -> None:
    title = "lakehead:///a/path/that/is/much/longer/than/all/of/the/columns/of/its/table/are.sock"
    write_table(["n"], [[1]], title=title)
    assert capsys.readouterr().out.splitlines()[0] == title
