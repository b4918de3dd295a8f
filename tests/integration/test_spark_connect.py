"""Spark Connect, whose sessions have no ``sparkContext``, and the declarative pipelines that stand on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import lakehead as lh
from lakehead.api.table import Table

pytestmark = pytest.mark.spark(apart=True)

ROOT = Path(__file__).parents[2]
EVENTS = pa.schema([("event_id", pa.int64()), ("kind", pa.string())])
WAIT_SECONDS = 240
_CLIENT = """
import json, sys
from pyspark.sql import SparkSession
uri, checkpoint = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
at = lambda table, **more: {"uri": uri, "table": table, **more}
read = lambda table, **more: spark.read.format("lakehead").options(**at(table, **more)).load()
found = {"session": type(spark).__module__}
found["rows"] = sorted(map(list, read("a.events").collect()))
found["some"] = read("a.events", columns="kind").where("kind = 'new'").count()
rows = spark.createDataFrame([(11, "late")], "event_id long, kind string")
rows.write.format("lakehead").options(**at("a.events")).mode("append").save()
stream = spark.readStream.format("lakehead").options(**at("a.events", start="full")).load()
write = stream.writeStream.format("lakehead").options(**at("a.copy", primary_key="event_id"))
write = write.option("checkpointLocation", checkpoint)
query = write.trigger(availableNow=True).start()
query.awaitTermination()
found["copied"] = read("a.copy").count()
import lakehead as lh, lakehead.spark as lhs
found["progress"] = [[p.table, p.lag_rows] for p in lhs.progress(query)]
refused = []
calls = [lambda: lhs.attach(spark, uri), lambda: lhs.table(spark, "a.events"), lambda: lhs.sql(spark, "select 1")]
for call in (*calls, lambda: lhs.session(uri)):
    try:
        call()
    except lh.InvalidRequestError as e:
        refused.append(str(e))
found["refused"] = refused
print(json.dumps(found))
"""


@pytest.fixture
def con(tmp_path: Path) -> Iterator[lh.Connection]:
    with lh.connect(tmp_path / "data") as made:
        yield made


def events(con: lh.Connection, name: str, **how: object) -> Table:
    """Ten in the lake, of which one is replaced since."""
    table = con.create_table(name, EVENTS, lake="iceberg", **how)
    write = table.upsert if table.primary_key else table.append
    write([{"event_id": n, "kind": "old"} for n in range(10)])
    con.tier(name)
    write([{"event_id": 3, "kind": "new"}])
    return table


def spark_process(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: one with a classic session takes no other."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SPARK_") or k == "SPARK_SUBMIT_OPTS"}
    paths = os.pathsep.join([*sys.path, str(ROOT)])
    env = {**kept, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": paths, **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_SECONDS)


def test_a_session_of_spark_connect_reads_writes_and_streams(con: lh.Connection, tmp_path: Path) -> None:
    table = events(con, "a.events", primary_key=["event_id"])
    done = spark_process(sys.executable, "-c", _CLIENT, con.uri, str(tmp_path / "checkpoint"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["session"] == "pyspark.sql.connect.session"
    assert found["rows"] == [[n, "new" if n == 3 else "old"] for n in range(10)] and found["some"] == 1
    assert found["copied"] == table.scan().count() == 11
    assert found["progress"] == [["a.events", 0]]
    assert len(found["refused"]) == 4 and all("Spark Connect" in e for e in found["refused"])


def test_the_shop_has_a_declarative_pipeline(con: lh.Connection, tmp_path: Path) -> None:
    table = events(con, "bronze.events")
    table.append([{"event_id": 5, "kind": "twice"}])
    there = tmp_path / "shop"
    shutil.copytree(ROOT / "examples" / "shop" / "declarative", there / "declarative")
    spec = (ROOT / "examples" / "shop" / "spark-pipeline.yml").read_text()
    assert "file:///tmp/lakehead-shop-pipeline" in spec
    (there / "spark-pipeline.yml").write_text(spec.replace("/tmp/lakehead-shop-pipeline", str(tmp_path / "flows")))
    command = Path(sys.executable).with_name("spark-pipelines")
    done = spark_process(str(command), "run", "--spec", str(there / "spark-pipeline.yml"), LAKEHEAD_URI=con.uri)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = {r["event_id"]: r["kind"] for r in con.table("silver.clean").scan().to_arrow().to_pylist()}
    assert rows == {n: {3: "new", 5: "twice"}.get(n, "old") for n in range(10)}
