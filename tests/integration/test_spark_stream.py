"""`spark.readStream` in real queries: checkpoints, triggers, restarts, and how a query ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from tests.integration.conftest import embedded_only
from tests.waiting import WAIT_SECONDS

import lakehead as lh
import lakehead.spark as lhs
from lakehead.errors import SchemaChangedError
from lakehead.spark.stream import LIMITED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, embedded_only]

LOG = pa.schema([("day", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
KEYED = pa.schema([("id", pa.int64()), ("text", pa.string())])


class Sink:
    """Rows of each micro-batch; one that is delivered again replaces what it delivered before."""

    def __init__(self, spark: SparkSession, con: lh.Connection, checkpoint: Path) -> None:
        self._spark, self._con, self._checkpoint = spark, con, checkpoint
        self.batches: dict[int, list[dict[str, Any]]] = {}

    def start(self, table: str, *, now: bool = True, **options: object) -> StreamingQuery:
        source = self._spark.readStream.format("lakehead").options(uri=self._con.uri, table=table, **options).load()
        writer = source.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self._checkpoint))
        return (writer.trigger(availableNow=True) if now else writer).start()

    def run(self, table: str, **options: object) -> StreamingQuery:
        """All that there is now."""
        query = self.start(table, **options)
        assert query.awaitTermination(60)
        return query

    def _take(self, frame: DataFrame, batch: int) -> None:
        self.batches[batch] = frame.toArrow().to_pylist()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, rows in sorted(self.batches.items()) for row in rows]


def clicks(*numbers: int) -> list[dict[str, Any]]:
    return [{"day": f"d{n % 3}", "n": n} for n in numbers]


def test_a_query_goes_on_where_its_checkpoint_is(spark: SparkSession, con: lh.Connection, tmp_path: Path) -> None:
    """Over rounds, a trimmed log, partitions that are new, and a micro-batch of which Spark forgot that it was done."""
    limits, sizes = ({"max_rows_per_trigger": 15}, [15, 15, 10]) if LIMITED else ({}, [40])
    end = len(sizes) - 1
    table = con.create_table("q.clicks", LOG, partition_by=["day"], lake="iceberg", hot_retention="0s")
    table.append(clicks(*range(40)))
    sink = Sink(spark, con, tmp_path)
    query = sink.run("q.clicks", start="earliest", **limits)
    assert [len(rows) for _, rows in sorted(sink.batches.items())] == sizes
    (progress,) = lhs.progress(query)
    assert (progress.table, progress.input_rows, progress.lag_rows) == ("q.clicks", sizes[end], 0)
    kept = json.loads((tmp_path / "offsets" / str(end)).read_text().splitlines()[-1])
    assert kept["table"] == "q.clicks" and sum(kept["offsets"].values()) == 40 and "live" not in kept
    con.tier("q.clicks")
    con._server.service.maintain()  # type: ignore[attr-defined]
    table.append([*clicks(*range(40, 45)), {"day": "new", "n": 45}])
    last = sink.batches.pop(end)
    for lost in tmp_path.glob(f"commits/*{end}*"):
        lost.unlink()
    sink.run("q.clicks", start="earliest", **limits)
    assert sorted(sink.batches[end], key=str) == sorted(last, key=str), "from the lake, what came from the log"
    if not LIMITED:  # one micro-batch is all that a run has there: the one that was not done
        sink.run("q.clicks", start="earliest", **limits)
    assert sorted(r["n"] for r in sink.rows) == list(range(46))


def test_a_query_follows_a_table_until_it_is_altered(
    spark: SparkSession, con: lh.Connection, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    table = con.create_table("q.live", LOG, partition_by=["day"])
    table.append(clicks(0))
    sink = Sink(spark, con, tmp_path)
    query = sink.start("q.live", now=False)
    try:
        wait_until(lambda: query.lastProgress is not None)
        assert sink.rows == [], "it starts with what comes"
        for n in range(1, 4):
            table.append(clicks(n))
            wait_until(lambda n=n: len(sink.rows) == n)
        with table.alter() as change:
            change.add_column("price", pa.int32())
        with pytest.raises(
            StreamingQueryException, match=r"SchemaChangedError: .* schema 1, the columns .*price int32"
        ) as ended:
            query.awaitTermination(60)
        told = lhs.raised(ended.value)
        assert isinstance(told, SchemaChangedError) and str(told).startswith("table q.live was altered")
    finally:
        query.stop()
    table.append([{"day": "d9", "n": 4, "price": 7}])
    sink.run("q.live")
    assert [r["n"] for r in sink.rows] == list(range(1, 5)) and sink.rows[-1]["price"] == 7


@pytest.mark.parametrize("alteration", ["drop", "rename", "another type", "columns"])
def test_a_table_that_is_altered_before_its_stream_starts_stops_it(
    spark: SparkSession, con: lh.Connection, tmp_path: Path, alteration: str
) -> None:
    """Also by what takes a column away that the stream has, or wants."""
    name = f"q.early_{alteration.replace(' ', '_')}"
    table = con.create_table(name, KEYED)
    table.append([{"id": 1, "text": "a"}])
    wanted = {"columns": "text"} if alteration == "columns" else {}
    options = {"uri": con.uri, "table": name, "start": "earliest", **wanted}
    stream = spark.readStream.format("lakehead").options(**options).load()
    with table.alter() as change:
        if alteration == "rename":
            change.rename_column("text", "words")
        else:
            change.drop_column("text")
        if alteration == "another type":
            change.add_column("text", pa.int32())
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    with pytest.raises(StreamingQueryException) as ended:
        writer.trigger(availableNow=True).start().awaitTermination(WAIT_SECONDS)
    told = lhs.raised(ended.value)
    now = {"rename": "id int64, words string", "another type": "id int64, text int32"}.get(alteration, "id int64")
    assert isinstance(told, SchemaChangedError)
    assert f"the columns {now}: " in str(told) and "start the query from its checkpoint" in str(told)


def test_the_first_micro_batch_comes_again_as_it_was(spark: SparkSession, con: lh.Connection, tmp_path: Path) -> None:
    """Spark asks a source anew where the first micro-batch begins."""
    table = con.create_table("q.first", KEYED, primary_key=["id"])
    table.upsert([{"id": i, "text": "a"} for i in range(3)])
    sink = Sink(spark, con, tmp_path)
    sink.run("q.first", start="full", changelog="true")
    first = sink.batches.pop(0)
    for lost in tmp_path.glob("commits/*0*"):
        lost.unlink()
    table.delete([1])
    table.upsert([{"id": 3, "text": "b"}])
    for _ in range(1 if LIMITED else 2):
        sink.run("q.first", start="full", changelog="true")
    assert sink.batches[0] == first
    changes = [(r["__change_type"], r["id"]) for r in sink.rows]
    assert changes == [("+I", 0), ("+I", 1), ("+I", 2), ("-D", 1), ("+I", 3)]


def test_where_a_query_began_may_be_gone(spark: SparkSession, con: lh.Connection, tmp_path: Path) -> None:
    """One that goes on from its checkpoint is where that says, whatever its options ask for."""
    table = con.create_table("q.gone", KEYED, primary_key=["id"], lake="iceberg", hot_retention="0s")
    table.upsert([{"id": i, "text": "a"} for i in range(10)])
    sink = Sink(spark, con, tmp_path)
    sink.run("q.gone", start="1970-01-01T00:00:00Z")
    assert len(sink.rows) == 10
    con.tier("q.gone")
    con._server.service.maintain()  # type: ignore[attr-defined]
    assert min(table.status()["start_offset"].to_pylist()) > 0
    table.upsert([{"id": 1, "text": "b"}])
    sink.run("q.gone", start="1970-01-01T00:00:00Z")
    assert sink.rows[10:] == [{"id": 1, "text": "b"}]


def test_changes_of_a_keyed_table(spark: SparkSession, con: lh.Connection, tmp_path: Path) -> None:
    table = con.create_table("q.users", KEYED, primary_key=["id"], buckets=2, lake="iceberg")
    table.upsert([{"id": i, "text": "a"} for i in range(20)])
    con.tier("q.users")
    table.upsert([{"id": i, "text": "b"} for i in range(15, 25)])
    sink = Sink(spark, con, tmp_path)
    sink.run("q.users", start="full", changelog="true", columns="id")
    assert sorted(r["id"] for r in sink.batches[0]) == list(range(25))
    assert {r["__change_type"] for r in sink.batches[0]} == {"+I"}
    table.delete([{"id": 3}])
    table.upsert([{"id": 4, "text": "c"}])
    sink.run("q.users", start="full", changelog="true", columns="id")
    changes = sorted((r["id"], r["__change_type"]) for r in sink.batches[1])
    assert changes == [(3, "-D"), (4, "+U"), (4, "-U")]
    assert list(sink.batches[1][0]) == ["id", "__change_type", "__bucket", "__offset", "__timestamp"]


def test_how_a_query_ends(spark: SparkSession, con: lh.Connection, tmp_path: Path) -> None:
    table = con.create_table("q.ends", KEYED)
    table.append([{"id": 1, "text": "a"}])
    sink = Sink(spark, con, tmp_path)
    sink.run("q.ends", start="earliest")
    con.drop_table("q.ends")
    with pytest.raises(AnalysisException, match="TableNotFoundError: there is no table"):
        sink.start("q.ends")
    con.create_table("q.ends", KEYED)
    with pytest.raises(
        StreamingQueryException, match=r"TableNotFoundError: table q\.ends, which this query's checkpoint"
    ):
        sink.run("q.ends")
    with pytest.raises(AnalysisException, match="did you mean 'start'"):
        sink.start("q.ends", starts="latest")
    with pytest.raises(StreamingQueryException, match=r"option tier is for spark\.read, not for spark\.readStream"):
        sink.run("q.ends", tier="lake")
    nowhere = {"uri": "lakehead://127.0.0.1:1", "table": "q.ends"}
    with pytest.raises(AnalysisException, match="UnavailableError: no Lakehead server answers"):
        spark.readStream.format("lakehead").options(**nowhere).load()


def test_changes_that_a_log_has_forgotten_come_from_the_lake(
    spark: SparkSession, con: lh.Connection, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"hot_retention": "0s", "segment_bytes": 1024, "lake_changelog": True}
    table = con.create_table("q.kept", KEYED, primary_key=["id"], buckets=2, lake="iceberg", **how)
    for n in range(5):
        table.upsert([{"id": i, "text": str(n)} for i in range(n, 40)])
        table.delete([n])
        con.tier("q.kept")
        con._server.service.maintain()  # type: ignore[attr-defined]
    assert min(table.status()["start_offset"].to_pylist()) > 0
    columns = ["__bucket", "__offset", "__change_type", "id", "text"]

    def ordered(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted(tuple(r[c] for c in columns) for r in rows)

    want = ordered([r for b in table.subscribe("earliest", stop="now") for r in b.rows.to_pylist()])
    read = spark.read.format("lakehead").options(uri=con.uri, table="q.kept$changelog").load()
    assert ordered(read.toArrow().to_pylist()) == want
    assert ordered(lhs.sql(spark, "select * from q.kept$changelog").toArrow().to_pylist()) == want
    sink = Sink(spark, con, tmp_path)
    sink.run("q.kept$changelog", start="earliest", **({"max_rows_per_trigger": 60} if LIMITED else {}))
    assert ordered(sink.rows) == want and (len(sink.batches) > 3 or not LIMITED)
