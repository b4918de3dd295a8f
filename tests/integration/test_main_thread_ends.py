"""A program's threads go on when its main thread has come to its end, and so does Lakehead under them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

_PROGRAM = """
import sys
import threading

import pyarrow as pa

import lakehead as lh

log_schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
con = lh.connect(sys.argv[1])
log = con.create_table("t", log_schema, buckets=2, lake="iceberg", durability=sys.argv[2])
keyed = con.create_table("k", log_schema, primary_key=["id"], buckets=4, lake="iceberg", lake_changelog=True)
rows = [{"id": i, "v": "x"} for i in range(40_000)]


def stream():
    with log.writer() as writer:
        for at in range(0, 20_000, 5_000):
            writer.append(rows[at : at + 5_000])


def work():
    threading.main_thread().join()
    for n in range(2):
        log.append(rows)
        stream()
        keyed.upsert(rows[:100])
        keyed.delete([n])
        con.tier("t")
        con.tier("k")
        assert log.scan().count() == log.scan(tier="lake").to_arrow().num_rows == 60_000 * (n + 1)
        assert sum(b.rows.num_rows for b in log.subscribe("earliest", stop="now")) == 60_000 * (n + 1)
        assert keyed.lookup([0, 1, 2]).num_rows == 2
        assert con.sql("select count(*) from k where id > 1").fetchall() == [(98,)]
        assert con.sql("select count(*) from t where id = 7").fetchall() == [(2 * (n + 1),)]
        five = [keyed.scan(["v"], where="id = 5", tier=tier).to_arrow()["v"].to_pylist() for tier in ("union", "lake")]
        assert five == [["x"], ["x"]]
        con.create_table(f"other{n}", log_schema, lake="iceberg").append(rows[:3])
    con.close()
    print("done")


threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("durability", ["os", "sync"])
def test_calls_of_other_threads_end_after_it_as_before(tmp_path: Path, durability: str) -> None:
    program = [sys.executable, "-c", _PROGRAM, str(tmp_path), durability]
    found = subprocess.run(program, capture_output=True, text=True, timeout=2 * WAIT_SECONDS)
    assert (found.returncode, found.stdout, found.stderr) == (0, "done\n", "")
