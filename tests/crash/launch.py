"""Starts a process of the product with the named points in it.

* ``launch.py server --data ...``: any `lakehead` command
* ``launch.py rounds URI``: rounds and maintenance in this process: ``tier``, ``maintain``, ``clean`` or ``truncate``
  and a table's name a line in, a JSON line out for each
* ``launch.py streams URI CHECKPOINTS KIND [staged] [tasks]``: streaming queries (see `tests.crash.queries`) until they
  are killed; one that ends is begun again from its checkpoint. ``staged`` has them stage whatever they write, ``tasks``
  have tasks do that, however few rows there are
* ``launch.py -m MODULE ARGS``: a module, as Spark starts its Python workers
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tests.crash.points import PLAN_VARIABLE, SNAPSHOTS_KEPT, die_with_parent, install  # noqa: E402

import lakehead as lh  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


def tier(table: lh.Table) -> dict[str, object]:
    """One round."""
    result = table.lake.tier()
    return {"snapshot_id": result.snapshot_id, "rows": result.rows, "deletes": result.deletes}


def maintain(table: lh.Table) -> dict[str, object]:
    """All that there is to compact, and expiry of all but a few snapshots."""
    compacted = table.lake.compact()
    expired = table.lake.expire("0s", keep=SNAPSHOTS_KEPT)
    return {"compacted": compacted.files_before, "snapshots": expired.snapshots, "files": expired.files}


def clean(table: lh.Table) -> dict[str, object]:
    """Removal of orphans, however young."""
    return {"orphans": table.lake.remove_orphans("0s").num_rows}


def truncate(table: lh.Table) -> dict[str, object]:
    """All rows away: the end of each partition's only tablet."""
    return {"ends": {str(tablet.partition[0]): end for tablet, end in table.truncate().items()}}


TASKS: dict[str, Callable[[lh.Table], dict[str, object]]] = {
    "tier": tier,
    "maintain": maintain,
    "clean": clean,
    "truncate": truncate,
}


def rounds(uri: str) -> None:
    """Do what standard input says."""
    import lakehead.iceberg.lake_format  # noqa: F401

    con = _connect(uri)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        task, name = line.split()
        try:
            answer = TASKS[task](con.table(name))
        except lh.LakeheadError as e:
            answer = {"error": type(e).__name__, "message": str(e)}
        print(json.dumps(answer), flush=True)


def streams(uri: str, checkpoints: str, kind: str, *how: str) -> None:
    """Run the queries of a kind."""
    from tests.crash.queries import queries_of

    import lakehead.client.staging as staging

    if "staged" in how:
        staging.GIVEN_BYTES_MAX = -1

    import lakehead.spark as lhs
    import lakehead.spark.foreach_batch as foreach_batch

    if "tasks" in how:
        foreach_batch.SMALL_ROWS = -1

    begins = queries_of(kind, lhs.session(_connect(uri)), uri, checkpoints)
    # In this thread: Spark looks for Python sources in the session that is the thread's.
    queries: dict[str, StreamingQuery | None] = dict.fromkeys(begins)
    while True:
        for name, query in queries.items():
            if query is not None and query.isActive:
                continue
            if query is not None:
                print(f"query {name} ended: {query.exception()}", file=sys.stderr, flush=True)
            try:
                queries[name] = begins[name]()
            except Exception as e:
                print(f"query {name} did not begin: {e}", file=sys.stderr, flush=True)
        threading.Event().wait(0.2)


def _connect(uri: str) -> lh.Connection:
    """Connect to a server that may be dead just now."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return lh.connect(uri, token=os.environ.get("LAKEHEAD_TOKEN"))
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
    elif sys.argv[1] == "streams":
        streams(*sys.argv[2:])
    elif sys.argv[1] == "-m":
        module, sys.argv[:] = sys.argv[2], sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = "lakehead"
        from lakehead.cli.main import run

        run()
