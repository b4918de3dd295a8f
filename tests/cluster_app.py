"""An application on a Spark cluster, in each way that Lakehead reads and writes by; prints what it saw as JSON.

``spark-submit ... cluster_app.py URI [fail|unknown]``, with the server's token in ``LAKEHEAD_TOKEN``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import lakehead as lh
import lakehead.spark as lhs
from lakehead.cli.main import main

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


def half_hot(con: lh.Connection) -> lh.Table:
    """A keyed table of 120 rows in 170 changes: some in the lake, some in the log, some in both."""
    table = con.create_table("app.source", SCHEMA, primary_key="id", lake="iceberg", buckets=2)
    table.upsert([{"id": i, "v": "old"} for i in range(100)])
    con.tier(table.name)
    table.upsert([{"id": i, "v": "new"} for i in range(50, 120)])
    return table


def copied(con: lh.Connection, spark: Any, name: str, how: Any = None, into: str = "app.copy") -> None:
    """A query that reads a Lakehead table and writes another one."""
    stream = spark.readStream.format("lakehead").options(uri=con.uri, table=name, start="earliest").load()
    stream = stream if how is None else stream.mapInArrow(how, stream.schema)
    sink = {"uri": con.uri, "table": into, "checkpointLocation": (Path.cwd() / f"checkpoint-{into}").as_uri()}
    query = stream.writeStream.format("lakehead").options(**sink).trigger(availableNow=True).start()
    query.awaitTermination()


class RunTwice:
    """Rows as they are, of four partitions, the first of which is slow until Spark runs it a second time: then both
    attempts come to their end at once. Files of their names say which came there.

    Goes to executors by value.
    """

    def __init__(self, name: str) -> None:
        self._name = str(Path.cwd() / name)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import threading
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == 0:
            with open(f"{self._name}-{context.attemptNumber()}", "w"):
                deadline = time.monotonic() + 300
            other = f"{self._name}-{0 if context.attemptNumber() else 1}"
            while not os.path.exists(other) and time.monotonic() < deadline:
                threading.Event().wait(0.005)


def speculated(con: lh.Connection, spark: Any) -> dict[str, Any]:
    """What is in tables after tasks that write them ran twice: how many rows, and how many keys."""
    rows = spark.range(0, 400, 1, 4).selectExpr("id", "string(id) v")
    into = {"uri": con.uri, "table": "app.batch"}
    twice = rows.mapInArrow(RunTwice("batch"), rows.schema)
    twice.write.format("lakehead").options(**into).mode("append").save()
    lhs.write(rows.mapInArrow(RunTwice("call"), rows.schema), "app.call")
    four = con.create_table("app.four", SCHEMA, buckets=4)
    four.append([{"id": i, "v": "a"} for i in range(400)])
    copied(con, spark, four.name, RunTwice("stream"), into="app.streamed")
    found = {name: con.table(f"app.{name}").scan().to_arrow() for name in ("batch", "call", "streamed")}
    ran = sorted(path.name for name in ("batch", "call", "stream") for path in Path.cwd().glob(f"{name}-?"))
    return {"ran": ran, **{n: [t.num_rows, len(set(t["id"].to_pylist()))] for n, t in found.items()}}


def told(do: Callable[[], object]) -> list[str | None]:
    """What an action failed with: the kind of Lakehead's error in it, and what that names."""
    try:
        do()
    except Exception as e:
        error = lhs.raised(e)
        assert error is not None, f"{type(e).__name__}: {e}"
        return [type(error).__name__, str(error.context.get("module") or error.context.get("python"))]
    return [None, None]


def fail(uri: str) -> dict[str, Any]:
    """What executors that lack Lakehead have each of it fail with."""
    from pyspark.sql import SparkSession

    seen: dict[str, Any] = {}
    token = os.environ["LAKEHEAD_TOKEN"]
    with lh.connect(uri, token=token) as con:
        name = half_hot(con).name
        spark = SparkSession.builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        seen["attach"] = told(lambda: lhs.attach(spark, con))
        # A session that nobody looked at.
        seen["source"] = told(spark.read.format("lakehead").options(uri=uri, table=name).load().collect)
        into = spark.range(9).write.format("lakehead").options(uri=uri, table="app.never").mode("append")
        seen["write"] = told(into.save)
        seen["stream"] = told(lambda: copied(con, spark, name))
        made = set(con.tables())  # a stream makes its table with its first rows
        seen["rows"] = [con.table(t).scan().count() if t in made else 0 for t in ("app.never", "app.copy")]
        seen["code"] = main(["--uri", uri, "tier", "run", "--until-idle", "--table", name])
    return seen


def shown(spark: Any) -> list[Any]:
    """What Spark's page has: descriptions of jobs, and the settings as text."""
    context = spark.sparkContext
    page = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}"
    texts = [urllib.request.urlopen(f"{page}/{of}", timeout=120).read().decode() for of in ("jobs", "environment")]
    return [[job.get("description", "") for job in json.loads(texts[0])], texts[1]]


@contextlib.contextmanager
def kept(spark: Any) -> Iterator[None]:
    """Do not let what runs meanwhile stop the session."""
    stop, type(spark).stop = type(spark).stop, lambda self: None
    try:
        yield
    finally:
        type(spark).stop = stop


def unknown(uri: str) -> list[str | None]:
    """What a session meets whose executors have no token: the driver's is in its user's files."""
    with lh.connect(uri) as con:
        return told(lambda: lhs.session(con))


def run(uri: str) -> dict[str, Any]:
    """All of it; how many rows there were each time."""
    seen: dict[str, Any] = {}
    token = os.environ["LAKEHEAD_TOKEN"]
    with lh.connect(uri, token=token) as con:
        table = half_hot(con)
        if "unknown" in sys.argv:
            seen["unknown"] = unknown(uri)[0]
        spark = lhs.session(con)
        seen["table"] = lhs.table(spark, table.name).where("v = 'new'").count()
        seen["source"] = spark.read.format("lakehead").options(uri=uri, table=table.name).load().count()
        rows = spark.range(1000).selectExpr("id", "string(id) v")
        into = {"uri": uri, "table": "app.written", "lake": "iceberg"}
        rows.write.format("lakehead").options(**into).mode("append").save()
        seen["write"] = con.table("app.written").scan().count()
        copied(con, spark, table.name)
        seen["stream"] = con.table("app.copy").scan().count()
        if spark.conf.get("spark.speculation", "false") == "true":
            seen["twice"] = speculated(con, spark)
        words = ["--uri", uri, "tier", "run", "--until-idle", "--table", "app.written"]
        with kept(spark):
            seen["code"] = main([*words, "--master", spark.sparkContext.master])
        seen["tier"] = con.table("app.written").scan(tier="lake").count()
        seen["shown"] = shown(spark)
    return seen


if __name__ == "__main__":
    print(json.dumps((fail if "fail" in sys.argv else run)(sys.argv[1])))
