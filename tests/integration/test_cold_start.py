"""A process that has just begun loads what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

_WORK = """
import signal, os, sys
import pyarrow as pa
import lakehead as lh

folder, rows = sys.argv[1], pa.ipc.open_stream(sys.argv[2]).read_next_batch()
with lh.connect(folder) as con:
    if not con.tables():
        keyed = con.create_table("s.keyed", rows.schema, primary_key=["k", "r"], buckets=2)
        log = con.create_table("s.log", rows.schema, buckets=2)
        for _ in range(2):
            log.append(rows)
            keyed.upsert(rows)
        keyed.upsert(rows.select(["k", "r", "w"]).slice(50))
        keyed.delete(rows.select(["k", "r"]).slice(90))
    keyed, log = con.table("s.keyed"), con.table("s.log")
    assert keyed.get({"k": 3, "r": "r3"})["v"] == 1.5 and keyed.get({"k": 95, "r": "r95"}) is None
    assert keyed.lookup(rows.select(["k", "r"])).num_rows >= 90
    assert keyed.scan().to_arrow().num_rows == 90 and log.scan(columns=["v"]).to_arrow().num_rows == 200
    assert log.scan().count() == 200
    if len(sys.argv) > 3:
        print("written", "pandas" in sys.modules, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
print("pandas" in sys.modules)
"""


def test_the_first_row_of_a_process_does_not_wait_for_pandas(tmp_path: Path) -> None:
    """Loading it takes most of a second, when its files were not read lately."""
    rows = pa.table(
        {
            "k": pa.array(range(100), pa.int64()),
            "r": [f"r{i}" for i in range(100)],
            "v": [None if i % 7 == 0 else i / 2 for i in range(100)],
            "w": ["x" * i if i % 5 else None for i in range(100)],
            "b": [i % 3 == 0 for i in range(100)],
            "t": pa.array(range(100), pa.timestamp("us", "UTC")),
        },
    )
    required = [rows.field(n).with_nullable(False) if n in ("k", "r") else rows.field(n) for n in rows.schema.names]
    rows = rows.cast(pa.schema(required))
    with pa.OSFile(str(tmp_path / "rows"), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    command = [sys.executable, "-c", _WORK, str(tmp_path / "data"), str(tmp_path / "rows")]
    killed = subprocess.run([*command, "kill"], capture_output=True, text=True, timeout=120)
    assert killed.stdout == "written False\n", killed.stderr
    restarted = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert restarted.stdout == "False\n", restarted.stderr


def test_processes_that_plan_for_spark_do_not_load_pandas() -> None:
    """Each stream that is started has one of its own, which begins with nothing."""
    modules = ["spark.stream", "spark.source", "spark.sink", "spark.worker", "spark.change_feed", "tiering.round"]
    text = f"import importlib, sys; [importlib.import_module('lakehead.' + m) for m in {modules}]"
    found = subprocess.run(
        [sys.executable, "-c", f"{text}; print('pandas' in sys.modules)"], capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "False\n", found.stderr


_LAKE = """
import sys
import pyarrow as pa
import lakehead as lh

with lh.connect(sys.argv[1]) as con:
    table = con.create_table("s.t", pa.schema([("k", pa.int64())]), primary_key=["k"], lake="iceberg")
    table.upsert([{"k": 1}])
    con.tier("s.t")
    assert con.sql("select max(k) from s.t").fetchall() == [(1,)]
    con.drop_table("s.t", purge=True)
print(sorted({"requests", "pyiceberg.catalog.rest"} & sys.modules.keys()))
"""


def test_what_rest_catalogs_need_is_loaded_for_one_alone(tmp_path: Path) -> None:
    """It is a tenth of what the first statement of a process takes."""
    found = subprocess.run(
        [sys.executable, "-c", _LAKE, str(tmp_path / "data")], capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "[]\n", found.stderr
