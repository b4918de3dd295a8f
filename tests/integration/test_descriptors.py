"""A process that may open no more files: what a call needs to read first, code too, is refused with a typed error. And
one without standard streams: no file of ours gets their numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

PROGRAM = """
import os, resource, sys
import lakehead as lh

con = lh.connect(sys.argv[1])
table = con.create_table("a.k", [("id", "int64")], primary_key="id")
table.upsert([{"id": i} for i in range(100)])
in_lake = con.create_table("a.l", [("id", "int64")], primary_key="id", lake="iceberg")
in_lake.upsert([{"id": i} for i in range(100)])
in_lake.lake.tier()
in_lake.upsert([{"id": i} for i in range(10)])
calls = {
    "get": lambda: table.get(1) == {"id": 1},
    "sql": lambda: con.sql("select count(*) from a.k").fetchall() == [(100,)],
    "count": lambda: table.scan().count() == 100,
    "filter": lambda: table.scan(where="id < 5").to_arrow().num_rows == 5,
    "lake": lambda: in_lake.scan().to_arrow().num_rows == 100,
    "lake count": lambda: in_lake.scan().count() == 100,
    "snapshots": lambda: in_lake.lake.snapshots().num_rows >= 1,
}

def ends(call):
    try:
        return call() is True
    except lh.StorageError as e:
        return "ulimit -n" in str(e)

most = len(os.listdir("/proc/self/fd")) + 50
resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for _ in range(int(sys.argv[2])):
    os.close(held.pop())
ended = {name: ends(call) for _ in range(2) for name, call in calls.items()}
for fd in held:
    os.close(fd)
print(all(ended.values()) and all(call() is True for call in calls.values()), ended)
con.close()
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
@pytest.mark.parametrize("left", [0, 1, 2, 20])
def test_calls_end_and_go_on_once_there_is_room(left: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(left)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("True "), (done.stdout, done.returncode, done.stderr[-2000:])


CLOSED = """
import os, sys
for fd in range(3):
    os.close(fd)
import lakehead as lh

con = lh.connect(sys.argv[1])
table = con.create_table("a.t", [("id", "int64")])
for fd in range(3):
    try:
        os.write(fd, b"what a library prints")
    except OSError:
        pass
table.append([{"id": 1}])
files = [os.path.realpath(f"/dev/fd/{fd}") for fd in range(3)]
lh.connect(con.uri).close()
con.close()
with open(sys.argv[2], "w") as out:
    print(*files, file=out)
"""


def test_no_file_of_ours_gets_the_number_of_a_closed_standard_stream(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED, tmp_path / "data", tmp_path / "files"], timeout=WAIT_SECONDS)
    assert done.returncode == 0
    assert set((tmp_path / "files").read_text().split()) == {os.devnull}


def test_a_command_without_standard_streams_ends_as_with_them(tmp_path: Path) -> None:
    def run(closed: str, *words: str) -> int:
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "lakehead.cli.main"]
        done = subprocess.run([*command, "--uri", str(tmp_path), *words], capture_output=True, timeout=WAIT_SECONDS)
        assert done.stdout == done.stderr == b""  # no error beside what a command prints, either
        return done.returncode

    assert run("<&- >&- 2>&-", "table", "create", "a.t", "--schema", "id bigint") == 0
    assert run("2>&-", "get", "a.t", "1") == 2
