"""A process that Spark starts alone connects before it loads anything, however long that takes."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

from lakehead.spark.own_python import quick_python

WORKER = """
import os, sys
sys.stdin.readline()  # what it loads takes until it is told
from pyspark.util import local_connect_and_auth
if __name__ == "__main__":
    file, connection = local_connect_and_auth(os.environ["PYTHON_WORKER_FACTORY_SOCK_PATH"], None)
    with connection, file:
        file.write(repr((os.getpid(), sys.argv[1:], sys.path[0] == os.getcwd(), __name__)).encode())
"""


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as spark:
        spark.bind(str(tmp_path / "s"))
        spark.settimeout(WAIT_SECONDS)
        yield spark


def started(tmp_path: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    (tmp_path / "late_worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SOCK_PATH": str(tmp_path / "s"), **environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    python = quick_python(str(tmp_path))
    return subprocess.Popen([python, *command], cwd=tmp_path, env=environment, text=True, **pipes)


def test_it_connects_before_it_loads_anything(tmp_path: Path, listening: socket.socket) -> None:
    listening.listen()
    process = started(tmp_path, "-m", "late_worker", "a b", "-m")
    connection, _ = listening.accept()
    with connection:
        process.communicate("go on\n", timeout=WAIT_SECONDS)
        connection.settimeout(WAIT_SECONDS)
        said = b"".join(iter(lambda: connection.recv(4096), b""))
    assert process.returncode == 0
    assert said.decode() == repr((process.pid, ["a b", "-m"], True, "__main__"))


def test_one_that_nobody_waits_for_any_more_says_so(tmp_path: Path) -> None:
    process = started(tmp_path, "-m", "late_worker")
    _, said = process.communicate("go on\n", timeout=WAIT_SECONDS)
    assert process.returncode == 1 and "CANNOT_OPEN_SOCKET" in said


def test_its_folders_are_those_of_the_module(tmp_path: Path, listening: socket.socket) -> None:
    """Not the one that it is started from, whose modules have names of Python's own; none where the user wants none."""
    listening.listen()
    (tmp_path / "late_worker.py").write_text("")
    process = started(tmp_path, "-m", "late_worker", PYTHONSAFEPATH="1")
    _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1 and "No module named late_worker" in said


def test_others_are_started_as_they_are(tmp_path: Path, listening: socket.socket) -> None:
    listening.listen()
    process = started(tmp_path, "-c", "import sys; print('pyspark' in sys.modules, sys.argv[1:])", "a b")
    said, _ = process.communicate(timeout=WAIT_SECONDS)
    assert said.split(maxsplit=1) == ["False", "['a b']\n"]
