"""Programs started by a process that serves or served a folder: a fork must not touch what it inherits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import lakehead as lh

SCHEMA = pa.schema([("k", pa.int64())])


def start_another_program() -> None:
    # A function to run in the child makes it a real fork, with everything that is to happen after one.
    done = subprocess.run([sys.executable, "-c", "print('ran')"], preexec_fn=int, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, b"ran")


def test_while_serving_and_after(tmp_path: Path) -> None:
    for i in range(3):
        con = lh.connect(tmp_path / str(i))
        table = con.create_table("t", SCHEMA)
        table.append([{"k": 1}])
        start_another_program()
        with lh.connect(con.uri) as remote:
            remote.table("t").append([{"k": 2}])
            subscription = remote.table("t").subscribe("latest")
            start_another_program()
            subscription.close()
        con.close()
        start_another_program()


def test_while_a_client_still_holds_on_to_a_stopped_server(tmp_path: Path) -> None:
    con = lh.connect(tmp_path)
    con.create_table("t", SCHEMA)
    remote = lh.connect(con.uri)
    assert remote.tables() == ["default.t"]
    con.close()
    start_another_program()
    remote.close()
    start_another_program()
