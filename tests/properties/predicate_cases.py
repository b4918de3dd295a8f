"""Tables and conditions on which every way to read must agree with DuckDB on the plain rows.

One seed gives one `Case`: a schema, its rows in chunks (one chunk is what goes into the table between two rounds), and
conditions. Values are those that readers get wrong: NaN, both zeros, infinities, extremes, nulls; whole chunks that are
constant, null or sorted, so that bounds of files and row groups decide; texts longer than any bound that is kept.

A condition is a small tree; `sql` writes it in DuckDB's words, with a ``literal`` of the caller's in another dialect's.
`Oracle` has the rows in a table of DuckDB's own and tells which of them a condition keeps.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

KEY = "k"
"""The column that tells rows apart: 0, 1, 2, ... over all chunks."""

Value: TypeAlias = bool | int | float | Decimal | str | bytes | dt.date | dt.datetime | dt.time | None
"""Its Python type says how a literal is written: a float as a double (1e-1), a Decimal plainly (0.1)."""


# -- conditions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A column, or a field of a struct."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class Lit:
    value: Value


@dataclass(frozen=True)
class Call:
    """An expression over one field, as a template in DuckDB's words: ``abs({})``."""

    template: str
    field: Field


Operand: TypeAlias = Field | Lit | Call


@dataclass(frozen=True)
class Compare:
    """``op``: one of OPERATORS."""

    left: Operand
    op: str
    right: Operand


@dataclass(frozen=True)
class In:
    field: Field
    members: tuple[Lit, ...]
    negated: bool


@dataclass(frozen=True)
class Between:
    field: Field
    low: Lit
    high: Lit
    negated: bool


@dataclass(frozen=True)
class IsNull:
    field: Field
    negated: bool


@dataclass(frozen=True)
class Like:
    """``op``: like, not like, ilike."""

    field: Field
    op: str
    pattern: str


@dataclass(frozen=True)
class Holds:
    """A boolean column on its own."""

    field: Field


@dataclass(frozen=True)
class Not:
    inner: Condition


@dataclass(frozen=True)
class Join:
    """``op``: and, or."""

    left: Condition
    op: str
    right: Condition


@dataclass(frozen=True)
class Is:
    """``what``: true, not true, false, not false, null, not null."""

    inner: Condition
    what: str


Condition: TypeAlias = Compare | In | Between | IsNull | Like | Holds | Not | Join | Is

OPERATORS = ("=", "<>", "<", "<=", ">", ">=", "is distinct from", "is not distinct from")
_COMPARISONS = OPERATORS[:6]


def fields_of(condition: Condition | Operand) -> Iterator[Field]:
    """Every field that a condition reads."""
    match condition:
        case Field():
            yield condition
        case Lit():
            return
        case Compare() | Join():
            yield from fields_of(condition.left)
            yield from fields_of(condition.right)
        case Not() | Is():
            yield from fields_of(condition.inner)
        case _:
            yield condition.field


def literal(value: Value) -> str:
    """The value in DuckDB's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return f"cast('{value}' as double)"
        case float():
            text = repr(value)
            return text if "e" in text else text + "e0"
        case int():
            return str(value)
        case Decimal():
            return format(value, "f")
        case str():
            return "'" + value.replace("'", "''") + "'"
        case bytes():
            return "cast('" + "".join(f"\\x{b:02X}" for b in value) + "' as blob)"
        case dt.datetime():
            return f"timestamptz '{value.isoformat(sep=' ')}'" if value.tzinfo else f"timestamp '{_naive(value)}'"
        case dt.date():
            return f"date '{value.isoformat()}'"
        case dt.time():
            return f"time '{value.isoformat()}'"


def _naive(value: dt.datetime) -> str:
    return value.isoformat(sep=" ")


def plain_literal(value: Value) -> str:
    """As `literal`, for DuckDB itself, whose parser ends a statement at NUL."""
    text = literal(value)
    if not isinstance(value, str) or "\0" not in value:
        return text
    return "(" + " || chr(0) || ".join(literal(part) for part in value.split("\0")) + ")"


def sql(condition: Condition, write: Callable[[Value], str] = literal, quote: str = '"') -> str:
    """The condition as text; ``quote`` goes around names."""

    def operand(x: Operand) -> str:
        match x:
            case Field():
                return ".".join(f"{quote}{part}{quote}" for part in x.path)
            case Lit():
                return write(x.value)
            case Call():
                return x.template.format(operand(x.field))

    def negation(negated: bool) -> str:
        return "not " if negated else ""

    match condition:
        case Compare():
            return f"{operand(condition.left)} {condition.op} {operand(condition.right)}"
        case In():
            members = ", ".join(operand(m) for m in condition.members)
            return f"{operand(condition.field)} {negation(condition.negated)}in ({members})"
        case Between():
            ends = f"{operand(condition.low)} and {operand(condition.high)}"
            return f"{operand(condition.field)} {negation(condition.negated)}between {ends}"
        case IsNull():
            return f"{operand(condition.field)} is {negation(condition.negated)}null"
        case Like():
            return f"{operand(condition.field)} {condition.op} {write(condition.pattern)}"
        case Holds():
            return operand(condition.field)
        case Not():
            return f"not ({sql(condition.inner, write, quote)})"
        case Join():
            return f"({sql(condition.left, write, quote)}) {condition.op} ({sql(condition.right, write, quote)})"
        case Is():
            return f"({sql(condition.inner, write, quote)}) is {condition.what}"


def arrow(condition: Condition, schema: pa.Schema) -> pc.Expression | None:
    """The condition with Arrow's own operators, whose NaN is unequal to all; None where they have no such form."""
    match condition:
        case Compare(Field() as left, op, Lit(value)) if op in _ARROW and value is not None:
            scalar = _scalar(value, _type_of(left, schema))
            return None if scalar is None else _ARROW[op](pc.field(*left.path), pc.scalar(scalar))
        case In():
            scalars = [_scalar(m.value, _type_of(condition.field, schema)) for m in condition.members]
            if None in scalars:
                return None
            found = pc.field(*condition.field.path).isin(pa.array([s.as_py() for s in scalars], scalars[0].type))
            return ~found if condition.negated else found
        case IsNull():
            x = pc.field(*condition.field.path)
            return x.is_valid() if condition.negated else x.is_null()
        case Holds():
            return pc.field(*condition.field.path)
        case Not():
            inner = arrow(condition.inner, schema)
            return None if inner is None else ~inner
        case Join():
            left, right = arrow(condition.left, schema), arrow(condition.right, schema)
            return None if left is None or right is None else left & right if condition.op == "and" else left | right
    return None


_ARROW: dict[str, Callable[[pc.Expression, pc.Expression], pc.Expression]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _type_of(field: Field, schema: pa.Schema) -> pa.DataType:
    t = schema.field(field.path[0]).type
    for part in field.path[1:]:
        t = t.field(part).type
    return t


def _scalar(value: Value, t: pa.DataType) -> pa.Scalar | None:
    """The value in a column's type, None where that changes it."""
    try:
        scalar = pa.scalar(value, t)
        same = scalar.as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None
    return scalar if value is not None and (same == value or (same != same and value != value)) else None


# -- values ---------------------------------------------------------------------------------------------------------

_NAN, _INF = math.nan, math.inf
_LONG = "p" * 40
_FLOATS: tuple[Value, ...] = (_NAN, _INF, -_INF, 0.0, -0.0, 0.5, 1.0, -1.0, 40.0, 1e300, -1e300, 5e-324, 7.25)
_SINGLES: tuple[Value, ...] = (_NAN, _INF, -_INF, 0.0, -0.0, 0.5, 1.0, -1.0, 0.10000000149011612, 16777216.0, 7.25)
_TEXTS: tuple[Value, ...] = (
    *("", " ", "a", "A", "ab", "a%b", "a_b", "a\\b", "å", "z", "'", "\0", "a\0", "a\0b", "\x7f", "\x80", "NaN"),
    *("\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff", "\U0010ffff" * 20, "a\U0010ffff"),
    *(_LONG, _LONG + "a", _LONG + "b", _LONG[:16], _LONG[:15], _LONG[:16] + "\U0010ffff", "p" * 3000, "ß", "ÅB"),
)
_BLOBS: tuple[Value, ...] = (
    *(b"", b"\0", b"a", b"ab", b"\x7f", b"\x80", b"\xff", b"\xff" * 20, b"\xff" * 16 + b"a", b"p" * 40, b"p" * 41),
)
_DATES: tuple[Value, ...] = tuple(
    dt.date.fromisoformat(d)
    for d in ("0001-01-01", "1582-10-10", "1969-12-31", "1970-01-01", "2026-03-29", "9999-12-31")
)
_STAMPS = tuple(
    dt.datetime.fromisoformat(d)
    for d in (
        *("0001-01-01 00:00:00", "1969-12-31 23:59:59", "1970-01-01 00:00:00", "2026-03-29 01:30:00"),
        *("2026-03-29 02:30:00", "2026-10-25 02:30:00", "2026-01-01 00:00:00", "9999-12-31 23:59:59"),
    )
)
_MICROS = (*_STAMPS, dt.datetime(2026, 1, 1, 0, 0, 0, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999))
_ZONED: tuple[Value, ...] = tuple(d.replace(tzinfo=dt.UTC) for d in _MICROS if 1 < d.year < 9999)
_TIMES: tuple[Value, ...] = (dt.time(0), dt.time(10, 30), dt.time(23, 59, 59), dt.time(12, 0, 1))
_BIG = Decimal("1234567890123456789012345678.0000000001")


def _whole(bits: int) -> tuple[Value, ...]:
    top = 1 << bits - 1
    return (-top, 1 - top, -1, 0, 1, 2, 7, top - 1)


def _decimals(precision: int, scale: int) -> tuple[Value, ...]:
    step, most = Decimal((0, (1,), -scale)), Decimal((0, (9,) * precision, -scale))
    return (most, most.copy_negate(), step, step.copy_negate(), Decimal(0), *map(Decimal, range(1, 3)))


@dataclass(frozen=True)
class Column:
    """A column that cases draw from.

    Attributes:
        values: what its rows hold, besides null.
        beside: literals to compare it with besides those.
    """

    name: str
    type: pa.DataType
    values: tuple[Any, ...]
    beside: tuple[Value, ...] = ()


_NUMBERS: tuple[Value, ...] = (0, 1, -1, 2.5, 1e30, -1e30, Decimal("0.5"), Decimal("0.1"), 300, 1 << 53, None)
_POINT = pa.struct([("x", pa.float64()), ("n", pa.int32()), ("s", pa.string())])
_NEST = pa.struct([("g", pa.float32()), ("p", _POINT)])
_POINTS: tuple[Any, ...] = (
    *({"x": x, "n": n, "s": s} for x, n, s in ((_NAN, 1, "a"), (0.5, 2, ""), (-0.0, None, None), (0.0, -5, "zz"))),
    *({"x": x, "n": 7, "s": _LONG} for x in (None, _INF, 40.0)),
)

_FINER = tuple(
    f"{second}{fraction}"
    for second in ("2026-01-01 00:00:00", "1969-12-31 23:59:59")
    for fraction in (".5", ".4999996", ".0000004", ".9999999")
)
"""Texts of times that are finer than a column's unit."""

COLUMNS: tuple[Column, ...] = (
    Column("ok", pa.bool_(), (True, False)),
    Column("i8", pa.int8(), _whole(8), _NUMBERS),
    Column("i16", pa.int16(), _whole(16), _NUMBERS),
    Column("i32", pa.int32(), _whole(32), _NUMBERS),
    Column("i64", pa.int64(), (*_whole(64), (1 << 53) + 1, 1 << 60), (*_NUMBERS, float(1 << 53), 9.3e18, 1 << 63)),
    Column("f", pa.float64(), _FLOATS, (*_NUMBERS, "nan", "inf", 39.99)),
    Column("g", pa.float32(), _SINGLES, (*_NUMBERS, "nan", 0.1, 16777217, 1e300)),
    Column("d9", pa.decimal128(9, 2), _decimals(9, 2), (*_NUMBERS, Decimal("1.005"), Decimal("99999999"))),
    Column("d18", pa.decimal128(18, 0), _decimals(18, 0), _NUMBERS),
    Column("d38", pa.decimal128(38, 10), (*_decimals(38, 10), _BIG, _BIG.copy_negate()), (0, 1, None, 2.5, 10**27)),
    Column("d380", pa.decimal128(38, 0), _decimals(38, 0), (0, 1, None, Decimal("0.5"), 10**30)),
    Column("s", pa.string(), _TEXTS, (None, "b", _LONG + "aa")),
    Column("ls", pa.large_string(), _TEXTS, (None, "b", _LONG + "aa")),
    Column("b", pa.binary(), _BLOBS, (None, b"b")),
    Column("lb", pa.large_binary(), _BLOBS, (None, b"b")),
    Column("fb", pa.binary(3), (b"\0\0\0", b"abc", b"\xff\xff\xff", b"abd"), (None, b"ab", b"abcd")),
    Column("day", pa.date32(), _DATES, (None, "2026-01-01", *_FINER, *_STAMPS)),
    Column("ts_s", pa.timestamp("s"), _STAMPS, (None, "2026-01-01", *_FINER, dt.date(2026, 1, 1), *_MICROS)),
    Column("ts_ms", pa.timestamp("ms"), _STAMPS, (None, "2026-01-01", *_FINER, dt.date(2026, 1, 1), *_MICROS)),
    Column("ts", pa.timestamp("us"), _MICROS, (None, "2026-01-01 00:00:00.000001", *_FINER, *_DATES)),
    Column("utc", pa.timestamp("us", "UTC"), _ZONED, (None, "2026-01-01 00:00:00", *_FINER)),
    Column("berlin", pa.timestamp("us", "Europe/Berlin"), _ZONED, (None, "2026-03-29 01:30:00+01:00")),
    Column("kolkata", pa.timestamp("s", "+05:30"), tuple(z for z in _ZONED if not z.microsecond), (None, *_ZONED)),
    Column("at_s", pa.time32("s"), _TIMES, (None, "10:30:00", dt.time(10, 30, 0, 1), dt.time(23, 59, 59, 999999))),
    Column("at_ms", pa.time32("ms"), _TIMES, (None, "10:30:00", dt.time(10, 30, 0, 1), dt.time(23, 59, 59, 999999))),
    Column("at", pa.time64("us"), (*_TIMES, dt.time(23, 59, 59, 999999)), (None, "10:30:00")),
    Column("p", _POINT, _POINTS),
    Column("nest", _NEST, tuple({"g": g, "p": p} for g, p in zip(_SINGLES, (*_POINTS, None), strict=False))),
    Column("l", pa.list_(pa.float64()), ([], [_NAN], [None, 1.0])),
)
_BY_NAME = {c.name: c for c in COLUMNS}
_INNER: dict[tuple[str, ...], Column] = {
    ("p", "x"): _BY_NAME["f"],
    ("p", "n"): _BY_NAME["i32"],
    ("p", "s"): _BY_NAME["s"],
    ("nest", "g"): _BY_NAME["g"],
    ("nest", "p", "x"): _BY_NAME["f"],
    ("nest", "p", "n"): _BY_NAME["i32"],
}
_CALLS: dict[str, tuple[tuple[str, tuple[Value, ...]], ...]] = {
    "i8": (("{} + 1", (0, 1, 128)), ("cast({} as double)", (4.0, 0.0)), ("abs({})", (1, 128))),
    "i32": (("{} - 1", (0, 1)), ("{} * 2", (4, 14)), ("cast({} as bigint)", (1, 1 << 40)), ("-{}", (1, 7))),
    "i64": (("cast({} as double)", (4.0, 1e18)), ("{} / 2", (1.0, 3.5)), ("{} % 3", (1, 0))),
    "f": (("abs({})", (1.0, _NAN)), ("{} + 1", (1.0, 41.0)), ("-{}", (0.0, 1.0)), ("cast({} as float)", (0.5,))),
    "g": (("cast({} as double)", (0.5, 0.1)), ("{} * 2", (1.0, 2.0))),
    "d9": (
        ("{} + 1", (1, 2)),
        ("cast({} as double)", (1.0,)),
        ("cast({} as bigint)", (0, 1, 10**7)),
        ("cast({} as decimal(9, 1))", (0, Decimal("1.0"), 10**7)),
    ),
    "d38": (("cast({} as decimal(38, 9))", (0, 1)),),
    "s": (("length({})", (0, 1, 40, 3000)), ("lower({})", ("a", "åb"))),
    "day": (("year({})", (1970, 9999)), ("cast({} as timestamp)", (dt.datetime(1970, 1, 1),))),
    "ts": (("year({})", (1970, 2026)), ("cast({} as date)", (dt.date(2026, 1, 1),))),
}
_NUMERIC = ("i8", "i16", "i32", "i64", "f", "g", "d9", "d18")


# -- cases ----------------------------------------------------------------------------------------------------------


PARTITIONS: tuple[Column, ...] = (
    Column("part", pa.string(), ("", "a", "A", "a=b&c/%", "\U0010ffff"), (None, "b")),
    Column("part", pa.int8(), (-128, 0, 127), _NUMBERS),
    Column("part", pa.bool_(), (True, False)),
    Column("part", pa.decimal128(38, 10), (_BIG, _BIG.copy_negate(), Decimal("0.5")), (0, None, Decimal("0.1"))),
    Column("part", pa.date32(), (dt.date(1969, 12, 31), dt.date(2026, 1, 1)), (None, "2026-01-01", *_MICROS)),
    Column("part", pa.timestamp("us"), _MICROS[1:4], (None, "2026-01-01", dt.date(2026, 1, 1))),
    Column("part", pa.binary(), (b"\0", b"\xff" * 20, b"a"), (None, b"b")),
)
"""What tables may be partitioned by; no row of them is null."""


@dataclass(frozen=True, eq=False)
class Case:
    """Rows in chunks of one schema, and conditions on them.

    Attributes:
        partition: one of PARTITIONS that is a column, too.
    """

    seed: int
    schema: pa.Schema
    chunks: tuple[pa.Table, ...]
    conditions: tuple[Condition, ...]
    partition: Column | None = None


def make_case(
    seed: int,
    *,
    columns: Sequence[Column] = COLUMNS,
    width: int = 8,
    chunks: int = 4,
    rows: int = 24,
    conditions: int = 100,
    partition: Column | None = None,
) -> Case:
    """The case of a seed.

    Args:
        columns: those it may draw from.
        width: how many of them.
        rows: of the largest chunk.
        partition: a column of this kind is there, too, without nulls.
    """
    rng = random.Random(seed)
    chosen = sorted(rng.sample(list(columns), min(width, len(columns))), key=lambda c: c.name)
    schema = pa.schema([pa.field(KEY, pa.int64(), False), *(pa.field(c.name, c.type) for c in chosen)])
    if partition is not None:
        schema = schema.append(pa.field(partition.name, partition.type, False))
    tables, done = [], 0
    for _ in range(chunks):
        size = rng.randint(1, rows)
        arrays = [pa.array(range(done, done + size), pa.int64())]
        arrays += [pa.array(_chunk_values(rng, c, size), c.type) for c in chosen]
        if partition is not None:
            arrays.append(pa.array([rng.choice(partition.values) for _ in range(size)], partition.type))
        tables.append(pa.Table.from_arrays(arrays, schema=schema))
        done += size
    asked = tuple(_condition(rng, chosen + [partition] * (partition is not None)) for _ in range(conditions))
    return Case(seed, schema, tuple(tables), asked, partition)


def _chunk_values(rng: random.Random, column: Column, size: int) -> list[Any]:
    """One chunk of a column: what is in it decides which bounds a file gets."""
    match rng.choice(("mixed", "mixed", "constant", "nulls", "few", "half null", "sorted")):
        case "nulls":
            return [None] * size
        case "constant":
            return [rng.choice(column.values)] * size
        case "few":
            some = rng.sample(column.values, min(2, len(column.values)))
            return [rng.choice(some) for _ in range(size)]
        case "half null":
            value = rng.choice(column.values)
            return [rng.choice((value, None)) for _ in range(size)]
        case "sorted":
            return sorted((rng.choice(column.values) for _ in range(size)), key=lambda v: _order(column, v))
        case _:
            return [rng.choice((*column.values, None)) for _ in range(size)]


def _order(column: Column, value: Any) -> Any:
    if isinstance(value, float):
        return (value != value, value)
    return str(value) if pa.types.is_nested(column.type) else value


def _condition(rng: random.Random, chosen: Sequence[Column], depth: int = 2) -> Condition:
    kind = rng.choice(("leaf", "leaf", "leaf", "not", "join", "join", "is")) if depth else "leaf"
    if kind == "leaf":
        return _leaf(rng, chosen)
    inner = _condition(rng, chosen, depth - 1)
    if kind == "not":
        return Not(inner)
    if kind == "is":
        return Is(inner, rng.choice(("true", "not true", "false", "not false", "null", "not null")))
    return Join(inner, rng.choice(("and", "or")), _condition(rng, chosen, depth - 1))


def _leaf(rng: random.Random, chosen: Sequence[Column]) -> Condition:
    column = rng.choice(chosen)
    field = Field((column.name,))
    inner = [path for path in _INNER if path[0] == column.name]
    if inner and rng.random() < 0.85:
        path = rng.choice(inner)
        column, field = _INNER[path], Field(path)
    if pa.types.is_nested(column.type) or rng.random() < 0.08:
        return IsNull(field, rng.random() < 0.5)
    if pa.types.is_boolean(column.type) and rng.random() < 0.5:
        return Holds(field)
    negated = rng.random() < 0.5
    match rng.choice(("compare", "compare", "flipped", "in", "between", "like", "columns", "call")):
        case "flipped":
            return Compare(_literal(rng, column), rng.choice(_COMPARISONS), field)
        case "in":
            return In(field, tuple(_literal(rng, column) for _ in range(rng.randint(1, 4))), negated)
        case "between":
            return Between(field, _literal(rng, column), _literal(rng, column), negated)
        case "like" if column.name in ("s", "ls"):
            pattern = rng.choice(("a%", "%", "_", "A_", "p%", "%b", "", "a\\b", _LONG + "%", "\U0010ffff%", "a\0%"))
            # DuckDB's ilike reads a pattern up to NUL only.
            ops = ("like", "not like") if "\0" in pattern else ("like", "not like", "ilike")
            return Like(field, rng.choice(ops), pattern)
        case "columns" if column.name in _NUMERIC:
            others = [c.name for c in chosen if c.name in _NUMERIC]
            if others:
                return Compare(field, rng.choice(OPERATORS), Field((rng.choice(others),)))
        case "call" if column.name in _CALLS:
            template, values = rng.choice(_CALLS[column.name])
            return Compare(Call(template, field), rng.choice(_COMPARISONS), Lit(rng.choice(values)))
    return Compare(field, rng.choice(OPERATORS), _literal(rng, column))


def _literal(rng: random.Random, column: Column) -> Lit:
    return Lit(rng.choice(column.values if rng.random() < 0.7 or not column.beside else column.beside))


# -- the oracle -----------------------------------------------------------------------------------------------------


class Oracle:
    """The rows so far in a table of DuckDB's own."""

    def __init__(self, case: Case) -> None:
        self._con = duckdb.connect()
        self._con.execute("set timezone = 'UTC'")
        empty = case.schema.empty_table()
        self._con.register("chunk", empty)
        self._con.execute("create table plain as select * from chunk")

    def add(self, chunk: pa.Table) -> None:
        """Take rows in; those of the same key go."""
        self._con.register("chunk", chunk)
        self._con.execute(f"delete from plain where {KEY} in (select {KEY} from chunk)")
        self._con.execute("insert into plain select * from chunk")

    def keys(self, condition: Condition) -> list[int] | None:
        """Keys of the rows it keeps, sorted; None where DuckDB answers with an error."""
        try:
            found = self._con.execute(f"select {KEY} from plain where {sql(condition, plain_literal)} order by 1")
            return [key for (key,) in found.fetchall()]
        except duckdb.Error:
            return None

    def close(self) -> None:
        self._con.close()
