"""A process with a Spark session of ours: says what it is, and lives until its standard input ends.

``python spark_session.py FOLDER SETTINGS``: a data folder, and as JSON what `lakehead.spark.session` is called with.
"""

from __future__ import annotations

import json
import sys

import lakehead as lh
import lakehead.spark as lhs

if __name__ == "__main__":
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    with lh.connect(folder) as con:
        spark = lhs.session(con, **settings)
        # Shuffled rows are in files, and Python workers run.
        assert spark.range(1000).repartition(4).mapInPandas(lambda some: some, "id long").count() == 1000
        context = spark.sparkContext
        print(json.dumps({"conf": dict(context.getConf().getAll()), "app": context.applicationId}), flush=True)
        for _ in sys.stdin:
            executors = context._jsc.sc().getExecutorMemoryStatus().size() - 1
            print(json.dumps({"executors": executors}), flush=True)
        spark.stop()
