"""Each event once: a flow of Spark's declarative pipelines from a log table to a keyed one."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

URI = os.environ["LAKEHEAD_URI"]

dp.create_sink("clean", "lakehead", {"uri": URI, "table": "silver.clean", "primary_key": "event_id"})


@dp.append_flow(target="clean")
def events() -> DataFrame:
    """All events, late ones and those that were delivered twice, too."""
    spark = SparkSession.active()
    return spark.readStream.format("lakehead").options(uri=URI, table="bronze.events", start="earliest").load()
