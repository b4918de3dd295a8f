"""Programs started by a process that serves or served a folder: a fork must not touch what it inherits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tests.waiting import WAIT_SECONDS

import lakehead as lh

SCHEMA = pa.schema([("k", pa.int64())])


def start_another_program() -> None:
    # A function to run in the child makes it a real fork, with everything that is to happen after one.
    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"], preexec_fn=int, capture_output=True, timeout=WAIT_SECONDS
    )
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


_CHILD_EXITS = """
import os, sys, lakehead as lh
from lakehead.api.feed import Feed

with lh.connect(sys.argv[1]) as serving, lh.connect(serving.uri) as remote:
    con = remote if sys.argv[2] == "remote" else serving
    table = con.create_table("t", [("k", "int64")], primary_key="k")
    followed, named = table.subscribe("latest"), table.writer("w")
    named.upsert([{"k": 1}])
    named.flush()
    next(followed)
    class Cycle: pass
    cycle = Cycle()
    cycle.itself, cycle.followed = cycle, table.subscribe("earliest")
    next(cycle.followed)
    child = os.fork()
    if child == 0:
        if sys.argv[3] == "closes":
            followed.close()
            del followed
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    Feed._forget_stream = lambda self: print("the parent's stream broke", file=sys.stderr)
    table.upsert([{"k": 2}])
    assert next(followed).rows["k"].to_pylist() == [2] and next(cycle.followed).rows["k"].to_pylist() == [2]
    named.upsert([{"k": 3}])
    named.close()
"""


@pytest.mark.parametrize("how", ["exits", "closes"])
@pytest.mark.parametrize("where", ["serving", "remote"])
def test_a_child_that_ends_takes_nothing_from_its_parent_and_says_nothing(tmp_path: Path, where: str, how: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _CHILD_EXITS, str(tmp_path), where, how]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


_CHILD_LETS_GO = """
import gc, os, sys, threading, lakehead as lh

at, used, how = sys.argv[1:]
serving = lh.connect(at)
con = lh.connect(serving.uri)
table = con.create_table("t", [("k", "int64")], primary_key="k")
table.upsert([{"k": k} for k in range(9)])
if used == "sql":
    assert con.sql("select count(*) from t").fetchone() == (9,)
if used == "relation":
    held = con.sql("select * from t a, t b")
    held.fetchone()
if used == "alone":  # what is left of a connection
    held = con.sql("select * from t")
    con = None
    gc.collect()
if used == "catalog":  # which has a DuckDB of its own
    held = con.sql("select count(*) from duckdb_tables()")
    assert held.fetchone() is not None
if used == "stream":
    held = table.subscribe("earliest")
    next(held)
if used == "scan":
    held = table.scan().to_reader()
    held.read_next_batch()
while idle := [t for t in threading.enumerate() if t.name == "lakehead-idle"]:
    idle[0].join()  # while it runs, its frame keeps in children what it looks after
child = os.fork()
if child == 0:
    if how == "closes":
        serving.close()
        if con is not None:
            con.close()
    if how == "drops":
        held = table = con = serving = None
        gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
table.upsert([{"k": 10}])
assert table.get({"k": 10}) == {"k": 10}
"""


@pytest.mark.parametrize("how", ["exits", "closes", "drops"])
@pytest.mark.parametrize("used", ["calls", "sql", "relation", "alone", "catalog", "stream", "scan"])
def test_a_child_may_let_go_of_what_it_inherits(tmp_path: Path, used: str, how: str) -> None:
    """What libraries have threads for: their destructors would wait for them, or end the child by a signal."""
    command = [sys.executable, "-W", "ignore", "-c", _CHILD_LETS_GO, str(tmp_path), used, how]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


_CHILD_CONNECTS = """
import os, sys, lakehead as lh

def child(used):
    pid = os.fork()
    if pid == 0:
        try:
            lh.connect(sys.argv[1]).close()
        except lh.InvalidRequestError as e:
            os._exit(0 if used and "spawn" in str(e) else 1)
        os._exit(0 if not used else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

child(used=False)
with lh.connect(sys.argv[1]) as con:
    con.create_table("t", [("k", "int64")]).append([{"k": 1}])
    child(used=True)
child(used=True)
"""


def test_a_child_of_who_has_connected_is_told_that_it_cannot(tmp_path: Path) -> None:
    """What gRPC has running in the parent the child lacks: it would be ended by a signal, sooner or later."""
    command = [sys.executable, "-W", "ignore", "-c", _CHILD_CONNECTS, str(tmp_path)]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
