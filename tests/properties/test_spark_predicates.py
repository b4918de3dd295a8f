"""One statement keeps the same rows of log, union and lake through everything Spark reads by, on every kind of master.

What the rows are is asked twice: of Spark itself over the plain rows in its memory, and of DuckDB.
"""

from __future__ import annotations

import datetime as dt
import os
import random
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.properties.predicate_cases import COLUMNS, KEY, Case, Condition, Oracle, fields_of, make_case
from tests.properties.spark_statements import keys_of, plain_frame, plain_keys, spark_text, statement

import lakehead as lh
import lakehead.spark as lhs
from lakehead.env.randomness import SystemRandomness

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CASES = int(os.environ.get("LAKEHEAD_SPARK_CASES", "1"))
"""Seeds per kind of table and master."""
CONDITIONS = int(os.environ.get("LAKEHEAD_SPARK_CONDITIONS", "9"))
"""Conditions per case; one statement asks all of them."""
FLOATS = ("f", "g", "p", "nest")


@pytest.fixture(scope="module")
def con(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path_factory.mktemp("spark") / "data") as con:
        yield con


@pytest.fixture(scope="module", params=["local[2]", "local-cluster[1,2,1024]"])
def spark(request: pytest.FixtureRequest, con: lh.Connection) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None and running.sparkContext._jsc is not None:
        running.stop()
    spark = lhs.session(con, master=request.param)
    yield spark
    spark.stop()


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
@pytest.mark.parametrize("seed", range(CASES))
def test_every_way_keeps_the_same_rows(spark: SparkSession, con: lh.Connection, seed: int, keyed: bool) -> None:
    rng = random.Random(seed)
    others = [c for c in COLUMNS if c.name not in FLOATS]
    columns = [c for c in COLUMNS if c.name in FLOATS] + rng.sample(others, 4)
    case = make_case(2 * seed + keyed, columns=columns, width=8, conditions=CONDITIONS)
    table = History(con, f"fuzz.t_{SystemRandomness().uuid_hex()}", case, keyed)
    for stage in table.stages():
        conditions = agreed(spark, table.rows, case)
        assert len(conditions) > CONDITIONS // 2, "most of the conditions are Spark's too"
        found = {"lhs.sql": lhs.sql(spark, statement(table.name, list(conditions)))}
        if spark.sparkContext.master == "local[2]":  # reads files of the session's own the second time
            found["lhs.sql again"] = lhs.sql(spark, statement(table.name, list(conditions)))
        spark.read.format("lakehead").options(uri=con.uri, table=table.name).load().createOrReplaceTempView("source")
        found["source"] = spark.sql(statement("source", list(conditions)))
        if stage == "lake":
            found["$lake"] = lhs.sql(spark, statement(f"{table.name}$lake", list(conditions)))
        for way, frame in found.items():
            for (text, keys), answer in zip(conditions.items(), keys_of(frame, len(conditions)), strict=True):
                assert answer == keys, f"{way}, {stage}, seed {seed}: {text}"


STATEMENTS = [
    "select name from {t} where id = 7",
    "select * from {t} where id in (3, 5, 7, 95, 205) and kind = 1",
    "select id, v from {t} where id in (1,2,3,4,5,6,7,8,9,10,11,12,13,98,103,204)",
    "select id, amount from {t} where name in ('a0','a1','a2','a3','a4','a5','a6','a7','a8','a9','a10','a100','a201')",
    "select id from {t} where id = 7 or name = 'a8'",
    "select id from {t} where id = 7 or length(note) = 2",
    "select id from {t} where (id = 7 or id = 103) and v > 1",
    "select id from {t} where id <=> 8 and not kind = 5",
    "select count(*) from {t}",
    "select count(name), count(kind), count(note) from {t}",
    "select count(note) from {t} where day > date'2026-01-03'",
    "select kind, sum(v) from {t} where day = date'2026-01-02' or amount = 3.50 group by kind having count(*) > 1",
    "select max(id) from {t} where name < 'a3' and note is not null",
    "select a.name, b.v from {t} a join {t} b on a.id = b.id where a.id = 104",
    "select a.id, b.name from {t} a left join {t} b on a.kind = b.id and b.id = 3 where a.id < 9",
    "select a.id, b.name from {t} a full join {t} b on a.id = b.id + 100 where a.id = 101 or b.id = 2",
    "select id from {t} where v = (select max(v) from {t} where kind = 2)",
    "select id from {t} where id in (select kind from {t} where day = date'2026-01-01')",
    "select id from {t} x where exists (select 1 from {t} y where y.kind = x.id and y.name = 'a4')",
    "select id from {t} where id not in (select kind from {t} where id < 90)",
    "with c as (select * from {t} where kind = 3) select c.id, d.note from c join c d on c.id = d.id where c.v > 4",
    "with c as (select id, name, note from {t}) select id from c where name = 'a9'",
    "select id from {t} where kind = 1 union all select kind from {t} where id = 5",
    "select id, name from {t} where id > 195 except select id, name from {t} where kind = 0",
    "select id, row_number() over (partition by kind order by v, id) from {t} where id between 98 and 106",
    "select id from (select * from {t} order by v desc, id limit 7) where kind = 1",
    "select * from (select * from {t} order by v desc, id limit 7) where kind = 1",
    "select id from {t} order by kind, name, note, day, amount, v, f, nest, map_keys(pairs)",
    "select distinct kind from {t} where id < 5 and 1 = 1",
    "select t.id, n from (select * from {t} where id = 4) t lateral view explode(array(kind, id)) as n",
    "select id from {t} where false",
    "select id, cast(null as string) from {t} where note = 'n' || '3' and id > 2L",
    "select sum(f) from {t} where f = 'NaN' or f > 1 or f = 0.0",
    "select nest.a, pairs['x'] from {t} where nest.a > 200 and size(nest.l) = 2",
    "select count(nest), count(nest.a), sum(v) from {t} where id < 120",
    "select id from {t} where upper(name) = 'A7' and length(note) = 2",
]


@pytest.mark.parametrize("keyed", [False, True], ids=["log", "keyed"])
def test_a_statement_finds_the_same_in_what_it_needs(
    spark: SparkSession, con: lh.Connection, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"fuzz.needs_{SystemRandomness().uuid_hex()}"
    schema = needs_rows(range(1)).schema
    table = con.create_table(name, schema, primary_key="id" if keyed else None, buckets=2, lake="iceberg")
    write = table.upsert if keyed else table.append
    write(needs_rows(range(100)))
    con.tier(name)
    write(needs_rows(range(100 if not keyed else 90, 210)))
    gone = [3, 204] if keyed else []
    if gone:
        table.delete([{"id": n} for n in gone])
    plain_frame(spark, needs_rows([n for n in range(210) if n not in gone])).createOrReplaceTempView("plain")
    monkeypatch.setattr("lakehead.spark.union_frame.HOT_ROWS_MAX", 0)
    monkeypatch.setattr("lakehead.spark.table_names.FEW_ROWS", 0)
    local = spark.sparkContext.master == "local[2]"
    some = STATEMENTS if local and keyed else STATEMENTS[:: 4 if local else 11]
    with monkeypatch.context() as moving:
        moving.setattr("lakehead.spark.kept_frame.COPIED_ROWS_MAX", -1)
        for text in some:
            require_same(spark, name, text)
    for text in [some[0], *(some[1::4] if local else ())]:  # the table stands still, and is copied
        require_same(spark, name, text)


def require_same(spark: SparkSession, table: str, text: str) -> None:
    frames = spark.sql(text.format(t="plain")), lhs.sql(spark, text.format(t=table))
    expected, found = (sorted(map(str, frame.collect())) for frame in frames)
    assert found == expected, text


def needs_rows(ids: Sequence[int]) -> pa.Table:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("kind", pa.int32(), nullable=False),
            ("name", pa.string()),
            ("note", pa.string()),
            ("day", pa.date32()),
            ("amount", pa.decimal128(9, 2)),
            ("v", pa.float64()),
            ("f", pa.float64()),
            ("nest", pa.struct([pa.field("a", pa.int32(), nullable=False), ("l", pa.list_(pa.string()))])),
            ("pairs", pa.map_(pa.string(), pa.float64())),
        ]
    )
    day = dt.date(2026, 1, 1)
    columns: list[list[object]] = [
        list(ids),
        [n % 6 for n in ids],
        [f"a{n}" if n % 11 else None for n in ids],
        [f"n{n % 7}" if n % 3 else None for n in ids],
        [day + dt.timedelta(n % 5) for n in ids],
        [Decimal(n) / 2 for n in ids],
        [n % 13 * 0.5 for n in ids],
        [[0.0, -0.0, 2.5, float("nan"), None][n % 5] for n in ids],
        [{"a": n, "l": [f"l{n}", None]} if n % 4 else None for n in ids],
        [[("x", n * 0.5)] for n in ids],
    ]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def agreed(spark: SparkSession, rows: pa.Table, case: Case) -> dict[str, list[int]]:
    """The conditions as Spark has them, each with the rows that Spark and DuckDB keep of the plain ones."""
    plain, oracle = plain_frame(spark, rows), Oracle(case)
    oracle.add(rows)
    out: dict[str, list[int]] = {}
    for condition in case.conditions:
        text = spark_text(condition)
        keys, others = plain_keys(plain, text), oracle.keys(condition)
        if keys is not None:
            same = others is None or keys == others or compares_singles(condition)
            assert same, f"Spark and DuckDB differ, seed {case.seed}: {text}"
            out[text] = keys
    oracle.close()
    return out


def compares_singles(condition: Condition) -> bool:
    """Spark compares a float32 with a decimal or a double as doubles, DuckDB with a decimal as float32."""
    return any(f.path[-1] == "g" for f in fields_of(condition))


class History:
    """A table that is written, tiered, written on and tiered again, and its rows as they must be at each stage."""

    def __init__(self, con: lh.Connection, name: str, case: Case, keyed: bool) -> None:
        self._con, self._case, self._keyed = con, case, keyed
        self.name = name
        self.rows = case.schema.empty_table()
        self._table = con.create_table(name, case.schema, primary_key=KEY if keyed else None, buckets=2, lake="iceberg")

    def stages(self) -> Iterator[str]:
        first, *middle, last = self._case.chunks
        self._write(first)
        yield "log"
        self._con.tier(self.name)
        for chunk in middle:
            self._write(chunk)
            self._con.tier(self.name)
        self._write(last)
        self._change(first)
        yield "union"
        self._con.tier(self.name)
        yield "lake"

    def _write(self, rows: pa.Table) -> None:
        (self._table.upsert if self._keyed else self._table.append)(rows)
        gone = pc.is_in(self.rows[KEY], rows[KEY].combine_chunks())
        self.rows = pa.concat_tables([self.rows.filter(pc.invert(gone)), rows])

    def _change(self, rows: pa.Table) -> None:
        """Of a keyed table's rows, one is deleted, the others get the values of their neighbours."""
        if not self._keyed:
            return
        shifted = rows.take([(i + 1) % rows.num_rows for i in range(rows.num_rows)])
        changed = shifted.set_column(0, rows.schema.field(KEY), rows[KEY])
        self._write(changed)
        one = rows[KEY][0].as_py()
        self._table.delete([{KEY: one}])
        self.rows = self.rows.filter(pc.not_equal(self.rows[KEY], one))
