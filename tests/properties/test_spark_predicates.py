"""One statement keeps the same rows of log, union and lake through everything Spark reads by, on every kind of master.

What the rows are is asked twice: of Spark itself over the plain rows in its memory, and of DuckDB.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
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
CONDITIONS = int(os.environ.get("LAKEHEAD_SPARK_CONDITIONS", "14"))
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
        spark.read.format("lakehead").options(uri=con.uri, table=table.name).load().createOrReplaceTempView("source")
        found["source"] = spark.sql(statement("source", list(conditions)))
        if stage == "lake":
            found["$lake"] = lhs.sql(spark, statement(f"{table.name}$lake", list(conditions)))
        for way, frame in found.items():
            for (text, keys), answer in zip(conditions.items(), keys_of(frame, len(conditions)), strict=True):
                assert answer == keys, f"{way}, {stage}, seed {seed}: {text}"


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
