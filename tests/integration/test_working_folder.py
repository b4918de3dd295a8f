"""A process whose working directory was removed, as by a deployment, is told so by what asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys, lakehead as lh

folder, away, what, first = sys.argv[1:]
os.mkdir(away)
os.chdir(away)
with lh.connect(folder) as con:
    table = con.create_table("t", [("k", "int64")], lake="iceberg")
    table.append([{"k": 1}])
    calls = {"sql": lambda: con.sql("from t").fetchall(), "tier": lambda: con.tier("t")}
    if first == "used":
        calls["sql"](), calls["tier"]()
        table.append([{"k": 2}])
    os.rmdir(away)
    try:
        print(calls[what]())
    except lh.StorageError as e:
        print(e)
    os.chdir(folder)
    calls[what]()
    assert table.scan().count() == (2 if first == "used" else 1)
"""


@pytest.mark.parametrize("first", ["used", "new"])
@pytest.mark.parametrize("what", ["sql", "tier"])
def test_it_is_gone(tmp_path: Path, what: str, first: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _SCRIPT,
        str(tmp_path / "data"),
        str(tmp_path / "away"),
        what,
        first,
    ]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the working directory of this process is gone")
