"""A statement that asks one table for primary keys, whole or their leading columns, has its rows from the key index."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api import sql
from lakehead.client import lookups
from lakehead.client.lookups import Lookups
from lakehead.errors import LimitExceededError

SCHEMA = pa.schema(
    [
        ("a", pa.string()),
        ("b", pa.int32()),
        ("v", pa.int64()),
        ("f", pa.float64()),
        ("moment", pa.timestamp("us", "UTC")),
        ("sec", pa.timestamp("s")),
        ("price", pa.decimal128(9, 2)),
        ("tags", pa.list_(pa.string())),
        ("s", pa.struct([("x", pa.int16())])),
    ]
)


def row(a: str, b: int, v: int) -> dict[str, Any]:
    some = {
        "f": [float("nan"), None, v / 2][v % 3],
        "moment": v * 1_000_001,
        "sec": v,
        "price": v,
        "tags": ["x"] * (v % 4),
    }
    return {"a": a, "b": b, "v": v, **some, "s": {"x": v} if v % 2 else None}


def rows(*given: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(given), SCHEMA)


@pytest.fixture(scope="module", params=["lake", "no lake"])
def con(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[lh.Connection]:
    lake = "iceberg" if request.param == "lake" else None
    with lh.connect(tmp_path_factory.mktemp("data")) as con:
        both = con.create_table("db.t", SCHEMA, primary_key=["a", "b"], buckets=3, bucket_key=["b"], lake=lake)
        parts = con.create_table("Parts", SCHEMA, primary_key=["b", "a"], partition_by=["a"], lake=lake)
        one = con.create_table("one", SCHEMA, primary_key=["b"], buckets=1, lake=lake)
        lines = con.create_table("lines", SCHEMA, primary_key=["b", "a"], bucket_key=["b"], buckets=3, lake=lake)
        days = {"primary_key": ["b", "a", "v"], "bucket_key": ["b"], "partition_by": ["a"]}
        of_days = con.create_table("days", SCHEMA, **days, buckets=2, lake=lake)
        for table in (both, parts, lines, of_days):
            table.upsert(rows(*(row(a, b, b) for a in "xyé" for b in range(-3, 20))))
        one.upsert(rows(*(row("x", b, b) for b in range(-3, 20))))
        con.create_table("bytes", [("k", pa.binary()), ("v", pa.int64())], primary_key="k").upsert(
            [{"k": b"\0'", "v": 1}]
        )
        plain = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("s", pa.string())])
        con.create_table("plain", plain, primary_key="k").upsert([{"k": 3, "v": 7, "s": "a secret"}])
        con.create_table("log", SCHEMA, lake=lake).append(rows(row("x", 3, 3)))
        if lake:
            for name in ("db.t", "Parts", "one", "lines", "days"):
                con.tier(name)
        for table in (both, parts, lines, of_days):
            table.upsert(rows(row("x", 3, 33), row("new", 1, 1)))
            table.delete([{"a": "x", "b": 4, **({"v": 4} if table is of_days else {})}])
        one.upsert(rows(row("x", 3, 33), row("new", 100, 1)))
        one.delete([4])
        yield con


PLAIN = pa.schema(
    [
        ("k", pa.int16()),
        *((str(t), t) for t in (pa.int8(), pa.int32(), pa.int64())),
        *((str(t), t) for t in (pa.float32(), pa.float64(), pa.bool_(), pa.date32(), pa.binary(), pa.large_binary())),
        *((str(t), t) for t in (pa.string(), pa.large_string(), pa.timestamp("s"), pa.timestamp("ms"))),
        *((f"{t} x", t) for t in (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("s", "Europe/Oslo"))),
        ('odd "name"', pa.string()),
    ]
)


def any_value(chance: random.Random, t: pa.DataType) -> Any:
    """As it is stored."""
    if chance.random() < 0.2:
        return None
    if pa.types.is_boolean(t):
        return chance.random() < 0.5
    if pa.types.is_floating(t):
        return chance.choice([0.0, -0.0, 1.5, -2.75e-30, 3.0e38, math.inf, -math.inf, math.nan, chance.random()])
    if pa.types.is_integer(t):
        low, high = -(1 << t.bit_width - 1), (1 << t.bit_width - 1) - 1
        return chance.choice([low, high, chance.randint(low, high), 1])
    if pa.types.is_temporal(t):
        days = chance.choice([0, -1, 1, -719_162, 2_932_896, chance.randint(-700_000, 2_900_000)])
        seconds = 86_400 * days + chance.choice([0, 1, 86_399])
        wide = chance.choice([0] * 30 + [90_000_000])  # years that Python has not
        units = {"s": 1, "ms": 1_000, "us": 1_000_000}
        return days + wide if pa.types.is_date32(t) else seconds * units[t.unit] + chance.randrange(units[t.unit])
    texts = ["", "it's", "é\n\\x41", "%s {0} $1 ?", "--", "\U0001f600" * 3]
    text = chance.choice(texts) if chance.random() < 0.95 else chance.choice(["nul\0 inside", "x" * 20_000])
    return text.encode() + b"\x00\xff" if "binary" in str(t) else text


def plain_rows(chance: random.Random, count: int) -> pa.Table:
    def column(t: pa.DataType) -> pa.Array:
        values = [any_value(chance, t) for _ in range(count)]
        if not pa.types.is_temporal(t):
            return pa.array(values, t)
        return pa.array(values, pa.int32() if pa.types.is_date32(t) else pa.int64()).cast(t)

    keys = pa.array(range(count), pa.int16())
    return pa.Table.from_arrays([keys, *(column(t) for t in PLAIN.types[1:])], schema=PLAIN)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_given_as_text_are_the_rows(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    texts = {1: 0, 3: 0}
    with lh.connect(tmp_path) as con:
        table = con.create_table("t", PLAIN, primary_key="k", buckets=1)
        table.upsert(plain_rows(chance, 60))
        table.upsert([{"k": -1, 'odd "name"': "alone"}])
        asked_for = [*([k] for k in (*range(60), -1, 61)), *([k, k + 1, 70] for k in range(0, 60, 2))]
        for keys in asked_for:
            names = chance.sample(PLAIN.names, 5) if chance.random() < 0.5 else PLAIN.names
            shown = ", ".join('"{}"'.format(name.replace('"', '""')) for name in names)
            places = ", ".join("?" * len(keys))
            asked = f"select {shown}, typeof(columns(*)) from t where k in ({places}) order by t.k", keys
            with monkeypatch.context() as patch:
                patch.setattr(sql, "_as_query", counted := Counted(sql._as_query))
                found = con.sql(*asked).to_arrow_table()
                texts[len(keys)] += counted.texts
            with monkeypatch.context() as patch:
                patch.setattr(sql, "_by_index", lambda *args: None)
                expected = con.sql(*asked).to_arrow_table()
            assert found.schema == expected.schema and numbers(found) == numbers(expected)
    assert 10 < texts[1] < 60 and 0 < texts[3] < 30


def numbers(rows: pa.Table) -> list[str]:
    """Values as texts, moments as numbers: Python has not all of them."""
    held = {
        t: pa.int32() if pa.types.is_date32(t) else pa.int64() for t in rows.schema.types if pa.types.is_temporal(t)
    }
    return [repr((c.cast(held[c.type]) if c.type in held else c).to_pylist()) for c in rows.columns]


class Counted:
    def __init__(self, as_query: Any) -> None:
        self.as_query, self.texts = as_query, 0

    def __call__(self, *args: Any) -> Any:
        found = self.as_query(*args)
        self.texts += found is not None
        return found


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each statement that was tried by the key index was answered by it."""
    answers: list[bool] = []
    by_index = sql._by_index

    def noted(*args: Any) -> Any:
        found = by_index(*args)
        answers.append(found is not None)
        return found

    monkeypatch.setattr(sql, "_by_index", noted)
    return answers


def outcome(con: lh.Connection, text: str, params: Any) -> tuple[str, Any]:
    """What a statement answers: its table, rows in order; or its error."""
    try:
        found = con.sql(text, params).to_arrow_table()
    except lh.LakeheadError as e:
        return type(e).__name__, str(e)
    rows = sorted(map(repr, found.to_pylist()))
    return str(found.schema), rows


BY_KEY: list[tuple[str, Any]] = [
    ("select * from db.t where a = 'x' and b = 3", None),
    ("select * from db.t where b = 4 and a = 'x'", None),
    ("select * from db.t where 'é' = a and -3 = b", None),
    ("select v, f, v + 1 as w from db.t as z where z.a = ? and Z.B = ?", ["x", 3]),
    ("select t, t.v from db.t where t.a = $a and t.b = $b and v > 0", {"a": "y", "b": 5}),
    ("select count(*), sum(v), max(moment) from db.t where a in ('x', 'new', 'x') and b = 1", None),
    ("select a, b from db.t where (a = 'x' and b = 3) and b in (3, 5) order by a limit $1", [1]),
    ('select "B" from "db"."T" where a = \'x\' and b = 1 and b = 2', None),
    ("from one where b in (1, 2, 3, 4, 100, 1000) and v < 50", None),
    ("select tags, s.x, price from one /* t */ where b = 100", None),
    ("select distinct on (a) a, row_number() over () from one where b in (1, 2) qualify true", None),
    ("select b from one where one.b = 3 group by all having count(*) = 1", None),
    ("select * exclude (f), columns('^f') from one where b = 2", None),
    ("select * from parts where a = 'x' and b = 3", None),
    ("select * from default.parts where a = 'nobody' and b = 3", None),
    ("select * from parts where a = ? and b in (1, 3)", ["é"]),
    ("select f from one where b = 3 and f = 'nan'", None),
    ("select cast(s as int) from plain where k = 3 and v > 7", None),
    ("select s, v + 1 from plain p where p.k = 3", None),
    ("select v, k from bytes where k = ?", [b"\0'"]),
    ("select v from bytes where k in ($1, $2) and v = $3", [b"", b"\0'", 1]),
    ("select moment from one where b = 3 and moment > '1970-01-01'", None),
    ("select * from lines where b = 3", None),
    ("select a, v + 1 from lines where b = $1 and a like 'n%' and f is null", [1]),
    ("select count(*), max(v) from lines where b in (4, 4)", None),
    ("select * from lines where b = 1000", None),
    ("select * from days where a = 'x' and b = 3", None),
    ("select max(v) from days where a = 'x' and b = 3 and v < 33", None),
    ("select * from days where b = ? and a = ? and v in (4, 5)", [4, "x"]),
    ("select * from days where b = 3 and a = 'nobody'", None),
]
OTHERWISE: list[tuple[str, Any]] = [
    ("select * from db.t where a = 'x'", None),
    ("select * from db.t where a = 'x' or b = 3", None),
    ("select * from db.t where a = 'x' and not (b = 3)", None),
    ("select * from db.t where a = 'x' and b in (3, 5, 6, 7, 8, 9)", None),  # in several tablets
    ("select * from parts where a in ('x', 'y') and b = 3", None),
    ("select * from lines where a = 'x'", None),
    ("select * from lines where b in (1, 2, 3, 4, 5)", None),  # in several tablets
    ("select * from lines where b in (1, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008)", None),
    ("select * from lines where b = '3'", None),
    ("select * from days where b = 3", None),
    ("select * from days where a = 'x' and v = 3", None),
    ("select * from days where b = 3 and a in ('x', 'y')", None),
    ("select * from one where b = '3'", None),
    ("select * from one where b = 3.0", None),
    ("select * from one where b = 3 + 0", None),
    ("select * from one where b = null", None),
    ("select * from one where b = $1", ["3"]),
    ("select * from one where b = $1", [True]),
    ("select * from one where b in ($1, $2)", [3, [3]]),
    ("select v from bytes where k = $1", ["text"]),
    ("select * from one where b = 5000000000", None),
    ("select * from one where b = v", None),
    ("select * from one where b in (3, v)", None),
    ("select * from one x(b, a) where b = 3", None),
    ("select * from one tablesample 50% (bernoulli, 1) where b = 3", None),
    ("select * from one where b = 3 using sample 100%", None),
    ("select * from one, log where one.b = 3", None),
    ("select * from one where b = 3 union all select * from log", None),
    ("select * from one where b = 3 and exists (from log)", None),
    ("with one as (select 3 as b) select * from one where b = 3", None),
    ("select * from log where b = 3", None),
    ("select current_schema(), b from one where b = 3", None),
    ('select "default".one.b from one where b = 3', None),
    ("select nothing from one where b = 3", None),
    ("select cast(a as int) from one where b = $1", [3]),
    ("select cast(a as int) from one where b = 3", None),
    ("select v from plain where k = 3 and cast(s as int) > 1", None),
    ("select error(s) from plain where k = 3", None),
    ("select b from one where b = $1", None),
    ("select b from one where b = $1", [3, 4]),
    ("select b from one where b = $b", {"c": 3}),
    ("explain select * from one where b = 3", None),
    ("select * from nobody where b = 3", None),
]


@pytest.mark.parametrize(("text", "params"), BY_KEY)
def test_the_index_answers_as_the_table_does(
    con: lh.Connection, answered: list[bool], monkeypatch: pytest.MonkeyPatch, text: str, params: Any
) -> None:
    by_index = outcome(con, text, params)
    assert answered == [True]
    monkeypatch.setattr(sql, "_by_index", lambda *args: None)
    assert by_index == outcome(con, text, params)


@pytest.mark.parametrize(("text", "params"), OTHERWISE)
def test_what_it_cannot_answer_is_asked_of_the_table(
    con: lh.Connection, answered: list[bool], monkeypatch: pytest.MonkeyPatch, text: str, params: Any
) -> None:
    found = outcome(con, text, params)
    assert not any(answered)
    monkeypatch.setattr(sql, "_by_index", lambda *args: None)
    assert found == outcome(con, text, params) or text.startswith("explain")


@pytest.mark.parametrize("seed", range(3))
def test_any_statement_has_one_answer(con: lh.Connection, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    keys = [f"{name} {op}" for name, op in (("a", "= 'x'"), ("b", "= 3"), ("a", "in ('x', 'new')"), ("b", "in (1, 3)"))]
    more = ["v > 3", "f = 'nan'", "f is null", "price < 5", "len(tags) = 1", "s.x = 3", "a = b::text", "v in (1, b)"]
    shown = ["*", "count(*)", "a, v", "max(f), min(moment)", "t.b", "sum(price)", "s", "v / 0", "t"]
    names = ["db.t", "one as t", "lines as t", "days as t"]
    texts = []
    for _ in range(120):
        conditions = chance.sample(keys, 2) + chance.sample(more, chance.randrange(3))
        chance.shuffle(conditions)
        where = joined(chance, conditions)
        texts.append(f"select {chance.choice(shown)} from {chance.choice(names)} where {where}")
    by_index = [outcome(con, text, None) for text in texts]
    monkeypatch.setattr(sql, "_by_index", lambda *args: None)
    assert by_index == [outcome(con, text, None) for text in texts]


def joined(chance: random.Random, conditions: list[str]) -> str:
    text = conditions[0]
    for condition in conditions[1:]:
        text = f"({text}) {chance.choice(['and', 'and', 'and', 'or', 'and not'])} {condition}"
    return text


def test_frames_and_unrestricted_statements_are_asked_of_the_table(con: lh.Connection, answered: list[bool]) -> None:
    frames = {"two": pa.table({"b": [3]})}
    assert con.sql("select v from one where b = 3", frames=frames).fetchall() == [(33,)]
    assert con.sql("select v from one where b = 3", unrestricted=True).fetchall() == [(33,)]
    assert not answered


@pytest.mark.parametrize("where", ["b = 3", "b = 1 + 2", "v = 33", "V in (33, 34)"])
def test_a_table_is_opened_once(con: lh.Connection, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    opened: list[str] = []
    table = lh.Connection.table
    monkeypatch.setattr(lh.Connection, "table", lambda self, name: (opened.append(name), table(self, name))[1])
    assert con.sql(f"select v from One where {where}").fetchall() == [(33,)]
    assert opened == ["default.one"]


def test_rows_are_those_of_the_moment_of_the_call(con: lh.Connection) -> None:
    table = con.table("one")
    found = con.sql("select v from one where b = 7")
    table.upsert(rows(row("x", 7, 700)))
    assert found.fetchall() == [(7,)] and found.fetchall() == [(7,)] and len(found.filter("v = 7")) == 1
    assert con.sql("select v from one where b = 7").fetchall() == [(700,)]
    table.upsert(rows(row("x", 7, 7)))


def test_rows_that_are_too_many_bytes_for_one_answer_are_read(
    con: lh.Connection, answered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Lookups, keys: pa.RecordBatch, parts: Any) -> pa.Table:
        raise LimitExceededError("too many bytes", answer_bytes_max=1)

    monkeypatch.setattr(Lookups, "_lookup_part", refused)
    assert con.sql("select v from one where b in (1, 2)").fetchall() == [(1,), (2,)]
    monkeypatch.setattr(lookups, "PREFIX_BYTES_MAX", 10)
    assert con.sql("select count(*), sum(v) from lines where b = 3").fetchall() == [(3, 39)]
    assert answered == [False, False]


def test_statements_of_many_threads(con: lh.Connection) -> None:
    wrong: list[object] = []

    def ask(b: int) -> None:
        for _ in range(30):
            found = con.sql("select b, v from one where b = ?", [b]).fetchall()
            wrong.extend(found if found != [(b, b)] else [])

    threads = [threading.Thread(target=ask, args=(b,)) for b in range(8, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_table_that_is_altered(tmp_path: Path, answered: list[bool]) -> None:
    with lh.connect(tmp_path) as con, lh.connect(tmp_path) as other:
        con.create_table("t", pa.schema([("k", pa.int32()), ("v", pa.int32())]), primary_key="k").upsert(
            [{"k": 1, "v": 2}]
        )
        assert con.sql("select * from t where k = 1").fetchall() == [(1, 2)]
        with other.table("t").alter() as alteration:
            alteration.add_column("w", pa.string(), default="new")
        assert con.sql("select * from t where k = 1").fetchall() == [(1, 2, "new")]
        other.drop_table("t")
        with pytest.raises(lh.TableNotFoundError):
            con.sql("select * from t where k = 1")
    assert answered == [True, True]
