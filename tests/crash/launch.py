"""Starts a process of the product with the named points in it.

* ``launch.py server --data ...``: any `lakehead` command
* ``launch.py rounds URI``: rounds in this process: a table name a line in, a JSON line out for each
* ``launch.py -m MODULE ARGS``: a module, as Spark starts its Python workers
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time

sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tests.crash.points import PLAN_VARIABLE, die_with_parent, install  # noqa: E402

import lakehead as lh  # noqa: E402


def rounds(uri: str) -> None:
    """Run a round of each table named on standard input."""
    import lakehead.iceberg.lake_format  # noqa: F401

    con = _connect(uri)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        try:
            result = con.tier(line.strip())
            answer: dict[str, object] = {
                "snapshot_id": result.snapshot_id,
                "rows": result.rows,
                "deletes": result.deletes,
            }
        except lh.LakeheadError as e:
            answer = {"error": type(e).__name__, "message": str(e)}
        print(json.dumps(answer), flush=True)


def _connect(uri: str) -> lh.Connection:
    """Connect to a server that may be dead just now."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return lh.connect(uri)
        except lh.UnavailableError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)


if __name__ == "__main__":
    die_with_parent()
    if plan := os.environ.get(PLAN_VARIABLE):
        install(plan)
    if sys.argv[1] == "rounds":
        rounds(sys.argv[2])
    elif sys.argv[1] == "-m":
        module, sys.argv[:] = sys.argv[2], sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = "lakehead"
        from lakehead.cli.main import run

        run()
