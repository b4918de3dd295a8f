"""Random SQL filters keep the rows DuckDB keeps, also after a trip over the wire; hostile bytes are refused."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable
from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakehead.errors import InvalidPredicateError
from lakehead.predicate import Predicate, parse_predicate

COLUMNS: dict[str, tuple[pa.DataType, list[object], list[str]]] = {
    "i8": (pa.int8(), [None, -128, -1, 0, 1, 2, 127], ["0", "1", "-1", "127", "1.5", "1e0", "300", "null"]),
    "i": (
        pa.int64(),
        [None, -(2**53) - 1, 0, 1, 2, 2**53 + 1],
        ["0", "1", "2.5", "9007199254740993", "9007199254740992e0", "null"],
    ),
    "f": (
        pa.float64(),
        [None, float("nan"), -0.0, 0.0, 1.0, 2.5, float("inf")],
        ["0", "1", "2.5", "1e300", "'nan'", "null"],
    ),
    "g": (pa.float32(), [None, float("nan"), 0.1, 1.0, 2.5], ["0.1", "1e-1", "1", "2.5", "null"]),
    "d": (
        pa.decimal128(12, 2),
        [None, Decimal("0.00"), Decimal("1.00"), Decimal("1.01")],
        ["0", "1", "1.005", "1.01", "99999999999", "null"],
    ),
    "s": (pa.string(), [None, "", "a", "ab", "å", "b%"], ["''", "'a'", "'å'", "'b%'", "null"]),
    "day": (
        pa.date32(),
        [None, dt.date(1969, 12, 31), dt.date(2026, 1, 1)],
        ["'2026-01-01'", "date '1969-12-31'", "timestamp '2026-01-01 10:00:00'"],
    ),
    "ts": (
        pa.timestamp("us"),
        [None, dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 1, 10)],
        ["'2026-01-01'", "'2026-01-01 10:00:00'", "date '2026-01-01'"],
    ),
    "ok": (pa.bool_(), [None, True, False], ["true", "false", "null"]),
}
SCHEMA = pa.schema([("id", pa.int64()), *((name, t) for name, (t, _, _) in COLUMNS.items())])
NUMBERS = ["i8", "i", "f", "g", "d"]
OPERATORS = st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "is distinct from", "is not distinct from"])
CON = duckdb.connect()


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 8))
    columns = [draw(st.lists(st.sampled_from(v), min_size=rows, max_size=rows)) for _, v, _ in COLUMNS.values()]
    return pa.table([range(rows), *columns], schema=SCHEMA)


@st.composite
def leaves(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(list(COLUMNS)))
    literal = st.sampled_from(COLUMNS[name][2])
    number, negation = st.sampled_from(NUMBERS), st.sampled_from(["", "not"])
    pattern = st.sampled_from(["'a%'", "'%'", "'_'", "'A_'", "'b!%'"])
    kinds: dict[str, Callable[[], str]] = {
        "compare": lambda: f"{name} {draw(OPERATORS)} {draw(literal)}",
        "flipped": lambda: f"{draw(literal)} {draw(OPERATORS)} {name}",
        "in": lambda: f"{name} {draw(negation)} in ({', '.join(draw(st.lists(literal, min_size=1, max_size=3)))})",
        "between": lambda: f"{name} {draw(negation)} between {draw(literal)} and {draw(literal)}",
        "null": lambda: f"{name} is {draw(negation)} null",
        "columns": lambda: f"{draw(number)} {draw(OPERATORS)} {draw(number)}",
        "like": lambda: f"s {draw(st.sampled_from(['like', 'not like', 'ilike']))} {draw(pattern)}",
        "bare": lambda: "ok",
    }
    return kinds[draw(st.sampled_from(list(kinds)))]()


CONDITIONS = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.builds("not ({})".format, inner),
        st.builds("({}) and ({})".format, inner, inner),
        st.builds("({}) or ({})".format, inner, inner),
        st.builds("({}) is {}".format, inner, st.sampled_from(["null", "true", "not true", "false", "not false"])),
    ),
    max_leaves=5,
)


@given(tables(), CONDITIONS)
def test_a_filter_keeps_the_rows_duckdb_keeps(table: pa.Table, text: str) -> None:
    with CON.cursor() as cursor:
        cursor.register("rows_", table)
        cursor.execute("create or replace temp table kept as select * from rows_")
        wanted = [r[0] for r in cursor.execute(f"select id from kept where {text} order by id").fetchall()]
    predicate = parse_predicate(text, SCHEMA)
    assert predicate.filter(table)["id"].to_pylist() == wanted
    again = Predicate.from_bytes(predicate.to_bytes(), SCHEMA)
    assert again.filter(table)["id"].to_pylist() == wanted
    assert str(again.arrow) == str(predicate.arrow)
    assert (again.columns, again.bounds) == (predicate.columns, predicate.bounds)


@given(tables(), CONDITIONS, st.data())
def test_rows_that_are_gone_are_not_kept(table: pa.Table, text: str, data: st.DataObject) -> None:
    predicate = parse_predicate(text, SCHEMA)
    there = st.lists(st.booleans(), min_size=table.num_rows, max_size=table.num_rows)
    live = pa.array(data.draw(there), pa.bool_())
    wanted = predicate.filter(table.filter(live))["id"].to_pylist()
    assert predicate.filter(table, live)["id"].to_pylist() == wanted
    for batch in table.combine_chunks().to_batches():
        kept = predicate.filter(batch, live)
        assert kept["id"].to_pylist() == wanted and kept.schema == SCHEMA


def test_a_condition_is_not_asked_of_rows_that_are_gone() -> None:
    batch = pa.record_batch({"n": pa.array([1, 2**63 - 1, 3, None]), "s": list("abcd")})
    predicate = parse_predicate("n + 1 > 2", batch.schema)
    with pytest.raises(InvalidPredicateError, match="overflow"):
        predicate.filter(batch)
    with pytest.raises(InvalidPredicateError, match="overflow"):
        predicate.filter(batch, pa.array([True, True, False, True]))
    assert predicate.filter(batch, pa.array([True, False, True, True]))["s"].to_pylist() == ["c"]


def test_a_condition_without_columns() -> None:
    batch = pa.record_batch({"n": [1, 2]})
    assert parse_predicate("1 = 1", batch.schema).filter(batch) == batch
    assert parse_predicate("null = 1", batch.schema).filter(batch).num_rows == 0
    assert parse_predicate("1 = 1", batch.schema).filter(batch.select([])).num_rows == 2


@given(CONDITIONS, st.data())
def test_damaged_bytes_are_refused_or_a_predicate(text: str, data: st.DataObject) -> None:
    raw = bytearray(parse_predicate(text, SCHEMA).to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for form in (bytes(raw), bytes(raw[: data.draw(st.integers(0, len(raw)))]), data.draw(st.binary(max_size=100))):
        with contextlib.suppress(InvalidPredicateError):
            Predicate.from_bytes(form, SCHEMA)
