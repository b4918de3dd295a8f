"""The Spark part: from bronze to silver and gold, by one query that writes all layers, or by three in a row.

Both end in the same numbers. What a query has read and written stands in its checkpoint: each can be stopped and
started at any time, and goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

import lakehead as lh
import lakehead.spark as lhs
from examples.shop import batches, tables
from examples.shop.tables import CHAIN, COUNTS, ONE, SALES, Layers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from lakehead.spark.layers import Layers as Out

SETTINGS: Mapping[str, Any] = {
    # Micro-batches are small: one task is enough for what they bring, and there is nothing to plan anew between stages.
    "spark.default.parallelism": 1,
    "spark.sql.shuffle.partitions": 1,
    "spark.sql.adaptive.enabled": False,
    # A run of a minute never earns back what the second compiler takes; Spark goes through the text of the error with
    # which a stopped query ends by recursion.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss16m",
}
ORDER_COLUMNS = ["order_id", "user_id", "product_id", "amount_cents", "status", "changed_at"]

Starts: TypeAlias = "Mapping[str, Callable[[], StreamingQuery]]"
"""How to begin queries, by name."""


@dataclass(frozen=True)
class Pipeline:
    """The queries of the shop, on one session.

    Attributes:
        checkpoints: a folder, in which each query has its own.
    """

    con: lh.Connection
    spark: SparkSession
    checkpoints: Path

    def one(self) -> Starts:
        """One query: what a micro-batch brings goes into all layers, or into none.

        It has few rows, so what is left to do once Spark has read them is done in Arrow.
        """

        silver, known = self.con.table(ONE.events), self._known()

        def step(batch: DataFrame, out: Out) -> None:
            rows = batches.new(batch.toArrow(), silver, *known)
            if len(rows):
                out.upsert(ONE.events, rows)
                self._accumulate(out, rows, ONE)

        return {"one": lambda: self._query(self._stream(tables.EVENTS), step, "one")}

    def chain(self) -> Starts:
        """Three queries, each of which reads what the one before it has written."""
        clean, events, known = str(CHAIN.clean), CHAIN.events, self._known()

        def enrich(batch: DataFrame, out: Out) -> None:
            rows = batches.inserted(batch.toArrow())
            if len(rows):
                out.upsert(events, batches.enriched(rows, *known))

        def count(batch: DataFrame, out: Out) -> None:
            rows = batches.inserted(batch.toArrow())
            if len(rows):
                self._accumulate(out, rows, CHAIN)

        return {
            "clean": lambda: self._query(self._stream(tables.EVENTS), self._copied_to(clean), clean),
            "enrich": lambda: self._query(self._stream(clean, changelog="true"), enrich, events),
            "count": lambda: self._query(self._stream(events, changelog="true"), count, "count"),
        }

    def orders(self) -> Starts:
        """What the orders database tells of its changes, in whatever order it comes, is a table again."""
        how: Any = {"keys": ["order_id"], "sequence_by": "seq", "apply_as_deletes": "op = 'd'"}
        how |= {"column_list": ORDER_COLUMNS, "checkpoint": self._at("orders"), "trigger": "1 second"}
        return {"orders": lambda: lhs.apply_changes(self._stream(tables.CHANGES), tables.ORDERS, **how)}

    def _known(self) -> tuple[lh.Table, lh.Table]:
        """What is looked up of users and products."""
        return self.con.table(tables.USERS), self.con.table(tables.PRODUCTS)

    def _stream(self, table: str, **options: Any) -> DataFrame:
        source = {"uri": self.con.uri, "table": table, "start": "earliest", **options}
        return self.spark.readStream.format("lakehead").options(**source).load()

    def _query(self, stream: DataFrame, step: Callable[[DataFrame, Out], None], name: str) -> StreamingQuery:
        return lhs.pipeline(stream, step, checkpoint=self._at(name))

    def _copied_to(self, table: str) -> Callable[[DataFrame, Out], None]:
        return lambda batch, out: out.upsert(table, batch)

    def _accumulate(self, out: Out, events: pa.Table, layers: Layers) -> None:
        """Add events to gold, each of which comes once."""
        for table, key, sums in ((layers.funnel, "minute", COUNTS), (layers.revenue, "category", SALES)):
            out.accumulate(table, batches.summed(events, key, sums), sum=sums, max=["last_sent"])

    def _at(self, name: str) -> str:
        return (self.checkpoints / name).as_uri()


class Queries:
    """Queries that run until they are stopped; one whose table was altered is begun again, and goes on where it was."""

    def __init__(self) -> None:
        self._starts: dict[str, Callable[[], StreamingQuery]] = {}
        self._running: dict[str, StreamingQuery] = {}

    def start(self, starts: Starts) -> None:
        """Begin queries. To be called in the thread that made the session."""
        for name, begin in starts.items():
            self._starts[name] = begin
            self._running[name] = begin()

    def follow(self) -> list[str]:
        """Begin queries again that ended because columns changed; the names of those that did.

        Raises:
            StreamingQueryException: a query ended for another reason.
        """
        ended = [name for name, query in self._running.items() if not query.isActive]
        for name in ended:
            failure = self._running[name].exception()
            if failure is not None and "SchemaChangedError" not in str(failure):
                raise failure
            self._running[name] = self._starts[name]()
        return ended

    def catch_up(self) -> None:
        """Return once all that was written before is in every layer: each query is waited for after those it reads."""
        for query in self._running.values():
            query.processAllAvailable()

    def stop(self, names: Iterable[str] | None = None) -> None:
        """Stop these queries, None for all; what they did stands in their checkpoints."""
        for name in list(self._running if names is None else names):
            self._running.pop(name).stop()
