"""Parent of Spark's Python workers (``spark.python.daemon.module``).

What every worker needs is imported once, before the fork, and frozen, so that the garbage collection that PySpark runs
after each task (11 to 35 ms with Arrow and pandas loaded) has nothing to walk. Nothing here may open a connection.
"""

from __future__ import annotations

import gc
import importlib
import sys

WORKER = "pyspark.worker"
PLANNING = ("lakehead.client.flight", "lakehead.spark.source")
"""What the processes need that answer for schemas and plan reads: each kind is a daemon of its own, and its start is
what the first read of a session waits for."""
WORKING = (
    *PLANNING,
    "pyspark.sql.pandas.serializers",
    "lakehead.iceberg.lake_format",
    "lakehead.tiering.round",
    "lakehead.spark.worker",
)

if __name__ == "__main__":
    from pyspark.daemon import manager

    runs = sys.argv[1] if len(sys.argv) > 1 else WORKER
    for module in (runs, *(WORKING if runs == WORKER else PLANNING)):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    manager()
