"""Predicates: Arrow expressions, the wire form, bounds and filtering."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from lakehead.errors import InvalidPredicateError
from lakehead.predicate import Bound, Predicate, parse_predicate

SCHEMA = pa.schema(
    [
        pa.field("i", pa.int64(), nullable=False, metadata={"k": "v"}),
        ("i8", pa.int8()),
        ("f", pa.float64()),
        ("d", pa.decimal128(12, 2)),
        ("city", pa.string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("ns", pa.timestamp("ns")),
        ("ok", pa.bool_()),
        ("s", pa.struct([("x", pa.int64())])),
        ("l", pa.list_(pa.int64())),
    ],
    metadata={"table": "t"},
)
X = pc.field("i")


@pytest.mark.parametrize(
    ("where", "bounds"),
    [
        ("i > 3", [Bound("i", ">", 3)]),
        ("3 > i", [Bound("i", "<", 3)]),
        ("i >= 1.5 and i8 <= 7", [Bound("i", ">", 1), Bound("i8", "<=", 7)]),
        ("i = 1 or i = 2", []),
        ("(i = 1 and f < 2) and not (i8 > 3)", [Bound("i", "==", 1), Bound("f", "<", 2.0)]),
        ("f > 2 and f >= 1", [Bound("f", ">", 2.0), Bound("f", ">=", 1.0)]),
        ("f <= 'nan'", []),
        ("d > 1.005", [Bound("d", ">", Decimal("1.00"))]),
        ("i between 1 and 5", [Bound("i", ">=", 1), Bound("i", "<=", 5)]),
        ("i in (1, 2, null)", [Bound("i", "in", (1, 2))]),
        ("i not in (1, 2)", []),
        ("city is null", [Bound("city", "is_null", None)]),
        ("city is not null", [Bound("city", "not_null", None)]),
        ("i8 < 1000", [Bound("i8", "not_null", None)]),
        ("city like 'Os%o'", [Bound("city", ">=", "Os"), Bound("city", "<", "Ot")]),
        ("city ilike 'Os%o'", []),
        ("starts_with(city, 'Os')", [Bound("city", ">=", "Os"), Bound("city", "<", "Ot")]),
        ("day >= '2026-01-01'", [Bound("day", ">=", dt.date(2026, 1, 1))]),
        ("at < '2026-01-01'", [Bound("at", "<", dt.datetime(2026, 1, 1, tzinfo=dt.UTC))]),
        ("ns < '2026-01-01'", []),
        ("ok and i <> 3", [Bound("ok", "==", True)]),
        ("not ok", [Bound("ok", "==", False)]),
        ("s.x > 3", []),
        ("i + 1 > 3", []),
        ("cast(i as double) > 3.5", []),
        ((X > 3) & pc.greater_equal(pc.scalar(5), X), [Bound("i", ">", 3), Bound("i", "<=", 5)]),
        (X.isin([1, 2]), [Bound("i", "in", (1, 2))]),
        (X.isin([1, None]), []),
        (X.is_null(), [Bound("i", "is_null", None)]),
        (pc.field("f").is_null(nan_is_null=True), []),
        (~pc.field("f").is_null(), [Bound("f", "not_null", None)]),
        (pc.field("f") > float("nan"), []),
        (X > 1.5, []),
        (X > 2.0, [Bound("i", ">", 2)]),
        (pc.field("ok"), [Bound("ok", "==", True)]),
        ((X > 3) | (X < 1), []),
        (~(X > 3), []),
        (pc.field("s", "x") == 3, []),
    ],
)
def test_bounds_are_necessary_conditions_of_top_level_conjuncts(
    where: str | pc.Expression, bounds: list[Bound]
) -> None:
    predicate = parse_predicate(where, SCHEMA)
    assert list(predicate.bounds) == bounds
    again = Predicate.from_bytes(predicate.to_bytes(), SCHEMA)
    assert again.bounds == predicate.bounds
    assert again.columns == predicate.columns


def test_columns_are_the_top_level_ones_sorted() -> None:
    assert parse_predicate("s.x > i and city is null or l is null", SCHEMA).columns == ("city", "i", "l", "s")
    assert parse_predicate(pc.field("s", "x") > pc.field("i"), SCHEMA).columns == ("i", "s")


@pytest.mark.parametrize(
    "where",
    [
        3,
        None,
        b"i > 3",
        pc.field("nope") > 3,
        pc.field(0) > 3,
        X,
        X + 1,
        pc.field("city") > 3,
        pc.field("s", "q") == 1,
        pc.field("l") == 3,
        pc.less(X, pc.Expression._call("random", [])),
    ],
)
def test_what_is_no_condition_on_the_schema_is_refused(where: str) -> None:
    with pytest.raises(InvalidPredicateError):
        parse_predicate(where, SCHEMA)


def _rows(n: int) -> pa.Table:
    return pa.table(
        {
            "i": range(n),
            "i8": [k % 100 for k in range(n)],
            "f": [float(k) for k in range(n)],
            "d": [Decimal(k) for k in range(n)],
            "city": [f"c{k}" for k in range(n)],
            "day": [dt.date(2026, 1, 1)] * n,
            "at": [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)] * n,
            "ns": [dt.datetime(2026, 1, 1)] * n,
            "ok": [True] * n,
            "s": [{"x": k} for k in range(n)],
            "l": [[k] for k in range(n)],
        },
        schema=SCHEMA,
    )


@pytest.mark.parametrize("n", [0, 1, 1000])
@pytest.mark.parametrize("where", ["i % 2 = 1", "i < 0", "i >= 0", "s.x > 10 and city like 'c%'"])
def test_filter_keeps_order_schema_and_kind(n: int, where: str) -> None:
    predicate = parse_predicate(where, SCHEMA)
    table = pa.concat_tables([_rows(n), _rows(n)])
    kept = predicate.filter(table)
    assert isinstance(kept, pa.Table)
    assert kept.schema.equals(SCHEMA, check_metadata=True)
    keep = {"i % 2 = 1": lambda k: k % 2 == 1, "i < 0": lambda k: False, "i >= 0": lambda k: True}.get(
        where, lambda k: k > 10
    )
    assert kept["i"].to_pylist() == [k for k in range(n) if keep(k)] * 2
    batch = _rows(n).combine_chunks().to_batches()[0] if n else pa.RecordBatch.from_pylist([], schema=SCHEMA)
    some = predicate.filter(batch)
    assert isinstance(some, pa.RecordBatch)
    assert some.schema.equals(SCHEMA, check_metadata=True)
    assert some.column("i").to_pylist() == [k for k in range(n) if keep(k)]
    assert some.num_rows == 0 or some.column("l").to_pylist() == [[k] for k in range(n) if keep(k)]


def test_a_batch_without_the_columns_is_refused() -> None:
    with pytest.raises(InvalidPredicateError):
        parse_predicate("i > 3", SCHEMA).filter(pa.table({"x": [1]}))


def test_from_bytes_checks_the_schema_and_predicates_pickle() -> None:
    predicate = parse_predicate("i > 3 and city = 'x'", SCHEMA)
    with pytest.raises(InvalidPredicateError, match="city"):
        Predicate.from_bytes(predicate.to_bytes(), pa.schema([("i", pa.int64())]))
    with pytest.raises(InvalidPredicateError):
        Predicate.from_bytes(predicate.to_bytes(), pa.schema([("i", pa.string()), ("city", pa.string())]))
    assert pickle.loads(pickle.dumps(predicate)).arrow.equals(predicate.arrow)


LONG = "x" * 5000


@pytest.mark.parametrize(
    "where",
    [
        pc.binary_repeat(pc.field("s"), 10**12) == "x",
        pc.utf8_lpad(pc.field("s"), width=2**31 - 1) == "x",
        pc.replace_substring(pc.field("s"), "x", "xx") == "x",
        pc.coalesce(pc.field("s"), LONG) == "x",
        pc.strftime(pc.field("ts"), format=LONG) == "x",
    ],
    ids=str,
)
def test_filters_may_not_take_any_memory(where: pc.Expression) -> None:
    schema = pa.schema([("s", pa.string()), ("ts", pa.timestamp("us"))])
    with pytest.raises(InvalidPredicateError, match=r"is not one of the functions|a text of more than"):
        parse_predicate(where, schema)


def test_long_texts_may_be_compared_with() -> None:
    schema = pa.schema([("s", pa.string())])
    rows = pa.table({"s": [LONG, "y"]}, schema=schema)
    for where in (pc.field("s") == LONG, pc.field("s").isin([LONG]), pc.starts_with(pc.field("s"), LONG)):
        assert parse_predicate(where, schema).filter(rows).num_rows == 1


def test_hostile_bytes_are_refused() -> None:
    deep = X > 3
    for _ in range(600):
        deep = ~deep
    for data in (
        b"",
        b"ARROW1",
        b"\0" * 100,
        parse_predicate("i > 3", SCHEMA).to_bytes()[:-20],
        deep.__reduce__()[1][0].to_pybytes(),
    ):
        with pytest.raises(InvalidPredicateError):
            Predicate.from_bytes(data, SCHEMA)


def _tree(*pairs: tuple[str, str]) -> bytes:
    schema = pa.schema([("", pa.int64())], metadata=pa.KeyValueMetadata(list(pairs)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([3])], schema=schema))
    return sink.getvalue().to_pybytes()


def test_a_tree_that_is_not_one_whole_expression_is_refused() -> None:
    good = (("call", "greater"), ("field_ref", "i"), ("literal", "0"), ("end", "greater"))
    assert Predicate.from_bytes(_tree(*good), SCHEMA).bounds == (Bound("i", ">", 3),)
    single = [
        ((key, value),) for key, value in (("literal", "7"), ("literal", "-1"), ("nested_field_ref", "9"), ("x", "0"))
    ]
    closed = [(*good[:3], ("end", "less")), (*good[:3], ("options", "0"), ("end", "greater"))]
    for bad in (good[:-1], good[1:], (*good, *good), (), *single, *closed):
        with pytest.raises(InvalidPredicateError):
            Predicate.from_bytes(_tree(*bad), SCHEMA)


def test_options_of_another_function_are_refused() -> None:
    raw = pc.field("city").isin(["x"]).__reduce__()[1][0].to_pybytes()
    for other in (b"is_null", b"sum  ", b"nope "):
        with pytest.raises(InvalidPredicateError):
            Predicate.from_bytes(raw.replace(b"is_in", other[:5]), SCHEMA)
    swapped = pc.field("city").is_null().__reduce__()[1][0].to_pybytes().replace(b"is_null", b"is_upper"[:7])
    with pytest.raises(InvalidPredicateError):
        Predicate.from_bytes(swapped, SCHEMA)
    for function in (b"SetLookupOptions", b"\0" * 16):
        with pytest.raises(InvalidPredicateError):
            Predicate.from_bytes(raw.replace(b"SetLookupOptions", function[::-1]), SCHEMA)
