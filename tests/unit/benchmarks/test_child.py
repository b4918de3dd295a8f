"""Processes of a benchmark: their lines, and the error when one ends too early."""

from __future__ import annotations

import signal
import sys

import pytest

from lakehead.benchmarks.child import child
from lakehead.errors import UnavailableError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_lines_are_read_and_told() -> None:
    with child("echo", python("print('noise'); print('it is 1'); print(input(), flush=True); input()")) as process:
        process.tell("hello")
        assert process.line("it is") == "it is 1" and process.line() == "hello"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('noise'); raise SystemExit('the port is taken')", "echo ended with 1 .*: noise\nthe port is taken$"),
        ("pass", "echo ended with 0 before it was ready: it said nothing"),
        ("print(12345 * 'x'); raise SystemExit('last')", "x\nlast$"),
    ],
)
def test_what_ends_too_early_is_an_error_with_what_it_said(code: str, told: str) -> None:
    with pytest.raises(UnavailableError, match=told) as caught, child("echo", python(code)) as process:
        process.line("address")
    assert len(caught.value.message) < 2500


def test_telling_what_has_ended_is_an_error() -> None:
    with child("echo", python("print('bye')")) as process, pytest.raises(UnavailableError, match="echo ended with 0"):
        process.line("bye")
        while True:
            process.tell("hello")


def test_it_ends_with_the_block_whatever_it_does() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    with child("deaf", python(deaf), stop=signal.SIGKILL) as process:
        process.line("up")
    assert process._process.returncode == -signal.SIGKILL
