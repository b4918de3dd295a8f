"""A batch that statistics skip holds no matching row, and damaged statistics never reach beyond their bytes."""

from __future__ import annotations

import contextlib
import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from lakehead.errors import CorruptionError
from lakehead.format.statistics import encode_statistics, may_match
from lakehead.predicate import Bound, parse_predicate

FLOATS = [0.0, -0.0, 0.1, 1.0, 1.5, -2.0, 3e38, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    "",
    "a",
    "ab",
    "b",
    "ø",
    "\U0010ffff",
    "\U0010ffff" * 5,
    "x" * 16,
    "x" * 17,
    "x" * 16 + "y",
    "\ud7ff",
    "\ue000",
]
DAYS = [dt.date(1969, 12, 31), dt.date(1970, 1, 1), dt.date(2026, 1, 1), dt.date(2026, 1, 2)]
INSTANTS = [
    dt.datetime(d.year, d.month, d.day, h, 0, 0, us) for d in DAYS for h, us in ((0, 0), (23, 0), (0, 1), (12, 999999))
]
COLUMNS: dict[str, tuple[pa.DataType, list[object]]] = {
    "i8": (pa.int8(), [-128, -1, 0, 1, 2, 127]),
    "i": (pa.int64(), [-(2**63), -1, 0, 1, 2, 2**53, 2**53 + 1, 2**63 - 1]),
    "f": (pa.float64(), list(FLOATS)),
    "g": (pa.float32(), list(FLOATS)),
    "d": (pa.decimal128(12, 2), [Decimal(x) for x in ("-1.00", "0.00", "1.00", "1.01", "9999999999.99")]),
    "s": (pa.string(), list(TEXTS)),
    "b": (pa.binary(), [b"", b"\x00", b"a", b"\xff", b"\xff" * 17, b"a" * 17, b"a" * 16]),
    "day": (pa.date32(), list(DAYS)),
    "at": (pa.timestamp("us"), list(INSTANTS)),
    "t": (pa.time32("ms"), [dt.time(0), dt.time(10), dt.time(10, 0, 0, 1000), dt.time(23, 59, 59)]),
    "ok": (pa.bool_(), [True, False]),
}
SCHEMA = pa.schema([(name, t) for name, (t, _) in COLUMNS.items()])


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """A few rows, of which the outer ones may be sliced away; few values, so that bounds are met exactly."""
    rows, start = draw(st.integers(0, 12)), draw(st.integers(0, 9))
    arrays = []
    for t, values in COLUMNS.values():
        some = draw(st.lists(st.sampled_from([None, *values]), min_size=1, max_size=3))
        arrays.append(pa.array([some[k % len(some)] for k in range(rows + start)], t).slice(start))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def quoted(value: object) -> str:
    if isinstance(value, bytes):
        return "'" + "".join(f"\\x{byte:02X}" for byte in value) + "'"
    if isinstance(value, bool | int | Decimal):
        return str(value).lower()
    return f"'{value}'"


@st.composite
def conditions(draw: st.DrawFn) -> str:
    """One conjunct over one column."""
    name = draw(st.sampled_from(list(COLUMNS)))
    values = [quoted(v) for v in COLUMNS[name][1]]
    if name in ("i8", "i", "f", "g", "d"):
        values += [
            "0.5",
            "-0.5",
            "1.005",
            "1e0",
            "1.5e0",
            "9007199254740992e0",
            "100000",
            "-1e300",
            "99999999999999999999",
        ]
    value = st.sampled_from(values)
    match draw(st.sampled_from(["compare", "flipped", "in", "between", "null", "not null", "like", "bare"])):
        case "compare":
            return f"{name} {draw(st.sampled_from(['=', '<', '<=', '>', '>=', '<>']))} {draw(value)}"
        case "flipped":
            return f"{draw(value)} {draw(st.sampled_from(['=', '<', '<=', '>', '>=']))} {name}"
        case "in":
            return f"{name} in ({', '.join(draw(st.lists(value, min_size=1, max_size=3)))})"
        case "between":
            return f"{name} between {draw(value)} and {draw(value)}"
        case "like":
            return f"s like '{draw(st.sampled_from(TEXTS))}{draw(st.sampled_from(['', '%', '_', '%a']))}'"
        case "bare":
            return draw(st.sampled_from(["ok", "not ok", "not (i > 1)", "i8 > f"]))
        case null:
            return f"{name} is {null}"


@given(batches(), st.lists(conditions(), min_size=1, max_size=3).map(" and ".join))
def test_a_skipped_batch_has_no_row_that_sql_matches(batch: pa.RecordBatch, text: str) -> None:
    predicate = parse_predicate(text, SCHEMA)
    if not may_match(encode_statistics(batch), SCHEMA, predicate.bounds):
        assert predicate.filter(batch).num_rows == 0


@st.composite
def expressions(draw: st.DrawFn) -> pc.Expression:
    name = draw(st.sampled_from(["i8", "i", "f", "g", "d", "s", "b", "day", "at", "t", "ok"]))
    x, values = pc.field(name), COLUMNS[name][1]
    if name in ("f", "g"):
        values = [*values, 0, 1, 2**24]
    if name == "i8":
        values = [*values, 0.5, 1.0, 1000]
    value = draw(st.sampled_from(values))
    other = draw(st.sampled_from(COLUMNS[name][1]))
    ops = [x == value, x < value, x <= value, x > value, x >= value, x != value]
    ops += [x.is_null(), x.is_valid(), ~x.is_null(), x.isin([value, other]), x.isin([None, value])]
    return draw(st.sampled_from(ops))


@given(batches(), st.lists(expressions(), min_size=1, max_size=2))
def test_a_skipped_batch_has_no_row_that_an_expression_matches(
    batch: pa.RecordBatch, parts: list[pc.Expression]
) -> None:
    predicate = parse_predicate(parts[0] if len(parts) == 1 else parts[0] & parts[1], SCHEMA)
    if not may_match(encode_statistics(batch), SCHEMA, predicate.bounds):
        assert predicate.filter(batch).num_rows == 0


@given(batches(), st.data())
def test_a_batch_may_match_its_own_values(batch: pa.RecordBatch, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEMA.names))
    for value in batch.column(name).to_pylist():
        bound = Bound(name, "is_null", None) if value is None else Bound(name, "==", value)
        assert may_match(encode_statistics(batch), SCHEMA, [bound])


@given(batches(), st.data())
def test_damaged_bytes_are_an_error_or_an_answer(batch: pa.RecordBatch, data: st.DataObject) -> None:
    good = bytearray(encode_statistics(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(good[: data.draw(st.integers(0, len(good)))])
    bounds = [Bound(n, "==", v[0]) for n, (_, v) in COLUMNS.items()]
    for form in (damaged, data.draw(st.binary(max_size=400))):
        with contextlib.suppress(CorruptionError):
            assert may_match(pa.py_buffer(form), SCHEMA, bounds) in (True, False)
