"""The demo's subscriber: a process that gets every flight pushed and measures how long each was under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehead.api.connection import connect
from lakehead.api.subscription import Batch, Subscription
from lakehead.demo.child import Parent
from lakehead.env import SystemClock
from lakehead.types import TabletId


def main(arguments: Sequence[str]) -> int:
    """``URI ROWS PACED``: receive that many rows of `nyc.flights`, or as many as come until the demo closes us."""
    uri, rows, paced = arguments[0], int(arguments[1]), int(arguments[2])
    parent = Parent()
    try:
        with (
            connect(uri) as con,
            con.table("nyc.flights").subscribe("earliest", columns=["flight_id", "sent_at"]) as subscription,
        ):
            parent.tell("ready")

            def close_at_end() -> None:
                for _ in parent.messages():
                    pass
                subscription.close()

            threading.Thread(target=close_at_end, daemon=True).start()
            parent.tell("report", **_receive(subscription, rows, paced))
    except BaseException as e:
        parent.tell_error(e)
        return 1
    return 0


def _receive(subscription: Subscription, rows: int, paced: int) -> dict[str, object]:
    """Keep each batch with its time of arrival; look at them when all have come, so that looking delays nothing."""
    clock = SystemClock()
    batches: list[tuple[int, Batch]] = []
    received = 0
    for batch in subscription:
        batches.append((clock.now_us(), batch))
        received += batch.rows.num_rows
        if received >= rows:
            break
    ids: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    micros: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    offsets: dict[TabletId, list[npt.NDArray[np.int64]]] = {}
    for came_at, batch in batches:
        ids.append(batch.rows["flight_id"].to_numpy())
        micros.append(came_at - batch.rows["sent_at"].cast(pa.int64()).to_numpy())
        offsets.setdefault(batch.tablet, []).append(batch.rows["__offset"].to_numpy())
    every, took = np.concatenate(ids), np.concatenate(micros)
    each_tablet = [np.concatenate(parts) for parts in offsets.values()]
    return {
        "rows": received,
        "distinct": len(np.unique(every)),
        "ordered": all(np.array_equal(o, np.arange(len(o))) for o in each_tablet),
        "paced": _percentiles(took[every < paced]),
        "burst": _percentiles(took[every >= paced]),
    }


def _percentiles(micros: npt.NDArray[np.int64]) -> dict[str, float] | None:
    """Milliseconds; None without rows."""
    if len(micros) == 0:
        return None
    p50, p99 = np.percentile(micros, [50, 99])
    return {"p50_ms": round(float(p50) / 1000, 2), "p99_ms": round(float(p99) / 1000, 2)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
