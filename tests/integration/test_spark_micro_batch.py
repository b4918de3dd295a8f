"""``batch.toArrow()`` in a pipeline gives what Spark gives, whoever reads it."""

from __future__ import annotations

import datetime as dt
import threading
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from py4j.clientserver import ClientServerConnection
from tests.integration.conftest import embedded_only

import lakehead as lh
import lakehead.spark as lhs
from lakehead.spark import micro_batch
from lakehead.spark.micro_batch import PlainStream, Spans

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lakehead.spark.layers import Layers

pytestmark = [pytest.mark.spark, embedded_only]

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False),
        pa.field("small", pa.int16()),
        pa.field("text", pa.large_string()),
        pa.field("at", pa.timestamp("ms", "Europe/Oslo")),
        pa.field("local", pa.timestamp("us")),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("zip", pa.int32()), ("name", pa.string())])),
    ]
)


def rows(ids: range, text: str = "a") -> pa.Table:
    at = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    return pa.Table.from_pylist(
        [
            {
                "id": n, "small": n % 7, "text": f"{text}{n}" if n % 3 else None,
                "at": at, "local": at.replace(tzinfo=None),
                "price": Decimal(n) / 4, "tags": ["x"] * (n % 3), "place": {"zip": n, "name": "y"} if n % 2 else None,
            }
            for n in ids
        ],
        SCHEMA,
    )  # fmt: skip


def stream_of(con: lh.Connection, spark: SparkSession, table: str, **options: str) -> DataFrame:
    given = {"uri": con.uri, "table": table, "start": "earliest", **options}
    return spark.readStream.format("lakehead").options(**given).load()


class Seen:
    """Runs a pipeline, and compares what its micro-batches are with what Spark says they are."""

    def __init__(self, stream: DataFrame, checkpoint: str | None = None) -> None:
        self.direct: list[bool] = []
        self.tables: list[pa.Table] = []
        self.query = lhs.pipeline(stream, self.step, checkpoint=checkpoint)

    def step(self, batch: DataFrame, out: Layers) -> None:
        found = batch.toArrow()
        assert found.equals(batch.select("*").toArrow())
        self.direct.append(getattr(batch, "_rows", None) is not None)
        self.tables.append(found)

    def wait(self) -> Seen:
        self.query.processAllAvailable()
        return self

    def stop(self) -> list[dict[str, Any]]:
        self.query.stop()
        assert self.query.exception() is None
        return [row for table in self.tables for row in table.to_pylist()]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("changelog", [False, True])
def test_rows_are_those_of_spark(
    con: lh.Connection, spark: SparkSession, keyed: bool, changelog: bool, request: pytest.FixtureRequest
) -> None:
    name = f"m.all_{keyed}_{changelog}".lower()
    table = con.create_table(name, SCHEMA, primary_key=["id"] if keyed else None, buckets=3)
    write = table.upsert if keyed else table.append
    write(rows(range(9)))
    seen = Seen(stream_of(con, spark, name, changelog=str(changelog).lower())).wait()
    write(rows(range(4, 20), "b"))
    if keyed:
        table.delete([{"id": 3}])
    seen.wait()
    found = seen.stop()
    assert seen.direct[-1]
    told = [row["__change_type"] for row in found] if changelog else []
    if not keyed:
        assert len(found) == 25
    elif changelog:
        assert [told.count(c) for c in ("+I", "-U", "+U", "-D")] == [20, 5, 5, 1]
    else:
        assert sorted(row["id"] for row in found) == sorted([*range(9), *range(4, 20)])


def test_chosen_columns_of_changes_are_of_all_changes(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("m.chosen", SCHEMA, primary_key=["id"])
    seen = Seen(stream_of(con, spark, "m.chosen", changelog="true").drop("__change_type").select("text", "id")).wait()
    for text in "ab":
        table.upsert(rows(range(2), text))
        seen.wait()
    assert [tuple(row) for row in seen.stop()] == [("text", "id")] * 6
    assert seen.direct[-1]


def test_rows_that_are_wanted_are_those_of_spark(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("m.wanted", SCHEMA, primary_key=["id"])
    seen = Seen(stream_of(con, spark, "m.wanted", where="small = 3 and text is not null", columns="id")).wait()
    for text in "ab":
        table.upsert(rows(range(30), text))
        seen.wait()
    assert sorted(row["id"] for row in seen.stop()) == [10, 10, 17, 17]
    assert seen.direct[-1]


def test_what_is_more_than_a_table_is_left_to_spark(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("m.left", SCHEMA)
    table.append(rows(range(4)))
    stream = stream_of(con, spark, "m.left")
    left = [
        stream.where("price > 1"),
        stream.where("id between 1 and 12"),
        stream.where(~stream.id.isin([])),
        stream.where(stream.id.isin(list(range(1000)))),
        stream.where(" or ".join(f"id = {n}" for n in range(300))),
        stream.where("upper(text) = 'A1'"),
        stream.where("text <=> null"),
        stream.selectExpr("id + 1 as id"),
        stream.selectExpr("id % 2 = 0 as even"),
        stream.selectExpr("id", "rand() as at_random"),
        stream.selectExpr("cast(id as string) as id"),
        stream.selectExpr("1 as one"),
        stream.selectExpr("text = text collate utf8_lcase as same"),
        stream.union(stream),
        stream.dropDuplicates(["id"]),
    ]
    doubled = stream.selectExpr("id > 1 as c")
    for _ in range(12):  # each names the one before twice
        doubled = doubled.selectExpr("c or not c as c")
    left.append(doubled)
    assert [PlainStream.of(other) for other in left] == [None] * len(left)
    for other in (left[2], left[-2]):
        seen = Seen(other).wait()
        table.append(rows(range(9, 11)))
        assert seen.wait().stop()
        assert not any(seen.direct)


CHOSEN = [
    "id", "text as other", "'c' as kind", "7 as seven", "cast(null as string) as nothing", "true as yes",
    "text = 'a1' as same", "'a4' < text as later", "text >= 'b' as from_b",
    "id >= 2 and id < 5 as some", "id != 3 as others", "id in (1, 3, null) as listed", "text in ('a1', 'a4') as two",
    "small = 3 as three", "small = 3S as short_three", "not (text = 'a1' or id > 8) as neither",
    "coalesce(text, 'none') as text", "coalesce(text = 'a1', false) as deleted", "cast(id as bigint) as same_id",
    "text is null and id > 3 as gap", "text is not null or null as known", "price", "at", "tags", "place", "local",
    "(id = 1) = (small = small) as conditions", "(id > 2) > (id > 5) as ordered", "null and id = 1 as nobody_knows",
]  # fmt: skip


def test_plain_columns_are_those_of_spark(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("m.computed", SCHEMA)
    stream = stream_of(con, spark, "m.computed")
    filtered = stream.where("text is null or text != 'a7'").where("id < 100").withColumnRenamed("id", "n")
    nested = filtered.selectExpr("n as id", "text", "small", "n > 2 as large").where("large and not id = 4")
    for chosen in (stream.selectExpr(*CHOSEN), nested):
        seen = Seen(chosen).wait()
        table.append(rows(range(12)))
        table.append(rows(range(12)).slice(0, 1))
        assert seen.wait().stop()
        assert seen.direct[-1]


def test_conditions_over_no_columns(con: lh.Connection, spark: SparkSession) -> None:
    table = con.create_table("m.conditions", SCHEMA)
    stream = stream_of(con, spark, "m.conditions")
    for condition, found in (("true", 4), ("false", 0), ("1 = 2 or 'a' < 'b'", 4), ("cast(null as boolean)", 0)):
        seen = Seen(stream.select("id").where(condition)).wait()
        table.append(rows(range(4)))
        assert len(seen.wait().stop()) % 4 == 0
        assert seen.direct[-1]
        assert seen.tables[-1].num_rows == found


def test_a_micro_batch_of_many_rows_is_left_to_spark(
    con: lh.Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = con.create_table("m.many", SCHEMA)
    seen = Seen(stream_of(con, spark, "m.many")).wait()
    for bound in ("ROWS_MAX", "BYTES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(micro_batch, bound, 3)
            table.append(rows(range(4)))
            seen.wait()
        assert not seen.direct[-1]
        table.append(rows(range(4)))
        seen.wait()
        assert seen.direct[-1]
    assert len(seen.stop()) == 16


def test_rows_as_of_the_start_and_after_a_restart(
    con: lh.Connection, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = tmp_path_factory.mktemp("checkpoint").as_uri()
    table = con.create_table("m.again", SCHEMA, primary_key=["id"])
    table.upsert(rows(range(5)))
    table.upsert(rows(range(5), "b"))
    found = []
    for begin in (5, 7, 9):
        seen = Seen(stream_of(con, spark, "m.again", start="full"), checkpoint).wait()
        table.upsert(rows(range(begin, begin + 2)))
        found += seen.wait().stop()
        assert seen.direct[-1]
    assert sorted(row["id"] for row in found) == list(range(11))


def test_rows_that_pass_on_as_they_are_need_no_job(con: lh.Connection, spark: SparkSession) -> None:
    def jobs() -> set[int]:
        return set(spark.sparkContext.statusTracker().getJobIdsForGroup(str(query.runId)))

    table = con.create_table("m.from", SCHEMA)
    stream = stream_of(con, spark, "m.from")
    query = lhs.pipeline(stream, lambda batch, out: out.upsert("m.to", batch, primary_key=["id"]))
    query.processAllAvailable()
    before = jobs()
    table.append(rows(range(30)))
    query.processAllAvailable()
    assert jobs() == before
    query.stop()
    assert con.table("m.to").scan().count() == 30


@pytest.mark.parametrize("readable", [True, False])
def test_where_micro_batches_lie_stands_in_the_log_of_offsets(
    con: lh.Connection, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """Spark is asked where it is not known where the one before has ended, or the log cannot be read."""
    asked: list[int] = []
    ask, folder_of = Spans._asked, micro_batch.local_folder

    def asks(self: Spans, number: int) -> Any:
        asked.append(number)
        return ask(self, number)

    def folder(place: str) -> str | None:
        found = folder_of(place)
        assert found is not None and found.endswith("a 50% b#c")
        return found if readable else f"{found}/elsewhere"

    monkeypatch.setattr(Spans, "_asked", asks)
    monkeypatch.setattr(micro_batch, "local_folder", folder)
    name = f"m.log_{readable}".lower()
    table = con.create_table(name, SCHEMA, buckets=2)
    found = []
    for begin in (0, 100):
        asked.clear()
        seen = Seen(stream_of(con, spark, name), str(tmp_path / "a 50% b#c")).wait()
        for n in range(4):
            table.append(rows(range(begin + 10 * n, begin + 10 * n + 5)))
            seen.wait()
        assert seen.direct[-4:] == [True] * 4
        found += seen.stop()
        assert len(asked) <= 2 if readable else len(asked) >= 4
    assert sorted(row["id"] for row in found) == [b + 10 * n + k for b in (0, 100) for n in range(4) for k in range(5)]


def test_spark_is_asked_nothing_while_a_micro_batch_is_worked_on(
    con: lh.Connection, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = con.create_table("m.asked", SCHEMA)
    sessions, commands = list[Any](), list[str]()

    def step(batch: DataFrame, out: Layers) -> None:
        sessions.append(batch.sparkSession)
        out.upsert("m.written", batch.toArrow(), primary_key=["id"])

    query = lhs.pipeline(stream_of(con, spark, "m.asked"), step)
    for n in range(3):
        table.append(rows(range(n, n + 2)))
        query.processAllAvailable()
    send = ClientServerConnection.send_command

    def noted(self: ClientServerConnection, command: str, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            commands.append(command)
        return send(self, command, *args)

    monkeypatch.setattr(ClientServerConnection, "send_command", noted)
    table.append(rows(range(20, 25)))
    query.processAllAvailable()
    query.stop()
    assert [c for c in commands if not c.startswith("m\nd\n")] == []  # what Python lets go of, the JVM may forget
    assert con.table("m.written").scan().count() == 9
    assert len(set(map(id, sessions))) == 1
    assert sessions[0].sql("select 1").collect()
