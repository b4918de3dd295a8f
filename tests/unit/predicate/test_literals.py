"""Literals of times that are finer than their column, beside DuckDB."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest

from lakehead.predicate import parse_predicate

FINER = """
1970-01-01 00:00:00.4
1970-01-01 00:00:00.5
1970-01-01 00:00:00.499999999
1970-01-01 00:00:00.0004
1970-01-01 00:00:00.0005
1970-01-01 00:00:00.0010004
1970-01-01 00:00:00.0000014
1970-01-01 00:00:00.0000019
1970-01-01 00:00:01.999999999
1969-12-31 23:59:59.5
1969-12-31 23:59:59.6
1969-12-31 23:59:58.5
1969-12-31 23:59:59.9995
1969-12-31 23:59:59.9994
1969-12-31 23:59:59.9999995
""".strip()


@pytest.mark.parametrize("t", ["s", "ms", "us", "us UTC", "ms UTC", "day"])
@pytest.mark.parametrize("text", FINER.splitlines())
def test_times_finer_than_their_column_mean_what_they_mean_in_duckdb(t: str, text: str) -> None:
    unit, _, zone = t.partition(" ")
    numbers = pa.array([-2000, -1000, -2, -1, 0, 1, 2, 1000], pa.int32())
    kind = pa.date32() if unit == "day" else pa.timestamp(unit, zone or None)
    x = numbers.cast(kind) if unit == "day" else numbers.cast(pa.int64()).cast(kind)
    rows = pa.table({"n": numbers, "x": x})
    literals = [f"'{text}'", f"{'timestamptz' if zone else 'timestamp'} '{text}'"]
    conditions = ("x = {0}", "x < {0}", "x >= {0}", "x in ({0})", "x is distinct from {0}", "x between {0} and {0}")
    with duckdb.connect() as duck:
        duck.execute("set timezone = 'UTC'")
        duck.execute("create table kept as select * from rows")
        for said in (condition.format(literal) for condition in conditions for literal in literals):
            wanted = [n for (n,) in duck.execute(f"select n from kept where {said} order by n").fetchall()]
            assert parse_predicate(said, rows.schema).filter(rows)["n"].to_pylist() == wanted, said


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("text", ["00:00:00.0000004", "00:00:00.0000019", "00:00:00.0014", "23:59:59.9999999"])
def test_times_of_day_finer_than_their_column(unit: str, text: str) -> None:
    kind = pa.time64(unit) if unit == "us" else pa.time32(unit)
    rows = pa.table({"x": pa.array([0, 1, 2], kind)})
    with duckdb.connect() as duck:
        duck.execute("create table kept as select * from rows")
        for said in (f"x = '{text}'", f"x > time '{text}'", f"x <= '{text}'"):
            wanted = duck.execute(f"select count(*) from kept where {said}").fetchall()[0][0]
            assert parse_predicate(said, rows.schema).filter(rows).num_rows == wanted, said


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("cast", ["timestamp", "timestamptz", "date"])
def test_a_column_of_any_unit_and_zone_is_cast(zone: str | None, unit: str, cast: str) -> None:
    rows = pa.table(
        {"x": pa.array([0, 10**9], pa.timestamp("s")).cast(pa.timestamp(unit)).cast(pa.timestamp(unit, zone))}
    )
    assert parse_predicate(f"x::{cast} < '1999-01-01'", rows.schema).filter(rows).num_rows == 1


@pytest.mark.parametrize("t", [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.date32()], ids=str)
@pytest.mark.parametrize("other", ["timestamp '1970-01-02 00:00:00'", "date '1970-01-02'", "fine", "'1970-01-02'"])
@pytest.mark.parametrize("text", ["1970-01-01 00:00:00.4", "1970-01-01 12:00:00", "1970-01-01 00:00:00.0005"])
def test_texts_beside_a_finer_type_are_of_that(t: pa.DataType, other: str, text: str) -> None:
    days = pa.array([0, 1, 2], pa.int32()).cast(pa.date32())
    rows = pa.table({"n": range(3), "x": days.cast(t), "fine": days.cast(pa.timestamp("us"))})
    with duckdb.connect() as duck:
        duck.execute("create table kept as select * from rows")
        for said in (f"x in ('{text}', {other})", f"x between '{text}' and {other}", f"x not in ({other}, '{text}')"):
            wanted = [n for (n,) in duck.execute(f"select n from kept where {said} order by n").fetchall()]
            assert parse_predicate(said, rows.schema).filter(rows)["n"].to_pylist() == wanted, said
