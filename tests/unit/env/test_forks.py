"""A forked child destroys nothing that it inherited. Each case forks in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import gc, os, sys, tempfile, weakref
import pyarrow as pa
import lakehead as lh
import lakehead.spark.connections as connections
from lakehead.env import forks

folder = sys.argv[1]


def in_child(check):
    child = os.fork()
    if child == 0:
        status = 3
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()
"""
CASES = {
    "garbage": """
class Held: pass

garbage = [Held()]
garbage.append(garbage)
seen = weakref.ref(garbage[0])
gc.disable()
del garbage
gc.enable()

def check():
    gc.collect()
    return seen() is not None and gc.isenabled()

in_child(check)
gc.collect()
assert seen() is None
""",
    "connections of Spark workers": """
with lh.connect(folder) as con:
    con.create_table("t", pa.schema([("k", pa.int64())]))
    far = connections.worker_table(con.uri, "t")
    seen = weakref.ref(next(iter(connections._of_process.values())))
    del far
    in_child(lambda: seen() is not None and not connections._of_process)
    connections._of_process.popitem()[1].close()
""",
    "hosts": """
from lakehead.api import folder as folders

con = lh.connect(folder)
seen = weakref.ref(next(iter(folders._hosts.values()))[0])
in_child(lambda: seen() is not None and not folders._hosts)
con.close()
""",
    "a collector that is off stays off": """
gc.disable()
child = os.fork()
if child == 0:
    os._exit(gc.isenabled())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not gc.isenabled()
""",
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_inherited_is_destroyed(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + CASES[case], str(tmp_path)]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
