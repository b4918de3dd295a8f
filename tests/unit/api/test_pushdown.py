"""What DuckDB pushes down means what DuckDB means."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.api.pushdown import as_duckdb_means
from lakehead.errors import SqlError

NAN = float("nan")
VALUES = [1.0, 9.0, NAN, -0.0, 0.0, None]
ROWS = pa.table({"f": VALUES, "p": [{"g": v} for v in VALUES], "i": range(6)})
F, G = pc.field("f"), pc.field("p", "g")


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (F > 7.0, [1, 2]),
        (F >= 7.0, [1, 2]),
        (G > 7.0, [1, 2]),
        (F < 9.0, [0, 3, 4]),
        (F != 1.0, [1, 2, 3, 4]),
        (F.isin([0.0, 1.0]), [0, 3, 4]),
        (G.isin([-0.0, NAN]), [2, 3, 4]),
        (F.is_nan(), [2]),
        (~F.is_nan(), [0, 1, 3, 4]),
        (F.is_null() | (F > 7.0), [1, 2, 5]),
        (F.is_valid() & (pc.field("i") > 1), [2, 3, 4]),
        (pc.field("i") > 4, [5]),
    ],
)
def test_floats_are_in_duckdbs_order(where: Any, wanted: list[int]) -> None:
    found = ROWS.filter(as_duckdb_means(where, ROWS.schema))
    assert found["i"].to_pylist() == wanted


ALL = pc.scalar(True)  # what DuckDB makes of "f <= NaN", and of "not (f > NaN)"


@pytest.mark.parametrize(
    "where", [ALL, (pc.field("i") < 2) & ALL, (F >= 1.0) & ALL, (pc.field("i") < 2) | ALL, ~((F < 1.0) | ALL)]
)
def test_which_rows_are_at_most_nan_is_not_guessed(where: Any) -> None:
    with pytest.raises(SqlError, match="write that the column is not null instead of <= NaN"):
        as_duckdb_means(where, ROWS.schema)


def test_a_column_of_truths_is_compared_with_one() -> None:
    rows = pa.table({"b": [True, False, None], "i": range(3)})
    assert rows.filter(as_duckdb_means(pc.field("b") == ALL, rows.schema))["i"].to_pylist() == [0]


INSTANTS = pa.table({"z": pa.array([0, -1, 5, None], pa.timestamp("s", "+05:30")), "i": range(4)})
Z = pc.field("z")


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (lambda at: at(-1) >= Z, [1]),  # a microsecond before the first row
        (lambda at: at(1) > Z, [0, 1]),
        (lambda at: at(1) == Z, []),
        (lambda at: at(5_000_000) != Z, [0, 1]),
        (lambda at: Z.isin(pa.array([5_000_000, 1], pa.timestamp("us", "UTC"))), [2]),
    ],
)
def test_instants_are_not_rounded_to_the_columns_seconds(where: Any, wanted: list[int]) -> None:
    def at(microseconds: int) -> pc.Expression:
        return pc.scalar(pa.scalar(microseconds, pa.timestamp("us", "UTC")))

    assert INSTANTS.filter(as_duckdb_means(where(at), INSTANTS.schema))["i"].to_pylist() == wanted


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(SqlError, match="pushed down 'abs"):
        as_duckdb_means(pc.abs(F) > 1.0, ROWS.schema)
