"""Pins of DataFrames: held while anything in Spark can still read what was pinned, and as long as the session lives.

A DataFrame made from another keeps nothing of it in Python; what they share are the relations in the JVM. So each pin
is held with weak references to the relations that read under it, and is let go of when those are gone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from lakehead.client.leases import Leases, Occasion
from lakehead.lake.union_read import Pin
from lakehead.spark.frame_steps import weak

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

_PATIENCE, _PAUSE_SECONDS = 10, 0.3
"""How often a collection is tried again when there is no room for another lease."""
_SOURCE_RELATION = "DataSourceV2Relation"


@dataclass(frozen=True, eq=False)
class _Held:
    pinned: Pin
    relations: tuple[Any, ...]


def hold_pin(spark: SparkSession, leases: Leases, pinned: Pin, relations: Sequence[Any]) -> None:
    """Hold a pin while what reads under it, of which these are weak references, is reachable in the JVM and the session
    lives."""
    context = spark.sparkContext
    holder = next((h for h in leases.before if isinstance(h, _Holder) and h.context is context), None)
    if holder is None:
        holder = _Holder(context)
        leases.before.append(holder)
    holder.add(_Held(pinned, tuple(relations)))


def weak_tables(frame: DataFrame) -> list[Any]:
    """Weak references to the tables of the data source that a frame reads, which all plans that read them share."""
    found, context = [], frame.sparkSession.sparkContext
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves().iterator()
    while leaves.hasNext():
        leaf = leaves.next()
        if leaf.getClass().getSimpleName() == _SOURCE_RELATION:
            found.append(weak(context, leaf.table()))
    return found


class _Holder:
    """Pins of one connection in one Spark application. Thread-safe."""

    def __init__(self, context: SparkContext) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._held: list[_Held] = []

    def add(self, held: _Held) -> None:
        with self._lock:
            self._held.append(held)

    def __call__(self, occasion: Occasion) -> None:
        """Let go of pins that nothing can read under any more; see `lakehead.client.leases.Leases`."""
        if self.context._jsc is None:  # stopped
            self._held = []
        elif occasion != "open":
            over = self._over(collect=occasion == "full")
            for _ in range(_PATIENCE if occasion == "full" else 0):
                if over:
                    break
                # Py4J tells the JVM in a thread of its own what Python has dropped.
                threading.Event().wait(_PAUSE_SECONDS)
                over = self._over(collect=True)
            with self._lock:
                self._held = [h for h in self._held if h not in over]

    def _over(self, *, collect: bool) -> set[_Held]:
        with self._lock:
            held = list(self._held)
        try:
            if collect:
                # What Python has dropped but not collected is still reachable in the JVM.
                gc.collect()
                self.context._jvm.java.lang.System.gc()
            return {h for h in held if all(r.refersTo(None) for r in h.relations)}
        except (Py4JError, OSError, AttributeError):
            # The JVM is gone, or going while the session stops.
            return set(held)
