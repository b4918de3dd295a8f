from __future__ import annotations

import builtins
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lakehead.env.late_imports import load

_INTERRUPTED = """
import os, signal
times = globals().get("times", 0) + 1
os.kill(os.getpid(), signal.SIGINT)
for _ in range(1000):
    pass
done = True
"""


@pytest.mark.timeout(method="thread")
def test_an_interrupt_cuts_no_import_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lakehead_test_of_late_imports"
    (tmp_path / f"{name}.py").write_text(_INTERRUPTED)
    monkeypatch.syspath_prepend(tmp_path)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(name)
            for _ in range(10**7):  # it may come when the import has ended
                pass
    finally:
        signal.signal(signal.SIGINT, usual)
    found = load(name)
    assert (found.times, found.done) == (1, True)
    assert load(name) is sys.modules.pop(name) is found


def test_what_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="lakehead_none"):
        load("lakehead_none")


def test_a_thread_that_comes_while_another_imports_gets_the_whole_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "lakehead_test_of_two_imports"
    (tmp_path / f"{name}.py").write_text("begun.set()\ngo_on.wait(60)\ndone = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(builtins, "begun", begun, raising=False)
    monkeypatch.setattr(builtins, "go_on", go_on, raising=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load, name)
        assert begun.wait(60)
        second = pool.submit(load, name)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        go_on.set()
        assert first.result(60) is second.result(60) is sys.modules.pop(name)
        assert first.result().done
