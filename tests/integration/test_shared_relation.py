"""Threads that share a relation take turns: DuckDB itself is ended by a signal then, or waits for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import collections, sys, threading, lakehead as lh

folder, how = sys.argv[1:]
with lh.connect(folder) as con:
    con.create_table("t", [("k", "int64")]).append([{"k": n} for n in range(20_000)])
    for _ in range(10):
        relation, counts = con.sql("from t"), collections.Counter()

        def call(work):
            try:
                work()
            except lh.SqlError as e:
                counts[str(e)] += 1

        fetch = lambda: [relation.fetchmany(100) for _ in range(20)]
        others = {"len": [lambda: len(relation)] * 2, "fetch": [fetch] * 2, "close": [lambda: relation.close()]}[how]
        threads = [threading.Thread(target=call, args=(work,), daemon=True) for work in (fetch, *others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert all("closed" in told for told in counts), counts
"""


@pytest.mark.parametrize("how", ["len", "fetch", "close"])
def test_threads_that_share_one(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tmp_path), how]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
