"""The streaming queries that are killed, as their driver begins them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tests.crash.query_history import COPIED, KEY, SOURCE

import lakehead.spark as lhs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from lakehead.spark.change_feed import ScdType
    from lakehead.spark.layers import Layers

Begin: TypeAlias = "Callable[[], StreamingQuery]"


def queries_of(kind: str, spark: SparkSession, uri: str, checkpoints: str) -> dict[str, Begin]:
    """By name, what begins each query of a kind of step, from its checkpoint if it has one."""

    def stream(table: str) -> DataFrame:
        options = {"uri": uri, "table": table, "start": "earliest"}
        return spark.readStream.format("lakehead").options(**options).load()

    def copy(source: str, target: str) -> StreamingQuery:
        sink = {"uri": uri, "table": target, "checkpointLocation": f"{checkpoints}/{target}"}
        return stream(source).writeStream.format("lakehead").options(**sink).start()

    def layers() -> StreamingQuery:
        return lhs.pipeline(stream(SOURCE), layered, checkpoint=f"{checkpoints}/layers")

    def changes(scd_type: ScdType) -> StreamingQuery:
        feed = stream(SOURCE).selectExpr(f"{KEY} as k", "n ^ 5 as lsn", "if(n % 7 = 0, null, s) as s")
        return lhs.apply_changes(
            feed, f"l.scd{scd_type}", keys="k", sequence_by="lsn", apply_as_deletes="s is null",
            column_list=["k", "s"], stored_as_scd_type=scd_type, checkpoint=f"{checkpoints}/scd{scd_type}",
        )  # fmt: skip

    match kind:
        case "stream":
            return {source: functools.partial(copy, source, target) for source, target in COPIED.items()}
        case "pipeline":
            return {"layers": layers}
        case _:
            return {"type 1": functools.partial(changes, 1), "type 2": functools.partial(changes, 2)}


def layered(batch: DataFrame, out: Layers) -> None:
    """Bronze has all rows, silver the newest of each key, gold counts rows, and the keys that silver did not have."""
    from pyspark.sql import functions as F

    of_key = batch.groupBy("w", F.expr(KEY).alias("k")).agg(
        F.max("n").alias("n"), F.count("*").alias("many"), F.sum("n").alias("total")
    )
    known = lhs.lookup_join(of_key, "l.silver", on="k", columns=["newest"])
    out.append("l.bronze", batch.select("w", "n", "s"))
    out.upsert("l.silver", known.where("newest is null or newest < n").selectExpr("k", "w", "n as newest"))
    totals = known.groupBy("w").agg(
        F.sum("many").alias("many"), F.sum("total").alias("total"), F.expr("count_if(newest is null)").alias("keys")
    )
    out.accumulate("l.gold", totals, sum=["many", "total", "keys"])
