"""A driver of its own for test_spark_twice.py: ``python spark_twice.py URI``.

Standard input has a JSON object a line: of a checkpoint and a table, to have a query on them; an empty one to have it
do all that there is. How that went is printed, a line each.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException

import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def source(spark: SparkSession, uri: str, table: str) -> DataFrame:
    options = {"uri": uri, "table": f"{table}_source", "start": "earliest"}
    return spark.readStream.format("lakehead").options(**options).load()


def copying(stream: DataFrame, uri: str, table: str, checkpoint: str) -> Any:
    """What writes it into a table, once started."""
    return stream.writeStream.format("lakehead").options(uri=uri, table=table, checkpointLocation=checkpoint)


def error_of(query: StreamingQuery) -> str | None:
    """Have it do all that there is; how it ended, None while it runs."""
    try:
        query.processAllAvailable()
    except StreamingQueryException as e:
        return str(e)[:2000]
    return None


def drive(uri: str) -> None:
    spark = lhs.session(uri, master="local[1]")
    query: StreamingQuery | None = None
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted:
            stream = source(spark, uri, wanted["table"])
            query = copying(stream, uri, wanted["table"], wanted["checkpoint"]).start()
        assert query is not None
        print(json.dumps({"id": query.id, "error": error_of(query)}), flush=True)
    spark.stop()


if __name__ == "__main__":
    drive(sys.argv[1])
