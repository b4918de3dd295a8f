"""A process that can start no more threads is told so, and ends as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

_CONNECTS = """
import sys, threading, lakehead as lh

left, usual = int(sys.argv[2]), threading.Thread.start
def start(self):
    global left
    if left <= 0:
        raise RuntimeError("can't start new thread")
    left -= 1
    usual(self)
threading.Thread.start = start
try:
    lh.connect(sys.argv[1])
except lh.OverloadedError as e:
    print(e)
"""


@pytest.mark.parametrize("left", range(5))
def test_connecting_says_what_is_lacking(tmp_path: Path, left: int) -> None:
    command = [sys.executable, "-c", _CONNECTS, str(tmp_path), str(left)]
    done = subprocess.run(command, timeout=WAIT_SECONDS, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "ulimit -u" in done.stdout or left > 2
