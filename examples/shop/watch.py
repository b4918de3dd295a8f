"""What the page shows: the newest of gold, the newest alerts, and how fresh each layer is, all of it pushed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import lakehead as lh
from examples.shop import tables
from examples.shop.freshness import Arrivals, Sums, percentiles
from examples.shop.model import micros
from examples.shop.tables import COUNTS, SALES, Layers

ALERTS_SHOWN = 8
MINUTES_SHOWN = 10
RECENT_US = 2_000_000


class Watch:
    """Follows the tables from when it is made until it is closed."""

    def __init__(self, con: lh.Connection, layers: Layers) -> None:
        self.layers = layers
        self._begin = _now_us()
        self._bronze, self._silver, self._gold = Arrivals(), Arrivals(), Sums()
        self._funnel: dict[int, dict[str, int]] = {}
        self._revenue: dict[str, dict[str, int]] = {}
        self._last: dict[str, int] = {}
        self._alerts: deque[dict[str, Any]] = deque(maxlen=ALERTS_SHOWN)
        self._counts = {"events": 0, "alerts": 0}
        self._lock = threading.Lock()
        self._subscriptions: list[lh.Subscription] = []
        self._threads: list[threading.Thread] = []
        self._follow(con.table(tables.EVENTS), self._bronze_rows, columns=["sent_at"])
        self._follow(con.table(layers.events), self._silver_rows, columns=["sent_at"])
        self._follow(con.table(layers.funnel), self._funnel_rows, start="full")
        self._follow(con.table(layers.revenue), self._revenue_rows, start="full")
        self._follow(con.table(tables.ALERTS), self._alert_rows, start="earliest")

    def _follow(self, table: lh.Table, take: Callable[[pa.RecordBatch], None], **how: Any) -> None:
        subscription = table.subscribe(**how)

        def run() -> None:
            for batch in subscription:
                take(batch.rows)

        self._subscriptions.append(subscription)
        self._threads.append(threading.Thread(target=run, name=f"watch {table.name}", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Stop following."""
        for subscription in self._subscriptions:
            subscription.close()
        for thread in self._threads:
            thread.join()

    # ---- what comes -------------------------------------------------------------------------------------------------

    def _bronze_rows(self, rows: pa.RecordBatch) -> None:
        self._bronze.saw(_now_us(), micros(rows["sent_at"]))
        self._counts["events"] += rows.num_rows

    def _silver_rows(self, rows: pa.RecordBatch) -> None:
        now_us = _now_us()
        first = rows.filter(pc.equal(rows["__change_type"], "+I"))  # what comes again is an update
        self._silver.saw(now_us, micros(first["sent_at"]))

    def _funnel_rows(self, rows: pa.RecordBatch) -> None:
        self._newest(rows, "minute", self._funnel, COUNTS)

    def _revenue_rows(self, rows: pa.RecordBatch) -> None:
        self._newest(rows, "category", self._revenue, SALES)

    def _newest(
        self, rows: pa.RecordBatch, key: str, into: dict[Any, dict[str, int]], columns: tuple[str, ...]
    ) -> None:
        now_us = _now_us()
        new = rows.filter(pc.is_in(rows["__change_type"], pa.array(["+I", "+U"])))
        if not new.num_rows:
            return
        keys = micros(new[key]).tolist() if key == "minute" else new[key].to_pylist()
        values = zip(*(new[c].to_pylist() for c in columns), strict=True)
        with self._lock:
            for k, value in zip(keys, values, strict=True):
                into[k] = dict(zip(columns, value, strict=True))
            self._last[key] = max(self._last.get(key, 0), int(micros(new["last_sent"]).max()))
            if len(self._last) == 2:
                self._gold.saw(now_us, min(self._last.values()))

    def _alert_rows(self, rows: pa.RecordBatch) -> None:
        with self._lock:
            self._counts["alerts"] += rows.num_rows
            for row in rows.select(["user_id", "clicks", "sent_at", "alert_at"]).to_pylist():
                sent, told = row["sent_at"].timestamp(), row["alert_at"].timestamp()
                self._alerts.appendleft(
                    {"user": row["user_id"], "clicks": row["clicks"], "at": told, "ms": round((told - sent) * 1e3, 1)}
                )

    # ---- what is shown ----------------------------------------------------------------------------------------------

    def freshness(self, since_us: int, until_us: int) -> dict[str, dict[str, Any]]:
        """How long events that were sent in ``[since, until)`` were under way to each layer."""
        sent, took = self._bronze.between(since_us, until_us)
        return {
            "bronze": percentiles(took),
            "silver": self._silver.percentiles(since_us, until_us),
            "gold": percentiles(self._gold.took(sent)),
        }

    def state(self) -> dict[str, Any]:
        """Everything the page shows, as plain values."""
        now_us = _now_us()
        with self._lock:
            funnel = [{"minute": m // 1_000_000, **self._funnel[m]} for m in sorted(self._funnel)[-MINUTES_SHOWN:]]
            revenue = [{"category": c, **self._revenue[c]} for c in sorted(self._revenue)]
            alerts = list(self._alerts)
            counts = dict(self._counts)
        recent = self.freshness(now_us - RECENT_US, now_us)
        return {
            "at": now_us / 1e6,
            "variant": "three chained queries" if self.layers.clean else "one pipeline query",
            "seconds": round((now_us - self._begin) / 1e6, 1),
            "events": counts["events"],
            "rate": round(recent["bronze"]["events"] / (RECENT_US / 1e6)),
            "funnel": funnel,
            "revenue": revenue,
            "alerts": alerts,
            "alerts_total": counts["alerts"],
            "freshness": recent,
        }


def _now_us() -> int:
    return time.time_ns() // 1000
