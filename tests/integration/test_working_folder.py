"""A process whose working directory was removed, as by a deployment, is told so by what asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys, lakehead as lh

folder, away, first = sys.argv[1:]
if first == "later":  # another process has made the table
    if os.fork() == 0:
        with lh.connect(folder) as con:
            con.create_table("t", [("k", "int64")], lake="iceberg").append([{"k": 0}])
            con.tier("t")
        os._exit(0)
    assert os.wait()[1] == 0
os.mkdir(away)
os.chdir(away)
with lh.connect(folder) as con:
    if first != "later":
        con.create_table("t", [("k", "int64")], lake="iceberg").append([{"k": 0}])
    table = con.table("t")
    table.append([{"k": 1}])
    calls = {
        "tier": lambda: con.tier("t").rows,
        "scan": lambda: table.scan().to_arrow().num_rows,
        "sql": lambda: len(con.sql("from t").fetchall()),
        "create": lambda: con.create_table("u", [("k", "int64")], lake="iceberg").name,
    }
    if first == "used":
        calls["sql"](), calls["tier"]()
        table.append([{"k": 2}])
    os.rmdir(away)
    for name, call in calls.items():
        try:
            print(name, call())
        except lh.StorageError as e:
            print(name, e)
    assert con.tables() == ["default.t"]
    os.chdir(folder)
    print(*(call() for call in calls.values()))
"""


@pytest.mark.parametrize(("first", "scanned", "then"), [
    ("new", "2", "2 2 2 default.u"),  # nothing is in the lake yet
    ("later", None, "1 2 2 default.u"),
    ("used", None, "1 3 3 default.u"),
])  # fmt: skip
def test_it_is_gone(tmp_path: Path, first: str, scanned: str | None, then: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tmp_path / "data"), str(tmp_path / "away"), first]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *told, last = done.stdout.splitlines()
    assert last == then
    for name, text in (line.split(" ", 1) for line in told):
        if name == "scan" and scanned is not None:
            assert text == scanned
        else:
            assert text.startswith("the working directory of this process is gone"), name
